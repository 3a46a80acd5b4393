"""What runs on the machines of a Ray cluster: one task for each run, and a mailbox beside the command."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tarfile
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wellcond.errors import WellcondError
from wellcond.lab.models.trained import file_sha256
from wellcond.lab.train.checkpoint import OURS
from wellcond.lab.train.compare import Message, do_job
from wellcond.lab.train.length import StopFlag
from wellcond.lab.train.run import Job, installed_version
from wellcond.lab.train.run_folder import RunError, check_links, writing

BEGAN, FILES, NO_FOLDER = "began", "files", "no common folder"
"""Kinds of messages beside those of `Dispatch`."""
CHUNK = 64 * 2**20
SECONDS_BETWEEN_LOOKS = 0.5


class Mailbox:
    """An actor that keeps messages of runs until the command takes them, and tells runs to stop."""

    def __init__(self) -> None:
        """Empty."""
        self._new: list[tuple[int, Message]] = []
        self._taken: list[tuple[int, Message]] = []
        self._stopping = False

    def put(self, number: int, message: Message) -> None:
        """Keep a message of a run."""
        self._new.append((number, message))

    def take(self) -> list[tuple[int, Message]]:
        """All new messages; the command calls it again when it has dealt with them."""
        self._taken, self._new = self._new, []
        return self._taken

    def holds_files(self, number: int) -> bool:
        """Whether files of a run are still on their way."""
        return any(sender == number and kind == FILES for sender, (kind, _) in [*self._new, *self._taken])

    def stop(self) -> None:
        """Ask all runs to stop."""
        self._stopping = True

    def stopping(self) -> bool:
        """Whether runs shall stop."""
        return self._stopping


@dataclass(frozen=True)
class Command:
    """What a machine must have in common with that of the command."""

    token: str
    """A file in the folder of the comparison: who sees it writes there."""
    version: str | None
    code: dict[str, str]
    """Digests of files of the user's code."""

    def problem(self) -> str | None:
        """Why this machine cannot do the runs of the command."""
        host, version = platform.node(), installed_version("wellcond")
        if version != self.version:
            return (
                f"the Ray worker on {host} has wellcond {version}, this machine has {self.version}: their runs could "
                "not be compared. Install the same version everywhere"
            )
        missing = [path for path, digest in self.code.items() if _digest(path) != digest]
        if missing:
            return (
                f"the Ray worker on {host} does not see {', '.join(missing)}, or sees another content; code that a "
                "recipe names must be at the same path on every machine"
            )
        return None


def _digest(path: str) -> str | None:
    try:
        return file_sha256(Path(path))
    except WellcondError:
        return None


def run_task(job: Job, number: int, mailbox: Any, files: list[Any] | None, command: Command) -> Message:
    """Do a run and return its last message; the others go to the mailbox, under a number.

    With `files`, the run's folder so far, it is done in a temporary folder that is sent back; otherwise in place.
    """
    import ray

    if problem := command.problem():
        return "error for all", problem
    if files is None and not Path(command.token).is_file():
        return NO_FOLDER, None
    mailbox.put.remote(number, (BEGAN, None))
    last: list[Message] = []

    def send(message: Message) -> None:
        kind, content = message
        if kind != "event":
            last.append(message)
            return
        mailbox.put.remote(number, message)
        if files is not None and content["event"] == "saved" and not ray.get(mailbox.holds_files.remote(number)):
            send_files()

    def send_files() -> None:
        mailbox.put.remote(number, (FILES, pack(job.folder, ray.put)))

    with contextlib.ExitStack() as stack:
        if files is not None:
            scratch = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="wellcond-run-", ignore_cleanup_errors=True)
            )
            job = replace(job, folder=Path(scratch, "run"))
            unpack(map(ray.get, files), job.folder)
        stop = stack.enter_context(_stopped_by(mailbox, ray))
        try:
            do_job(job, send, stop)
        except Exception as error:
            last.append(("error", f"{job.title}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
        if files is not None:
            send_files()
        while ray.get(mailbox.holds_files.remote(number)):  # once at least: all messages have arrived then
            time.sleep(SECONDS_BETWEEN_LOOKS)
    kind, content = last[-1]
    if kind == "error for all" and files is not None:
        content = f"{content}\n  (on {platform.node()}, which does not see this machine's files)"
    return kind, content


@contextlib.contextmanager
def _stopped_by(mailbox: Any, ray: Any) -> Any:
    """A stop flag that is set when the mailbox says so, or when it is gone and the command with it."""
    stop, over = StopFlag(), threading.Event()

    def look() -> None:
        while not over.wait(SECONDS_BETWEEN_LOOKS) and not stop.requested:
            try:
                stop.requested = ray.get(mailbox.stopping.remote())
            except ray.exceptions.RayError:
                stop.requested = True

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        over.set()
        thread.join()


# A run's folder on the way between machines without a common file system


def pack(folder: Path, put: Callable[[bytes], Any]) -> list[Any]:
    """A tar archive of the files of a run, in pieces; returns what `put` gives for each."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for path in sorted(folder.rglob("*")):
                name = path.relative_to(folder).as_posix()
                if path.is_file() and not path.is_symlink() and name != "lock" and ".partial" not in name:
                    archive.add(path, name)
        file.seek(0)
        return [put(chunk) for chunk in iter(lambda: file.read(CHUNK), b"")]


def unpack(chunks: Iterable[bytes], folder: Path) -> None:
    """Write the files of an archive into a folder.

    Raises: RunError if the archive is damaged, or a name leads out of the folder; nothing is written outside.
    """
    with writing(folder), tempfile.TemporaryFile() as file:
        file.writelines(chunks)
        file.seek(0)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with tarfile.open(fileobj=file) as archive:
                files = [member for member in archive if member.isreg()]
                archive.extractall(folder, files, filter="data")
        except tarfile.TarError as error:
            raise RunError(f"the files that a worker sent for {folder} cannot be used: {error}") from error


def receive(chunks: Iterable[bytes], folder: Path) -> None:
    """Replace the files of a run by those of an archive: at every moment the folder can be resumed from.

    Logs go first, since a checkpoint needs logs that are at least as long as when it was made; the record goes last,
    since it says what is complete.

    Raises: RunError if they cannot be written, or would be written outside the folder.
    """
    incoming, ours = folder / ".incoming.partial", folder / "checkpoints"
    check_links(folder)
    with writing(folder):
        shutil.rmtree(incoming, ignore_errors=True)
        unpack(chunks, incoming)
        names = [path.relative_to(incoming) for path in sorted(incoming.rglob("*")) if path.is_file()]
        for name in [name for name in names if name.parts[0] not in ("checkpoints", "run.json")]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(incoming / name, folder / name)
        arrived = {name.parts[1] for name in names if name.parts[0] == "checkpoints"}
        for step in arrived:
            ours.mkdir(exist_ok=True)
            if not (ours / step).exists():  # a checkpoint of the same step is whole, and the same
                os.replace(incoming / "checkpoints" / step, ours / step)
        for place in list(ours.iterdir()) if arrived else ():
            if place.name not in arrived and OURS.fullmatch(place.name):
                shutil.rmtree(place, ignore_errors=True)
        if (incoming / "run.json").is_file():
            os.replace(incoming / "run.json", folder / "run.json")
        shutil.rmtree(incoming, ignore_errors=True)
