"""Source `text_stream`: the beginning of a corpus of any size, read once from end to end and kept in the cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from wellcond.lab.data.base import Data, describe_sizes
from wellcond.lab.data.disk_cache import CacheEntry
from wellcond.lab.data.errors import DataError
from wellcond.lab.data.growing_files import Piece, find_grown, grow
from wellcond.lab.data.progress import tell
from wellcond.lab.data.reading import (
    MIRROR_VARIABLE,
    find_files,
    find_in_mirror,
    import_datasets,
    quiet_progress,
    reading_errors,
    root_cause,
)
from wellcond.lab.data.registry import SourceConfig, register_source
from wellcond.lab.data.sources.hub import (
    NAME,
    HubConfig,
    mirror_arguments,
    network_errors,
    require_files_inside,
)
from wellcond.lab.data.stored_text import ENDS, TEXT, StoredText
from wellcond.lab.data.text_readers import format_of, read_texts, text_of

VERSION = 1
PIECE_BYTES = 2**22


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


@register_source(TextStreamConfig)
def load(config: TextStreamConfig, base: Path) -> Data:
    """Read what is not in the cache yet; a process that was killed is gone on from where it was."""
    name, identity, texts_from = _place(config, base)
    made_from = {
        "version": VERSION,
        "place": identity,
        "text": config.text,
        "limit_documents": config.limit_documents,
        "limit_bytes": config.limit_bytes,
    }
    entry = CacheEntry("text", made_from)
    names = (TEXT, ENDS)
    state = find_grown(entry, names)
    if state is None:

        def pieces(former: dict[str, Any] | None) -> Iterator[Piece]:
            return _read(texts_from, config, former, name)

        state = grow(entry, names, pieces, lambda: tell(f"waiting for another process: reading {name}", 0, 1))
    documents, empty = state.get("documents", 0), state.get("empty", 0)
    if documents <= config.evaluation_documents:
        raise DataError(
            f"{name}: there are too few documents.",
            expected=f"more than the {config.evaluation_documents} of evaluation_documents",
            found=f"{documents} with text and {empty} without",
            todo="Lower 'evaluation_documents', or raise the limits.",
        )
    evaluation = StoredText(entry.folder, 0, config.evaluation_documents)
    train = StoredText(entry.folder, config.evaluation_documents, documents)
    note = f"; {empty} empty texts left out" if empty else ""
    description = f"{name}, read as a stream: {describe_sizes(train, evaluation, None)}, {state['bytes']} bytes{note}"
    return Data(name, "text", train, evaluation, None, description)


def _place(config: TextStreamConfig, base: Path) -> tuple[str, Any, Callable[[int], Iterator[str]]]:
    """Name of the corpus, what tells it from another state of itself, and its texts from a number on."""
    if config.files is not None:
        files = find_files(config.files, base, "files")
        for path in files:
            format_of(path)
        name = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
        return (
            name,
            [_identity(path) for path in files],
            lambda first: itertools.islice(read_texts(files, config.text), first, None),
        )
    assert config.id is not None
    mirror = find_in_mirror(config.id)
    inside = [] if mirror is None else [_identity(path) for path in sorted(mirror.rglob("*")) if path.is_file()]
    identity = [config.id, config.config, config.revision, config.split, inside]
    name = config.id if config.config is None else f"{config.id} ({config.config})"

    return name, identity, lambda first: _stream(config, mirror, name, first)


def _stream(config: TextStreamConfig, mirror: Path | None, name: str, first: int) -> Iterator[str]:
    """Texts of a split, fetched as they are read."""
    assert config.id is not None
    if mirror is None:
        path, arguments = config.id, {"name": config.config, "revision": config.revision}
    else:
        hub = HubConfig.model_validate({"id": config.id, "config": config.config})
        path, arguments = str(mirror), mirror_arguments(hub, mirror)
    try:
        with quiet_progress():
            if mirror is not None:
                require_files_inside(mirror, arguments)
            rows = import_datasets().load_dataset(path, split=config.split, streaming=True, **arguments)
            for number, row in enumerate(rows.skip(first), first):
                yield text_of(row, config.text, f"{name}, row {number} (the first is 0)")
    except DataError:
        raise
    except (*reading_errors(), *network_errors()) as error:
        raise DataError(
            f"{name}: the data set cannot be read.",
            expected=f"its split {config.split!r} in a mirror that {MIRROR_VARIABLE} names, or on the hub",
            found=f"{'not in a mirror' if mirror is None else 'in a mirror'}; {root_cause(error)}",
            todo="Correct 'id', 'config', 'split' or 'revision', or connect to the network (and unset HF_HUB_OFFLINE). "
            "What has been read so far is kept.",
        ) from error


def _identity(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def _read(
    texts_from: Callable[[int], Iterator[str]], config: TextStreamConfig, state: dict[str, Any] | None, name: str
) -> Iterator[Piece]:
    """Texts that are not blank and where they end, a few megabytes at a time, from where the state says on."""
    counts = {"read": 0, "documents": 0, "empty": 0, "bytes": 0} if state is None else dict(state)

    def enough() -> bool:
        most = ((config.limit_documents, counts["documents"]), (config.limit_bytes, counts["bytes"]))
        return any(limit is not None and found >= limit for limit, found in most)

    content, ends = bytearray(), []
    if enough():
        return
    for text in texts_from(counts["read"]):
        counts["read"] += 1
        if text.strip():
            content += (encoded := text.encode("utf-8", "surrogatepass"))
            counts["bytes"] += len(encoded)
            counts["documents"] += 1
            ends.append(counts["bytes"])
        else:
            counts["empty"] += 1
        if enough():
            break
        if len(content) >= PIECE_BYTES:
            yield _piece(content, ends, counts)
            content, ends = bytearray(), []
            total = config.limit_bytes or counts["bytes"]
            tell(f"reading {name}, bytes", counts["bytes"], total)
    yield _piece(content, ends, counts)


def _piece(content: bytearray, ends: list[int], counts: dict[str, int]) -> Piece:
    return Piece({TEXT: bytes(content), ENDS: np.array(ends, "<i8").tobytes()}, dict(counts))
