"""What the numbers say and nothing beyond them: in one sentence (`bottom_line`) and in several (`find_findings`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from wellcond.lab.report.analysis import Analysis
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.match import FEWEST_FOR_EXACT, MatchGain, Matching, show_match
from wellcond.lab.report.run_tables import plain_setting
from wellcond.lab.report.statistics import FEWEST_SEEDS, PairedDifference, method_kind
from wellcond.lab.report.table import show_interval, show_kappa, show_mean, show_p, show_share
from wellcond.lab.report.values import number, show, show_seeds
from wellcond.lab.report.verdicts import ALPHA, POWER, Kind, smallest_detectable, typical_std

SMALL_GRADIENT = 0.01
WORDS: dict[Kind, str] = {
    "better": "better", "worse": "worse", "equal": "equal within the margin", "undecided": "undecided",
}  # fmt: skip


def bottom_line(analysis: Analysis) -> str:
    """How many methods are better, worse, equal or undecided against the baseline, and the largest difference.

    Where no difference can be judged, the first finding says why.
    """
    metric = analysis.comparison.result
    compared = [difference for difference in analysis.differences.values() if difference.count]
    if not compared or max(difference.count for difference in compared) < FEWEST_SEEDS:
        return " ".join(find_findings(analysis)[: 2 if compared else 1])
    counts = Counter(analysis.judge(difference).kind for difference in compared)
    told = [f"{counts[kind]} {_are(counts[kind])} {word}" for kind, word in WORDS.items() if counts[kind]]
    top = max(compared, key=lambda difference: difference.mean)
    size = "largest gain" if top.mean > 0 else "smallest loss"
    facts = [f"95 % interval {show_interval(top.interval, metric)}"] if top.interval is not None else []
    facts += [show_seeds(top.count), WORDS[analysis.judge(top).kind]]
    return (
        f"Of {len(compared)} {'method' if len(compared) == 1 else 'methods'} against {analysis.comparison.baseline}, "
        f"{', '.join(told)}; the {size} is {metric.show(top.mean, sign=True)}{metric.unit}, of {top.method} "
        f"({', '.join(facts)})."
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def find_remarks(analysis: Analysis) -> list[str]:
    """Findings without a sentence for each difference, which the table of methods has already."""
    return find_findings(analysis, differences=False)


def find_findings(analysis: Analysis, *, differences: bool = True) -> list[str]:
    """Sentences computed from the records, the most important first."""
    if not any(summary.count for summary in analysis.summaries.values()):
        counts = [f"{run.method}, seed {run.seed}: {run.outcome}" for run in analysis.comparison.runs]
        return [f"No run is finished, so there is nothing to compare yet ({'; '.join(counts)})."]
    paired = sorted((d for d in analysis.differences.values() if d.count), key=lambda d: -d.mean)
    return [
        *_winner(analysis),
        *_few_seeds(analysis),
        *describe_power(analysis.comparison, analysis.differences),
        *(describe_difference(difference, analysis) for difference in paired if differences),
        *_failures(analysis),
        *_scale_control(analysis),
        *_saturation(analysis),
        *_matching(analysis),
        *_conditioning(analysis),
        *_machines(analysis),
    ]


def _ranked(analysis: Analysis) -> list[str]:
    """Methods that lost no run by divergence, the best mean first."""
    sign = -1.0 if analysis.comparison.result.higher_is_better else 1.0
    known = [
        m for m in analysis.comparison.methods if analysis.summaries[m].count and not analysis.outcomes(m)["diverged"]
    ]
    return sorted(known, key=lambda method: sign * analysis.summaries[method].mean)


def _tied_for_best(analysis: Analysis) -> list[str]:
    """Ranked methods with the best mean, up to rounding."""
    ranked = _ranked(analysis)
    means = {method: analysis.summaries[method].mean for method in ranked}
    return [method for method in ranked if math.isclose(means[method], means[ranked[0]], rel_tol=1e-12)]


def _winner(analysis: Analysis) -> list[str]:
    ranked, tied, metric = _ranked(analysis), _tied_for_best(analysis), analysis.comparison.result
    finished = [method for method in analysis.comparison.methods if analysis.summaries[method].count]
    percent = " %" if metric.percent else ""
    if len(finished) < 2:
        return [f"Only {finished[0]} has finished runs, so there is nothing to compare it with."]

    def told(method: str) -> str:
        summary = analysis.summaries[method]
        return f"{method} ({show_mean(summary.mean, summary.std, metric)}{percent}, {show_seeds(summary.count)})"

    outcomes = {method: analysis.outcomes(method) for method in finished}
    lost = "".join(
        f" {told(m)} is not ranked: {counts['diverged']} of its {counts.total()} runs diverged."
        for m, counts in outcomes.items()
        if counts["diverged"]
    )
    if not ranked:
        return [f"Every method lost runs, so none is called best.{lost}"]
    if len(ranked) == 1:
        return [f"Only {told(ranked[0])} lost no run, so there is no ranking.{lost}"]
    top = metric.show(analysis.summaries[ranked[0]].mean)
    if len(tied) == len(ranked):
        every = f"All {len(tied)} methods" + (" that lost no run" if lost else "")
        return [f"{every} have the same mean {metric.name}, {top}{percent}: these runs cannot tell them apart.{lost}"]
    if len(tied) > 1:
        names = f"{', '.join(tied[:-1])} and {tied[-1]}"
        return [f"Best mean {metric.name}: {names} are equal ({top}), before {told(ranked[len(tied)])}.{lost}"]
    best, second, last = ranked[0], ranked[1], ranked[-1]
    tail = "" if last == second else f"; worst is {told(last)}"
    lead = abs(analysis.summaries[best].mean - analysis.summaries[second].mean)
    if lead < max(analysis.summaries[best].std, analysis.summaries[second].std):
        tail += f". The lead of {metric.show(lead)}{metric.unit} is smaller than the spread over seeds"
    return [f"Best mean {metric.name}: {told(best)}, before {told(second)}{tail}.{lost}"]


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
    detectable = metric.show(smallest_detectable(difference.std, difference.count)) + metric.unit
    reach = f"; {show_seeds(difference.count)} with this spread can show {detectable}"
    return f"{differ}, which is undecided: the interval contains 0 ({facts}){reach}{lost}."


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
    found, metric = [], analysis.comparison.result
    for method in analysis.comparison.methods:
        state, difference = analysis.attention(method, last=False), analysis.differences.get(method)
        if state is None or not state.saturated:
            continue
        start = f"{method}: "
        if difference is not None and difference.count and difference.mean < 0:
            start += f"{metric.show(-difference.mean)}{metric.unit} worse than {difference.baseline}; "
        facts = [f"entropy {state.entropy:.2f} of ln N"] if not math.isnan(state.entropy) else []
        facts += [f"diagonal mass {state.diagonal_mass:.2f}"] if state.diagonal_mass > 0.95 else []
        dead = f" and {state.dead} of {state.heads} heads {_are(state.dead)} dead" if state.dead else ""
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
    """Geometric mean of the gradient norms of W_Q and W_K over the first tenth of training; None if not recorded."""
    values = [
        number(row.get(key))
        for run in analysis.comparison.of(method)
        for row in run.steps[: max(1, len(run.steps) // 10)]
        for key in ("grad_norm_q", "grad_norm_k")
    ]
    logs = [math.log10(value) for value in values if 0 < value < math.inf]
    return 10 ** (math.fsum(logs) / len(logs)) if logs else 0.0 if 0 in values else None


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


def _machines(analysis: Analysis) -> list[str]:
    """Facts about machine or versions that are not the same in all runs."""
    found = []
    for key in ("device", "device_name", "threads", "processes", "precision", "torch", "wellcond"):
        values = {plain_setting(session.get(key)) for run in analysis.comparison.runs for session in run.sessions}
        found += [f"{key} ({', '.join(sorted(values))})"] if len(values) > 1 else []
    if not found:
        return []
    return [f"Not all runs were made alike: {'; '.join(found)}. Times, and perhaps more, are not comparable."]
