"""Comparisons on the machines of a Ray cluster; this module needs no Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wellcond.lab.settings import RecipeError


@dataclass(frozen=True)
class RaySettings:
    """Where the cluster is, and what one run gets of it."""

    address: str | None = None
    """``auto``, ``HOST:6379`` or ``ray://HOST:10001``; without one that of RAY_ADDRESS, or a cluster that is started
    on this machine and ends with the comparison."""
    cpus_per_run: float | None = None
    """By default the threads of the recipe and its data workers."""
    gpus_per_run: float | None = None
    """At most 1, since a run is one process; by default 1 where the cluster has GPUs. 0.5: two runs share one."""

    def __post_init__(self) -> None:
        """Refuse what Ray could not grant."""
        if self.cpus_per_run is not None and not 0 < self.cpus_per_run < math.inf:
            raise RecipeError(f"--cpus-per-run: expected a number above 0, found {self.cpus_per_run:g}")
        if self.gpus_per_run is not None and not 0 <= self.gpus_per_run <= 1:
            raise RecipeError(
                f"--gpus-per-run: expected 0 to 1, found {self.gpus_per_run:g}: a run on Ray is one process with one "
                "GPU at most. To train one run on several GPUs, launch it with torchrun"
            )
