"""One run, one folder: a record, three logs and checkpoints, each written atomically.

`run.json` and checkpoints are replaced in one step. Logs are append-only; a checkpoint stores their lengths and
checksums, and resuming truncates them to those, so that a run killed at any moment ends with the same files. Nothing
outside the folder is ever written or deleted, whatever links it contains.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from wellcond.errors import WellcondError
from wellcond.files import to_json, write_atomically
from wellcond.run_records import CHECKSUM, LOGS, SCHEMA, find_problem, log_mark, seal


class RunError(WellcondError, RuntimeError):
    """A run folder that cannot be used or written."""


class FolderInUse(RunError):
    """Another process holds the lock of this run."""


class RunFolder:
    """Files of one run."""

    def __init__(self, path: Path) -> None:
        """The folder is created when it is opened."""
        self.path = path
        self._lock: BinaryIO | None = None
        self._logs: dict[str, _Log] = {}

    @contextlib.contextmanager
    def opened(self) -> Iterator[RunFolder]:
        """Create the folder and lock it; the operating system releases the lock even after a kill.

        Raises: FolderInUse if another process has the lock; RunError if the folder cannot be created, or contains a
            link to the outside.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            check_links(self.path)
            lock = open(self.path / "lock", "ab")
        try:
            _hold(lock, self.path)
            _forget_in_children()
            _HELD.add(lock)
            self._lock = lock
            self.check_there()
            yield self
        finally:
            _HELD.discard(lock)
            self._lock = None
            for log in self._logs.values():
                log.file.close()
            self._logs.clear()
            lock.close()

    def check_there(self) -> None:
        """Raise RunError if the locked folder was deleted or replaced."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path / "lock"), os.fstat(self._lock.fileno())):
                return
        raise RunError(f"{self.path} or its file `lock` was deleted during the run; run the same command to repeat it")

    def append(self, log: str, rows: Iterable[dict[str, Any]]) -> None:
        """Add one line for each row."""
        self.check_there()
        with writing(self.path / log):
            if log not in self._logs:
                self._logs[log] = _Log(self.path / log)
            self._logs[log].append("".join(to_json(row) + "\n" for row in rows).encode("utf-8"))

    def log_marks(self) -> dict[str, dict[str, Any]]:
        """Length and checksum of each log that was written or truncated."""
        return {name: log_mark(log.size, log.digest) for name, log in self._logs.items()}

    def cut_logs(self, marks: dict[str, Any]) -> None:
        """Truncate the logs to their lengths at a checkpoint.

        Args:
            marks: from `log_marks`, as stored in the checkpoint; sizes only in older ones.

        Raises: RunError if a log does not match its mark; no log is truncated then.
        """
        advice = f"Delete {self.path / 'checkpoints'} to restart the run"
        cut = {}
        for name in LOGS:
            path, mark = self.path / name, marks.get(name, 0)
            size = mark["bytes"] if isinstance(mark, dict) else mark
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                raise RunError(
                    f"{path}: expected at least {size} bytes, found {found}; lines were lost, or the checkpoint in "
                    f"{self.path / 'checkpoints'} is of another run. {advice}"
                )
            digest = _digest_of_start(path, size)
            if isinstance(mark, dict) and mark != log_mark(size, digest):
                raise RunError(
                    f"{path} is not the log of the checkpoint in {self.path / 'checkpoints'}: one of them was changed, "
                    f"or is of another run. {advice}"
                )
            cut[name] = size, digest
        self._note_cut({name: log_mark(*state) for name, state in cut.items()})
        for name, (size, digest) in cut.items():
            with writing(self.path / name), open(self.path / name, "ab") as file:
                file.truncate(size)
            if name in self._logs:
                self._logs.pop(name).file.close()
            self._logs[name] = _Log(self.path / name, size, digest)

    def _note_cut(self, marks: dict[str, Any]) -> None:
        """Write the new marks to the record first: after a kill in between, the logs are longer than their marks."""
        record = self.read_record()
        if record is not None and "logs" in record:
            self.write_record(record | {"logs": marks})

    def read_log(self, log: str) -> list[dict[str, Any]]:
        """Rows of a log."""
        path = self.path / log
        # Not splitlines: a name may contain another character that it treats as a line break.
        lines = path.read_text("utf-8").split("\n") if path.exists() else []
        return [json.loads(line) for line in lines if line]

    def write_record(self, record: dict[str, Any]) -> None:
        """Replace run.json."""
        self.check_there()
        with writing(self.path / "run.json"):
            write_atomically(self.path / "run.json", to_json(seal(record), indent=1) + "\n")

    def read_record(self) -> dict[str, Any] | None:
        """run.json; None if there is none.

        Raises: RunError if it is not a record, was changed, or has impossible scores.
        """
        path = self.path / "run.json"
        if not path.exists():
            return None
        advice = f"Restore it, or delete {self.path} to restart this run"
        try:
            record = json.loads(path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path} is not JSON ({error})\n  {advice}") from error
        if not isinstance(record, dict) or record.get("kind") != "wellcond-run" or record.get("schema") != SCHEMA:
            raise RunError(f"{path}: expected a run record of schema {SCHEMA}, found something else\n  {advice}")
        if problem := find_problem(record):
            raise RunError(f"{path}: {problem}\n  {advice}")
        return {key: value for key, value in record.items() if key != CHECKSUM}


def check_links(folder: Path) -> None:
    """Raise RunError if a link in a run folder points outside it, where other files could be overwritten."""
    inside = folder.resolve()
    for place, folders, names in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *names)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
                raise RunError(f"{path} is a link to {os.readlink(path)}, outside the run's folder; remove the link")


class _Log:
    """An append-only file with the length and checksum of its content."""

    def __init__(self, path: Path, size: int | None = None, digest: hashlib._Hash | None = None) -> None:
        # Unbuffered: bytes that did not fit on the disk must not be written again on closing.
        self.file: BinaryIO = open(path, "ab", buffering=0)
        self.size = self.file.tell() if size is None else size
        self.digest = digest or _digest_of_start(path, self.size)

    def append(self, content: bytes) -> None:
        _append_whole(self.file, content)
        self.size += len(content)
        self.digest.update(content)


def _digest_of_start(path: Path, size: int) -> hashlib._Hash:
    digest = hashlib.sha256()
    if size:
        with open(path, "rb") as file:
            while size > 0 and (chunk := file.read(min(size, 2**20))):
                digest.update(chunk)
                size -= len(chunk)
    return digest


def _append_whole(file: BinaryIO, content: bytes) -> None:
    """Write all of the content or, on a full disk, nothing."""
    before = os.fstat(file.fileno()).st_size
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), before)
        raise


_HELD: set[BinaryIO] = set()


@functools.cache
def _forget_in_children() -> None:
    """Release locks in forked processes (DataLoader workers), which may outlive this one."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: [lock.close() for lock in _HELD])


def _hold(lock: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on this system: there is no lock
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):  # a file system without locks
            return
        raise FolderInUse(f"{path}: another process is writing this run; wait for it or stop it") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of writing a file into a RunError with its path and what to do."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error.strerror or error}. Make room or give another folder, then run the "
            "same command: it resumes from the last checkpoint"
        ) from error
