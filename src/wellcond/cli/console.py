"""Standard output of every command: where it goes, and tables on it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wellcond.lab.report.table import Table as ReportTable
from wellcond.lab.report.table import without_empty_columns


def make_console() -> Console:
    """Standard output; as wide as anything needs when it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=10_000)


def print_table(out: Console, made: ReportTable) -> None:
    """Print a table of a report; in a narrow terminal words fold, and the last columns of numbers are left out."""
    made = without_empty_columns(made)
    numbers = [at for at in range(1, len(made.header)) if at not in made.text_columns]
    left_out: list[str] = []
    table = _lay_out(made, fold=out.is_terminal)
    while numbers and sum((column.min_width or 0) + 3 for column in table.columns) - 1 > out.width:  # 3 between two
        last = numbers.pop()
        left_out.insert(0, made.header[last])
        made = made.only([at for at in range(len(made.header)) if at != last])
        table = _lay_out(made, fold=out.is_terminal)
    out.print(table)
    if left_out:
        out.print(f"Too narrow for: {', '.join(left_out)}.", markup=False, style="dim")


def _lay_out(made: ReportTable, *, fold: bool) -> Table:
    """The table; where it folds, words do to a width that can be read, numbers never, their names at spaces."""
    table = Table(title=escape(made.title) or None, header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for at, name in enumerate(made.header):
        longest = max((cell_len(row[at]) for row in made.rows), default=0)
        if at in made.text_columns:
            least = min(16, max(longest, cell_len(name)))
            table.add_column(escape(name), min_width=least, overflow="fold", no_wrap=not fold)
        else:
            lines = textwrap.wrap(name, max(1, longest), break_long_words=False) if fold else [name]
            least = max(longest, *map(cell_len, lines))
            table.add_column(escape("\n".join(lines)), min_width=least, justify="right", no_wrap=True)
    for row in made.rows:
        table.add_row(*map(escape, row))
    return table


def print_tables(tables: Iterable[ReportTable], end: str = "") -> None:
    """Print tables with their notes, and a line at the end."""
    out = make_console()
    for table in tables:
        print_table(out, table)
        for note in table.notes:
            out.print(f"- {escape(note)}", soft_wrap=True)
    if end:
        out.print(end, markup=False, soft_wrap=True)
