"""A comparison: its runs here or on a Ray cluster, the search for values before them, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellcond.cli.app import OptionError, is_first_process
from wellcond.cli.console import make_console
from wellcond.cli.report import print_report
from wellcond.cli.runs import run_jobs, tell_end, training_in
from wellcond.lab import tune
from wellcond.lab.cluster import RaySettings
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe
from wellcond.lab.report.analysis import analyse, describe_power
from wellcond.lab.report.load_runs import load_comparisons
from wellcond.lab.report.records import Metric, RunRecordError
from wellcond.lab.report.statistics import compare_paired
from wellcond.lab.train.compare import Outcome, plan_comparison, write_comparison
from wellcond.lab.train.run import Job


@dataclass
class Comparison:
    """Methods and seeds under one recipe, where they are run, and what is printed."""

    recipe: Recipe
    methods: tuple[MethodSettings, ...]
    seeds: tuple[int, ...]
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    """Of every run."""
    at_once: int | None = None
    ray: RaySettings | None = None
    as_json: bool = False
    silent: bool = False
    """Whether nothing is printed for people while it runs."""
    report: bool = True
    num_jobs: int = field(default=0, init=False)
    """Of the last call of `run`."""

    def __post_init__(self) -> None:
        self.silent |= not is_first_process()

    def plan(self, methods: Sequence[MethodSettings]) -> list[Job]:
        """Every run; raises RecipeError."""
        return plan_comparison(self.recipe, methods, self.seeds, self.folder, **self.options)

    def describe(self) -> None:
        """Write comparison.json; raises RunError if the folder holds another comparison."""
        if is_first_process():
            write_comparison(self.folder, self.recipe, self.methods, self.seeds)

    def say(self, *lines: str) -> None:
        """Print lines for people."""
        for line in lines if not self.silent else ():
            make_console().print(line, markup=False, highlight=False, soft_wrap=True)

    def run(self, jobs: list[Job]) -> Outcome:
        """Run jobs here or on Ray."""
        self.num_jobs = len(jobs)
        return run_jobs(jobs, self.at_once, quiet=self.silent, ray=self.ray)

    def compare(self) -> int:
        """Every run and the report; returns the exit code."""
        planned = self.plan(self.methods)
        with training_in(self.folder):
            self.describe()
            if not self.silent:
                told = f"{self.recipe.title or self.recipe.name} ({self.recipe.scale}): {len(self.methods)} methods x "
                told += f"{len(self.seeds)} seeds; runs with the same seed share data order and all other weights"
                self.say(f"{told}. Folder: {self.folder}", *foresee_power(self.folder, len(self.seeds)))
            outcome = self.run(planned)
        return self._end(outcome)

    def tune_and_compare(self, grid: Mapping[str, tuple[float, ...]], seeds: tuple[int, ...], growth: int) -> int:
        """Search with tuning seeds, then compare methods at their best values on fresh ones; returns the exit code.

        Raises: RecipeError, OptionError or RunError for what cannot be searched, before anything runs.
        """
        recipe = self.recipe
        self.methods = tuple(recipe.at_tuned(method, but=grid) for method in self.methods)
        self.plan(self.methods)
        if shared := sorted(set(seeds) & set(self.seeds)):
            raise OptionError(
                f"--tuning-seeds: expected seeds that are not tested, found {', '.join(map(str, shared))} in both; "
                "methods would be tested on the seeds that chose their values"
            )
        plan = tune.Plan(recipe, grid, seeds, self.seeds, growth, self.folder, self.options)
        plan.check(self.methods)

        def run(jobs: list[Job], stage: str) -> Outcome:
            self.say(f"{stage}: {len(jobs)} runs")
            return self.run(jobs)

        with training_in(self.folder):
            self.describe()
            self.say(
                f"{recipe.title or recipe.name} ({recipe.scale}), {len(self.methods)} methods, in {self.folder}",
                f"search on seeds {', '.join(map(str, seeds))}, then test on {len(self.seeds)} fresh seeds",
                *([f"scored on {tune.SEEN}"] if recipe.evaluation.test is None else []),
            )
            searches, stopped = tune.search(plan, self.methods, run)
            if stopped is None:
                for found in searches:
                    best = tune.show_values(found.best_values) or "nothing to tune"
                    self.say(f"{found.method.label}: {best}{', still at the edge' if found.edges() else ''}")
                self.say(*_power_after(searches, recipe.baseline, len(self.seeds)))
                outcome = run(self.plan([found.tuned() for found in searches]), "test")
        if stopped is not None:
            return tell_end(stopped, self.num_jobs, as_json=self.as_json)
        return self._end(outcome, tuning=tune.read_tuning(self.folder))

    def _end(self, outcome: Outcome, **more: Any) -> int:
        """Say what became of the runs; build and print the report, if it is wanted; returns the exit code."""
        code = tell_end(outcome, self.num_jobs, as_json=self.as_json, **more)
        if self.report and is_first_process() and any(record["final"] for record in outcome.records):
            print_report(self.folder, quiet=self.silent)
        return code


def foresee_power(folder: Path, seeds: int) -> list[str]:
    """Which difference as many seeds can show, as far as earlier runs in a folder tell; nothing otherwise."""
    try:
        found = [analyse(comparison) for comparison in load_comparisons(folder)]
    except RunRecordError:  # no runs yet; what is wrong with one is said when it is its turn
        return []
    return [line for a in found for line in describe_power(a.comparison.result, a.differences.values(), seeds)]


def _power_after(searches: Sequence[tune.MethodSearch], baseline: str, num_seeds: int) -> list[str]:
    """Which difference the fresh seeds can show, from the spread of the tuning seeds at the best values."""
    known = {
        found.method.label: {seed: score for seed, score in found.scores[found.best()].items() if score == score}
        for found in searches
        if found.scores
    }
    base = known.pop(baseline, {})
    metric = Metric.of(next(found for found in searches if found.scores).metric)
    better = metric.higher_is_better
    differences = [compare_paired(name, known[name], baseline, base, higher_is_better=better) for name in known]
    return describe_power(metric, differences, num_seeds)
