"""One run, one folder: a record, three logs and checkpoints. Nothing in it is ever half written.

`run.json` and checkpoints are replaced in one step. The logs only grow; a checkpoint notes how long they were and what
they held, and resuming cuts them back to that, so that a run killed at any moment ends with the same files. Nothing
outside of the folder is ever written or deleted, whatever links it holds.
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
    """A run's folder that cannot be used or written."""


class FolderInUse(RunError):
    """Another process is writing this run."""


class RunFolder:
    """Files of one run."""

    def __init__(self, path: Path) -> None:
        """The folder is made when it is opened."""
        self.path = path
        self._lock: BinaryIO | None = None
        self._logs: dict[str, _Log] = {}

    @contextlib.contextmanager
    def opened(self) -> Iterator[RunFolder]:
        """Make the folder and hold it against other processes; the system lets go of it even after a kill.

        Raises: FolderInUse if another process holds it; RunError if it cannot be made, or a link leads out of it.
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
        """Raise RunError if the folder that is held was deleted, or another one has its name now."""
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
        """Length and checksum of each log that was written or cut."""
        return {name: log_mark(log.size, log.digest) for name, log in self._logs.items()}

    def cut_logs(self, marks: dict[str, Any]) -> None:
        """Forget what was logged after a checkpoint.

        Args:
            marks: of `log_marks`, as the checkpoint has them; sizes only in older ones.

        Raises: RunError if a log is not what the checkpoint says; nothing is cut then.
        """
        advice = f"Delete {self.path / 'checkpoints'} to start the run anew"
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
        """Let the record speak of the logs as they will be: whoever reads it after a kill would miss lines."""
        record = self.read_record()
        if record is not None and "logs" in record:
            self.write_record(record | {"logs": marks})

    def read_log(self, log: str) -> list[dict[str, Any]]:
        """Rows of a log."""
        path = self.path / log
        # Not splitlines: a name may hold one of the other characters that it takes for the end of a line.
        lines = path.read_text("utf-8").split("\n") if path.exists() else []
        return [json.loads(line) for line in lines if line]

    def write_record(self, record: dict[str, Any]) -> None:
        """Replace run.json."""
        self.check_there()
        with writing(self.path / "run.json"):
            write_atomically(self.path / "run.json", to_json(seal(record), indent=1) + "\n")

    def read_record(self) -> dict[str, Any] | None:
        """run.json; None if there is none.

        Raises: RunError if it is not a record, was changed, or has scores that cannot be.
        """
        path = self.path / "run.json"
        if not path.exists():
            return None
        advice = f"Restore it, or delete {self.path} to start this run anew"
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
    """Raise RunError if a link in the folder of a run leads out of it: what is there may be anybody's."""
    inside = folder.resolve()
    for place, folders, names in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *names)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
                raise RunError(f"{path} is a link to {os.readlink(path)}, outside of the run's folder; remove the link")


class _Log:
    """A file that only grows, with length and checksum of what it holds."""

    def __init__(self, path: Path, size: int | None = None, digest: hashlib._Hash | None = None) -> None:
        # Unbuffered: bytes that do not fit on the disk must not be written again on closing.
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
    """Write all of it or, on a full disk, nothing."""
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
    """A forked process (a DataLoader's worker) must not keep a folder when this one is killed."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: [lock.close() for lock in _HELD])


def _hold(lock: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not on this system: two processes in one folder are then the user's affair
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):  # a file system without locks
            return
        raise FolderInUse(f"{path}: another process is writing this run; wait for it or stop it") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in errors of writing it, and say that nothing is lost."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error.strerror or error}. Make room or give another folder, then run the "
            "same command: it goes on from the last checkpoint"
        ) from error
