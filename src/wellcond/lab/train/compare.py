"""A comparison: every method with every seed under one recipe; complete runs are not repeated."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wellcond.errors import AttentionNotFoundError, MissingExtraError, WellcondError
from wellcond.files import to_json, write_atomically
from wellcond.lab.cluster import RaySettings
from wellcond.lab.data.errors import DataError
from wellcond.lab.methods import MethodSettings, check_distinct
from wellcond.lab.recipe import Recipe, config_hash
from wellcond.lab.settings import RecipeError
from wellcond.lab.train.engine import Event
from wellcond.lab.train.interrupts import StopFlag
from wellcond.lab.train.run import Job, UnexpectedRunError, check_local_code, run_job
from wellcond.lab.train.run_folder import RunError, writing
from wellcond.models import ModelSpecError
from wellcond.run_records import COMPLETE, SCHEMA, find_change, seal

# Errors of the recipe or the dataset concern every run: the first one ends the comparison.
FOR_ALL = (RecipeError, DataError, MissingExtraError, AttentionNotFoundError, ModelSpecError)
JobObserver = Callable[[Job, Event], None]


@dataclass
class Outcome:
    """Result of a comparison."""

    records: list[dict[str, Any]] = field(default_factory=list)
    failures: list[tuple[Job, str]] = field(default_factory=list)
    interrupted: bool = False
    crashed: bool = False
    """Whether a run in this process failed with an unexpected exception."""

    def take(self, record: dict[str, Any]) -> None:
        """Add the record of a run that ended."""
        self.records.append(record)
        self.interrupted |= record["status"] == "interrupted"

    def fail(self, job: Job, problem: str, observer: JobObserver) -> None:
        """Add a run that failed."""
        self.failures.append((job, problem))
        observer(job, {"event": "failed", "problem": problem})


def plan_comparison(
    recipe: Recipe, methods: Sequence[MethodSettings], seeds: Sequence[int], folder: Path, **options: Any
) -> list[Job]:
    """All runs, seed by seed, so that an interrupted comparison has complete pairs; each at its tuned values.

    Raises: RecipeError without methods, without the baseline among them, or for local code that is not trusted.
    """
    check_local_code(recipe, trusted=options.get("local_code", False))
    check_distinct(methods)
    if not methods:
        raise RecipeError("expected methods to compare, found none; give --methods, or `methods` in the recipe")
    if recipe.baseline not in [method.label for method in methods]:
        raise RecipeError(f"the baseline {recipe.baseline!r} is not among the methods; add it, or set baseline")
    tuned = [recipe.at_tuned(method) for method in methods]
    return [
        Job(recipe, method, seed, folder / method.slug / f"seed{seed}", **options) for seed in seeds for method in tuned
    ]


def settings_hash(recipe: Recipe) -> str:
    """Hash of the settings that all runs of a comparison share."""
    return config_hash(recipe.config(MethodSettings(init="default"), 0))


def check_settings(folder: Path, recipe: Recipe) -> None:
    """Raise RunError if a folder holds a comparison of another recipe, or under other settings, or a packed one."""
    path = folder / "comparison.json"
    if not path.exists():
        return
    former, settings = read_comparison(path), settings_hash(recipe)
    if "shared" in former:
        raise RunError(
            f"{folder} holds packed records, which cannot be resumed; give another folder, then pack what ran there: "
            "wellcond pack"
        )
    if (former["recipe"], former["scale"]) != (recipe.name, recipe.scale):
        raise RunError(
            f"{folder} holds a comparison of {former['recipe']} ({former['scale']}), not of {recipe.name} "
            f"({recipe.scale}); give another folder"
        )
    if former.get("settings_hash", settings) != settings:
        raise RunError(
            f"{folder} holds a comparison of {recipe.name} under other settings: runs under different settings "
            "cannot be compared. Give another folder"
        )


def write_comparison(folder: Path, recipe: Recipe, methods: Sequence[MethodSettings], seeds: Sequence[int]) -> None:
    """Write comparison.json; methods and seeds of an earlier call stay listed.

    Raises: RunError if the folder holds a comparison of another recipe.
    """
    check_settings(folder, recipe)
    path = folder / "comparison.json"
    listed = [{"label": method.label, "slug": method.slug} for method in methods]
    all_seeds = set(seeds)
    if path.exists():
        former = read_comparison(path)
        listed = [*former["methods"], *(row for row in listed if row not in former["methods"])]
        all_seeds |= set(former["seeds"])
    content = {
        "schema": SCHEMA,
        "kind": "wellcond-comparison",
        "name": recipe.name,
        "title": recipe.title,
        "recipe": recipe.name,
        "scale": recipe.scale,
        "settings_hash": settings_hash(recipe),
        "methods": listed,
        "baseline": recipe.baseline,
        "seeds": sorted(all_seeds),
        "notes": recipe.description,
    }
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, to_json(seal(content), indent=1) + "\n")


def read_comparison(path: Path) -> dict[str, Any]:
    """comparison.json.

    Raises: RunError if it is not one, or was changed.
    """
    advice = "Delete it, then run the same command: it is written again, and the runs are kept"
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["kind"] != "wellcond-comparison" or content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}, kind {content['kind']}")
        if not all(isinstance(content[key], list) for key in ("methods", "seeds")) or not {"recipe", "scale"} <= set(
            content
        ):
            raise ValueError("recipe, scale, or the lists of methods and seeds are missing")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path}: expected a comparison of schema {SCHEMA}: {error}\n  {advice}") from error
    if changed := find_change(content):
        raise RunError(f"{path} {changed}\n  {advice}")
    return content


def run_comparison(
    jobs: Sequence[Job], *, num_workers: int, observer: JobObserver, ray: RaySettings | None = None
) -> Outcome:
    """Run what is incomplete, one run after the other, in several processes, or on a Ray cluster.

    Raises: RecipeError, DataError or MissingExtraError, which concern every run; other failures are in the outcome.
    """
    at_once = max(1, min(num_workers, len(jobs)))
    placed = [job if job.at_once == at_once else replace(job, at_once=at_once) for job in jobs]
    outcome = _run_all(placed, num_workers, observer, ray)
    if os.environ.get("RANK", "0") == "0":
        _fail_deleted(outcome, jobs)
    return outcome


def _fail_deleted(outcome: Outcome, jobs: Sequence[Job]) -> None:
    """Turn complete runs whose folder was deleted meanwhile into failures."""
    for job in jobs:
        done = [kept for kept in outcome.records if (kept["method"], kept["seed"]) == (job.method.label, job.seed)]
        if any(kept["status"] in COMPLETE for kept in done) and not (job.folder / "run.json").is_file():
            outcome.records = [kept for kept in outcome.records if kept not in done]
            problem = (
                f"{job.title}: {job.folder} was deleted after the run had ended; run the same command to repeat it"
            )
            outcome.failures.append((job, problem))


def _run_all(jobs: Sequence[Job], num_workers: int, observer: JobObserver, ray: RaySettings | None) -> Outcome:
    if ray is not None:
        from wellcond.lab.cluster.driver import run_on_ray

        return run_on_ray(jobs, num_workers=num_workers, observer=observer, settings=ray)
    if num_workers > 1 and len(jobs) > 1:
        from wellcond.lab.train.worker_pool import run_in_pool

        return run_in_pool(jobs, num_workers=min(num_workers, len(jobs)), observer=observer)
    outcome = Outcome()
    with StopFlag().listening() as stop:
        for job in jobs:
            if stop.requested:
                outcome.interrupted = True
                break
            try:
                outcome.take(run_job(job, functools.partial(observer, job), stop=stop))
            except FOR_ALL:
                raise
            except WellcondError as error:
                if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                    raise  # other ranks may not have failed: continuing would mix runs
                outcome.crashed |= isinstance(error, UnexpectedRunError)
                outcome.fail(job, str(error), observer)
    return outcome
