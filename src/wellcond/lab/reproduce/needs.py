"""What an id needs, and whether it is here: data, tokenisers, GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wellcond.lab.data.reading import find_in_mirror
from wellcond.lab.recipe import Recipe
from wellcond.lab.reproduce.plan import Plan
from wellcond.lab.tasks.glue.benchmark import HUB_ID

INSIDE = {"digits": "scikit-learn's digits, part of that package", "generated": "generated here"}


@dataclass(frozen=True)
class DataNeed:
    """A data set or a tokeniser."""

    name: str
    found: str
    """Where; empty if it is not here."""


def data_needs(plan: Plan) -> list[DataNeed]:
    """Everything that the runs of a plan read, each once."""
    needs = [need for study in plan.studies for need in _of_recipe(study.recipe, study.jobs[0].base)]
    if any(study.glue for study in plan.studies):
        needs.append(DataNeed(HUB_ID, _in_mirror_or_cache(HUB_ID)))
    return list(dict.fromkeys(needs))


def _of_recipe(recipe: Recipe, base: Path | None) -> list[DataNeed]:
    data: dict[str, Any] = recipe.data.model_dump()
    source = data["source"]
    if source == "digits":
        needs = [DataNeed("digits", INSIDE[source])]
    elif source == "generated":
        needs = [DataNeed(f"{data['generator']}", INSIDE[source])]
    elif "path" in data and data["path"]:
        needs = [DataNeed(str(data["path"]), _folder(str(data["path"]), base))]
    else:
        name = str(data.get("id") or data.get("files") or source)
        config = data.get("config")
        needs = [DataNeed(f"{name} ({config})" if config else name, _in_mirror_or_cache(name, config))]
    tokenizer = recipe.task.model_dump().get("tokenizer")
    if isinstance(tokenizer, dict) and tokenizer.get("file"):
        needs.append(DataNeed(str(tokenizer["file"]), _folder(str(tokenizer["file"]), base)))
    return needs


def _folder(path: str, base: Path | None) -> str:
    if ((base or Path()) / os.path.expanduser(path)).exists():
        return "a folder"
    return "a mirror" if find_in_mirror(path) else ""


def _in_mirror_or_cache(name: str, config: str | None = None) -> str:
    mirror = find_in_mirror(name)
    if mirror is not None and (config is None or not _has_folders(mirror) or (mirror / config).is_dir()):
        return "a mirror"
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folders = [cache / "hub" / f"datasets--{name.replace('/', '--')}", cache / "datasets" / name.replace("/", "___")]
    return "the hub's cache" if any(folder.is_dir() for folder in folders) else ""


def _has_folders(mirror: Path) -> bool:
    """Whether a mirrored set has configurations."""
    return any(inside.is_dir() and inside.name not in ("data",) for inside in mirror.iterdir())


def gpus_needed(plan: Plan) -> int:
    """Most of any study."""
    return max((study.settings.gpus for study in plan.studies), default=0)


def gpus_here() -> int:
    """GPUs that torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def why_not_here(plan: Plan) -> list[str]:
    """What keeps a plan from running on this machine; empty if nothing does."""
    reasons = []
    missing = [need.name for need in data_needs(plan) if not need.found]
    if missing:
        reasons.append(f"data not here: {', '.join(missing)}")
    needed, here = gpus_needed(plan), gpus_here()
    if needed > here:
        reasons.append(f"{needed} GPU{'s' * (needed > 1)} wanted, {here or 'none'} here")
    return reasons
