"""`wellcond compare --tune`: search on tuning seeds, then test every method at its best values on fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from wellcond.cli.app import OptionError, is_first_process
from wellcond.cli.compare import Comparison
from wellcond.cli.console import make_console, print_table
from wellcond.cli.runs import leaving_together, print_json, removing_untrained, tell_end
from wellcond.lab import tune
from wellcond.lab.report.records import Metric
from wellcond.lab.report.table import MISSING, Table
from wellcond.lab.report.verdicts import smallest_detectable
from wellcond.lab.train.compare import Outcome, check_settings
from wellcond.lab.train.run import Job


def tune_and_compare(
    comparison: Comparison, fields: dict[str, tuple[float, ...]], tuning_seeds: tuple[int, ...], growth: int
) -> int:
    """A search, a comparison at what it found, and their report; returns the exit code."""
    recipe, seeds = comparison.recipe, comparison.seeds
    plan = tune.Plan(recipe, fields, tuning_seeds, growth, comparison.folder, comparison.options)
    comparison.methods = tuple(recipe.at_tuned(m, but=fields) for m in comparison.methods)
    _check(plan, comparison)
    plan = tune.join_former(plan)
    silent = comparison.silent or not is_first_process()
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

    def note(searches: list[tune.MethodSearch]) -> None:
        if is_first_process():
            known.update(tune.write_tuning(plan, searches, seeds))

    with leaving_together(), removing_untrained(comparison.folder):
        comparison.describe()
        searches, stopped = tune.search(plan, comparison.methods, run, note)
        if stopped is None:
            if not silent:
                _tell_best(searches, recipe.baseline, len(seeds))
            best = [found.tuned(found.best()) if found.fields else found.method for found in searches]
            outcome = run(comparison.plan(best), "test")
    if stopped is not None:
        return print_json(stopped) if comparison.as_json else tell_end(stopped, num_jobs)
    return comparison.end(outcome, num_jobs, {"tuning": known})


def _check(plan: tune.Plan, comparison: Comparison) -> None:
    """Raise RecipeError, OptionError or RunError for what cannot be searched, before anything runs."""
    comparison.plan()
    shared = sorted(set(plan.seeds) & set(comparison.seeds))
    if shared:
        raise OptionError(
            f"--tuning-seeds: expected seeds that are not tested, found {', '.join(map(str, shared))} in both; methods "
            "would be tested on the seeds that chose their values"
        )
    if any(method.slug == tune.FOLDER for method in comparison.methods):
        raise OptionError(f"--tune: the folder {tune.FOLDER} is that of the search; give the method another label")
    tune.check_fields(plan.recipe, comparison.methods, plan.grid)
    check_settings(plan.folder, plan.recipe)


def _say(text: str) -> None:
    make_console().print(text, markup=False, highlight=False, soft_wrap=True)


def _tell_plan(plan: tune.Plan, comparison: Comparison) -> None:
    recipe, count = plan.recipe, len(comparison.methods)
    grids = "; ".join(f"{name} {', '.join(f'{value:g}' for value in values)}" for name, values in plan.grid.items())
    _say(f"{recipe.title or recipe.name} ({recipe.scale}), {count} methods, in {plan.folder}")
    tested = f"then test on {len(comparison.seeds)} fresh seeds"
    _say(f"search on seeds {', '.join(map(str, plan.seeds))}: {grids}; {tested}")
    if recipe.evaluation.test is None:
        _say(f"scored on {tune.SEEN}")


def _tell_best(searches: Sequence[tune.MethodSearch], baseline: str, num_seeds: int) -> None:
    """The best values, and how far the tuning seeds let paired differences spread there."""
    stored = tune.metric_of(searches)
    metric = Metric(stored["name"], stored["higher_is_better"], bool(stored.get("percent")))
    rows: list[tuple[str, ...]] = []
    for found in searches:
        if not found.fields:
            rows.append((found.method.label, "nothing to tune", MISSING, MISSING, ""))
            continue
        best = found.describe_point(found.best())
        scores = [metric.show(math.nan if best[name] is None else best[name]) for name in ("mean", "std")]
        edges = ", ".join(f"{name}: still at the edge" for name in found.edges())
        rows.append((found.method.label, tune.show_values(best["values"]), *scores, edges))
    header = ("method", "best", f"{metric.label}, mean over tuning seeds", "std", "")
    print_table(make_console(), "Search", Table("search", "Search", header, tuple(rows), (), frozenset({0, 1, 4})))
    spread = tune.paired_spread(searches, baseline)
    shown = smallest_detectable(spread, num_seeds)
    if not math.isnan(shown):
        _say(
            f"standard deviation of a paired difference to {baseline}, from the tuning seeds: "
            f"{metric.show(spread)}{metric.unit}; {num_seeds} fresh seeds can show a difference of "
            f"{metric.show(shown)}{metric.unit}"
        )
