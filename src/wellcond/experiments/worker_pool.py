"""Several runs at once, each worker a process of its own that outlives its runs: starting one takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from wellcond.errors import WellcondError
from wellcond.experiments.compare import FOR_ALL, JobObserver, Outcome
from wellcond.experiments.engine import Event
from wellcond.experiments.interrupts import StopWish
from wellcond.experiments.run import Job, run_job

ATTEMPTS = 2
"""A worker that is killed leaves a run that resumes; twice, and it is the run's own fault."""


@dataclass
class _Worker:
    process: Any
    connection: Connection
    job: Job | None = None


def run_in_pool(jobs: Sequence[Job], *, num_workers: int, observer: JobObserver) -> Outcome:
    """As `run_comparison`; a worker that dies is replaced and its run taken up again."""
    waiting, attempts, outcome = deque(jobs), dict[str, int](), Outcome()
    workers: list[_Worker] = []
    try:
        with StopWish().listening() as stop:
            workers += [_start() for _ in range(num_workers)]
            told_to_stop = False
            while True:
                if stop.wanted and not told_to_stop:
                    told_to_stop = True
                    waiting.clear()
                    for worker in workers:
                        if worker.job is not None:
                            os.kill(worker.process.pid, signal.SIGTERM)
                for number, worker in enumerate(workers):
                    if worker.job is None and waiting:
                        workers[number] = _give(worker, waiting.popleft())
                busy = [worker for worker in workers if worker.job is not None]
                if not busy:
                    outcome.interrupted |= told_to_stop
                    return outcome
                for ready in wait([worker.connection for worker in busy], timeout=0.2):
                    worker = next(worker for worker in workers if worker.connection is ready)
                    _listen(worker, waiting, attempts, outcome, observer, told_to_stop)
    finally:
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            if worker.job is None:
                worker.process.join(10)  # it leaves by itself
            worker.process.terminate()
            worker.process.join(10)


def _give(worker: _Worker, job: Job) -> _Worker:
    if not worker.process.is_alive():
        worker.connection.close()
        worker = _start()
    worker.connection.send(job)
    worker.job = job
    return worker


def _listen(
    worker: _Worker,
    waiting: deque[Job],
    attempts: dict[str, int],
    outcome: Outcome,
    observer: JobObserver,
    stopping: bool,
) -> None:
    job = worker.job
    assert job is not None
    try:
        kind, content = worker.connection.recv()
    except (EOFError, ConnectionError):
        worker.process.join(10)
        worker.job = None
        key = str(job.folder)
        attempts[key] = attempts.get(key, 0) + 1
        if stopping:
            return
        if attempts[key] < ATTEMPTS:
            waiting.appendleft(job)
        else:
            code = worker.process.exitcode
            outcome.fail(job, f"{job.name}: its process ended with code {code}; out of memory?", observer)
        return
    if kind == "event":
        observer(job, content)
    else:
        worker.job = None
        if kind == "record":
            outcome.take(content)
        elif kind == "error for all":
            raise WellcondError(content)
        else:
            outcome.fail(job, content, observer)


def _start() -> _Worker:
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,))  # not a daemon: those may have no data workers
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _work(connection: Connection) -> None:
    """Run jobs until the other end is gone."""
    # Ctrl-C reaches every process of a terminal; the parent decides and tells its workers by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, ConnectionError):
            return

        with StopWish().listening() as stop:
            _do(job, connection, stop)


def _do(job: Job, connection: Connection, stop: StopWish) -> None:
    """One job; if nobody listens any more, the run is saved and left to be taken up again."""

    def tell(event: Event) -> None:
        try:
            connection.send(("event", event))
        except OSError:
            stop.wanted = True

    with contextlib.suppress(BrokenPipeError):
        try:
            connection.send(("record", run_job(job, tell, stop=stop)))
        except WellcondError as error:  # as text: not every exception survives the way
            connection.send(("error for all" if isinstance(error, FOR_ALL) else "error", str(error)))
