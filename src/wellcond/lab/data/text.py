"""Text: the source `text_stream`, and what tasks read of any text: batches, its fingerprint, and its tokens.

`text_stream` is the beginning of a corpus of any size, read once from end to end and kept in the cache. Tokens are one
flat file of ids, mapped into memory: made once, and found again without reading the text. After a kill, tokenising
continues where the tokens on disk end.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from wellcond.errors import DataError
from wellcond.files import write_atomically
from wellcond.lab.data.base import Data, Dataset, SourceConfig, register_source, report_progress
from wellcond.lab.data.disk import cached_folder, canonical_json, find_files, import_datasets
from wellcond.lab.data.tables import NAME, TableDataset, find_splits, name_of, opened, require_split

if TYPE_CHECKING:
    from wellcond.lab.tokenizers import Tokenizer

VERSION = 3
"""Of what is in the cache, texts and tokens."""
ROWS_AT_ONCE = 1000
"""Enough for a tokeniser to keep every core busy."""
PIECE = 2**24
"""Characters that are tokenised at once, and bytes of tokens after which a kill loses them no more, at most."""
Ids = NDArray[np.unsignedinteger[Any]]


class TextConfig(SourceConfig):
    """Where a text is: either `id` or `files` says so."""

    id: str | None = Field(None, pattern=rf"^{NAME}(/{NAME})?$")
    """Of a mirror, or of the hub."""
    files: str | list[str] | None = None
    """Path or glob pattern, or a list of them: parquet, or jsonl and txt, perhaps compressed."""
    text: str = "text"
    """Column of the text, where it is in a table."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.id is None) == (self.files is None):
            raise ValueError(f"expected either 'id' or 'files', got {'neither' if self.id is None else 'both'}.")
        return self


class TextStreamConfig(TextConfig):
    """Settings of `text_stream`; a line of a text file is a document. The cache is not compared with the hub again."""

    source: Literal["text_stream"] = "text_stream"
    config: str | None = Field(None, pattern=rf"^{NAME}$")
    split: str = "train"
    limit_bytes: PositiveInt | None = None
    """Read no further than the document in which so many bytes are reached; null: to the end."""
    evaluation_documents: PositiveInt = 1000
    """The first so many are evaluated on, and not trained on."""


@register_source(TextStreamConfig)
def load_text_stream(config: TextStreamConfig, base: Path) -> Data:
    """Read the corpus unless it is in the cache."""
    files: list[Path] | None
    if config.files is not None:
        files = find_files(config.files, base, "files")
        name = name_of(files)
    else:
        name = str(config.id) if config.config is None else f"{config.id} ({config.config})"
        splits = find_splits(str(config.id), config.config)
        files = None if splits is None else splits[require_split(config.split, splits, name, "split")]
    place: list[Any] = [config.id, config.config, config.split]
    if files is not None:
        place = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    made_from = {"version": VERSION, "place": place, "text": config.text, "limit_bytes": config.limit_bytes}
    folder = cached_folder("text", made_from, lambda into: _store(into, config, name, files), f"reading {name}")
    counts = json.loads((folder / "text.json").read_text())
    if counts["documents"] <= config.evaluation_documents:
        raise DataError(
            f"{name}: there are too few documents.",
            expected=f"more than the {config.evaluation_documents} of evaluation_documents",
            found=f"{counts['documents']} with text",
        )
    stored = import_datasets().Dataset.from_file(str(folder / "text.arrow"))
    parts = range(config.evaluation_documents), range(config.evaluation_documents, counts["documents"])
    evaluation, train = (TableDataset(stored.select(part), name, columns=("text",)) for part in parts)
    return Data(name, "text", train, evaluation, None, f"{name}, {counts['bytes']} bytes read as a stream")


def _store(folder: Path, config: TextStreamConfig, name: str, files: list[Path] | None) -> None:
    """Write the texts that are not blank, up to the limit, and how much there was."""
    import pyarrow as pa

    counts = {"documents": 0, "bytes": 0}
    schema = pa.schema([("text", pa.string())])
    limit = config.limit_bytes or math.inf
    with pa.OSFile(str(folder / "text.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for texts in _read(config, files):
            kept: list[str] = []
            for text in texts:
                if text.strip() and counts["bytes"] < limit:
                    kept.append(text)
                    counts["documents"] += 1
                    counts["bytes"] += len(text.encode())
            stream.write_batch(pa.record_batch([pa.array(kept, pa.string())], schema=schema))
            report_progress(f"reading {name}, bytes", counts["bytes"], config.limit_bytes or counts["bytes"])
            if counts["bytes"] >= limit:
                break
    (folder / "text.json").write_text(json.dumps(counts))


def _read(config: TextStreamConfig, files: list[Path] | None) -> Iterator[list[str]]:
    """Texts of the files one after the other, or of the hub, fetched as they are read."""
    place = files or str(config.id)
    options: dict[str, Any] = {} if files else {"name": config.config, "split": config.split}
    with opened(place, streaming=True, **options) as data:
        for table in data.with_format("arrow").iter(ROWS_AT_ONCE):
            texts: list[Any] = table[config.text].to_pylist() if config.text in table.column_names else [None]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"no text in column {config.text!r} ('text') of a row; columns {table.column_names}")
            yield texts


# Text of any dataset


def text_columns(dataset: Dataset, first: int = 0) -> Iterator[list[list[str]]]:
    """Batches of rows from the `first`, by column: the texts and, of pairs, the second texts.

    A table is read many rows at once.
    """
    for start in range(first, len(dataset), ROWS_AT_ONCE):
        rows = range(len(dataset))[start : start + ROWS_AT_ONCE]
        if isinstance(dataset, TableDataset):
            values = dataset.data[rows if dataset.rows is None else dataset.rows[rows].tolist()]
            yield [values[name] for name in dataset.columns]
        else:
            examples = [dataset[row] for row in rows]
            yield [[example[key] for example in examples] for key in ("text", "text_pair") if key in examples[0]]


def text_fingerprint(dataset: Dataset) -> str:
    """What tells this text from another, on this machine.

    Of a table it follows from the fingerprint that `datasets` makes of the paths and times of its files, so that
    nothing is read; other datasets are in memory, and every text counts.
    """
    if isinstance(dataset, TableDataset):
        rows = b"" if dataset.rows is None else dataset.rows.numpy().tobytes()
        about = [dataset.data._fingerprint, dataset.columns, hashlib.sha256(rows).hexdigest()]
        return hashlib.sha256(canonical_json(about).encode()).hexdigest()
    digest = hashlib.sha256()
    for texts, *_ in text_columns(dataset):
        digest.update(json.dumps(texts).encode())
    return digest.hexdigest()


def id_type(vocabulary_size: int) -> np.dtype[Any]:
    """The smaller of two unsigned types that holds every id."""
    return np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents one after the other, each ended by the tokeniser's token for that, if it has one; read from disk."""

    tokens: Ids
    counts: dict[str, int]
    """`documents` with text and those `skipped`, and of the text its `words`, separated by white space, and `bytes`."""

    def __len__(self) -> int:
        return len(self.tokens)


def open_token_stream(
    dataset: Dataset, tokenizer: Tokenizer, what: str, *, limit_tokens: int | None = None
) -> TokenStream:
    """The tokens of a dataset, from the cache or made now, up to the document in which `limit_tokens` are reached."""
    made_from = {
        "version": VERSION,
        "text": text_fingerprint(dataset),
        "tokenizer": tokenizer.fingerprint,
        "limit_tokens": limit_tokens,
    }

    def make(folder: Path) -> None:
        _tokenise(folder, dataset, tokenizer, limit_tokens, what)

    folder = cached_folder("tokens", made_from, make, f"tokenising {what}", resumes=True)
    counts = json.loads((folder / "tokens.json").read_text())
    return TokenStream(np.memmap(folder / "tokens.bin", id_type(tokenizer.vocabulary_size), mode="r"), counts)


def _tokenise(folder: Path, dataset: Dataset, tokenizer: Tokenizer, limit_tokens: int | None, what: str) -> None:
    """Write the tokens of all documents up to the limit; those without a word or a token are skipped.

    `tokens.json` says up to which of the `rows` of the dataset the tokens are on disk, and is replaced piece by piece:
    after a kill, the same call continues there. What follows those tokens in `tokens.bin` is written again. When all
    are there, it has the counts alone.
    """
    kind = id_type(tokenizer.vocabulary_size)
    ends = [] if tokenizer.document_end is None else [tokenizer.document_end]
    end = np.array(ends, kind).tobytes()
    counts = _counts_on_disk(folder, kind.itemsize)
    if "rows" not in counts:
        return
    for left in folder.glob(".tokens.json.*.partial"):  # of a process that was killed while it wrote
        left.unlink()
    with open(folder / "tokens.bin", "ab") as file:

        def keep(counts: dict[str, int]) -> None:
            file.flush()
            os.fsync(file.fileno())
            write_atomically(folder / "tokens.json", json.dumps(counts))

        def full() -> bool:
            return limit_tokens is not None and counts["tokens"] >= limit_tokens

        kept = counts["tokens"]
        file.truncate(kept * kind.itemsize)
        for texts in _pieces(dataset, counts["rows"]):
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                if full():
                    break
                words = len(text.split())
                if not words or not len(ids):
                    counts["skipped"] += 1
                    continue
                file.write(ids.tobytes() + end)
                size = len(text.encode("utf-8", "surrogatepass"))
                for name, more in (
                    ("documents", 1),
                    ("tokens", len(ids) + len(ends)),
                    ("words", words),
                    ("bytes", size),
                ):
                    counts[name] += more
            if full():
                break
            counts["rows"] += len(texts)
            if (counts["tokens"] - kept) * kind.itemsize >= PIECE:
                keep(counts)
                kept = counts["tokens"]
            report_progress(f"tokenising {what}, documents", counts["rows"], len(dataset))
        if counts["documents"] == 0:
            raise DataError(f"{what}: there is no text.", expected="documents", found=f"{len(dataset)} without a word")
        keep({name: count for name, count in counts.items() if name != "rows"})


def _counts_on_disk(folder: Path, itemsize: int) -> dict[str, int]:
    """What `tokens.json` says of a folder that was not put in place; zeros if the tokens are not there."""
    none = {"rows": 0, "documents": 0, "skipped": 0, "tokens": 0, "words": 0, "bytes": 0}
    counts, tokens = folder / "tokens.json", folder / "tokens.bin"
    if not counts.exists() or not tokens.exists():
        return none
    found = json.loads(counts.read_text())
    known = set(found) | {"rows"} == set(none) and tokens.stat().st_size >= found["tokens"] * itemsize
    return found if known else none


def _pieces(dataset: Dataset, first: int) -> Iterator[list[str]]:
    """Texts of consecutive rows from the `first`, not many more characters at once than a piece has."""
    for texts, *_ in text_columns(dataset, first):
        start = length = 0
        for number, text in enumerate(texts, 1):
            length += len(text)
            if length >= PIECE or number == len(texts):
                yield texts[start:number]
                start, length = number, 0
