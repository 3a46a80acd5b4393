"""A finished run as the origin of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wellcond.lab.settings import RecipeError
from wellcond.lab.train.checkpoint import last_checkpoint, trained_weights
from wellcond.lab.train.run_folder import RunFolder


def read_finished_run(path: Path, field: str, instead: str) -> tuple[dict[str, Any], Path]:
    """Record and file of weights of the run in a folder.

    Args:
        path: folder of the run.
        field: of the recipe that names it, for messages.
        instead: what else the field may name.

    Raises: RecipeError if there is no finished run with its weights; RunError if they are damaged.
    """
    record = RunFolder(path).read_record()
    if record is None:
        raise RecipeError(f"{field}: no run in {path}: expected run.json there, or {instead}")
    if record["status"] != "finished":
        raise RecipeError(f"{field}: the run in {path} is not finished but {record['status']}")
    place = last_checkpoint(path / "checkpoints")
    if place is None:
        raise RecipeError(f"{field}: the run in {path} has no checkpoint; was its folder checkpoints deleted?")
    return record, trained_weights(place, record)
