"""Tables of a comparison: summary, required comparisons, matching, statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from wellcond.lab.report.analysis import Analysis
from wellcond.lab.report.conditioning_table import conditioning_table
from wellcond.lab.report.formats import (
    PLUS_MINUS,
    show_counts,
    show_interval,
    show_kappa,
    show_mean,
    show_p,
    show_relative,
    show_verdict,
)
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.match import SMOOTH, show_match
from wellcond.lab.report.other_metrics import other_metrics, other_metrics_table
from wellcond.lab.report.run_record import Metric
from wellcond.lab.report.run_tables import cost_table, seed_table, time_notes
from wellcond.lab.report.statistics import FEWEST_SEEDS, PairedDifference, Summary
from wellcond.lab.report.table import Table
from wellcond.lab.report.table_values import Values, difference_values, interval_values, summary_values
from wellcond.lab.report.values import MISSING, show
from wellcond.lab.report.verdicts import smallest_detectable


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
    values: list[Values] = []
    for method in comparison.methods:
        summary, last = analysis.summaries[method], analysis.attention(method, last=True)
        ratio, matching = analysis.step_ratio(method), analysis.matchings[method]
        verdict, kappas = analysis.verdicts.get(method), analysis.last_jacobian(method)
        shown, _, corrected = _difference_cells(analysis.differences.get(method), metric)
        rows.append(
            (
                method + (" (baseline)" if method == comparison.baseline else ""),
                show_counts(analysis.outcomes(method)),
                show_mean(summary.mean, summary.std, metric),
                shown,
                corrected,
                show_verdict(verdict, metric),
                matching.show(analysis.unit),
                show_kappa(kappas),
                MISSING if last is None else f"{last.entropy:.2f}",
                MISSING if math.isnan(ratio) else f"{ratio:.2f} ×",
            )
        )
        outcomes = analysis.outcomes(method)
        values.append(
            {"method": method}
            | {name: outcomes[name] for name in ("finished", "diverged", "failed", "partial")}
            | summary_values(summary, metric)
            | difference_values(analysis.differences.get(method), metric)
            | {
                "verdict": "" if verdict is None else verdict.kind,
                f"{analysis.unit}s_to_match": matching.mean(analysis.unit), "never_reached": matching.censored,
                "kappa_j": kappas.geometric_mean, "kappa_j_infinite_share": kappas.infinite_share,
                "normalised_entropy": None if last is None else last.entropy, "step_time_ratio": ratio,
            }
        )  # fmt: skip
    notes = tuple(_summary_notes(analysis))
    return Table(
        "summary", "Summary by method", header, tuple(rows), notes, frozenset({0, 1, 5}), tuple(values),
    )  # fmt: skip


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
    return [*notes, *time_notes(analysis)]


def _verdict_note(analysis: Analysis) -> str:
    metric = analysis.comparison.result
    margin = "" if math.isnan(analysis.margin) else f", here {metric.show(analysis.margin)}{metric.unit}"
    return (
        "Verdicts: better and worse have p below 0.05 after Holm's correction; equal has both one-sided tests at 5 % "
        f"against the margin (by default one standard deviation of the baseline over seeds{margin}); all else is "
        "undecided, and so is better or equal of a method that lost runs."
    )


def statistics_table(analysis: Analysis) -> Table:
    """Everything about the results that the summary leaves out."""
    comparison, metric = analysis.comparison, analysis.comparison.result
    what = f"{metric.label.capitalize()}, {comparison.tested_weights}," if comparison.tested else f"Last {metric.label}"
    rows = _statistics_rows(comparison.methods, analysis.summaries, analysis.differences, metric)
    header = _statistics_header(comparison.baseline)
    note = f"{what} of finished runs; {STATISTICS_NOTE}"
    values = _statistics_values(comparison.methods, analysis.summaries, analysis.differences, metric)
    return Table("statistics", "Statistics in full", header, rows, (note,), values=values)


def evaluation_statistics_table(analysis: Analysis) -> Table:
    """The same about the last evaluation, for runs whose results are those of a test split."""
    comparison, metric = analysis.comparison, analysis.comparison.metric
    rows = _statistics_rows(comparison.methods, analysis.last_summaries, analysis.last_differences, metric)
    note = f"Last {metric.label} of finished runs on the evaluation set, where the curves end; {STATISTICS_NOTE}"
    title, header = "Statistics of the last evaluation", _statistics_header(comparison.baseline)
    values = _statistics_values(comparison.methods, analysis.last_summaries, analysis.last_differences, metric)
    return Table("statistics_evaluation", title, header, rows, (note,), values=values)


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


def _statistics_values(
    methods: Sequence[str],
    summaries: Mapping[str, Summary],
    differences: Mapping[str, PairedDifference],
    metric: Metric,
) -> tuple[Values, ...]:
    rows = []
    for method in methods:
        summary, difference = summaries[method], differences.get(method)
        paired = difference is not None and difference.count > 0
        smallest = smallest_detectable(difference.std, difference.count) if difference and paired else math.nan
        rows.append(
            {"method": method}
            | summary_values(summary, metric)
            | {"min": summary.minimum * metric.scale, "max": summary.maximum * metric.scale}
            | difference_values(difference, metric)
            | interval_values(difference.bootstrap if difference and paired else None, metric.scale, "bootstrap_")
            | {"detectable": smallest * metric.scale}
        )
    return tuple(rows)


def required_table(analysis: Analysis) -> Table:
    """Comparisons between methods on which the papers' claims rest."""
    metric = analysis.comparison.result
    unit = f" in{metric.unit}" if metric.unit else ""
    header = ("comparison", "pairs", f"difference{unit} [95 % interval]", "relative", "p", "p (Holm)", "verdict")
    rows = []
    values: list[Values] = []
    for difference in analysis.required:
        shown, p, corrected = _difference_cells(difference, metric)
        name = f"{difference.method} − {difference.baseline}"
        judged = analysis.judge(difference) if difference.count else None
        verdict = show_verdict(judged, metric)
        rows.append((name, str(difference.count), shown, show_relative(difference.relative), p, corrected, verdict))
        values.append(
            {"method": difference.method, "baseline": difference.baseline}
            | difference_values(difference, metric)
            | {"verdict": "" if judged is None else judged.kind}
        )
    note = (
        "Positive means that the first method is better. Holm's correction is over all pairs with the same second "
        f"method: a difference to {analysis.comparison.baseline} is that of the summary, with the same p."
    )
    return Table(
        "required", "Comparisons between methods", header, tuple(rows), (note,), frozenset({0, 6}), tuple(values),
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
    values: list[Values] = []
    for method in analysis.comparison.methods:
        matching, papers = analysis.matchings[method], analysis.matchings[method].of_means
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
        values.append(
            {
                "method": method, "unit": unit, "mean": matching.mean(unit), "never_reached": matching.censored,
                "seeds": len(matching.by_seed), "gain": math.nan if gain is None else gain.mean,
                "p": None if gain is None else gain.p, "p_holm": None if gain is None else gain.p_holm,
                "saving": saving, "papers_form": None if papers is None else getattr(papers, unit),
                f"running_mean_{SMOOTH}": analysis.smoothed[method].mean(unit),
                "seconds": matching.mean("seconds") if alone else None,
            }
            | {f"seed_{seed}": getattr(match, unit) for seed, match in sorted(matching.by_seed.items())}
        )  # fmt: skip
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
        "matching", f"{unit.capitalize()}s to match the baseline", header, tuple(rows), notes, frozenset({0, 9}),
        tuple(values),
    )  # fmt: skip
