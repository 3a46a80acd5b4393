"""Standard output of every command: where it goes, and tables on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wellcond.lab.report.table import Table as ReportTable
from wellcond.lab.report.table import without_empty_columns

GAP = 3
"""Characters between two columns; there is one at each end of a line."""
NARROWEST = 16
"""To which a column of words folds."""


def make_console() -> Console:
    """Standard output; wide enough for a table when it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def print_table(out: Console, title: str, made: ReportTable) -> None:
    """Print a table of a report: in a terminal within its width, elsewhere as wide as it needs.

    Words fold. Where that is not enough, the last columns of numbers are left out, and named.
    """
    made = without_empty_columns(made)
    left_out: list[str] = []
    widths = _widths(made, out.width if out.is_terminal else None)
    while widths is None:
        last = max(at for at in range(1, len(made.header)) if at not in made.text_columns)
        left_out.insert(0, made.header[last])
        made = made.only([at for at in range(len(made.header)) if at != last])
        widths = _widths(made, out.width)
    table = Table(title=escape(title) or None, header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for at, (name, width) in enumerate(zip(made.header, widths, strict=True)):
        justify: Literal["left", "right"] = "left" if at in made.text_columns else "right"
        table.add_column(escape(name), justify=justify, width=width, overflow="fold")
    for row in made.rows:
        table.add_row(*map(escape, row))
    out.width = max(out.width, table.__rich_measure__(out, out.options.update(max_width=10_000)).maximum)
    out.print(table)
    if left_out:
        out.print(f"Too narrow for: {', '.join(left_out)}.", markup=False, style="dim")


def print_tables(tables: Iterable[ReportTable], end: str = "") -> None:
    """Print tables with their notes, and a line at the end."""
    out = make_console()
    for table in tables:
        print_table(out, table.title, table)
        for note in table.notes:
            out.print(f"- {escape(note)}", soft_wrap=True)
    if end:
        out.print(end, markup=False, soft_wrap=True)


def fits(out: Console, table: ReportTable) -> bool:
    """Whether a table can be printed without folding or leaving out anything."""
    return not out.is_terminal or _total(_widths(table, None) or []) <= out.width


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1) + 2


def _widths(made: ReportTable, width: int | None) -> list[int] | None:
    """Width of every column so that the table fits; None if it cannot without leaving out numbers."""
    widths = []
    for at, name in enumerate(made.header):
        head = [name] if at in made.text_columns or width is None else name.split()
        widths.append(max(cell_len(text) for text in [*head, *(row[at] for row in made.rows)]))
    if width is None:
        return widths
    folding = sorted(made.text_columns)
    while _total(widths) > width:
        widest = max(folding, key=lambda at: widths[at], default=0)
        if widths[widest] > NARROWEST:
            widths[widest] -= 1
        elif len(made.text_columns) < len(made.header) and len(made.header) > 2:
            return None
        else:
            break
    return widths


def show_weight(kappa: float | None, pseudo: float | None, why: str) -> str:
    """Condition number of a weight; where it is not finite, why, and the one over the non-zero spectrum.

    Example:
        >>> show_weight(2.5, 2.5, ""), show_weight(float("inf"), 2.0, "rank 3 of 4"), show_weight(None, None, "")
        ('2.500', 'inf (rank 3 of 4, pseudo 2.000)', '-')
    """
    if kappa is None or pseudo is None:
        return "-"
    if not why:
        return f"{kappa:.3f}" if kappa < 1000 else f"{kappa:.2e}"
    return f"{kappa} ({why}, pseudo {show_weight(pseudo, pseudo, '')})" if math.isfinite(pseudo) else f"{kappa} ({why})"
