"""`wellcond compare --tune`: search on tuning seeds, then test every method at its best values on fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellcond.cli.console import make_console, print_table
from wellcond.cli.experiment_checks import read_tuning_seeds
from wellcond.cli.experiments import choose_workers, is_first_process, leaving_together, parse_seeds, run_jobs, tell_end
from wellcond.cli.report import print_report
from wellcond.lab.cluster import RaySettings
from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.methods import MethodSettings, parse_methods
from wellcond.lab.recipe import Recipe
from wellcond.lab.report.records import Metric
from wellcond.lab.report.table import Table
from wellcond.lab.report.values import MISSING
from wellcond.lab.report.verdicts import smallest_detectable
from wellcond.lab.settings import RecipeError
from wellcond.lab.train.compare import Outcome, check_settings, plan_comparison, write_comparison
from wellcond.lab.train.run import Job
from wellcond.lab.tune.grid import read_tuned_fields
from wellcond.lab.tune.search import (
    FOLDER,
    SEEN,
    MethodSearch,
    Plan,
    check_fields,
    join_former,
    paired_spread,
    search,
    show_values,
    write_tuning,
)


@dataclass(frozen=True)
class TuneOptions:
    """`--tune` and what belongs to it, as given."""

    fields: Sequence[str]
    seeds: str | None
    growth: int


@dataclass
class _Runner:
    """How the runs of every stage are made and shown."""

    recipe: Recipe
    jobs: str
    cpu: bool
    ray: RaySettings | None
    quiet: bool
    num_jobs: int = 0
    """Of the last stage."""

    def __call__(self, jobs: list[Job], stage: str) -> Outcome:
        self.num_jobs = len(jobs)
        self.say(f"{stage}: {len(jobs)} runs")
        on_ray = self.ray is not None and self.jobs == "auto"
        workers = len(jobs) if on_ray else choose_workers(self.jobs, self.recipe, cpu=self.cpu)
        return run_jobs(jobs, workers, quiet=self.quiet, ray=self.ray)

    def say(self, text: str) -> None:
        if is_first_process() and not self.quiet:
            make_console().print(text, markup=False, highlight=False, soft_wrap=True)


def run_tuned_compare(
    recipe_name: str,
    tune: TuneOptions,
    *,
    scale: str | None,
    methods: str | None,
    seeds: str | None,
    overrides: Sequence[str],
    folder: Path | None,
    jobs: str,
    cpu: bool,
    local_code: bool,
    as_json: bool,
    quiet: bool,
    report: bool,
    ray: RaySettings | None = None,
) -> int:
    """A search, a comparison at what it found, and their report; returns the exit code."""
    recipe, base = load_recipe(recipe_name, scale=scale, overrides=overrides)
    chosen = recipe.methods if methods is None else parse_methods(methods)
    place = folder or Path("runs") / f"{recipe.name}-{recipe.scale}-tuned"
    options = {"base": base, "cpu": cpu, "local_code": local_code}
    numbers, tuning_seeds = parse_seeds(seeds, recipe), read_tuning_seeds(tune.seeds)
    plan = Plan(recipe, read_tuned_fields(tune.fields), tuning_seeds, tune.growth, place, options)
    chosen = tuple(recipe.at_tuned(method, but=[field.name for field in plan.fields]) for method in chosen)
    _check(plan, chosen, numbers)
    plan = join_former(plan)
    run = _Runner(recipe, jobs, cpu, ray, quiet or as_json)
    if is_first_process():
        write_comparison(place, recipe, chosen, numbers)
    _tell_plan(run, plan, chosen, numbers)
    known: dict[str, Any] = {}

    def note(searches: list[MethodSearch]) -> None:
        if is_first_process():
            known.update(write_tuning(plan, searches, metric_of(searches), numbers))

    with leaving_together():
        searches, stopped = search(plan, chosen, run, note)
        if stopped is None:
            _tell_best(run, searches, recipe.baseline, len(numbers))
            best = [found.tuned(found.best()) if found.fields else found.method for found in searches]
            outcome = run(plan_comparison(recipe, best, numbers, place, **options), "test")
    if stopped is not None:
        return tell_end(stopped, num_jobs=run.num_jobs, as_json=as_json)
    code = tell_end(outcome, num_jobs=run.num_jobs, as_json=as_json, more={"tuning": known})
    if report and is_first_process() and any(record["final"] for record in outcome.records):
        print_report(place, quiet=quiet or as_json)
    return code


def _check(plan: Plan, methods: Sequence[MethodSettings], seeds: Sequence[int]) -> None:
    """Raise RecipeError or RunError for what cannot be searched, before anything runs."""
    plan_comparison(plan.recipe, methods, seeds, plan.folder, **plan.options)
    shared = sorted(set(plan.seeds) & set(seeds))
    if shared:
        raise RecipeError(
            f"--tuning-seeds: expected seeds that are not tested, found {', '.join(map(str, shared))} in both; methods "
            "would be tested on the seeds that chose their values"
        )
    if any(method.slug == FOLDER for method in methods):
        raise RecipeError(f"--tune: the folder {FOLDER} is that of the search; give the method another label")
    check_fields(plan.recipe, methods, plan.fields)
    check_settings(plan.folder, plan.recipe)


def metric_of(searches: Sequence[MethodSearch]) -> dict[str, Any]:
    """What runs are scored by, as they record it."""
    return next((found.metric for found in searches if found.metric), {})


def _tell_plan(run: _Runner, plan: Plan, methods: Sequence[MethodSettings], seeds: Sequence[int]) -> None:
    grids = "; ".join(f"{field.name} {', '.join(f'{value:g}' for value in field.values)}" for field in plan.fields)
    run.say(f"{plan.recipe.title or plan.recipe.name} ({plan.recipe.scale}), {len(methods)} methods, in {plan.folder}")
    run.say(f"search on seeds {', '.join(map(str, plan.seeds))}: {grids}; then test on {len(seeds)} fresh seeds")
    if plan.recipe.evaluation.test is None:
        run.say(f"scored on {SEEN}")


def _tell_best(run: _Runner, searches: Sequence[MethodSearch], baseline: str, num_seeds: int) -> None:
    """The best values, and how far the tuning seeds let paired differences spread there."""
    if run.quiet or not is_first_process():
        return
    stored = metric_of(searches)
    metric = Metric(stored["name"], stored["higher_is_better"], bool(stored.get("percent")))
    rows = []
    for found in searches:
        if not found.fields:
            rows.append((found.method.label, "nothing to tune", MISSING, MISSING, ""))
            continue
        best = found.best()
        edges = ", ".join(f"{name}: still at the edge" for name in found.edges())
        rows.append(
            (found.method.label, show_values(found.values(best)), metric.show(found.mean(best)),
             metric.show(found.std(best)), edges)
        )  # fmt: skip
    header = ("method", "best", f"{metric.label}, mean over tuning seeds", "std", "")
    print_table(make_console(), "Search", Table("search", "Search", header, tuple(rows), (), frozenset({0, 1, 4})))
    spread = paired_spread(searches, baseline)
    shown = smallest_detectable(spread, num_seeds)
    if not math.isnan(shown):
        make_console().print(
            f"standard deviation of a paired difference to {baseline}, from the tuning seeds: "
            f"{metric.show(spread)}{metric.unit}; {num_seeds} fresh seeds can show a difference of "
            f"{metric.show(shown)}{metric.unit}",
            markup=False,
            soft_wrap=True,
        )
