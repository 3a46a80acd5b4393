"""Where runs are done: one after the other, in several processes (one per GPU), or on Ray (`wellcond.lab.cluster`).

`run_jobs` hands jobs to a `Pool` while it has room, observes what they send, and stops them when the user asks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
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
    OptionError,
    RecipeError,
    WellcondError,
)
from wellcond.lab.train.engine import Event
from wellcond.lab.train.length import StopFlag, environment, leave_to_parent, starting_processes
from wellcond.lab.train.run import ALL_GPUS, Job, complete_record, num_cores, run_job

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
    ranks: int = 1,
    pool: Pool | None = None,
) -> Outcome:
    """Run what is incomplete, `num_workers` at once (None: as many as suit this machine), or in another pool.

    A run is one process, or as many as `ranks` says, each on a GPU of its own. Errors that concern every run
    (`FOR_ALL`) are raised; other failures are in the outcome.
    """
    if not jobs:
        return Outcome()
    if pool is None:
        pool = local_pool(jobs, num_workers, ranks)
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


def choose_workers(asked: int | None, job: Job, ranks: int = 1) -> int:
    """Runs at once: one for each GPU, or for each core if a run keeps to one thread; what the user asked for, if so.

    With several `ranks` a run has so many GPUs, or cores.
    """
    if asked is not None:
        return asked
    if "WORLD_SIZE" in os.environ:
        return 1
    if has_gpus(job):
        return max(1, torch.cuda.device_count() // ranks)
    return max(1, num_cores() // ranks) if job.recipe.training.threads == 1 else 1


def has_gpus(job: Job) -> bool:
    """Whether a run goes to a GPU here."""
    return torch.cuda.is_available() and not job.cpu


def local_pool(jobs: Sequence[Job], asked: int | None, ranks: int = 1) -> Pool:
    """A pool on this machine for these jobs."""
    size = max(1, min(choose_workers(asked, jobs[0], ranks), len(jobs)))
    gpus = visible_gpus() if has_gpus(jobs[0]) else ()
    if ranks > 1:
        _check_ranks(ranks, gpus, size)
    elif size == 1:
        return ThisProcess()
    return Processes(size, gpus, ranks)


def _check_ranks(ranks: int, gpus: Sequence[str], size: int) -> None:
    if "WORLD_SIZE" in os.environ:
        raise OptionError("several GPUs a run: it starts its own processes; run the command once, without torchrun")
    if gpus and ranks * size > len(gpus):
        raise OptionError(
            f"{size} runs at once on {ranks} GPUs each need {size * ranks} GPUs, and {len(gpus)} are visible here",
            expected=f"at most {len(gpus)} GPUs",
            found=size * ranks,
        )


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
        """Empty the queue; it was not empty, or what becomes of the runs will show that it was interrupted."""
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
        elif kind == "error":  # of a run that was asked to stop it is an end before its time, whatever it says
            self.outcome.failures.append((job, content))
            self.outcome.interrupted |= self.stopping
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
    """One run after the other, in this process, which may be a rank of several that torchrun started."""

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


@dataclass(eq=False)
class Worker:
    """The processes that do a run together, one or one for each rank, by the connections to them."""

    place: int
    processes: dict[Connection, Any]
    job: Job | None = None
    messages: dict[Connection, Message] = field(default_factory=dict)
    """How the job ended, by process."""

    @property
    def first(self) -> Connection:
        """The connection to rank 0, which reports for all ranks."""
        return next(iter(self.processes))


class Processes(Pool):
    """Processes on this machine, each on a GPU of its own if there are some; what dies is replaced.

    With several `ranks` a run is so many processes, which find each other as under torchrun, on GPUs of their own. If
    one of them dies or fails, the others end with it.
    """

    def __init__(self, size: int, gpus: Sequence[str] = (), ranks: int = 1) -> None:
        self.size, self.gpus, self.ranks = size, gpus, ranks
        self._workers: list[Worker] = []

    @contextlib.contextmanager
    def opened(self, stop: StopFlag) -> Iterator[None]:
        """Idle workers end at once, a run ends after its step."""
        try:
            yield
        finally:
            processes = [process for worker in self._workers for process in worker.processes.values()]
            for connection in [connection for worker in self._workers for connection in worker.processes]:
                connection.close()
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(10)

    @property
    def running(self) -> Collection[Job]:
        """Jobs that workers have."""
        return [worker.job for worker in self._workers if worker.job is not None]

    def submit(self, job: Job) -> bool:
        """Send a job to an idle worker, which is started if there is none."""
        worker = next((worker for worker in self._workers if worker.job is None), None) or self._start()
        try:
            for connection in worker.processes:
                connection.send(job)
        except OSError:  # it died while idle
            self._end(worker)
            return False
        worker.job, worker.messages = job, {}
        return True

    def observe(self, handle: Callable[[Job, Message], Any]) -> None:
        """Hand over one message of each process that has sent some."""
        busy = {
            connection: worker
            for worker in self._workers
            if worker.job is not None
            for connection in worker.processes
            if connection not in worker.messages
        }
        for ready in wait(list(busy), timeout=0.2):
            assert isinstance(ready, Connection)
            worker = busy[ready]
            job = worker.job
            if job is None:  # it ended a moment ago, by another of its processes
                continue
            try:
                message = ready.recv()
            except (EOFError, ConnectionError):
                message = ("lost", self._describe_death(worker.processes[ready]))
            if message[0] == "event":
                if ready is worker.first:
                    handle(job, message)
                continue
            worker.messages[ready] = message
            failed = message[0] != "record"
            if failed and (message[0] == "lost" or self.ranks > 1):  # the others would wait for it
                message = self._end(worker, message)
            if failed or len(worker.messages) == len(worker.processes):
                worker.job = None
                handle(job, message if failed else worker.messages[worker.first])

    def stop(self) -> None:
        """Send SIGTERM to the processes that have a job."""
        for worker in self._workers:
            for process in worker.processes.values() if worker.job is not None else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)

    def _describe_death(self, process: Any) -> str:
        process.join(10)
        memory = "; out of memory?" if process.exitcode == -signal.SIGKILL else ""
        return f"its process ended with code {process.exitcode}{memory}"

    def _end(self, worker: Worker, message: Message = ("lost", "")) -> Message:
        """End what is left of a worker; returns what it failed with: that a process died, rather than what others say.

        These fail as soon as they miss it.
        """
        processes = list(worker.processes.values())
        wait([process.sentinel for process in processes], timeout=0.5)
        if dead := [process for process in processes if process.exitcode is not None]:
            message = ("lost", self._describe_death(dead[0]))
        for process in processes:
            process.kill()
            process.join(10)
        self._workers.remove(worker)
        return message

    def _start(self) -> Worker:
        taken = {worker.place for worker in self._workers}
        worker = Worker(next(number for number in range(self.size) if number not in taken), {})
        port = str(_free_port()) if self.ranks > 1 else ""
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,))  # a daemon may not start DataLoaders
            variables = self._environment(worker.place, rank, port)
            with starting_processes("spawn"), environment(variables):  # torch reads it when it is imported
                process.start()
            theirs.close()
            worker.processes[ours] = process
        self._workers.append(worker)
        return worker

    def _environment(self, place: int, rank: int, port: str) -> dict[str, str]:
        """Variables of one process: which GPUs it sees, and as under torchrun which rank of how many it is."""
        places = range(place * self.ranks, (place + 1) * self.ranks)
        gpus = [self.gpus[number % len(self.gpus)] for number in places if self.gpus]
        chosen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), ALL_GPUS: str(len(self.gpus))} if gpus else {}
        if self.ranks == 1:
            return chosen
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks}
        ours = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ours |= {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
        return chosen | ours | {name: str(number) for name, number in numbers.items()}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _work(connection: Connection) -> None:
    """Run jobs until the connection is closed."""

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
                send(("error for all" if isinstance(error, FOR_ALL) else "error", str(error)))
