"""Source `text_stream`: the beginning of a corpus of any size, read once from end to end and kept in the cache."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from wellcond.lab.data.base import Data, DataError, SourceConfig, listed, register_source, report_progress
from wellcond.lab.data.disk import cached_folder, find_files, find_in_mirror, import_datasets
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

VERSION = 3
ROWS_AT_ONCE = 1000


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
def load(config: TextStreamConfig, base: Path) -> Data:
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
