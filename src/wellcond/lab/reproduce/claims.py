"""`judge_claims`: the papers' claims one by one, decided by rule from stored records."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from wellcond.lab.reproduce.claim_rules import NO_RECORDS, Rule, Verdict, find_analysis, judge_rule
from wellcond.lab.reproduce.what_ran import what_ran
from wellcond.lab.settings import Settings, explain, read_yaml

Group = Literal["runs", "construction", "needs"]


class Claim(Settings):
    """One claim, or one for each column of a table."""

    paper: Literal["C", "S"]
    claim: str
    setup: str
    """What the paper ran it on."""
    table: str
    """Where it is made; an id of `reproduce` wherever there is one."""
    rule: Rule
    each: dict[str, str] = Field(default_factory=dict)
    """Folder of records by column."""
    optional: bool = False
    """Left out while there are no records."""

    @property
    def group(self) -> Group:
        """Which table it belongs to."""
        return {"computed": "construction", "needs": "needs"}.get(self.rule.kind, "runs")  # type: ignore[return-value]


class Judged(Settings):
    """A claim and what became of it."""

    paper: str
    claim: str
    setup: str
    ran: str
    """What our runs were, from their records; empty if nothing ran."""
    table: str
    group: Group
    verdict: Verdict
    link: str
    """Report of the records, from their folder; empty if there is none."""


@functools.cache
def read_claims() -> tuple[Claim, ...]:
    """All of them, in the order in which they are shown.

    Example:
        >>> read_claims()[0].table
        'C-T1'
    """
    file = resources.files("wellcond.lab.reproduce") / "claims.yaml"
    data = read_yaml(file.read_text(encoding="utf-8"), file.name)
    found = []
    for at, fields in enumerate(data):
        try:
            found.append(Claim.model_validate(fields))
        except ValidationError as error:
            raise explain(error, f"{file.name}: claim {at + 1}", fields) from error
    return tuple(found)


def judge_claims(results: Path) -> list[Judged]:
    """Every claim with its verdict; the same records give the same verdicts.

    Args:
        results: folder of committed records, laid out as results/.
    """
    return [judged for claim in read_claims() for judged in _judge(claim, results)]


def _judge(claim: Claim, results: Path) -> Iterator[Judged]:
    for column, folder in (claim.each or {claim.rule.column: claim.rule.folder}).items():
        rule = claim.rule.model_copy(update={"column": column, "folder": folder})
        verdict = judge_rule(rule, claim.table, results)
        if claim.optional and verdict.word == NO_RECORDS:
            continue
        analysis = find_analysis(results / folder) if folder else None
        report = f"{folder}/report/report.md"
        yield Judged(
            paper=claim.paper,
            claim=claim.claim,
            setup=claim.setup.replace("{column}", column),
            ran="" if analysis is None else what_ran(analysis.comparison),
            table=claim.table,
            group=claim.group,
            verdict=verdict,
            link=report if folder and (results / report).is_file() else "",
        )
