"""Text as one flat file of token ids, mapped into memory: made once, and found again without reading the text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from wellcond.lab.data.base import Dataset
from wellcond.lab.data.disk_cache import CacheEntry, canonical_json
from wellcond.lab.data.errors import DataError
from wellcond.lab.data.progress import tell
from wellcond.lab.data.tables import TableDataset
from wellcond.lab.tokenizers.base import Tokenizer, document_end, id_type

VERSION = 2
TOKENS, COUNTS = "tokens.bin", "tokens.json"
FIRST_ROWS, MOST_ROWS = 256, 16384
CHARACTERS = 2**21
"""Size that batches aim at: enough for a tokeniser to keep every core busy."""


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
    """The tokens of a dataset, from the cache or made now; a killed process leaves nothing that is taken for them.

    Args:
        dataset: Texts.
        tokenizer: What makes tokens of them.
        what: Name of the dataset in messages.
        limit_tokens: Stop behind the document in which so many are reached.

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
    entry = CacheEntry("tokens", made_from)
    dtype = id_type(tokenizer.vocabulary_size)

    def find() -> Counts | None:
        about, path = entry.read(COUNTS), entry.find(TOKENS)
        if about is None or path is None:
            return None
        counts = Counts(**json.loads(about))
        return counts if path.stat().st_size == counts.tokens * dtype.itemsize else None

    def make() -> Counts:
        with entry.adding(TOKENS) as file:
            counts = _tokenise(dataset, tokenizer, limit_tokens, file, what)
        entry.write(COUNTS, canonical_json(asdict(counts)).encode())
        return counts

    counts = entry.find_or_make(find, make, f"tokenising {what}")
    return TokenStream(np.memmap(entry.folder / TOKENS, dtype, mode="r", shape=(counts.tokens,)), counts)


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
        tell(f"tokenising {what}, documents", done, len(dataset))
    if documents == 0:
        raise DataError(
            f"{what}: there is no text.",
            expected="at least one document that is not empty",
            found=f"{skipped} documents without text",
            todo="Check the data, or name another column in 'input'.",
        )
    return Counts(documents, skipped, tokens, words, size)
