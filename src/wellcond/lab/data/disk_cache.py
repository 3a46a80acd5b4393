"""Files on disk that can be made again, in folders named by what they are made from.

The root is WELLCOND_CACHE, else wellcond in XDG_CACHE_HOME, else ~/.cache/wellcond; any part of it may be deleted while
nothing runs. A file is written beside its place and renamed, so that it is whole or missing, also after a kill.
Reading needs neither a lock nor write access.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from wellcond.errors import WellcondError
from wellcond.files import opened_atomically
from wellcond.lab.data.progress import tell

POLL_SECONDS = 0.2
T = TypeVar("T")


class CacheError(WellcondError, OSError):
    """The cache cannot be written; callers decide whether to go on without it."""


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
    """A folder of files that follow from `made_from` alone: plain data, with the version of the code that uses them."""

    def __init__(self, kind: str, made_from: Mapping[str, Any], *, root: Path | None = None) -> None:
        """`kind` is a folder of the root, `cache_root()` by default; nothing is written yet."""
        self.made_from = canonical_json(made_from)
        key = hashlib.sha256(self.made_from.encode()).hexdigest()
        self.folder = (cache_root() if root is None else root) / kind / key[:32]

    def find(self, name: str) -> Path | None:
        """Path of a file; None if it is missing."""
        path = self.folder / name
        return path if path.is_file() else None

    def read(self, name: str) -> bytes | None:
        """Content of a file; None if it is missing."""
        try:
            return (self.folder / name).read_bytes()
        except OSError:
            return None

    def count(self) -> int:
        """Number of files that are complete: how far another process is."""
        return sum(path.name not in ("lock", "made_from.json") for path in self.folder.glob("[!.]*"))

    def write(self, name: str, content: bytes) -> None:
        """Add or replace a file.

        Raises: CacheError; a file of that name is then as it was.
        """
        with self.adding(name) as file:
            file.write(content)

    @contextlib.contextmanager
    def adding(self, name: str) -> Iterator[BinaryIO]:
        """A file to write piece by piece; it is there when the block ends without an error.

        Raises: CacheError; a file of that name is then as it was.
        """
        with self._named_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            with opened_atomically(self.folder / name) as file:
                yield file

    @contextlib.contextmanager
    def locked(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the entry, so that only one process makes what is missing; the system releases it after a kill.

        Look again for what was missing when the block begins; `waiting` is called while another process holds it.

        Raises: CacheError
        """
        import filelock  # of torch

        lock = filelock.FileLock(self.folder / "lock")
        with self._named_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            while not lock.is_locked:
                try:
                    lock.acquire(timeout=POLL_SECONDS)
                except filelock.Timeout:
                    waiting()
        try:
            for left_by_a_kill in self.folder.glob(".*.partial"):
                left_by_a_kill.unlink(missing_ok=True)
            self.write("made_from.json", self.made_from.encode())
            yield
        finally:
            lock.release()

    def find_or_make(self, find: Callable[[], T | None], make: Callable[[], T], what: str) -> T:
        """What `find` gives or else what `make` gives, which one process calls while the others wait.

        Raises: CacheError
        """
        found = find()
        if found is not None:
            return found
        with self.locked(lambda: tell(f"waiting for another process: {what}", 0, 1)):
            found = find()
            return make() if found is None else found

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CacheError(
                f"{self.folder}: the cache cannot be written: {error.strerror or error}. Make room or give access "
                f"there, or set WELLCOND_CACHE to another folder."
            ) from error
