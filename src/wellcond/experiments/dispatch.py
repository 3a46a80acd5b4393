"""Several runs at once, as every engine sees them: which wait, whose worker was lost, and what a worker reports."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from wellcond.errors import WellcondError
from wellcond.experiments.compare import FOR_ALL, JobObserver, Outcome
from wellcond.experiments.engine import Event, Observer
from wellcond.experiments.interrupts import StopWish
from wellcond.experiments.run import Job, complete_record, run_job

Message = tuple[str, Any]
"""("event", event) while a run goes on; at its end ("record", record), ("error", text) or ("error for all", text)."""
Run = Callable[[Job, Observer, StopWish], dict[str, Any]]


class Dispatch:
    """Hands out the jobs of a comparison and keeps account of them."""

    def __init__(self, jobs: Sequence[Job], observer: JobObserver, *, attempts: int) -> None:
        """A job whose worker was lost `attempts` times has failed."""
        self.waiting = deque(jobs)
        self.outcome = Outcome()
        self.stopping = False
        self._observer, self._attempts = observer, attempts
        self._lost: dict[str, int] = {}

    def stop(self) -> None:
        """Hand out nothing more."""
        self.stopping = self.outcome.interrupted = True
        self.waiting.clear()

    def leave_out_complete(self) -> None:
        """Take the records of complete runs from their folders; they need no worker."""
        left = []
        for job in self.waiting:
            try:
                record = complete_record(job)
            except WellcondError as error:
                self.outcome.fail(job, str(error), self._observer)
                continue
            if record is None:
                left.append(job)
            else:
                self._observer(job, {"event": "end", "record": record, "repeated": True})
                self.outcome.take(record)
        self.waiting = deque(left)

    def times_lost(self, job: Job) -> int:
        """How many workers a job has lost."""
        return self._lost.get(str(job.folder), 0)

    def hear(self, job: Job, message: Message) -> bool:
        """Take what a worker says about its job; returns whether that was the last of it.

        Raises: WellcondError for what concerns every run.
        """
        kind, content = message
        if kind == "event":
            self._observer(job, content)
            return False
        if kind == "error for all":
            raise WellcondError(content)
        if kind == "record":
            self.outcome.take(content)
        else:
            self.outcome.fail(job, content, self._observer)
        return True

    def lose(self, job: Job, reason: str) -> None:
        """A worker has died: its job is the next to be handed out, unless that has happened too often."""
        if self.stopping:
            return
        count = self._lost[str(job.folder)] = self.times_lost(job) + 1
        if count < self._attempts:
            self._observer(job, {"event": "lost", "problem": reason})
            self.waiting.appendleft(job)
        else:
            self.outcome.fail(job, f"{job.name}: {reason}", self._observer)


def _run(job: Job, tell: Observer, stop: StopWish) -> dict[str, Any]:
    return run_job(job, tell, stop=stop)


def do_job(job: Job, send: Callable[[Message], None], stop: StopWish, *, run: Run = _run) -> None:
    """One job in a worker; if nobody listens any more, the run is saved and left to be taken up again."""

    def tell(event: Event) -> None:
        try:
            send(("event", event))
        except OSError:
            stop.wanted = True

    with contextlib.suppress(BrokenPipeError):
        try:
            send(("record", run(job, tell, stop)))
        except WellcondError as error:  # as text: not every exception survives the way
            send(("error for all" if isinstance(error, FOR_ALL) else "error", str(error)))
