"""The claims with their verdicts as markdown, HTML, JSON and a table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wellcond.files import write_atomically
from wellcond.lab.report.render import render
from wellcond.lab.report.table import Table, plain_markdown
from wellcond.lab.reproduce.claim_rules import BETTER, EQUAL, FAILS, HOLDS, NEEDS, NO_RECORDS, UNDECIDED, WORSE
from wellcond.lab.reproduce.claims import Judged

PAPERS = {
    "C": "Paper C: Conditioned Initialization for Attention",
    "S": "Paper S: Spectral Conditioning of Attention Improves Transformer Performance",
}
WORDS = (BETTER, WORSE, EQUAL, UNDECIDED, HOLDS, FAILS, NO_RECORDS, NEEDS)
TITLE = "The papers' claims at CPU size"
LEAD = (
    "Made by `wellcond claims results` from the committed records; no verdict is written by hand.",
    "A row says what ran; the set-up of the paper, which is a hundred to a thousand times as large, has a column of "
    "its own. A claim that fails here may hold there, and one that holds here is not confirmed there.",
    "Verdicts are on the first method against the second: better or worse (p < 0.05, paired t test by seed, Holm's "
    "correction over the methods of the comparison where the second is its baseline), equal (both one-sided tests at "
    "5 % against a margin), or undecided. The margin is half of the paper's gain, carried over as a share of the "
    "baseline's error, since points of other data mean something else; without a number of the paper it is one "
    "standard deviation of the baseline over seeds. Epochs are counts and have an exact test (all flips of sign, "
    "which takes six seeds), in shares of the epochs beyond what the default itself saves. What so many seeds show is "
    "a difference that they find with a power of 80 %.",
)
COLUMNS = ("claim", "the paper's set-up", "what ran", "where", "verdict", "evidence", "records")
SHORT = ("claim", "the paper's set-up", "where", "verdict", "evidence")
GROUPS = {
    "construction": (
        "True by construction",
        "These follow from definitions. They are computed when this page is made, and no run says anything about them.",
    ),
    "needs": (
        "Not decided at this size",
        "These need ImageNet, other large data, or up to billions of parameters.",
    ),
}
STYLES = {BETTER: "yes", HOLDS: "yes", WORSE: "no", FAILS: "no", EQUAL: "no"}


def write_claims(judged: Sequence[Judged], output: Path, results: Path) -> None:
    """Write the markdown and, beside it, the HTML; links lead from there to the folder `results` of the records."""
    output.parent.mkdir(parents=True, exist_ok=True)
    way = Path(os.path.relpath(results, output.parent))
    judged = [one.model_copy(update={"link": (way / one.link).as_posix()}) if one.link else one for one in judged]
    write_atomically(output, claims_markdown(judged))
    write_atomically(output.with_suffix(".html"), claims_html(judged))


def count_words(judged: Sequence[Judged]) -> str:
    """How many claims got which verdict."""
    counts = Counter(one.verdict.word for one in judged)
    return ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])


def describe(one: Judged) -> str:
    """A verdict, and whether the paper says so."""
    said = {None: "", True: ", as claimed", False: ", not as claimed"}[one.verdict.as_claimed]
    return one.verdict.word + (said if one.group == "runs" else "")


def claims_table(judged: Sequence[Judged]) -> Table:
    """For a terminal."""
    rows = tuple((one.paper, one.table, one.claim, one.ran, describe(one), one.verdict.evidence) for one in judged)
    header = ("paper", "where", "claim", "what ran", "verdict", "evidence")
    return Table("claims", TITLE, header, rows, (f"{_counted(judged)}.",), frozenset(range(6)))


def _counted(judged: Sequence[Judged]) -> str:
    by_runs = [one for one in judged if one.group == "runs"]
    agreed = sum(one.verdict.as_claimed is True for one in by_runs)
    return f"{len(by_runs)} claims by runs: {count_words(by_runs)}; {agreed} as claimed"


def _sections(judged: Sequence[Judged]) -> Iterator[tuple[str, str, Sequence[Judged], tuple[str, ...]]]:
    """Title, text, claims and columns of each table."""
    for paper, title in PAPERS.items():
        some = [one for one in judged if one.paper == paper and one.group == "runs"]
        yield title, f"{count_words(some)}.", some, COLUMNS
    for group, (title, text) in GROUPS.items():
        yield title, text, [one for one in judged if one.group == group], SHORT


def _cells(one: Judged, columns: Sequence[str]) -> dict[str, str]:
    known = {
        "claim": one.claim, "the paper's set-up": one.setup, "what ran": one.ran, "where": one.table,
        "verdict": describe(one), "evidence": one.verdict.evidence, "records": one.link,
    }  # fmt: skip
    return {name: known[name] for name in columns}


def claims_markdown(judged: Sequence[Judged]) -> str:
    """Claims that runs decide, by paper; what is true by construction; what cannot be run here."""
    lines = [f"# {TITLE}", "", *(part for text in LEAD for part in (text, "")), f"**{_counted(judged)}.**", ""]
    for title, text, some, columns in _sections(judged):
        lines += [f"## {title}", "", text, "", f"| {' | '.join(columns)} |", "|:---" * len(columns) + "|"]
        for one in some:
            cells = {name: plain_markdown(text) for name, text in _cells(one, columns).items()}
            word = one.verdict.word
            if word in STYLES:
                cells["verdict"] = cells["verdict"].replace(word, f"**{word}**", 1)
            if "records" in cells:
                cells["records"] = f"[table]({one.link})" if one.link else ""
            lines.append(f"| {' | '.join(cells.values())} |")
        lines.append("")
    return "\n".join(lines)


def claims_html(judged: Sequence[Judged]) -> str:
    """One page that loads nothing.

    Raises: MissingExtraError if jinja2 is not installed.
    """
    counts = Counter(one.verdict.word for one in judged if one.group == "runs")
    sections = [
        {
            "title": title, "text": text, "columns": columns,
            "rows": [
                {"cells": _cells(one, columns), "look": STYLES.get(one.verdict.word, "open")} for one in some
            ],
        }
        for title, text, some, columns in _sections(judged)
    ]  # fmt: skip
    tiles = [(word, counts[word]) for word in WORDS if counts[word]]
    return render("claims.html", title=TITLE, lead=LEAD, tiles=tiles, sections=sections)


def claims_json(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Plain data."""
    return [one.model_dump(mode="json") for one in judged]
