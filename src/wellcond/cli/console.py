"""Standard output and error of every command: where it goes, what may reach a terminal, and tables on it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from wellcond.lab.report.table import UNUSUAL, is_hidden, visible, without_empty_columns
from wellcond.lab.report.table import Table as ReportTable
from wellcond.pages import shorten

UNBOUNDED = 10_000
"""Columns of output that nothing bounds."""
SEPARATION = 2
"""Spaces between two columns of a table."""
NARROWEST_NAME = 16


class VisibleConsole(Console):
    """Shows every control character of a text as its number, so that no text of a file can steer the terminal.

    The control codes of rich itself, for styles and bars, are no part of a text.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does, every piece of text made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Standard output or error: as wide as the terminal or COLUMNS; output elsewhere, such as a file, is not folded."""
    console = VisibleConsole(stderr=stderr, quiet=quiet)
    known = stderr or console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console if known else VisibleConsole(quiet=quiet, width=UNBOUNDED)


def echo(text: str, *, err: bool = False) -> None:
    """Print plain text of any origin, control characters as their numbers; a terminal gets lines broken at spaces."""
    stream = sys.stderr if err else sys.stdout
    shown = visible(text)
    print(fold(shown, shutil.get_terminal_size().columns) if stream.isatty() else shown, file=stream)


def fold(text: str, width: int) -> str:
    """Break prose that is wider than a terminal at spaces, with its own indent; rows of a table stay as they are.

    Example:
        >>> print(fold("  three words here", 12))
          three
          words here
        >>> print(fold("a    b    c    d", 12))
        a    b    c    d
    """
    lines = []
    for line in text.split("\n"):
        words = line.lstrip(" ")
        if len(line) <= width or "  " in words:
            lines.append(line)
            continue
        indent = line[: len(line) - len(words)]
        options = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": indent}
        lines += textwrap.wrap(line, width, **options)  # type: ignore[arg-type]
    return "\n".join(lines)


@contextmanager
def warnings_made_visible() -> Iterator[None]:
    """Warnings are printed as `echo` prints, too."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda *given, **options: visible(usual(*given, **options))
    try:
        yield
    finally:
        warnings.formatwarning = usual


def echo_json(text: str) -> None:
    """Print JSON text; control characters that JSON would leave as they are, such as U+009B, as its escapes."""
    print(UNUSUAL.sub(lambda found: json.dumps(found[0])[1:-1] if is_hidden(found[0]) else found[0], text))


def print_table(out: Console, made: ReportTable) -> None:
    """Print a table of a report.

    In a narrow terminal words fold at spaces, then long names lose their middle, then the last columns of numbers go.
    """
    made = without_empty_columns(made)
    left_out: list[str] = []
    if out.width < UNBOUNDED:
        made = _with_shorter_names(made, out.width)
        made, left_out = _without_last_numbers(made, out.width)
        widths = _fitting_widths(made, out.width)
    else:
        widths = [_width(made, at) for at in range(len(made.header))]
    out.print(_lay_out(made, widths))
    if left_out:
        out.print(f"Too narrow for: {', '.join(left_out)}.", markup=False, style="dim")


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + SEPARATION * len(widths) + 1  # as rich counts: a blank at the left, and after every column


def _width(made: ReportTable, at: int) -> int:
    """Columns that all of a column takes."""
    return max(cell_len(made.header[at]), max((cell_len(row[at]) for row in made.rows), default=0))


def _least(made: ReportTable, at: int) -> int:
    """Columns in which a column can still be read: words fold at spaces, numbers never, their names at spaces."""
    cells = [row[at] for row in made.rows]
    if at in made.text_columns:
        words = [word for text in (*cells, made.header[at]) for word in text.split()]
        return min(_width(made, at), max(NARROWEST_NAME, *map(cell_len, words)))
    return max(map(cell_len, [*cells, *_folded_name(made, at)]))


def _folded_name(made: ReportTable, at: int) -> list[str]:
    longest = max((cell_len(row[at]) for row in made.rows), default=0)
    return textwrap.wrap(made.header[at], max(1, longest), break_long_words=False)


def _all_least(made: ReportTable) -> list[int]:
    return [_least(made, at) for at in range(len(made.header))]


def _with_shorter_names(made: ReportTable, width: int) -> ReportTable:
    """The table, in which names in the widest columns of words lose their middle as far as the width asks for it."""
    for at in sorted(made.text_columns, key=lambda column: -_least(made, column)):
        excess = _total(_all_least(made)) - width
        if excess <= 0:
            break
        room = max(NARROWEST_NAME, _least(made, at) - excess)
        short = shorten({word for row in made.rows for word in row[at].split(" ")}, room)
        rows = ((*row[:at], " ".join(short[word] for word in row[at].split(" ")), *row[at + 1 :]) for row in made.rows)
        made = replace(made, rows=tuple(rows))
    return made


def _without_last_numbers(made: ReportTable, width: int) -> tuple[ReportTable, list[str]]:
    """The table with as many columns of numbers as fit, and the names of the others."""
    left_out: list[str] = []
    numbers = [at for at in range(1, len(made.header)) if at not in made.text_columns]
    while numbers and _total(_all_least(made)) > width:
        last = numbers.pop()
        left_out.insert(0, made.header[last])
        made = made.only([at for at in range(len(made.header)) if at != last])
    return made, left_out


def _fitting_widths(made: ReportTable, width: int) -> list[int]:
    """Widths of all columns: the widest one gives way first, down to what can still be read."""
    widths, least = [_width(made, at) for at in range(len(made.header))], _all_least(made)
    while _total(widths) > width and any(now > low for now, low in zip(widths, least, strict=True)):
        giving = max((now, at) for at, (now, low) in enumerate(zip(widths, least, strict=True)) if now > low)[1]
        widths[giving] -= 1
    return widths


def _lay_out(made: ReportTable, widths: Sequence[int]) -> Table:
    padding = (0, SEPARATION - 1, 0, 0)  # the box has a blank between two columns
    title = escape(made.title) or None
    table = Table(title=title, header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=padding)
    for at, (name, width) in enumerate(zip(made.header, widths, strict=True)):
        words = at in made.text_columns
        shown = name if words or cell_len(name) <= width else "\n".join(_folded_name(made, at))
        justify = "left" if words else "right"
        table.add_column(escape(shown), width=width, overflow="fold", justify=justify)  # type: ignore[arg-type]
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
