"""`wellcond watch RUN`: the heads of a training as a map in the terminal, while it runs or afterwards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from wellcond.cli import app as cli
from wellcond.cli.console import echo, make_console
from wellcond.errors import MissingFileError
from wellcond.files import write_atomically

FILE = "monitor.jsonl"


@cli.app.command("watch", rich_help_panel=cli.MODELS)
def watch(
    run: Annotated[Path, Argument(metavar="RUN", help=f"A folder that holds {FILE}, or the file itself.")],
    column: Annotated[
        str, Option(metavar="NAME", help="Column: max_logit, entropy, sec_qk, ...; a wrong name lists all.")
    ] = ("max_logit"),
    every: Annotated[float, Option(metavar="SECONDS", min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, Option("--once", help="Print the map once and end; the default without a terminal.")] = False,
    html: cli.HtmlFile = None,
    force: cli.Force = False,
) -> None:
    """Show the heads of a run that AttentionMonitor writes: layers down, heads across, the worst in words."""
    cli.check_outputs(html, force=force)
    path = find_file(run)
    out = make_console()
    if html is not None:
        from wellcond.training.alarms import Alarms
        from wellcond.training.heads_map import render_maps
        from wellcond.training.series import Series

        series = Series.read(path)
        write_atomically(html, render_maps(series, alarms=Alarms.replay(series), title=str(run)))
        echo(f"wrote {html}")
    elif once or not out.is_terminal:
        echo(View(path, column).show(min(100, out.width)))
    else:
        _follow(View(path, column), every)


def find_file(run: Path) -> Path:
    """The file of a monitor: the one that is named, or the one in a folder.

    Raises: MissingFileError.
    """
    path = run / FILE if run.is_dir() else run
    if not path.is_file():
        raise MissingFileError(
            f"expected a folder with {FILE}, or that file, found {'none in ' if run.is_dir() else 'no file '}{run}; "
            f'a run writes it with wc.AttentionMonitor(model, file="RUN/{FILE}")'
        )
    return path


class View:
    """The map of a file, which may grow meanwhile."""

    def __init__(self, path: Path, column: str) -> None:
        """Read nothing yet."""
        from wellcond.training.alarms import Alarms

        self.path, self.column, self.alarms, self.looked = path, column, Alarms(to=[]), 0

    def show(self, width: int) -> str:
        """What the file says now; rules look at every reading once."""
        from wellcond.training.heads_map import show_map
        from wellcond.training.series import Series

        series = Series.read(self.path)
        for until in range(self.looked + 1, len(series.steps) + 1):
            self.alarms.look(series, until)
        self.looked = len(series.steps)
        return show_map(series, self.column, alarms=self.alarms.raised, width=width)


def _follow(view: View, every: float) -> None:
    """Show the map until the user ends it."""
    from rich.live import Live
    from rich.text import Text

    from wellcond.lab.report.table import visible

    console = make_console()

    def text() -> Text:
        lines = view.show(min(100, console.width)).splitlines()
        return Text("\n".join(map(visible, [*lines, "", f"{view.path}, Ctrl-C ends"])))

    try:
        with Live(text(), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(text(), refresh=True)
    except KeyboardInterrupt:
        return
