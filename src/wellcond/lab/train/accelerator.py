"""Hugging Face Accelerate: one process, DDP and FSDP2 alike, chosen by how the program was launched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from wellcond.errors import MissingExtraError
from wellcond.lab.recipe import Recipe
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.base import AbstractTask


def make_accelerator(recipe: Recipe, folder: Path, *, cpu: bool = False) -> Any:
    """An `accelerate.Accelerator` for one run."""
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
    except ImportError as error:
        raise MissingExtraError("accelerate", "train") from error
    # A process may run several recipes; the precision of an earlier one must not persist.
    AcceleratorState._reset_state()
    trackers = list(recipe.logging.trackers)
    _check_trackers(trackers)
    try:
        accelerator = Accelerator(
            mixed_precision=recipe.precision.mixed,
            dynamo_backend=recipe.precision.compile,
            log_with=trackers or None,
            project_dir=str(folder) if trackers else None,
            cpu=cpu,
        )
    except ValueError as error:
        raise RecipeError(f"precision or logging does not suit this machine: {error}") from error
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and accelerator.device.type == "cpu":
        _shard_on_cpu(accelerator)
    return accelerator


def check_sharding(accelerator: Any, task: AbstractTask, name: str) -> None:
    """Raise RecipeError if weights are sharded and the task does not support that; its ranks would deadlock."""
    if accelerator.is_fsdp2 and not task.can_be_sharded:
        raise RecipeError(
            f"task.name: {name} does not run under FSDP; launch it with DDP (torchrun) or in a single process"
        )


def _check_trackers(trackers: list[str]) -> None:
    """Raise RecipeError for a tracker that is not installed; Accelerate skips it, at most with a warning."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = [str(name) for name in get_available_trackers()]
    for name in trackers:
        if name not in installed:
            known = name in LOGGER_TYPE_TO_CLASS
            what = f"install the package {name}" if known else f"expected one of {', '.join(LOGGER_TYPE_TO_CLASS)}"
            raise RecipeError(f"logging.trackers: {name!r} is not {'installed' if known else 'known'}; {what}")


def _shard_on_cpu(accelerator: Any) -> None:
    """Shard over gloo, as torch's FSDP2 can; Accelerate itself requires a GPU."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    if accelerator.num_processes > 1:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
