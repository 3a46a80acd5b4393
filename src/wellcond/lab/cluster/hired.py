"""A worker as the driver sees it: what it was asked last, the run it does, and files on their way from it."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from wellcond.errors import WellcondError
from wellcond.lab.cluster.folder_copy import Incoming, chunks_of
from wellcond.lab.cluster.worker import Greeting
from wellcond.lab.train.compare import Message
from wellcond.lab.train.provenance import installed_version
from wellcond.lab.train.run import Job
from wellcond.lab.train.run_folder import RunFolder


class Hired:
    """One worker. Exactly one `request` to it is open while it starts or works."""

    def __init__(self, ray: Any, actor: Any, token: Path, code: dict[str, str]) -> None:
        """Ask it for its greeting; Ray starts it when there is room."""
        self.ray, self.actor = ray, actor
        self.request = actor.greet.remote(str(token), code)
        self.greeting: Greeting | None = None
        self.job: Job | None = None
        self._inbox: deque[Message] = deque()
        self._incoming: tuple[Incoming, str] | None = None
        """Files, and where the worker has them."""
        self._held = contextlib.ExitStack()
        """The run's folder here, while another machine works on a copy."""

    def welcome(self) -> None:
        """Take its greeting.

        Raises: WellcondError if it could not do the same runs as this machine.
        """
        greeting: Greeting = self.ray.get(self.request)
        ours = installed_version("wellcond")
        if greeting.version != ours:
            raise WellcondError(
                f"the Ray worker on {greeting.host} has wellcond {greeting.version}, this machine has "
                f"{ours}: their runs could not be compared. Install the same version everywhere"
            )
        if greeting.missing:
            raise WellcondError(
                f"the Ray worker on {greeting.host} does not see {', '.join(greeting.missing)}, or sees another "
                "content; code that a recipe names must be at the same path on every machine"
            )
        self.greeting, self.request = greeting, None

    def give(self, job: Job) -> None:
        """Let it do a job.

        Raises: FolderInUse if another command has the run; RunError if its folder cannot be read.
        """
        assert self.greeting is not None and self.job is None
        self.job = job
        # The worker's current folder is another one.
        sent = replace(job, folder=job.folder.resolve(), base=(job.base or Path()).resolve())
        if not self.greeting.shares_folder:
            self._held.enter_context(RunFolder(job.folder).opened())
            self.ray.get(self.actor.make_scratch.remote())
            for piece in chunks_of(job.folder):
                self.ray.get(self.actor.write.remote(*piece))
        self.request = self.actor.begin.remote(sent)

    def take(self) -> list[Message]:
        """The answer to the last request: messages about the job. Files are in place before what was said after them.

        Raises: RunError if files cannot be put in place.
        """
        assert self.job is not None and self.greeting is not None
        answer = self.ray.get(self.request)
        if self._incoming is None:
            self._inbox += answer
        else:
            self._take_files(answer, *self._incoming)
        messages: list[Message] = []
        while self._inbox and self._incoming is None:
            kind, content = self._inbox.popleft()
            if kind == "files":
                place, sizes = content
                self._incoming = Incoming(self.job.folder, sizes), place
            elif kind == "error for all" and not self.greeting.shares_folder:
                messages.append(
                    (kind, f"{content}\n  (on {self.greeting.host}, which does not see this machine's files)")
                )
            else:
                messages.append((kind, content))
        return messages

    def _take_files(self, chunk: bytes, incoming: Incoming, place: str) -> None:
        incoming.take(chunk)
        if incoming.wanted is None:
            incoming.put_in_place()
            self.actor.forget.remote(place)
            self._incoming = None

    def ask(self) -> None:
        """Ask for the next messages, or for the next piece of a file."""
        if self._incoming is None:
            self.request = self.actor.receive.remote()
            return
        incoming, place = self._incoming
        assert incoming.wanted is not None
        self.request = self.actor.read.remote(place, *incoming.wanted)

    def release(self) -> None:
        """Its job is done, or no longer its own."""
        self.job = self.request = self._incoming = None
        self._inbox.clear()
        self._held.close()

    def dismiss(self) -> None:
        """End it, whatever it does."""
        self.release()
        if self.greeting is not None and not self.greeting.shares_folder:
            with contextlib.suppress(self.ray.exceptions.RayError):
                self.ray.get(self.actor.leave.remote(), timeout=5)
        self.ray.kill(self.actor)
