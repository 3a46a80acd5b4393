"""Tokenisers: of bytes, of files and of the hub (of which only data are read), and trained on a text."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field, PositiveInt

from wellcond.errors import DataError, RecipeError, needs_extra
from wellcond.files import read_regular
from wellcond.lab.data.base import Dataset, listed
from wellcond.lab.data.disk import cached_folder, contents, find_in_mirror, in_a_mirror
from wellcond.lab.data.tables import HUB_ID
from wellcond.lab.data.text import Ids, id_type, text_columns, text_fingerprint
from wellcond.lab.settings import Settings

TOKENIZER, VOCABULARY, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
VERSION = 3
WORD_PIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
END_OF_TEXT = "<|endoftext|>"


class TrainedTokenizer(Settings):
    """A tokeniser trained on the training split."""

    train: Literal["wordpiece", "bpe"]
    """Word pieces as in BERT, or byte pairs as in GPT-2."""
    vocabulary: Annotated[int, Field(ge=2, le=10_000_000)]
    """Number of tokens, special ones and single characters among them."""
    lower_case: bool = False
    """Whether texts are written in lower case first; word pieces then lose their accents as well."""
    documents: PositiveInt | None = None
    """Only the first so many documents are looked at; null: all."""


class NamedTokenizer(Settings):
    """A tokeniser that exists."""

    name: str
    """tokenizer.json, or a folder with it or with vocab.json and merges.txt, from the recipe's folder or by name in a
    mirror; or else an id of the hub, such as openai-community/gpt2."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """Refuses any tokeniser but that of this fingerprint."""


def _choose(raw: Any) -> Any:
    if isinstance(raw, dict) and ("train" in raw) != ("name" in raw):
        return (TrainedTokenizer if "train" in raw else NamedTokenizer).model_validate(raw)
    if raw in ("bytes", "characters") or isinstance(raw, (TrainedTokenizer, NamedTokenizer)):
        return raw
    raise ValueError(
        "expected bytes, characters, {train: wordpiece or bpe, vocabulary: 4096} or {name: FOLDER OR ID OF THE HUB}"
    )


TokenizerChoice = Annotated[
    Literal["bytes", "characters"] | TrainedTokenizer | NamedTokenizer, BeforeValidator(_choose)
]
"""Field type of a task."""


class ByteTokenizer:
    """Byte b is token b + 1, and 0 is padding and the end of a document: no text is without tokens, none is unknown."""

    vocabulary_size = 257
    special: ClassVar = {"pad": 0, "end_of_text": 0}
    document_end = 0
    fingerprint = hashlib.sha256(b"bytes, shifted by one").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids from 1 to 256; half a surrogate pair, which UTF-8 does not know, as its three bytes."""
        return [np.add(np.frombuffer(text.encode("utf-8", "surrogatepass"), "u1"), 1, dtype="<u2") for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(id) - 1 for id in ids if id > 0).decode("utf-8", "replace")


class CharacterTokenizer:
    """Character k of the training text, in the order of code points, is token k; nothing stands between documents."""

    special: ClassVar[dict[str, int]] = {}
    document_end = None

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.vocabulary_size = len(self.characters)
        self.fingerprint = hashlib.sha256(f"characters {self.characters}".encode("utf-8", "surrogatepass")).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids from 0; DataError for a character that is not in the training text."""
        known = {character: number for number, character in enumerate(self.characters)}
        try:
            return [np.array([known[character] for character in text], id_type(len(known))) for text in texts]
        except KeyError as error:
            raise DataError(
                f"the character {error.args[0]!r} is not in the training text.",
                expected=f"one of its {len(known)} characters",
                found=repr(error.args[0]),
                todo="Set task.tokenizer: bytes, which knows every text.",
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text."""
        return "".join(self.characters[int(id)] for id in ids)


SPECIAL = {
    "pad": ("[PAD]", "<pad>"),
    "unknown": ("[UNK]", "<unk>"),
    "classify": ("[CLS]", "<s>"),
    "separator": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "end_of_text": (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>"),
}
"""How vocabularies spell the tokens that stand for no text; the first that is there counts."""


def import_tokenizers() -> Any:
    """The module `tokenizers`; MissingExtraError if it is not installed."""
    with needs_extra("tokenizers", "text"):
        import tokenizers
    return tokenizers


class LibraryTokenizer:
    """A `tokenizers.Tokenizer` that neither cuts nor pads; a text that spells a special token has that token."""

    def __init__(self, inner: Any) -> None:
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.vocabulary_size = 1 + max(vocabulary.values(), default=-1)
        found = {kind: [vocabulary[name] for name in names if name in vocabulary] for kind, names in SPECIAL.items()}
        self.special = {kind: ids[0] for kind, ids in found.items() if ids}

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 of the tokeniser as the library writes it."""
        return hashlib.sha256(self.inner.to_str().encode()).hexdigest()

    @property
    def document_end(self) -> int:
        """The token that ends a document in a stream: end of text, or [SEP]; DataError if there is neither."""
        for kind in ("end_of_text", "separator"):
            if kind in self.special:
                return self.special[kind]
        raise DataError(
            "the tokeniser has no token that could end a document.",
            expected=f"one of {listed(SPECIAL['end_of_text'] + SPECIAL['separator'])} in its vocabulary",
            found=f"{self.vocabulary_size} tokens without any of these",
        )

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, in parallel; half a surrogate pair, which the library refuses, is a question mark."""
        ids = id_type(self.vocabulary_size)
        valid = [text.encode("utf-8", "replace").decode() for text in texts]
        encoded = self.inner.encode_batch_fast(valid, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=ids) for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens left out."""
        return self.inner.decode([int(id) for id in ids], skip_special_tokens=True)


Tokenizer = ByteTokenizer | CharacterTokenizer | LibraryTokenizer
"""Text to numbers and back; no special token is added to a text. `fingerprint` covers all that decides the ids, and
`special` has the ids of the special tokens there are, by the keys of `SPECIAL`; `document_end` may be None."""


def make_tokenizer(choice: TokenizerChoice, train: Dataset | None, what: str, base: Path | None = None) -> Tokenizer:
    """The tokeniser that the field `tokenizer` of a task asks for, trained on `train` if it is to be trained.

    A relative path of a file starts at `base`, the recipe's folder; else it is a name in a mirror.
    """
    if choice == "bytes":
        return ByteTokenizer()
    if choice == "characters":
        assert train is not None
        return CharacterTokenizer(
            character for texts, *_ in text_columns(train) for text in texts for character in text
        )
    if isinstance(choice, TrainedTokenizer):
        assert train is not None
        return trained_tokenizer(choice, train, what)
    tokenizer = _read_named(choice.name, base or Path.cwd())
    if choice.sha256 not in (None, tokenizer.fingerprint):
        raise RecipeError(
            f"task.tokenizer.sha256: {choice.name} is another tokeniser: expected {choice.sha256}, found "
            f"{tokenizer.fingerprint}"
        )
    return tokenizer


def _read_named(name: str, base: Path) -> LibraryTokenizer:
    local = base / Path(name).expanduser()
    found = local if local.exists() else find_in_mirror(name)
    if found is not None:
        return read_tokenizer(found)
    if HUB_ID.fullmatch(name):
        return _from_transformers(name, f"a folder {name} {in_a_mirror()}, or access to the hub (no HF_HUB_OFFLINE)")
    raise DataError(
        f"task.tokenizer.name: no such file or folder: {name}",
        expected=f"a folder or tokenizer.json, here or {in_a_mirror()}, or an id such as openai-community/gpt2",
        found=contents(local.parent),
    )


def _from_transformers(place: str, expected: str) -> LibraryTokenizer:
    """The tokeniser of an id of the hub, or of a folder that transformers wrote, without any code of it."""
    with needs_extra("transformers", "text"):
        from transformers import AutoTokenizer
    try:
        return LibraryTokenizer(AutoTokenizer.from_pretrained(place, trust_remote_code=False).backend_tokenizer)
    except Exception as error:  # the library has many classes
        found = f"{type(error).__name__}: {error}"[:300]
        raise DataError(f"{place}: the tokeniser cannot be read.", expected=expected, found=found) from error


def read_tokenizer(path: Path) -> LibraryTokenizer:
    """The tokeniser of a file, or of a folder that has tokenizer.json, or vocab.json with merges.txt.

    Another folder is given to transformers, which knows more formats.
    """
    library = import_tokenizers()
    if path.is_dir():
        files = [path / name for name in (TOKENIZER, VOCABULARY, MERGES) if (path / name).is_file()]
        if not files:
            return _from_transformers(str(path), f"{TOKENIZER}, or {VOCABULARY} and {MERGES}, or tokenizer_config.json")
        path = files[0]
    pair = path.name in (VOCABULARY, MERGES)
    files = [path.with_name(VOCABULARY), path.with_name(MERGES)] if pair else [path]
    try:
        content = [read_regular(file) for file in files]  # which refuses a pipe, or names what is missing
        if not pair:
            return LibraryTokenizer(library.Tokenizer.from_str(content[0].decode()))
        model = library.models.BPE.from_file(*map(str, files))
        if missing := set(library.pre_tokenizers.ByteLevel.alphabet()) - set(library.Tokenizer(model).get_vocab()):
            raise ValueError(f"no token for {len(missing)} of the 256 bytes")
        return tokenizer_of(model)
    except Exception as error:  # the library has no class of its own for errors
        raise DataError(
            f"{' and '.join(map(str, files))}: the tokeniser cannot be read.",
            expected=f"{TOKENIZER} of the tokenizers library, or {VOCABULARY} and {MERGES} of one byte-level tokeniser",
            found=f"{type(error).__name__}: {error}"[:300],
        ) from error


def tokenizer_of(model: Any, *, lower_case: bool = False) -> LibraryTokenizer:
    """A model with what goes in front of it and behind it: of word pieces as in BERT, of byte pairs as in GPT-2."""
    library = import_tokenizers()
    tokenizer = library.Tokenizer(model)
    if isinstance(model, library.models.WordPiece):
        tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lower_case)
        tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = library.decoders.WordPiece()
    else:
        if lower_case:
            tokenizer.normalizer = library.normalizers.Lowercase()
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
    vocabulary = tokenizer.get_vocab()
    special = {name for names in SPECIAL.values() for name in names if name in vocabulary}
    tokenizer.add_special_tokens(sorted(special, key=vocabulary.__getitem__))
    return LibraryTokenizer(tokenizer)


def trained_tokenizer(settings: TrainedTokenizer, dataset: Dataset, what: str) -> LibraryTokenizer:
    """The tokeniser of a dataset, from the cache or trained now; the same text gives the same tokeniser."""
    library = import_tokenizers()
    made_from = {
        "version": VERSION,
        "library": library.__version__,
        "text": text_fingerprint(dataset),
        "settings": settings.model_dump(mode="json"),
    }

    def make(folder: Path) -> None:
        tokenizer, smallest = _train(settings, dataset)
        found, wanted = tokenizer.get_vocab_size(), settings.vocabulary
        if found != wanted:
            raise DataError(
                f"{what}: the text does not give a {settings.train} tokeniser of {wanted} tokens.",
                expected=f"at least {smallest} (special tokens and characters), and text with as many parts of words",
                found=f"{found} tokens",
                todo=f"{'Raise' if wanted < smallest else 'Train on more text, or lower'} task.tokenizer.vocabulary.",
            )
        (folder / TOKENIZER).write_text(tokenizer.to_str())

    folder = cached_folder("tokenizers", made_from, make, f"training a tokeniser on {what}")
    return LibraryTokenizer(library.Tokenizer.from_str((folder / TOKENIZER).read_text()))


def _texts(settings: TrainedTokenizer, dataset: Dataset) -> Iterator[str]:
    """Those of the first documents that are not blank."""
    left = settings.documents or len(dataset)
    for texts, *_ in text_columns(dataset):
        yield from (text for text in texts[:left] if text.strip())
        left -= len(texts)
        if left <= 0:
            return


def _train(settings: TrainedTokenizer, dataset: Dataset) -> tuple[Any, int]:
    """The library's tokeniser, and the size of the smallest one.

    The library numbers continued characters of word pieces (##e) in the order of a hash table, another one in every
    process, and decides between pairs that are equally frequent by these numbers. So the characters are found in a
    first pass and given to the second one in order, as if they were special tokens, which the library numbers first.
    """
    library = import_tokenizers()

    def run(model: Any, trainer: Any, special: list[str], alphabet: list[str], size: int) -> Any:
        tokenizer = tokenizer_of(model, lower_case=settings.lower_case).inner
        options = {"special_tokens": special, "initial_alphabet": alphabet, "limit_alphabet": len(alphabet)}
        made = trainer(vocab_size=size, min_frequency=2, show_progress=False, **options)
        tokenizer.train_from_iterator(_texts(settings, dataset), made)
        return tokenizer

    if settings.train == "bpe":
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer
        return run(library.models.BPE(), trainer, [END_OF_TEXT], alphabet, settings.vocabulary), len(alphabet) + 1

    def word_pieces(vocabulary: dict[str, int]) -> Any:
        return library.models.WordPiece(vocabulary, unk_token="[UNK]")

    def train_pieces(special: list[str], size: int) -> dict[str, int]:
        start = word_pieces({name: number for number, name in enumerate(WORD_PIECE_SPECIAL)})
        tokenizer = run(start, library.trainers.WordPieceTrainer, special, alphabet, size)
        return tokenizer.get_vocab(with_added_tokens=False)

    normalizer = library.normalizers.BertNormalizer(lowercase=settings.lower_case)
    seen: Counter[str] = Counter()
    for text in _texts(settings, dataset):
        seen.update(normalizer.normalize_str(text))
    common = sorted(seen, key=lambda character: (-seen[character], character))
    alphabet = sorted([character for character in common if not character.isspace()][:1000])  # others are unknown
    characters = sorted(set(train_pieces(list(WORD_PIECE_SPECIAL), 0)) - set(WORD_PIECE_SPECIAL))
    ordered = [*WORD_PIECE_SPECIAL, *characters]
    trained = word_pieces(train_pieces(ordered, settings.vocabulary))
    return tokenizer_of(trained, lower_case=settings.lower_case).inner, len(ordered)
