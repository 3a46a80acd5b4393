"""Tables of a comparison: summary, required comparisons, matching, seeds, cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from wellcond.report.analysis import Analysis, seconds_per_step
from wellcond.report.conditioning_table import conditioning_table
from wellcond.report.formats import (
    PLUS_MINUS,
    show_counts,
    show_interval,
    show_kappa,
    show_mean,
    show_p,
    show_relative,
    show_verdict,
)
from wellcond.report.load_runs import Comparison
from wellcond.report.match import SMOOTH, show_match
from wellcond.report.other_metrics import other_metrics, other_metrics_table
from wellcond.report.run_record import Metric
from wellcond.report.statistics import FEWEST_SEEDS, PairedDifference, Summary
from wellcond.report.table import Table
from wellcond.report.training_figures import PARTS
from wellcond.report.values import MISSING, number, show
from wellcond.report.verdicts import smallest_detectable


def build_tables(analysis: Analysis) -> list[Table]:
    """Every table of numbers, in the order in which they are read."""
    required = [required_table(analysis)] if analysis.required else []
    others = [other_metrics_table(analysis)] if other_metrics(analysis.comparison) else []
    measured = [conditioning_table(analysis)] if any(map(analysis.tables, analysis.comparison.methods)) else []
    evaluated = [evaluation_statistics_table(analysis)] if analysis.comparison.tested else []
    return [
        summary_table(analysis), *required, *others, matching_table(analysis), *measured, statistics_table(analysis),
        *evaluated, seed_table(analysis), cost_table(analysis),
    ]  # fmt: skip


def judged_from(comparison: Comparison) -> str:
    """What the name of the result leaves open, to stand behind it."""
    if not comparison.tested:
        return ""
    return f", {comparison.tested_weights}; curves and matching are of the evaluation set"


def _difference_cells(difference: PairedDifference | None, metric: Metric) -> tuple[str, str, str]:
    """Mean with interval, p, and p after Holm."""
    if difference is None or not difference.count:
        return (MISSING,) * 3
    mean = metric.show(difference.mean, sign=True)
    interval = "" if difference.interval is None else f" {show_interval(difference.interval, metric)}"
    return mean + interval, show_p(difference.p), show_p(difference.p_holm)


def summary_table(analysis: Analysis) -> Table:
    """One row per method."""
    comparison, metric = analysis.comparison, analysis.comparison.result
    header = (
        "method", "runs", f"{metric.label}, mean {PLUS_MINUS} std",
        f"difference to {comparison.baseline} [95 % interval]", "p (Holm)", "verdict", f"{analysis.unit}s to match",
        "κ(J) at end", "entropy / ln N at end", "time of a step",
    )  # fmt: skip
    rows = []
    for method in comparison.methods:
        summary, last = analysis.summaries[method], analysis.attention(method, last=True)
        ratio = analysis.step_ratio(method)
        shown, _, corrected = _difference_cells(analysis.differences.get(method), metric)
        rows.append(
            (
                method + (" (baseline)" if method == comparison.baseline else ""),
                show_counts(analysis.outcomes(method)),
                show_mean(summary.mean, summary.std, metric),
                shown,
                corrected,
                show_verdict(analysis.verdicts.get(method), metric),
                analysis.matchings[method].show(analysis.unit),
                show_kappa(analysis.last_jacobian(method)),
                MISSING if last is None else f"{last.entropy:.2f}",
                MISSING if math.isnan(ratio) else f"{ratio:.2f} ×",
            )
        )
    notes = tuple(_summary_notes(analysis))
    return Table("summary", "Summary by method", header, tuple(rows), notes, frozenset({0, 1, 5}))


def _summary_notes(analysis: Analysis) -> list[str]:
    comparison = analysis.comparison
    notes = [
        f"Differences are paired by seed, {comparison.baseline} subtracted, positive is better"
        + ("" if comparison.metric.higher_is_better else f" ({comparison.metric.name} negated)")
        + "; intervals and p by the paired t distribution, p corrected by Holm's method over this table; uncorrected p "
        "and all other statistics are in the table of statistics.",
        _verdict_note(analysis),
    ]
    if comparison.tested:
        notes.append(
            f"{comparison.result.name.capitalize()} is that {comparison.tested_weights}; {analysis.unit}s to match are "
            "counted on the evaluation set."
        )
        untested = [run for run in comparison.runs if run.finished and not math.isfinite(run.test_value)]
        notes += [f"{run.method}, seed {run.seed} has no finite test score and is in no mean." for run in untested]
    excluded = sorted(
        (run.method, run.seed, run.outcome) for run in comparison.runs if run.outcome in ("diverged", "failed")
    )
    for method, seed, outcome in excluded:
        notes.append(
            f"{method}, seed {seed} {outcome}: it is counted under runs, but its last value is in no mean and its "
            "paired difference is left out, so the means of this method are of the runs that survived."
        )
    partial = sum(run.outcome == "partial" for run in comparison.runs)
    if partial:
        notes.append(
            "1 unfinished (partial) run is in no mean."
            if partial == 1
            else f"{partial} unfinished (partial) runs are in no mean."
        )
    short = [m for m, d in analysis.differences.items() if 0 < d.count < FEWEST_SEEDS]
    if short:
        notes.append(f"Fewer than {FEWEST_SEEDS} pairs, so no interval and no p: {', '.join(short)}.")
    flat = [m for m, d in analysis.differences.items() if d.without_spread]
    if flat:
        notes.append(f"All differences are equal: the interval has no width, t is not defined: {', '.join(flat)}.")
    if any(analysis.heads.values()):
        notes.append(
            "κ(J) is the geometric mean over all heads and seeds at the last measurement, over the non-zero spectrum; "
            "infinite ones are in no mean, and their share is shown."
        )
    return [*notes, *_time_notes(analysis)]


def _verdict_note(analysis: Analysis) -> str:
    metric = analysis.comparison.result
    margin = "" if math.isnan(analysis.margin) else f", here {metric.show(analysis.margin)}{metric.unit}"
    return (
        "Verdicts: better and worse have p below 0.05 after Holm's correction; equal has both one-sided tests at 5 % "
        f"against the margin (by default one standard deviation of the baseline over seeds{margin}); all else is "
        "undecided, and so is better or equal of a method that lost runs."
    )


def _time_notes(analysis: Analysis) -> list[str]:
    """Why times of steps are missing."""
    runs = analysis.not_alone
    finished = [run for run in analysis.comparison.runs if run.finished]
    if not runs:
        return []
    named = "" if len(runs) == len(finished) else f": {', '.join(f'{run.method}, seed {run.seed}' for run in runs)}"
    return [f"Times that were not measured alone on their cores are those of the company, and left out{named}."]


def statistics_table(analysis: Analysis) -> Table:
    """Everything about the results that the summary leaves out."""
    comparison, metric = analysis.comparison, analysis.comparison.result
    what = f"{metric.label.capitalize()}, {comparison.tested_weights}," if comparison.tested else f"Last {metric.label}"
    rows = _statistics_rows(comparison.methods, analysis.summaries, analysis.differences, metric)
    header = _statistics_header(comparison.baseline)
    return Table("statistics", "Statistics in full", header, rows, (f"{what} of finished runs; {STATISTICS_NOTE}",))


def evaluation_statistics_table(analysis: Analysis) -> Table:
    """The same about the last evaluation, for runs whose results are those of a test split."""
    comparison, metric = analysis.comparison, analysis.comparison.metric
    rows = _statistics_rows(comparison.methods, analysis.last_summaries, analysis.last_differences, metric)
    note = f"Last {metric.label} of finished runs on the evaluation set, where the curves end; {STATISTICS_NOTE}"
    title = "Statistics of the last evaluation"
    return Table("statistics_evaluation", title, _statistics_header(comparison.baseline), rows, (note,))


STATISTICS_NOTE = (
    "std has the divisor n - 1. Intervals and p from three pairs on, the bootstrap (10,000 draws, percentile) from "
    "five on. Can show is the smallest true difference that as many pairs with this spread show with a power of 80 %."
)


def _statistics_header(baseline: str) -> tuple[str, ...]:
    return (
        "method", "n", "mean", "std", "min", "max", "pairs", f"difference to {baseline}", "its std", "relative",
        "95 % interval (t)", "95 % interval (bootstrap)", "p", "p (Holm)", "can show",
    )  # fmt: skip


def _statistics_rows(
    methods: Sequence[str],
    summaries: Mapping[str, Summary],
    differences: Mapping[str, PairedDifference],
    metric: Metric,
) -> tuple[tuple[str, ...], ...]:
    rows = []
    for method in methods:
        summary, difference = summaries[method], differences.get(method)
        own = (summary.mean, summary.std, summary.minimum, summary.maximum)
        cells: tuple[str, ...] = (MISSING,) * 9
        if difference is not None and difference.count:
            cells = (
                str(difference.count), metric.show(difference.mean, sign=True), metric.show(difference.std),
                show_relative(difference.relative), show_interval(difference.interval, metric),
                show_interval(difference.bootstrap, metric), show_p(difference.p), show_p(difference.p_holm),
                metric.show(smallest_detectable(difference.std, difference.count)),
            )  # fmt: skip
        rows.append((method, str(summary.count), *map(metric.show, own), *cells))
    return tuple(rows)


def required_table(analysis: Analysis) -> Table:
    """Comparisons between methods on which the papers' claims rest."""
    metric = analysis.comparison.result
    unit = f" in{metric.unit}" if metric.unit else ""
    header = ("comparison", "pairs", f"difference{unit} [95 % interval]", "relative", "p", "p (Holm)", "verdict")
    rows = []
    for difference in analysis.required:
        shown, p, corrected = _difference_cells(difference, metric)
        name = f"{difference.method} − {difference.baseline}"
        verdict = show_verdict(analysis.judge(difference) if difference.count else None, metric)
        rows.append((name, str(difference.count), shown, show_relative(difference.relative), p, corrected, verdict))
    note = (
        "Positive means that the first method is better. Holm's correction is over all pairs with the same second "
        f"method: a difference to {analysis.comparison.baseline} is that of the summary, with the same p."
    )
    return Table(
        "required", "Comparisons between methods", header, tuple(rows), (note,), frozenset({0, 6}),
    )  # fmt: skip


def matching_table(analysis: Analysis) -> Table:
    """Epochs-to-match in all forms."""
    unit = analysis.unit
    header = (
        "method", "paired by seed", "never reached", f"earlier than {analysis.comparison.baseline} itself",
        "p (exact, Holm)", "share of training saved", "papers' form", f"paired, running mean of {SMOOTH}",
        "seconds of training", "each seed",
    )  # fmt: skip
    rows = []
    for method in analysis.comparison.methods:
        matching = analysis.matchings[method]
        saving, gain = matching.mean("saving"), analysis.match_gains.get(method)
        alone = all(run.alone for run in analysis.comparison.finished(method).values())
        seeds = [f"{seed}: {show_match(match, unit)}" for seed, match in sorted(matching.by_seed.items())]
        rows.append(
            (
                method + (" (baseline)" if method == analysis.comparison.baseline else ""),
                matching.show(unit),
                f"{matching.censored}/{len(matching.by_seed)}" if matching.by_seed else MISSING,
                MISSING if gain is None else gain.show(),
                MISSING if gain is None else show_p(gain.p_holm),
                MISSING if math.isnan(saving) else f"{saving:.0%}",
                show_match(matching.of_means, unit),
                analysis.smoothed[method].show(unit),
                show(matching.mean("seconds")) if alone else MISSING,
                ", ".join(seeds) or MISSING,
            )
        )
    notes = (
        f"First evaluation as good as the last one of {analysis.comparison.baseline} with the same seed, in {unit}s; "
        "no interpolation. Seeds that never get there are counted, not averaged; a diverged run never gets there.",
        f"On a noisy curve {analysis.comparison.baseline} itself reaches its last value before the end, so what counts "
        f"is how much earlier than that a method gets there (negative: later); p is of the exact test over all flips "
        f"of sign, in which a seed that never gets there is one {unit} later than the end; below six seeds it cannot "
        "decide, and is left out. The share of training saved is of the whole run, as the papers count.",
        "Running mean: curve and target are both means of the last evaluations.",
    )
    return Table(
        "matching", f"{unit.capitalize()}s to match the baseline", header, tuple(rows), notes, frozenset({0, 9})
    )


def seed_table(analysis: Analysis) -> Table:
    """One row per run."""
    comparison, metric = analysis.comparison, analysis.comparison.metric
    tested = comparison.tested
    header = (
        "method", "seed", "status", *((comparison.result.label, "tested step") if tested else (metric.label,)),
        "difference", *((f"last {metric.label}",) if tested else ()), "loss", f"best {metric.label}", "step", "of",
        "seconds", "reason",
    )  # fmt: skip
    rows = []
    for method in comparison.methods:
        for run in comparison.of(method):
            final, best, progress = (run.record.get(key) or {} for key in ("final", "best", "progress"))
            difference = analysis.differences.get(method)
            paired = math.nan if difference is None else difference.values.get(run.seed, math.nan)
            seconds = sum(x for x in map(number, (run.record.get("seconds") or {}).values()) if math.isfinite(x))
            last, on_test = metric.show(run.value), (metric.show(run.test_value), show(run.test.get("step"), 9))
            rows.append(
                (
                    method, str(run.seed), run.outcome if run.outcome != "partial" else f"partial ({run.status})",
                    *(on_test if tested else (last,)), metric.show(paired, sign=True), *((last,) if tested else ()),
                    show(final.get("loss"), 4), metric.show(number(best.get(metric.name))),
                    show(progress.get("step"), 9), show(progress.get("num_steps"), 9), show(seconds),
                    str(run.record.get("reason") or ""),
                )
            )  # fmt: skip
    note = "A run that diverged shows its last value before it did."
    words = frozenset({0, 2, len(header) - 1})
    return Table("seeds", "Every run", header, tuple(rows), (note,), words)


def cost_table(analysis: Analysis) -> Table:
    """Time and memory, means over finished runs."""
    comparison = analysis.comparison
    header = ("method", "seconds per step", "relative", "samples per second", *(f"{part}, s" for part in PARTS),
              "peak memory, MB")  # fmt: skip
    rows = []
    for method in comparison.methods:
        runs = list(comparison.finished(method).values())
        alone = [run for run in runs if run.alone]

        def mean(values: list[float]) -> float:
            known = [value for value in values if math.isfinite(value)]
            return math.fsum(known) / len(known) if known else math.nan

        parts = [mean([number((run.record.get("seconds") or {}).get(part)) for run in alone]) for part in PARTS]
        ratio = analysis.step_ratio(method)
        rows.append(
            (
                method,
                show(mean([seconds_per_step(run) for run in runs])),
                MISSING if math.isnan(ratio) else f"{ratio:.2f} ×",
                show(mean([number(run.record.get("samples_per_second")) for run in alone]), 4),
                *(show(part) for part in parts),
                show(mean([number(run.record.get("peak_memory_bytes")) / 1e6 for run in runs]), 4),
            )
        )
    note = f"Means over finished runs; relative is to {comparison.baseline} of the same seed."
    return Table("cost", "Cost", header, tuple(rows), (note, *_time_notes(analysis)))
