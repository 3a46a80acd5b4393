"""A table as data, and two of its forms: markdown and CSV. The third is the template `table.html`."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from wellcond.lab.report.values import MISSING, plain_number

Value = str | int | float | None


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
    values: tuple[Mapping[str, Value], ...] = field(default=(), compare=False)
    """The rows as numbers, for programs: one column for each number, NaN or None where there is none. Tables are equal
    if they show the same: packed records have fewer digits."""

    def look(self, at: int) -> str:
        """Style of a column: `t` of words, `n` of numbers."""
        return "t" if at in self.text_columns else "n"

    def only(self, columns: Sequence[int]) -> Table:
        """The table with some of its columns."""
        return replace(
            self,
            header=tuple(self.header[at] for at in columns),
            rows=tuple(tuple(row[at] for at in columns) for row in self.rows),
            text_columns=frozenset(new for new, at in enumerate(columns) if at in self.text_columns),
        )


def without_empty_columns(table: Table) -> Table:
    """The table without columns in which nothing is known, as far as there are rows.

    Example:
        >>> without_empty_columns(Table("t", "T", ("a", "b", "c"), (("x", MISSING, "1"),))).header
        ('a', 'c')
    """
    kept = [at for at in range(len(table.header)) if not at or any(row[at] not in ("", MISSING) for row in table.rows)]
    return table.only(kept) if table.rows else table


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
    r"""As CSV: the values, numbers in full and empty where there is none; a table of words only as it is shown.

    Example:
        >>> table_csv(Table("t", "T", ("method", "mean"), (("a", "0.33 ± 0.1"),), values=({"mean": 1 / 3, "sd": 0.1},)))
        'mean,sd\n0.3333333333333333,0.1\n'
    """
    if not table.values:
        return csv_text(table.header, table.rows)
    columns = list(dict.fromkeys(name for row in table.values for name in row))
    return csv_text(columns, ([_cell(row.get(name)) for name in columns] for row in table.values))


def _cell(value: Value) -> str:
    return value if isinstance(value, str) else "" if value is None else plain_number(float(value))


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
