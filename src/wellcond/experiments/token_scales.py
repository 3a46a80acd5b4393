"""Scales of what a model's first block receives: embeddings of words or patches, and those of positions.

    tokens(embeddings=3.46, positions=25)

Embeddings are the vectors that depend on the word or the patch. Positions are those that do not: learned position
embeddings, and the class, distillation and register tokens. Segments of BERT (token types) are neither and stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from wellcond.attention.find import scan_attention
from wellcond.experiments.settings import RecipeError

KINDS = ("embeddings", "positions")
LARGEST = 1e6
POSITIONS = ("pos_embed", "position_embedding", "embed_positions", "wpe")
"""Parts of the names of learned position embeddings."""
CONSTANT_TOKENS = ("cls_token", "dist_token", "distillation_token", "reg_token", "register_tokens")
PATCHES = ("patch_embed", "patch_embeddings", "stem")


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
    finders = {"embeddings": _embeddings, "positions": _positions}
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


def _positions(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    attentions = tuple(f"{site.name}." for site in scan_attention(model).sites)
    named = [(name, parameter) for name, parameter in model.named_parameters() if not name.startswith(attentions)]
    learned = [(name, parameter) for name, parameter in named if any(part in name for part in POSITIONS)]
    if learned:
        yield from learned
        yield from ((name, parameter) for name, parameter in named if name.rpartition(".")[2] in CONSTANT_TOKENS)


def _embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Of words where there are any, else of patches."""
    words = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and _says_words(model, name, module)
    ]
    for name, module in words or _patch_layers(model):
        yield from ((f"{name}.{own}", parameter) for own, parameter in module.named_parameters(recurse=False))


def _says_words(model: nn.Module, name: str, module: nn.Embedding) -> bool:
    input_embeddings = getattr(model, "get_input_embeddings", None)  # of Hugging Face
    if callable(input_embeddings):
        return module is input_embeddings()
    return name.rpartition(".")[2] in ("word_embedding", "word_embeddings")


def _patch_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The last layer with weights of every patch embedding that is not inside another."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name.rpartition(".")[2] in PATCHES and not inside:
            found.append(name)
            layers = [
                (f"{name}.{path}" if path else name, layer)
                for path, layer in module.named_modules()
                if any(True for _ in layer.parameters(recurse=False))
            ]
            yield from layers[-1:]
