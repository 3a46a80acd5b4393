"""The text of a dataset: in batches, by its fingerprint, and as tokens.

Tokens are one flat file of ids, mapped into memory: made once, and found again without reading the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from wellcond.lab.data.base import DataError, Dataset, report_progress
from wellcond.lab.data.disk import cached_folder, canonical_json
from wellcond.lab.data.tables import TableDataset

if TYPE_CHECKING:
    from wellcond.lab.tokenizers import Tokenizer

VERSION = 3
FIRST_ROWS, MOST_ROWS = 256, 16384
CHARACTERS = 2**21
"""Size that batches aim at: enough for a tokeniser to keep every core busy."""
Ids = NDArray[np.unsignedinteger[Any]]


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


def id_type(vocabulary_size: int) -> np.dtype[Any]:
    """The smaller of two unsigned types that holds every id.

    Example:
        >>> id_type(50257), id_type(65537)
        (dtype('uint16'), dtype('uint32'))
    """
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents one after the other, each ended by the same token; read from disk as they are asked for."""

    tokens: Ids
    counts: dict[str, int]
    """`documents` with text and those `skipped`, and of the text its `words`, separated by white space, and `bytes`."""

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


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
        (folder / "tokens.json").write_text(json.dumps(counts))

    folder = cached_folder("tokens", made_from, make, f"tokenising {what}")
    counts = json.loads((folder / "tokens.json").read_text())
    return TokenStream(np.memmap(folder / "tokens.bin", id_type(tokenizer.vocabulary_size), mode="r"), counts)


def _tokenise(
    dataset: Dataset, tokenizer: Tokenizer, limit_tokens: int | None, file: BinaryIO, what: str
) -> dict[str, int]:
    """Write the tokens of all documents up to the limit; those without a word or a token are skipped."""
    end = np.array([tokenizer.document_end], id_type(tokenizer.vocabulary_size)).tobytes()
    counts = {"documents": 0, "skipped": 0, "tokens": 0, "words": 0, "bytes": 0}
    done = 0
    for texts, *_ in text_columns(dataset):
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            if limit_tokens is not None and counts["tokens"] >= limit_tokens:
                return counts
            words = len(text.split())
            if not words or not len(ids):
                counts["skipped"] += 1
                continue
            file.write(ids.tobytes() + end)
            size = len(text.encode("utf-8", "surrogatepass"))
            for name, more in (("documents", 1), ("tokens", len(ids) + 1), ("words", words), ("bytes", size)):
                counts[name] += more
        done += len(texts)
        report_progress(f"tokenising {what}, documents", done, len(dataset))
    if counts["documents"] == 0:
        raise DataError(
            f"{what}: there is no text.",
            expected="at least one document that is not empty",
            found=f"{counts['skipped']} documents without text",
            todo="Check the data, or name another column in 'input'.",
        )
    return counts
