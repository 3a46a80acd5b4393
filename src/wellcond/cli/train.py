"""`wellcond train`, one run; `wellcond glue`, which fine-tunes and scores runs; and the recipes that ship."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from wellcond.cli import app as cli
from wellcond.errors import WellcondError, check_choice
from wellcond.files import to_json


@cli.app.command("train", rich_help_panel=cli.EXPERIMENTS)
def train(
    recipe: Annotated[str, Argument(metavar="RECIPE", help="Name of a shipped recipe, or FILE.yaml.")],
    method: Annotated[str | None, Option(metavar="NAME", help="As identity(lam=2) or conditioned+balanced.")] = None,
    seed: Annotated[int, Option(metavar="N", min=0, help="Seed of everything random.")] = 0,
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
    overrides = cli.read_overrides(recipe, scale, set, data, input, label)
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
    with runs.training_in(place):
        outcome = runs.run_jobs([job], 1, quiet=quiet or json)
    if outcome.failures and not json:
        raise WellcondError(outcome.failures[0][1])
    code = runs.tell_end(outcome, 1, as_json=json)
    # A comparison that continues with other runs has the exit code 1, whatever error a run ends with.
    raise typer.Exit(2 if outcome.failures else code)


@cli.app.command("glue", rich_help_panel=cli.EXPERIMENTS)
def glue(
    run: Annotated[Path, Argument(metavar="RUN", help="A run of masked language modelling, or a comparison.")],
    tasks: Annotated[str | None, Option(metavar="LIST", help="Such as cola,sst2; all eight by default.")] = None,
    limit: Annotated[
        int | None, Option(metavar="N", min=0, help="Rows of a split, 0: all; by default 3000 at scale tiny, else all.")
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
    at_once = cli.read_jobs(jobs)
    from wellcond.cli import runs
    from wellcond.cli.console import print_tables
    from wellcond.lab.report.glue import load_glue, rebuild_glue, scores_table
    from wellcond.lab.train.glue import plan_glue

    plan = plan_glue(run, tasks=chosen, limit=limit, cpu=cpu)
    with runs.training_in(run):
        outcome = runs.run_jobs(plan, at_once, quiet=quiet, glue=True)
    if cli.is_first_process() and outcome.records:
        page = rebuild_glue(run)
        if not quiet:
            print_tables([scores_table(load_glue(run))], f"tables: {page}")
    raise typer.Exit(runs.tell_end(outcome, len(plan)))


@cli.app.command("recipes", rich_help_panel=cli.EXPERIMENTS)
def recipes(json: cli.Json = False) -> None:
    """List the recipes that ship with wellcond."""
    cli.need_train_extra()
    from wellcond.cli.console import print_tables
    from wellcond.lab.load_recipe import parse_recipe, shipped_recipes
    from wellcond.lab.report.table import Cell, Table

    listed = [parse_recipe(shipped.text, f"{shipped.scale}/{shipped.name}") for shipped in shipped_recipes()]
    if json:
        print(to_json([recipe.model_dump(mode="json") for recipe in listed], indent=1))
        return
    rows: list[dict[str, Cell]] = []
    for recipe in listed:
        length, hours = recipe.training.length, recipe.training.hours
        amount = f"{length.epochs:g} epochs" if length.epochs else f"{length.steps} steps"
        shown = amount if hours is None else f"{hours:g} hours"
        rows.append({"recipe": recipe.name, "scale": recipe.scale, "length": shown, "what": recipe.title})
    print_tables([Table.of("recipes", "Recipes", rows, words=range(4))])
