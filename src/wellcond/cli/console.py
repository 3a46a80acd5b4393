"""Standard output and error of every command: where it goes, what may reach a terminal, and tables on it."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from wellcond.lab.report.table import UNUSUAL, is_hidden, visible, without_empty_columns
from wellcond.lab.report.table import Table as ReportTable


class VisibleConsole(Console):
    """Shows every control character of a text as its number, so that no text of a file can steer the terminal.

    The control codes of rich itself, for styles and bars, are no part of a text.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does, every piece of text made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Standard output, as wide as anything needs when it is not a terminal; or standard error."""
    console = VisibleConsole(stderr=stderr, quiet=quiet)
    return console if stderr or console.is_terminal else VisibleConsole(quiet=quiet, width=10_000)


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
