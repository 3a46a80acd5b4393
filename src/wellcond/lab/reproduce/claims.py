"""The papers' claims one by one, decided by rule from stored records; as markdown."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from wellcond.lab.report import statistics
from wellcond.lab.report.analysis import Analysis
from wellcond.lab.report.match import FEWEST_FOR_EXACT, Matching
from wellcond.lab.report.records import Metric
from wellcond.lab.report.statistics import ALPHA, PairedDifference, judge
from wellcond.lab.report.table import Cell, Table, plain_markdown, show_seeds, without_empty_columns
from wellcond.lab.reproduce.catalogue import catalogue, read_paper_file
from wellcond.lab.reproduce.stored import find_study, what_ran, what_was_built
from wellcond.lab.settings import Settings

LEAD = (
    "# The papers' claims at CPU size",
    "Made by `wellcond claims results` from the committed records; no verdict on runs is written by hand.",
    "A row says what ran; the set-up of the paper, which is a hundred to a thousand times as large, has a column of "
    "its own. A claim that fails here may hold there, and one that holds here is not confirmed there.",
    "Verdicts are on the first method against the second: better or worse (p < 0.05, paired t test by seed, Holm's "
    "correction over the rows of one claim, which are one question), equal (both one-sided tests at 5 % against a "
    "margin), or undecided. The margin is half of the paper's gain, carried over as a share of the baseline's error, "
    "since points of other data mean something else; without a number of the paper it is one standard deviation of "
    "the baseline over seeds. Epochs are counts and have an exact test (all flips of sign, which takes six seeds; "
    "equal is less than half of what the paper saves), in shares of the epochs beyond what the default itself saves. "
    "What so many seeds show is a difference that they find with a power of 80 %.",
)
PAPERS = {
    "C": "Paper C: Conditioned Initialization for Attention",
    "S": "Paper S: Spectral Conditioning of Attention Improves Transformer Performance",
}
OTHERS = {
    "proved": ("Decided by proof", "No run says anything about these; the tests that are named prove or refute them."),
    "needs": ("Not decided at this size", "These need ImageNet, other large data, or up to billions of parameters."),
}
"""Claims that no runs decide, by the kind of their rule."""
STRONG = "strong default"
"""The default whose tokens are scaled as well as a search could: the baseline of a comparison that has one."""
QUANTITY = "pseudo_condition_number"
"""Column of measurements: kappa of the Jacobian over its non-zero spectrum."""
ORDERS = Metric("orders of magnitude", higher_is_better=False, percent=False)

Word = Literal["better", "worse", "equal", "undecided", "holds", "fails", "no records", ""]
"""In the order in which they are counted; none where no runs decide."""


class Rule(Settings):
    """How a claim is decided; which fields count depends on the kind."""

    kind: Literal["gain", "kappa", "saving", "below", "best", "same", "proved", "needs"]
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
    why: str = ""
    """What is known of a claim that no runs decide."""


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


@dataclass(frozen=True)
class Verdict:
    """What became of a claim, and why."""

    word: Word
    evidence: str
    as_claimed: bool | None = None
    """None while nothing is decided."""


@dataclass(frozen=True)
class Judged:
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
    found = []
    for claim in read_claims():
        columns = claim.each or {claim.rule.column: claim.rule.folder}
        rules = [claim.rule.model_copy(update={"column": name, "folder": folder}) for name, folder in columns.items()]
        for rule, verdict in zip(rules, judge_rules(rules, claim.table, results), strict=True):
            if claim.optional and verdict.word == "no records":
                continue
            of_column = claim.model_copy(update={"setup": claim.setup.replace("{column}", rule.column), "rule": rule})
            study = find_study(results / rule.folder) if rule.folder else None
            ran = "; ".join([what_was_built(study.comparison), *what_ran(study.comparison)]) if study else ""
            report = f"{rule.folder}/report/report.md"
            found.append(Judged(of_column, verdict, ran, report if ran and (results / report).is_file() else ""))
    return found


Test = tuple[float | None, Callable[[float | None], Verdict]]
"""The p of a rule before correction, None where there is nothing to test, and the verdict from the corrected one."""


def judge_rules(rules: Sequence[Rule], table: str, results: Path) -> list[Verdict]:
    """Decide a claim for each of its columns, which are one question: Holm's correction is over them.

    Each rule has a folder of its own below that of the committed records; the paper's numbers are those of the table.
    """
    tests = [_test(rule, table, results) for rule in rules]
    corrected = statistics.holm([p for p, _ in tests])
    return [verdict_from(p) for (_, verdict_from), p in zip(tests, corrected, strict=True)]


def _test(rule: Rule, table: str, results: Path) -> Test:
    if rule.kind in OTHERS:
        return _without_test("", rule.why)
    study = find_study(results / rule.folder)
    if study is None:
        return _without_test("no records", f"nothing in {rule.folder}")
    if rule.kind in ("gain", "same"):
        return _gain(rule, study.analysis, results, table)
    return {"kappa": _kappa, "saving": _saving, "below": _below, "best": _best}[rule.kind](rule, study.analysis)


def _without_test(word: Word, evidence: str, as_claimed: bool | None = None) -> Test:
    return None, lambda _: Verdict(word, evidence, as_claimed)


def _gain(rule: Rule, analysis: Analysis, results: Path, table: str) -> Test:
    """A gain within a comparison, or over a method of another one."""
    metric, baseline = analysis.comparison.result, analysis.comparison.baseline
    over = baseline if rule.over == STRONG and baseline.startswith("tokens(") else rule.over
    other = find_study(results / (rule.over_folder or rule.folder))
    own, base = analysis.comparison.results(rule.method), other.comparison.results(over) if other else {}
    difference = statistics.compare_paired(rule.method, own, over, base, higher_is_better=metric.higher_is_better)
    if other is None or not difference.count:
        where = f" in {rule.folder} and {rule.over_folder}" if rule.over_folder else f" and {rule.over}"
        return _without_test("no records", f"no records of {rule.method}{where}")
    lost = analysis.outcomes(rule.method)["diverged"], other.analysis.outcomes(over)["diverged"]
    part = catalogue().entries[table].parts[0] if rule.row else None
    paper = part.share(rule.row, rule.base_row, rule.column) if part else None
    claimed: Word = "equal" if rule.kind == "same" else "better"
    return difference.p, lambda p: decide(replace(difference, p_holm=p), metric, base, paper, lost, claimed)


def decide(
    difference: PairedDifference, metric: Metric, base: Mapping[int, float], paper: float | None,
    lost: tuple[int, int] = (0, 0), claimed: Word = "better",
) -> Verdict:  # fmt: skip
    """Judge a corrected difference, given the values of the second method and diverged runs of both.

    The paper's gain is a share of its baseline's error, None if it has no number; `claimed` agrees with the paper.
    """
    second = statistics.Summary(dict(base))
    error = metric.error(second.mean)
    margin = abs(paper) * error / 2 if paper is not None and math.isfinite(error) else second.std
    verdict = judge(difference, margin, diverged=lost[0], baseline_diverged=lost[1])
    said = [f"{metric.show(difference.mean, sign=True)}{metric.unit or f' {metric.name}'}"]
    if difference.interval is not None and difference.std:
        said[0] += f" {statistics.interval_cell(difference.interval, metric)[0]}"
    said[0] += f", {show_seeds(difference.count)}"
    said[0] += f", p {statistics.show_p(difference.p_holm)}" if difference.p_holm is not None else ""
    if paper is not None and math.isfinite(error) and error:
        other = difference.baseline if len(difference.baseline) <= 24 else "the other"
        said.append(f"{difference.mean / error:+.1%} of the error of {other}, the paper's {paper:+.1%}")
    said += [verdict.reason] if verdict.reason else []
    if verdict.kind in ("equal", "undecided") and difference.count > 1 and margin > 0:
        said.append(f"margin {metric.show(margin)}")
    least = statistics.smallest_detectable(difference.std, difference.count)
    if verdict.kind == "undecided" and math.isfinite(least):
        said.append(f"so many seeds show {metric.show(least)}")
    return Verdict(verdict.kind, "; ".join(said), None if verdict.kind == "undecided" else verdict.kind == claimed)


def _kappa(rule: Rule, analysis: Analysis) -> Test:
    """On log10, paired by seed; positive is lower."""
    (own, singular), (base, base_singular) = (_measured(analysis, name, rule) for name in (rule.method, rule.over))
    difference = statistics.compare_paired(rule.method, own, rule.over, base, higher_is_better=False)
    if not difference.count:
        return _without_test("no records", f"no measurements of {rule.method} and {rule.over}")
    factor = 10**difference.mean
    said = f"lower by a factor of {factor:.3g}" if factor >= 1 else f"higher by a factor of {1 / factor:.3g}"
    if singular or base_singular:
        said += f"; infinite and in no mean: {singular} of {rule.method}, {base_singular} of {rule.over}"

    def decide_kappa(p: float | None) -> Verdict:
        verdict = decide(replace(difference, p_holm=p), ORDERS, base, None)
        evidence = f"{said}: {verdict.evidence}"
        if singular != base_singular and verdict.word == ("better" if singular > base_singular else "worse"):
            return Verdict("undecided", evidence)
        return replace(verdict, evidence=evidence)

    return difference.p, decide_kappa


def _measured(analysis: Analysis, method: str, rule: Rule) -> tuple[dict[int, float], int]:
    """Mean log10 over the finite values of all heads at the first or last measurement, by seed; how many are not."""
    means, infinite = {}, 0
    for table in analysis.tables(method):
        steps = table.columns["step"][~np.isnan(table.columns[QUANTITY])]
        if len(steps):
            values = np.array(table.at(QUANTITY, steps.max() if rule.moment == "last" else steps.min()))
            infinite += int(np.isinf(values).sum())
            if len(usable := values[np.isfinite(values) & (values > 0)]):
                means[table.run.seed] = float(np.log10(usable).mean())
    return means, infinite


def _saving(rule: Rule, analysis: Analysis) -> Test:
    """Share of epochs saved beyond the baseline's own, by the exact test for counts.

    A seed that never gets there saves nothing.
    """
    own = analysis.matchings.get(rule.method, Matching({}, None)).by_seed
    base = analysis.matchings[analysis.comparison.baseline].by_seed
    shared = sorted(set(own) & set(base))
    differences = [float(np.nan_to_num(own[seed].saving) - np.nan_to_num(base[seed].saving)) for seed in shared]
    if not differences:
        return _without_test("no records", f"no records of {rule.method}")

    def decide_saving(p: float | None) -> Verdict:
        mean, seeds = math.fsum(differences) / len(differences), show_seeds(len(differences))
        shown = "tied in every seed" if p is None else f"exact p {statistics.show_p(p)}"
        evidence = f"{mean:+.0%} of the epochs, {seeds}, {shown}; the paper has {rule.at_least:.0%}"
        if len(differences) < FEWEST_FOR_EXACT:
            least = min(1.0, 2 / 2 ** len(differences))
            return Verdict("undecided", f"{evidence}; {seeds} cannot have p below {least:.2g}")
        if p is not None and p < ALPHA:
            return Verdict("better" if mean >= 0 else "worse", evidence, mean >= rule.at_least)
        equal = statistics.sign_flip_equality_p(differences, rule.at_least / 2)
        evidence += f"; less than half of it: p {statistics.show_p(equal)}"
        return Verdict("equal", evidence, False) if equal < ALPHA else Verdict("undecided", evidence)

    return statistics.sign_flip_p(differences), decide_saving


def _below(rule: Rule, analysis: Analysis) -> Test:
    """Every measurement of a head against the papers' bound."""
    with np.errstate(divide="ignore"):
        heads = [table.columns for tables in analysis.heads.values() for table in tables]
        gaps = [columns["papers_bound_log10"] - np.log10(columns[QUANTITY]) for columns in heads]
    every = np.concatenate(gaps or [np.empty(0)])
    known, finite = every[~np.isnan(every)], every[np.isfinite(every)]
    if not len(known):
        return _without_test("no records", "no measurements")
    above = int((known < 0).sum())
    evidence = (
        f"{above} of {len(known)} measurements of a head are above it; it is 10^{finite.min():.0f} to "
        f"10^{finite.max():.0f} times as large as what is measured, so that this says little, and it is no bound in "
        "general (erratum E4)"
    )
    return _without_test("fails" if above else "holds", evidence, not above)


def _best(rule: Rule, analysis: Analysis) -> Test:
    """The best of the claimed winners against every other member of the sweep."""
    metric = analysis.comparison.result
    known = {name: analysis.summaries[name] for name in rule.among if name in analysis.summaries}
    known = {name: summary for name, summary in known.items() if summary.count}
    winners, rest = ([name for name in known if (name in rule.best) is wins] for wins in (True, False))
    if not winners or not rest:
        return _without_test("no records", "no records of the sweep")
    top = (max if metric.higher_is_better else min)(winners, key=lambda name: known[name].mean)
    own, better = known[top], metric.higher_is_better
    others = statistics.correct(
        statistics.compare_paired(top, own.values, name, known[name].values, higher_is_better=better) for name in rest
    )
    kinds = {other.baseline: judge(other, own.std).kind for other in others}
    listed = ", ".join(f"{name} {metric.show(summary.mean)}" for name, summary in known.items())
    evidence = f"{listed}; {show_seeds(own.count)}"
    behind, open_ = ([name for name, kind in kinds.items() if kind == word] for word in ("worse", "undecided"))
    if behind:
        return _without_test("worse", f"{evidence}; behind {', '.join(behind)}", False)
    if open_:
        return _without_test("undecided", f"{evidence}; not told apart from {', '.join(open_)}")
    if "equal" in kinds.values():
        return _without_test("equal", f"{evidence}; margin {metric.show(own.std)}", False)
    return _without_test("better", evidence, True)


def summarise(judged: Sequence[Judged]) -> str:
    """How many of those that runs decide got which verdict."""
    by_runs = [one for one in judged if one.by_runs]
    agreed = sum(one.verdict.as_claimed is True for one in by_runs)
    return f"{len(by_runs)} claims by runs: {_count_words(by_runs)}; {agreed} as claimed"


def _count_words(judged: Sequence[Judged]) -> str:
    counts = Counter(one.verdict.word for one in judged)
    return ", ".join(f"{counts[word]} {word}" for word in get_args(Word) if counts[word])


def claims_markdown(judged: Sequence[Judged]) -> str:
    """Claims that runs decide, by paper; what is decided by proof; what cannot be run here."""
    parts = [*LEAD, f"**{summarise(judged)}.**"]
    for paper, title in PAPERS.items():
        some = [one for one in judged if one.claim.paper == paper and one.by_runs]
        parts += [f"## {title}", f"{_count_words(some)}.", _table(some)]
    for kind, (title, text) in OTHERS.items():
        parts += [f"## {title}", text, _table([one for one in judged if one.claim.rule.kind == kind])]
    return "\n\n".join(parts) + "\n"


def _table(judged: Sequence[Judged]) -> str:
    rows: list[dict[str, Cell]] = [
        {
            "claim": plain_markdown(one.claim.claim), "the paper's set-up": plain_markdown(one.claim.setup),
            "what ran": plain_markdown(one.ran), "where": plain_markdown(one.claim.table),
            "verdict": _show_verdict(one.verdict), "evidence": plain_markdown(one.verdict.evidence),
            "records": f"[table]({one.link})" if one.link else "",
        }
        for one in judged
    ]  # fmt: skip
    table = without_empty_columns(Table.of("claims", "", rows))
    first, *rest = (f"| {' | '.join(cells)} |" for cells in (table.header, *table.rows))
    return "\n".join([first, "|:---" * len(table.header) + "|", *rest])


def _show_verdict(verdict: Verdict) -> str:
    if verdict.as_claimed is None:
        return verdict.word
    return f"**{verdict.word}**, {'as claimed' if verdict.as_claimed else 'not as claimed'}"
