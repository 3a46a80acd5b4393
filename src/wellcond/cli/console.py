"""What every command shows: texts that a terminal may get, tables, how runs go on, and what became of them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table

from wellcond.files import to_json
from wellcond.lab.report.table import UNUSUAL, is_hidden, visible, without_empty_columns
from wellcond.lab.report.table import Table as ReportTable
from wellcond.pages import shorten

if TYPE_CHECKING:
    from wellcond.lab.pool import JobObserver, Outcome
    from wellcond.lab.train.engine import Event
    from wellcond.lab.train.run import Job

UNBOUNDED = 10_000
"""Columns of output that nothing bounds."""
SEPARATION = 2
"""Spaces between two columns of a table."""
NARROWEST_NAME, NARROWEST_TEXT, LONGEST_LABEL = 16, 10, 20
PATH = re.compile(r"[\w./-]+")


class VisibleConsole(Console):
    """Shows every control character of a text as its number, so that no text of a file can steer the terminal.

    The control codes of rich itself, for styles and bars, are no part of a text.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, with every piece of text made visible."""
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


@contextlib.contextmanager
def warnings_made_visible() -> Iterator[None]:
    """Within this context, warnings are printed as `echo` prints."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda *given, **options: visible(usual(*given, **options))
    try:
        yield
    finally:
        warnings.formatwarning = usual


def echo_json(text: str) -> None:
    """Print JSON text; control characters that JSON would leave as they are, such as U+009B, as its escapes."""
    print(UNUSUAL.sub(lambda found: json.dumps(found[0])[1:-1] if is_hidden(found[0]) else found[0], text))


def print_line(out: Console, text: str, style: str | None = None) -> None:
    """Print prose as it is; a terminal breaks it at spaces, anything else gets it as one line."""
    out.print(text, markup=False, highlight=False, soft_wrap=not out.is_terminal, style=style)


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
        # A path is not folded; what is composed of options, such as the label of a method, is, if nothing else helps.
        longest = [cell_len(word) if PATH.fullmatch(word) else min(LONGEST_LABEL, cell_len(word)) for word in words]
        width = _width(made, at)
        return width if width <= NARROWEST_NAME else max(NARROWEST_TEXT, *longest)
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
        words = {word for row in made.rows for word in row[at].split(" ")}
        short = {word: word for word in words} | shorten(filter(PATH.fullmatch, sorted(words)), room)
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
        table.add_row(*(escape(_with_breaks(cell, width)) for cell, width in zip(row, widths, strict=True)))
    return table


def _with_breaks(text: str, width: int) -> str:
    """A text whose words that are too long may break after a plus or a bracket, as the label of a method does best.

    Example:
        >>> _with_breaks("calibrated+set(optimizer.lr=3e-3)", 20)
        'calibrated+ set( optimizer.lr=3e-3)'
    """
    for mark in "+(":
        words = (word.replace(mark, f"{mark} ") if cell_len(word) > width else word for word in text.split(" "))
        text = " ".join(words)
    return text


def print_tables(tables: Iterable[ReportTable], end: str = "") -> None:
    """Print tables with their notes, and a line at the end."""
    out = make_console()
    for table in tables:
        print_table(out, table)
        for note in table.notes:
            print_line(out, f"- {note}")
    if end:
        out.print(end, markup=False, soft_wrap=True)


# Runs that go on: bars on a terminal, a line for each run, and what became of them.


def is_rank_zero() -> bool:
    """Whether this process may print; `torchrun` and `accelerate launch` start several."""
    return os.environ.get("RANK", "0") == "0"


COLOURS = {"finished": "green", "interrupted": "yellow"}


class ConsoleWatch:
    """Lines on standard output or error; bars on standard error if that is a terminal, else a line for each run."""

    def __init__(self, *, quiet: bool = False, stderr: bool = False) -> None:
        self.quiet, self.stderr = quiet or not is_rank_zero(), stderr

    def say(self, *lines: str) -> None:
        """Print lines for people."""
        for line in lines if not self.quiet else ():
            print_line(make_console(stderr=self.stderr), line)

    @contextlib.contextmanager
    def observing(self, jobs: Sequence[Job]) -> Iterator[JobObserver]:
        """Bars for the runs that go on, and one for all."""
        from wellcond.lab.comparison import describe_end, describe_score

        console = make_console(stderr=True, quiet=self.quiet)
        tell = functools.partial(console.print, highlight=False, soft_wrap=True)
        name, what = TextColumn("{task.description}"), TextColumn("{task.fields[said]}")
        columns = name, BarColumn(bar_width=24), MofNCompleteColumn(), what, TimeElapsedColumn(), TimeRemainingColumn()
        bars = Progress(*columns, console=console, refresh_per_second=4)
        whole = bars.add_task("[bold]all runs", total=len(jobs), said="")
        tasks: dict[str, TaskID] = {}

        def observe(job: Job, event: Event) -> None:
            kind, key, title = event["event"], str(job.folder), escape(job.title)
            if kind in ("end", "failed"):
                bars.advance(whole)
                if key in tasks:
                    bars.remove_task(tasks.pop(key))
                place = f"{escape(f'[{bars.tasks[0].completed:.0f}/{len(jobs)}]')} {title}"
                if kind == "end":
                    status, comma, rest = describe_end(event["record"]).partition(", ")
                    tell(f"{place}: [{COLOURS.get(status, 'red')}]{status}[/]{comma}{escape(rest)}")
                elif len(jobs) > 1:  # the failure of a single run ends the command
                    tell(f"{place}: [red]failed[/]: {escape(event['problem'].splitlines()[0])}")
                return
            if kind == "note":
                tell(f"{title}: {escape(event['text'])}")
                return
            if kind == "lost":
                tell(f"{title}: [yellow]starting again[/], {escape(event['problem'])}")
            if key not in tasks:
                tasks[key] = bars.add_task(title, total=None, said="")
            loss = event.get("loss")
            said = escape(event.get("phase", "")) if loss is None else f"loss {loss:.3f}"
            said = describe_score(event["row"]) if kind == "evaluation" else said
            bars.update(tasks[key], total=event.get("num_steps"), completed=event.get("step"), said=said)

        with bars if console.is_terminal else contextlib.nullcontext():
            yield observe


def run_watched(jobs: Sequence[Job], asked: int | None, *, quiet: bool, ranks: int = 1) -> Outcome:
    """Run jobs on this machine, `asked` at once, each of so many ranks, and show how they go on."""
    from wellcond.lab.pool import run_jobs

    with ConsoleWatch(quiet=quiet).observing(jobs) as observer:
        return run_jobs(jobs, observer=observer, num_workers=asked, ranks=ranks)


def exit_code(outcome: Outcome) -> int:
    """130 if the user stopped it, which the first process alone says; 1 if a run failed or none finished, else 0."""
    if outcome.interrupted:
        return 130 if is_rank_zero() else int(bool(outcome.failures))
    return int(bool(outcome.failures or lost_runs(outcome)))


def lost_runs(outcome: Outcome) -> list[str]:
    """How every run ended where none finished; a comparison in which some diverged has a result."""
    if any(record["status"] == "finished" for record in outcome.records):
        return []
    return [f"{one['method']}, seed {one['seed']}: {one['status']}, {one['reason']}" for one in outcome.records]


def tell_end(outcome: Outcome, *, as_json: bool = False, **more: Any) -> int:
    """Say what failed, or print every run, and `more`, as JSON; returns the exit code."""
    out = make_console()
    if as_json and is_rank_zero():
        shown = ("method", "seed", "status", "reason", "final", "best", "test", "seconds", "config_hash")
        rows = [
            {name: record[name] for name in shown if name in record} | {"lr": record["config"]["optimizer"]["lr"]}
            for record in outcome.records
        ]
        rows += [
            {"method": job.method.label, "seed": job.seed, "status": "failed", "reason": problem}
            for job, problem in outcome.failures
        ]
        echo_json(to_json({"runs": rows, "interrupted": outcome.interrupted, **more}, indent=1))
    elif is_rank_zero():
        for _, problem in outcome.failures:
            out.print(f"[red]failed:[/] {escape(problem)}", soft_wrap=True)
        for lost in lost_runs(outcome) if not outcome.interrupted else ():
            out.print(f"[red]no result:[/] {escape(lost)}; try a smaller optimizer.lr", soft_wrap=True)
        if outcome.interrupted:
            out.print("[yellow]stopped[/]; the same command resumes from here")
    return exit_code(outcome)
