"""`find_findings`: what the numbers say, in sentences, and nothing beyond them."""

from __future__ import annotations

import math

from wellcond.report.analysis import Analysis
from wellcond.report.formats import show_interval, show_mean, show_p
from wellcond.report.match import show_match
from wellcond.report.provenance import session_differences
from wellcond.report.statistics import FEWEST_SEEDS, PairedDifference, method_kind
from wellcond.report.values import number, show, show_seeds

SIGNIFICANT = 0.05
SMALL_GRADIENT = 0.01


def find_findings(analysis: Analysis) -> list[str]:
    """Sentences computed from the records, the most important first."""
    if not any(summary.count for summary in analysis.summaries.values()):
        counts = [f"{run.method}, seed {run.seed}: {run.outcome}" for run in analysis.comparison.runs]
        return [f"No run is finished, so there is nothing to compare yet ({'; '.join(counts)})."]
    return [
        *_winner(analysis),
        *_few_seeds(analysis),
        *_differences(analysis),
        *_failures(analysis),
        *_scale_control(analysis),
        *_saturation(analysis),
        *_matching(analysis),
        *_conditioning(analysis),
        *_fairness(analysis),
    ]


def _ranked(analysis: Analysis) -> list[str]:
    """Methods with a finished run, the best mean first."""
    sign = -1.0 if analysis.comparison.result.higher_is_better else 1.0
    known = [method for method in analysis.comparison.methods if analysis.summaries[method].count]
    return sorted(known, key=lambda method: sign * analysis.summaries[method].mean)


def _winner(analysis: Analysis) -> list[str]:
    ranked, metric = _ranked(analysis), analysis.comparison.result
    if len(ranked) < 2:
        return [f"Only {ranked[0]} has finished runs, so there is nothing to compare it with."]

    def told(method: str) -> str:
        summary = analysis.summaries[method]
        seeds = show_seeds(summary.count)
        unit = " %" if metric.percent else ""
        return f"{method} ({show_mean(summary.mean, summary.std, metric)}{unit}, {seeds})"

    best, second, last = ranked[0], ranked[1], ranked[-1]
    if analysis.summaries[best].mean == analysis.summaries[second].mean:
        return [f"Best mean {metric.name}: {told(best)} and {told(second)} are equal."]
    tail = "" if last == second else f"; worst is {told(last)}"
    return [f"Best mean {metric.name}: {told(best)}, before {told(second)}{tail}."]


def _few_seeds(analysis: Analysis) -> list[str]:
    counts = [difference.count for difference in analysis.differences.values() if difference.count]
    if not counts or max(counts) >= FEWEST_SEEDS:
        return []
    there = "There is only one seed" if max(counts) == 1 else f"There are only {max(counts)} seeds"
    return [
        f"{there}, fewer than {FEWEST_SEEDS}: no interval and no p value is given, and no difference here can be told "
        "from the luck of a seed."
    ]


def describe_difference(difference: PairedDifference, analysis: Analysis) -> str:
    """One paired difference as a sentence."""
    metric = analysis.comparison.result
    size = metric.show(abs(difference.mean)) + metric.unit
    way = "better than" if difference.mean > 0 else "worse than" if difference.mean < 0 else "equal to"
    start = f"{difference.method} is {f'{size} ' if difference.mean else ''}{way} {difference.baseline}"
    if difference.interval is None:
        pairs = show_seeds(difference.count)
        return f"{start} ({pairs}, not tested)."
    if difference.without_spread:
        return f"{start} in every one of {difference.count} seeds alike, so a t test is not defined."
    facts = f"95 % interval {show_interval(difference.interval, metric)}, p = {show_p(difference.p_holm)} after Holm"
    facts = facts.replace("p = <", "p <")
    significant = difference.p_holm is not None and difference.p_holm < SIGNIFICANT
    if difference.certain and significant:
        return f"{start}: the interval excludes 0 ({facts})."
    if difference.certain:
        return (
            f"{start}: the interval excludes 0, but not significantly once the number of methods is "
            f"considered ({facts})."
        )
    return f"{start}, which is not significant: the interval contains 0 ({facts})."


def _differences(analysis: Analysis) -> list[str]:
    found = [difference for difference in analysis.differences.values() if difference.count]
    return [describe_difference(difference, analysis) for difference in sorted(found, key=lambda d: -d.mean)]


def _failures(analysis: Analysis) -> list[str]:
    found = []
    fewer: dict[str, list[str]] = {}
    for method in analysis.comparison.methods:
        outcomes = analysis.outcomes(method)
        lost = outcomes["diverged"] + outcomes["failed"]
        if lost:
            names = " and ".join(f"{outcomes[n]} {n}" for n in ("diverged", "failed") if outcomes[n])
            found.append(
                f"{method}: {names} of {outcomes.total()} runs; this is a result of the method too, and its mean is "
                "only over the others."
            )
        missing = [seed for seed in analysis.comparison.seeds if seed not in analysis.summaries[method].values]
        if not outcomes:
            found.append(f"{method} has no run yet.")
        elif missing:
            fewer.setdefault(", ".join(map(str, missing)), []).append(method)
    found += [f"No finished run for seed {seeds}, so fewer pairs: {', '.join(ms)}." for seeds, ms in fewer.items()]
    return found


def _scale_control(analysis: Analysis) -> list[str]:
    kinds = {run.method: method_kind(run.record.get("method_spec"), run.method) for run in analysis.comparison.runs}
    found = []
    for difference in analysis.required:
        gain = analysis.differences.get(difference.method)
        control = analysis.differences.get(difference.baseline)
        if kinds.get(difference.baseline) != ("gaussian", "") or gain is None or control is None:
            continue
        if not difference.count or not gain.count or not control.count or gain.mean <= 0:
            continue
        metric = analysis.comparison.result
        share = (
            f"{difference.baseline}, which has the scale of {difference.method} but not its conditioning, differs from "
            f"{gain.baseline} by {metric.show(control.mean, sign=True)}{metric.unit}, {difference.method} by "
            f"{metric.show(gain.mean, sign=True)}{metric.unit}"
        )
        holds = difference.p_holm is not None and difference.p_holm < SIGNIFICANT
        if difference.certain and holds and difference.mean > 0:
            found.append(f"Scale control: {share}: scale alone does not explain the gain.")
        elif difference.interval is None:
            found.append(f"Scale control: {share}; too few seeds to say whether scale explains the gain.")
        else:
            found.append(
                f"Scale control: {share}: these runs do not show that the gain is due to conditioning rather than to "
                "the scale of the weights."
            )
    return found


def _saturation(analysis: Analysis) -> list[str]:
    found = []
    for method in analysis.comparison.methods:
        state = analysis.attention(method, last=False)
        if state is None or not state.saturated:
            continue
        metric, difference = analysis.comparison.result, analysis.differences.get(method)
        start = f"{method}: "
        if difference is not None and difference.count and difference.mean < 0:
            start += f"{metric.show(-difference.mean)}{metric.unit} worse than {difference.baseline}; "
        facts = [f"entropy {state.entropy:.2f} of ln N"] if not math.isnan(state.entropy) else []
        facts += [f"diagonal mass {state.diagonal_mass:.2f}"] if state.diagonal_mass > 0.95 else []
        dead = (
            f" and {state.dead} of {state.heads} heads {'is' if state.dead == 1 else 'are'} dead" if state.dead else ""
        )
        found.append(
            f"{start}its attention has {', '.join(facts)} at step {show(state.step, 9)}{dead}: the softmax is "
            f"saturated{_gradient_evidence(analysis, method)}."
        )
    return found


def _gradient_evidence(analysis: Analysis, method: str) -> str:
    """How small the gradients of W_Q and W_K are, if that was recorded."""
    own, base = (_early_gradient(analysis, name) for name in (method, analysis.comparison.baseline))
    if own is None or base is None:
        return ", and a saturated softmax passes almost no gradient to W_Q and W_K (gradients were not recorded)"
    said = f"gradient norm of W_Q and W_K {show(own, 2)} against {show(base, 2)} in {analysis.comparison.baseline}"
    if own < SMALL_GRADIENT * base:
        return f", W_Q and W_K receive almost no gradient ({said})"
    return f", though W_Q and W_K still receive a gradient ({said})"


def _early_gradient(analysis: Analysis, method: str) -> float | None:
    """Geometric mean of the gradient norms of W_Q and W_K over the first tenth of training."""
    logs = []
    zero = False
    for run in analysis.comparison.of(method):
        rows = run.steps[: max(1, len(run.steps) // 10)]
        values = [number(row.get(key)) for row in rows for key in ("grad_norm_q", "grad_norm_k")]
        zero = zero or any(value == 0 for value in values)
        logs += [math.log10(value) for value in values if 0 < value < math.inf]
    if not logs:
        return 0.0 if zero else None
    return 10 ** (math.fsum(logs) / len(logs))


def _matching(analysis: Analysis) -> list[str]:
    comparison, unit = analysis.comparison, analysis.unit
    own = analysis.matchings[comparison.baseline]
    told, never = [], []
    for method in comparison.methods:
        matching = analysis.matchings[method]
        if method == comparison.baseline or not matching.by_seed:
            continue
        if not matching.reached:
            never.append(method)
            continue
        seeds = f", {len(matching.reached)} of {len(matching.by_seed)} seeds" if matching.censored else ""
        told.append(f"{method} {show(matching.mean(unit), 3)} ({matching.mean('saving'):.0%} fewer{seeds})")
    if not told and not never:
        return []
    missed = [f"never: {', '.join(never)}"] if never else []
    return [
        f"{unit.capitalize()}s until the last {comparison.metric.name} of {comparison.baseline} is reached, which "
        f"takes {comparison.baseline} itself {own.show(unit)} (by seed) or {show_match(own.of_means, unit)} (mean "
        f"curve): {'; '.join([*told, *missed])}."
    ]


def _conditioning(analysis: Analysis) -> list[str]:
    known = {
        method: summary.geometric_mean
        for method in analysis.comparison.methods
        if (summary := analysis.last_jacobian(method)).finite
    }
    if len(known) < 2:
        return []
    low, high = min(known, key=lambda m: known[m]), max(known, key=lambda m: known[m])
    said = (
        f"κ(J) at the end (geometric mean, non-zero spectrum) is smallest for {low} ({show(known[low])}) and largest "
        f"for {high} ({show(known[high])})"
    )
    state = analysis.attention(low, last=True)
    if state is not None and state.saturated:
        said += f" (the attention of {low} is saturated, where a small κ(J) says nothing good)"
    best = next((method for method in _ranked(analysis) if method in known), None)
    if best == low:
        return [f"{said}; the method with the smallest κ(J) also has the best {analysis.comparison.result.name} here."]
    return [
        f"{said}; the smallest κ(J) does not go with the best {analysis.comparison.result.name} here, which is that of "
        f"{best} ({show(known[best]) if best else ''})."
    ]


def _fairness(analysis: Analysis) -> list[str]:
    differing = session_differences(analysis.comparison)
    if not differing:
        return []
    return [f"Not all runs were made alike: {'; '.join(differing)}. Times, and perhaps more, are not comparable."]
