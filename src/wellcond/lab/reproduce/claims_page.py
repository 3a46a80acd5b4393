"""The verdicts on the papers' claims as markdown: what is counted, stand-ins, what is proved, what cannot be run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from wellcond.lab.report.table import Cell, Table, plain_markdown, without_empty_columns
from wellcond.lab.reproduce.claims import Judged, Word

LEAD = (
    "# The papers' claims at CPU size",
    "Made by `wellcond claims results` from the committed records; no verdict on runs is written by hand.",
    "**What counts.** A claim is counted if our runs were on the data set that the paper names, or if it names none; a "
    "short form of that data set, or our own generator of it, is the same data. Everything else is a *stand-in on "
    "other data*: shown in a table of its own, and in no count. A set of runs (one comparison, two methods, one "
    "quantity) is judged once, under the claim on whose data it was run; other claims that it could answer refer "
    "to it.",
    "A row says what ran; the set-up of the paper, which is a hundred to a thousand times as large, has a column of "
    "its own. A claim that fails here may hold there, and one that holds here is not confirmed there.",
    "**Verdicts** are on the first method against the second: better or worse (p < 0.05, paired t test by seed, Holm's "
    "correction), equal (both one-sided tests at 5 % against a margin), or undecided. Holm's correction is over every "
    "set of runs on this page that asks the same question, which is the same quantity of the same two methods, "
    "whichever row or table shows it. The margin is half of the paper's gain, carried over as a share of the "
    "baseline's error, since points of other data mean something else; without a number of the paper it is one "
    "standard deviation of the baseline over seeds. Epochs are counts and have an exact test (all flips of sign, which "
    "takes six seeds; equal is less than half of what the paper saves), in shares of the epochs beyond what the "
    "default itself saves. What so many seeds show is a difference that they find with a power of 80 %.",
)
PAPERS = {
    "C": "Paper C: Conditioned Initialization for Attention",
    "S": "Paper S: Spectral Conditioning of Attention Improves Transformer Performance",
}
STAND_INS = "Stand-ins on other data, not counted"
OTHER_SECTIONS = {
    "proved": ("Decided by proof", "No run says anything about these; the tests that are named prove or refute them."),
    "needs": ("Not decided at this size", "These need ImageNet, other large data, or up to billions of parameters."),
}
"""Claims that no runs decide, by the kind of their rule."""


def summarise(judged: Sequence[Judged]) -> str:
    """How many of those that count got which verdict, and how many are shown without being counted."""
    counted = [one for one in judged if one.counted]
    agreed = sum(one.verdict.as_claimed is True for one in counted)
    others = sum(one.by_runs for one in judged) - len(counted)
    return (
        f"{len(counted)} claims by runs on the paper's own data: {_count_words(counted)}; {agreed} as claimed. "
        f"{others} rows are stand-ins on other data and are not counted"
    )


def _count_words(judged: Sequence[Judged]) -> str:
    counts = Counter(one.verdict.word for one in judged)
    return ", ".join(f"{counts[word]} {word}" for word in get_args(Word) if counts[word])


def claims_markdown(judged: Sequence[Judged]) -> str:
    """Claims that runs decide, by paper, then stand-ins; what is decided by proof; what cannot be run here."""
    parts = [*LEAD, f"**{summarise(judged)}.**"]
    for paper, title in PAPERS.items():
        some = [one for one in judged if one.claim.paper == paper and one.by_runs]
        counted, others = ([one for one in some if one.counted is wanted] for wanted in (True, False))
        agreed = sum(one.verdict.as_claimed is True for one in counted)
        parts += [f"## {title}", f"{_count_words(counted)}; {agreed} as claimed.", _table(counted)]
        if others:
            parts += [f"### {STAND_INS}", _table(others)]
    for kind, (title, text) in OTHER_SECTIONS.items():
        parts += [f"## {title}", text, _table([one for one in judged if one.claim.rule.kind == kind])]
    return "\n\n".join(parts) + "\n"


def _table(judged: Sequence[Judged]) -> str:
    rows: list[dict[str, Cell]] = [
        {
            "claim": plain_markdown(one.claim.claim),
            "the paper's set-up": plain_markdown(one.claim.setup),
            "what ran": plain_markdown(one.ran),
            "where": plain_markdown(one.claim.table),
            "verdict": _show_verdict(one),
            "evidence": plain_markdown(_show_evidence(one)),
            "records": f"[runs]({one.link})" if one.link else "",
        }
        for one in judged
    ]
    table = without_empty_columns(Table.of("claims", "", rows))
    first, *rest = (f"| {' | '.join(cells)} |" for cells in (table.header, *table.rows))
    return "\n".join([first, "|:---" * len(table.header) + "|", *rest])


def _show_verdict(one: Judged) -> str:
    """The word; only a row that is counted says whether that is what the paper claims."""
    if one.verdict.as_claimed is None or not one.counted:
        return one.verdict.word
    return f"**{one.verdict.word}**, {'as claimed' if one.verdict.as_claimed else 'not as claimed'}"


def _show_evidence(one: Judged) -> str:
    if one.same_runs is None:
        return one.verdict.evidence
    return f"the same runs as under {one.same_runs.table}, {one.same_runs.setup}, where they are judged"
