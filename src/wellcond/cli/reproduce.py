"""`wellcond reproduce ID`: the papers' tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from wellcond.cli import app as cli
from wellcond.errors import WellcondError, check_choice
from wellcond.files import to_json

if TYPE_CHECKING:
    from wellcond.lab.report.table import Table
    from wellcond.lab.reproduce.plan import PlannedStudy
    from wellcond.lab.train.compare import Outcome


@cli.app.command("reproduce", rich_help_panel=cli.PAPERS)
def reproduce(
    id: Annotated[str | None, Argument(metavar="[ID]", help="Table, figure or ablation: C-T1, S-F2, A-scale.")] = None,
    list_all: Annotated[bool, Option("--list", help="List every id, and the runs that are there.")] = False,
    scale: Annotated[str, Option(metavar="NAME", help="tiny (CPU, minutes), small (GPU, hours) or paper.")] = "tiny",
    dry_run: Annotated[bool, Option("--dry-run", help="Print the plan; run nothing.")] = False,
    records: Annotated[Path | None, Option(help="Print from committed records, such as results; run nothing.")] = None,
    methods: Annotated[str | None, Option(metavar="LIST", help="Only these methods, and default.")] = None,
    seeds: cli.Seeds = None,
    set: cli.Overrides = None,
    folder: Annotated[Path | None, Option("--folder", "-o", help="Where to write; reproduce/SCALE by default.")] = None,
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
    if records is not None:
        cli.check_is_folder(records)
    numbers, at_once = cli.read_seeds(seeds), cli.read_jobs(jobs)
    import torch

    from wellcond.cli.runs import exit_code, training_in
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
    plan = make_plan(known, entry, scale, PlanOptions(home, numbers, asked, tuple(set or ()), cpu))
    if dry_run:
        _show([plan_table(plan)], as_json=json, quiet=quiet)
        return
    if plan.missing and not cpu and scale != "tiny" and not torch.cuda.is_available():
        raise WellcondError(
            f"{known} at scale {scale} expects a GPU, and there is none here.\n"
            "  --scale tiny takes minutes; --cpu runs it here all the same; --dry-run shows the plan."
        )
    outcomes: list[Outcome] = []
    with training_in(home):
        for study in plan.studies:
            if study.missing and not any(outcome.interrupted for outcome in outcomes):
                outcomes += _run_study(study, at_once, cpu=cpu, silent=quiet or json)
    if cli.is_first_process():
        collection = None if entry.kind == "static" else Collection(home)
        tables = write_outcome(known, plan.entry, scale, collection, home / known)
        _show(tables, as_json=json, quiet=quiet, end=f"written: {home / known / f'{known}.md'}")
    raise typer.Exit(max(map(exit_code, outcomes), default=0))


def _run_study(study: PlannedStudy, at_once: int | None, *, cpu: bool, silent: bool) -> list[Outcome]:
    """Run what is missing of a study, then of its fine-tuning."""
    from wellcond.cli.runs import Comparison, run_jobs, tell_end
    from wellcond.lab.report.glue import rebuild_glue
    from wellcond.lab.train.glue import plan_glue

    comparison = Comparison(study.recipe, study.methods, study.seeds, study.folder, at_once=at_once, silent=silent)
    comparison.describe()
    comparison.say(f"{study.name}: {study.missing} of {study.runs} runs to do")
    outcomes = [comparison.run(study.jobs)]
    if study.glue_folders and not outcomes[0].interrupted:
        plan = plan_glue(study.folder, base=study.jobs[0].base, cpu=cpu)
        outcomes.append(run_jobs(plan, at_once, quiet=silent, glue=True))
        if cli.is_first_process() and outcomes[1].records:
            rebuild_glue(study.folder)
    for outcome, count in zip([] if silent else outcomes, (len(study.jobs), len(study.glue_folders)), strict=False):
        tell_end(outcome, count)
    return outcomes


def _show(tables: list[Table], *, as_json: bool = False, quiet: bool = False, end: str = "") -> None:
    from wellcond.cli.console import print_tables

    if as_json:
        rows = [[dict(zip(table.header, row, strict=True)) for row in table.rows] for table in tables]
        parts = zip(tables, rows, strict=True)
        print(to_json([{"title": t.title, "rows": shown, "notes": list(t.notes)} for t, shown in parts], indent=1))
    elif not quiet:
        print_tables(tables, end)
