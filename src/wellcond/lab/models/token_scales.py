"""Scales of what a model's first block receives: embeddings of words or patches, and those of positions.

    tokens(embeddings=3.46, positions=25)

Embeddings are the vectors that depend on the word or the patch. Positions are those that do not: learned position
embeddings, and the class, distillation and register tokens. Segments of BERT (token types) are neither and stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wellcond.init.tokens import find_embeddings, find_positions
from wellcond.lab.settings import RecipeError

KINDS = ("embeddings", "positions")
LARGEST = 1e6


def check_factors(factors: dict[str, Any]) -> dict[str, float]:
    """Factors in the order embeddings, positions; those of 1 change nothing and are left out.

    Raises: ValueError.

    Example:
        >>> check_factors({"positions": 25, "embeddings": 1})
        {'positions': 25}
    """
    for name, factor in factors.items():
        if name not in KINDS:
            raise ValueError(f"tokens: expected {' or '.join(KINDS)}, found {name!r}")
        if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not 0 < factor <= LARGEST:
            raise ValueError(f"tokens: {name}: expected a factor above 0 and at most {LARGEST:g}, found {factor!r}")
    return {name: factors[name] for name in KINDS if factors.get(name, 1) != 1}


@torch.no_grad()
def scale_tokens_(model: nn.Module, factors: dict[str, float]) -> list[str]:
    """Multiply embeddings, positions or both, in place.

    An output layer that is tied to the word embeddings is the same weight, and follows them. Patch embeddings are
    scaled where their size is decided: weight and bias of the projection, or of the norm that comes after it.

    Args:
        model: any model; nothing is changed if it lacks one of the kinds.
        factors: of ``embeddings`` and of ``positions``.

    Returns: names of the parameters that were multiplied.

    Raises: RecipeError.
    """
    finders = {"embeddings": find_embeddings, "positions": find_positions}
    plan = {kind: dict(finders[kind](model)) for kind in KINDS if kind in factors}
    for kind, found in plan.items():
        if not found:
            raise RecipeError(
                f"tokens: expected learned {kind} in {type(model).__name__}, found none"
                + (" (rotary, relative or fixed positions have no weights to scale)" if kind == "positions" else "")
                + f"; leave {kind} out"
            )
    for kind, found in plan.items():
        for parameter in found.values():
            parameter.mul_(factors[kind])
    return [name for found in plan.values() for name in found]
