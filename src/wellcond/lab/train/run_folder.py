"""One run, one folder: a record, three logs and checkpoints, each written atomically.

`run.json` and checkpoints are replaced in one step. Logs are append-only; a checkpoint stores their lengths and
checksums, and resuming truncates them to those, so that a run killed at any moment ends with the same files. Nothing
outside the folder is ever written or deleted, whatever links it contains.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from wellcond.errors import FolderInUse, RunError
from wellcond.files import to_json, write_atomically
from wellcond.lab.records import LOGS, log_mark, read_record, seal


class RunFolder:
    """Files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._logs: dict[str, tuple[int, hashlib._Hash]] = {}

    @contextlib.contextmanager
    def opened(self, patience: float = 0) -> Iterator[RunFolder]:
        """Create and lock the folder; FolderInUse if another process has it for longer than `patience`, in seconds."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            check_links(self.path)
            lock = FileLock(self.path / "lock", timeout=patience, thread_local=False)
            try:
                lock.acquire()
            except Timeout as error:
                raise FolderInUse(
                    f"{self.path}: another process is writing this run; wait for it or stop it, or give another folder"
                ) from error
        try:
            yield self
        finally:
            self._logs.clear()
            lock.release()

    def append(self, log: str, rows: Iterable[dict[str, Any]]) -> None:
        """Add one line for each row."""
        path, content = self.path / log, "".join(to_json(row) + "\n" for row in rows).encode("utf-8")
        with writing(path):
            size, digest = self._logs.get(log) or _start_of(path, path.stat().st_size if path.exists() else 0)
            with open(path, "ab") as file:
                file.write(content)
        digest.update(content)
        self._logs[log] = size + len(content), digest

    def log_marks(self) -> dict[str, dict[str, Any]]:
        """Length and checksum of each log that was written or truncated."""
        return {name: log_mark(*state) for name, state in self._logs.items()}

    def cut_logs(self, marks: dict[str, Any]) -> None:
        """Truncate the logs to their marks at a checkpoint; none, but RunError, if one of them does not match."""
        cut = {}
        for name in LOGS:
            path, mark = self.path / name, marks.get(name, log_mark(0, hashlib.sha256()))
            cut[name] = _start_of(path, mark["bytes"])
            if log_mark(*cut[name]) != mark:
                raise RunError(
                    f"{path}: lines were lost or changed, or the checkpoint beside it is of another run. Delete "
                    f"{self.path / 'checkpoints'} to restart the run"
                )
        # The record has the new marks first: after a kill in between, the logs are longer than their marks.
        self._logs, record = cut, self.read_record()
        if record is not None and "logs" in record:
            self.write_record(record | {"logs": self.log_marks()})
        for name, (size, _) in cut.items():
            with writing(self.path / name), open(self.path / name, "ab") as file:
                file.truncate(size)

    def write_record(self, record: dict[str, Any]) -> None:
        """Replace run.json."""
        write_sealed(self.path / "run.json", record)

    def read_record(self) -> dict[str, Any] | None:
        """run.json; None if there is none, RunError if it is not a record, was changed, or has impossible scores."""
        path = self.path / "run.json"
        advice = f"Restore it, or delete {self.path} to restart this run"
        return read_sealed(path, "wellcond-run", advice) if path.exists() else None


def write_sealed(path: Path, record: dict[str, Any]) -> None:
    """Replace a record in its folder, with a checksum."""
    with writing(path):
        write_atomically(path, to_json(seal(record), indent=1) + "\n")


def read_sealed(path: Path, kind: str, advice: str, needed: Iterable[str] = ()) -> dict[str, Any]:
    """A record of a kind with the fields needed; RunError with the advice if it is anything else, or was changed."""
    try:
        record = read_record(path, kind)
        if missing := ", ".join(sorted(set(needed) - set(record))):
            raise ValueError(f"{missing} missing")
        return record
    except ValueError as error:
        raise RunError(f"{path}: {error}\n  {advice}") from error


def check_links(folder: Path) -> None:
    """Raise RunError if a link in a run folder points outside it, where other files could be overwritten."""
    inside = folder.resolve()
    for place, folders, names in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *names)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
                raise RunError(f"{path} is a link to {os.readlink(path)}, outside the run's folder; remove the link")


def _start_of(path: Path, size: int) -> tuple[int, hashlib._Hash]:
    """Length and checksum of the first bytes of a file, which may be missing if there are none."""
    with open(path, "rb") if size and path.exists() else io.BytesIO() as file:
        content = file.read(size)
    return len(content), hashlib.sha256(content)


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
