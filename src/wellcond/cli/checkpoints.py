"""`wellcond init` and `wellcond fold`: a model, or a checkpoint of it, in; a plain checkpoint out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from wellcond.cli import app as cli
from wellcond.errors import WeightError
from wellcond.models import parse_values

CALIBRATION_SAMPLES = 32


@cli.app.command("init", rich_help_panel=cli.MODELS)
def init(
    model: cli.Model,
    output: cli.Output,
    method: Annotated[
        str,
        Option(metavar="NAME", help="Or calibrated, gaussian, mimetic, nanochat, orthogonal, small, t_fixup, default."),
    ] = "conditioned",
    weights: cli.Weights = None,
    option: Annotated[list[str] | None, Option(metavar="KEY=VALUE", help="Of the method; repeatable.")] = None,
    input: Annotated[str | None, Option(metavar="INPUT", help=f"For calibrated: {cli.INPUT_HELP}")] = None,
    model_arg: cli.ModelArguments = None,
    seed: cli.Seed = 0,
    force: cli.Force = False,
) -> None:
    """Initialise the attention of MODEL and write a plain checkpoint."""
    options = parse_values(option or [])
    cli.check_outputs(output, force=force, suffix=".safetensors")
    if (input is None) == (method == "calibrated"):
        raise typer.BadParameter("--input is for --method calibrated, which needs it; give both or neither")
    if input is not None:
        cli.check_input(input)
    built = cli.build_loaded(model, model_arg, weights, seed)
    import torch

    from wellcond.attention.find import find_attention
    from wellcond.cli.inputs import make_batch
    from wellcond.init.apply import init_
    from wellcond.weights import save_weights

    batch = {} if input is None else {"batch": make_batch(built, input, samples=CALIBRATION_SAMPLES, seed=seed)[0]}
    try:
        init_(built, method, generator=torch.Generator().manual_seed(seed), **options, **batch)
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        said = f" with {', '.join(option)}" if option else ""
        raise cli.OptionError(f"--method {method}{said}: {error}") from error
    save_weights(built, output, overwrite=force)
    typer.echo(f"wrote {output}: {len(find_attention(built))} attentions initialised as {method!r}")


@cli.app.command("fold", rich_help_panel=cli.MODELS)
def fold(
    model: cli.Model,
    output: cli.Output,
    weights: Annotated[Path, Option(help="Checkpoint of a conditioned model.")],
    ema: Annotated[bool, Option("--ema", help="Take the EMA weights of a checkpoint of timm's train script.")] = False,
    model_arg: cli.ModelArguments = None,
    force: cli.Force = False,
) -> None:
    """Fold the correction of a conditioned checkpoint into its weights, and write a plain checkpoint."""
    cli.check_outputs(output, force=force, suffix=".safetensors")
    built = cli.build_loaded(model, model_arg, weights, 0, averaged=ema)
    from wellcond.attention.effective import conditioning_of
    from wellcond.conditioning.apply import fold_
    from wellcond.weights import save_weights

    settings = conditioning_of(built)
    if settings is None:
        raise WeightError(f"{weights} is a plain checkpoint already: it names no correction to fold")
    fold_(built)
    save_weights(built, output, overwrite=force)
    typer.echo(f"wrote {output}: folded {settings['method']!r} into {len(settings['sites'])} attentions")
