"""The papers' claims one by one, decided by rule from stored records."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from wellcond.lab.records import Metric
from wellcond.lab.report import statistics
from wellcond.lab.report.analysis import Analysis
from wellcond.lab.report.epochs_to_match import FEWEST_FOR_EXACT, Matching
from wellcond.lab.report.statistics import ALPHA, PairedDifference, judge
from wellcond.lab.report.table import show_seeds
from wellcond.lab.reproduce.catalogue import catalogue, read_paper_file
from wellcond.lab.reproduce.studies import StoredStudy, find_study, what_ran, what_was_built
from wellcond.lab.settings import Settings

OTHERS = ("proved", "needs")
"""Kinds of rules of claims that no runs decide."""
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

    @property
    def quantity(self) -> str:
        """What is compared; the score of a comparison is named by its records."""
        names = {"kappa": f"{QUANTITY}, {self.moment}", "saving": "epochs", "below": "papers' bound"}
        return names.get(self.kind, "score")

    @property
    def runs(self) -> tuple[object, ...]:
        """The set of runs that decides it: comparison, methods and quantity."""
        return self.quantity, self.folder, self.method, self.over, self.over_folder, self.among


class Claim(Settings):
    """One claim, or one for each column of a table."""

    paper: Literal["C", "S"]
    claim: str = ""
    over: dict[str, str] = {}
    """Claims in its place, by the method over which each claims a gain."""
    setup: str
    """What the paper ran it on."""
    table: str
    """Where it is made; an id of `reproduce` wherever there is one."""
    rule: Rule
    data: tuple[str, ...] = ()
    """What the paper trained on, by the paper's names; none if it names no data."""
    each: dict[str, str] = {}
    """Folder of records by column."""
    optional: bool = False
    """Left out while there are no records."""

    def of_methods(self) -> list[Claim]:
        """The claim for each method that it says is beaten; the paper has no such row of a control."""
        found = []
        for over, text in self.over.items():
            control = over in ("gaussian", STRONG)
            rule = self.rule.model_copy(update={"over": over, "base_row": "default" if control else over})
            setup = f"{self.setup}; no such control" if over == "gaussian" else self.setup
            changes = {"claim": text, "setup": setup, "rule": rule, "optional": over == STRONG, "over": {}}
            found.append(self.model_copy(update=changes))
        return found or [self]

    def of_columns(self) -> list[Claim]:
        """The claim for each of its columns."""
        found = []
        for column, folder in (self.each or {self.rule.column: self.rule.folder}).items():
            rule = self.rule.model_copy(update={"column": column, "folder": folder})
            setup, *data = (text.replace("{column}", column) for text in (self.setup, *self.data))
            found.append(self.model_copy(update={"setup": setup, "data": tuple(data), "rule": rule, "each": {}}))
        return found


class ClaimsFile(Settings):
    """What ships as `papers/claims.yaml`."""

    data: dict[str, tuple[str, ...]]
    """Data sets of the papers, and what the same data are called in records; others are not in any record."""
    claims: tuple[Claim, ...]


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
    """File of the records, from their folder; empty if there is none."""
    stand_in: bool = False
    """Whether our runs were on other data than the paper's; such a row is shown and not counted."""
    same_runs: Claim | None = None
    """The claim under which the same runs are judged, if it is another one; the verdict is the one given there."""

    @property
    def by_runs(self) -> bool:
        """Whether runs decide it."""
        return self.claim.rule.kind not in OTHERS

    @property
    def counted(self) -> bool:
        """Whether it is in the counts: runs on the paper's own data, judged here and nowhere else."""
        return self.by_runs and not self.stand_in and self.same_runs is None


@functools.cache
def read_claims_file() -> ClaimsFile:
    """The claims, and the names of the papers' data in records."""
    return ClaimsFile.model_validate(read_paper_file("claims"))


def read_claims() -> tuple[Claim, ...]:
    """All claims, in the order in which they are shown."""
    return tuple(claim for written in read_claims_file().claims for claim in written.of_methods())


def judge_claims(results: Path) -> list[Judged]:
    """Every claim with its verdict, by the committed records of a folder; the same records give the same verdicts.

    A set of runs is judged once: under the first claim on whose own data it was run, or else under the first one that
    it stands in for.
    """
    rows = [row for claim in read_claims() for row in claim.of_columns()]
    studies = [find_study(results / row.rule.folder) if row.rule.folder else None for row in rows]
    stand_ins = [is_stand_in(row, study) for row, study in zip(rows, studies, strict=True)]
    homes: dict[tuple[object, ...], Claim] = {}
    for row, _ in sorted(zip(rows, stand_ins, strict=True), key=lambda pair: pair[1]):
        if row.rule.kind not in OTHERS:
            homes.setdefault(row.rule.runs, row)
    verdicts = dict(zip(homes, judge_rules([(home.rule, home.table) for home in homes.values()], results), strict=True))
    found = []
    for row, study, stand_in in zip(rows, studies, stand_ins, strict=True):
        verdict = verdicts.get(row.rule.runs) or Verdict("", row.rule.why)
        if row.optional and verdict.word == "no records":
            continue
        home = homes.get(row.rule.runs, row)
        ran = "; ".join([what_was_built(study.comparison), *what_ran(study.comparison)]) if study else ""
        file = f"{row.rule.folder}.jsonl"
        link = file if ran and (results / file).is_file() else ""
        found.append(Judged(row, verdict, ran, link, stand_in, home if home is not row else None))
    return found


def is_stand_in(claim: Claim, study: StoredStudy | None) -> bool:
    """Whether runs are on other data than the paper's; a claim that names no data is about any."""
    known = read_claims_file().data
    if study is None:
        return any(name not in known for name in claim.data)
    ran_on = study.comparison.runs[0].part("data").get("name")
    return any(ran_on not in known.get(name, ()) for name in claim.data)


Test = tuple[float | None, Callable[[float | None], Verdict]]
"""The p of a rule before correction, None where there is nothing to test, and the verdict from the corrected one."""


def judge_rules(rules: Sequence[tuple[Rule, str]], results: Path) -> list[Verdict]:
    """Decide rules, each with the id of the table that has the paper's numbers, by records below a folder.

    Holm's correction is over all that ask the same question, whatever they ran on: the same quantity of the same two
    methods. So the p of a set of runs does not depend on the claim under which it is shown.
    """
    tests = [_test(rule, table, results) for rule, table in rules]
    families: dict[tuple[str, ...], list[int]] = {}
    for at, (rule, _) in enumerate(rules):
        study = find_study(results / rule.folder) if rule.quantity == "score" else None
        metric = study.comparison.result.name if study else ""
        families.setdefault((rule.quantity, metric, rule.method, rule.over), []).append(at)
    verdicts: dict[int, Verdict] = {}
    for members in families.values():
        corrected = statistics.holm([tests[at][0] for at in members])
        verdicts |= {at: tests[at][1](p) for at, p in zip(members, corrected, strict=True)}
    return [verdicts[at] for at in range(len(tests))]


def _test(rule: Rule, table: str, results: Path) -> Test:
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
    difference: PairedDifference,
    metric: Metric,
    base: Mapping[int, float],
    paper: float | None,
    lost: tuple[int, int] = (0, 0),
    claimed: Word = "better",
) -> Verdict:
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
