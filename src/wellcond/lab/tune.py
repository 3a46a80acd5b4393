"""Tune, then test: every method searches its own values of some fields before methods are compared.

A method is run at every value of its grid, which grows where the best lies at an edge; tuning.json has the search.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wellcond.errors import RecipeError, RunError
from wellcond.lab.methods import MethodSettings
from wellcond.lab.plan import settings_hash
from wellcond.lab.pool import Outcome
from wellcond.lab.recipe import PARTS, Recipe, TrackingSettings, override_recipe
from wellcond.lab.records import SCHEMA, Metric
from wellcond.lab.report.table import number
from wellcond.lab.report.tuning import KIND, NAME, TunedPoint
from wellcond.lab.settings import list_problems, plain_numbers
from wellcond.lab.train.run import Job
from wellcond.lab.train.run_folder import read_sealed, write_sealed

UNSEEN = "the test split, which the search does not see"
SEEN = (
    "the evaluation split, which also chose the values, since there is no test split (evaluation.test): only the seeds "
    "are fresh"
)
Values = Mapping[str, float]
"""By field: of the recipe (``optimizer.lr``), or an option of a part of methods (``identity.lam``)."""


def find_field(method: MethodSettings, name: str) -> tuple[str, str] | None:
    """Where a method has a field to tune: a mapping of its settings and the key there; None if it sets it itself."""
    part, _, option = name.partition(".")
    if part in PARTS:
        return None if name in method.set else ("set", name)
    homes = {"tokens": "tokens"} if method.tokens else {}
    homes |= {method.init: "init_options", method.condition or "": "condition_options"}
    return (homes[part], option) if part in homes else None


def at_values(recipe: Recipe, method: MethodSettings, values: Values, label: str | None = None) -> MethodSettings:
    """The method with these values of its tuned fields, under its own label or another; RecipeError if it cannot be."""
    fields = method.model_dump() | {"label": label or method.label}
    for name, value in values.items():
        if place := find_field(method, name):
            fields[place[0]][place[1]] = value
    try:
        made = MethodSettings.model_validate(fields)
    except ValueError as error:
        raise RecipeError(f"--tune: {show_values(values)}: {list_problems(error)[0]}") from error
    override_recipe(recipe, made)
    return made


def show_values(values: Values) -> str:
    """Such as ``optimizer.lr=0.003, tokens.positions=25``."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def extend_grid(values: Sequence[float], *, upwards: bool) -> float | None:
    """The value beyond one end of a grid, by the mean factor of its values, to three digits; None beyond zero."""
    positive = [value for value in values if value > 0]
    edge = max(values) if upwards else min(values)
    if len(positive) < 2 or edge <= 0:
        return None
    factor = (max(positive) / min(positive)) ** (1 / (len(positive) - 1))
    return plain_numbers(float(f"{edge * factor if upwards else edge / factor:.3g}"))


@dataclass(frozen=True)
class SearchPlan:
    """What every method searches before a comparison, and where."""

    recipe: Recipe
    methods: tuple[MethodSettings, ...]
    test_seeds: tuple[int, ...]
    """Those of the comparison, which the search does not use."""
    folder: Path
    grid: Mapping[str, tuple[float, ...]]
    """The values of every tuned field that each method tries, in ascending order."""
    seeds: tuple[int, ...]
    growth: int = 0
    """How often a grid may grow in each direction."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of every run."""

    @property
    def scored(self) -> str:
        """Which evaluation of a run counts: `best` where the test takes those weights, else `final`."""
        return "best" if self.recipe.evaluation.test == "best" else "final"

    def check(self) -> None:
        """Raise RecipeError for what cannot be searched, RunError if the folder holds another search."""
        if shared := sorted(set(self.seeds) & set(self.test_seeds)):
            raise RecipeError(
                f"--tuning-seeds: expected seeds that are not tested, found {', '.join(map(str, shared))} in both; "
                "methods would be tested on the seeds that chose their values"
            )
        for name, values in self.grid.items():
            concerned = [method for method in self.methods if find_field(method, name)]
            if not concerned:
                raise RecipeError(
                    f"--tune {name}: expected a field of the recipe that a method may set ({', '.join(PARTS)}), or "
                    "PART.OPTION of a method such as identity.lam; none of the methods has it to tune"
                )
            for method, value in itertools.product(concerned, values):
                at_values(self.recipe, method, {name: value})
        former = read_tuning(self.folder)
        if former and (former["seeds"], former["fields"]) != (list(self.seeds), list(self.grid)):
            raise RunError(f"{self.folder} holds a search of other fields or with other seeds; give another folder")


class MethodSearch:
    """Grid and scores of one method; nothing is run here, see `search`."""

    def __init__(self, plan: SearchPlan, method: MethodSettings) -> None:
        self.plan, self.method = plan, method
        self.grid = {name: list(values) for name, values in plan.grid.items() if find_field(method, name)}
        self.grown = {name: {"below": 0, "above": 0} for name in self.grid}
        self.tried: list[TunedPoint] = []
        self.metric: Metric | None = None
        """As the runs record it."""

    @property
    def missing(self) -> list[dict[str, float]]:
        """Values of the grid that were not tried; nothing for a method without a field to tune."""
        tried = [point.values for point in self.tried]
        grid = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        return [values for values in grid if values and values not in tried]

    def job(self, values: Values, seed: int) -> Job:
        """One run of the search, which does not score the test split, and measures nothing."""
        recipe, label = self.plan.recipe, f"{self.method.label}, {show_values(values)}"
        name = "-".join(f"{field}-{value!r}" for field, value in values.items())
        folder = self.plan.folder / "tuning" / self.method.slug / name / f"seed{seed}"
        evaluation = recipe.evaluation.model_copy(update={"test": None})
        tracking = TrackingSettings(weights_every=None, jacobian_points=0)
        shortened = recipe.model_copy(update={"evaluation": evaluation, "tracking": tracking})
        return Job(shortened, at_values(recipe, self.method, values, label), seed, folder, **self.plan.options)

    def take(self, values: Values, records: Sequence[dict[str, Any]]) -> None:
        """Note the scores of the runs at these values, one of each seed."""
        self.metric = metric = Metric.of(records[0]["metric"])
        scores = {}
        for record in records:
            score = number(record[self.plan.scored][metric.name]) if record["status"] == "finished" else math.nan
            scores[str(record["seed"])] = score if math.isfinite(score) else math.nan
        self.tried.append(TunedPoint(values, scores))

    @property
    def best(self) -> TunedPoint:
        """The best point; one without values if there is no field to tune."""
        higher = self.metric is not None and self.metric.higher_is_better
        return min(self.tried, key=lambda point: point.rank(higher), default=TunedPoint({}, {}))

    def tuned(self) -> MethodSettings:
        """The method at its best, under its own label."""
        return at_values(self.plan.recipe, self.method, self.best.values)

    def edges(self) -> dict[str, str]:
        """Fields whose best value is the first or last of the grid: `below` or `above`."""
        sides, best = {"below": min, "above": max}, self.best.values
        return {name: side for name in best for side in sides if best[name] == sides[side](self.grid[name])}

    def grow(self) -> None:
        """Extend the grid where the best lies at an edge, if it may still grow."""
        for name, side in self.edges().items():
            wanted = extend_grid(self.grid[name], upwards=side == "above")
            if wanted is None or self.grown[name][side] >= self.plan.growth:
                continue
            try:
                at_values(self.plan.recipe, self.method, {name: wanted})
            except RecipeError:  # beyond the field's range
                continue
            self.grown[name][side] += 1
            self.grid[name] = sorted([*self.grid[name], wanted])

    def describe(self) -> dict[str, Any]:
        """The row of this method in tuning.json: the grid, every score, and the best."""
        return {
            "label": self.method.label,
            "slug": self.method.slug,
            "canonical": self.method.canonical(),
            "fields": list(self.grid),
            "grid": self.grid,
            "grown": self.grown,
            "points": [point.describe() for point in sorted(self.tried, key=lambda point: [*point.values.values()])],
            "best": self.best.describe() if self.grid else None,
            "at_edge": self.edges(),
        }


def search(plan: SearchPlan, run: Callable[[list[Job]], Outcome]) -> tuple[list[MethodSearch], Outcome | None]:
    """Search all methods at once, stage by stage: first the grid, then where it grows.

    tuning.json is written after each stage. Returns the searches and, if a stage was interrupted or runs of it failed,
    its outcome.
    """
    searches = [MethodSearch(plan, method) for method in plan.methods]
    metric, recorded = recorded_points(plan)
    while missing := [(found, values) for found in searches for values in found.missing]:
        new = []
        for found, values in missing:
            if point := recorded.get((found.method.canonical(), frozenset(values.items()))):
                found.tried.append(point)
                found.metric = metric
            else:
                new.append((found, values))
        # Runs of a seed share their data.
        jobs = [found.job(values, seed) for seed in plan.seeds for found, values in new]
        outcome = run(jobs) if jobs else Outcome()
        if outcome.interrupted or outcome.failures:
            return searches, outcome
        records = {(record["method"], record["seed"]): record for record in outcome.records}
        for job, (found, values) in zip(jobs, new, strict=False):
            found.take(values, [records[job.method.label, seed] for seed in sorted(plan.seeds)])
        if os.environ.get("RANK", "0") == "0":
            write_tuning(plan, searches)
        for found in searches:
            found.grow()
    return searches, None


def recorded_points(
    plan: SearchPlan,
) -> tuple[Metric | None, dict[tuple[str, frozenset[tuple[str, float]]], TunedPoint]]:
    """Metric and points of tuning.json by method and values, if its search had these settings and seeds.

    A comparison that was unpacked from a file without the runs of its search goes on from them.
    """
    former = read_tuning(plan.folder)
    if former is None or former.get("settings_hash") != settings_hash(plan.recipe):
        return None, {}
    points = {
        (row["canonical"], frozenset(point.values.items())): point
        for row in former["methods"]
        for point in map(TunedPoint.of, row["points"])
        if set(point.scores) == {str(seed) for seed in plan.seeds}
    }
    return Metric.of(former["metric"]), points


def write_tuning(plan: SearchPlan, searches: Sequence[MethodSearch]) -> None:
    """Write the record of a search; methods of an earlier call stay listed."""
    former = read_tuning(plan.folder) or {"methods": []}
    rows = [found.describe() for found in searches]
    labels = [row["label"] for row in rows]
    content = {
        "schema": SCHEMA,
        "kind": KIND,
        "recipe": plan.recipe.name,
        "scale": plan.recipe.scale,
        "settings_hash": settings_hash(plan.recipe),
        "metric": next(asdict(found.metric) for found in searches if found.metric),
        "fields": list(plan.grid),
        "grid": {name: list(values) for name, values in plan.grid.items()},
        "seeds": list(plan.seeds),
        "growth": plan.growth,
        "scored": f"{plan.scored} evaluation on the evaluation split",
        "test_seeds": sorted(plan.test_seeds),
        "test_data": SEEN if plan.recipe.evaluation.test is None else UNSEEN,
        "methods": [*(row for row in former["methods"] if row["label"] not in labels), *rows],
    }
    write_sealed(plan.folder / NAME, content)


def read_tuning(folder: Path) -> dict[str, Any] | None:
    """tuning.json of a folder; None if there is none, RunError if it is no such record or was changed."""
    path = folder / NAME
    advice = "Delete it, then run the same command: it is written again from the runs"
    return read_sealed(path, KIND, advice, ("seeds", "fields", "methods")) if path.exists() else None
