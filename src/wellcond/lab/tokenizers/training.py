"""Tokenisers trained on the text at hand, by the `tokenizers` library; the same text gives the same tokeniser."""

from __future__ import annotations

import contextvars
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from wellcond.lab.data.base import Dataset
from wellcond.lab.data.disk_cache import CacheEntry
from wellcond.lab.data.errors import DataError
from wellcond.lab.data.progress import tell
from wellcond.lab.data.text_batches import text_batches, text_digest
from wellcond.lab.tokenizers.files import byte_pair_tokenizer, word_piece_tokenizer
from wellcond.lab.tokenizers.library_tokenizer import LibraryTokenizer, import_tokenizers
from wellcond.lab.tokenizers.settings import TrainedTokenizer

VERSION = 1
WORD_PIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BYTE_PAIR_SPECIAL = ("<|endoftext|>",)
ALPHABET = 1000
"""Characters that word pieces are made of; those that are rarer are unknown."""

Texts = Callable[[], Iterable[str]]


def trained_tokenizer(settings: TrainedTokenizer, split: Dataset, what: str) -> LibraryTokenizer:
    """The tokeniser of a split, from the cache or trained now.

    Raises:
        DataError: the text is too small for the vocabulary, or the vocabulary for the text.
        CacheError: the cache cannot be written.
    """
    library = import_tokenizers()
    made_from = {
        "version": VERSION,
        "library": library.__version__,
        "text": text_digest(split),
        "settings": settings.model_dump(mode="json"),
    }
    entry = CacheEntry("tokenizers", made_from)
    content = entry.read("tokenizer.json")
    if content is None:
        waiting = f"waiting for another process: training a tokeniser on {what}"
        with entry.locked(lambda: tell(waiting, 0, 1)):
            content = entry.read("tokenizer.json")
            if content is None:
                content = train(settings, split, what).encode()
                entry.write("tokenizer.json", content)
    return LibraryTokenizer(library.Tokenizer.from_str(content.decode()))


def train(settings: TrainedTokenizer, split: Dataset, what: str) -> str:
    """The content of tokenizer.json."""
    count = len(split) if settings.documents is None else min(settings.documents, len(split))
    listening = contextvars.copy_context()  # the library reads texts in a thread of its own, where nobody listens

    def texts() -> Iterator[str]:
        done = 0
        for batch in text_batches(split):
            yield from (text for text in batch[: count - done] if text.strip())
            done += len(batch)
            listening.run(tell, f"training a tokeniser on {what}, documents", min(done, count), count)
            if done >= count:
                return

    if next(iter(texts()), None) is None:
        raise DataError(
            f"{what}: there is no text to train a tokeniser on.",
            expected="at least one document that is not empty",
            found=f"{count} documents without text",
            todo="Check the data, or name another column in 'input'.",
        )
    make = _word_pieces if settings.train == "wordpiece" else _byte_pairs
    tokenizer, smallest = make(settings, texts)
    _check_size(settings, tokenizer.get_vocab_size(), smallest, what)
    return tokenizer.to_str()


def _byte_pairs(settings: TrainedTokenizer, texts: Texts) -> tuple[Any, int]:
    """The tokeniser, and the size of the smallest one."""
    library = import_tokenizers()
    tokenizer = byte_pair_tokenizer(library.models.BPE(), lower_case=settings.lower_case).inner
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=settings.vocabulary,
        min_frequency=settings.min_frequency,
        special_tokens=list(BYTE_PAIR_SPECIAL),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer, len(alphabet) + len(BYTE_PAIR_SPECIAL)


def _word_pieces(settings: TrainedTokenizer, texts: Texts) -> tuple[Any, int]:
    """The tokeniser, and the size of the smallest one.

    The library numbers continued characters (##e) in the order of a hash table, another one in every process, and
    decides between pairs that are equally frequent by these numbers. So the characters are found in a first pass and
    given to the second one in order, as if they were special tokens, which the library numbers first.
    """
    library = import_tokenizers()
    empty = dict.fromkeys(WORD_PIECE_SPECIAL)
    vocabulary = {name: number for number, name in enumerate(empty)}
    tokenizer = word_piece_tokenizer(vocabulary, lower_case=settings.lower_case).inner
    seen: Counter[str] = Counter()
    for text in texts():
        seen.update(tokenizer.normalizer.normalize_str(text))
    common = sorted(seen, key=lambda character: (-seen[character], character))
    alphabet = sorted([character for character in common if not character.isspace()][:ALPHABET])

    def run(first: Iterable[str], size: int) -> dict[str, int]:
        pieces = word_piece_tokenizer(vocabulary, lower_case=settings.lower_case).inner
        trainer = library.trainers.WordPieceTrainer(
            vocab_size=size,
            min_frequency=settings.min_frequency,
            special_tokens=list(first),
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        pieces.train_from_iterator(texts(), trainer)
        return pieces.get_vocab(with_added_tokens=False)

    characters = sorted(set(run(WORD_PIECE_SPECIAL, 0)) - set(WORD_PIECE_SPECIAL))
    ordered = list(chain(WORD_PIECE_SPECIAL, characters))
    trained = run(ordered, settings.vocabulary)
    return word_piece_tokenizer(trained, lower_case=settings.lower_case).inner, len(ordered)


def _check_size(settings: TrainedTokenizer, found: int, smallest: int, what: str) -> None:
    if found == settings.vocabulary:
        return
    small = settings.vocabulary < smallest
    raise DataError(
        f"{what}: the text does not give a {settings.train} tokeniser of {settings.vocabulary} tokens.",
        expected=f"a vocabulary of at least {smallest}: special tokens and single characters"
        if small
        else f"text with {settings.vocabulary} parts of words that occur at least {settings.min_frequency} times",
        found=f"a vocabulary of {settings.vocabulary}" if small else f"{found}",
        todo="Raise task.tokenizer.vocabulary." if small else "Lower task.tokenizer.vocabulary, or train on more text.",
    )
