"""Files that are either whole or not there: written beside their place, then renamed."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def read_regular(path: str | Path) -> bytes:
    """Content of a file; one that is no regular file, such as a pipe, could keep its reader waiting for ever.

    Raises: OSError.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


@contextmanager
def opened_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its place in one step, when the block ends without an error.

    Raises: OSError; the old file is then as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:  # never through a link of that name
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file in one step, so that a reader, a crash or a full disk never leaves half of it.

    Raises: OSError; the old file is then as it was.
    """
    with opened_atomically(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def json_ready(value: Any) -> Any:
    """Plain data for JSON, which has no infinities and no NaN: they become text.

    Example:
        >>> json_ready({"kappa": float("inf"), "rank": 3})
        {'kappa': 'inf', 'rank': 3}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    return value


def to_json(value: Any, *, indent: int | None = None, compact: bool = False) -> str:
    """One JSON text, infinities and NaN as text; `compact` leaves out every space."""
    separators = (",", ":") if compact else None
    return json.dumps(json_ready(value), indent=indent, separators=separators, ensure_ascii=False, allow_nan=False)
