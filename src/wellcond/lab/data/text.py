"""Text: the source `text_stream`, and what tasks read of any text: batches, its fingerprint, and its tokens.

`text_stream` is the beginning of a corpus of any size, read once from end to end and kept in the cache. Tokens are one
flat file of ids, mapped into memory: made once, and found again without reading the text.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from wellcond.lab.data.base import Data, DataError, Dataset, SourceConfig, listed, register_source, report_progress
from wellcond.lab.data.disk import cached_folder, canonical_json, find_files, find_in_mirror, import_datasets
from wellcond.lab.data.files import (
    NAME,
    builders_of,
    find_splits,
    load_dataset,
    name_of,
    not_loaded,
    reading,
    require_split,
)
from wellcond.lab.data.tables import Part, Table, TableDataset

if TYPE_CHECKING:
    from wellcond.lab.tokenizers import Tokenizer

VERSION = 3
"""Of what is in the cache, texts and tokens."""
ROWS_AT_ONCE = 1000
FIRST_ROWS, MOST_ROWS = 256, 16384
CHARACTERS = 2**21
"""Size that batches aim at: enough for a tokeniser to keep every core busy."""
Ids = NDArray[np.unsignedinteger[Any]]


class TextStreamConfig(SourceConfig):
    """Settings of `text_stream`; either `id` or `files` says where the text is."""

    source: Literal["text_stream"] = "text_stream"
    id: str | None = Field(None, pattern=rf"^{NAME}(/{NAME})?$")
    """Of the hub, or of a mirror."""
    config: str | None = Field(None, pattern=rf"^{NAME}$")
    revision: str | None = None
    """Commit or tag on the hub. Without one, what is in the cache is not compared with the hub again."""
    split: str = "train"
    files: str | list[str] | None = None
    """Path or glob pattern, or a list of them: parquet, or jsonl and txt (a line is a document), perhaps compressed."""
    text: str = "text"
    """Column of the texts."""
    limit_bytes: PositiveInt | None = None
    """Read no further than the document in which so many bytes are reached; null: to the end."""
    evaluation_documents: PositiveInt = 1000
    """The first so many are evaluated on, and not trained on."""

    @model_validator(mode="after")
    def _one_place(self) -> TextStreamConfig:
        if (self.id is None) == (self.files is None):
            raise ValueError(f"expected either 'id' or 'files', got {'neither' if self.id is None else 'both'}.")
        return self


@register_source(TextStreamConfig)
def load_text_stream(config: TextStreamConfig, base: Path) -> Data:
    """Read the corpus unless it is in the cache."""
    name = config.id if config.config is None else f"{config.id} ({config.config})"
    files: list[Path] | None = None
    if config.files is not None:
        files = find_files(config.files, base, "files")
        name = name_of(files)
    elif (mirror := find_in_mirror(str(config.id))) is not None:
        splits = find_splits(mirror, config.config)
        files = splits[require_split(config.split, splits, str(name), "split")]
    identity: list[Any] = [config.id, config.config, config.revision, config.split]
    if files is not None:
        identity = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    made_from = {"version": VERSION, "place": identity, "text": config.text, "limit_bytes": config.limit_bytes}
    folder = cached_folder("text", made_from, lambda into: _store(into, config, str(name), files), f"reading {name}")
    counts = json.loads((folder / "text.json").read_text())
    if counts["documents"] <= config.evaluation_documents:
        raise DataError(
            f"{name}: there are too few documents.",
            expected=f"more than the {config.evaluation_documents} of evaluation_documents",
            found=f"{counts['documents']} with text and {counts['empty']} without",
            todo="Lower 'evaluation_documents', or raise the limit.",
        )
    stored = import_datasets().Dataset.from_file(str(folder / "text.arrow"))
    bounds = (0, config.evaluation_documents, counts["documents"])
    evaluation, train = (
        TableDataset(Table(stored.select(range(a, b)), [Part(str(name), b - a)]), "text", ("text",), None)
        for a, b in zip(bounds, bounds[1:], strict=False)
    )
    notes = [f"{counts['bytes']} bytes", f"{counts['empty']} empty texts left out"][: 1 + (counts["empty"] > 0)]
    return Data(str(name), "text", train, evaluation, None, f"{name}, read as a stream", notes=notes)


def _store(folder: Path, config: TextStreamConfig, name: str, files: list[Path] | None) -> None:
    """Write the texts that are not blank, up to the limit, and how much there was."""
    import pyarrow as pa

    counts = {"documents": 0, "empty": 0, "bytes": 0}
    schema = pa.schema([("text", pa.string())])
    limit = config.limit_bytes
    with pa.OSFile(str(folder / "text.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for texts in _read(config, name, files):
            kept: list[str] = []
            for text in texts:
                if limit is not None and counts["bytes"] >= limit:
                    break
                if text.strip():
                    kept.append(text)
                    counts["documents"] += 1
                    counts["bytes"] += len(text.encode())
                else:
                    counts["empty"] += 1
            stream.write_batch(pa.record_batch([pa.array(kept, pa.string())], schema=schema))
            report_progress(f"reading {name}, bytes", counts["bytes"], limit or counts["bytes"])
            if limit is not None and counts["bytes"] >= limit:
                break
    (folder / "text.json").write_text(json.dumps(counts))


def _read(config: TextStreamConfig, name: str, files: list[Path] | None) -> Iterator[list[str]]:
    """Texts of the files one after the other, or of the hub; fetched as they are read.

    Raises: DataError
    """
    if files is None:
        about = {"name": config.config, "revision": config.revision, "split": config.split}
        with reading(name, **not_loaded(str(config.id))):
            yield from _read_rows(name, config.text, load_dataset(str(config.id), streaming=True, **about))
    for file, builder in zip(files or [], builders_of(files or []), strict=True):
        with reading(
            str(file),
            problem="the text cannot be read",
            expected="a whole file in UTF-8",
            todo="Check the file; .zst needs the package zstandard.",
        ):
            # Escaped: the library takes every name for a pattern.
            rows = load_dataset(builder, streaming=True, data_files=[glob.escape(str(file))], split="train")
            yield from _read_rows(str(file), config.text, rows)


def _read_rows(place: str, column: str, rows: Any) -> Iterator[list[str]]:
    done = 0
    for table in rows.with_format("arrow").iter(ROWS_AT_ONCE):
        texts: list[Any] = table[column].to_pylist() if column in table.column_names else [None]
        wrong = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
        if wrong is not None:
            found = type(texts[wrong]).__name__ if column in table.column_names else "none"
            raise DataError(
                f"{place}, row {done + wrong} (the first is 0): there is no text.",
                expected=f"a text in the column {column!r}",
                found=f"{found} there; columns {listed(table.column_names)}",
                todo="Set 'text' to the column of the texts, or remove the row.",
            )
        yield texts
        done += len(texts)


# Text of any dataset


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
