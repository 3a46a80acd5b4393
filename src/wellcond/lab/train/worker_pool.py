"""Concurrent runs in worker processes; a worker is reused, since starting one takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from wellcond.lab.train.compare import JobObserver, Outcome
from wellcond.lab.train.dispatch import Dispatch, do_job
from wellcond.lab.train.interrupts import StopFlag
from wellcond.lab.train.run import Job

ATTEMPTS = 2
"""A run whose worker is killed resumes in another one; killed twice, it has failed."""


@dataclass
class _Worker:
    process: Any
    connection: Connection
    job: Job | None = None


def run_in_pool(jobs: Sequence[Job], *, num_workers: int, observer: JobObserver) -> Outcome:
    """As `run_comparison`; a worker that dies is replaced and its run resumes."""
    dispatch = Dispatch(jobs, observer, attempts=ATTEMPTS)
    dispatch.leave_out_complete()
    if not dispatch.waiting:
        return dispatch.outcome
    workers: list[_Worker] = []
    try:
        with StopFlag().listening() as stop:
            workers += [_start() for _ in range(min(num_workers, len(dispatch.waiting)))]
            while True:
                if stop.requested and not dispatch.stopping:
                    dispatch.stop()
                    for worker in workers:
                        if worker.job is not None:
                            os.kill(worker.process.pid, signal.SIGTERM)
                for number, worker in enumerate(workers):
                    if worker.job is None and dispatch.waiting:
                        workers[number] = _give(worker, dispatch.waiting.popleft())
                busy = [worker for worker in workers if worker.job is not None]
                if not busy:
                    return dispatch.outcome
                for ready in wait([worker.connection for worker in busy], timeout=0.2):
                    _listen(next(worker for worker in workers if worker.connection is ready), dispatch)
    finally:
        for worker in workers:
            worker.connection.close()
            worker.process.terminate()  # idle workers end at once; a run ends after its step
        for worker in workers:
            worker.process.join(10)


def _give(worker: _Worker, job: Job) -> _Worker:
    try:
        worker.connection.send(job)
    except OSError:  # it died while idle
        worker.connection.close()
        worker = _start()
        worker.connection.send(job)
    worker.job = job
    return worker


def _listen(worker: _Worker, dispatch: Dispatch) -> None:
    job = worker.job
    assert job is not None
    try:
        message = worker.connection.recv()
    except (EOFError, ConnectionError):
        worker.process.join(10)
        worker.job = None
        dispatch.lose(job, f"its process {describe_exit(worker.process.exitcode)}")
        return
    if dispatch.hear(job, message):
        worker.job = None


def describe_exit(code: int | None) -> str:
    """How a process ended without a message.

    Example:
        >>> describe_exit(-9), describe_exit(3)
        ('was ended by SIGKILL; out of memory?', 'ended with code 3')
    """
    if code is None or code >= 0:
        return f"ended with code {code}"
    killed = code == -signal.SIGKILL
    return f"was ended by {signal.Signals(-code).name}{'; out of memory?' if killed else ''}"


def _start() -> _Worker:
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,))  # not a daemon: daemons may not start DataLoader workers
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _work(connection: Connection) -> None:
    """Run jobs until the connection is closed."""
    # Ctrl-C reaches every process of a terminal; the parent forwards it to its workers as SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, ConnectionError):
            return

        with StopFlag().listening() as stop:
            do_job(job, connection.send, stop)
