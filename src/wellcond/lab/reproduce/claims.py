"""The papers' claims one by one, decided by rule from stored records; as markdown.

A difference is better, worse, equal within a margin, or undecided (`report.statistics`). The margin is half of the
paper's gain, carried over as a share of the baseline's error, since points of other data or sizes mean something else;
where the paper has no number it is one standard deviation of the baseline over seeds.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from wellcond.lab.report import statistics
from wellcond.lab.report.analysis import Analysis
from wellcond.lab.report.match import FEWEST_FOR_EXACT
from wellcond.lab.report.records import Metric
from wellcond.lab.report.statistics import ALPHA, Kind, judge
from wellcond.lab.report.table import plain_markdown, show_seeds
from wellcond.lab.reproduce.catalogue import catalogue, read_paper_file
from wellcond.lab.reproduce.computed import COMPUTED
from wellcond.lab.reproduce.stored import find_study, what_ran
from wellcond.lab.settings import Settings

PAPERS = {
    "C": "Paper C: Conditioned Initialization for Attention",
    "S": "Paper S: Spectral Conditioning of Attention Improves Transformer Performance",
}
TITLE = "The papers' claims at CPU size"
LEAD = (
    "Made by `wellcond claims results` from the committed records; no verdict is written by hand.",
    "A row says what ran; the set-up of the paper, which is a hundred to a thousand times as large, has a column of "
    "its own. A claim that fails here may hold there, and one that holds here is not confirmed there.",
    "Verdicts are on the first method against the second: better or worse (p < 0.05, paired t test by seed, Holm's "
    "correction over the rows of one claim, which are one question), equal (both one-sided tests at "
    "5 % against a margin), or undecided. The margin is half of the paper's gain, carried over as a share of the "
    "baseline's error, since points of other data mean something else; without a number of the paper it is one "
    "standard deviation of the baseline over seeds. Epochs are counts and have an exact test (all flips of sign, "
    "which takes six seeds; equal is less than half of what the paper saves), in shares of the epochs beyond what the "
    "default itself saves. What so many seeds show is "
    "a difference that they find with a power of 80 %.",
)
ONLY_OF_RUNS = ("what ran", "records")
"""Columns that the other tables do not have."""
OTHERS = {
    "computed": (
        "True by construction",
        "These follow from definitions. They are computed when this page is made, and no run says anything about them.",
    ),
    "needs": ("Not decided at this size", "These need ImageNet, other large data, or up to billions of parameters."),
}
"""Claims that no runs decide, by the kind of their rule."""
BETTER, WORSE, EQUAL, UNDECIDED = "better", "worse", "equal", "undecided"
HOLDS, FAILS = "holds", "fails"
NEEDS, NO_RECORDS = "not run here", "no records"
WORDS = (BETTER, WORSE, EQUAL, UNDECIDED, HOLDS, FAILS, NO_RECORDS, NEEDS)
"""In the order in which they are counted."""
STRONG = "strong default"
"""The default whose tokens are scaled as well as a search could: the baseline of a comparison that has one."""
QUANTITY, LIMIT = "pseudo_condition_number", "papers_bound_log10"
"""Columns of measurements: kappa of the Jacobian over its non-zero spectrum, and the papers' bound on it."""
LONGEST = 24
"""Characters of a method's name that are repeated in a sentence."""


class Rule(Settings):
    """How a claim is decided; which fields count depends on the kind."""

    kind: Literal["gain", "kappa", "saving", "below", "best", "same", "computed", "needs"]
    folder: str = ""
    column: str = ""
    method: str = ""
    over: str = ""
    """A method, or `STRONG`."""
    over_folder: str = ""
    """Records of `over`, if they are not in `folder`: the same recipe with one change."""
    row: str = ""
    base_row: str = ""
    """Rows of the paper's table whose difference is the gain it claims."""
    moment: Literal["first", "last"] = "last"
    at_least: float = 0.0
    among: tuple[str, ...] = ()
    best: tuple[str, ...] = ()
    what: str = ""
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    """What became of a claim, and why."""

    word: str
    evidence: str
    as_claimed: bool | None = None
    """None while nothing is decided."""


Test = tuple[float | None, Callable[[float | None], Verdict]]
"""The p of a rule before correction, None where there is nothing to test, and the verdict from the corrected one."""


def judge_rules(rules: Sequence[Rule], table: str, results: Path) -> list[Verdict]:
    """Decide a claim for each of its columns, which are one question: Holm's correction is over them.

    Each rule has a folder of its own below that of the committed records; the paper's numbers are those of the table.
    """
    found = [_test(rule, table, results) for rule in rules]
    corrected = statistics.holm([None if isinstance(one, Verdict) else one[0] for one in found])
    return [one if isinstance(one, Verdict) else one[1](p) for one, p in zip(found, corrected, strict=True)]


def _test(rule: Rule, table: str, results: Path) -> Verdict | Test:
    if rule.kind == "needs":
        return Verdict(NEEDS, rule.why)
    if rule.kind == "computed":
        holds, evidence = COMPUTED[rule.what]()
        return Verdict(HOLDS if holds else FAILS, evidence, holds)
    study = find_study(results / rule.folder)
    if study is None:
        return Verdict(NO_RECORDS, f"nothing in {rule.folder}")
    if rule.kind in ("gain", "same"):
        return _gain(rule, study.analysis, results, table)
    return {"kappa": _kappa, "saving": _saving, "below": _below, "best": _best}[rule.kind](rule, study.analysis)


def paper_share(rule: Rule, table: str) -> float | None:
    """The gain that the paper claims, as a share of its baseline's error."""
    entry = catalogue().entries.get(table)
    return entry.parts[0].share(rule.row, rule.base_row, rule.column) if entry is not None and rule.row else None


def _gain(rule: Rule, analysis: Analysis, results: Path, table: str) -> Verdict | Test:
    """A gain within a comparison, or over a method of another one."""
    metric, baseline = analysis.comparison.result, analysis.comparison.baseline
    over = baseline if rule.over == STRONG and baseline.startswith("tokens(") else rule.over
    other = find_study(results / (rule.over_folder or rule.folder))
    own, base = analysis.comparison.results(rule.method), other.comparison.results(over) if other else {}
    difference = statistics.compare_paired(rule.method, own, over, base, higher_is_better=metric.higher_is_better)
    if not difference.count:
        where = f" in {rule.folder} and {rule.over_folder}" if rule.over_folder else f" and {rule.over}"
        return Verdict(NO_RECORDS, f"no records of {rule.method}{where}")
    names = () if rule.over_folder else (rule.method, over)
    lost = [analysis.outcomes(name)["diverged"] for name in names] or [0, 0]
    claimed: Kind = "equal" if rule.kind == "same" else "better"
    paper = paper_share(rule, table)
    return difference.p, lambda p: _decide(replace(difference, p_holm=p), metric, base, paper, lost, claimed)


def _decide(
    difference: statistics.PairedDifference, metric: Metric, base: dict[int, float], paper: float | None,
    lost: Sequence[int] = (0, 0), claimed: Kind = "better",
) -> Verdict:  # fmt: skip
    """Judge a corrected difference, given the values of the second method and diverged runs of both.

    The paper's gain is a share of its baseline's error, None if it has no number; `claimed` agrees with the paper.
    """
    other = statistics.Summary(base)
    error = metric.error(other.mean)
    margin = abs(paper) * error / 2 if paper is not None and math.isfinite(error) else other.std
    verdict = judge(difference, margin, diverged=lost[0], baseline_diverged=lost[1])
    said = [f"{metric.show(difference.mean, sign=True)}{metric.unit or f' {metric.name}'}"]
    if difference.interval is not None and difference.std:
        said[0] += f" {statistics.interval_cell(difference.interval, metric)[0]}"
    said[0] += f", {show_seeds(difference.count)}"
    said[0] += f", p {statistics.show_p(difference.p_holm)}" if difference.p_holm is not None else ""
    if paper is not None and math.isfinite(error) and error:
        named = difference.baseline if len(difference.baseline) <= LONGEST else "the other"
        said.append(f"{difference.mean / error:+.1%} of the error of {named}, the paper's {paper:+.1%}")
    said += [verdict.reason] if verdict.reason else []
    if verdict.kind in ("equal", "undecided") and difference.count > 1 and margin > 0:
        said.append(f"margin {metric.show(margin)}")
    if verdict.kind == "undecided":
        least = statistics.smallest_detectable(difference.std, difference.count)
        said += [f"so many seeds show {metric.show(least)}"] if math.isfinite(least) else []
    as_claimed = None if verdict.kind == UNDECIDED else verdict.kind == claimed
    return Verdict(verdict.kind, "; ".join(said), as_claimed)


ORDERS = Metric("orders of magnitude", higher_is_better=False, percent=False)


def _kappa(rule: Rule, analysis: Analysis) -> Verdict | Test:
    """On log10, paired by seed; positive is lower."""
    (own, counts), (base, base_counts) = (_measured(analysis, method, rule) for method in (rule.method, rule.over))
    difference = statistics.compare_paired(rule.method, own, rule.over, base, higher_is_better=False)
    if not difference.count:
        return Verdict(NO_RECORDS, f"no measurements of {rule.method} and {rule.over}")
    factor = 10**difference.mean
    said = [f"lower by a factor of {factor:.3g}" if factor >= 1 else f"higher by a factor of {1 / factor:.3g}"]
    both, singular, base_singular = counts + base_counts, counts["infinite"], base_counts["infinite"]
    said += [f"{both['inexact']} of {both['total']} values are not exact"] if both["inexact"] else []
    if both["infinite"]:
        said.append(f"infinite and in no mean: {singular} of {rule.method}, {base_singular} of {rule.over}")

    def decide(p: float | None) -> Verdict:
        verdict = _decide(replace(difference, p_holm=p), ORDERS, base, None)
        evidence = f"{'; '.join(said)}: {verdict.evidence}"
        if singular != base_singular and verdict.word == (BETTER if singular > base_singular else WORSE):
            return Verdict(UNDECIDED, evidence)
        return replace(verdict, evidence=evidence)

    return difference.p, decide


def _measured(analysis: Analysis, method: str, rule: Rule) -> tuple[dict[int, float], Counter[str]]:
    """Mean log10 over the finite values of all heads at the first or last measurement, by seed; and counts of them."""
    means, counts = {}, Counter[str]()
    for table in analysis.tables(method):
        values, steps = table.columns[QUANTITY], table.columns["step"]
        known = ~np.isnan(values)
        if known.any():
            at = known & (steps == (steps[known].max() if rule.moment == "last" else steps[known].min()))
            counts["total"] += int(at.sum())
            counts["inexact"] += int(table.columns["inexact"][at].sum())
            counts["infinite"] += int(np.isinf(values[at]).sum())
            if len(usable := values[at & np.isfinite(values) & (values > 0)]):
                means[table.run.seed] = float(np.log10(usable).mean())
    return means, counts


def _saving(rule: Rule, analysis: Analysis) -> Verdict | Test:
    """Share of epochs saved beyond the baseline's own, by the exact test for counts.

    A seed that never gets there saves nothing.
    """
    matchings = [analysis.matchings.get(name) for name in (analysis.comparison.baseline, rule.method)]
    base, values = (
        {} if matching is None else {s: 0.0 if math.isnan(m.saving) else m.saving for s, m in matching.by_seed.items()}
        for matching in matchings
    )
    differences = [values[seed] - base[seed] for seed in sorted(set(base) & set(values))]
    if not differences:
        return Verdict(NO_RECORDS, f"no records of {rule.method}")

    def decide(p: float | None) -> Verdict:
        mean, seeds = math.fsum(differences) / len(differences), show_seeds(len(differences))
        shown = "tied in every seed" if p is None else f"exact p {statistics.show_p(p)}"
        evidence = f"{mean:+.0%} of the epochs, {seeds}, {shown}; the paper has {rule.at_least:.0%}"
        if len(differences) < FEWEST_FOR_EXACT:
            least = min(1.0, 2 / 2 ** len(differences))
            return Verdict(UNDECIDED, f"{evidence}; {seeds} cannot have p below {least:.2g}")
        if p is not None and p < ALPHA:
            word = BETTER if mean >= 0 else WORSE
            return Verdict(word, evidence, word == BETTER and mean >= rule.at_least)
        equal = statistics.sign_flip_equality_p(differences, rule.at_least / 2)
        evidence += f"; less than half of it: p {statistics.show_p(equal)}"
        return Verdict(EQUAL, evidence, False) if equal < ALPHA else Verdict(UNDECIDED, evidence)

    return statistics.sign_flip_p(differences), decide


def _below(rule: Rule, analysis: Analysis) -> Verdict:
    """Every measurement of a head against the papers' bound."""
    with np.errstate(divide="ignore"):
        gaps = [t.columns[LIMIT] - np.log10(t.columns[QUANTITY]) for some in analysis.heads.values() for t in some]
    every = np.concatenate(gaps or [np.empty(0)])
    known, finite = every[~np.isnan(every)], every[np.isfinite(every)]
    if not len(known):
        return Verdict(NO_RECORDS, "no measurements")
    above, total, least, most = int((known < 0).sum()), len(known), finite.min(), finite.max()
    evidence = (
        f"{above} of {total} measurements of a head are above it; it is 10^{least:.0f} to 10^{most:.0f} times as large "
        "as what is measured, so that this says little, and it is no bound in general (erratum E4)"
    )
    return Verdict(FAILS if above else HOLDS, evidence, not above)


def _best(rule: Rule, analysis: Analysis) -> Verdict:
    """The best of the claimed winners against every other member of the sweep."""
    comparison, metric = analysis.comparison, analysis.comparison.result
    known = [name for name in rule.among if name in comparison.methods and analysis.summaries[name].count]
    winners = [name for name in known if name in rule.best]
    if not winners or len(known) == len(winners):
        return Verdict(NO_RECORDS, "no records of the sweep")
    means = {name: analysis.summaries[name].mean for name in known}
    top = (max if metric.higher_is_better else min)(winners, key=lambda name: means[name])
    listed = ", ".join(f"{name} {metric.show(mean)}" for name, mean in means.items())
    own, better = analysis.summaries[top], metric.higher_is_better
    rest = {name: analysis.summaries[name].values for name in known if name not in rule.best}
    others = statistics.correct(
        statistics.compare_paired(top, own.values, name, values, higher_is_better=better)
        for name, values in rest.items()
    )
    margin = own.std
    kinds = {other.baseline: judge(other, margin).kind for other in others}
    evidence = f"{listed}; {show_seeds(own.count)}"
    behind, open_ = ([name for name, kind in kinds.items() if kind == word] for word in (WORSE, UNDECIDED))
    if behind:
        return Verdict(WORSE, f"{evidence}; behind {', '.join(behind)}", False)
    if open_:
        return Verdict(UNDECIDED, f"{evidence}; not told apart from {', '.join(open_)}")
    if EQUAL in kinds.values():
        return Verdict(EQUAL, f"{evidence}; margin {metric.show(margin)}", False)
    return Verdict(BETTER, evidence, True)


class Claim(Settings):
    """One claim, or one for each column of a table."""

    paper: Literal["C", "S"]
    claim: str
    setup: str
    """What the paper ran it on."""
    table: str
    """Where it is made; an id of `reproduce` wherever there is one."""
    rule: Rule
    each: dict[str, str] = {}
    """Folder of records by column."""
    optional: bool = False
    """Left out while there are no records."""


class Judged(Settings):
    """A claim, for one of its columns, and what became of it."""

    claim: Claim
    verdict: Verdict
    ran: str = ""
    """What our runs were, from their records; empty if nothing ran."""
    link: str = ""
    """Report of the records, from their folder; empty if there is none."""

    @property
    def by_runs(self) -> bool:
        """Whether runs decide it."""
        return self.claim.rule.kind not in OTHERS


@functools.cache
def read_claims() -> tuple[Claim, ...]:
    """All of them, in the order in which they are shown."""
    return tuple(map(Claim.model_validate, read_paper_file("claims")))


def judge_claims(results: Path) -> list[Judged]:
    """Every claim with its verdict, by the committed records of a folder; the same records give the same verdicts."""
    return [judged for claim in read_claims() for judged in _judge(claim, results)]


def _judge(claim: Claim, results: Path) -> Iterator[Judged]:
    columns = claim.each or {claim.rule.column: claim.rule.folder}
    rules = [claim.rule.model_copy(update={"column": name, "folder": folder}) for name, folder in columns.items()]
    for rule, verdict in zip(rules, judge_rules(rules, claim.table, results), strict=True):
        if claim.optional and verdict.word == NO_RECORDS:
            continue
        of_column = claim.model_copy(update={"setup": claim.setup.replace("{column}", rule.column), "rule": rule})
        study, report = find_study(results / rule.folder) if rule.folder else None, f"{rule.folder}/report/report.md"
        ran = "" if study is None else what_ran(study.comparison)
        link = report if rule.folder and (results / report).is_file() else ""
        yield Judged(claim=of_column, verdict=verdict, ran=ran, link=link)


def count_words(judged: Sequence[Judged]) -> str:
    """How many claims got which verdict."""
    counts = Counter(one.verdict.word for one in judged)
    return ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])


def summarise(judged: Sequence[Judged]) -> str:
    """How many of those that runs decide got which verdict."""
    by_runs = [one for one in judged if one.by_runs]
    agreed = sum(one.verdict.as_claimed is True for one in by_runs)
    return f"{len(by_runs)} claims by runs: {count_words(by_runs)}; {agreed} as claimed"


def claims_markdown(judged: Sequence[Judged]) -> str:
    """Claims that runs decide, by paper; what is true by construction; what cannot be run here."""
    lines = [f"# {TITLE}", "", *(part for text in LEAD for part in (text, "")), f"**{summarise(judged)}.**", ""]
    for paper, title in PAPERS.items():
        some = [one for one in judged if one.claim.paper == paper and one.by_runs]
        lines += _section(title, f"{count_words(some)}.", list(map(_cells, some)))
    for kind, (title, text) in OTHERS.items():
        rows = [_cells(one) for one in judged if one.claim.rule.kind == kind]
        lines += _section(title, text, [{k: cell for k, cell in row.items() if k not in ONLY_OF_RUNS} for row in rows])
    return "\n".join(lines)


def _section(title: str, text: str, rows: Sequence[dict[str, str]]) -> list[str]:
    table = [f"| {' | '.join(row)} |" for row in (*rows[:1], *(row.values() for row in rows))]
    rule = ["|:---" * len(row) + "|" for row in rows[:1]]
    return [f"## {title}", "", text, "", *table[:1], *rule, *table[1:], ""]


def _cells(one: Judged) -> dict[str, str]:
    known = {
        "claim": one.claim.claim, "the paper's set-up": one.claim.setup, "what ran": one.ran,
        "where": one.claim.table, "verdict": one.verdict.word, "evidence": one.verdict.evidence,
    }  # fmt: skip
    cells = {name: plain_markdown(text) for name, text in known.items()}
    if one.verdict.as_claimed is not None:
        said = (", as claimed" if one.verdict.as_claimed else ", not as claimed") if one.by_runs else ""
        cells["verdict"] = f"**{cells['verdict']}**{said}"
    return cells | {"records": f"[table]({one.link})" if one.link else ""}
