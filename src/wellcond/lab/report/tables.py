"""Tables of results: summary, required comparisons, epochs-to-match, statistics."""

from __future__ import annotations

import math

from wellcond.lab.report.analysis import Analysis
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.match import SMOOTH, show_match
from wellcond.lab.report.records import Metric
from wellcond.lab.report.run_tables import conditioning_table, cost_table, other_metrics_table, seed_table, time_notes
from wellcond.lab.report.statistics import FEWEST_SEEDS, PairedDifference
from wellcond.lab.report.table import (
    PLUS_MINUS,
    Table,
    Values,
    difference_values,
    interval_values,
    show_counts,
    show_interval,
    show_kappa,
    show_mean,
    show_p,
    show_relative,
    show_verdict,
    summary_values,
)
from wellcond.lab.report.values import MISSING, show
from wellcond.lab.report.verdicts import smallest_detectable

STATISTICS_NOTE = (
    "std has the divisor n - 1. Intervals and p from three pairs on, the bootstrap (10,000 draws, percentile) from "
    "five on. Can show is the smallest true difference that as many pairs with this spread show with a power of 80 %."
)


def build_tables(analysis: Analysis) -> list[Table]:
    """Every table of numbers, in the order in which they are read."""
    tables = [
        summary_table(analysis), required_table(analysis), other_metrics_table(analysis), matching_table(analysis),
        conditioning_table(analysis), statistics_table(analysis), seed_table(analysis), cost_table(analysis),
    ]  # fmt: skip
    return [table for table in tables if table is not None]


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
    comparison, metric, unit = analysis.comparison, analysis.comparison.result, analysis.unit
    header = (
        "method", "runs", f"{metric.label}, mean {PLUS_MINUS} std",
        f"difference to {comparison.baseline} [95 % interval]", "p (Holm)", "verdict", f"{unit}s to match",
        "κ(J) at end", "entropy / ln N at end", "time of a step",
    )  # fmt: skip
    rows = []
    for method in comparison.methods:
        summary, difference = analysis.summaries[method], analysis.differences.get(method)
        last, matching = analysis.attention(method, last=True), analysis.matchings[method]
        outcomes, ratio = analysis.outcomes(method), analysis.step_ratio(method)
        verdict, kappas = analysis.verdicts.get(method), analysis.last_jacobian(method)
        shown, _, corrected = _difference_cells(difference, metric)
        cells = (
            method + (" (baseline)" if method == comparison.baseline else ""), show_counts(outcomes),
            show_mean(summary.mean, summary.std, metric), shown, corrected, show_verdict(verdict, metric),
            matching.show(unit), show_kappa(kappas), MISSING if last is None else f"{last.entropy:.2f}",
            MISSING if math.isnan(ratio) else f"{ratio:.2f} ×",
        )  # fmt: skip
        values: Values = {
            "method": method, **{name: outcomes[name] for name in ("finished", "diverged", "failed", "partial")},
            **summary_values(summary, metric), **difference_values(difference, metric),
            "verdict": "" if verdict is None else verdict.kind,
            f"{unit}s_to_match": matching.mean(unit), "never_reached": matching.censored,
            "kappa_j": kappas.geometric_mean, "kappa_j_infinite_share": kappas.infinite_share,
            "normalised_entropy": None if last is None else last.entropy, "step_time_ratio": ratio,
        }  # fmt: skip
        rows.append((cells, values))
    return Table.of("summary", "Summary by method", header, rows, _summary_notes(analysis), (0, 1, 5))


def _summary_notes(analysis: Analysis) -> list[str]:
    comparison, metric = analysis.comparison, analysis.comparison.result
    negated = "" if comparison.metric.higher_is_better else f" ({comparison.metric.name} negated)"
    margin = "" if math.isnan(analysis.margin) else f", here {metric.show(analysis.margin)}{metric.unit}"
    notes = [
        f"Differences are paired by seed, {comparison.baseline} subtracted, positive is better{negated}; intervals and "
        "p by the paired t distribution, p corrected by Holm's method over this table; uncorrected p and all other "
        "statistics are in the table of statistics.",
        "Verdicts: better and worse have p below 0.05 after Holm's correction; equal has both one-sided tests at 5 % "
        f"against the margin (by default one standard deviation of the baseline over seeds{margin}); all else is "
        "undecided, and so is better or equal of a method that lost runs.",
    ]
    if comparison.tested:
        notes.append(
            f"{metric.name.capitalize()} is that {comparison.tested_weights}; {analysis.unit}s to match are "
            "counted on the evaluation set."
        )
        untested = [run for run in comparison.runs if run.finished and not math.isfinite(run.test_value)]
        notes += [f"{run.method}, seed {run.seed} has no finite test score and is in no mean." for run in untested]
    lost = sorted(
        (run.method, run.seed, run.outcome) for run in comparison.runs if run.outcome in ("diverged", "failed")
    )
    notes += [
        f"{method}, seed {seed} {outcome}: it is counted under runs, but its last value is in no mean and its paired "
        "difference is left out, so the means of this method are of the runs that survived."
        for method, seed, outcome in lost
    ]
    if partial := sum(run.outcome == "partial" for run in comparison.runs):
        notes.append(f"{partial} unfinished (partial) {'run is' if partial == 1 else 'runs are'} in no mean.")
    if short := [m for m, d in analysis.differences.items() if 0 < d.count < FEWEST_SEEDS]:
        notes.append(f"Fewer than {FEWEST_SEEDS} pairs, so no interval and no p: {', '.join(short)}.")
    if flat := [m for m, d in analysis.differences.items() if d.without_spread]:
        notes.append(f"All differences are equal: the interval has no width, t is not defined: {', '.join(flat)}.")
    if any(analysis.heads.values()):
        notes.append(
            "κ(J) is the geometric mean over all heads and seeds at the last measurement, over the non-zero spectrum; "
            "infinite ones are in no mean, and their share is shown."
        )
    return [*notes, *time_notes(analysis)]


def statistics_table(analysis: Analysis) -> Table:
    """Everything about the results that the summary leaves out."""
    comparison, metric = analysis.comparison, analysis.comparison.result
    header = (
        "method", "n", "mean", "std", "min", "max", "pairs", f"difference to {comparison.baseline}", "its std",
        "relative", "95 % interval (t)", "95 % interval (bootstrap)", "p", "p (Holm)", "can show",
    )  # fmt: skip
    rows = []
    for method, summary in analysis.summaries.items():
        found = analysis.differences.get(method)
        difference = found if found is not None and found.count else None
        own = (summary.mean, summary.std, summary.minimum, summary.maximum)
        cells: tuple[str, ...] = (MISSING,) * 9
        smallest, bootstrap = math.nan, None
        if difference is not None:
            smallest, bootstrap = smallest_detectable(difference.std, difference.count), difference.bootstrap
            cells = (
                str(difference.count), metric.show(difference.mean, sign=True), metric.show(difference.std),
                show_relative(difference.relative), show_interval(difference.interval, metric),
                show_interval(bootstrap, metric), show_p(difference.p), show_p(difference.p_holm),
                metric.show(smallest),
            )  # fmt: skip
        values: Values = {
            "method": method, **summary_values(summary, metric), "min": summary.minimum * metric.scale,
            "max": summary.maximum * metric.scale, **difference_values(difference, metric),
            **interval_values(bootstrap, metric.scale, "bootstrap_"), "detectable": smallest * metric.scale,
        }  # fmt: skip
        rows.append(((method, str(summary.count), *map(metric.show, own), *cells), values))
    of_tested = f"{metric.label.capitalize()}, {comparison.tested_weights}, of finished runs"
    note = of_tested if comparison.tested else f"Last {metric.label} of finished runs"
    return Table.of("statistics", "Statistics in full", header, rows, (f"{note}; {STATISTICS_NOTE}",))


def required_table(analysis: Analysis) -> Table | None:
    """Comparisons between methods on which the papers' claims rest; None if there is none."""
    metric = analysis.comparison.result
    unit = f" in{metric.unit}" if metric.unit else ""
    header = ("comparison", "pairs", f"difference{unit} [95 % interval]", "relative", "p", "p (Holm)", "verdict")
    rows = []
    for difference in analysis.required:
        shown, p, corrected = _difference_cells(difference, metric)
        name = f"{difference.method} − {difference.baseline}"
        judged = analysis.judge(difference) if difference.count else None
        relative, verdict = show_relative(difference.relative), show_verdict(judged, metric)
        values: Values = {"method": difference.method, "baseline": difference.baseline}
        values |= difference_values(difference, metric) | {"verdict": "" if judged is None else judged.kind}
        rows.append(((name, str(difference.count), shown, relative, p, corrected, verdict), values))
    note = (
        "Positive means that the first method is better. Holm's correction is over all pairs with the same second "
        f"method: a difference to {analysis.comparison.baseline} is that of the summary, with the same p."
    )
    return Table.of("required", "Comparisons between methods", header, rows, (note,), (0, 6)) if rows else None


def matching_table(analysis: Analysis) -> Table:
    """Epochs-to-match in all forms."""
    unit, baseline = analysis.unit, analysis.comparison.baseline
    header = (
        "method", "paired by seed", "never reached", f"earlier than {baseline} itself", "p (exact, Holm)",
        "share of training saved", "papers' form", f"paired, running mean of {SMOOTH}", "seconds of training",
        "each seed",
    )  # fmt: skip
    rows = []
    for method in analysis.comparison.methods:
        matching, smoothed = analysis.matchings[method], analysis.smoothed[method]
        papers, by_seed = matching.of_means, sorted(matching.by_seed.items())
        saving, gain = matching.mean("saving"), analysis.match_gains.get(method)
        alone = all(run.alone for run in analysis.comparison.finished(method).values())
        cells = (
            method + (" (baseline)" if method == baseline else ""), matching.show(unit),
            f"{matching.censored}/{len(by_seed)}" if by_seed else MISSING,
            MISSING if gain is None else gain.show(), MISSING if gain is None else show_p(gain.p_holm),
            MISSING if math.isnan(saving) else f"{saving:.0%}", show_match(papers, unit), smoothed.show(unit),
            show(matching.mean("seconds")) if alone else MISSING,
            ", ".join(f"{seed}: {show_match(match, unit)}" for seed, match in by_seed) or MISSING,
        )  # fmt: skip
        values: Values = {
            "method": method, "unit": unit, "mean": matching.mean(unit), "never_reached": matching.censored,
            "seeds": len(by_seed), "gain": math.nan if gain is None else gain.mean,
            "p": None if gain is None else gain.p, "p_holm": None if gain is None else gain.p_holm,
            "saving": saving, "papers_form": None if papers is None else getattr(papers, unit),
            f"running_mean_{SMOOTH}": smoothed.mean(unit), "seconds": matching.mean("seconds") if alone else None,
            **{f"seed_{seed}": getattr(match, unit) for seed, match in by_seed},
        }  # fmt: skip
        rows.append((cells, values))
    notes = (
        f"First evaluation as good as the last one of {baseline} with the same seed, in {unit}s; "
        "no interpolation. Seeds that never get there are counted, not averaged; a diverged run never gets there.",
        f"On a noisy curve {baseline} itself reaches its last value before the end, so what counts "
        f"is how much earlier than that a method gets there (negative: later); p is of the exact test over all flips "
        f"of sign, in which a seed that never gets there is one {unit} later than the end; below six seeds it cannot "
        "decide, and is left out. The share of training saved is of the whole run, as the papers count.",
        "Running mean: curve and target are both means of the last evaluations.",
    )
    return Table.of("matching", f"{unit.capitalize()}s to match the baseline", header, rows, notes, (0, 9))
