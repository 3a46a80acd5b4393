"""Comparisons on a Ray cluster: each run is a Ray task, which Ray repeats elsewhere when it loses its machine.

A repeated run resumes from its last checkpoint. A machine that does not see the comparison's folder trains in a
temporary one; `FileRelay`, an actor on the machine of the command, sends it the run's files and takes them back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wellcond.errors import RunError, WellcondError, needs_extra
from wellcond.files import temporary_beside
from wellcond.lab.data.disk import NAMED
from wellcond.lab.pool import Message, Pool, do_job
from wellcond.lab.train.engine import Event
from wellcond.lab.train.length import StopFlag, keeping_stop_signals
from wellcond.lab.train.run import Job
from wellcond.lab.train.run_folder import OURS, RunFolder, check_links, writing

FORWARDED = (
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "HF_HOME",
    "HF_DATASETS_CACHE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
)
FOLDERS = ("WELLCOND_DATA", "WELLCOND_CACHE", "HF_HOME", "HF_DATASETS_CACHE")


@dataclass(frozen=True)
class RaySettings:
    """Where the cluster is, and what one run gets of it."""

    address: str | None = None
    """``auto`` or ``HOST:6379``; without one that of RAY_ADDRESS, or a cluster that is started on this machine and ends
    with the comparison."""
    cpus_per_run: float | None = None
    """By default the threads of the recipe and its data workers."""
    gpus_per_run: float | None = None
    """At most 1, since a run is one process; by default 1 where the cluster has GPUs. 0.5: two runs share one."""

    def resources(self, job: Job, machines: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """What Ray reserves for a run: what the user says, or what its recipe needs."""
        gpus, cpus, training = self.gpus_per_run, self.cpus_per_run, job.recipe.training
        if gpus is None:
            gpus = float(not job.cpu and any(machine.get("GPU") for machine in machines))
        if cpus is None:
            most = max(machine.get("CPU", 0) for machine in machines)
            # Without a number of threads torch takes every core of a machine, unless a GPU does the work.
            cpus = max(1, min((training.threads or (1 if gpus else most)) + training.workers, most))
        return {"num_cpus": cpus, "num_gpus": gpus}


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that decide what a run finds and computes: they hold on the workers too. No secrets.

    Those that name folders do so in full, since a worker's current folder is another one.
    """
    passed = {name: value for name, value in environment.items() if name.startswith("WELLCOND_") or name in FORWARDED}
    paths = {name: map(_in_full, passed[name].split(os.pathsep)) for name in FOLDERS if passed.get(name)}
    return passed | {name: os.pathsep.join(parts) for name, parts in paths.items()}


def _in_full(place: str) -> str:
    """A folder, or a data set and its folder, with the path in full."""
    named = NAMED.fullmatch(place)
    return f"{named[1]}={os.path.abspath(named[2])}" if named else os.path.abspath(place)


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The package ray, connected to a cluster, whose workers get this wellcond; one that was started here ends."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that is started here, as is the next
    os.environ.setdefault("RAY_worker_niceness", "0")  # runs are what this machine is for
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # reports of dead processes stay out of what we print
    with needs_extra("ray", "ray"):
        import ray
    place = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"include_dashboard": False} if place == "local" else {}
    runtime = {"env_vars": worker_environment(os.environ), "py_modules": [str(Path(__file__).parents[1])]}
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # no messages between the bars of progress
    try:
        _check_reachable(place)
        # Ray's own handlers of SIGTERM exit, and abort the process if printing a stack takes more than three seconds.
        with keeping_stop_signals():
            ray.init(place, runtime_env=runtime, log_to_driver=False, logging_level=logging.CRITICAL, **options)
    # Ray has no common class for what may go wrong here
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise WellcondError(
            f"no Ray cluster answers at {place!r}: {error}\n  Expected auto or HOST:6379 of a running cluster (ray "
            "start --head) that this machine belongs to, or no address: then one is started on this machine"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(place: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT: Ray would try for minutes and ignore Ctrl-C."""
    if place.startswith("ray://"):
        raise ValueError("Ray Client is not supported; from elsewhere, use `ray job submit`")
    if place == "auto":  # as Ray finds it: the variable, else the cluster that was started here last
        last = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
        place = os.environ.get("RAY_ADDRESS") or (last.read_text().strip() if last.is_file() else "")
    if found := re.fullmatch(r"\[?([^/\]]+)\]?:(\d+)", place):
        socket.create_connection((found[1], int(found[2])), timeout=10).close()


class RayPool(Pool):
    """Runs as Ray tasks on the machines of a cluster."""

    def __init__(self, settings: RaySettings, jobs: Sequence[Job], size: int | None = None) -> None:
        """Make a pool for these jobs; by default all of them may run at once."""
        self.settings = settings
        self.size = size or len(jobs)
        self._first = jobs[0]
        self._jobs = {job.folder.resolve(): job for job in jobs}
        self._common = Path(os.path.commonpath([folder.parent for folder in self._jobs]))
        self._running: dict[Any, Job] = {}
        self._messages: list[tuple[Job, Message]] = []
        self._ray: Any = None

    @contextlib.contextmanager
    def opened(self, stop: StopFlag) -> Iterator[None]:
        """Connected to the cluster; runs that still go on at the end save first."""
        with contextlib.ExitStack() as held:
            ray = self._ray = held.enter_context(connected(self.settings.address))
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            with writing(self._common):
                self._common.mkdir(parents=True, exist_ok=True)
                self._token = held.enter_context(temporary_beside(self._common / "ray")).name
            try:
                machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
                needed = self.settings.resources(self._first, machines)
                here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
                self._home = ray.remote(FileRelay).options(num_cpus=0, scheduling_strategy=here).remote()
                # A lost machine is seldom the run's own fault.
                self._task = ray.remote(run_task).options(max_retries=3, **needed)
                self._phase = f"waiting for a machine with {needed['num_cpus']:g} CPUs and {needed['num_gpus']:g} GPUs"
                yield
            except ray.exceptions.RayError as error:
                raise WellcondError(
                    f"Ray could not do the runs: {_reason(error)}\n  Every machine needs what wellcond needs (pip "
                    "install 'wellcond[train,ray]'); the same command resumes"
                ) from error
            finally:
                self.stop()
                if self._running:  # they save first
                    ray.wait(list(self._running), num_returns=len(self._running), timeout=10)

    @property
    def running(self) -> Collection[Job]:
        """Jobs that the cluster has."""
        return self._running.values()

    def submit(self, job: Job) -> bool:
        """Give a job to the cluster."""
        if self._phase:
            self._messages.append((job, ("event", {"event": "phase", "phase": self._phase})))
            self._phase = ""
        # The worker's current folder is another one.
        sent = replace(job, folder=job.folder.resolve(), base=(job.base or Path()).resolve())
        self._running[self._task.remote(sent, self._home, self._token)] = job
        return True

    def observe(self, handle: Callable[[Job, Message], Any]) -> None:
        """Hand over what runs have sent home, then what became of those that ended."""
        ray = self._ray
        for job, message in self._messages:
            handle(job, message)
        self._messages.clear()
        ended, _ = ray.wait(list(self._running), timeout=0.2)
        for folder, event in ray.get(self._home.take.remote()):  # all that the ended ones have sent is there
            handle(self._jobs[folder], ("event", event))
        for result in ended:
            job = self._running.pop(result)
            try:
                message = ray.get(result)
            except ray.exceptions.TaskCancelledError:  # it had not begun
                message = ("lost", "it was cancelled")
            except ray.exceptions.RayTaskError:  # what a run raises is in its message
                raise
            except ray.exceptions.RayError as error:
                message = ("error", f"{job.title}: its worker was lost: {_reason(error)}")
            handle(job, message)

    def stop(self) -> None:
        """Cancel all runs; those that have begun save and end, see `run_task`. What they send home still arrives."""
        for result in self._running:
            self._ray.cancel(result, recursive=False)


def _reason(error: Exception) -> str:
    """The line of Ray's message that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in reversed(lines) if "died" in line.lower()), lines[-1])[:300]


# On the machines of the cluster


class FileRelay:
    """An actor beside the command: takes events of runs, and files of runs on machines that do not share its disk."""

    def __init__(self) -> None:
        self._events: list[tuple[Path, Event]] = []
        self._begun: dict[Path, contextlib.ExitStack] = {}
        """Folders of runs, each with its lock if another machine works on a copy."""

    def begin(self, folder: Path, away: bool) -> dict[str, bytes]:
        """A run begins, or begins again on another machine; returns its files if they are `away` from there."""
        if folder in self._begun:
            self.tell(folder, {"event": "lost", "problem": "its worker was lost"})
            self._begun[folder].close()
        self._begun[folder] = held = contextlib.ExitStack()
        if not away:
            return {}
        held.enter_context(RunFolder(folder).opened())
        return pack(folder)

    def tell(self, folder: Path, event: Event, saved: dict[str, bytes] | None = None) -> None:
        """Keep an event of a run until the command takes it, and the files that the run has saved elsewhere."""
        self._events.append((folder, event))
        if saved:
            unpack(saved, folder)

    def take(self) -> list[tuple[Path, Event]]:
        """Take all events that are new."""
        taken, self._events = self._events, []
        return taken

    def end(self, folder: Path, saved: dict[str, bytes]) -> None:
        """Note that a run has ended, and that all its events have arrived."""
        if saved:
            unpack(saved, folder)
        self._begun.pop(folder).close()


def run_task(job: Job, home: Any, token: str) -> Message:
    """Do a run and return its last message; a run that Ray cancels saves and ends.

    In place, if this machine sees the command's file `token`; in a temporary folder that is sent back otherwise.
    """
    import ray

    last: list[Message] = []
    with StopFlag().listening() as stop, tempfile.TemporaryDirectory(prefix="wellcond-run-") as scratch:
        away = not Path(token).is_file()
        files = ray.get(home.begin.remote(job.folder, away))
        done = replace(job, folder=Path(scratch, "run")) if away else job
        if away:
            unpack(files, done.folder)

        def send(message: Message) -> None:
            kind, content = message
            if kind != "event":
                last.append(message)
            elif away and content["event"] == "saved":
                ray.get(home.tell.remote(job.folder, content, pack(done.folder)))
            else:
                home.tell.remote(job.folder, content)

        try:
            do_job(done, send, stop)
        except WellcondError as error:
            send(("error for all", f"{error} (on {platform.node()})"))
        ray.get(home.end.remote(job.folder, pack(done.folder) if away else {}))
    return last[-1]


def pack(folder: Path) -> dict[str, bytes]:
    """The files of a run by their names in its folder, without its lock, links and what is in the making."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if not path.is_symlink()}
    chosen = [name for name in paths if paths[name].is_file() and name != "lock" and ".partial" not in name]
    return {name: paths[name].read_bytes() for name in chosen}


def unpack(files: dict[str, bytes], folder: Path) -> None:
    """Replace the files of a run by those that were sent: at every moment the folder can be resumed from.

    Logs go first, since a checkpoint needs logs that are at least as long as when it was made; the record goes last,
    since it says what is complete. RunError for a name that leads out of the folder; then nothing is replaced.
    """
    incoming, ours = folder / ".incoming.partial", folder / "checkpoints"
    check_links(folder)
    with writing(folder):
        shutil.rmtree(incoming, ignore_errors=True)
        for name, content in files.items():
            path = incoming / name
            if not path.resolve().is_relative_to(incoming.resolve()):
                raise RunError(f"{name!r}, which a worker sent for {folder}, is outside the run's folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        steps = {name.split("/")[1] for name in files if name.startswith("checkpoints/")}
        logs = [name for name in files if not name.startswith("checkpoints/") and name != "run.json"]
        # A checkpoint of the same step is whole, and the same.
        new = [f"checkpoints/{step}" for step in steps if not (ours / step).exists()]
        for name in [*logs, *new, *(["run.json"] if "run.json" in files else [])]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(incoming / name, folder / name)
        for place in list(ours.iterdir()) if steps else ():
            if place.name not in steps and OURS.fullmatch(place.name):
                shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(incoming, ignore_errors=True)
