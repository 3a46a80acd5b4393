"""Weights out of files, for the command line and the laboratory: safetensors, or what torch.save wrote; never a pickle.

`torch.load` is called with `weights_only=True`. Writing is `wellcond.conditioning.checkpoint.save_weights`.
"""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.conditioning.checkpoint import MARKER, read_settings
from wellcond.errors import MissingFileError, WeightError, needs_extra

AVERAGED = "state_dict_ema"
NO_AVERAGE = f"expected a moving average beside the model, under {AVERAGED!r} as timm's train script saves it"


def read_state_dict(path: Path, *, averaged: bool = False) -> dict[str, Tensor]:
    """Tensors of a checkpoint file.

    Args:
        path: .safetensors, or what torch.save wrote.
        averaged: the moving average that timm's train script saves beside the model.

    Raises: MissingFileError; WeightError if it is damaged, or holds anything but tensors, or no average.
    """
    if not path.is_file():
        raise MissingFileError(f"no such weights file: {path}")
    if path.suffix == ".safetensors":
        if averaged:
            raise WeightError(f"{path}: {NO_AVERAGE}, and a safetensors file holds one model")
        with needs_extra("safetensors", "cli"):
            import safetensors.torch
        try:
            return safetensors.torch.load_file(path)
        except Exception as error:
            raise WeightError(
                f"{path} is not a readable safetensors file: {error}. Copy it again, or write it with "
                "safetensors.torch.save_file"
            ) from error
    try:
        # timm's train script saves its arguments beside the weights: plain data under names.
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore", UserWarning)  # of a pickle that torch.save did not write
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own message recommends to load it all the same.
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise WeightError(
            f"{path}: expected a state dict of tensors, found a pickle of {named[1] if named else 'other objects'}, "
            "which could run any code; wellcond never unpickles code, and nothing was run. Where you trust the file, "
            "write its state dict with safetensors.torch.save_file and give that"
        ) from error
    except Exception as error:
        raise WeightError(f"{path} is not a readable checkpoint of torch.save: {error}") from error
    if averaged and not (isinstance(loaded, dict) and isinstance(loaded.get(AVERAGED), dict)):
        raise WeightError(f"{path}: {NO_AVERAGE}; leave --ema out for the model's own weights")
    for key in (AVERAGED,) if averaged else ("state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise WeightError(f"{path} does not hold a state dict: expected names with tensors")
    return loaded


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a checkpoint into a model that must match it exactly; tied weights may be stored once.

    Raises: WeightError naming what is missing, unexpected, or of another shape; the model is then unchanged.
    """
    load_state(model, read_state_dict(path), str(path))


def load_state(model: nn.Module, state: dict[str, Tensor], what: str) -> None:
    """`load_weights` for tensors already read."""
    _check_fits(state, model.state_dict(keep_vars=True), what)
    model.load_state_dict(state, strict=False)


def _check_fits(state: dict[str, Tensor], own: dict[str, Tensor], what: str) -> None:
    present = {id(own[key]) for key in state if key in own}
    problems = [f"missing {key}" for key in own if key not in state and id(own[key]) not in present]
    problems += [f"unexpected {key}" for key in state if key not in own]
    problems += [
        f"{key}: {tuple(state[key].shape)} in the file, {tuple(own[key].shape)} in the model"
        for key in state
        if key in own and state[key].shape != own[key].shape
    ]
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise WeightError(f"{what} does not fit this model: {shown}")


def conditioning_in(state: dict[str, Tensor]) -> dict[str, Any] | None:
    """Settings under which a checkpoint's raw weights were trained; None for a plain checkpoint.

    Raises: WeightError if they are damaged.
    """
    return read_settings(state[MARKER]) if MARKER in state else None
