"""Tables of a comparison: summary, required comparisons, matching, seeds, cost."""

from __future__ import annotations

import math

from wellcond.report.analysis import Analysis, seconds_per_step
from wellcond.report.conditioning_table import conditioning_table
from wellcond.report.formats import PLUS_MINUS, show_counts, show_interval, show_mean, show_p, show_relative
from wellcond.report.match import SMOOTH, show_match
from wellcond.report.run_record import Metric
from wellcond.report.statistics import FEWEST_SEEDS, PairedDifference
from wellcond.report.table import Table
from wellcond.report.training_figures import PARTS
from wellcond.report.values import MISSING, number, show


def build_tables(analysis: Analysis) -> list[Table]:
    """Every table of numbers, in the order in which they are read."""
    required = [required_table(analysis)] if analysis.required else []
    measured = [conditioning_table(analysis)] if any(map(analysis.tables, analysis.comparison.methods)) else []
    return [
        summary_table(analysis), *required, matching_table(analysis), *measured, statistics_table(analysis),
        seed_table(analysis), cost_table(analysis),
    ]  # fmt: skip


def _difference_cells(difference: PairedDifference | None, metric: Metric) -> tuple[str, str, str]:
    """Mean with interval, p, and p after Holm."""
    if difference is None or not difference.count:
        return (MISSING,) * 3
    mean = metric.show(difference.mean, sign=True)
    interval = "" if difference.interval is None else f" {show_interval(difference.interval, metric)}"
    return mean + interval, show_p(difference.p), show_p(difference.p_holm)


def summary_table(analysis: Analysis) -> Table:
    """One row per method."""
    comparison, metric = analysis.comparison, analysis.comparison.metric
    header = (
        "method", "runs", f"{metric.label}, mean {PLUS_MINUS} std",
        f"difference to {comparison.baseline} [95 % interval]", "p (Holm)", f"{analysis.unit}s to match",
        "κ(J) at end", "entropy / ln N at end", "time of a step",
    )  # fmt: skip
    rows = []
    for method in comparison.methods:
        summary, last = analysis.summaries[method], analysis.attention(method, last=True)
        jacobian = analysis.last_jacobian(method)
        ratio = analysis.step_ratio(method)
        shown, _, corrected = _difference_cells(analysis.differences.get(method), metric)
        rows.append(
            (
                method + (" (baseline)" if method == comparison.baseline else ""),
                show_counts(analysis.outcomes(method)),
                show_mean(summary.mean, summary.std, metric),
                shown,
                corrected,
                analysis.matchings[method].show(analysis.unit),
                show(jacobian.geometric_mean),
                MISSING if last is None else f"{last.entropy:.2f}",
                MISSING if math.isnan(ratio) else f"{ratio:.2f} ×",
            )
        )
    notes = tuple(_summary_notes(analysis))
    return Table("summary", "Summary by method", header, tuple(rows), notes, frozenset({0, 1}))


def _summary_notes(analysis: Analysis) -> list[str]:
    comparison = analysis.comparison
    notes = [
        f"Differences are paired by seed, {comparison.baseline} subtracted, positive is better"
        + ("" if comparison.metric.higher_is_better else f" ({comparison.metric.name} negated)")
        + "; intervals and p by the paired t distribution, p corrected by Holm's method over this table; uncorrected p "
        "and all other statistics are in the table of statistics."
    ]
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
            "κ(J) is the geometric mean over all heads and seeds at the last measurement, over the non-zero spectrum."
        )
    return notes


def statistics_table(analysis: Analysis) -> Table:
    """Everything about the last metric that the summary leaves out."""
    comparison, metric = analysis.comparison, analysis.comparison.metric
    header = (
        "method", "n", "mean", "std", "min", "max", "pairs", f"difference to {comparison.baseline}", "its std",
        "relative", "95 % interval (t)", "95 % interval (bootstrap)", "p", "p (Holm)",
    )  # fmt: skip
    rows = []
    for method in comparison.methods:
        summary, difference = analysis.summaries[method], analysis.differences.get(method)
        own = (summary.mean, summary.std, summary.minimum, summary.maximum)
        cells: tuple[str, ...] = (MISSING,) * 8
        if difference is not None and difference.count:
            cells = (
                str(difference.count), metric.show(difference.mean, sign=True), metric.show(difference.std),
                show_relative(difference.relative), show_interval(difference.interval, metric),
                show_interval(difference.bootstrap, metric), show_p(difference.p), show_p(difference.p_holm),
            )  # fmt: skip
        rows.append((method, str(summary.count), *map(metric.show, own), *cells))
    notes = (
        f"Last {metric.label} of finished runs; std has the divisor n - 1. Intervals and p from three pairs on, the "
        "bootstrap (10,000 draws, percentile) from five on.",
    )
    return Table("statistics", "Statistics in full", header, tuple(rows), notes)


def required_table(analysis: Analysis) -> Table:
    """Comparisons between methods on which the papers' claims rest."""
    metric = analysis.comparison.metric
    unit = f" in{metric.unit}" if metric.unit else ""
    header = ("comparison", "pairs", f"difference{unit} [95 % interval]", "relative", "p", "p (Holm)")
    rows = []
    for difference in analysis.required:
        shown, p, corrected = _difference_cells(difference, metric)
        name = f"{difference.method} − {difference.baseline}"
        rows.append((name, str(difference.count), shown, show_relative(difference.relative), p, corrected))
    return Table(
        "required", "Comparisons between methods", header, tuple(rows),
        ("Positive means that the first method is better. Holm's correction is over this table.",),
    )  # fmt: skip


def matching_table(analysis: Analysis) -> Table:
    """Epochs-to-match in all forms."""
    unit = analysis.unit
    header = (
        "method", "paired by seed", "never reached", "saving", "papers' form", f"paired, running mean of {SMOOTH}",
        "seconds of training", "each seed",
    )  # fmt: skip
    rows = []
    for method in analysis.comparison.methods:
        matching = analysis.matchings[method]
        saving, seconds = matching.mean("saving"), matching.mean("seconds")
        seeds = [f"{seed}: {show_match(match, unit)}" for seed, match in sorted(matching.by_seed.items())]
        rows.append(
            (
                method + (" (baseline)" if method == analysis.comparison.baseline else ""),
                matching.show(unit),
                f"{matching.censored}/{len(matching.by_seed)}" if matching.by_seed else MISSING,
                MISSING if math.isnan(saving) else f"{saving:.0%}",
                show_match(matching.of_means, unit),
                analysis.smoothed[method].show(unit),
                show(seconds),
                ", ".join(seeds) or MISSING,
            )
        )
    notes = (
        f"First evaluation as good as the last one of {analysis.comparison.baseline} with the same seed, in {unit}s; "
        "no interpolation. Seeds that never get there are counted, not averaged; a diverged run never gets there.",
        "Read savings against the baseline's own: on a noisy curve it reaches its last value early.",
        "Running mean: curve and target are both means of the last evaluations.",
    )
    return Table(
        "matching", f"{unit.capitalize()}s to match the baseline", header, tuple(rows), notes, frozenset({0, 7})
    )


def seed_table(analysis: Analysis) -> Table:
    """One row per run."""
    comparison, metric = analysis.comparison, analysis.comparison.metric
    header = (
        "method", "seed", "status", metric.label, "difference", "loss", f"best {metric.label}", "step", "of",
        "seconds", "reason",
    )  # fmt: skip
    rows = []
    for method in comparison.methods:
        for run in comparison.of(method):
            final, best, progress = (run.record.get(key) or {} for key in ("final", "best", "progress"))
            difference = analysis.differences.get(method)
            paired = math.nan if difference is None else difference.values.get(run.seed, math.nan)
            seconds = sum(x for x in map(number, (run.record.get("seconds") or {}).values()) if math.isfinite(x))
            rows.append(
                (
                    method, str(run.seed), run.outcome if run.outcome != "partial" else f"partial ({run.status})",
                    metric.show(run.value), metric.show(paired, sign=True), show(final.get("loss"), 4),
                    metric.show(number(best.get(metric.name))), show(progress.get("step"), 9),
                    show(progress.get("num_steps"), 9), show(seconds), str(run.record.get("reason") or ""),
                )
            )  # fmt: skip
    note = "A run that diverged shows its last value before it did."
    return Table("seeds", "Every run", header, tuple(rows), (note,), frozenset({0, 2, 10}))


def cost_table(analysis: Analysis) -> Table:
    """Time and memory, means over finished runs."""
    comparison = analysis.comparison
    header = ("method", "seconds per step", "relative", "samples per second", *(f"{part}, s" for part in PARTS),
              "peak memory, MB")  # fmt: skip
    rows = []
    for method in comparison.methods:
        runs = list(comparison.finished(method).values())

        def mean(values: list[float]) -> float:
            known = [value for value in values if math.isfinite(value)]
            return math.fsum(known) / len(known) if known else math.nan

        parts = [mean([number((run.record.get("seconds") or {}).get(part)) for run in runs]) for part in PARTS]
        ratio = analysis.step_ratio(method)
        rows.append(
            (
                method,
                show(mean([seconds_per_step(run) for run in runs])),
                MISSING if math.isnan(ratio) else f"{ratio:.2f} ×",
                show(mean([number(run.record.get("samples_per_second")) for run in runs]), 4),
                *(show(part) for part in parts),
                show(mean([number(run.record.get("peak_memory_bytes")) / 1e6 for run in runs]), 4),
            )
        )
    note = f"Means over finished runs; relative is to {comparison.baseline} of the same seed."
    return Table("cost", "Cost", header, tuple(rows), (note,))
