"""`wellcond fold`: a conditioned checkpoint in, a plain one out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wellcond.cli.app import MODELS, Force, Model, ModelArguments, Output, app
from wellcond.cli.checks import check_outputs, check_weights
from wellcond.errors import WeightError, WellcondError
from wellcond.models import build_model, check_model, parse_values

if TYPE_CHECKING:
    from torch import nn


@app.command("fold", rich_help_panel=MODELS)
def fold(
    model: Model,
    output: Output,
    weights: Annotated[Path, typer.Option(help="Checkpoint of a conditioned model.")],
    ema: Annotated[
        bool, typer.Option("--ema", help="Take the EMA weights of a checkpoint of timm's train script.")
    ] = False,
    model_arg: ModelArguments = None,
    force: Force = False,
) -> None:
    """Fold the correction of a conditioned checkpoint into its weights, and write a plain checkpoint."""
    arguments = parse_values(model_arg or [])
    check_model(model, arguments)
    check_outputs([output], force=force, suffix=".safetensors")
    check_weights(weights)
    from wellcond.conditioning.apply import fold_
    from wellcond.weights import save_weights

    built = build_model(model, arguments)
    settings = load_raw_or_plain(built, weights, averaged=ema)
    if settings is None:
        raise WeightError(f"{weights} is a plain checkpoint already: it names no correction to fold")
    fold_(built)
    save_weights(built, output, overwrite=force)
    typer.echo(f"wrote {output}: folded {settings['method']!r} into {len(settings['sites'])} attentions")


def build_loaded(spec: str, arguments: dict[str, Any], weights: Path | None, seed: int) -> nn.Module:
    """Build the model of a command, with the weights of a checkpoint if one is given."""
    import torch

    torch.manual_seed(seed)
    model = build_model(spec, arguments)
    if weights is not None:
        load_raw_or_plain(model, weights)
    return model


def load_raw_or_plain(model: nn.Module, path: Path, *, averaged: bool = False) -> dict[str, Any] | None:
    """Load a checkpoint; if it holds raw weights, condition the model as it says first.

    Returns: the settings of its conditioning; None of a plain checkpoint.
    """
    from wellcond.conditioning.apply import recondition_
    from wellcond.weights import conditioning_in, load_state, read_state_dict

    state = read_state_dict(path, averaged=averaged)
    settings = conditioning_in(state)
    if settings is not None:
        try:
            recondition_(model, settings)
        except WellcondError:
            raise
        except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
            raise WeightError(
                f"{path}: the checkpoint's wellcond marker is damaged: {settings} cannot be applied ({error}). "
                "Write the checkpoint again"
            ) from error
    load_state(model, state, str(path))
    return settings
