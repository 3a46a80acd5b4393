"""The claims with their verdicts as markdown, HTML, JSON and a table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wellcond.files import write_atomically
from wellcond.report.markup import Markup, tag
from wellcond.report.style import STYLE
from wellcond.report.table import Table, plain_markdown
from wellcond.reproduce.claim_rules import NO_RECORDS, NOT_REPRODUCED, NOT_TESTABLE, REPRODUCED
from wellcond.reproduce.claims import Judged

PAPERS = {
    "C": "Paper C: Conditioned Initialization for Attention",
    "S": "Paper S: Spectral Conditioning of Attention Improves Transformer Performance",
}
WORDS = (REPRODUCED, NOT_REPRODUCED, NOT_TESTABLE, NO_RECORDS)
TITLE = "The papers' claims at CPU size"
LEAD = (
    "Made by `wellcond claims results` from the committed records; no verdict is written by hand.",
    "These models have a thousandth of the papers' size, or a few (a quarter to a half on the Long Range Arena, a "
    "fortieth in detection), and minutes of training. A claim that fails here may hold there, and one that holds here "
    "is not confirmed there.",
    "A gain is reproduced if it is positive with p < 0.05 (paired t test by seed, Holm's correction over the methods "
    "of its comparison); not reproduced if it is negative with p < 0.05, or if its 95 % interval ends below what the "
    "paper has; otherwise not testable. Savings of epochs (beyond the default's own; a seed that never gets there "
    "saves nothing), W + C against W, and with against without layer norms are single comparisons, which are not "
    "corrected. Tables of `wellcond reproduce` correct over all their cells, so that their p are larger.",
)
COLUMNS = ("claim", "where", "verdict", "evidence", "records")
STYLES = {REPRODUCED: "yes", NOT_REPRODUCED: "no", NOT_TESTABLE: "open", NO_RECORDS: "open"}
EXTRA_STYLE = """
td.yes{color:var(--c2)}td.no{color:var(--bad)}td.open{color:var(--soft)}td.yes,td.no{font-weight:600}
td:nth-child(1),td:nth-child(4){white-space:normal;min-width:16em}caption{display:none}
"""


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


def claims_table(judged: Sequence[Judged]) -> Table:
    """For a terminal."""
    rows = tuple((one.paper, one.table, one.claim, one.verdict.word, one.verdict.evidence) for one in judged)
    header = ("paper", "where", "claim", "verdict", "evidence")
    return Table("claims", TITLE, header, rows, (count_words(judged) + ".",), frozenset(range(5)))


def claims_markdown(judged: Sequence[Judged]) -> str:
    """A section for each paper."""
    lines = [f"# {TITLE}", "", *(part for text in LEAD for part in (text, "")), f"**{count_words(judged)}.**", ""]
    for paper, title in PAPERS.items():
        some = [one for one in judged if one.paper == paper]
        lines += [f"## {title}", "", f"{count_words(some)}.", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|:---" * len(COLUMNS) + "|"]
        for one in some:
            word = f"**{one.verdict.word}**" if one.verdict.word in (REPRODUCED, NOT_REPRODUCED) else one.verdict.word
            link = f"[table]({one.link})" if one.link else ""
            cells = (plain_markdown(one.claim), one.table, word, plain_markdown(one.verdict.evidence), link)
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def claims_html(judged: Sequence[Judged]) -> str:
    """One page that loads nothing."""
    sections = []
    for paper, title in PAPERS.items():
        some = [one for one in judged if one.paper == paper]
        head = tag("tr", *(tag("th", name, scope="col") for name in COLUMNS))
        rows = [tag("tr", *_cells(one)) for one in some]
        table = tag("table", tag("caption", title), tag("thead", head), tag("tbody", *rows))
        box = tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=title)
        sections.append(tag("section", tag("h2", title), tag("p", f"{count_words(some)}."), box))
    counts = Counter(one.verdict.word for one in judged)
    tiles = [tag("div", tag("b", str(counts[word])), tag("span", word), class_="tile") for word in WORDS]
    lead = [
        tag("p", *(tag("code", part) if at % 2 else part for at, part in enumerate(text.split("`")))) for text in LEAD
    ]
    body = tag("main", tag("h1", TITLE), *lead, tag("div", *tiles, class_="tiles"), *sections)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", TITLE),
        tag("style", Markup(STYLE + EXTRA_STYLE)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', body), lang='en')}\n"


def _with_code(text: str) -> list[Markup | str]:
    """What stands between backticks as code."""
    return [tag("code", part) if at % 2 else part for at, part in enumerate(text.split("`"))]


def _cells(one: Judged) -> list[Markup]:
    link = tag("a", "table", href=one.link) if one.link else Markup("")
    return [
        tag("td", one.claim),
        tag("td", one.table),
        tag("td", one.verdict.word, class_=STYLES[one.verdict.word]),
        tag("td", one.verdict.evidence),
        tag("td", link),
    ]


def claims_json(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Plain data."""
    return [one.model_dump(mode="json") for one in judged]
