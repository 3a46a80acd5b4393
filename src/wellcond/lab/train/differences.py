"""Which settings of two runs differ, for messages."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe, override_recipe, with_effect
from wellcond.lab.train.run_folder import RunFolder

MOST_LISTED = 12


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two configurations differ.

    Example:
        >>> differences({"optimizer": {"lr": 1}}, {"optimizer": {"lr": 2}})
        ['optimizer.lr: 1 there, 2 here']
    """
    if isinstance(a, dict) and isinstance(b, dict):
        return [line for key in a | b for line in differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)]
    return [] if a == b else [f"{path}: {a!r} there, {b!r} here"]


def list_differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    """A line for each setting that makes the runs of two configurations differ."""
    found = differences(with_effect(there), with_effect(here))
    rest = [f"and {len(found) - MOST_LISTED} more"] if len(found) > MOST_LISTED else []
    return "\n".join(f"    {line}" for line in [*found[:MOST_LISTED], *rest])


def what_differs(folder: Path, comparison: dict[str, Any], recipe: Recipe) -> str:
    """The settings that differ from those of the first run of a comparison; empty if none has a record."""
    for slug, seed in itertools.product([method["slug"] for method in comparison["methods"]], comparison["seeds"]):
        record = RunFolder(folder / slug / f"seed{seed}").read_record()
        if record is not None:
            try:  # without what was tuned for it there
                method = recipe.at_tuned(MethodSettings.model_validate(record["method"]))
            except ValidationError:  # a label of the user's own
                method = MethodSettings.model_validate(record["config"]["method"])
            here = override_recipe(recipe, method).config(method, record["seed"])
            return f":\n{list_differences(record['config'], here)}\n  Their runs cannot be compared"
    return ""
