"""The search: every method at every value of its grid, grown where the best lies at an edge."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe, TrackingSettings
from wellcond.lab.settings import RecipeError
from wellcond.lab.train.compare import Outcome
from wellcond.lab.train.run import Job
from wellcond.lab.tune.candidates import at_values, has_field, show_values, values_slug
from wellcond.lab.tune.grid import TunedField, extend_grid
from wellcond.run_records import COMPLETE

FOLDER = "tuning"
"""Below the folder of the comparison."""
Point = tuple[float, ...]
"""A value for each tuned field of a method."""


@dataclass(frozen=True)
class Plan:
    """What is searched, and how."""

    recipe: Recipe
    """Of the comparison."""
    fields: tuple[TunedField, ...]
    seeds: tuple[int, ...]
    """Of the search; those of the test are others."""
    growth: int
    """How often a grid may grow in each direction."""
    folder: Path
    """Of the comparison."""
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


class MethodSearch:
    """Grid and scores of one method."""

    def __init__(self, plan: Plan, method: MethodSettings) -> None:
        """Nothing is run here; see `search`."""
        self.plan, self.method = plan, method
        self.fields = [tuned.name for tuned in plan.fields if has_field(method, tuned.name)]
        self.grid = {tuned.name: list(tuned.values) for tuned in plan.fields if tuned.name in self.fields}
        self.grown = {name: {"below": 0, "above": 0} for name in self.fields}
        self.scores: dict[Point, dict[int, float]] = {}
        """By point and seed; NaN for a run that diverged."""
        self.metric: dict[str, Any] = {}
        """As the runs record it."""

    @property
    def points(self) -> list[Point]:
        """The whole grid; nothing for a method without a field to tune."""
        return list(itertools.product(*self.grid.values())) if self.fields else []

    def values(self, point: Point) -> dict[str, float]:
        """A point by field."""
        return dict(zip(self.fields, point, strict=True))

    def tuned(self, point: Point) -> MethodSettings:
        """The method at a point, under its own label."""
        return at_values(self.plan.recipe, self.method, self.values(point))

    def jobs(self, points: Sequence[Point]) -> list[tuple[Point, Job]]:
        """Runs of points with every seed."""
        made = []
        for point in points:
            values = self.values(point)
            label = f"{self.method.label}, {show_values(values)}"
            chosen = at_values(self.plan.recipe, self.method, values, label=label)
            home = self.plan.folder / FOLDER / self.method.slug / values_slug(values)
            for seed in self.plan.seeds:
                job = Job(self.plan.search_recipe, chosen, seed, home / f"seed{seed}", **self.plan.options)
                made.append((point, job))
        return made

    def take(self, point: Point, seed: int, record: dict[str, Any]) -> None:
        """Note the score of a run."""
        metric = self.metric = record["metric"]
        scores = record.get(self.plan.scored) or {}
        value = scores.get(metric["name"])
        score = float(value) if record["status"] == "finished" and isinstance(value, (int, float)) else math.nan
        self.scores.setdefault(point, {})[seed] = score if math.isfinite(score) else math.nan

    def mean(self, point: Point) -> float:
        """Mean score over the seeds that did not diverge; NaN if all did."""
        known = self.known(point)
        return math.fsum(known) / len(known) if known else math.nan

    def std(self, point: Point) -> float:
        """Standard deviation over the seeds that did not diverge; NaN for fewer than two."""
        known = self.known(point)
        return statistics.stdev(known) if len(known) > 1 else math.nan

    def known(self, point: Point) -> list[float]:
        """Scores of a point that are numbers."""
        return [score for score in self.scores[point].values() if not math.isnan(score)]

    def best(self) -> Point:
        """The point with the best mean, the smaller values of equals; one with a diverged seed after all others."""

        def rank(point: Point) -> tuple[int, float, Point]:
            known, mean = self.known(point), self.mean(point)
            lost = len(self.scores[point]) - len(known)
            return lost, 0.0 if math.isnan(mean) else -mean if self.metric["higher_is_better"] else mean, point

        return min(self.scores, key=rank)

    def edges(self) -> dict[str, str]:
        """Fields whose best value is the first or last of the grid: `below` or `above`."""
        found = {}
        for name, value in self.values(self.best()).items() if self.fields else ():
            if value in (min(self.grid[name]), max(self.grid[name])):
                found[name] = "below" if value == min(self.grid[name]) else "above"
        return found

    def grow(self) -> list[Point]:
        """Extend the grid where the best lies at an edge, if it may still grow; returns the new points."""
        before = set(self.points)
        for name, side in self.edges().items():
            wanted = extend_grid(self.grid[name], upwards=side == "above")
            if wanted is None or self.grown[name][side] >= self.plan.growth or not self._takes(name, wanted):
                continue
            self.grown[name][side] += 1
            self.grid[name] = sorted([*self.grid[name], wanted])
        return [point for point in self.points if point not in before]

    def _takes(self, name: str, value: float) -> bool:
        """Whether a value is within the field's range."""
        try:
            at_values(self.plan.recipe, self.method, {name: value})
        except RecipeError:
            return False
        return True


Run = Callable[[list[Job], str], Outcome]
"""Runs the jobs of a stage, which has a name."""


def search(
    plan: Plan, methods: Sequence[MethodSettings], run: Run, note: Callable[[list[MethodSearch]], None]
) -> tuple[list[MethodSearch], Outcome | None]:
    """Search all methods at once, stage by stage: first the grid, then where it grows.

    Args:
        plan: what is searched.
        methods: each with a grid of its own.
        run: runs the jobs of a stage; complete runs are not repeated.
        note: told of the searches after every stage.

    Returns: the searches and, if it was interrupted or runs failed, what became of that stage.
    """
    searches = [MethodSearch(plan, method) for method in methods]
    points = [found.points for found in searches]
    stage = "search"
    while any(points):
        owners = {}
        jobs = []
        for found, wanted in zip(searches, points, strict=True):
            for point, job in found.jobs(wanted):
                jobs.append(job)
                owners[job.method.label, job.seed] = found, point
        jobs.sort(key=lambda job: plan.seeds.index(job.seed))  # runs of a seed share their data
        outcome = run(jobs, stage)
        for record in outcome.records:
            if record["status"] in COMPLETE:
                found, point = owners[record["method"], record["seed"]]
                found.take(point, record["seed"], record)
        if outcome.interrupted or outcome.failures:
            return searches, outcome
        note(searches)
        points = [found.grow() if found.fields else [] for found in searches]
        stage = "growth of the grids"
    return searches, None


def paired_spread(searches: Sequence[MethodSearch], baseline: str) -> float:
    """Standard deviation of the paired differences to the baseline, all at their best, pooled over methods.

    NaN where no method shares two seeds with the baseline.
    """
    by_label = {found.method.label: found.scores[found.best()] for found in searches if found.scores}
    base = by_label.pop(baseline, {})
    spreads = []
    for scores in by_label.values():
        differences = [score - base[seed] for seed, score in scores.items() if seed in base]
        known = [difference for difference in differences if not math.isnan(difference)]
        spreads += [statistics.stdev(known)] if len(known) > 1 else []
    return math.sqrt(math.fsum(spread**2 for spread in spreads) / len(spreads)) if spreads else math.nan
