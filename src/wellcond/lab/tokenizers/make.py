"""Tokenisers from files, of which only data are read, and tokenisers trained on the text at hand."""

from __future__ import annotations

import contextvars
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wellcond.files import read_regular
from wellcond.lab.data.base import DataError, Dataset, files_or_folders, find_path, report_progress
from wellcond.lab.data.disk import cached_folder
from wellcond.lab.settings import RecipeError
from wellcond.lab.tokenizers.base import (
    SPECIAL,
    ByteTokenizer,
    LibraryTokenizer,
    Tokenizer,
    TokenizerChoice,
    TokenizerFile,
    TrainedTokenizer,
    import_tokenizers,
    text_columns,
    text_fingerprint,
)

TOKENIZER, VOCABULARY, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
VERSION = 3
WORD_PIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BYTE_PAIR_SPECIAL = ("<|endoftext|>",)
ALPHABET = 1000
"""Characters that word pieces are made of; those that are rarer are unknown."""


def make_tokenizer(choice: TokenizerChoice, train: Dataset, what: str, base: Path | None = None) -> Tokenizer:
    """The tokeniser that the field `tokenizer` of a task asks for, trained on `train` if it is to be trained.

    Raises:
        DataError: a file is missing or wrong, or the text does not suffice.
        RecipeError: the file holds another tokeniser than the recipe says.
        MissingExtraError: the tokenizers library is not installed.
    """
    if isinstance(choice, TrainedTokenizer):
        return trained_tokenizer(choice, train, what)
    return ByteTokenizer() if choice == "bytes" else chosen_tokenizer(choice, base or Path.cwd())


def chosen_tokenizer(choice: TokenizerFile, base: Path) -> LibraryTokenizer:
    """The tokeniser of a file or folder: from the recipe's folder, or else by name in a mirror.

    Raises:
        DataError: it is in neither, or cannot be read.
        RecipeError: it is not the one of `sha256`.
    """
    path = find_path(choice.file, base, "task.tokenizer.file")
    tokenizer = read_tokenizer(path)
    if choice.sha256 not in (None, tokenizer.fingerprint):
        raise RecipeError(
            f"task.tokenizer.sha256: {path} is another tokeniser: expected {choice.sha256}, found "
            f"{tokenizer.fingerprint}"
        )
    return tokenizer


def read_tokenizer(path: Path) -> LibraryTokenizer:
    """The tokeniser of a file, or of a folder that has tokenizer.json, or vocab.json with merges.txt.

    Raises: DataError if a file is missing or is not what its name says.
    """
    library = import_tokenizers()
    if path.is_dir():
        path = next((path / name for name in (TOKENIZER, VOCABULARY, MERGES) if (path / name).is_file()), path)
    if path.is_dir():
        raise DataError(
            f"{path}: there is no tokeniser.",
            expected=f"{TOKENIZER}, or {VOCABULARY} with {MERGES}",
            found=files_or_folders(path.iterdir()),
            todo="Copy the files of the tokeniser into the folder.",
        )
    if path.name not in (VOCABULARY, MERGES):
        with _named_errors(str(path), "a tokenizer.json of the tokenizers library"):
            return LibraryTokenizer(library.Tokenizer.from_str(read_regular(path).decode()))
    files = [path.with_name(VOCABULARY), path.with_name(MERGES)]
    with _named_errors(" and ".join(map(str, files)), "the vocabulary and the merges of one byte-level tokeniser"):
        for file in files:
            read_regular(file)  # which refuses a pipe, or names what is missing
        model = library.models.BPE.from_file(*map(str, files))
        if missing := set(library.pre_tokenizers.ByteLevel.alphabet()) - set(library.Tokenizer(model).get_vocab()):
            raise ValueError(f"no token for {len(missing)} of the 256 bytes")
    return byte_pair_tokenizer(model)


@contextmanager
def _named_errors(files: str, expected: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library has no class of its own for errors
        raise DataError(
            f"{files}: the tokeniser cannot be read.",
            expected=expected,
            found=f"{type(error).__name__}: {error}"[:300],
            todo="Correct 'task.tokenizer.file', or copy the files again, all from the same tokeniser.",
        ) from error


def byte_pair_tokenizer(model: Any, *, lower_case: bool = False) -> LibraryTokenizer:
    """A model of byte pairs with what goes in front of it and behind it in GPT-2."""
    library = import_tokenizers()
    tokenizer = library.Tokenizer(model)
    if lower_case:
        tokenizer.normalizer = library.normalizers.Lowercase()
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return _with_special_tokens(tokenizer)


def word_piece_tokenizer(vocabulary: dict[str, int], *, lower_case: bool) -> LibraryTokenizer:
    """A vocabulary of word pieces with what goes in front of it and behind it in BERT."""
    library = import_tokenizers()
    tokenizer = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    return _with_special_tokens(tokenizer)


def _with_special_tokens(tokenizer: Any) -> LibraryTokenizer:
    vocabulary = tokenizer.get_vocab()
    special = dict.fromkeys(name for names in SPECIAL.values() for name in names if name in vocabulary)
    tokenizer.add_special_tokens(sorted(special, key=vocabulary.__getitem__))
    return LibraryTokenizer(tokenizer)


def trained_tokenizer(settings: TrainedTokenizer, dataset: Dataset, what: str) -> LibraryTokenizer:
    """The tokeniser of a dataset, from the cache or trained now; the same text gives the same tokeniser.

    Raises:
        DataError: the text is too small for the vocabulary, or the vocabulary for the text.
        CacheError: the cache cannot be written.
    """
    library = import_tokenizers()
    made_from = {
        "version": VERSION,
        "library": library.__version__,
        "text": text_fingerprint(dataset),
        "settings": settings.model_dump(mode="json"),
    }

    def make(folder: Path) -> None:
        (folder / TOKENIZER).write_text(_train(settings, _Texts(dataset, settings.documents, what), what))

    folder = cached_folder("tokenizers", made_from, make, f"training a tokeniser on {what}")
    return LibraryTokenizer(library.Tokenizer.from_str((folder / TOKENIZER).read_text()))


class _Texts:
    """The first documents that are not blank, again and again."""

    def __init__(self, dataset: Dataset, documents: int | None, what: str) -> None:
        self.dataset, self.what = dataset, what
        self.count = min(documents or len(dataset), len(dataset))
        self.listening = contextvars.copy_context()  # the library reads in a thread of its own, where nobody listens

    def __iter__(self) -> Iterator[str]:
        done = 0
        for texts, *_ in text_columns(self.dataset):
            yield from (text for text in texts[: self.count - done] if text.strip())
            done = min(done + len(texts), self.count)
            self.listening.run(report_progress, f"training a tokeniser on {self.what}, documents", done, self.count)
            if done == self.count:
                return


def _train(settings: TrainedTokenizer, texts: Iterable[str], what: str) -> str:
    """The content of tokenizer.json."""
    tokenizer, smallest = (_word_pieces if settings.train == "wordpiece" else _byte_pairs)(settings, texts)
    found = tokenizer.get_vocab_size()
    if found != settings.vocabulary:
        small = settings.vocabulary < smallest
        parts = f"text with {settings.vocabulary} parts of words that occur at least {settings.min_frequency} times"
        raise DataError(
            f"{what}: the text does not give a {settings.train} tokeniser of {settings.vocabulary} tokens.",
            expected=f"a vocabulary of at least {smallest}: special tokens and single characters" if small else parts,
            found=f"a vocabulary of {settings.vocabulary}" if small else f"{found}",
            todo=f"{'Raise' if small else 'Train on more text, or lower'} task.tokenizer.vocabulary.",
        )
    return tokenizer.to_str()


def _byte_pairs(settings: TrainedTokenizer, texts: Iterable[str]) -> tuple[Any, int]:
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
    tokenizer.train_from_iterator(iter(texts), trainer)
    return tokenizer, len(alphabet) + len(BYTE_PAIR_SPECIAL)


def _word_pieces(settings: TrainedTokenizer, texts: Iterable[str]) -> tuple[Any, int]:
    """The tokeniser, and the size of the smallest one.

    The library numbers continued characters (##e) in the order of a hash table, another one in every process, and
    decides between pairs that are equally frequent by these numbers. So the characters are found in a first pass and
    given to the second one in order, as if they were special tokens, which the library numbers first.
    """
    library = import_tokenizers()
    vocabulary = {name: number for number, name in enumerate(WORD_PIECE_SPECIAL)}
    normalizer = word_piece_tokenizer(vocabulary, lower_case=settings.lower_case).inner.normalizer
    seen: Counter[str] = Counter()
    for text in texts:
        seen.update(normalizer.normalize_str(text))
    common = sorted(seen, key=lambda character: (-seen[character], character))
    alphabet = sorted([character for character in common if not character.isspace()][:ALPHABET])

    def run(first: list[str], size: int) -> dict[str, int]:
        pieces = word_piece_tokenizer(vocabulary, lower_case=settings.lower_case).inner
        trainer = library.trainers.WordPieceTrainer(
            vocab_size=size,
            min_frequency=settings.min_frequency,
            special_tokens=first,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        pieces.train_from_iterator(iter(texts), trainer)
        return pieces.get_vocab(with_added_tokens=False)

    characters = sorted(set(run(list(WORD_PIECE_SPECIAL), 0)) - set(WORD_PIECE_SPECIAL))
    ordered = [*WORD_PIECE_SPECIAL, *characters]
    trained = run(ordered, settings.vocabulary)
    return word_piece_tokenizer(trained, lower_case=settings.lower_case).inner, len(ordered)
