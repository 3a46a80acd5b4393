"""`wellcond init` and `wellcond fold`: checkpoints in, plain checkpoints out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from wellcond.attention.find import find_attention
from wellcond.cli.inputs import make_batch, try_forward
from wellcond.conditioning.apply import fold_, recondition_
from wellcond.errors import WeightError, WellcondError
from wellcond.init.apply import init_
from wellcond.models import build_model
from wellcond.weights import conditioning_in, load_state, load_weights, read_state_dict, save_weights

CALIBRATION_SAMPLES = 32


class MethodError(WellcondError, ValueError):
    """An initialisation that cannot be done with the options given."""


def run_init(
    model: str,
    arguments: dict[str, Any],
    method: str,
    options: dict[str, Any],
    *,
    weights: Path | None,
    teacher: str | None,
    teacher_weights: Path | None,
    input: str | None,
    seed: int,
    output: Path,
    force: bool,
) -> None:
    """Initialise and write.

    Raises: WellcondError subclasses.
    """
    torch.manual_seed(seed)
    built = build_model(model, arguments)
    if weights is not None:
        load_weights(built, weights)
    given: dict[str, Any] = {}
    if teacher is not None:
        given["teacher"] = build_model(teacher)
        if teacher_weights is not None:
            load_weights(given["teacher"], teacher_weights)
    if input is not None:
        given["batch"], _ = make_batch(built, input, samples=CALIBRATION_SAMPLES, seed=seed)
        try_forward(built, given["batch"])
    try:
        init_(built, method, generator=torch.Generator().manual_seed(seed), **options, **given)
    except (WellcondError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        if not options:
            raise
        shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise MethodError(f"--method {method} with {shown}: {error}\n  Correct --option, or leave it out.") from error
    save_weights(built, output, overwrite=force)
    typer.echo(f"wrote {output}: {len(find_attention(built))} attentions initialised as {method!r}")


def run_fold(
    model: str, arguments: dict[str, Any], weights: Path, *, averaged: bool, output: Path, force: bool
) -> None:
    """Fold and write.

    Raises: WellcondError subclasses.
    """
    built = build_model(model, arguments)
    settings = load_raw_or_plain(built, weights, averaged=averaged)
    if settings is None:
        raise WeightError(f"{weights} is a plain checkpoint already: it names no correction to fold")
    fold_(built)
    save_weights(built, output, overwrite=force)
    typer.echo(f"wrote {output}: folded {settings['method']!r} into {len(settings['sites'])} attentions")


def load_raw_or_plain(model: nn.Module, path: Path, *, averaged: bool = False) -> dict[str, Any] | None:
    """Load a checkpoint; if it holds raw weights, condition the model as it says first."""
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
