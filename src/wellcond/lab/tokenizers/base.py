"""Text as tokens: what tasks ask of a tokeniser, the two kinds there are, and the tokens of a dataset.

Those are one flat file of token ids, mapped into memory: made once, and found again without reading the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PositiveInt

from wellcond.errors import MissingExtraError
from wellcond.lab.data.base import DataError, Dataset, report_progress
from wellcond.lab.data.disk import cached_folder, canonical_json
from wellcond.lab.data.tables import TableDataset
from wellcond.lab.settings import Settings

VERSION = 3
FIRST_ROWS, MOST_ROWS = 256, 16384
CHARACTERS = 2**21
"""Size that batches aim at: enough for a tokeniser to keep every core busy."""
Ids = NDArray[np.unsignedinteger[Any]]


class TrainedTokenizer(Settings):
    """A tokeniser trained on the training split."""

    train: Literal["wordpiece", "bpe"]
    """Word pieces as in BERT, or byte pairs as in GPT-2."""
    vocabulary: Annotated[int, Field(ge=2, le=10_000_000)]
    """Number of tokens, special ones and single characters among them."""
    lower_case: bool = False
    """Whether texts are written in lower case first; word pieces then lose their accents as well."""
    min_frequency: PositiveInt = 2
    """How often a pair must occur to become a token."""
    documents: PositiveInt | None = None
    """Only the first so many documents are looked at; null: all."""


class TokenizerFile(Settings):
    """A tokeniser that exists."""

    file: str
    """tokenizer.json, or a folder with it or with vocab.json and merges.txt; from the recipe's folder, or by name in a
    mirror."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """Refuses any tokeniser but that of this fingerprint."""


def _choose(raw: Any) -> Any:
    if isinstance(raw, dict) and ("train" in raw) != ("file" in raw):
        return (TrainedTokenizer if "train" in raw else TokenizerFile).model_validate(raw)
    if raw == "bytes" or isinstance(raw, (TrainedTokenizer, TokenizerFile)):
        return raw
    raise ValueError("expected bytes, {train: wordpiece or bpe, vocabulary: 4096} or {file: PATH}")


TokenizerChoice = Annotated[Literal["bytes"] | TrainedTokenizer | TokenizerFile, BeforeValidator(_choose)]
"""Field type of a task."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens that stand for no text; None where a tokeniser has none."""

    pad: int | None = None
    unknown: int | None = None
    classify: int | None = None
    """[CLS]"""
    separator: int | None = None
    """[SEP]"""
    mask: int | None = None
    end_of_text: int | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """All there are, each once, in ascending order."""
        return tuple(sorted({value for value in vars(self).values() if value is not None}))


def id_type(vocabulary_size: int) -> np.dtype[Any]:
    """The smaller of two unsigned types that holds every id.

    Example:
        >>> id_type(50257), id_type(65537)
        (dtype('uint16'), dtype('uint32'))
    """
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


def document_end(tokenizer: Tokenizer) -> int:
    """The token that ends a document in a stream: end of text, or [SEP].

    Raises: DataError if the tokeniser has neither.
    """
    special = tokenizer.special
    end = special.end_of_text if special.end_of_text is not None else special.separator
    if end is None:
        raise DataError(
            "the tokeniser has no token that could end a document.",
            expected=f"one of {', '.join(SPECIAL['end_of_text'] + SPECIAL['separator'][:1])} in its vocabulary",
            found=f"{tokenizer.vocabulary_size} tokens without any of these",
            todo="Add such a token to the tokeniser's file, or train a tokeniser: {train: bpe, vocabulary: 4096}.",
        )
    return end


class ByteTokenizer:
    """Byte b is token b + 1, and 0 is padding and the end of a document: no text is without tokens, none is unknown.

    Example:
        >>> ByteTokenizer().encode_batch(["é", ""])
        [array([196, 170], dtype=uint16), array([], dtype=uint16)]
        >>> ByteTokenizer().decode([196, 170, 0])
        'é'
    """

    vocabulary_size = 257
    special = SpecialTokens(pad=0, end_of_text=0)
    fingerprint = hashlib.sha256(b"bytes, shifted by one").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids from 1 to 256; half a surrogate pair, which UTF-8 does not know, as its three bytes."""
        return [np.add(np.frombuffer(text.encode("utf-8", "surrogatepass"), "u1"), 1, dtype="<u2") for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(id) - 1 for id in ids if id > 0).decode("utf-8", "replace")


SPECIAL = {
    "pad": ("[PAD]", "<pad>"),
    "unknown": ("[UNK]", "<unk>"),
    "classify": ("[CLS]", "<s>"),
    "separator": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "end_of_text": ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>"),
}
"""How vocabularies spell the special tokens; the first that is there counts."""


def import_tokenizers() -> Any:
    """The module `tokenizers`.

    Raises: MissingExtraError if it is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("tokenizers", "text") from error
    return tokenizers


class LibraryTokenizer:
    """A `tokenizers.Tokenizer` that neither cuts nor pads; a text that spells a special token has that token."""

    def __init__(self, inner: Any) -> None:
        """Take over a tokeniser of the library."""
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.vocabulary_size = 1 + max(vocabulary.values(), default=-1)
        found = {kind: [vocabulary[name] for name in names if name in vocabulary] for kind, names in SPECIAL.items()}
        self.special = SpecialTokens(**{kind: ids[0] if ids else None for kind, ids in found.items()})

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 of the tokeniser as the library writes it."""
        return hashlib.sha256(self.inner.to_str().encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, in parallel; half a surrogate pair, which the library refuses, is a question mark."""
        ids = id_type(self.vocabulary_size)
        valid = [text.encode("utf-8", "replace").decode() for text in texts]
        encoded = self.inner.encode_batch_fast(valid, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=ids) for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens left out."""
        return self.inner.decode([int(id) for id in ids], skip_special_tokens=True)


Tokenizer = ByteTokenizer | LibraryTokenizer
"""Text to numbers and back; no special token is added to a text. `fingerprint` covers all that decides the ids."""


# Datasets as tokens


def text_columns(dataset: Dataset) -> Iterator[list[list[str]]]:
    """Batches of rows, by column: the texts and, of pairs, the second texts; a table is read many rows at once."""
    start, size = 0, FIRST_ROWS
    while start < len(dataset):
        stop = min(start + size, len(dataset))
        if isinstance(dataset, TableDataset):
            rows = range(start, stop) if dataset.rows is None else dataset.rows[start:stop].tolist()
            values = dataset.table.data[rows]
            columns = [values[name] for name in dataset.columns]
        else:
            examples = [dataset[row] for row in range(start, stop)]
            columns = [[example[key] for example in examples] for key in ("text", "text_pair") if key in examples[0]]
        yield columns
        mean = sum(map(len, columns[0])) / (stop - start)
        start, size = stop, min(max(1, int(CHARACTERS / (mean + 1))), MOST_ROWS)


def text_fingerprint(dataset: Dataset) -> str:
    """What tells this text from another, on this machine.

    Of a table it follows from the fingerprint that `datasets` makes of the paths and times of its files and of what was
    done to them, so that nothing is read; other datasets are in memory, and every text counts.
    """
    if isinstance(dataset, TableDataset):
        rows = b"" if dataset.rows is None else dataset.rows.numpy().tobytes()
        about = [dataset.table.data._fingerprint, dataset.columns, hashlib.sha256(rows).hexdigest()]
        return hashlib.sha256(canonical_json(about).encode()).hexdigest()
    digest = hashlib.sha256()
    for texts, *_ in text_columns(dataset):
        digest.update(json.dumps(texts).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Counts:
    """What a stream was made from."""

    documents: int = 0
    skipped: int = 0
    """Documents without a token, or of white space alone."""
    tokens: int = 0
    """With the one that ends each document."""
    words: int = 0
    """Separated by white space."""
    bytes: int = 0
    """In UTF-8."""


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents one after the other, each ended by the same token."""

    tokens: NDArray[np.unsignedinteger[Any]]
    """Read from disk as they are asked for."""
    counts: Counts

    def __len__(self) -> int:
        """Number of tokens."""
        return self.counts.tokens


def open_token_stream(
    dataset: Dataset, tokenizer: Tokenizer, what: str, *, limit_tokens: int | None = None
) -> TokenStream:
    """The tokens of a dataset, from the cache or made now, up to the document in which `limit_tokens` are reached.

    Raises:
        DataError: there is no text in the dataset.
        CacheError: the cache cannot be written.
    """
    made_from = {
        "version": VERSION,
        "text": text_fingerprint(dataset),
        "tokenizer": tokenizer.fingerprint,
        "limit_tokens": limit_tokens,
    }

    def make(folder: Path) -> None:
        with open(folder / "tokens.bin", "wb") as file:
            counts = _tokenise(dataset, tokenizer, limit_tokens, file, what)
        (folder / "tokens.json").write_text(json.dumps(asdict(counts)))

    folder = cached_folder("tokens", made_from, make, f"tokenising {what}")
    counts = Counts(**json.loads((folder / "tokens.json").read_text()))
    dtype = id_type(tokenizer.vocabulary_size)
    return TokenStream(np.memmap(folder / "tokens.bin", dtype, mode="r", shape=(counts.tokens,)), counts)


def _tokenise(dataset: Dataset, tokenizer: Tokenizer, limit_tokens: int | None, file: BinaryIO, what: str) -> Counts:
    """Write the tokens of all documents up to the limit."""
    end = np.array([document_end(tokenizer)], id_type(tokenizer.vocabulary_size)).tobytes()
    documents = skipped = tokens = words = size = done = 0
    for texts, *_ in text_columns(dataset):
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            if limit_tokens is not None and tokens >= limit_tokens:
                return Counts(documents, skipped, tokens, words, size)
            found = len(text.split())
            if not found or not len(ids):
                skipped += 1
                continue
            file.write(ids.tobytes() + end)
            documents, tokens, words = documents + 1, tokens + len(ids) + 1, words + found
            size += len(text.encode("utf-8", "surrogatepass"))
        done += len(texts)
        report_progress(f"tokenising {what}, documents", done, len(dataset))
    if documents == 0:
        raise DataError(
            f"{what}: there is no text.",
            expected="at least one document that is not empty",
            found=f"{skipped} documents without text",
            todo="Check the data, or name another column in 'input'.",
        )
    return Counts(documents, skipped, tokens, words, size)
