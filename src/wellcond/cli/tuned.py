"""`wellcond compare --tune`: search on tuning seeds, then test every method at its best values on fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from wellcond.cli.checks import OptionError, read_tuned_fields
from wellcond.cli.compare import Request
from wellcond.cli.comparison import Comparison
from wellcond.cli.console import make_console, print_table
from wellcond.cli.runs import is_first_process, leaving_together, print_json, removing_untrained, tell_end
from wellcond.lab.methods import MethodSettings
from wellcond.lab.report.records import Metric
from wellcond.lab.report.table import MISSING, Table
from wellcond.lab.report.verdicts import smallest_detectable
from wellcond.lab.train.compare import Outcome, check_settings
from wellcond.lab.train.run import Job
from wellcond.lab.tune import (
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


def run_tuned_compare(request: Request) -> int:
    """A search, a comparison at what it found, and their report; returns the exit code."""
    comparison = Comparison(request, suffix="-tuned")
    recipe, seeds = comparison.recipe, comparison.seeds
    fields = read_tuned_fields(request.tune)
    plan = Plan(recipe, fields, request.tuning_seeds, request.tune_growth, comparison.folder, comparison.options)
    comparison.methods = tuple(recipe.at_tuned(m, but=fields) for m in comparison.methods)
    _check(plan, comparison)
    plan = join_former(plan)
    silent = request.silent or not is_first_process()
    if not silent:
        _tell_plan(plan, comparison)
    known: dict[str, Any] = {}
    num_jobs = 0

    def run(jobs: list[Job], stage: str) -> Outcome:
        nonlocal num_jobs
        num_jobs = len(jobs)
        if not silent:
            _say(f"{stage}: {num_jobs} runs")
        return comparison.run(jobs)

    def note(searches: list[MethodSearch]) -> None:
        if is_first_process():
            known.update(write_tuning(plan, searches, metric_of(searches), seeds))

    with leaving_together(), removing_untrained(comparison.folder):
        comparison.describe()
        searches, stopped = search(plan, comparison.methods, run, note)
        if stopped is None:
            if not silent:
                _tell_best(searches, recipe.baseline, len(seeds))
            best: list[MethodSettings] = [
                found.tuned(found.best()) if found.fields else found.method for found in searches
            ]
            outcome = run(comparison.plan(best), "test")
    if stopped is not None:
        return print_json(stopped) if request.as_json else tell_end(stopped, num_jobs)
    code = print_json(outcome, {"tuning": known}) if request.as_json else tell_end(outcome, num_jobs)
    comparison.report(outcome)
    return code


def _check(plan: Plan, comparison: Comparison) -> None:
    """Raise RecipeError, OptionError or RunError for what cannot be searched, before anything runs."""
    comparison.plan()
    shared = sorted(set(plan.seeds) & set(comparison.seeds))
    if shared:
        raise OptionError(
            f"--tuning-seeds: expected seeds that are not tested, found {', '.join(map(str, shared))} in both; methods "
            "would be tested on the seeds that chose their values"
        )
    if any(method.slug == FOLDER for method in comparison.methods):
        raise OptionError(f"--tune: the folder {FOLDER} is that of the search; give the method another label")
    check_fields(plan.recipe, comparison.methods, plan.grid)
    check_settings(plan.folder, plan.recipe)


def metric_of(searches: Sequence[MethodSearch]) -> dict[str, Any]:
    """What runs are scored by, as they record it."""
    return next((found.metric for found in searches if found.metric), {})


def _say(text: str) -> None:
    make_console().print(text, markup=False, highlight=False, soft_wrap=True)


def _tell_plan(plan: Plan, comparison: Comparison) -> None:
    recipe, count = plan.recipe, len(comparison.methods)
    grids = "; ".join(f"{name} {', '.join(f'{value:g}' for value in values)}" for name, values in plan.grid.items())
    _say(f"{recipe.title or recipe.name} ({recipe.scale}), {count} methods, in {plan.folder}")
    tested = f"then test on {len(comparison.seeds)} fresh seeds"
    _say(f"search on seeds {', '.join(map(str, plan.seeds))}: {grids}; {tested}")
    if recipe.evaluation.test is None:
        _say(f"scored on {SEEN}")


def _tell_best(searches: Sequence[MethodSearch], baseline: str, num_seeds: int) -> None:
    """The best values, and how far the tuning seeds let paired differences spread there."""
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
        _say(
            f"standard deviation of a paired difference to {baseline}, from the tuning seeds: "
            f"{metric.show(spread)}{metric.unit}; {num_seeds} fresh seeds can show a difference of "
            f"{metric.show(shown)}{metric.unit}"
        )
