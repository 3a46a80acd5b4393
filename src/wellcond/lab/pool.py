"""Where runs are done: one after the other, in several processes (one per GPU), or on Ray (`wellcond.lab.cluster`).

`run_jobs` hands jobs to a `Pool` while it has room, observes what they send, and stops them when the user asks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from wellcond.errors import (
    AttentionNotFoundError,
    DataError,
    MissingExtraError,
    ModelSpecError,
    ModelTooLargeError,
    RecipeError,
    WellcondError,
)
from wellcond.lab.train.engine import Event
from wellcond.lab.train.length import StopFlag, leave_to_parent, starting_processes
from wellcond.lab.train.run import Job, complete_record, num_cores, run_job

# Errors of the recipe or the dataset concern every run: the first one ends the comparison.
FOR_ALL = (RecipeError, DataError, MissingExtraError, AttentionNotFoundError, ModelSpecError, ModelTooLargeError)
JobObserver = Callable[[Job, Event], None]
Message = tuple[str, Any]
"""("event", event) during a run; at its end ("record", record), ("error", text), ("error for all", text) or, if its
worker died, ("lost", reason)."""


@dataclass
class Outcome:
    """What became of some jobs."""

    records: list[dict[str, Any]] = field(default_factory=list)
    failures: list[tuple[Job, str]] = field(default_factory=list)
    interrupted: bool = False


class Pool(ABC):
    """Does runs, at most `size` at once."""

    size: int = 1
    separate: bool = True
    """Whether runs are in other processes than the one that asks for them."""

    @abstractmethod
    def opened(self, stop: StopFlag) -> contextlib.AbstractContextManager[Any]:
        """Ready for jobs inside; whatever still runs at the end is stopped. `stop` is set when the user asks."""

    @property
    @abstractmethod
    def running(self) -> Collection[Job]:
        """Jobs that were submitted and have not ended."""

    @abstractmethod
    def submit(self, job: Job) -> bool:
        """Begin a job; False if it could not begin, and has to be submitted again."""

    @abstractmethod
    def observe(self, handle: Callable[[Job, Message], Any]) -> None:
        """Wait a moment, and hand over what running jobs have sent."""

    @abstractmethod
    def stop(self) -> None:
        """Ask all running jobs to save and end."""


def run_jobs(
    jobs: Sequence[Job],
    *,
    observer: JobObserver = lambda job, event: None,
    num_workers: int | None = 1,
    pool: Pool | None = None,
) -> Outcome:
    """Run what is incomplete, `num_workers` at once (None: as many as suit this machine), or in another pool.

    Errors that concern every run (`FOR_ALL`) are raised; other failures are in the outcome.
    """
    if not jobs:
        return Outcome()
    if pool is None:
        pool = local_pool(jobs, num_workers)
    at_once = max(1, min(pool.size, len(jobs)))
    dispatch = Dispatch([job if job.at_once == at_once else replace(job, at_once=at_once) for job in jobs], observer)
    if pool.separate:
        dispatch.skip_complete()
    if not dispatch.waiting:
        return dispatch.outcome
    with StopFlag().listening() as stop, pool.opened(stop):
        while dispatch.waiting or pool.running:
            if stop.requested and not dispatch.stopping:
                dispatch.stop()
                pool.stop()
            while dispatch.waiting and len(pool.running) < pool.size:
                if pool.submit(dispatch.waiting[0]):
                    dispatch.waiting.popleft()
            if pool.running:  # none, if the user stopped it between two jobs
                pool.observe(dispatch.handle)
    return dispatch.outcome


def choose_workers(asked: int | None, job: Job) -> int:
    """Runs at once: one for each GPU, or for each core if a run keeps to one thread; what the user asked for, if so."""
    if asked is not None:
        return asked
    if "WORLD_SIZE" in os.environ:
        return 1
    if torch.cuda.is_available() and not job.cpu:
        return torch.cuda.device_count()
    return num_cores() if job.recipe.training.threads == 1 else 1


def local_pool(jobs: Sequence[Job], asked: int | None) -> Pool:
    """A pool on this machine for these jobs."""
    size = max(1, min(choose_workers(asked, jobs[0]), len(jobs)))
    if size == 1:
        return ThisProcess()
    on_gpus = torch.cuda.is_available() and not jobs[0].cpu
    return Processes(size, visible_gpus() if on_gpus else ())


def visible_gpus() -> tuple[str, ...]:
    """Names of the GPUs as CUDA_VISIBLE_DEVICES takes them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(chosen.split(",")) if chosen else tuple(map(str, range(torch.cuda.device_count())))


class Dispatch:
    """Queue and outcome of jobs."""

    def __init__(self, jobs: Sequence[Job], observer: JobObserver) -> None:
        self.waiting = deque(jobs)
        self.outcome = Outcome()
        self.stopping = False
        self._observer = observer
        self._lost: set[Path] = set()

    def skip_complete(self) -> None:
        """Take complete runs out of the queue: they need no worker."""
        for job in list(self.waiting):
            try:
                record = complete_record(job)
            except WellcondError as error:
                self.waiting.remove(job)
                self.handle(job, ("error", str(error)))
                continue
            if record is not None and (job.keep_checkpoints or not (job.folder / "checkpoints").exists()):
                self.waiting.remove(job)
                self.handle(job, ("event", {"event": "end", "record": record}))
                self.handle(job, ("record", record))

    def stop(self) -> None:
        """Empty the queue; it was not empty, or what runs will say that it was interrupted."""
        self.stopping = True
        self.outcome.interrupted |= bool(self.waiting)
        self.waiting.clear()

    def handle(self, job: Job, message: Message) -> None:
        """Handle what a job sends."""
        kind, content = message
        if kind == "event":
            self._observer(job, content)
        elif kind == "record":
            self.outcome.records.append(content)
            self.outcome.interrupted |= content["status"] == "interrupted"
        elif kind == "error":
            self.outcome.failures.append((job, content))
            self._observer(job, {"event": "failed", "problem": content})
        elif kind == "lost":
            self._lose(job, content)
        else:
            raise WellcondError(content)

    def _lose(self, job: Job, reason: str) -> None:
        """Put the job of a dead worker first in the queue, or fail it the second time."""
        if self.stopping:
            self.outcome.interrupted = True
        elif job.folder in self._lost:
            self.handle(job, ("error", f"{job.title}: {reason}"))
        else:
            self._lost.add(job.folder)
            self._observer(job, {"event": "lost", "problem": reason})
            self.waiting.appendleft(job)


def do_job(job: Job, send: Callable[[Message], Any], stop: StopFlag) -> None:
    """Run one job and send what becomes of it; an error that concerns every run is raised."""
    try:
        send(("record", run_job(job, lambda event: send(("event", event)), stop=stop)))
    except WellcondError as error:
        if isinstance(error, FOR_ALL) or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise  # other ranks may not have failed: continuing would mix runs
        send(("error", str(error)))


class ThisProcess(Pool):
    """One run after the other, in this process; the only pool whose runs may have several ranks."""

    separate = False

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._stop = StopFlag()

    @contextlib.contextmanager
    def opened(self, stop: StopFlag) -> Iterator[None]:
        """Runs watch the flag themselves."""
        self._stop = stop
        yield

    @property
    def running(self) -> Collection[Job]:
        """The next job."""
        return self._jobs

    def submit(self, job: Job) -> bool:
        """Keep a job until it is observed."""
        self._jobs.append(job)
        return True

    def observe(self, handle: Callable[[Job, Message], Any]) -> None:
        """Do the job."""
        job = self._jobs.pop()
        do_job(job, lambda message: handle(job, message), self._stop)

    def stop(self) -> None:
        """Nothing runs while nobody observes."""
        self._jobs.clear()


class Processes(Pool):
    """Processes on this machine, each on a GPU of its own if there are some; one that dies is replaced."""

    def __init__(self, size: int, gpus: Sequence[str] = ()) -> None:
        self.size = size
        self.gpus = gpus
        self._workers: dict[Connection, Any] = {}
        """Processes, each by the connection to it."""
        self._running: dict[Connection, Job] = {}
        self._places: dict[Connection, int] = {}

    @contextlib.contextmanager
    def opened(self, stop: StopFlag) -> Iterator[None]:
        """Idle workers end at once, a run ends after its step."""
        try:
            yield
        finally:
            for connection, process in self._workers.items():
                connection.close()
                process.terminate()
            for process in self._workers.values():
                process.join(10)

    @property
    def running(self) -> Collection[Job]:
        """Jobs that workers have."""
        return self._running.values()

    def submit(self, job: Job) -> bool:
        """Send a job to an idle worker, which is started if there is none."""
        idle = next((connection for connection in self._workers if connection not in self._running), None)
        connection = idle or self._start()
        try:
            connection.send(job)
        except OSError:  # it died while idle
            self._workers.pop(connection)
            return False
        self._running[connection] = job
        return True

    def observe(self, handle: Callable[[Job, Message], Any]) -> None:
        """Hand over one message of each worker that has sent some."""
        for connection in set(self._running).intersection(wait(list(self._running), timeout=0.2)):
            assert isinstance(connection, Connection)
            try:
                message = connection.recv()
            except (EOFError, ConnectionError):
                process = self._workers.pop(connection)
                process.join(10)
                memory = "; out of memory?" if process.exitcode == -signal.SIGKILL else ""
                message = ("lost", f"its process ended with code {process.exitcode}{memory}")
            job = self._running[connection]
            if message[0] != "event":
                del self._running[connection]
            handle(job, message)

    def stop(self) -> None:
        """Send SIGTERM to the workers that have a job."""
        for connection in self._running:
            os.kill(self._workers[connection].pid, signal.SIGTERM)

    def _start(self) -> Connection:
        taken = {self._places[connection] for connection in self._workers}
        place = next(number for number in range(self.size) if number not in taken)
        gpu = self.gpus[place % len(self.gpus)] if self.gpus else None
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, gpu))  # a daemon may not start DataLoaders
        with starting_processes("spawn"):
            process.start()
        theirs.close()
        self._workers[ours], self._places[ours] = process, place
        return ours


def _work(connection: Connection, gpu: str | None) -> None:
    """Run jobs until the connection is closed; `gpu` is the only one that the process sees."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu

    def send(message: Message) -> None:
        try:
            connection.send(message)
        except OSError:  # the command is gone: the run writes a checkpoint and stops
            stop.requested = True

    # Ctrl-C reaches every process of a terminal; the parent forwards it to its workers as SIGTERM.
    leave_to_parent(signal.SIGINT)
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, ConnectionError):
            return
        with StopFlag().listening() as stop:
            try:
                do_job(job, send, stop)
            except WellcondError as error:  # as text: not every exception can be pickled
                send(("error for all", str(error)))
