"""`wellcond report`, `claims` and `pack`: what is made of records of runs, without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from typer import Argument, Option

from wellcond.cli import app as cli
from wellcond.files import write_atomically


@cli.app.command("report", rich_help_panel=cli.EXPERIMENTS)
def report(
    folder: Annotated[Path, Argument(help="A comparison, or a folder with several.")],
    pictures: Annotated[bool, Option("--pictures/--no-pictures", help="Draw figures and build the page.")] = True,
) -> None:
    """Rebuild tables, figures and the page of a comparison from its records."""
    cli.check_is_folder(folder)
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
        titles = {"tuning": "Tuning", "summary": comparison.title}
        for table in [table for table in reversed(content.tables) if table.name in titles]:
            print_table(out, replace(table, title=titles[table.name]))
        out.print(escape(bottom_line(content.analysis)), style="bold", soft_wrap=True)
        for finding in find_findings(content.analysis):
            out.print(f"- {escape(finding)}", soft_wrap=True)
        out.print(f"report: {page}", markup=False, soft_wrap=True)
        if pictures:
            out.print(f"        {page.with_suffix('.md')}", markup=False, soft_wrap=True)


@cli.app.command("claims", rich_help_panel=cli.PAPERS)
def claims(results: Annotated[Path, Argument(help="Folder of committed records, such as results.")]) -> None:
    """Judge each claim of the papers by committed records: better, worse, equal within a margin, or undecided.

    The verdicts are written to RESULTS/claims.md.
    """
    cli.need_train_extra()
    cli.check_is_folder(results)
    from wellcond.lab.reproduce.claims import claims_markdown, judge_claims, summarise

    judged = judge_claims(results)
    write_atomically(results / "claims.md", claims_markdown(judged))
    typer.echo(f"{summarise(judged)}. Written: {results / 'claims.md'}")


@cli.app.command("pack", rich_help_panel=cli.PAPERS)
def pack(
    folder: Annotated[Path, Argument(help="Full runs of wellcond compare or train, at any depth; they are kept.")],
    output: Annotated[Path, Option("--output", "-o", help="Folder to write to, laid out in the same way.")],
) -> None:
    """Pack runs into one small file each, with a report without figures; all tables stay the same.

    `wellcond report`, `claims` and `reproduce --records` read both forms. A packed comparison in OUTPUT is replaced.
    """
    cli.check_is_folder(folder)
    from wellcond.cli.console import make_console
    from wellcond.lab.report.pack import pack as pack_runs

    for home in pack_runs(folder, output):
        size = sum(path.stat().st_size for path in home.rglob("*") if path.is_file())
        make_console().print(f"packed: {home}, {size / 1000:.0f} kB", markup=False, soft_wrap=True)
