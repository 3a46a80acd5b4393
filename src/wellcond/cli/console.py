"""Standard output of every command: where it goes, and tables on it."""

from __future__ import annotations

import math

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wellcond.report.table import Table as ReportTable


def make_console() -> Console:
    """Standard output; wide enough for a table when it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def print_table(out: Console, title: str, made: ReportTable) -> None:
    """Print a table of a report; the console becomes as wide as it needs."""
    table = Table(title=escape(title), header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(made.header):
        table.add_column(escape(name), justify="left" if number in made.text_columns else "right")
    for row in made.rows:
        table.add_row(*map(escape, row))
    out.width = max(out.width, table.__rich_measure__(out, out.options.update(max_width=10_000)).maximum)
    out.print(table)


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
