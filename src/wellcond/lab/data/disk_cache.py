"""Files on disk that can be made again: named by what they are made from, checked whenever they are read.

The root is WELLCOND_CACHE, else wellcond in XDG_CACHE_HOME, else ~/.cache/wellcond; any part of it may be deleted while
nothing runs. An entry is a folder. Each of its files is written in one step and counts from the moment its sum (size
and sha256, in a file beside it) is there as well; a file that does not fit its sum is not used, but made again.
Reading needs neither a lock nor write access. A root that cannot be written is a `CacheError`: whether to go on without
a cache is for the caller to decide.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from wellcond.errors import WellcondError
from wellcond.files import opened_atomically, write_atomically

SUM = ".sum"
POLL_SECONDS = 0.2
LEFTOVER_SECONDS = 3600
"""What a killed process left half written is removed after that; younger ones may still be written."""


class CacheError(WellcondError, OSError):
    """The cache cannot be written."""


def cache_root() -> Path:
    """Folder of all entries; it need not exist."""
    named = os.environ.get("WELLCOND_CACHE")
    if named:
        return Path(os.path.expanduser(named)).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):  # relative ones are to be ignored, says the standard
        return Path(shared) / "wellcond"
    return Path(os.path.expanduser("~/.cache/wellcond")).absolute()


def canonical_json(value: Any) -> str:
    """One text for equal values: sorted keys, no spaces, ASCII.

    Example:
        >>> canonical_json({"b": 1.5, "a": ["x"]})
        '{"a":["x"],"b":1.5}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


class CacheEntry:
    """A folder of files that follow from `made_from` alone."""

    def __init__(self, kind: str, made_from: Mapping[str, Any], *, root: Path | None = None) -> None:
        """Nothing is made until something is written.

        Args:
            kind: Folder of the root that the entry lies in.
            made_from: Plain data that decide the content, with the version of the code that makes it.
            root: Instead of `cache_root()`.
        """
        self.made_from = canonical_json(made_from)
        key = hashlib.sha256(self.made_from.encode()).hexdigest()
        self.folder = (cache_root() if root is None else root) / kind / key[:32]

    def find(self, name: str) -> Path | None:
        """Path of a whole file, to be mapped into memory or read; None if it is missing or damaged."""
        path = self.folder / name
        with contextlib.suppress(OSError):
            expected = self._sum(name)
            if expected is not None and path.stat().st_size == expected["size"]:
                with open(path, "rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() == expected["sha256"]:
                        return path
        return None

    def read(self, name: str) -> bytes | None:
        """Content of a whole file; None if it is missing or damaged."""
        with contextlib.suppress(OSError):
            expected = self._sum(name)
            if expected is not None:
                content = (self.folder / name).read_bytes()
                if _sum_of(content) == expected:
                    return content
        return None

    def count(self) -> int:
        """Number of files that are complete, not checked: to show how far another process is."""
        try:
            return sum(name.endswith(SUM) for name in os.listdir(self.folder))
        except OSError:
            return 0

    def write(self, name: str, content: bytes) -> None:
        """Add or replace a file.

        Raises: CacheError; a file of that name is then as it was, or missing.
        """
        with self._writing():
            write_atomically(self.folder / name, content)
            write_atomically(self.folder / f"{name}{SUM}", canonical_json(_sum_of(content)))

    @contextlib.contextmanager
    def adding(self, name: str) -> Iterator[BinaryIO]:
        """A file to write piece by piece; it is there when the block ends without an error.

        Raises: CacheError
        """
        path = self.folder / name
        with self._writing():
            with opened_atomically(path) as file:
                yield file
            self.seal(name)

    def seal(self, name: str) -> str:
        """Let a file count that was written into the folder by other means; returns its sha256.

        Raises: CacheError
        """
        with self._writing(), open(self.folder / name, "r+b") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
            os.fsync(written.fileno())
            described = {"sha256": digest, "size": os.fstat(written.fileno()).st_size}
            write_atomically(self.folder / f"{name}{SUM}", canonical_json(described))
        return digest

    @contextlib.contextmanager
    def locked(self, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the entry, so that only one process makes what is missing; the system lets go of it after a kill.

        Where the system or the file system knows no locks nobody waits: several make the same files then, and the last
        one stays. Look again for what was missing when the block begins.

        Args:
            waiting: Called again and again while another process holds the entry.

        Raises: CacheError
        """
        with self._writing():
            lock = open(self.folder / "lock", "ab")
        with lock:
            while (held := _try_to_hold(lock)) is False:
                if waiting is not None:
                    waiting()
                time.sleep(POLL_SECONDS)
            if held:
                self._remove_leftovers()
            yield

    def _sum(self, name: str) -> Any:
        try:
            found = json.loads((self.folder / f"{name}{SUM}").read_bytes())
        except ValueError:
            return None
        return found if isinstance(found, dict) and found.keys() == {"sha256", "size"} else None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            about = self.folder / "made_from.json"
            if not about.exists():
                write_atomically(about, self.made_from)
            yield
        except OSError as error:
            if isinstance(error, CacheError) or not self._concerns(error):
                raise
            raise CacheError(
                f"{self.folder}: the cache cannot be written: {error.strerror or error}. Make room or give access "
                f"there, or set WELLCOND_CACHE to another folder."
            ) from error

    def _concerns(self, error: OSError) -> bool:
        """Whether an error may be of this entry: in the block of `adding` other files are read as well."""
        if not isinstance(error.filename, str):
            return True
        path = Path(error.filename)
        return self.folder in (path, *path.parents) or path in self.folder.parents

    def _remove_leftovers(self) -> None:
        for partial in self.folder.glob(".*.partial"):
            with contextlib.suppress(OSError):
                if partial.stat().st_mtime < time.time() - LEFTOVER_SECONDS:
                    partial.unlink()


def _sum_of(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


def _try_to_hold(lock: BinaryIO) -> bool | None:
    """True if held, False if another process holds it, None where there are no locks."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return True
