"""Scale-true proxies: the start of a small model at the scale of the large one that it stands in for.

What a layer-normed token sees of a weight is sigma sqrt(fan_in). Libraries that draw with one deviation whatever the
width (timm 0.02, initializer_range of Hugging Face) start a model of width 64 at 0.16 where their model of width 768
has 0.55; those that draw by fan (Xavier, Kaiming, torch.nn) give every width the same. Which rule a weight was drawn by
is read off the weight itself.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from wellcond.attention.find import find_attention
from wellcond.errors import WellcondError
from wellcond.lab.models.blocks import Matrix, block_matrices
from wellcond.lab.settings import RecipeError, Settings

LIBRARY_STD = 0.02
"""Of timm and of our own architectures; configurations of Hugging Face name theirs."""
ERRORS = 6.0
"""A measured deviation agrees with a rule within so many of its standard errors."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")


class ProxySettings(Settings):
    """The model that a recipe stands in for."""

    width: PositiveInt
    """Its width; of a model with several stages, that of the first."""


@dataclass(frozen=True)
class Rescaled:
    """One weight of a block, and the factor that its start was multiplied by."""

    name: str
    std: float
    factor: float


@torch.no_grad()
def scale_true_(model: nn.Module, width: int) -> list[Rescaled]:
    """Start every matrix of the blocks (Q, K, V, O, MLP) at the sigma sqrt(fan_in) of a model `width` wide, in place.

    Weights of one fixed deviation are multiplied by sqrt(width / width of the model), in all stages alike; weights
    drawn by fan stay. Depth and inner ratios stay the model's own, as do embeddings, positions, norms, biases and the
    head.

    Args:
        model: freshly built, by its library's own initialisation.
        width: of the model that it stands in for.

    Returns: the matrices, in the order of the model.

    Raises: RecipeError, with nothing changed, where the width or a weight's rule cannot be told.
    """
    try:
        sites = find_attention(model)
        weights = list(block_matrices(model, sites))
    except WellcondError as error:
        raise RecipeError(f"proxy: the width of {type(model).__name__} cannot be told: {error}") from error
    factor = math.sqrt(width / sites[0].in_features)
    fixed = float(getattr(getattr(model, "config", None), "initializer_range", None) or LIBRARY_STD)
    depth = len({weight.block for weight in weights})
    plan = [(weight, factor if _is_fixed(weight, fixed, depth) else 1.0) for weight in weights]
    rescaled = []
    for weight, times in plan:
        rescaled.append(Rescaled(weight.name, _deviation(weight.parameter), times))
        if times != 1.0:
            weight.parameter.mul_(times)
    return rescaled


def check_untrained(name: str) -> None:
    """Raise RecipeError for a MODEL that is a folder with trained weights in it."""
    folder = Path(name.removeprefix("hf:"))
    if name.startswith("hf:") and folder.is_dir():
        trained = sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHT_FILES)
        if trained:
            raise RecipeError(
                f"proxy: expected a model that starts from scratch, found trained weights in {folder} ({trained[0]}); "
                "remove proxy, or the weights"
            )


def _is_fixed(weight: Matrix, fixed: float, depth: int) -> bool:
    """Whether a weight was drawn with the library's one deviation, not by fan.

    Raises: RecipeError if neither or both agree with what is measured.
    """
    std = _deviation(weight.parameter)
    if std == 0.0:
        return False
    tolerance = ERRORS / math.sqrt(2 * weight.parameter.numel())
    fan_in, fan_out = weight.fan_in, weight.fan_out
    by_fan = [
        *(math.sqrt(gain / fan) for gain, fan in itertools.product((1 / 3, 1.0, 2.0), (fan_in, fan_out))),
        math.sqrt(2 / (fan_in + fan_out)),
        math.sqrt(2 / (fan_in + fan_out / 3)),  # of each third of a fused Q, K, V
    ]
    # Residual branches of GPT-2 are divided by sqrt(2 layers), those of BEiT by the root of twice their own number.
    by_library = [fixed / math.sqrt(division) for division in (1, 2 * depth, 2 * weight.index)]
    fits_fan, fits_library = (any(abs(std / one - 1) <= tolerance for one in rules) for rules in (by_fan, by_library))
    if fits_fan == fits_library:
        which = "by fan and with one deviation alike" if fits_fan else "by none of the rules that are known"
        fans = ", ".join(f"{one:.4g}" for one in sorted(set(by_fan)))
        raise RecipeError(
            f"proxy: {weight.name} has standard deviation {std:.4g} at {fan_in} inputs and {fan_out} outputs, {which} "
            f"(one deviation: {fixed:g}; by fan: {fans}), so its scale in a wider model cannot be told; remove proxy"
        )
    return fits_library


def _deviation(weight: Tensor) -> float:
    return float(weight.detach().double().square().mean().sqrt())
