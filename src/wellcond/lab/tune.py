"""Tune, then test: every method searches its own values of some fields before methods are compared.

A method is run at every value of its grid, which grows where the best lies at an edge; tuning.json has the search.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellcond.lab.methods import MethodSettings, parse_method, read_calls, write_call
from wellcond.lab.recipe import PARTS, Recipe, TrackingSettings, override_recipe
from wellcond.lab.settings import RecipeError, list_problems, plain_numbers
from wellcond.lab.train.compare import Outcome, settings_hash
from wellcond.lab.train.run import Job
from wellcond.lab.train.run_folder import RunError, read_sealed, write_sealed, writing
from wellcond.run_records import COMPLETE, SCHEMA

FOLDER = "tuning"
"""Below the folder of the comparison."""
NAME, KIND = "tuning.json", "wellcond-tuning"
UNSEEN = "the test split, which the search does not see"
SEEN = (
    "the evaluation split, on which the search chose the values, since the recipe has no evaluation.test: only the "
    "seeds are fresh"
)
Values = Mapping[str, float]
"""By field: of the recipe (``optimizer.lr``), or an option of a part of methods (``identity.lam``)."""
Point = tuple[float, ...]
"""A value for each tuned field of a method."""


def has_field(method: MethodSettings, name: str) -> bool:
    """Whether a method is tuned over a field: it has that part; and it does not set the field itself."""
    part = name.partition(".")[0]
    return name not in method.set if part in PARTS else part in [call for call, _ in read_calls(method.canonical())]


def at_values(recipe: Recipe, method: MethodSettings, values: Values, label: str | None = None) -> MethodSettings:
    """The method with these values of its tuned fields, under its own label or another.

    Raises: RecipeError for a value that its field does not take.
    """
    own = {name: value for name, value in values.items() if name.partition(".")[0] in PARTS}
    calls = read_calls(method.canonical())
    for (part, options), path in itertools.product(calls, [path for path in values if path not in own]):
        owner, _, option = path.partition(".")
        if part == owner:
            options[option] = values[path]
    try:
        fields = parse_method("+".join(write_call(*call) for call in calls)) if own != values else method.model_dump()
        made = MethodSettings.model_validate(fields | {"label": label or method.label, "set": method.set | own})
    except ValueError as error:
        raise RecipeError(f"--tune: {show_values(values)}: {list_problems(error)[0]}") from error
    override_recipe(recipe, made)
    return made


def show_values(values: Values) -> str:
    """Such as ``optimizer.lr=0.003, tokens.positions=25``."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def extend_grid(values: Sequence[float], *, upwards: bool) -> float | None:
    """The value beyond one end of a grid, by the mean factor between its values, to three digits.

    None for a grid that ends at zero or below, which cannot grow by a factor.
    """
    positive = [value for value in values if value > 0]
    edge = max(values) if upwards else min(values)
    if len(positive) < 2 or edge <= 0:
        return None
    factor = (max(positive) / min(positive)) ** (1 / (len(positive) - 1))
    return plain_numbers(float(f"{edge * factor if upwards else edge / factor:.3g}"))


@dataclass(frozen=True)
class Plan:
    """What is searched, and how."""

    recipe: Recipe
    grid: Mapping[str, tuple[float, ...]]
    """The values of every field that each method tries, in ascending order."""
    seeds: tuple[int, ...]
    """Of the search."""
    test_seeds: tuple[int, ...]
    growth: int
    """How often a grid may grow in each direction."""
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    """Of every job."""

    @property
    def scored(self) -> str:
        """Which evaluation of a run counts: `best` where the test takes those weights, else `final`."""
        return "best" if self.recipe.evaluation.test == "best" else "final"

    @property
    def search_recipe(self) -> Recipe:
        """The recipe of the search: the test split is not scored, and nothing is measured."""
        evaluation = self.recipe.evaluation.model_copy(update={"test": None})
        tracking = TrackingSettings(weights_every=None, jacobian_points=0)
        return self.recipe.model_copy(update={"evaluation": evaluation, "tracking": tracking})

    def check(self, methods: Sequence[MethodSettings]) -> None:
        """Raise RecipeError for a field that no method has, or a value that it does not take.

        Raise RunError if the folder holds another search.
        """
        for name, values in self.grid.items():
            concerned = [method for method in methods if has_field(method, name)]
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
    """Grid and scores of one method."""

    def __init__(self, plan: Plan, method: MethodSettings) -> None:
        """Nothing is run here; see `search`."""
        self.plan, self.method = plan, method
        self.grid = {name: list(values) for name, values in plan.grid.items() if has_field(method, name)}
        self.grown = {name: {"below": 0, "above": 0} for name in self.grid}
        self.scores: dict[Point, dict[int, float]] = {}
        """By point and seed; NaN for a run that diverged."""
        self.metric: dict[str, Any] = {}
        """As the runs record it."""

    @property
    def points(self) -> list[Point]:
        """The whole grid; nothing for a method without a field to tune."""
        return list(itertools.product(*self.grid.values())) if self.grid else []

    def values(self, point: Point) -> dict[str, float]:
        """A point by field."""
        return dict(zip(self.grid, point, strict=True))

    def tuned(self) -> MethodSettings:
        """The method at its best, under its own label."""
        return at_values(self.plan.recipe, self.method, self.best_values)

    @property
    def best_values(self) -> dict[str, float]:
        """Empty for a method without a field to tune."""
        return self.values(self.best()) if self.grid else {}

    def job(self, point: Point, seed: int) -> Job:
        """One run of the search."""
        values = self.values(point)
        chosen = at_values(self.plan.recipe, self.method, values, f"{self.method.label}, {show_values(values)}")
        name = "-".join(f"{field}-{value!r}" for field, value in values.items())
        folder = self.plan.folder / FOLDER / self.method.slug / name / f"seed{seed}"
        return Job(self.plan.search_recipe, chosen, seed, folder, **self.plan.options)

    def take(self, point: Point, record: dict[str, Any]) -> None:
        """Note the score of a run."""
        self.metric = record["metric"]
        value = record[self.plan.scored][self.metric["name"]] if record["status"] == "finished" else None
        score = float(value) if isinstance(value, (int, float)) else math.nan
        self.scores.setdefault(point, {})[record["seed"]] = score if math.isfinite(score) else math.nan

    def describe_point(self, point: Point) -> dict[str, Any]:
        """A point and its scores, with mean and standard deviation over the seeds that did not diverge."""
        scores = sorted(self.scores[point].items())
        known = [score for _, score in scores if not math.isnan(score)]
        return {
            "values": self.values(point),
            "scores": {str(seed): None if math.isnan(score) else score for seed, score in scores},
            "diverged": [seed for seed, score in scores if math.isnan(score)],
            "mean": math.fsum(known) / len(known) if known else None,
            "std": statistics.stdev(known) if len(known) > 1 else None,
        }

    def best(self) -> Point:
        """The point with the best mean, the smaller values of equals; one with a diverged seed after all others."""

        def rank(point: Point) -> tuple[int, float, Point]:
            found = self.describe_point(point)
            mean = found["mean"] or 0.0
            return len(found["diverged"]), -mean if self.metric["higher_is_better"] else mean, point

        return min(self.scores, key=rank)

    def edges(self) -> dict[str, str]:
        """Fields whose best value is the first or last of the grid: `below` or `above`."""
        sides, best = {"below": min, "above": max}, self.best_values
        return {name: side for name in best for side in sides if best[name] == sides[side](self.grid[name])}

    def grow(self) -> list[Point]:
        """Extend the grid where the best lies at an edge, if it may still grow; returns the new points."""
        before = set(self.points)
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
        return [point for point in self.points if point not in before]

    def describe(self) -> dict[str, Any]:
        """Its row in tuning.json: the grid, every score, and the best."""
        return {
            "label": self.method.label,
            "slug": self.method.slug,
            "canonical": self.method.canonical(),
            "fields": list(self.grid),
            "grid": self.grid,
            "grown": self.grown,
            "points": [self.describe_point(point) for point in sorted(self.scores)],
            "best": self.describe_point(self.best()) if self.grid else None,
            "at_edge": self.edges(),
        }


def search(
    plan: Plan,
    methods: Sequence[MethodSettings],
    run: Callable[[list[Job], str], Outcome],
) -> tuple[list[MethodSearch], Outcome | None]:
    """Search all methods at once, stage by stage: first the grid, then where it grows.

    `run` does the jobs of a stage, which has a name; tuning.json is written after each. Returns the searches and, if it
    was interrupted or runs failed, the outcome of that stage.
    """
    searches = [MethodSearch(plan, method) for method in methods]
    points = [found.points for found in searches]
    stage = "search"
    while any(points):
        pairs = [(found, point) for found, new in zip(searches, points, strict=True) for point in new]
        # Runs of a seed share their data.
        jobs = [found.job(point, seed) for seed in plan.seeds for found, point in pairs]
        outcome = run(jobs, stage)
        owners = {job.method.label: pair for job, pair in zip(jobs, pairs, strict=False)}
        for record in outcome.records:
            if record["status"] in COMPLETE:
                found, point = owners[record["method"]]
                found.take(point, record)
        if outcome.interrupted or outcome.failures:
            return searches, outcome
        if os.environ.get("RANK", "0") == "0":
            write_tuning(plan, searches)
        points = [found.grow() for found in searches]
        stage = "growth of the grids"
    return searches, None


# tuning.json


def write_tuning(plan: Plan, searches: Sequence[MethodSearch]) -> None:
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
        "metric": next((found.metric for found in searches if found.metric), {}),
        "fields": list(plan.grid),
        "grid": {name: list(values) for name, values in plan.grid.items()},
        "seeds": list(plan.seeds),
        "growth": plan.growth,
        "scored": f"{plan.scored} evaluation on the evaluation split",
        "test_seeds": sorted(plan.test_seeds),
        "test_data": SEEN if plan.recipe.evaluation.test is None else UNSEEN,
        "methods": [*(row for row in former["methods"] if row["label"] not in labels), *rows],
    }
    with writing(plan.folder / NAME):
        plan.folder.mkdir(parents=True, exist_ok=True)
    write_sealed(plan.folder / NAME, content)


def read_tuning(folder: Path) -> dict[str, Any] | None:
    """tuning.json of a folder; None if there is none, RunError if it is no such record or was changed."""
    path = folder / NAME
    advice = "Delete it, then run the same command: it is written again from the runs"
    return read_sealed(path, KIND, advice, ("seeds", "fields", "methods")) if path.exists() else None
