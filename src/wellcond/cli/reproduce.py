"""`wellcond reproduce ID`: the papers' tables and figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wellcond.cli import app as cli
from wellcond.errors import WellcondError, check_choice
from wellcond.files import to_json

if TYPE_CHECKING:
    from wellcond.lab.report.table import Table
    from wellcond.lab.reproduce.plan import PlannedStudy


@cli.app.command("reproduce", rich_help_panel=cli.PAPERS)
def reproduce(
    id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Table, figure or ablation: C-T1, S-F2, A-scale.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List every id, and the runs that are there.")] = False,
    scale: Annotated[
        str, typer.Option(metavar="NAME", help="tiny (CPU, minutes), small (one GPU, hours) or paper.")
    ] = "tiny",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; run nothing.")] = False,
    records: Annotated[
        Path | None, typer.Option(help="Print from committed records, such as results; run nothing.")
    ] = None,
    methods: Annotated[str | None, typer.Option(metavar="LIST", help="Only these methods, and default.")] = None,
    seeds: cli.Seeds = None,
    set: cli.Overrides = None,
    data: Annotated[
        Path | None, typer.Option(help="Mirror of datasets (as WELLCOND_DATA), or images in train/ and val/.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", "-o", help="Where to write; reproduce/SCALE by default.")
    ] = None,
    jobs: cli.Jobs = "auto",
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
    for name, place in (("--records", records), ("--data", data)):
        if place is not None:
            cli.check_is_folder(place, name)
    numbers = None if seeds is None else cli.read_seeds(seeds)
    cli.read_jobs(jobs)
    cli.check_folder(folder)
    import torch

    from wellcond.cli.runs import leaving_together
    from wellcond.lab.methods import split_methods
    from wellcond.lab.reproduce.beside_paper import outcome_tables, write_outcome
    from wellcond.lab.reproduce.plan import PlanOptions, list_table, make_plan, plan_table
    from wellcond.lab.reproduce.stored import Collection

    home = folder or Path("reproduce") / scale
    if entry is None:
        _show([list_table(scale, home)], as_json=json)
        return
    if records is not None:
        _show(outcome_tables(known, entry, scale, Collection(records, committed=True)), as_json=json, quiet=quiet)
        return
    try:
        asked = None if methods is None else tuple(split_methods(methods))
    except ValueError as error:
        raise cli.OptionError(f"--methods: {error}") from error
    plan = make_plan(known, entry, scale, PlanOptions(home, numbers, asked, tuple(set or ()), _use_data(data), cpu))
    if dry_run:
        _show([plan_table(plan)], as_json=json, quiet=quiet)
        return
    if plan.missing and not cpu and scale != "tiny" and not torch.cuda.is_available():
        raise WellcondError(
            f"{known} at scale {scale} expects a GPU, and there is none here.\n"
            "  --scale tiny takes minutes; --cpu runs it here all the same; --dry-run shows the plan."
        )
    code = 0
    with leaving_together():
        for study in plan.studies:
            if code != 130 and study.missing:
                code = max(code, _run_study(study, jobs, cpu=cpu, silent=quiet or json))
    if cli.is_first_process():
        collection = None if entry.kind == "static" else Collection(home)
        tables = write_outcome(known, plan.entry, scale, collection, home / known)
        _show(tables, as_json=json, quiet=quiet, end=f"written: {home / known / f'{known}.md'}")
    raise typer.Exit(code)


def _use_data(data: Path | None) -> Path | None:
    """The user's data, if they are images in train/ and val/; a mirror is put in front of those that are known."""
    from wellcond.lab.data.disk import MIRROR_VARIABLE

    if data is None or (data / "train").is_dir():
        return data
    known = os.environ.get(MIRROR_VARIABLE)
    os.environ[MIRROR_VARIABLE] = os.pathsep.join([str(data.resolve()), *([known] if known else [])])
    return None


def _run_study(study: PlannedStudy, jobs: str, *, cpu: bool, silent: bool) -> int:
    from wellcond.cli.console import make_console
    from wellcond.cli.runs import choose_workers, exit_code, tell_end, watch
    from wellcond.lab.report.glue import rebuild_glue

    first = cli.is_first_process()
    if first:
        study.describe()
        if not silent:
            make_console().print(f"{study.name}: {study.missing} of {study.runs} runs to do", markup=False)
    workers = choose_workers(jobs, study.recipe, cpu=cpu)
    outcomes = [watch(len(study.jobs), lambda observe: study.run(workers, observe), quiet=silent)]
    if study.glue_folders and not outcomes[0].interrupted:
        count = len(study.glue_folders)
        outcomes.append(watch(count, lambda observe: study.fine_tune(workers, observe), quiet=silent))
        if first and outcomes[1].records:
            rebuild_glue(study.folder)
    for outcome, folders in zip(outcomes, (study.jobs, study.glue_folders), strict=False):
        if not silent:
            tell_end(outcome, len(folders))
    return max(map(exit_code, outcomes))


def _show(tables: list[Table], *, as_json: bool = False, quiet: bool = False, end: str = "") -> None:
    from wellcond.cli.console import print_tables

    if as_json:
        rows = [[dict(zip(table.header, row, strict=True)) for row in table.rows] for table in tables]
        parts = zip(tables, rows, strict=True)
        print(to_json([{"title": t.title, "rows": shown, "notes": list(t.notes)} for t, shown in parts], indent=1))
    elif not quiet:
        print_tables(tables, end)
