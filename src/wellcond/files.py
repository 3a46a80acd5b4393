"""Files that are either whole or not there: written beside their place, then renamed."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import itertools
import json
import math
import os
import platform
import re
import stat
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, Union, get_args, get_origin, get_type_hints

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def read_regular(path: str | Path) -> bytes:
    """Content of a file; one that is no regular file, such as a pipe, could keep its reader waiting for ever.

    Raises: OSError.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def lines_until(path: str | Path, step: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Lines of a file of JSON, as data and as text, without those of later steps or cut off while they were written.

    Raises: OSError.
    """
    for line in read_regular(path).splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("step", 0) <= step:
            yield entry, line.decode("utf-8") + "\n"


HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
"""This machine, in the names of temporary files: not every shared file system knows of the locks of other machines."""
LEFTOVER = re.compile(rf"\..*\.{HOST}\.\d+-\d+\.partial", re.DOTALL)
_numbers = itertools.count()


@contextmanager
def temporary_beside(path: Path) -> Iterator[BinaryIO]:
    """A new file in the folder of a path, for as long as the block lasts; its path is `name`.

    It is locked, and the lock ends with the process, however that ends. So what killed processes left in the folder is
    known, and removed here (see `remove_leftovers`).

    Raises: OSError.
    """
    remove_leftovers(path.parent)
    while True:
        temporary = path.with_name(f".{path.name[:40]}.{HOST}.{os.getpid()}-{next(_numbers)}.partial")
        try:
            file = open(temporary, "xb")  # never through a link of that name
        except FileExistsError:
            continue
        with file:
            try:
                if _locked(file.fileno(), temporary):
                    yield file
                    return
            finally:
                temporary.unlink(missing_ok=True)


def _locked(handle: int, path: Path | str) -> bool:
    """Lock an open file; whether nobody else has it, and it is still the one at its path."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nothing is ever removed there
        return True
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that killed processes of this machine left in a folder.

    Those of a live process are locked and stay; so do those of other machines, and everything where the operating or
    the file system has no such locks.
    """
    found = []
    with suppress(OSError), os.scandir(folder) as entries:  # a folder may be written to and not be listed
        found = [entry.path for entry in entries if LEFTOVER.fullmatch(entry.name)]
    for path in found if fcntl is not None else ():
        with suppress(OSError):  # gone meanwhile, locked, a link, or of another user
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False)):
                    os.unlink(path)
            finally:
                os.close(handle)


@contextmanager
def opened_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its place in one step, when the block ends without an error.

    It may also be written by its `name`, by a library that takes a path.

    Raises: OSError; the old file is then as it was.
    """
    with temporary_beside(path) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
        if fcntl is None:
            file.close()  # Windows renames no open file
        os.replace(Path(file.name), path)  # while it is locked


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


def restore(hint: Any, value: Any) -> Any:
    """A frozen record from its plain data, by the types of its fields; what `json_ready` made text is a number again.

    Names that are no fields are left out: they are what follows from the fields.

    Raises: ValueError for data of another type, with what was expected.

    Example:
        >>> restore(tuple[float, ...], [1, "inf"])
        (1.0, inf)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or (origin is Literal and value in inner) or (value is None and type(None) in inner):
        return value
    if origin in (Union, types.UnionType):
        return restore(next(kind for kind in inner if kind is not type(None)), value)
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) == len(value):
            return tuple(restore(kind, item) for kind, item in zip(kinds, value, strict=True))
    if origin is dict and isinstance(value, Mapping):
        return {restore(inner[0], key): restore(inner[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        hints = get_type_hints(hint)
        known = [field.name for field in dataclasses.fields(hint) if field.name in value]
        try:
            return hint(**{name: restore(hints[name], value[name]) for name in known})
        except TypeError as error:
            raise ValueError(f"expected all fields of {hint.__name__}: {error}") from error
    if hint is float and (value in ("inf", "-inf", "nan") or (isinstance(value, int) and not isinstance(value, bool))):
        return float(value)
    if hint in (float, int, str, bool) and type(value) is hint:
        return value
    raise ValueError(f"expected {getattr(hint, '__name__', hint)}, found {value!r}"[:200])
