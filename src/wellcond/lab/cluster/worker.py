"""The end of the Ray engine that trains: an actor that does one run after the other and is asked for what happens."""

from __future__ import annotations

import platform
import queue
import shutil
import tempfile
import threading
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

from wellcond.errors import WellcondError
from wellcond.lab.cluster.folder_copy import read_chunk, take_snapshot, write_chunk
from wellcond.lab.models.teachers import file_sha256
from wellcond.lab.train.compare import Message, do_job
from wellcond.lab.train.length import StopFlag
from wellcond.lab.train.provenance import installed_version
from wellcond.lab.train.run import Job


@dataclass(frozen=True)
class Greeting:
    """What a worker says of itself."""

    host: str
    version: str | None
    shares_folder: bool
    """Whether it sees the folder of the comparison."""
    missing: tuple[str, ...]
    """Files of code that it does not see, or sees with another content."""


class RunWorker:
    """A Ray actor. Its runs have a thread of their own, so that it can answer meanwhile."""

    def __init__(self) -> None:
        """Nothing to do yet."""
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stop = StopFlag()
        self._scratch: Path | None = None
        self._snapshot_wanted = True

    def greet(self, token: str, code: dict[str, str]) -> Greeting:
        """Say who this is, and what it sees: the token's file, and files of code with these digests."""
        missing = [path for path, digest in code.items() if _digest(path) != digest]
        return Greeting(platform.node(), installed_version("wellcond"), Path(token).is_file(), tuple(missing))

    def begin(self, job: Job) -> list[Message]:
        """Start a run, in the scratch folder if there is one; there are no messages yet."""
        self._stop, self._snapshot_wanted = StopFlag(), True
        if self._scratch is not None:
            job = replace(job, folder=self._scratch / "run")
        threading.Thread(target=self._work, args=(job, self._stop), daemon=True).start()
        return []

    def receive(self) -> list[Message]:
        """What has happened since the last call; waits a second for something to happen."""
        messages = []
        try:
            messages.append(self._outbox.get(timeout=1))
            while True:
                messages.append(self._outbox.get_nowait())
        except queue.Empty:
            return messages

    def stop(self) -> None:
        """Finish the step and save."""
        self._stop.requested = True

    def _work(self, job: Job, stop: StopFlag) -> None:
        try:
            do_job(job, self._send, stop)
        except Exception as error:
            self._send(("error", f"{job.title}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))

    def _send(self, message: Message) -> None:
        """Into the outbox; files that belong to a message go ahead of it."""
        if self._scratch is not None:
            kind, content = message
            event = content["event"] if kind == "event" else None
            if event == "end" or kind.startswith("error") or (event == "saved" and self._snapshot_wanted):
                self._snapshot_wanted = False
                # A name of its own: an earlier snapshot may still be on its way.
                place = Path(tempfile.mkdtemp(prefix="snapshot-", dir=self._scratch))
                self._outbox.put(("files", (str(place), take_snapshot(self._scratch / "run", place))))
        self._outbox.put(message)

    # For machines without a common file system

    def make_scratch(self) -> None:
        """An empty folder for the next run."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="wellcond-run-"))

    def write(self, name: str, offset: int, chunk: bytes) -> None:
        """A piece of a file of the next run, which resumes from it."""
        assert self._scratch is not None
        write_chunk(self._scratch / "run", name, offset, chunk)

    def read(self, place: str, name: str, offset: int, size: int) -> bytes:
        """A piece of a file of a snapshot."""
        return read_chunk(Path(place) / name, offset, size)

    def forget(self, place: str) -> None:
        """A snapshot has arrived: the next checkpoint may be one."""
        shutil.rmtree(place, ignore_errors=True)
        self._snapshot_wanted = True

    def leave(self) -> None:
        """Remove the scratch folder."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _digest(path: str) -> str | None:
    try:
        return file_sha256(Path(path))
    except WellcondError:
        return None
