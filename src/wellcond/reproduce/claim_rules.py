"""The rules by which records decide about a claim.

A gain is
  reproduced            if it is positive with p < 0.05 after Holm's correction;
  not reproduced        if it is negative with p < 0.05, or its 95 % interval ends below what the paper has;
  not testable          if there are fewer than three pairs, or the interval holds both 0 and the paper's gain: these
                        runs are too few or too noisy to tell.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

from wellcond.experiments.settings import Settings
from wellcond.report.analysis import Analysis
from wellcond.report.formats import show_interval, show_p
from wellcond.report.glue import SHOWN, find_differences
from wellcond.report.glue_scores import AVERAGE
from wellcond.report.run_record import Metric
from wellcond.report.statistics import PairedDifference, compare_paired, correct
from wellcond.report.values import show_seeds
from wellcond.reproduce.catalogue_files import entries
from wellcond.reproduce.claim_computations import computed
from wellcond.reproduce.claim_measurements import (
    count_above,
    count_inexact,
    distance_below,
    first_or_last_logs,
    raw_and_effective_logs,
    savings,
)
from wellcond.reproduce.collect import StoredStudy
from wellcond.reproduce.glue_average import averaged_columns, mean_gain
from wellcond.reproduce.paper_numbers import paper_tables

REPRODUCED, NOT_REPRODUCED, NOT_TESTABLE = "reproduced", "not reproduced", "not testable at this size"
NO_RECORDS = "no records yet"
SIGNIFICANT = 0.05


class Rule(Settings):
    """How a claim is decided; which fields count depends on the kind."""

    kind: Literal["gain", "kappa", "saving", "below", "best", "same", "computed", "needs"]
    folder: str = ""
    column: str = ""
    method: str = ""
    over: str = ""
    over_folder: str = ""
    """Records of `over`, if they are not in `folder`: the same recipe with one change."""
    row: str = ""
    base_row: str = ""
    """Rows of the paper's table whose difference is the gain it claims."""
    glue: str = ""
    expected: Literal["paper", "own_gain"] = "paper"
    """What to compare a gain with: the paper's, or our own over the baseline."""
    quantity: str = ""
    moment: Literal["first", "last"] = "last"
    at_least: float = 0.0
    limit: float | str = 0.0
    within: float = 0.0
    """In the metric's unit: what counts as no effect."""
    among: tuple[str, ...] = ()
    best: tuple[str, ...] = ()
    what: str = ""
    why: str = ""
    caveat: str = ""
    """What the evidence leaves out, in words."""


class Verdict(Settings):
    """What became of a claim, and why."""

    word: str
    evidence: str


def judge(rule: Rule, table: str, results: Path) -> Verdict:
    """Decide a claim.

    Args:
        rule: of the claim, for one folder of records.
        table: id whose numbers the paper gives.
        results: folder of committed records.
    """
    verdict = _judge(rule, table, results)
    if not rule.caveat or verdict.word == NO_RECORDS:
        return verdict
    return Verdict(word=verdict.word, evidence=f"{verdict.evidence}; {rule.caveat}")


def _judge(rule: Rule, table: str, results: Path) -> Verdict:
    if rule.kind == "needs":
        return Verdict(word=NOT_TESTABLE, evidence=rule.why)
    if rule.kind == "computed":
        return Verdict(**computed(rule.what))
    analysis = _analysis(results / rule.folder)
    if analysis is None:
        return Verdict(word=NO_RECORDS, evidence=f"nothing in {rule.folder}")
    if rule.over_folder:
        return _gain_over_folder(rule, analysis, _analysis(results / rule.over_folder), table)
    kinds = {"gain": _gain, "kappa": _kappa, "saving": _saving, "below": _below, "best": _best, "same": _same}
    return kinds[rule.kind](rule, analysis, table)


@functools.lru_cache(maxsize=64)
def _study(folder: Path) -> StoredStudy:
    return StoredStudy(folder, committed=True)


def _analysis(folder: Path) -> Analysis | None:
    return _study(folder).analysis if folder.is_dir() else None


def _paper_gain(rule: Rule, table: str) -> float | None:
    """Row minus row, positive is better, in the paper's unit."""
    known = paper_tables().get(table)
    return None if known is None or not rule.row else known.parts[0].gain(rule.row, rule.base_row, rule.column)


def _gain(rule: Rule, analysis: Analysis, table: str) -> Verdict:
    difference, metric = _difference(rule, analysis)
    if difference is None:
        return Verdict(word=NO_RECORDS, evidence=f"no records of {rule.method} and {rule.over}")
    expected, over = _paper_gain(rule, table), ""
    tasks = averaged_columns(entries()[table], _study(analysis.comparison.folder)) if rule.glue == AVERAGE else ()
    if tasks:
        expected = mean_gain(paper_tables()[table].parts[0], rule.row, rule.base_row, tasks)
        over = f" over the same tasks, {', '.join(tasks)}"
    words = "" if expected is None else f"; the paper has {expected:+.3g}{over}"
    if rule.expected == "own_gain":
        own = analysis.differences.get(rule.method)
        expected = None if own is None or not own.count else own.mean * metric.scale
        words = "" if expected is None else f"; {rule.method} minus {analysis.comparison.baseline} is {expected:+.2f}"
    return _decide(difference, metric, expected, words)


def _gain_over_folder(rule: Rule, analysis: Analysis, other: Analysis | None, table: str) -> Verdict:
    """A gain between two comparisons, paired by seed; a single comparison, which is not corrected."""
    first, second = (
        {} if some is None or name not in some.comparison.methods else some.summaries[name].values
        for some, name in ((analysis, rule.method), (other, rule.over))
    )
    metric = analysis.comparison.result
    [difference] = correct(
        [compare_paired(rule.method, first, rule.over, second, higher_is_better=metric.higher_is_better)]
    )
    if not difference.count:
        return Verdict(word=NO_RECORDS, evidence=f"no records of {rule.method} in {rule.folder} and {rule.over_folder}")
    expected = _paper_gain(rule, table)
    words = "" if expected is None else f"; the paper has {expected:+.3g}"
    return _decide(difference, metric, expected, words)


def _difference(rule: Rule, analysis: Analysis) -> tuple[PairedDifference | None, Metric]:
    """With Holm's correction over the table of the report that has this pair."""
    comparison, metric = analysis.comparison, analysis.comparison.result
    found: list[PairedDifference]
    if rule.glue:
        scores = _study(comparison.folder).glue
        known = {} if scores is None else find_differences(scores)
        found, metric = [d for (column, _), d in known.items() if column == rule.glue], SHOWN
    elif rule.over == comparison.baseline:
        found = list(analysis.differences.values())
    else:
        found = list(analysis.required)
    chosen = next((d for d in found if (d.method, d.baseline) == (rule.method, rule.over)), None)
    if chosen is None and not rule.glue and {rule.method, rule.over} <= set(comparison.methods):
        better = comparison.metric.higher_is_better
        first, second = (analysis.summaries[name].values for name in (rule.method, rule.over))
        [chosen] = correct([compare_paired(rule.method, first, rule.over, second, higher_is_better=better)])
    return (chosen if chosen is not None and chosen.count else None), metric


def _decide(difference: PairedDifference, metric: Metric, expected: float | None, words: str) -> Verdict:
    seeds = show_seeds(difference.count)
    shown = f"{metric.show(difference.mean, sign=True)}{metric.unit or f' {metric.name}'}"
    if difference.without_spread:
        return Verdict(word=NOT_TESTABLE, evidence=f"{shown} with each of {seeds}, so that t is not defined{words}")
    if difference.interval is None or difference.p_holm is None:
        return Verdict(word=NOT_TESTABLE, evidence=f"{shown} with {seeds}, which is too few{words}")
    evidence = f"{shown} {show_interval(difference.interval, metric)}, {seeds}, p {show_p(difference.p_holm)}{words}"
    if difference.p_holm < SIGNIFICANT:
        return Verdict(word=REPRODUCED if difference.mean > 0 else NOT_REPRODUCED, evidence=evidence)
    if expected is not None and difference.interval[1] * metric.scale < expected:
        return Verdict(word=NOT_REPRODUCED, evidence=evidence + ", which is above the interval")
    apart = difference.interval[0] > 0 or difference.interval[1] < 0
    why = "not significant after Holm's correction" if apart else "too few seeds to tell this from 0"
    return Verdict(word=NOT_TESTABLE, evidence=f"{evidence}; {why}")


ORDERS = Metric("orders of magnitude", higher_is_better=False, percent=False)


def _kappa(rule: Rule, analysis: Analysis, table: str) -> Verdict:
    """On log10, paired by seed; positive is lower. Corrected over the methods of the comparison."""
    difference: PairedDifference | None
    if rule.over == "raw":
        raw, effective = raw_and_effective_logs(analysis, rule.method, rule.quantity)
        [difference] = correct([compare_paired("W + C", effective, "W", raw, higher_is_better=False)])
    else:
        logs = {
            method: first_or_last_logs(analysis, method, rule.quantity, last=rule.moment == "last")
            for method in analysis.comparison.methods
        }
        others = [method for method in logs if method != rule.over and logs[method]]
        differences = correct(
            compare_paired(method, logs[method], rule.over, logs.get(rule.over, {}), higher_is_better=False)
            for method in others
        )
        difference = next((d for d in differences if d.method == rule.method), None)
    if difference is None or not difference.count:
        return Verdict(word=NO_RECORDS, evidence=f"no measurements of {rule.method} and {rule.over}")
    verdict = _decide(difference, ORDERS, None, "")
    factor, doubt = 10**difference.mean, ""
    words = f"lower by a factor of {factor:.3g}" if factor >= 1 else f"higher by a factor of {1 / factor:.3g}"
    if rule.over != "raw":
        pair, last = (rule.method, rule.over), rule.moment == "last"
        inexact, total = count_inexact(analysis, pair, rule.quantity, last=last)
        doubt = f"; {inexact} of {total} values are not exact" if inexact else ""
    return Verdict(word=verdict.word, evidence=f"{words}: {verdict.evidence}{doubt}")


def _saving(rule: Rule, analysis: Analysis, table: str) -> Verdict:
    """Share of epochs saved beyond the baseline's own; a seed that never gets there saves nothing."""
    base, values = (savings(analysis, name) for name in (analysis.comparison.baseline, rule.method))
    [difference] = correct([compare_paired(rule.method, values, "default", base, higher_is_better=True)])
    if not difference.count:
        return Verdict(word=NO_RECORDS, evidence=f"no records of {rule.method}")
    metric = Metric("saving", higher_is_better=True, percent=True)
    words = f"; the paper has at least {rule.at_least:.0%}"
    verdict = _decide(difference, metric, 100 * rule.at_least, words)
    if verdict.word == REPRODUCED and difference.mean < rule.at_least:
        return Verdict(word=NOT_REPRODUCED, evidence=verdict.evidence + ": fewer epochs, but not that many fewer")
    return verdict


def _below(rule: Rule, analysis: Analysis, table: str) -> Verdict:
    above, total = count_above(analysis, rule.method, rule.quantity, rule.limit)
    if not total:
        return Verdict(word=NO_RECORDS, evidence="no measurements")
    evidence = f"{above} of {total} measurements of a head are above it"
    if isinstance(rule.limit, str):
        least, most = distance_below(analysis, rule.method, rule.quantity, rule.limit)
        evidence += (
            f"; it is 10^{least:.0f} to 10^{most:.0f} times as large as what is measured, so that this says little, "
            "and it is no bound in general (erratum E4)"
        )
    return Verdict(word=NOT_REPRODUCED if above else REPRODUCED, evidence=evidence)


def _same(rule: Rule, analysis: Analysis, table: str) -> Verdict:
    """No effect: the whole 95 % interval of the difference is small; an effect: all of it is not."""
    difference, metric = _difference(rule, analysis)
    if difference is None:
        return Verdict(word=NO_RECORDS, evidence=f"no records of {rule.method} and {rule.over}")
    if difference.interval is None:
        return Verdict(word=NOT_TESTABLE, evidence=f"{show_seeds(difference.count)}, which is too few")
    low, high = (end * metric.scale for end in difference.interval)
    shown = f"{metric.show(difference.mean, sign=True)}{metric.unit} {show_interval(difference.interval, metric)}"
    evidence = f"{shown}, {show_seeds(difference.count)}; no effect is one within {rule.within:g}{metric.unit}"
    if -rule.within <= low and high <= rule.within:
        return Verdict(word=REPRODUCED, evidence=evidence)
    if low > rule.within or high < -rule.within:
        return Verdict(word=NOT_REPRODUCED, evidence=evidence)
    return Verdict(word=NOT_TESTABLE, evidence=f"{evidence}; too few seeds to tell")


def _best(rule: Rule, analysis: Analysis, table: str) -> Verdict:
    """Every rival is worse than the best of those that should win, with p < 0.05 after Holm's correction."""
    comparison, metric = analysis.comparison, analysis.comparison.result
    known = [name for name in rule.among if name in comparison.methods and analysis.summaries[name].count]
    winners = [name for name in known if name in rule.best]
    if not winners or len(known) == len(winners):
        return Verdict(word=NO_RECORDS, evidence="no records of the sweep")
    sign = 1 if metric.higher_is_better else -1
    top = max(winners, key=lambda name: sign * analysis.summaries[name].mean)
    values = ", ".join(f"{name} {metric.show(analysis.summaries[name].mean)}" for name in known)
    count = analysis.summaries[top].count
    rivals = correct(
        compare_paired(
            top, analysis.summaries[top].values, name, analysis.summaries[name].values,
            higher_is_better=metric.higher_is_better,
        )
        for name in known
        if name not in rule.best
    )  # fmt: skip
    if any(rival.p_holm is None for rival in rivals):
        return Verdict(word=NOT_TESTABLE, evidence=f"{values}: {show_seeds(count)}, which is too few")
    if all(rival.mean > 0 and (rival.p_holm or 0) < SIGNIFICANT for rival in rivals):
        return Verdict(word=REPRODUCED, evidence=values)
    if any(rival.mean < 0 and (rival.p_holm or 0) < SIGNIFICANT for rival in rivals):
        return Verdict(word=NOT_REPRODUCED, evidence=values)
    return Verdict(word=NOT_TESTABLE, evidence=f"{values}: too few seeds to tell them apart")
