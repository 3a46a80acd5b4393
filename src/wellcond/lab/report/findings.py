"""What the numbers say and nothing beyond them: in one sentence (`bottom_line`) and what else must be known."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from wellcond.lab.report.analysis import Analysis
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.statistics import FEWEST_SEEDS, PairedDifference, method_kind, show_interval
from wellcond.lab.report.table import number, plain_setting, show, show_seeds, show_share
from wellcond.lab.report.verdicts import ALPHA, POWER, Kind, smallest_detectable, typical_std

SMALL_GRADIENT = 0.01
WORDS: dict[Kind, str] = {
    "better": "better", "worse": "worse", "equal": "equal within the margin", "undecided": "undecided",
}  # fmt: skip


def bottom_line(analysis: Analysis) -> str:
    """How many methods are better, worse, equal or undecided against the baseline, and the largest difference."""
    comparison, metric = analysis.comparison, analysis.comparison.result
    finished = [method for method, summary in analysis.summaries.items() if summary.count]
    compared = [difference for difference in analysis.differences.values() if difference.count]
    if not finished:
        runs = "; ".join(f"{run.method}, seed {run.seed}: {run.outcome}" for run in comparison.runs)
        return f"No run is finished, so there is nothing to compare yet ({runs})."
    if not compared:
        return f"Only {', '.join(finished)} has finished runs, so there is nothing to compare."
    top = max(compared, key=lambda difference: difference.mean)
    size = "largest gain" if top.mean > 0 else "smallest loss"
    led = f"the {size} is {metric.show(top.mean, sign=True)}{metric.unit}, of {top.method}"
    seeds = max(difference.count for difference in compared)
    if seeds < FEWEST_SEEDS:
        few = "only one seed" if seeds == 1 else f"only {seeds} seeds"
        return f"Against {comparison.baseline}, {led}; with {few} no difference can be told from the luck of a seed."
    counts = Counter(analysis.judge(difference).kind for difference in compared)
    told = [f"{counts[kind]} {_are(counts[kind])} {word}" for kind, word in WORDS.items() if counts[kind]]
    facts = [f"95 % interval {show_interval(top.interval, metric)}"] if top.interval is not None else []
    facts += [show_seeds(top.count), WORDS[analysis.judge(top).kind]]
    return (
        f"Of {len(compared)} {'method' if len(compared) == 1 else 'methods'} against {comparison.baseline}, "
        f"{', '.join(told)}; {led} ({', '.join(facts)})."
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def find_findings(analysis: Analysis) -> list[str]:
    """Sentences on what the table of methods does not say."""
    return [
        *describe_power(analysis.comparison, analysis.differences),
        *_scale_control(analysis),
        *_saturation(analysis),
        *_conditioning(analysis),
        *_machines(analysis),
    ]


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


def _scale_control(analysis: Analysis) -> list[str]:
    kinds = {run.method: method_kind(run.record.get("method_spec"), run.method) for run in analysis.comparison.runs}
    found, metric = [], analysis.comparison.result
    for difference in analysis.required:
        gain, control = (analysis.differences.get(name) for name in (difference.method, difference.baseline))
        if kinds.get(difference.baseline) != ("gaussian", "") or gain is None or control is None:
            continue
        if not difference.count or not gain.count or not control.count or gain.mean <= 0:
            continue
        told = (
            f"Scale control: {difference.baseline}, which has the scale of {difference.method} but not its "
            f"conditioning, differs from {gain.baseline} by {metric.show(control.mean, sign=True)}{metric.unit}, "
            f"{difference.method} by {metric.show(gain.mean, sign=True)}{metric.unit}"
        )
        why = ": these runs do not show that the gain is due to conditioning rather than to the scale of the weights."
        if analysis.judge(difference).kind == "better":
            why = ": scale alone does not explain the gain."
        elif difference.interval is None:
            why = "; too few seeds to say whether scale explains the gain."
        found.append(told + why)
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
    small = "W_Q and W_K receive almost no" if own < SMALL_GRADIENT * base else "though W_Q and W_K still receive a"
    norms = f"{show(own, 2)} against {show(base, 2)} in {analysis.comparison.baseline}"
    return f", {small} gradient (gradient norm of W_Q and W_K {norms})"


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


def _conditioning(analysis: Analysis) -> list[str]:
    """Whether the smallest condition number goes with the best result."""
    summaries = {method: analysis.last_jacobian(method) for method in analysis.comparison.methods}
    known = {method: summary for method, summary in summaries.items() if summary.finite or summary.infinite}
    if len({summary.rank for summary in known.values()}) < 2:
        return []
    low, high = min(known, key=lambda m: known[m].rank), max(known, key=lambda m: known[m].rank)
    said = (
        f"κ(J) at the end (geometric mean, non-zero spectrum; singular heads rank last) is smallest for {low} "
        f"({known[low].show()}) and largest for {high} ({known[high].show()})"
    )
    state = analysis.attention(low, last=True)
    if state is not None and state.saturated:
        said += f" (the attention of {low} is saturated, where a small κ(J) says nothing good)"
    result = analysis.comparison.result
    # A method that lost runs has the mean of its luckier seeds.
    sign = 1.0 if result.higher_is_better else -1.0
    means = {
        m: sign * s.mean for m, s in analysis.summaries.items() if s.count and not analysis.outcomes(m)["diverged"]
    }
    best = [m for m in means if m in known and math.isclose(means[m], max(means.values()), rel_tol=1e-12)]
    if not best or len(best) == len(known):
        return [f"{said}."]
    if low in best:
        return [f"{said}; the method with the smallest κ(J) also has the best {result.name} here."]
    whose = ", ".join(f"{method} ({known[method].show()})" for method in best)
    return [f"{said}; the smallest κ(J) does not go with the best {result.name} here, which is that of {whose}."]


def _machines(analysis: Analysis) -> list[str]:
    """Facts about machine or versions that are not the same in all runs."""
    found = []
    for key in ("device", "device_name", "threads", "processes", "precision", "torch", "wellcond"):
        values = {plain_setting(session.get(key)) for run in analysis.comparison.runs for session in run.sessions}
        found += [f"{key} ({', '.join(sorted(values))})"] if len(values) > 1 else []
    if not found:
        return []
    return [f"Not all runs were made alike: {'; '.join(found)}. Times, and perhaps more, are not comparable."]
