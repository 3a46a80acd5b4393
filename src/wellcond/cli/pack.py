"""`wellcond pack`: the records of a comparison, small enough for a repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli.app import PAPERS, app
from wellcond.cli.checks import check_is_folder


@app.command("pack", rich_help_panel=PAPERS)
def pack(
    folder: Annotated[
        Path, typer.Argument(help="Full runs of wellcond compare or train, at any depth; they are kept.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to, laid out in the same way.")],
) -> None:
    """Pack runs into one small file each, with a report without figures; all tables stay the same.

    `wellcond report`, `claims` and `reproduce --records` read both forms. A packed comparison in OUTPUT is replaced.
    """
    check_is_folder(folder)
    from wellcond.cli.console import make_console
    from wellcond.lab.report.pack import pack as pack_runs

    for home in pack_runs(folder, output):
        size = sum(path.stat().st_size for path in home.rglob("*") if path.is_file())
        make_console().print(f"packed: {home}, {size / 1000:.0f} kB", markup=False, soft_wrap=True)
