"""Cached files that are written piece by piece, and gone on with after a kill: the last whole piece is where to go on.

Beside the files lies a journal with a line for each piece: how long the files are with it, its sha256, and what is
needed to make the next one. A file counts once all are done, when `CacheEntry` knows its sum.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from wellcond.lab.data.disk_cache import CacheEntry, CacheError, canonical_json

ABOUT, JOURNAL = "about.json", "journal"
State = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """What to append to each file, and the state from which the next piece can be made."""

    content: Mapping[str, bytes]
    state: State


def find_grown(entry: CacheEntry, names: Sequence[str]) -> State | None:
    """The last state if all files are whole, else None. A file is read whole only once in a process."""
    about = entry.read(ABOUT)
    if about is None:
        return None
    for name in names:
        path = entry.folder / name
        if _seen_before(path):
            continue
        if entry.find(name) is None:
            return None
        _SEEN.add(_identity(path))
    return json.loads(about)


def grow(
    entry: CacheEntry,
    names: Sequence[str],
    pieces: Callable[[State | None], Iterator[Piece]],
    waiting: Callable[[], None] | None = None,
) -> State:
    """Make the files, or what is missing of them, while no other process does.

    Args:
        entry: Where.
        names: Of the files.
        pieces: Given a state, or None at the beginning, yields what follows.
        waiting: Called again and again while another process makes them.

    Returns: The last state.

    Raises:
        CacheError: the cache cannot be written.
    """
    with entry.locked(waiting):
        found = find_grown(entry, names)
        if found is not None:
            return found
        with _named_errors(entry):
            writer = _Writer(entry.folder, names)
        with contextlib.closing(writer):
            for piece in pieces(writer.state):
                with _named_errors(entry):
                    writer.append(piece)
        for name, digest in writer.digests.items():
            if entry.seal(name) != digest.hexdigest():
                raise CacheError(
                    f"{entry.folder / name}: another process wrote to the file. The file system may know no locks: "
                    "run one process first, or set WELLCOND_CACHE to another folder"
                )
        state = writer.state or {}
        entry.write(ABOUT, canonical_json(state).encode())
        (entry.folder / JOURNAL).unlink(missing_ok=True)
        return state


class _Writer:
    """Files open at the end of their last whole piece."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.state: State | None = None
        self.digests = {name: hashlib.sha256() for name in names}
        self._sizes = dict.fromkeys(names, 0)
        self._files: dict[str, BinaryIO] = {}
        self._journal: BinaryIO | None = None
        if not (folder / JOURNAL).exists():
            # Damaged files, which another process may have mapped: that one keeps them as they are.
            for name in names:
                (folder / name).unlink(missing_ok=True)
        try:
            for name in names:
                self._files[name] = _open(folder / name)
            self._journal = _open(folder / JOURNAL)
            self._recover()
        except BaseException:
            self.close()
            raise

    def append(self, piece: Piece) -> None:
        """Write a piece, then its line."""
        sums = {}
        for name, file in self._files.items():
            content = piece.content.get(name, b"")
            file.write(content)
            file.flush()
            self.digests[name].update(content)
            self._sizes[name] += len(content)
            sums[name] = hashlib.sha256(content).hexdigest()
        self.state = piece.state
        assert self._journal is not None
        line = {"sizes": self._sizes, "sha256": sums, "state": piece.state}
        self._journal.write(canonical_json(line).encode() + b"\n")
        self._journal.flush()

    def close(self) -> None:
        """Close all files."""
        for file in (*self._files.values(), *([self._journal] if self._journal else [])):
            file.close()

    def _recover(self) -> None:
        """Go to the end of the last piece that is whole, and cut off what follows."""
        assert self._journal is not None
        end = 0
        for line in self._journal:
            if not self._take(line):
                break
            end += len(line)
        for name, file in self._files.items():
            file.truncate(self._sizes[name])
            file.seek(self._sizes[name])
        self._journal.truncate(end)
        self._journal.seek(end)

    def _take(self, line: bytes) -> bool:
        """Whether the files hold the piece of this line."""
        try:
            entry = json.loads(line)
            sizes, sums, state = entry["sizes"], entry["sha256"], entry["state"]
            contents = {name: file.read(sizes[name] - self._sizes[name]) for name, file in self._files.items()}
            whole = all(hashlib.sha256(content).hexdigest() == sums[name] for name, content in contents.items())
        except (ValueError, KeyError, TypeError):
            return False
        if not whole or not line.endswith(b"\n"):
            return False
        for name, content in contents.items():
            self.digests[name].update(content)
        self._sizes, self.state = sizes, state
        return True


def _open(path: Path) -> BinaryIO:
    """To read and write, at its beginning; made if it is missing."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "r+b")


@contextlib.contextmanager
def _named_errors(entry: CacheEntry) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"{entry.folder}: the cache cannot be written: {error.strerror or error}. Make room or give access there, "
            "or set WELLCOND_CACHE to another folder."
        ) from error


_SEEN: set[tuple[str, int, int]] = set()


def _identity(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path), status.st_size, status.st_mtime_ns


def _seen_before(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return _identity(path) in _SEEN
    return False
