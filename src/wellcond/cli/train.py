"""`wellcond train`, one run; `wellcond glue`, which fine-tunes and scores runs; and the recipes that ship."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli import app as cli
from wellcond.errors import WellcondError, check_choice
from wellcond.files import to_json


@cli.app.command("train", rich_help_panel=cli.EXPERIMENTS)
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a shipped recipe, or FILE.yaml.")],
    method: Annotated[
        str | None, typer.Option(metavar="NAME", help="Such as conditioned, identity(lam=2) or conditioned+balanced.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of everything random.")] = 0,
    scale: cli.ScaleOption = None,
    set: cli.Overrides = None,
    data: cli.Data = None,
    input: cli.InputColumn = None,
    label: cli.LabelColumn = None,
    folder: cli.Folder = None,
    cpu: cli.Cpu = False,
    trust_local_code: cli.Trust = False,
    json: cli.Json = False,
    quiet: cli.Quiet = False,
) -> None:
    """Train one model with one method and one seed; the same command resumes an interrupted run."""
    cli.need_train_extra()
    overrides = [*cli.data_overrides(data, input, label), *(set or [])]
    cli.check_experiment(recipe, scale, overrides)
    from wellcond.cli import runs
    from wellcond.lab.load_recipe import load_recipe
    from wellcond.lab.methods import parse_methods
    from wellcond.lab.train.run import Job

    if data is not None:
        overrides += runs.fit_to_data(recipe, scale=scale, overrides=overrides, quiet=quiet or json)
    loaded, base = load_recipe(recipe, scale=scale, overrides=overrides)
    asked = [loaded.method] if method is None else parse_methods(method)
    if len(asked) != 1:
        raise cli.OptionError(f"--method: expected one method, found {len(asked)}; `wellcond compare` takes several")
    chosen = loaded.at_tuned(asked[0])
    place = folder or Path("runs") / f"{loaded.name}-{loaded.scale}" / chosen.slug / f"seed{seed}"
    job = Job(loaded, chosen, seed, place, base=base, cpu=cpu, local_code=trust_local_code)
    with runs.leaving_together(), runs.removing_untrained(place):
        outcome = runs.run_jobs([job], 1, quiet=quiet or json)
    if outcome.failures and not json:
        raise WellcondError(outcome.failures[0][1])
    code = runs.print_json(outcome) if json else runs.tell_end(outcome, 1)
    # A comparison that continues with other runs has the exit code 1, whatever error a run ends with.
    raise typer.Exit(2 if outcome.failures else code)


@cli.app.command("glue", rich_help_panel=cli.EXPERIMENTS)
def glue(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run of masked language modelling, or a comparison.")],
    tasks: Annotated[str | None, typer.Option(metavar="LIST", help="Such as cola,sst2; all eight by default.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Rows of each split; 0 means all. By default 3000 at scale tiny, else all."
        ),
    ] = None,
    jobs: cli.Jobs = "auto",
    cpu: cli.Cpu = False,
    quiet: cli.Quiet = False,
) -> None:
    """Fine-tune a pre-trained model on GLUE and score it; the same command resumes.

    Corrections of a conditioned model are folded into its weights first.
    """
    cli.need_train_extra()
    from wellcond.lab.report.glue import TITLES  # without torch, as long as there may be a mistake

    cli.check_is_folder(run)
    chosen = list(TITLES) if tasks is None else [name.strip() for name in tasks.split(",")]
    for name in chosen:
        check_choice("GLUE task", name, list(TITLES))
    cli.read_jobs(jobs)
    from wellcond.cli import runs
    from wellcond.cli.console import print_tables
    from wellcond.lab.report.glue import load_glue, rebuild_glue, scores_table
    from wellcond.lab.train.glue import plan_glue, run_glue

    plan = plan_glue(run, tasks=chosen, limit=limit, cpu=cpu)
    workers = runs.choose_workers(jobs, plan[0].recipe, cpu=cpu)
    with runs.leaving_together():
        outcome = runs.watch(
            len(plan), lambda observe: run_glue(plan, num_workers=workers, observer=observe), quiet=quiet
        )
    if cli.is_first_process() and outcome.records:
        page = rebuild_glue(run)
        if not quiet:
            print_tables([scores_table(load_glue(run))], f"tables: {page}")
    raise typer.Exit(runs.tell_end(outcome, len(plan)))


@cli.app.command("recipes", rich_help_panel=cli.EXPERIMENTS)
def recipes(json: cli.Json = False) -> None:
    """List the recipes that ship with wellcond."""
    cli.need_train_extra()
    from wellcond.cli.console import make_console, print_table
    from wellcond.lab.load_recipe import load_recipe, shipped_recipes
    from wellcond.lab.report.table import Table

    listed = [load_recipe(name, scale=scale)[0] for scale, name in (found.split("/") for found in shipped_recipes())]
    if json:
        print(to_json([recipe.model_dump(mode="json") for recipe in listed], indent=1))
        return
    rows = []
    for recipe in listed:
        length, hours = recipe.training.length, recipe.training.hours
        amount = f"{length.epochs:g} epochs" if length.epochs else f"{length.steps} steps"
        rows.append((recipe.name, recipe.scale, amount if hours is None else f"{hours:g} hours", recipe.title))
    header = ("recipe", "scale", "length", "what")
    print_table(make_console(), "Recipes", Table("recipes", "", header, tuple(rows), (), frozenset(range(4))))
