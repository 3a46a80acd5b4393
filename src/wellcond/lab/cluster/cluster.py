"""Finding or starting a Ray cluster, and what its machines can give to a run."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellcond.errors import MissingExtraError, WellcondError
from wellcond.lab.cluster.settings import RaySettings
from wellcond.lab.train.run import Job

OBJECT_STORE_BYTES = 100 * 2**20
"""Of a cluster that is started here; its runs write to the disk, and only messages pass through Ray."""
FORWARDED = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HOME", "HF_DATASETS_CACHE", "OMP_NUM_THREADS",
             "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")  # fmt: skip

FOLDERS = ("WELLCOND_DATA", "WELLCOND_CACHE", "HF_HOME", "HF_DATASETS_CACHE")

STARTED_WITH = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""No statistics to Ray's makers; and runs are what this machine is for, Ray would put them behind everything else."""


def import_ray() -> Any:
    """The package.

    Raises: MissingExtraError.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    return ray


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that decide what a run finds and computes: they hold on the workers too. No secrets.

    Those that name folders do so in full, since a worker's current folder is another one.

    Example:
        >>> worker_environment({"WELLCOND_DATA": "/data", "HF_TOKEN": "secret", "HF_HUB_OFFLINE": "1"})
        {'WELLCOND_DATA': '/data', 'HF_HUB_OFFLINE': '1'}
    """
    passed = {name: value for name, value in environment.items() if name.startswith("WELLCOND_") or name in FORWARDED}
    return passed | {name: _in_full(passed[name]) for name in FOLDERS if passed.get(name)}


def _in_full(folders: str) -> str:
    return os.pathsep.join(
        os.path.abspath(os.path.expanduser(folder)) if folder else "" for folder in folders.split(os.pathsep)
    )


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The package ray, connected to a cluster; one that was started here ends with the block.

    Raises: MissingExtraError; WellcondError if there is no cluster to connect to.
    """
    ray = import_ray()
    if ray.is_initialized():  # by the program that calls us: it is theirs to end
        yield ray
        return
    place = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"runtime_env": {"env_vars": worker_environment(os.environ)}}
    if place == "local":
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    with _own_environment(), _kept_signals():
        try:
            _knock(place)
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


def _knock(place: str) -> None:
    """Raise OSError if nobody listens at HOST:PORT: Ray would try for minutes, deaf to Ctrl-C."""
    if place == "auto":  # as Ray finds it: the variable, else the cluster that was started here last
        last = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
        place = os.environ.get("RAY_ADDRESS") or (last.read_text().strip() if last.is_file() else "")
    if found := re.fullmatch(r"(?:ray://)?\[?([^/\]]+)\]?:(\d+)", place):
        socket.create_connection((found[1], int(found[2])), timeout=10).close()


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Settings of a cluster that is started here, and no messages of Ray between the bars of progress."""
    logger = logging.getLogger("ray")
    level, former = logger.level, {name: os.environ.get(name) for name in STARTED_WITH}
    os.environ.update(STARTED_WITH)
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, value in former.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def _kept_signals() -> Iterator[None]:
    """Ray puts a handler of its own for SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if former is None else former)


@dataclass(frozen=True)
class Share:
    """What one run gets of a machine."""

    cpus: float
    gpus: float

    def fits(self, machines: Sequence[Mapping[str, float]]) -> bool:
        """Whether there is a machine for it, busy or not."""
        return any(m.get("CPU", 0) >= self.cpus and m.get("GPU", 0) >= self.gpus for m in machines)


def machines_of(ray: Any) -> list[dict[str, float]]:
    """Resources of each machine that is up."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def choose_share(settings: RaySettings, job: Job, machines: Sequence[Mapping[str, float]]) -> Share:
    """What each run of a comparison gets: what the user says, or what its recipe needs.

    Raises: WellcondError if no machine has that much.
    """
    some_gpu = any(machine.get("GPU", 0) >= 1 for machine in machines)
    gpus = settings.gpus_per_run
    if gpus is None:
        gpus = 1.0 if some_gpu and not job.cpu else 0.0
    most = max((machine.get("CPU", 0) for machine in machines if machine.get("GPU", 0) >= gpus), default=0)
    cpus = settings.cpus_per_run
    if cpus is None:
        training = job.recipe.training
        # Without a number of threads torch takes every core of a machine, unless a GPU does the work.
        threads = training.threads or (1 if gpus else most)
        cpus = max(1, min(threads + training.workers, most))
    share = Share(cpus, gpus)
    if not share.fits(machines):
        raise WellcondError(_too_much(share, machines))
    return share


def _too_much(share: Share, machines: Sequence[Mapping[str, float]]) -> str:
    found = "; ".join(f"{m.get('CPU', 0):g} CPUs, {m.get('GPU', 0):g} GPUs" for m in machines) or "none"
    return (
        f"no machine of the Ray cluster has {share.cpus:g} CPUs and {share.gpus:g} GPUs for a run; its machines: "
        f"{found}. Ask for less (--cpus-per-run, --gpus-per-run) or add a machine (ray start --address ...)"
    )


def check_still_fits(ray: Any, share: Share) -> None:
    """Raise WellcondError if the machines that are left cannot run anything."""
    machines = machines_of(ray)
    if not share.fits(machines):
        raise WellcondError(_too_much(share, machines) + ", then run the same command: it resumes from here")
