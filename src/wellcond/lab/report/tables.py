"""`build_tables`: every table of a comparison, column by column: title, what is shown, the numbers for programs."""

from __future__ import annotations

import math
from typing import Any

from wellcond.lab.records import KAPPAS, Comparison, Metric
from wellcond.lab.report.analysis import Analysis, seconds_per_step, step_ratios
from wellcond.lab.report.epochs_to_match import SMOOTH, match_method, show_match
from wellcond.lab.report.statistics import (
    PairedDifference,
    Summary,
    interval_cell,
    show_p,
    smallest_detectable,
    summarise_logs,
)
from wellcond.lab.report.table import MISSING, Cell, Row, Table, Values, finite_mean, number, show_known, show_share

NO_METRICS = ("step", "epoch", "loss", "train_loss", "seconds", "constant")
"""Numbers of an evaluation that are no scores."""
KAPPA_J = "pseudo_condition_number"
MOST_NAMED = 5
"""Runs that a note lists."""


def build_tables(analysis: Analysis) -> list[Table]:
    """Every table of numbers, in the order in which they are read."""
    tables = [
        summary_table(analysis),
        required_table(analysis),
        other_metrics_table(analysis),
        matching_table(analysis),
        conditioning_table(analysis),
        statistics_table(analysis),
        seed_table(analysis),
        cost_table(analysis),
    ]
    return [table for table in tables if table.rows]


def _method(analysis: Analysis, method: str) -> Cell:
    return method + (" (baseline)" if method == analysis.comparison.baseline else ""), {"method": method}


def _number(name: str, value: Any, form: str = "{:.3g}") -> Cell:
    return show_known(number(value), form), {name: number(value)}


def _scaled(name: str, value: float, metric: Metric, *, sign: bool = False) -> Cell:
    return metric.show(value, sign=sign), {name: value * metric.scale}


def _outcomes(analysis: Analysis, method: str) -> Cell:
    """Runs in means, and the others by name, with the share of runs that diverged among those that ended."""
    found = analysis.outcomes(method)
    others = [f"{found[name]} {name}" for name in ("diverged", "failed", "partial") if found[name]]
    if found["diverged"]:
        others[0] += f" ({show_share(found['diverged'] / (found['finished'] + found['diverged']))})"
    counts: Values = {name: found[name] for name in ("finished", "diverged", "failed", "partial")}
    return " + ".join([str(found["finished"]), *others]), counts


def summary_table(analysis: Analysis) -> Table:
    """One row per method."""
    comparison, metric, unit = analysis.comparison, analysis.comparison.result, analysis.unit
    rows: list[Row] = []
    for method in comparison.methods:
        summary, difference = analysis.summaries[method], analysis.difference(method)
        entropy, matching = analysis.attention(method, last=True)[0], analysis.matchings[method]
        slower = finite_mean(step_ratios(comparison, method).values())
        rows.append(
            {
                "method": _method(analysis, method),
                "runs": _outcomes(analysis, method),
                "learning rate": _number("learning_rate", learning_rate(comparison, method)),
                f"{metric.label}, mean ± std": summary.cell(metric),
                f"difference to {comparison.baseline} [95 % interval]": _change(difference, metric),
                "p (Holm)": show_p(difference.p_holm),
                "verdict": analysis.verdict(difference),
                f"{unit}s to match": (
                    matching.show(unit),
                    {f"{unit}s_to_match": matching.mean(unit), "never_reached": matching.censored},
                ),
                "κ(J) at end": analysis.last_heads(method).cell("kappa_j"),
                "entropy / ln N at end": _number("normalised_entropy", entropy, "{:.2f}"),
                "time of a step": _number("step_time_ratio", slower, "{:.2f} ×"),
            }
        )
    return Table.of("summary", "Summary by method", rows, _summary_notes(analysis), (0, 1, 6))


def _summary_notes(analysis: Analysis) -> list[str]:
    comparison, metric = analysis.comparison, analysis.comparison.result
    name, positive = comparison.metric.name, "positive is better"
    if not comparison.metric.higher_is_better:
        positive = f"a fall of {name} is negative and better (in CSV files {name} is negated: positive is better)"
    margin = "" if math.isnan(analysis.margin) else f", here {metric.show(analysis.margin)}{metric.unit}"
    notes = [
        f"Differences are paired by seed, {comparison.baseline} subtracted, {positive}; intervals and "
        "p by the paired t distribution, p corrected by Holm's method over this table; uncorrected p and all other "
        "statistics are in the table of statistics.",
        "Verdicts: better and worse have p below 0.05 after Holm's correction; equal has both one-sided tests at 5 % "
        f"against the margin (by default one standard deviation of the baseline over seeds{margin}); all else is "
        "undecided, and so is better or equal of a method that lost runs.",
    ]
    if comparison.tested:
        on = f"{analysis.unit}s to match are counted on the evaluation set."
        notes.append(f"{metric.name.capitalize()} is that {comparison.tested_weights}; {on}")
        untested = [run for run in comparison.runs if run.finished and not math.isfinite(run.test_value)]
        notes += [f"{run.method}, seed {run.seed} has no finite test score and is in no mean." for run in untested]
    lost = [run for run in comparison.runs if run.outcome in ("diverged", "failed")]
    notes += [
        f"{run.method}, seed {run.seed} {run.outcome}: it is counted under runs, but its last value is in no mean and "
        "its paired difference is left out, so the means of this method are of the runs that survived."
        for run in sorted(lost, key=lambda run: (run.method, run.seed))
    ]
    if partial := sum(run.outcome == "partial" for run in comparison.runs):
        notes.append(f"{partial} unfinished (partial) {'run is' if partial == 1 else 'runs are'} in no mean.")
    if short := [m for m, d in analysis.differences.items() if d.count and d.interval is None]:
        notes.append(f"Fewer than 3 pairs, so no interval and no p: {', '.join(short)}.")
    if flat := [m for m, d in analysis.differences.items() if d.interval and d.std == 0]:
        notes.append(f"All differences are equal: the interval has no width, t is not defined: {', '.join(flat)}.")
    if any(analysis.heads.values()):
        notes.append(
            "κ(J) is the geometric mean over all heads and seeds at the last measurement, over the non-zero spectrum; "
            "infinite ones are in no mean, and their share is shown."
        )
    return [*notes, *_rate_notes(comparison), *_time_notes(analysis)]


def learning_rate(comparison: Comparison, method: str) -> float:
    """The rate that the runs of a method had, before any schedule; NaN if it is not recorded."""
    optimizers = [run.part("config").get("optimizer") for run in comparison.of(method)]
    return next((number(found.get("lr")) for found in optimizers if isinstance(found, dict)), math.nan)


def _rate_notes(comparison: Comparison) -> list[str]:
    """Where learning rates are from, and which methods have one of their own while others have the recipe's."""
    notes = [comparison.rates] if comparison.rates else []
    fields = {run.method: run.spec.get("set") for run in comparison.runs}
    own = [method for method, found in fields.items() if isinstance(found, dict) and "optimizer.lr" in found]
    shared = [method for method in fields if method not in own]
    if own and shared:
        notes.append(
            f"Not all learning rates were chosen alike: {', '.join(own)} had one of their own, {', '.join(shared)} "
            "that of the recipe. What differs between these may be due to the rate."
        )
    return notes


def _time_notes(analysis: Analysis) -> list[str]:
    """Why times of steps are missing."""
    finished = [run for run in analysis.comparison.runs if run.finished]
    runs = [f"{run.method}, seed {run.seed}" for run in finished if not run.alone]
    named = "" if len(runs) == len(finished) else f": {', '.join(runs)}"
    if MOST_NAMED < len(runs) < len(finished):
        named = f": {len(runs)} of {len(finished)} runs"
    note = f"Times of runs that shared their cores with others are left out{named}."
    return [note] if runs else []


def _change(difference: PairedDifference, metric: Metric) -> Cell:
    """As a reader expects it, with the numbers for programs, in which positive is better."""
    return difference.as_change(metric).cell(metric)[0], difference.cell(metric)[1]


def statistics_table(analysis: Analysis) -> Table:
    """Everything about the results that the summary leaves out."""
    comparison, metric = analysis.comparison, analysis.comparison.result
    rows: list[Row] = []
    for method, summary in analysis.summaries.items():
        d, values = analysis.difference(method), summary.values.values()
        change = d.as_change(metric)
        rows.append(
            {
                "method": (method, {"method": method}),
                "n": (str(summary.count), summary.cell(metric)[1]),
                "mean": metric.show(summary.mean),
                "std": metric.show(summary.std),
                "min": _scaled("min", min(values, default=math.nan), metric),
                "max": _scaled("max", max(values, default=math.nan), metric),
                "pairs": (str(d.count or MISSING), d.cell(metric)[1]),
                f"difference to {comparison.baseline}": metric.show(change.mean, sign=True),
                "its std": metric.show(d.std),
                "relative": show_known(change.relative, "{:+.1%}"),
                "95 % interval (t)": (interval_cell(change.interval, metric)[0], interval_cell(d.interval, metric)[1]),
                "95 % interval (bootstrap)": (
                    interval_cell(change.bootstrap, metric)[0],
                    interval_cell(d.bootstrap, metric, "bootstrap_")[1],
                ),
                "p": show_p(d.p),
                "p (Holm)": show_p(d.p_holm),
                "can show": _scaled("detectable", smallest_detectable(d.std, d.count), metric),
            }
        )
    of_tested = f"{metric.label.capitalize()}, {comparison.tested_weights}, of finished runs"
    note = of_tested if comparison.tested else f"Last {metric.label} of finished runs"
    note += (
        "; std has the divisor n - 1. Intervals and p from three pairs on, the bootstrap (10,000 draws, percentile) "
        "from five on. Can show is the smallest true difference that as many pairs with this spread show with a power "
        "of 80 %."
    )
    return Table.of("statistics", "Statistics in full", rows, (note,))


def required_table(analysis: Analysis) -> Table:
    """Comparisons between methods on which the papers' claims rest."""
    metric = analysis.comparison.result
    unit = f" in{metric.unit}" if metric.unit else ""
    rows: list[Row] = [
        {
            "comparison": (f"{d.method} − {d.baseline}", {"method": d.method, "baseline": d.baseline}),
            "pairs": str(d.count),
            f"difference{unit} [95 % interval]": _change(d, metric),
            "relative": show_known(d.as_change(metric).relative, "{:+.1%}"),
            "p": show_p(d.p),
            "p (Holm)": show_p(d.p_holm),
            "verdict": analysis.verdict(d),
        }
        for d in analysis.required
    ]
    better = "Positive" if metric.higher_is_better else "Negative"
    note = (
        f"{better} means that the first method is better. Holm's correction is over all pairs with the same second "
        f"method: a difference to {analysis.comparison.baseline} is that of the summary, with the same p."
    )
    return Table.of("required", "Comparisons between methods", rows, (note,), (0, 6))


def matching_table(analysis: Analysis) -> Table:
    """Epochs-to-match in all forms."""
    unit, baseline = analysis.unit, analysis.comparison.baseline
    rows: list[Row] = []
    for method in analysis.comparison.methods:
        matching, smoothed = analysis.matchings[method], match_method(analysis.comparison, method, smooth=SMOOTH)
        papers, by_seed = matching.of_means, sorted(matching.by_seed.items())
        alone = all(run.alone for run in analysis.comparison.finished(method).values())
        rows.append(
            {
                "method": _method(analysis, method),
                "paired by seed": (matching.show(unit), {"unit": unit, "mean": matching.mean(unit)}),
                "never reached": (
                    f"{matching.censored}/{len(by_seed)}" if by_seed else MISSING,
                    {"never_reached": matching.censored, "seeds": len(by_seed)},
                ),
                f"earlier than {baseline} itself": matching.gain_cell(),
                "p (exact, Holm)": (show_p(matching.p_holm), {"p": matching.p, "p_holm": matching.p_holm}),
                "share of training saved": _number("saving", matching.mean("saving"), "{:.0%}"),
                "papers' form": (show_match(papers, unit), {"papers_form": getattr(papers, unit) if papers else None}),
                f"paired, running mean of {SMOOTH}": (
                    smoothed.show(unit),
                    {f"running_mean_{SMOOTH}": smoothed.mean(unit)},
                ),
                "seconds of training": _number("seconds", matching.mean("seconds") if alone else None),
                "each seed": (
                    ", ".join(f"{seed}: {show_match(match, unit)}" for seed, match in by_seed) or MISSING,
                    {f"seed_{seed}": getattr(match, unit) for seed, match in by_seed},
                ),
            }
        )
    notes = (
        f"First evaluation as good as the last one of {baseline} with the same seed, in {unit}s; "
        "no interpolation. Seeds that never get there are counted, not averaged; a diverged run never gets there.",
        f"On a noisy curve {baseline} itself reaches its last value before the end, so what counts is how much earlier "
        "than that a method gets there (negative: later); p is of the exact test over all flips of sign, in which a "
        f"seed that never gets there is one {unit} later than the end; below six seeds it cannot decide, and is left "
        "out. The share of training saved is of the whole run, as the papers count.",
        "Running mean: curve and target are both means of the last evaluations.",
    )
    return Table.of("matching", f"{unit.capitalize()}s to match the baseline", rows, notes, (0, 9))


def conditioning_table(analysis: Analysis) -> Table:
    """Conditioning at the end, means and intervals on log10 over seeds: a row per method that was measured."""
    baseline = analysis.comparison.baseline
    bounds = {"log₁₀ true bound": "bound_log10", "log₁₀ papers' bound (not a bound)": "papers_bound_log10"}
    base, base_infinite = _last(analysis, baseline, KAPPA_J), analysis.last_heads(baseline).infinite_share
    rows: list[Row] = []
    for method in [method for method in analysis.comparison.methods if analysis.tables(method)]:
        kappas = _last(analysis, method, KAPPA_J)
        pseudo, strict = (analysis.last_heads(method, key) for key in (KAPPA_J, "condition_number"))
        (first, _), (last, dead) = (analysis.attention(method, last=at_end) for at_end in (False, True))
        known = method != baseline and not pseudo.infinite_share and not base_infinite
        factor = summarise_logs([kappas[seed] / base[seed] for seed in sorted(set(kappas) & set(base)) if known])
        rows.append(
            {
                "method": (method, {"method": method}),
                "κ(J) [95 % interval]": _over_seeds(analysis, method, KAPPA_J, "kappa_j", interval=True),
                f"factor to {baseline} [95 % interval]": factor.cell("factor", interval=True),
                "κ(J) finite": (f"{pseudo.finite}/{pseudo.total}", {"finite": pseudo.finite}),
                "strict κ(J) finite": (
                    f"{strict.finite}/{strict.total}",
                    {"strict_finite": strict.finite, "heads_measured": pseudo.total},
                ),
                **{title: _bound_cell(analysis, method, key) for title, key in bounds.items()},
                **{f"κ of W_{key[-1].upper()}": _over_seeds(analysis, method, key, key) for key in KAPPAS[:3]},
                "entropy / ln N, start to end": (
                    MISSING if math.isnan(first + last) else f"{first:.2f} → {last:.2f}",
                    {"normalised_entropy_start": first, "normalised_entropy_end": last},
                ),
                "dead heads at end": _number("dead_heads", sum(dead) if dead else None, f"{{:.0f}}/{len(dead)}"),
            }
        )
    note = (
        "Geometric means over heads and layers at the last measurement of each run, then over seeds; intervals by the "
        "t distribution on log₁₀ of the seeds, from three seeds on. κ(J) is over the non-zero spectrum; the strict "
        "one is infinite where the rank is not full. Infinite values are in no mean: their share is shown, and "
        "there is no factor. A saturated or dead head can have a small κ(J) and learn nothing."
    )
    return Table.of("conditioning", "Conditioning at the end", rows, (note,))


def _bound_cell(analysis: Analysis, method: str, key: str) -> Cell:
    mean = finite_mean(finite_mean(table.at_end(key)) for table in analysis.tables(method))
    return analysis.last_heads(method, key).show(f"{mean:.2f}"), {f"{key}_mean": mean}


def _over_seeds(analysis: Analysis, method: str, key: str, name: str, *, interval: bool = False) -> Cell:
    """Mean and interval over seeds, with the share of infinite heads."""
    heads, seeds = analysis.last_heads(method, key), summarise_logs(_last(analysis, method, key).values())
    return seeds._replace(finite=heads.finite, infinite_share=heads.infinite_share).cell(name, interval=interval)


def _last(analysis: Analysis, method: str, key: str) -> dict[int, float]:
    """Geometric mean over heads and layers at the last measurement, by seed."""
    found = {table.run.seed: summarise_logs(table.at_end(key)).geometric_mean for table in analysis.tables(method)}
    return {seed: value for seed, value in found.items() if not math.isnan(value)}


def other_metrics_table(analysis: Analysis) -> Table:
    """Metrics besides the one that runs are judged by, such as perplexity per word."""
    comparison = analysis.comparison
    part = "test" if comparison.tested else "final"
    known = {*NO_METRICS, "weights", comparison.metric.name}
    names = list(dict.fromkeys(n for run in comparison.runs if run.finished for n in run.part(part) if n not in known))
    rows: list[Row] = []
    for method in comparison.methods if names else ():
        row: dict[str, Cell] = {"method": (method, {"method": method})}
        for name in names:
            scores = {seed: number(run.part(part).get(name)) for seed, run in comparison.finished(method).items()}
            summary = Summary({seed: value for seed, value in scores.items() if math.isfinite(value)})
            numbers: Values = {f"{name}_mean": summary.mean, f"{name}_sd": summary.std, f"{name}_n": summary.count}
            row[name.replace("_", " ")] = summary.cell(Metric(name))[0], numbers
        rows.append(row)
    on = f"On the test split, {comparison.tested_weights}" if comparison.tested else "At the last evaluation"
    note = f"{on}; mean ± std of finished runs, each number as it was recorded."
    return Table.of("other_metrics", "Other metrics", rows, (note,))


def seed_table(analysis: Analysis) -> Table:
    """One row per run."""
    comparison, metric, tested = analysis.comparison, analysis.comparison.metric, analysis.comparison.tested
    rows: list[Row] = []
    for run in [run for method in comparison.methods for run in comparison.of(method)]:
        test, progress, pairs = run.part("test"), run.part("progress"), analysis.difference(run.method)
        seconds = sum(x for x in map(number, run.part("seconds").values()) if math.isfinite(x))
        last = _scaled("last", run.value, metric)
        scored: Row = {
            comparison.result.label: _scaled("test", run.test_value, metric),
            "tested step": _number("tested_step", test.get("step"), "{:.9g}"),
        }
        rows.append(
            {
                "method": (run.method, {"method": run.method}),
                "seed": (str(run.seed), {"seed": run.seed}),
                "status": (
                    run.outcome if run.outcome != "partial" else f"partial ({run.status})",
                    {"status": run.outcome, "metric": comparison.result.label},
                ),
                **(scored if tested else {metric.label: last}),
                "difference": _scaled("difference", pairs.values.get(run.seed, math.nan), metric, sign=True),
                **({f"last {metric.label}": last} if tested else {}),
                "loss": _number("loss", run.part("final").get("loss"), "{:.4g}"),
                f"best {metric.label}": _scaled("best", number(run.part("best").get(metric.name)), metric),
                "step": _number("step", progress.get("step"), "{:.9g}"),
                "of": _number("num_steps", progress.get("num_steps"), "{:.9g}"),
                "seconds": _number("seconds", seconds),
                "reason": (reason := str(run.record.get("reason") or ""), {"reason": reason}),
            }
        )
    note = "A run that diverged shows its last value before it did."
    return Table.of("seeds", "Every run", rows, (note,), (0, 2, len(rows[0]) - 1))


def cost_table(analysis: Analysis) -> Table:
    """Time and memory, means over finished runs."""
    comparison, parts_of_time = analysis.comparison, ("training", "evaluation", "measuring", "checkpointing", "setup")
    rows: list[Row] = []
    for method in comparison.methods:
        runs = list(comparison.finished(method).values())
        alone = [run for run in runs if run.alone]
        rate = finite_mean(number(run.record.get("samples_per_second")) for run in alone)
        parts = {part: finite_mean(number(run.part("seconds").get(part)) for run in alone) for part in parts_of_time}
        memory = finite_mean(number(run.record.get("peak_memory_bytes")) / 1e6 for run in runs)
        rows.append(
            {
                "method": (method, {"method": method}),
                "seconds per step": _number("seconds_per_step", finite_mean(map(seconds_per_step, runs))),
                "relative": _number("relative", finite_mean(step_ratios(comparison, method).values()), "{:.2f} ×"),
                "samples per second": _number("samples_per_second", rate, "{:.4g}"),
                **{f"{part}, s": _number(f"{part}_seconds", seconds) for part, seconds in parts.items()},
                "peak memory, MB": _number("peak_memory_mb", memory, "{:.4g}"),
            }
        )
    note = f"Means over finished runs; relative is to {comparison.baseline} of the same seed."
    return Table.of("cost", "Cost", rows, (note, *_time_notes(analysis)))
