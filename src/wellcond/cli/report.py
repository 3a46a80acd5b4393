"""`wellcond report`, `reproduce`, `claims` and `pack`: what records of runs say, also beside the papers' numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from wellcond.arguments import check_choice
from wellcond.cli import app as cli
from wellcond.cli.console import (
    ConsoleWatch,
    echo,
    echo_json,
    exit_code,
    is_rank_zero,
    make_console,
    print_line,
    print_table,
    print_tables,
    run_watched,
    tell_end,
)
from wellcond.errors import WellcondError
from wellcond.files import to_json, write_atomically

if TYPE_CHECKING:
    from wellcond.lab.pool import Outcome
    from wellcond.lab.report.table import Table
    from wellcond.lab.reproduce.plan import PlannedStudy


PROBE_SECONDS = 60.0


def _must_hold_records(path: Path) -> Path:
    if not path.is_dir() and not (path.is_file() and path.suffix == ".jsonl"):
        raise typer.BadParameter(f"expected a folder or a file .jsonl, found {path}, which is neither")
    return path


@cli.app.command("report", rich_help_panel=cli.EXPERIMENTS)
def report(
    folder: Annotated[
        Path,
        Argument(
            exists=True,
            callback=_must_hold_records,
            metavar="FOLDER",
            help="Comparison, packed file (.jsonl), or a folder of them.",
        ),
    ],
    pictures: Annotated[bool, Option("--pictures/--no-pictures", help="Draw figures and build the page.")] = True,
    check: Annotated[bool, Option("--check", help="Compare what is committed with what the records give.")] = False,
) -> None:
    """Rebuild tables, figures and the page of a comparison from its records.

    With --check nothing is written: claims, tables and figures that are committed beside the records of a collection
    such as results are built again and compared byte by byte.
    """
    if check:
        cli.need_train_extra()
        from wellcond.lab.reproduce.evidence import check_committed

        echo(check_committed(folder))
        return
    print_report(folder, pictures=pictures)


def print_report(folder: Path, *, pictures: bool = True, quiet: bool = False) -> None:
    """Build the report of a folder, print its summary and where it is."""
    from wellcond.lab.records import load_comparisons
    from wellcond.lab.report.analysis import analyse, bottom_line, find_findings
    from wellcond.lab.report.page import gather, write_report

    out = make_console()
    for comparison in load_comparisons(folder):
        content = gather(analyse(comparison), figures=pictures)
        page = write_report(content)
        if quiet:
            continue
        titles = {"tuning": "Tuning", "summary": comparison.title}
        for table in [table for table in reversed(content.shown_tables) if table.name in titles]:
            print_table(out, replace(table, title=titles[table.name]))
        print_line(out, bottom_line(content.analysis), style="bold")
        for finding in find_findings(content.analysis):
            print_line(out, f"- {finding}")
        out.print(f"report: {page}", markup=False, soft_wrap=True)
        if pictures:
            out.print(f"        {page.with_suffix('.md')}", markup=False, soft_wrap=True)


@cli.app.command("reproduce", rich_help_panel=cli.PAPERS)
def reproduce(
    id: Annotated[
        str | None, Argument(metavar="[ID]", help="Table, figure or ablation, such as C-T1, S-F2, A-scale.")
    ] = None,
    list_all: Annotated[bool, Option("--list", help="List every id, and the runs that are there.")] = False,
    scale: Annotated[
        str, Option(metavar="NAME", help="Scale: tiny (CPU, minutes), small (GPU, hours) or paper.")
    ] = "tiny",
    dry_run: Annotated[bool, Option("--dry-run", help="Print the plan and what it takes; run nothing.")] = False,
    probe: Annotated[bool, Option("--probe", help="With --dry-run: train each study for a minute here.")] = False,
    data: Annotated[
        list[str] | None, Option("--data", metavar="NAME=PATH", help="A data set in a folder, such as imagenet-1k=DIR.")
    ] = None,
    records: Annotated[Path | None, cli.folder_option(help="Print the tables of these records; run nothing.")] = None,
    reading: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE", help="Another reading of the paper's words; the note of a table names them."),
    ] = None,
    methods: Annotated[str | None, Option(metavar="LIST", help="Run only these methods, and default.")] = None,
    seeds: cli.Seeds = None,
    set: cli.Overrides = None,
    folder: Annotated[
        Path | None, Option("--folder", "-o", help="Folder to write to; by default reproduce/SCALE.")
    ] = None,
    jobs: cli.Jobs = "auto",
    gpus_per_run: cli.GpusPerRun = None,
    cpu: cli.Cpu = False,
    json: cli.Json = False,
    quiet: cli.Quiet = False,
) -> None:
    """Run what is missing for a table or figure of the papers, and print the paper's numbers beside ours."""
    if list_all == (id is not None):
        raise typer.BadParameter("give either an ID or --list")
    cli.need_train_extra()
    from wellcond.lab.reproduce.catalogue import SCALES, find_entry

    check_choice("scale", scale, SCALES)
    known, entry = find_entry(id) if id is not None else ("", None)
    if entry is not None:
        entry = entry.read({name: value for name, _, value in (text.partition("=") for text in reading or ())})
    numbers, at_once, ranks = cli.read_seeds(seeds), cli.read_jobs(jobs), cli.read_ranks(gpus_per_run)
    import torch

    from wellcond.errors import RunRecordError
    from wellcond.lab.comparison import training_in
    from wellcond.lab.methods import parse_methods
    from wellcond.lab.reproduce.compare_with_paper import outcome_tables, write_outcome
    from wellcond.lab.reproduce.launch import check_data, launch_tables, place_data, probe_plan
    from wellcond.lab.reproduce.plan import PlanOptions, list_table, make_plan, plan_table
    from wellcond.lab.reproduce.studies import Collection

    home = folder or Path("reproduce") / scale
    if entry is None:
        _show([list_table(scale, home)], as_json=json)
        return
    if records is not None:
        entry = entry.at("tiny")
        stored = Collection(records, committed=True)
        if entry.kind != "static" and not stored.has_runs(entry):
            advice = "Give a folder laid out like results/, or leave --records out to run it."
            raise RunRecordError(records, f"holds no records of {known}", advice)
        _show(outcome_tables(known, entry, scale, stored), as_json=json, quiet=quiet)
        return
    asked = None if methods is None else tuple(method.label for method in parse_methods(methods))
    plan = make_plan(known, entry, scale, PlanOptions(home, numbers, asked, tuple(set or ()), cpu))
    place_data(data or (), plan)
    if dry_run:
        tables = [plan_table(plan)]
        if plan.studies and scale != "tiny":
            if probe:
                probe_plan(plan, home, ranks, PROBE_SECONDS, lambda text: echo(text, err=True))
            tables += launch_tables(plan, known, scale, home, ranks, data or ())
        _show(tables, as_json=json, quiet=quiet)
        return
    check_data(plan)
    if plan.missing and not cpu and scale != "tiny" and not torch.cuda.is_available():
        raise WellcondError(
            f"{known} at scale {scale} expects a GPU, and there is none here.\n"
            "  --scale tiny takes minutes; --cpu runs it here all the same; --dry-run shows the plan."
        )
    outcomes: list[Outcome] = []
    with training_in(home):
        for study in plan.studies:
            if study.missing and not any(outcome.interrupted for outcome in outcomes):
                outcomes += _run_study(study, at_once, ranks, cpu=cpu, silent=quiet or json)
    if is_rank_zero():
        tables = write_outcome(known, plan.entry, scale, Collection(home), home / known)
        _show(tables, as_json=json, quiet=quiet, end=f"written: {home / known / f'{known}.md'}")
    raise typer.Exit(max(map(exit_code, outcomes), default=0))


def _run_study(study: PlannedStudy, at_once: int | None, ranks: int, *, cpu: bool, silent: bool) -> list[Outcome]:
    """Run what is missing of a study, then of its fine-tuning."""
    from wellcond.lab.plan import write_comparison
    from wellcond.lab.report.glue import rebuild_glue
    from wellcond.lab.train.glue import plan_glue

    if is_rank_zero():
        write_comparison(study.folder, study.recipe, study.methods, study.seeds, study.rates.note)
    watch = ConsoleWatch(quiet=silent)
    watch.say(f"{study.name}: {study.missing} of {study.runs} runs to do", study.rates.note)
    outcomes = [run_watched(study.jobs, at_once, quiet=silent, ranks=ranks)]
    if study.glue_folders and not outcomes[0].interrupted:
        plan = plan_glue(study.folder, base=study.jobs[0].base, cpu=cpu)
        outcomes.append(run_watched(plan, at_once, quiet=silent))
        if is_rank_zero() and outcomes[1].records:
            rebuild_glue(study.folder)
    for outcome in outcomes if not silent else ():
        tell_end(outcome)
    return outcomes


def _show(tables: list[Table], *, as_json: bool, quiet: bool = False, end: str = "") -> None:
    if as_json:
        rows = [[dict(zip(table.header, row, strict=True)) for row in table.rows] for table in tables]
        pairs = zip(tables, rows, strict=True)
        echo_json(to_json([{"title": t.title, "rows": shown, "notes": list(t.notes)} for t, shown in pairs], indent=1))
    elif not quiet:
        print_tables(tables, end)


@cli.app.command("claims", rich_help_panel=cli.PAPERS)
def claims(
    results: Annotated[
        Path, cli.folder_argument(metavar="RESULTS", help="Folder of committed records, such as results.")
    ],
) -> None:
    """Judge each claim of the papers by committed records: better, worse, equal within a margin, or undecided.

    Writes claims.md into RESULTS and, where the records for them are there, the tables and figures of its folders
    evidence and method.
    """
    cli.need_train_extra()
    from wellcond.lab.reproduce.claims import judge_claims
    from wellcond.lab.reproduce.claims_page import summarise
    from wellcond.lab.reproduce.evidence import committed_files

    judged = judge_claims(results)
    files = committed_files(results, judged)
    for name, content in files.items():
        write_atomically(results / name, content)
    echo(f"{summarise(judged)}. Written: {', '.join(str(results / name) for name in files)}")


@cli.app.command("pack", rich_help_panel=cli.PAPERS)
def pack(
    folder: Annotated[
        Path, cli.folder_argument(metavar="FOLDER", help="Folder with runs of wellcond compare or train, at any depth.")
    ],
    output: Annotated[Path, Option("--output", "-o", help="Folder to write to, laid out in the same way.")],
) -> None:
    """Pack each comparison into one small file, a line of JSON for each run; all tables stay the same.

    `wellcond report`, `claims` and `reproduce --records` read both forms. A packed comparison in OUTPUT is replaced.
    Complete runs of an unfinished comparison are packed too; after `wellcond unpack` it can go on.
    """
    from wellcond.lab.report.pack import pack as pack_runs

    for file, left_out in pack_runs(folder, output).items():
        note = f", without {left_out} that are not complete" if left_out else ""
        echo(f"packed: {file}, {file.stat().st_size / 1000:.0f} kB{note}")


@cli.app.command("unpack", rich_help_panel=cli.PAPERS)
def unpack(
    file: Annotated[Path, Argument(exists=True, dir_okay=False, metavar="FILE", help="File that wellcond pack wrote.")],
    folder: Annotated[Path, Option("--folder", "-o", help="New folder for the runs.")],
) -> None:
    """Make run folders of a packed comparison; `wellcond compare --folder FOLDER` then goes on with what is missing."""
    from wellcond.lab.report.pack import unpack as unpack_runs

    echo(f"unpacked: {unpack_runs(file, folder)} complete runs in {folder}")
