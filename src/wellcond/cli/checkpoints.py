"""`wellcond init` and `wellcond fold`: a model, or a checkpoint of it, in; a plain checkpoint out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from wellcond.cli import app as cli
from wellcond.errors import WeightError
from wellcond.models import build_model, parse_values

if TYPE_CHECKING:
    from torch import nn

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
    arguments, options = cli.read_model(model, model_arg, weights), parse_values(option or [])
    cli.check_outputs(output, force=force, suffix=".safetensors")
    if (input is None) == (method == "calibrated"):
        raise typer.BadParameter("--input is for --method calibrated, which needs it; give both or neither")
    if input is not None:
        cli.check_input(input)
    import torch

    from wellcond.attention.find import find_attention
    from wellcond.cli.inputs import make_batch
    from wellcond.init.apply import init_
    from wellcond.weights import save_weights

    built = build_loaded(model, arguments, weights, seed)
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
    arguments = cli.read_model(model, model_arg, weights)
    cli.check_outputs(output, force=force, suffix=".safetensors")
    from wellcond.attention.effective import conditioning_of
    from wellcond.conditioning.apply import fold_
    from wellcond.weights import save_weights

    built = build_loaded(model, arguments, weights, 0, averaged=ema)
    settings = conditioning_of(built)
    if settings is None:
        raise WeightError(f"{weights} is a plain checkpoint already: it names no correction to fold")
    fold_(built)
    save_weights(built, output, overwrite=force)
    typer.echo(f"wrote {output}: folded {settings['method']!r} into {len(settings['sites'])} attentions")


def build_loaded(
    spec: str, arguments: dict[str, Any], weights: Path | None, seed: int, *, averaged: bool = False
) -> nn.Module:
    """Build the model of a command, with a checkpoint if one is given; if that holds raw weights, it is conditioned."""
    import torch

    from wellcond.conditioning.apply import recondition_
    from wellcond.weights import conditioning_in, load_state, read_state_dict

    torch.manual_seed(seed)
    model = build_model(spec, arguments)
    if weights is None:
        return model
    state = read_state_dict(weights, averaged=averaged)
    settings = conditioning_in(state)
    if settings is not None:
        try:
            recondition_(model, settings)
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            raise WeightError(
                f"{weights}: the checkpoint's wellcond marker is damaged: {settings} cannot be applied ({error}). "
                "Write the checkpoint again"
            ) from error
    load_state(model, state, str(weights))
    return model
