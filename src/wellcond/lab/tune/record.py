"""tuning.json: what a search tried and found, made from its runs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wellcond.files import to_json, write_atomically
from wellcond.lab.train.compare import settings_hash
from wellcond.lab.train.run_folder import RunError, writing
from wellcond.lab.tune.grid import TunedField
from wellcond.lab.tune.search import MethodSearch, Plan, Point
from wellcond.run_records import SCHEMA, find_change, seal

NAME, KIND = "tuning.json", "wellcond-tuning"
UNSEEN = "the test split, which the search does not see"
SEEN = (
    "the evaluation split, on which the search chose the values, since the recipe has no evaluation.test: only the "
    "seeds are fresh"
)


def join_former(plan: Plan) -> Plan:
    """The plan with the values that an earlier search in the same folder had beside those asked for.

    Raises: RunError if that was a search of something else.
    """
    former = read_tuning(plan.folder)
    if former is None:
        return plan
    ours = {"settings_hash": settings_hash(plan.recipe), "seeds": list(plan.seeds), "fields": _names(plan)}
    for key, value in ours.items():
        if former[key] != value:
            raise RunError(
                f"{plan.folder} holds a search with other {key} ({former[key]} there, {value} here); give another "
                "folder"
            )
    joined = [
        TunedField(field.name, tuple(sorted({*field.values, *former["grid"][field.name]}))) for field in plan.fields
    ]
    return dataclasses.replace(plan, fields=tuple(joined))


def _names(plan: Plan) -> list[str]:
    return [field.name for field in plan.fields]


def write_tuning(plan: Plan, searches: Sequence[MethodSearch], metric: dict[str, Any], seeds: Sequence[int]) -> dict:
    """Write the record of a search; methods of an earlier call stay listed. Returns it.

    Args:
        plan: what is searched.
        searches: with at least one scored run each, or no field to tune.
        metric: as runs record it.
        seeds: of the test.
    """
    former = read_tuning(plan.folder) or {"methods": []}
    rows = [_describe(found) for found in searches]
    labels = [row["label"] for row in rows]
    content = {
        "schema": SCHEMA,
        "kind": KIND,
        "recipe": plan.recipe.name,
        "scale": plan.recipe.scale,
        "settings_hash": settings_hash(plan.recipe),
        "metric": metric,
        "fields": _names(plan),
        "grid": {field.name: list(field.values) for field in plan.fields},
        "seeds": list(plan.seeds),
        "growth": plan.growth,
        "scored": f"{plan.scored} evaluation on the evaluation split",
        "test_seeds": sorted(seeds),
        "test_data": SEEN if plan.recipe.evaluation.test is None else UNSEEN,
        "methods": [*(row for row in former["methods"] if row["label"] not in labels), *rows],
    }
    with writing(plan.folder / NAME):
        plan.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(plan.folder / NAME, to_json(seal(content), indent=1) + "\n")
    return content


def _describe(found: MethodSearch) -> dict[str, Any]:
    """One method's row: its grid, every score, and the best."""
    row: dict[str, Any] = {
        "label": found.method.label,
        "slug": found.method.slug,
        "canonical": found.method.canonical(),
        "fields": found.fields,
        "grid": found.grid,
        "grown": found.grown,
        "points": [_describe_point(found, point) for point in sorted(found.scores)],
        "best": None,
        "at_edge": {},
    }
    if found.fields:
        best = found.best()
        row |= {"best": _describe_point(found, best), "at_edge": found.edges()}
    return row


def _describe_point(found: MethodSearch, point: Point) -> dict[str, Any]:
    scores = found.scores[point]
    mean, std = found.mean(point), found.std(point)
    return {
        "values": found.values(point),
        "scores": {str(seed): None if math.isnan(score) else score for seed, score in sorted(scores.items())},
        "diverged": [seed for seed, score in sorted(scores.items()) if math.isnan(score)],
        "mean": None if math.isnan(mean) else mean,
        "std": None if math.isnan(std) else std,
    }


def read_tuning(folder: Path) -> dict[str, Any] | None:
    """tuning.json of a folder; None if there is none.

    Raises: RunError if it is no such record, or was changed.
    """
    path = folder / NAME
    if not path.exists():
        return None
    advice = "Delete it, then run the same command: it is made anew from the runs"
    try:
        content = json.loads(path.read_text("utf-8"))
        if (content["kind"], content["schema"]) != (KIND, SCHEMA):
            raise ValueError(f"schema {content['schema']}, kind {content['kind']}")
        missing = {"settings_hash", "seeds", "fields", "grid", "methods"} - set(content)
        if missing:
            raise ValueError(f"{', '.join(sorted(missing))} missing")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{path}: expected a record of a search: {error}\n  {advice}") from error
    if changed := find_change(content):
        raise RunError(f"{path} {changed}\n  {advice}")
    return content
