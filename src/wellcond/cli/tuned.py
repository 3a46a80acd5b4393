"""`wellcond compare --tune`: search on tuning seeds, then test every method at its best values on fresh seeds."""

from __future__ import annotations

from collections.abc import Sequence

from wellcond.cli.app import OptionError, is_first_process
from wellcond.cli.compare import Comparison
from wellcond.cli.console import make_console
from wellcond.cli.runs import leaving_together, print_json, removing_untrained, tell_end
from wellcond.lab import tune
from wellcond.lab.report.analysis import describe_power
from wellcond.lab.report.statistics import compare_paired
from wellcond.lab.train.compare import Outcome, check_settings
from wellcond.lab.train.run import Job


def tune_and_compare(
    comparison: Comparison, fields: dict[str, tuple[float, ...]], tuning_seeds: tuple[int, ...], growth: int
) -> int:
    """A search, a comparison at what it found, and their report; returns the exit code.

    Raises: RecipeError, OptionError or RunError for what cannot be searched, before anything runs.
    """
    recipe, seeds = comparison.recipe, comparison.seeds
    plan = tune.Plan(recipe, fields, tuning_seeds, seeds, growth, comparison.folder, comparison.options)
    comparison.methods = tuple(recipe.at_tuned(m, but=fields) for m in comparison.methods)
    comparison.plan()
    if shared := sorted(set(tuning_seeds) & set(seeds)):
        raise OptionError(
            f"--tuning-seeds: expected seeds that are not tested, found {', '.join(map(str, shared))} in both; methods "
            "would be tested on the seeds that chose their values"
        )
    check_settings(plan.folder, recipe)
    plan.check(comparison.methods)
    num_jobs = 0

    def say(text: str) -> None:
        if is_first_process() and not comparison.silent:
            make_console().print(text, markup=False, highlight=False, soft_wrap=True)

    def run(jobs: list[Job], stage: str) -> Outcome:
        nonlocal num_jobs
        num_jobs = len(jobs)
        say(f"{stage}: {num_jobs} runs")
        return comparison.run(jobs)

    say(f"{recipe.title or recipe.name} ({recipe.scale}), {len(comparison.methods)} methods, in {plan.folder}")
    say(f"search on seeds {', '.join(map(str, plan.seeds))}, then test on {len(seeds)} fresh seeds")
    if recipe.evaluation.test is None:
        say(f"scored on {tune.SEEN}")
    with leaving_together(), removing_untrained(comparison.folder):
        comparison.describe()
        searches, stopped = tune.search(plan, comparison.methods, run)
        if stopped is None:
            for found in searches:
                best = tune.show_values(found.best.values) or "nothing to tune"
                say(f"{found.method.label}: {best}{', still at the edge' if found.edges() else ''}")
            for line in _power(searches, recipe.baseline, len(seeds)):
                say(line)
            outcome = run(comparison.plan([found.tuned() for found in searches]), "test")
    if stopped is not None:
        return print_json(stopped) if comparison.as_json else tell_end(stopped, num_jobs)
    return comparison.end(outcome, num_jobs, {"tuning": tune.read_tuning(plan.folder)})


def _power(searches: Sequence[tune.MethodSearch], baseline: str, num_seeds: int) -> list[str]:
    """Which difference the fresh seeds can show, from the spread of the tuning seeds at the best values."""
    known = {
        found.method.label: {int(seed): score for seed, score in found.best.scores.items() if score == score}
        for found in searches
        if found.tried
    }
    base = known.pop(baseline, {})
    metric = next(found.metric for found in searches if found.metric)
    better = metric.higher_is_better
    differences = [compare_paired(name, known[name], baseline, base, higher_is_better=better) for name in known]
    return describe_power(metric, differences, num_seeds)
