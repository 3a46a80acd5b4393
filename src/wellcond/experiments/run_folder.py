"""One run, one folder: a record, three logs and checkpoints. Nothing in it is ever half written.

`run.json` and checkpoints are replaced in one step. The logs only grow; a checkpoint notes how long they were, and
resuming cuts them back to that length, so that a run killed at any moment ends with the same files.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from wellcond.errors import WellcondError
from wellcond.files import to_json, write_atomically

SCHEMA = 1
LOGS = ("steps.jsonl", "evaluations.jsonl", "conditioning.jsonl")
COMPLETE = ("finished", "diverged")


class RunError(WellcondError, RuntimeError):
    """A run's folder that cannot be used or written."""


class FolderInUse(RunError):
    """Another process is writing this run."""


class RunFolder:
    """Files of one run."""

    def __init__(self, path: Path) -> None:
        """The folder is made when it is opened."""
        self.path = path
        self._logs: dict[str, BinaryIO] = {}

    @contextlib.contextmanager
    def opened(self) -> Iterator[RunFolder]:
        """Make the folder and hold it against other processes; the system lets go of it even after a kill.

        Raises: FolderInUse if another process holds it; RunError if it cannot be made.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_links()
            lock = open(self.path / "lock", "ab")
        try:
            _hold(lock, self.path)
            _forget_in_children()
            _HELD.add(lock)
            yield self
        finally:
            _HELD.discard(lock)
            for log in self._logs.values():
                log.close()
            self._logs.clear()
            lock.close()

    def _check_links(self) -> None:
        """Raise RunError for a link among the files that grow or are cut: what it leads to may be anybody's."""
        for name in ("lock", *LOGS):
            if (path := self.path / name).is_symlink():
                raise RunError(f"{path} is a link to {os.readlink(path)}, which a run could cut or write to; remove it")

    def append(self, log: str, rows: Iterable[dict[str, Any]]) -> None:
        """Add one line for each row."""
        with writing(self.path / log):
            if log not in self._logs:
                # Unbuffered: bytes that do not fit on the disk must not be written again on closing.
                self._logs[log] = open(self.path / log, "ab", buffering=0)
            _append_whole(self._logs[log], "".join(to_json(row) + "\n" for row in rows).encode("utf-8"))

    def log_sizes(self) -> dict[str, int]:
        """Bytes in each log."""
        return {log: path.stat().st_size if (path := self.path / log).exists() else 0 for log in LOGS}

    def cut_logs(self, sizes: dict[str, int]) -> None:
        """Forget what was logged after a checkpoint.

        Raises: RunError if a log is shorter than the checkpoint says, so that lines are missing.
        """
        for log in LOGS:
            path, size = self.path / log, sizes.get(log, 0)
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                raise RunError(f"{path}: expected at least {size} bytes, found {found}; lines were lost. Start it anew")
            with writing(path), open(path, "ab") as file:
                file.truncate(size)

    def read_log(self, log: str) -> list[dict[str, Any]]:
        """Rows of a log."""
        path = self.path / log
        # Not splitlines: a name may hold one of the other characters that it takes for the end of a line.
        lines = path.read_text("utf-8").split("\n") if path.exists() else []
        return [json.loads(line) for line in lines if line]

    def write_record(self, record: dict[str, Any]) -> None:
        """Replace run.json."""
        with writing(self.path / "run.json"):
            write_atomically(self.path / "run.json", to_json(record, indent=1) + "\n")

    def read_record(self) -> dict[str, Any] | None:
        """run.json; None if there is none.

        Raises: RunError if it is not a record.
        """
        path = self.path / "run.json"
        if not path.exists():
            return None
        try:
            record = json.loads(path.read_text("utf-8"))
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path} is not JSON ({error}); delete the folder to start this run anew") from error
        if not isinstance(record, dict) or record.get("kind") != "wellcond-run" or record.get("schema") != SCHEMA:
            raise RunError(f"{path}: expected a run record of schema {SCHEMA}, found something else")
        return record


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
