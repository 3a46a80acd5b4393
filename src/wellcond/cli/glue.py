"""`wellcond glue RUN`: fine-tune a pre-trained model on GLUE and score it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli.app import EXPERIMENTS, Cpu, Jobs, Json, Overrides, Quiet, app, need_train_extra
from wellcond.cli.checks import check_is_folder, read_jobs, read_seeds
from wellcond.errors import check_choice


@app.command("glue", rich_help_panel=EXPERIMENTS)
def glue(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run of masked language modelling, or a comparison.")],
    tasks: Annotated[str | None, typer.Option(metavar="LIST", help="Such as cola,sst2; all eight by default.")] = None,
    seeds: Annotated[
        str, typer.Option(metavar="SEEDS", help="Seeds of fine-tuning: a number, or a list such as 3,4,7.")
    ] = "1",
    set: Overrides = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Rows of each split; 0 means all. By default 3000 at scale tiny, else all."
        ),
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="Folder that relative paths in the pre-training recipe start from.")
    ] = None,
    jobs: Jobs = "auto",
    cpu: Cpu = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fine-tune a pre-trained model on GLUE and score it; the same command resumes.

    Corrections of a conditioned model are folded into its weights first.
    """
    need_train_extra()
    from wellcond.lab.report.glue import TITLES  # without torch, as long as there may be a mistake

    check_is_folder(run)
    chosen = list(TITLES) if tasks is None else [name.strip() for name in tasks.split(",")]
    for name in chosen:
        check_choice("GLUE task", name, list(TITLES))
    numbers = read_seeds(seeds)
    read_jobs(jobs)
    from rich.console import Console
    from rich.markup import escape

    from wellcond.cli import runs
    from wellcond.cli.console import make_console
    from wellcond.lab.train.glue import plan_glue, run_glue

    plan = plan_glue(run, tasks=chosen, seeds=numbers, limit=limit, overrides=set or [], base=base, cpu=cpu)
    workers = runs.choose_workers(jobs, plan.jobs[0].recipe, cpu=cpu)
    with runs.leaving_together():
        outcome = runs.watch(
            len(plan.jobs),
            lambda observe: run_glue(plan, num_workers=workers, observer=observe),
            quiet=quiet or json,
        )
    if runs.is_first_process():
        if outcome.records:
            print_scores(run, as_json=json, quiet=quiet)
        out = Console(stderr=True) if json else make_console()
        for name in plan.left_out:
            out.print(f"[yellow]not scored:[/] {escape(name)}", soft_wrap=True)
        runs.tell_end(outcome, len(plan.jobs), out)
    raise typer.Exit(runs.exit_code(outcome))


def print_scores(folder: Path, *, as_json: bool, quiet: bool) -> None:
    """Write the tables of a folder that was scored, and print the first."""
    from wellcond.cli.console import print_tables
    from wellcond.files import to_json
    from wellcond.lab.report.glue import glue_json, load_glue, rebuild_glue, scores_table

    page = rebuild_glue(folder)
    if as_json:
        print(to_json(glue_json(load_glue(folder)), indent=1))
    elif not quiet:
        print_tables([scores_table(load_glue(folder))], f"tables: {page}")
