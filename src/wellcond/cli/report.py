"""`wellcond report`: from records to tables and pages, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from wellcond.cli.app import EXPERIMENTS, app
from wellcond.cli.checks import check_is_folder


@app.command("report", rich_help_panel=EXPERIMENTS)
def report(
    folder: Annotated[Path, typer.Argument(help="A comparison, or a folder with several.")],
    pictures: Annotated[bool, typer.Option("--pictures/--no-pictures", help="Draw figures and build the page.")] = True,
) -> None:
    """Rebuild tables, figures and the page of a comparison from its records."""
    check_is_folder(folder)
    print_report(folder, pictures=pictures)


def print_report(folder: Path, *, pictures: bool = True, quiet: bool = False) -> None:
    """Build the report of a folder, print its summary and where it is."""
    from wellcond.cli.console import make_console, print_table
    from wellcond.lab.report.analysis import analyse, bottom_line, find_findings
    from wellcond.lab.report.load_runs import load_comparisons
    from wellcond.lab.report.page import gather, write_report

    out = make_console()
    for comparison in load_comparisons(folder):
        content = gather(analyse(comparison), figures=pictures)
        page = write_report(content)
        if quiet:
            continue
        for table in [table for table in reversed(content.tables) if table.name in ("tuning", "summary")]:
            print_table(out, comparison.title if table.name == "summary" else "Tuning", table)
        out.print(escape(bottom_line(content.analysis)), style="bold", soft_wrap=True)
        for finding in find_findings(content.analysis):
            out.print(f"- {escape(finding)}", soft_wrap=True)
        out.print(f"report: {page}", markup=False, soft_wrap=True)
        if pictures:
            out.print(f"        {page.with_suffix('.md')}", markup=False, soft_wrap=True)


def foresee_power(folder: Path, seeds: int) -> list[str]:
    """Which difference as many seeds can show, as far as earlier runs in a folder tell; nothing otherwise."""
    from wellcond.lab.report.analysis import describe_power
    from wellcond.lab.report.load_runs import load_comparisons
    from wellcond.lab.report.records import RunRecordError
    from wellcond.lab.report.statistics import Summary, differences_to_baseline

    try:
        found = load_comparisons(folder)
    except RunRecordError:  # no runs yet; what is wrong with one is said when it is its turn
        return []
    told = []
    for comparison in found:
        summaries = {method: Summary(comparison.results(method)) for method in comparison.methods}
        told += describe_power(comparison, differences_to_baseline(comparison, summaries), seeds)
    return told
