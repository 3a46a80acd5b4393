"""What a session of a run was made with. No user, host or path names."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("accelerate", "datasets", "numpy", "scikit-learn", "scipy", "timm", "torchvision", "transformers")


def describe_session(
    device: torch.device, *, processes: int, precision: str, step: int, at_once: int = 1
) -> dict[str, Any]:
    """Versions, commit and machine; `alone` says whether its cores, or its GPU, are not shared.

    Args:
        device: that it trains on.
        processes: of this run.
        precision: of its products.
        step: that it starts from.
        at_once: runs of the comparison at the same time.
    """
    threads = at_once * processes * torch.get_num_threads()
    alone = threads <= num_cores() if device.type == "cpu" else at_once == 1
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "wellcond": installed_version("wellcond"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: version for name in PACKAGES if (version := installed_version(name)) is not None},
        **_commit(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "precision": precision,
        "resumed_at_step": step,
        "runs_at_once": at_once,
        "cores": num_cores(),
        "alone": alone and has_free_cores(),
    }


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_free_cores(load: float | None = None) -> bool:
    """Whether no more threads want to run on this machine than it has cores.

    Args:
        load: mean number of threads that want to run; that of the last minute by default. Where the system does not
            say, the answer is no.
    """
    if load is None:
        try:
            load = os.getloadavg()[0]
        except (AttributeError, OSError):
            return False
    return load <= (os.cpu_count() or 1) + LOAD_OF_OUR_OWN


LOAD_OF_OUR_OWN = 0.5
"""Threads that start and watch the runs, and data on their way."""


def installed_version(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> dict[str, Any]:
    """Commit of wellcond's own source tree; None when it is an installed package."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def reset_peak_memory(device: torch.device) -> None:
    """Forget earlier peaks, where the system can: several runs may share a process."""
    if device.type != "cpu":
        gc.collect()  # the model of the run before is in a cycle of references, and a GPU may not hold two
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU where there is one, of the process otherwise; 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(ImportError):
        import resource

        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 0
