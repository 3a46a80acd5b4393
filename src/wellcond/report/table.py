"""A table as data, and its three forms: HTML, markdown, CSV."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass

from wellcond.report.markup import Markup, join, tag


@dataclass(frozen=True)
class Table:
    """Header and rows of text; the first column names the row."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    text_columns: frozenset[int] = frozenset({0})
    """Columns of words; all others are numbers and stand at the right."""


def table_html(table: Table) -> Markup:
    """As HTML in a box that scrolls by itself."""

    def look(at: int) -> str:
        return "t" if at in table.text_columns else "n"

    heads = [tag("th", name, scope="col", class_=look(at)) for at, name in enumerate(table.header)]
    rows = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *(tag("td", cell, class_=look(at)) for at, cell in enumerate(row) if at),
        )
        for row in table.rows
    ]
    inner = tag("table", tag("caption", table.title), tag("thead", tag("tr", *heads)), tag("tbody", *rows))
    box = tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=table.title)
    notes = tag("ul", *(tag("li", note) for note in table.notes), class_="notes small") if table.notes else Markup("")
    return join(box, notes)


def table_markdown(table: Table) -> str:
    r"""As a markdown table, followed by its notes.

    Example:
        >>> print(table_markdown(Table("t", "T", ("a", "b"), (("x|y", "1"),))))
        | a | b |
        |:---|---:|
        | x\|y | 1 |
    """
    rules = [":---" if at in table.text_columns else "---:" for at in range(len(table.header))]
    lines = [
        "| " + " | ".join(map(plain_markdown, table.header)) + " |",
        "|" + "|".join(rules) + "|",
        *("| " + " | ".join(map(plain_markdown, row)) + " |" for row in table.rows),
    ]
    if table.notes:
        lines += ["", *(f"- {plain_markdown(note)}" for note in table.notes)]
    return "\n".join(lines)


def plain_markdown(text: str) -> str:
    """Text that markdown shows as it is: no markup of its own gets through."""
    one_line = " ".join(text.split())
    return re.sub(r"([\\`*_|\[\]#~$])", r"\\\1", html.escape(one_line, quote=False))


def table_csv(table: Table) -> str:
    """As CSV."""
    return csv_text(table.header, table.rows)


FORMULA = re.compile(r"[=@\t\r]|[+-][A-Za-z(]")
"""How a text begins that a spreadsheet would compute; +1.5 and -0.3 are numbers."""


def csv_text(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    r"""CSV of texts; one that a spreadsheet would take for a formula begins with an apostrophe.

    Example:
        >>> csv_text(["method", "gain"], [["=HYPERLINK(x)", "-0.3"]])
        "method,gain\n'=HYPERLINK(x),-0.3\n"
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([f"'{cell}" if FORMULA.match(cell) else cell for cell in row] for row in rows)
    return text.getvalue()
