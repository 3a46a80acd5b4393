"""`wellcond glue RUN`: fine-tune a pre-trained model on GLUE and score it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli.commands import app
from wellcond.cli.experiment_commands import Cpu, Jobs, Json, Overrides, Quiet, need_train_extra
from wellcond.errors import WellcondError, check_choice


@app.command("glue")
def glue(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run of masked language modelling, or a comparison.")],
    tasks: Annotated[str | None, typer.Option(help="Comma-separated, such as cola,sst2; all eight by default.")] = None,
    seeds: Annotated[str, typer.Option(help="Of fine-tuning: how many, from 0; or a list such as 3,4,7.")] = "1",
    set: Overrides = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with cola/train.tsv and so on; the hub or its mirror by default.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Rows of a split; 0: all. By default 3000 at scale tiny, else all.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="Folder of the recipe of pre-training, if it has relative paths.")
    ] = None,
    jobs: Jobs = "auto",
    cpu: Cpu = False,
    keep_checkpoints: Annotated[
        bool, typer.Option("--keep-checkpoints", help="Keep the weights of fine-tuned models.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fine-tune a pre-trained model on the tasks of GLUE and score it; the same command resumes it.

    Corrections of a conditioned model are folded into its weights first.
    """
    need_train_extra()
    from wellcond.cli.experiment_checks import read_jobs, read_seeds
    from wellcond.lab.tasks.glue.benchmark import NAMES

    if not run.is_dir():
        raise WellcondError(f"no such folder: {run}")
    chosen = NAMES if tasks is None else [name.strip() for name in tasks.split(",")]
    for name in chosen:
        check_choice("GLUE task", name, NAMES)
    read_seeds(seeds)
    read_jobs(jobs)
    from wellcond.cli.glue import score_glue

    code = score_glue(
        run,
        tasks=chosen,
        seeds=seeds,
        overrides=set or [],
        data=data,
        limit=limit,
        base=base,
        jobs=jobs,
        cpu=cpu,
        keep_checkpoints=keep_checkpoints,
        as_json=json,
        quiet=quiet,
    )
    raise typer.Exit(code)
