"""`wellcond train`: one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wellcond.cli import app as cli
from wellcond.cli.checks import OptionError, check_experiment, data_overrides
from wellcond.errors import WellcondError


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
    overrides = [*data_overrides(data, input, label), *(set or [])]
    check_experiment(recipe, scale=scale, overrides=overrides, folder=folder)
    from wellcond.cli import runs
    from wellcond.lab.load_recipe import load_recipe
    from wellcond.lab.methods import parse_methods
    from wellcond.lab.train.run import Job

    if data is not None:
        overrides += runs.fit_to_data(recipe, scale=scale, overrides=overrides, quiet=quiet or json)
    loaded, base = load_recipe(recipe, scale=scale, overrides=overrides)
    asked = [loaded.method] if method is None else parse_methods(method)
    if len(asked) != 1:
        raise OptionError(f"--method: expected one method, found {len(asked)}; `wellcond compare` takes several")
    chosen = loaded.at_tuned(asked[0])
    place = folder or Path("runs") / f"{loaded.name}-{loaded.scale}" / chosen.slug / f"seed{seed}"
    job = Job(loaded, chosen, seed, place, base=base, cpu=cpu, local_code=trust_local_code)
    with runs.leaving_together(), runs.removing_untrained(place):
        outcome = runs.run_jobs([job], 1, quiet=quiet or json)
    known = bool(outcome.failures) and not outcome.crashed
    if known and not json:
        raise WellcondError(outcome.failures[0][1])
    code = runs.print_json(outcome) if json else runs.tell_end(outcome, 1)
    # A comparison that continues with other runs has the exit code 1, whatever error a run ends with.
    raise typer.Exit(2 if known else code)
