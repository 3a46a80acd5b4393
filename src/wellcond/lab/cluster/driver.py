"""A comparison on a Ray cluster: each run is a Ray task, handed out again when Ray loses it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wellcond.errors import WellcondError, needs_extra
from wellcond.lab.cluster import RaySettings
from wellcond.lab.cluster.worker import BEGAN, FILES, NO_FOLDER, Command, Mailbox, pack, receive, run_task
from wellcond.lab.models.trained import file_sha256
from wellcond.lab.train.compare import Dispatch, JobObserver, Outcome
from wellcond.lab.train.length import StopFlag
from wellcond.lab.train.prepare import located
from wellcond.lab.train.run import Job, installed_version
from wellcond.lab.train.run_folder import FolderInUse, RunError, RunFolder, writing

ATTEMPTS = 4
"""Machines of a cluster come and go: a lost worker is less often the run's own fault than on one machine."""
PATIENCE = 60.0
"""Seconds for machines to come back."""
SECONDS_TO_SAVE = 10.0
"""For runs that another run's error ends."""
OBJECT_STORE_BYTES = 100 * 2**20
"""Of a cluster that is started here; its runs write to the disk, and only messages pass through Ray."""
FORWARDED = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HOME", "HF_DATASETS_CACHE", "OMP_NUM_THREADS",
             "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")  # fmt: skip
FOLDERS = ("WELLCOND_DATA", "WELLCOND_CACHE", "HF_HOME", "HF_DATASETS_CACHE")


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that decide what a run finds and computes: they hold on the workers too. No secrets.

    Those that name folders do so in full, since a worker's current folder is another one.

    Example:
        >>> worker_environment({"WELLCOND_DATA": "/data", "HF_TOKEN": "secret", "HF_HUB_OFFLINE": "1"})
        {'WELLCOND_DATA': '/data', 'HF_HUB_OFFLINE': '1'}
    """
    passed = {name: value for name, value in environment.items() if name.startswith("WELLCOND_") or name in FORWARDED}
    for name in FOLDERS:
        if passed.get(name):
            parts = passed[name].split(os.pathsep)
            passed[name] = os.pathsep.join(part and os.path.abspath(os.path.expanduser(part)) for part in parts)
    return passed


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The package ray, connected to a cluster; one that was started here ends with the block.

    Raises: MissingExtraError; WellcondError if there is no cluster to connect to.
    """
    with needs_extra("ray", "ray"):
        import ray
    if ray.is_initialized():  # by the program that calls us: it is theirs to end
        yield ray
        return
    place = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"runtime_env": {"env_vars": worker_environment(os.environ)}}
    if place == "local":
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # runs are what this machine is for
    in_main_thread = threading.current_thread() is threading.main_thread()
    terminate = signal.getsignal(signal.SIGTERM)  # Ray puts a handler of its own
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # no messages between the bars of progress
    try:
        _check_reachable(place)
        ray.init(place, log_to_driver=False, logging_level=logging.CRITICAL, **options)
    # Ray has no common class for what may go wrong here
    except (OSError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        what = "Ray could not be started here" if place == "local" else f"no Ray cluster answers at {place!r}"
        raise WellcondError(
            f"{what}: {error}\n  Expected auto, HOST:6379 or ray://HOST:10001 of a running cluster (ray start "
            "--head), or no address: then one is started on this machine"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()
        if in_main_thread:
            signal.signal(signal.SIGTERM, terminate or signal.SIG_DFL)


def _check_reachable(place: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT: Ray would try for minutes and ignore Ctrl-C."""
    if place == "auto":  # as Ray finds it: the variable, else the cluster that was started here last
        last = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
        place = os.environ.get("RAY_ADDRESS") or (last.read_text().strip() if last.is_file() else "")
    if found := re.fullmatch(r"(?:ray://)?\[?([^/\]]+)\]?:(\d+)", place):
        socket.create_connection((found[1], int(found[2])), timeout=10).close()


@dataclass(frozen=True)
class Share:
    """What one run gets of a machine."""

    cpus: float
    gpus: float

    def check_fits(self, machines: Sequence[Mapping[str, float]]) -> None:
        """Raise WellcondError if there is no machine for it, busy or not."""
        if any(m.get("CPU", 0) >= self.cpus and m.get("GPU", 0) >= self.gpus for m in machines):
            return
        found = "; ".join(f"{m.get('CPU', 0):g} CPUs, {m.get('GPU', 0):g} GPUs" for m in machines) or "none"
        raise WellcondError(
            f"no machine of the Ray cluster has {self.cpus:g} CPUs and {self.gpus:g} GPUs for a run; its machines: "
            f"{found}. Ask for less (--cpus-per-run, --gpus-per-run) or add a machine (ray start --address ...), then "
            "run the same command: it resumes from here"
        )


def _machines(ray: Any) -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def choose_share(settings: RaySettings, job: Job, machines: Sequence[Mapping[str, float]]) -> Share:
    """What each run of a comparison gets: what the user says, or what its recipe needs."""
    gpus, cpus = settings.gpus_per_run, settings.cpus_per_run
    if gpus is None:
        gpus = 1.0 if not job.cpu and any(machine.get("GPU", 0) >= 1 for machine in machines) else 0.0
    if cpus is None:
        training = job.recipe.training
        most = max((machine.get("CPU", 0) for machine in machines if machine.get("GPU", 0) >= gpus), default=0)
        # Without a number of threads torch takes every core of a machine, unless a GPU does the work.
        cpus = max(1, min((training.threads or (1 if gpus else most)) + training.workers, most))
    share = Share(cpus, gpus)
    share.check_fits(machines)
    return share


def run_on_ray(jobs: Sequence[Job], *, num_workers: int, observer: JobObserver, settings: RaySettings) -> Outcome:
    """As `run_comparison`, on the machines of a Ray cluster; complete runs need none.

    Raises: MissingExtraError; WellcondError without a cluster that can run the jobs, or for what concerns every run.
    """
    dispatch = Dispatch(jobs, observer, attempts=ATTEMPTS)
    left = list(dispatch.waiting)
    if not left:
        return dispatch.outcome
    with connected(settings.address) as ray, StopFlag().listening() as stop, _token(left) as token:
        share = choose_share(settings, left[0], _machines(ray))
        command = Command(str(token), installed_version("wellcond"), _code_of(left))
        try:
            return _Driver(ray, dispatch, share, num_workers, command).run(stop)
        except ray.exceptions.RayError as error:
            raise WellcondError(
                f"the Ray cluster was lost: {_reason(error)}\n  Run the same command when it is back: it resumes"
            ) from error


@contextlib.contextmanager
def _token(jobs: Sequence[Job]) -> Iterator[Path]:
    """A file by which a worker knows the folder of the comparison."""
    folder = Path(os.path.commonpath([job.folder.resolve() for job in jobs]))
    path = folder / f".wellcond-{uuid.uuid4().hex}"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _code_of(jobs: Sequence[Job]) -> dict[str, str]:
    """Files of the user's code that the jobs run, with digests."""
    specs = {located(job.recipe.model.name, (job.base or Path()).resolve()) for job in jobs if job.local_code}
    files = {spec.rpartition(":")[0] for spec in specs if ".py:" in spec}
    return {path: file_sha256(Path(path)) for path in files if Path(path).is_file()}


@dataclass
class _Task:
    job: Job
    number: int
    began: bool = False
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """The lock of the run's folder here, while another machine works on a copy."""


class _Driver:
    """The loop of one comparison."""

    def __init__(self, ray: Any, dispatch: Dispatch, share: Share, at_once: int, command: Command) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.ray, self.dispatch, self.share, self.at_once, self.command = ray, dispatch, share, at_once, command
        self.tasks: dict[Any, _Task] = {}
        """By Ray's reference to the result."""
        self.copied: set[Path] = set()
        """Folders of runs whose machine does not see them."""
        self.numbers = itertools.count()
        self.idle_since = time.monotonic()
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()
        self.remote = ray.remote(run_task).options(num_cpus=share.cpus, num_gpus=share.gpus, max_retries=0)

    def run(self, stop: StopFlag) -> Outcome:
        self.dispatch.handle(self.dispatch.waiting[0], ("event", {"event": "phase", "phase": "waiting for a worker"}))
        try:
            while self.dispatch.waiting or self.tasks:
                if stop.requested and not self.dispatch.stopping:
                    self._stop()
                for _ in range(min(len(self.dispatch.waiting), self.at_once - len(self.tasks))):
                    self._submit(self.dispatch.waiting.popleft())
                self._check_machines()
                self._listen()
            return self.dispatch.outcome
        except WellcondError:
            self._stop()
            deadline = time.monotonic() + SECONDS_TO_SAVE
            while self.tasks and time.monotonic() < deadline:  # what the other runs have done is kept
                with contextlib.suppress(WellcondError):
                    self._listen()
            raise
        finally:
            for result in list(self.tasks):
                self._cancel(result, force=True)
            self.ray.kill(self.mailbox)

    def _submit(self, job: Job) -> None:
        """Hand a run to Ray, with its files if its machine does not see them."""
        task, files = _Task(job, next(self.numbers)), None
        try:
            if job.folder in self.copied:
                task.held.enter_context(RunFolder(job.folder).opened())
                files = pack(job.folder, self.ray.put)
        except FolderInUse:  # another command has the run: wait for it, other runs first
            self.dispatch.handle(job, ("event", {"event": "waiting"}))
            self.dispatch.waiting.append(job)
        except RunError as error:
            self.dispatch.handle(job, ("error", str(error)))
        else:
            # The worker's current folder is another one.
            sent = replace(job, folder=job.folder.resolve(), base=(job.base or Path()).resolve())
            self.tasks[self.remote.remote(sent, task.number, self.mailbox, files, self.command)] = task

    def _listen(self) -> None:
        """Wait a moment for a run to end; then read the mail, in which is everything it has sent."""
        if not self.tasks:
            time.sleep(0.2)
            return
        ended, _ = self.ray.wait(list(self.tasks), timeout=0.2)
        by_number = {task.number: (result, task) for result, task in self.tasks.items()}
        for number, (kind, content) in self.ray.get(self.mailbox.take.remote()):
            result, task = by_number.get(number, (None, None))
            if task is None:  # of a run that was given up
                continue
            task.began = True
            if kind == FILES:
                self._receive(result, task, content)
            elif kind != BEGAN:
                self.dispatch.handle(task.job, (kind, content))
        for result in ended:
            if result in self.tasks:
                self._end(result)

    def _receive(self, result: Any, task: _Task, chunks: list[Any]) -> None:
        try:
            with contextlib.suppress(self.ray.exceptions.RayError):  # its machine was lost meanwhile
                receive(map(self.ray.get, chunks), task.job.folder)
        except RunError as error:
            self._cancel(result, force=True)
            self.dispatch.handle(task.job, ("error", str(error)))

    def _end(self, result: Any) -> None:
        task = self.tasks.pop(result)
        task.held.close()
        try:
            kind, content = self.ray.get(result)
        except self.ray.exceptions.RayTaskError as error:  # a task that starts catches what its run raises
            raise WellcondError(
                "a Ray worker could not be started; wellcond must be installed for the Python of every machine of the "
                f"cluster (pip install 'wellcond[train,ray]'):\n{error}"
            ) from error
        except self.ray.exceptions.RayError as error:
            self.dispatch.lose(task.job, f"its worker was lost: {_reason(error)}")
            return
        if kind != NO_FOLDER:
            self.dispatch.handle(task.job, (kind, content))
        elif not self.dispatch.stopping:
            self.copied.add(task.job.folder)
            self.dispatch.waiting.appendleft(task.job)

    def _stop(self) -> None:
        """Let runs save and end; those that Ray has not started do not start."""
        self.dispatch.stop()
        self.mailbox.stop.remote()
        for result, task in list(self.tasks.items()):
            if not task.began:
                self._cancel(result)

    def _cancel(self, result: Any, *, force: bool = False) -> None:
        self.ray.cancel(result, force=force)
        self.tasks.pop(result).held.close()

    def _check_machines(self) -> None:
        """Those that are lost may not come back: do not wait for ever."""
        if any(task.began for task in self.tasks.values()):
            self.idle_since = time.monotonic()
        elif time.monotonic() - self.idle_since > PATIENCE:
            self.share.check_fits(_machines(self.ray))
            self.idle_since = time.monotonic()


def _reason(error: Exception) -> str:
    """The line of Ray's message that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in reversed(lines) if "died" in line.lower()), lines[-1])[:300]
