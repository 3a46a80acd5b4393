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
    """Versions, commit and machine of a session that starts from `step`, with `at_once` runs at the same time.

    `alone` says whether its cores, or its GPU, are not shared.
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
    """Whether no more threads want to run on this machine than it has cores: by default in the mean of the last minute.

    Where the system does not say, the answer is no.
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
    """Commit of wellcond's own source tree, and whether it was changed; None when it is an installed package."""
    root = Path(__file__).parents[4]
    if (root / ".git").exists():
        asked = "git --no-optional-locks describe --always --dirty --abbrev=40 --exclude=*".split()
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(
                asked, cwd=root, capture_output=True, text=True, check=True, timeout=20
            ).stdout.strip()
            return {"commit": said.removesuffix("-dirty"), "dirty": said.endswith("-dirty")}
    return {"commit": None, "dirty": None}


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
