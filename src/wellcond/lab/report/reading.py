"""`find_findings`: what the numbers say, in sentences, and nothing beyond them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from wellcond.lab.report.analysis import Analysis
from wellcond.lab.report.formats import show_interval, show_kappa, show_mean, show_p, show_share
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.match import FEWEST_FOR_EXACT, MatchGain, Matching, show_match
from wellcond.lab.report.provenance import session_differences
from wellcond.lab.report.statistics import FEWEST_SEEDS, PairedDifference, method_kind
from wellcond.lab.report.values import number, show, show_seeds
from wellcond.lab.report.verdicts import ALPHA, POWER, smallest_detectable, typical_std

SMALL_GRADIENT = 0.01


def find_findings(analysis: Analysis) -> list[str]:
    """Sentences computed from the records, the most important first."""
    if not _anything(analysis):
        counts = [f"{run.method}, seed {run.seed}: {run.outcome}" for run in analysis.comparison.runs]
        return [f"No run is finished, so there is nothing to compare yet ({'; '.join(counts)})."]
    return [*_first(analysis), *_differences(analysis), *_others(analysis)]


def find_remarks(analysis: Analysis) -> list[str]:
    """Findings without a sentence for each difference, which the table of methods has already."""
    return [*_first(analysis), *_others(analysis)] if _anything(analysis) else find_findings(analysis)


def _anything(analysis: Analysis) -> bool:
    return any(summary.count for summary in analysis.summaries.values())


def _first(analysis: Analysis) -> list[str]:
    return [
        *_winner(analysis),
        *_few_seeds(analysis),
        *describe_power(analysis.comparison, analysis.differences),
    ]


def _others(analysis: Analysis) -> list[str]:
    return [
        *_failures(analysis),
        *_scale_control(analysis),
        *_saturation(analysis),
        *_matching(analysis),
        *_conditioning(analysis),
        *_fairness(analysis),
    ]


def _ranked(analysis: Analysis) -> list[str]:
    """Methods that lost no run by divergence, the best mean first."""
    sign = -1.0 if analysis.comparison.result.higher_is_better else 1.0
    known = [m for m in analysis.comparison.methods if analysis.summaries[m].count and not _lost(analysis, m)]
    return sorted(known, key=lambda method: sign * analysis.summaries[method].mean)


def _lost(analysis: Analysis, method: str) -> int:
    return analysis.outcomes(method)["diverged"]


def _tied_for_best(analysis: Analysis) -> list[str]:
    """Ranked methods with the best mean, up to rounding."""
    ranked = _ranked(analysis)
    means = {method: analysis.summaries[method].mean for method in ranked}
    return [method for method in ranked if math.isclose(means[method], means[ranked[0]], rel_tol=1e-12)]


def _winner(analysis: Analysis) -> list[str]:
    ranked, tied, metric = _ranked(analysis), _tied_for_best(analysis), analysis.comparison.result
    finished = [method for method in analysis.comparison.methods if analysis.summaries[method].count]
    if len(finished) < 2:
        return [f"Only {finished[0]} has finished runs, so there is nothing to compare it with."]

    def told(method: str) -> str:
        summary = analysis.summaries[method]
        seeds = show_seeds(summary.count)
        unit = " %" if metric.percent else ""
        return f"{method} ({show_mean(summary.mean, summary.std, metric)}{unit}, {seeds})"

    lost = [
        f" {told(m)} is not ranked: {_lost(analysis, m)} of its {analysis.outcomes(m).total()} runs diverged."
        for m in finished
        if _lost(analysis, m)
    ]
    if not ranked:
        return [f"Every method lost runs, so none is called best.{''.join(lost)}"]
    if len(ranked) == 1:
        return [f"Only {told(ranked[0])} lost no run, so there is no ranking.{''.join(lost)}"]
    if len(tied) == len(ranked):
        value = f"{metric.show(analysis.summaries[tied[0]].mean)}{' %' if metric.percent else ''}"
        every = f"All {len(tied)} methods" + (" that lost no run" if lost else "")
        return [f"{every} have the same mean {metric.name}, {value}: these runs cannot tell them apart.{''.join(lost)}"]
    if len(tied) > 1:
        names = f"{', '.join(tied[:-1])} and {tied[-1]}"
        rest = f", before {told(ranked[len(tied)])}"
        first = f"Best mean {metric.name}: {names} are equal ({metric.show(analysis.summaries[tied[0]].mean)}){rest}."
        return [first + "".join(lost)]
    best, second, last = ranked[0], ranked[1], ranked[-1]
    tail = "" if last == second else f"; worst is {told(last)}"
    lead = abs(analysis.summaries[best].mean - analysis.summaries[second].mean)
    if lead < max(analysis.summaries[best].std, analysis.summaries[second].std):
        tail += f". The lead of {metric.show(lead)}{metric.unit} is smaller than the spread over seeds"
    return [f"Best mean {metric.name}: {told(best)}, before {told(second)}{tail}.{''.join(lost)}"]


def describe_power(
    comparison: Comparison, differences: Mapping[str, PairedDifference], seeds: int | None = None
) -> list[str]:
    """Which difference as many seeds can show, from the spread of the runs that are there; nothing without spread.

    Args:
        comparison: runs that are done.
        differences: of their results.
        seeds: of a comparison that is to come; as many as there are pairs by default.
    """
    pairs = max((difference.count for difference in differences.values()), default=0)
    std, count = typical_std(list(differences.values())), pairs if seeds is None else seeds
    smallest = smallest_detectable(std, count)
    if math.isnan(smallest):
        return []
    metric = comparison.result
    return [
        f"{show_seeds(count)} can show a true difference of {metric.show(smallest)}{metric.unit} (power "
        f"{show_share(POWER)}, level {ALPHA}, one comparison; paired differences here have a standard deviation of "
        f"{metric.show(std)}{metric.unit} over {show_seeds(pairs)})."
    ]


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
        alike = "" if difference.mean == 0 else " alike, so a t test is not defined"
        return f"{start} in every one of {difference.count} seeds{alike}."
    facts = f"95 % interval {show_interval(difference.interval, metric)}, p = {show_p(difference.p_holm)} after Holm"
    facts = facts.replace("p = <", "p <")
    verdict = analysis.judge(difference)
    margin = f"{metric.show(verdict.margin)}{metric.unit}"
    if verdict.kind == "equal":
        return (
            f"{difference.method} is equal to {difference.baseline} within {margin}: the difference is "
            f"{metric.show(difference.mean, sign=True)} ({facts}; p of equality {show_p(verdict.p_equal)})."
        )
    favoured = difference.method if difference.mean > 0 else difference.baseline
    differ = f"{difference.method} and {difference.baseline} differ by {size} in favour of {favoured}"
    lost = f"; undecided: {verdict.reason}" if verdict.kind == "undecided" and verdict.reason else ""
    if difference.certain and difference.p_holm is not None and difference.p_holm < ALPHA:
        small = f", and less than the margin of {margin}" if verdict.within_margin else ""
        return f"{start}: the interval excludes 0{small} ({facts}){lost}."
    if difference.certain:
        return (
            f"{differ}, which is undecided: the interval excludes 0, but not significantly once the number of methods "
            f"is considered ({facts}){lost}."
        )
    reach = f"; {show_seeds(difference.count)} with this spread can show {_detectable(difference, analysis)}"
    return f"{differ}, which is undecided: the interval contains 0 ({facts}){reach}{lost}."


def _detectable(difference: PairedDifference, analysis: Analysis) -> str:
    metric = analysis.comparison.result
    return f"{metric.show(smallest_detectable(difference.std, difference.count))}{metric.unit}"


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
        if analysis.judge(difference).kind == "better":
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
        told.append(f"{method} {_told_match(matching, analysis.match_gains[method], unit)}")
    if not told and not never:
        return []
    missed = [f"never: {', '.join(never)}"] if never else []
    seeds = max(len(gain.values) for gain in analysis.match_gains.values())
    few = f" {show_seeds(seeds)}: below {FEWEST_FOR_EXACT} the exact test cannot decide." * (seeds < FEWEST_FOR_EXACT)
    return [
        f"{unit.capitalize()}s until the last {comparison.metric.name} of {comparison.baseline} is reached, which "
        f"takes {comparison.baseline} itself {own.show(unit)} (by seed) or {show_match(own.of_means, unit)} (mean "
        f"curve): {'; '.join([*told, *missed])}.{few}"
    ]


def _told_match(matching: Matching, gain: MatchGain, unit: str) -> str:
    """How early, against the baseline's own count of the same seeds."""
    when = show(matching.mean(unit), 3 if unit == "epoch" else 6)
    if gain.never:
        return f"{when} in {len(matching.reached)} of {len(matching.by_seed)} seeds, never in the others"
    if math.isnan(gain.mean):
        return when
    way = "earlier" if gain.mean > 0 else "later"
    by = f"{show(abs(gain.mean), 3)} {way} by seed" if gain.mean else "no earlier by seed"
    p = "" if gain.p_holm is None else f", exact p = {show_p(gain.p_holm)} after Holm".replace("= <", "<")
    return f"{when} ({by}{p})"


def _conditioning(analysis: Analysis) -> list[str]:
    known = {
        method: summary
        for method in analysis.comparison.methods
        if (summary := analysis.last_jacobian(method)).finite or summary.infinite
    }
    if len(known) < 2:
        return []
    low, high = min(known, key=lambda m: known[m].rank), max(known, key=lambda m: known[m].rank)
    if known[low].rank == known[high].rank:
        return []

    def told(method: str) -> str:
        summary = known[method]
        if not summary.infinite:
            return show_kappa(summary)
        rest = f", {show(summary.geometric_mean)} in the others" if summary.finite else ""
        return f"infinite in {show_share(summary.infinite_share)} of its heads{rest}"

    said = (
        f"κ(J) at the end (geometric mean, non-zero spectrum; singular heads rank last) is smallest for {low} "
        f"({told(low)}) and largest for {high} ({told(high)})"
    )
    state = analysis.attention(low, last=True)
    if state is not None and state.saturated:
        said += f" (the attention of {low} is saturated, where a small κ(J) says nothing good)"
    best, name = [method for method in _tied_for_best(analysis) if method in known], analysis.comparison.result.name
    if not best or len(best) == len(known):
        return [f"{said}."]
    if low in best:
        others = [method for method in best if method != low]
        shared = f", together with {', '.join(others)}" if others else ""
        return [f"{said}; the method with the smallest κ(J) also has the best {name} here{shared}."]
    whose = ", ".join(f"{method} ({told(method)})" for method in best)
    return [f"{said}; the smallest κ(J) does not go with the best {name} here, which is that of {whose}."]


def _fairness(analysis: Analysis) -> list[str]:
    differing = session_differences(analysis.comparison)
    if not differing:
        return []
    return [f"Not all runs were made alike: {'; '.join(differing)}. Times, and perhaps more, are not comparable."]
