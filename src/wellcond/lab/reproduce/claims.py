"""The papers' claims one by one, decided by rule from stored records; as markdown."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from wellcond.lab.report.table import plain_markdown
from wellcond.lab.reproduce.catalogue import read_paper_file
from wellcond.lab.reproduce.claim_rules import NO_RECORDS, WORDS, Rule, Verdict, find_analysis, judge_rules
from wellcond.lab.reproduce.stored import what_ran
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
        analysis = find_analysis(results / rule.folder) if rule.folder else None
        ran, report = "" if analysis is None else what_ran(analysis.comparison), f"{rule.folder}/report/report.md"
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
