"""Standard output of every command: where it goes, and tables on it."""

from __future__ import annotations

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
