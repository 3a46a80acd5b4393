"""Source `text_stream`: the beginning of a corpus of any size, read once from end to end and kept in the cache."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from wellcond.lab.data.base import (
    Data,
    DataError,
    SourceConfig,
    describe_sizes,
    listed,
    register_source,
    report_progress,
)
from wellcond.lab.data.disk import (
    MIRROR_VARIABLE,
    CacheEntry,
    canonical_json,
    find_files,
    find_in_mirror,
    import_datasets,
    quiet_progress,
    reading_errors,
    root_cause,
)
from wellcond.lab.data.sources.hub import NAME, HubConfig, mirror_arguments, network_errors, require_files_inside
from wellcond.lab.data.tables import Part, Table, TableDataset

VERSION = 2
TEXT, COUNTS = "text.arrow", "text.json"
FORMATS = {".txt": "text", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
COMPRESSED = (".gz", ".bz2", ".zst")
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
    limit_documents: PositiveInt | None = None
    limit_bytes: PositiveInt | None = None
    """Read no further than the document in which so many bytes are reached; null: to the end."""
    evaluation_documents: PositiveInt = 1000
    """The first so many are evaluated on, and not trained on."""

    @model_validator(mode="after")
    def _one_place(self) -> TextStreamConfig:
        if (self.id is None) == (self.files is None):
            raise ValueError(f"expected either 'id' or 'files', got {'neither' if self.id is None else 'both'}.")
        if self.limit_documents is not None and self.limit_documents <= self.evaluation_documents:
            raise ValueError("limit_documents: expected more than evaluation_documents.")
        return self


@dataclass(frozen=True)
class _Place:
    """Something that `load_dataset` can read."""

    name: str
    path: str
    arguments: dict[str, Any]
    mirror: Path | None = None


@register_source(TextStreamConfig)
def load(config: TextStreamConfig, base: Path) -> Data:
    """Read the corpus unless it is in the cache."""
    name, identity, places = _find(config, base)
    limits = {"limit_documents": config.limit_documents, "limit_bytes": config.limit_bytes}
    entry = CacheEntry("text", {"version": VERSION, "place": identity, "text": config.text, **limits})

    def find() -> dict[str, int] | None:
        about = entry.read(COUNTS)
        return None if about is None or entry.find(TEXT) is None else json.loads(about)

    counts = entry.find_or_make(find, lambda: _store(entry, config, name, places), f"reading {name}")
    if counts["documents"] <= config.evaluation_documents:
        raise DataError(
            f"{name}: there are too few documents.",
            expected=f"more than the {config.evaluation_documents} of evaluation_documents",
            found=f"{counts['documents']} with text and {counts['empty']} without",
            todo="Lower 'evaluation_documents', or raise the limits.",
        )
    stored = import_datasets().Dataset.from_file(str(entry.folder / TEXT))
    bounds = (0, config.evaluation_documents, counts["documents"])
    evaluation, train = (
        TableDataset(Table(stored.select(range(a, b)), [Part(name, b - a)]), "text", ("text",), None)
        for a, b in zip(bounds, bounds[1:], strict=False)
    )
    note = f"; {counts['empty']} empty texts left out" if counts["empty"] else ""
    sizes = f"{describe_sizes(train, evaluation, None)}, {counts['bytes']} bytes"
    return Data(name, "text", train, evaluation, None, f"{name}, read as a stream: {sizes}{note}")


def _find(config: TextStreamConfig, base: Path) -> tuple[str, Any, list[_Place]]:
    """Name of the corpus, what tells it from another state of itself, and where it is."""
    if config.files is not None:
        files = find_files(config.files, base, "files")
        places = [
            # Escaped: the library takes every name for a pattern.
            _Place(str(path), _builder(path), {"data_files": [glob.escape(str(path))], "split": "train"})
            for path in files
        ]
        name = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
        return name, [_identity(path) for path in files], places
    assert config.id is not None
    name = config.id if config.config is None else f"{config.id} ({config.config})"
    mirror = find_in_mirror(config.id)
    arguments: dict[str, Any] = {"name": config.config, "revision": config.revision}
    inside = []
    if mirror is not None:
        inside = [_identity(path) for path in sorted(mirror.rglob("*")) if path.is_file()]
        arguments = mirror_arguments(HubConfig.model_validate({"id": config.id, "config": config.config}), mirror)
    place = _Place(name, str(mirror or config.id), arguments | {"split": config.split}, mirror)
    return name, [config.id, config.config, config.revision, config.split, inside], [place]


def _builder(path: Path) -> str:
    """The reader of `datasets` for a file.

    Example:
        >>> _builder(Path("00.jsonl.zst"))
        'json'
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    kind = suffixes[-2:-1] if suffixes[-1:] and suffixes[-1] in COMPRESSED else suffixes[-1:]
    if not kind or kind[0] not in FORMATS:
        raise DataError(
            f"{path}: the format is not known.",
            expected=f"a name that ends in one of {listed(FORMATS)}; texts may be compressed: {listed(COMPRESSED)}",
            found=repr(path.name),
            todo="Convert the file, or rename it if only its ending is wrong.",
        )
    return FORMATS[kind[0]]


def _identity(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def _store(entry: CacheEntry, config: TextStreamConfig, name: str, places: list[_Place]) -> dict[str, int]:
    """Write the texts that are not blank, up to the limits; returns how much there was."""
    import pyarrow as pa

    counts = {"documents": 0, "empty": 0, "bytes": 0}
    schema = pa.schema([("text", pa.string())])
    with entry.adding(TEXT) as file, pa.ipc.new_stream(file, schema) as stream:
        for texts in (texts for place in places for texts in _read(place, config.text)):
            kept: list[str] = []
            for text in texts:
                if _enough(config, counts):
                    break
                if text.strip():
                    kept.append(text)
                    counts["documents"] += 1
                    counts["bytes"] += len(text.encode())
                else:
                    counts["empty"] += 1
            stream.write_batch(pa.record_batch([pa.array(kept, pa.string())], schema=schema))
            report_progress(f"reading {name}, bytes", counts["bytes"], config.limit_bytes or counts["bytes"])
            if _enough(config, counts):
                break
    entry.write(COUNTS, canonical_json(counts).encode())
    return counts


def _enough(config: TextStreamConfig, counts: dict[str, int]) -> bool:
    limits = ((config.limit_documents, counts["documents"]), (config.limit_bytes, counts["bytes"]))
    return any(limit is not None and found >= limit for limit, found in limits)


def _read(place: _Place, column: str) -> Iterator[list[str]]:
    """Texts of one place, fetched as they are read.

    Raises: DataError
    """
    done = 0
    try:
        with quiet_progress():
            if place.mirror is not None:
                require_files_inside(place.mirror, {k: v for k, v in place.arguments.items() if k != "split"})
            rows = import_datasets().load_dataset(place.path, streaming=True, **place.arguments)
            for table in rows.with_format("arrow").iter(ROWS_AT_ONCE):
                texts: list[Any] = table[column].to_pylist() if column in table.column_names else [None]
                wrong = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
                if wrong is not None:
                    found = type(texts[wrong]).__name__ if column in table.column_names else "none"
                    raise DataError(
                        f"{place.name}, row {done + wrong} (the first is 0): there is no text.",
                        expected=f"a text in the column {column!r}",
                        found=f"{found} there; columns {listed(table.column_names)}",
                        todo="Set 'text' to the column of the texts, or remove the row.",
                    )
                yield texts
                done += len(texts)
    except DataError:
        raise
    except (*reading_errors(), *network_errors()) as error:
        raise DataError(
            f"{place.name}: the text cannot be read, after {done} rows.",
            expected="whole files in UTF-8; of a data set, its split on the hub or in a mirror that "
            f"{MIRROR_VARIABLE} names",
            found=root_cause(error),
            todo="Check the files (.zst needs the package zstandard), correct 'files', 'id', 'config', 'split' or "
            "'revision', or connect to the network (and unset HF_HUB_OFFLINE).",
        ) from error
