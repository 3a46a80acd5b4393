"""Scheduling of concurrent runs, shared by the worker pool and Ray: queue, lost workers and messages."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from wellcond.errors import WellcondError
from wellcond.lab.train.compare import FOR_ALL, JobObserver, Outcome
from wellcond.lab.train.engine import Event, Observer
from wellcond.lab.train.interrupts import StopFlag
from wellcond.lab.train.run import Job, complete_record, run_job

Message = tuple[str, Any]
"""("event", event) during a run; at its end ("record", record), ("error", text) or ("error for all", text)."""
Run = Callable[[Job, Observer, StopFlag], dict[str, Any]]


class Dispatch:
    """Queue and outcome of the jobs of a comparison."""

    def __init__(self, jobs: Sequence[Job], observer: JobObserver, *, attempts: int) -> None:
        """A job fails when its worker has been lost `attempts` times."""
        self.waiting = deque(jobs)
        self.outcome = Outcome()
        self.stopping = False
        self._observer, self._attempts = observer, attempts
        self._lost: dict[str, int] = {}

    def stop(self) -> None:
        """Empty the queue."""
        self.stopping = self.outcome.interrupted = True
        self.waiting.clear()

    def leave_out_complete(self) -> None:
        """Remove complete runs from the queue and add their records to the outcome."""
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
        """Number of workers lost on a job."""
        return self._lost.get(str(job.folder), 0)

    def hear(self, job: Job, message: Message) -> bool:
        """Handle the message of a worker; returns True if it is the last one of its job.

        Raises: WellcondError for an error that concerns every run.
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
        """Put the job of a dead worker first in the queue, or fail it after too many attempts."""
        if self.stopping:
            return
        count = self._lost[str(job.folder)] = self.times_lost(job) + 1
        if count < self._attempts:
            self._observer(job, {"event": "lost", "problem": reason})
            self.waiting.appendleft(job)
        else:
            self.outcome.fail(job, f"{job.title}: {reason}", self._observer)


def _run(job: Job, tell: Observer, stop: StopFlag) -> dict[str, Any]:
    return run_job(job, tell, stop=stop)


def do_job(job: Job, send: Callable[[Message], None], stop: StopFlag, *, run: Run = _run) -> None:
    """Run one job in a worker; if the connection is lost, the run writes a checkpoint, stops and can be resumed."""

    def tell(event: Event) -> None:
        try:
            send(("event", event))
        except OSError:
            stop.requested = True

    with contextlib.suppress(BrokenPipeError):
        try:
            send(("record", run(job, tell, stop)))
        except WellcondError as error:  # as text: not every exception can be pickled
            send(("error for all" if isinstance(error, FOR_ALL) else "error", str(error)))
