"""Tables as data, as markdown and as CSV (as HTML: the template `table.html`), and how numbers look in them."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wellcond.pages import INFINITE, MISSING, number, show  # noqa: F401  (how numbers look, for all of the report)

Value = str | int | float | None
Values = dict[str, Value]
Cell = str | tuple[str, Values]
"""What is shown, and the numbers behind it, each by its name in a file for programs."""
Row = Mapping[str, Cell]
FORMULA = re.compile(r"[=@\t\r]|[+-][A-Za-z(]")
"""How a text begins that a spreadsheet would compute; +1.5 and -0.3 are numbers."""
UNUSUAL = re.compile(r"[^\x20-\x7e\n\t]")
"""Everything but the printed characters of ASCII, lines and tabs."""


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

    @classmethod
    def of(
        cls, name: str, title: str, rows: Sequence[Row], notes: Iterable[str] = (), words: Iterable[int] = (0,)
    ) -> Table:
        """A table of rows by column."""
        pairs = [[cell if isinstance(cell, tuple) else (cell, {}) for cell in row.values()] for row in rows]
        values = [{name: value for _, known in row for name, value in known.items()} for row in pairs]
        header, shown = tuple(rows[0]) if rows else (), tuple(tuple(text for text, _ in row) for row in pairs)
        return cls(name, title, header, shown, tuple(notes), frozenset(words), tuple(values) if any(values) else ())

    def only(self, columns: Sequence[int]) -> Table:
        """The table with some of its columns."""
        return replace(
            self,
            header=tuple(self.header[at] for at in columns),
            rows=tuple(tuple(row[at] for at in columns) for row in self.rows),
            text_columns=frozenset(new for new, at in enumerate(columns) if at in self.text_columns),
        )

    def change_texts(self, change: Callable[[str], str]) -> Table:
        """The table with every text that it shows changed."""
        rows = tuple(tuple(map(change, row)) for row in self.rows)
        return replace(self, header=tuple(map(change, self.header)), rows=rows, notes=tuple(map(change, self.notes)))


def in_order(table: Table, methods: Sequence[str]) -> Table:
    """A table with a row for each of these methods in their order; another one as it is."""
    named = [row.get("method") for row in table.values]
    if table.name == "seeds" or not named or not set(named) <= set(methods):
        return table
    order = sorted(range(len(named)), key=lambda at: methods.index(str(named[at])))
    return replace(table, rows=tuple(table.rows[at] for at in order), values=tuple(table.values[at] for at in order))


def without_empty_columns(table: Table) -> Table:
    """The table without columns in which nothing is known, as far as there are rows."""
    kept = [at for at in range(len(table.header)) if not at or any(row[at] not in ("", MISSING) for row in table.rows)]
    return table.only(kept) if table.rows else table


def table_markdown(table: Table) -> str:
    """As a markdown table, followed by its notes."""
    lines = ["| " + " | ".join(map(plain_markdown, row)) + " |" for row in (table.header, *table.rows)]
    rules = [":---" if at in table.text_columns else "---:" for at in range(len(table.header))]
    notes = ["", *(f"- {plain_markdown(note)}" for note in table.notes)] if table.notes else []
    return "\n".join([lines[0], "|" + "|".join(rules) + "|", *lines[1:], *notes])


def plain_markdown(text: str) -> str:
    """Text that markdown shows as it is: no markup of its own gets through."""
    one_line = " ".join(text.split())
    return re.sub(r"([\\`*_|\[\]#~$])", r"\\\1", html.escape(one_line, quote=False))


def table_csv(table: Table) -> str:
    """As CSV: the values, numbers in full and empty where there is none; a table of words only as it is shown."""
    if not table.values:
        return csv_text(table.header, table.rows)
    columns = list(dict.fromkeys(name for row in table.values for name in row))
    return csv_text(columns, ([row.get(name) for name in columns] for row in table.values))


def csv_text(header: Iterable[str], rows: Iterable[Iterable[Value]]) -> str:
    """CSV; a text that a spreadsheet would take for a formula begins with an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    shown = ([cell if isinstance(cell, str) else _plain_number(number(cell)) for cell in row] for row in rows)
    writer.writerows([f"'{cell}" if FORMULA.match(cell) else cell for cell in row] for row in shown)
    return text.getvalue()


def _plain_number(value: float) -> str:
    """Shortest text that reads back as the same number; empty where there is none."""
    whole = value.is_integer() and abs(value) < 1e15
    return "" if math.isnan(value) else str(int(value)) if whole else repr(value)


def finite_mean(values: Iterable[float]) -> float:
    """Mean of the finite values; NaN if there is none."""
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else math.nan


def show_known(value: float | None, form: str) -> str:
    """A number in a form of its own, where it is finite."""
    return form.format(value) if value is not None and math.isfinite(value) else show(value)


def show_share(share: float) -> str:
    """A share in whole percent, never 0 for what is there."""
    return "< 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def show_seeds(count: int) -> str:
    """How many seeds there are."""
    return "1 seed" if count == 1 else f"{count} seeds"


def show_range(numbers: Sequence[int]) -> str:
    """Whole numbers, many in a row by the first and the last."""
    in_a_row = len(numbers) > 3 and list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if in_a_row else ", ".join(map(str, numbers))


def cut(label: str, longest: int = 22) -> str:
    """A label short enough for an axis; the middle goes, since methods often differ at their ends only."""
    half = (longest - 1) // 2
    return label if len(label) <= longest else f"{label[:half]}…{label[-half:]}"


def visible(text: str) -> str:
    """The text with every character that has no picture, or turns others around, as its number; lines and tabs stay."""
    return UNUSUAL.sub(lambda found: f"<U+{ord(found[0]):04X}>" if is_hidden(found[0]) else found[0], text)


def is_hidden(character: str) -> bool:
    """Whether it is a control, format, surrogate, private or unassigned character, or separates lines or paragraphs."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def plain_setting(value: Any) -> str:
    """Text of a value; of a path only its last part, since where things lay is nobody's business."""
    if not isinstance(value, str):
        return json.dumps(value, sort_keys=True)
    if re.match(r"(/|~|[A-Za-z]:[\\/]).*[^/\\]$", value):
        return "…/" + re.split(r"[/\\]", value)[-1]
    return value
