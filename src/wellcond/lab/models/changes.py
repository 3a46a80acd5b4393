"""What a recipe changes in a built model: norms, QK-norm, LayerScale, the scale of a proxy, the scale of tokens."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import nn

from wellcond.attention.blocks import Matrix, block_matrices, elements_around
from wellcond.attention.find import find_attention
from wellcond.attention.layout import out_features
from wellcond.attention.site import AttentionSite, find_blocks, is_matrix
from wellcond.errors import RecipeError, WellcondError
from wellcond.init.tokens import find_embeddings, find_positions
from wellcond.lab.models.head_norm import add_head_norm_
from wellcond.lab.settings import Settings

Norms = Literal["keep", "without_block_norms", "without_attention_norm"]

# By name: libraries have classes of their own. Batch norms are none of them: they do not normalise tokens.
TOKEN_NORM = re.compile(r"(layer|rms|simple)_?norm", re.IGNORECASE)


def remove_norms_(model: nn.Module, norms: Norms, run: Callable[[], object]) -> list[str]:
    """Replace norms of the blocks by `nn.Identity`, in place, and return their names; the final norm stays.

    A block is the element of a `ModuleList` or `Sequential` that holds an attention; norms of queries and keys belong
    to the attention and stay. `run` runs the model on a sample, which shows what runs before what.
    """
    sites = find_attention(model, strict=False)
    chosen = {site.name: _block_norms(model, site.name, sites) for site in sites}
    if norms == "without_attention_norm":
        names = {*chosen, *itertools.chain(*chosen.values())}
        order = _called({name: model.get_submodule(name) for name in names}, run)
        for name, of_block in chosen.items():
            before = [ran for ran in order[: order.index(name) if name in order else 0] if ran in of_block]
            if not before:
                raise RecipeError(
                    f"model.norms: without_attention_norm, but no norm of its block runs before {name!r} of "
                    f"{type(model).__name__}; use without_block_norms"
                )
            chosen[name] = before[-1:]
    replaced = list(dict.fromkeys(itertools.chain(*chosen.values())))
    for name in replaced:
        model.set_submodule(name, nn.Identity())
    return replaced


def _block_norms(model: nn.Module, site: str, sites: list[AttentionSite]) -> list[str]:
    """The norms of the innermost block around an attention; RecipeError if a neighbour has some without one (T5)."""
    attentions = tuple(f"{other.name}." for other in sites)
    block = next(elements_around(model, site))
    parent = block.rpartition(".")[0]
    norms = [
        f"{name}."
        for name, module in model.named_modules()
        if any(TOKEN_NORM.search(kind.__name__) for kind in type(module).__mro__)
    ]
    own = [name[:-1] for name in norms if name.startswith(f"{block}.") and not name.startswith(attentions)]
    for child in dict(model.get_submodule(parent).named_children()):
        path = f"{parent}.{child}." if parent else f"{child}."
        if not any(name.startswith(path) for name in attentions) and any(name.startswith(path) for name in norms):
            own = []
    if not own:
        raise RecipeError(
            f"model.norms: which norms are those of {block} of {type(model).__name__} is unknown; use model.norms: keep"
        )
    return own


def _called(modules: dict[str, nn.Module], run: Callable[[], object]) -> list[str]:
    """Names of the modules, in the order in which `run` calls them."""
    order: list[str] = []
    handles = [m.register_forward_pre_hook(lambda *_, name=name: order.append(name)) for name, m in modules.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return order


def add_qk_norm_(model: nn.Module, run: Callable[[], object], *, gain: bool = False) -> None:
    """Normalise queries and keys of every attention, in place, with or without a gain; `run` runs it on a sample."""
    try:
        sites = find_attention(model)
        add_head_norm_(sites, gain=gain)
    except WellcondError as error:
        raise RecipeError(f"model.qk_norm: {error}") from error
    owners = {f"{site.name} {role}": site.by_role(role).owner for site in sites for role in ("query", "key")}
    unused = owners.keys() - _called(owners, run)
    if unused:
        raise RecipeError(
            f"model.qk_norm: {min(unused).split()[0]} of {type(model).__name__} reads the weights of its projections "
            "without calling them, so its queries and keys cannot be normalised; set model.qk_norm: false"
        )


def add_layer_scale_(model: nn.Module, value: float, run: Callable[[], object]) -> None:
    """Multiply what attention and MLP add to the stream by learned factors (LayerScale, Touvron et al. 2021), in place.

    The factors, one for each feature, are parameters `layer_scale` of W_O and of the MLP's last matrix. `run` runs the
    model on a sample.
    """
    scaled: dict[str, nn.Module] = {}
    blocks = find_blocks(model, find_attention(model))
    for block in blocks:
        outputs = [site.o.owner for site in block.sites if site.o is not None]
        inside = tuple(f"{site.name}." for site in block.sites)
        others = [
            module
            for name, module in block.module.named_modules(prefix=block.name)
            if is_matrix(module) and module not in outputs and not name.startswith(inside)
        ]
        scaled |= {f"{block.name} ({index})": module for index, module in enumerate((*outputs, *others[-1:]))}
    if any(block.scales_itself for block in blocks) or not scaled or set(_called(scaled, run)) != set(scaled):
        raise RecipeError(
            "model.layer_scale: expected blocks without scales of their own, whose last matrices of attention and MLP "
            f"are called; those of {type(model).__name__} are not; set model.layer_scale: null"
        )
    for module in scaled.values():
        weight = module.get_parameter("weight")
        factors = torch.full((out_features(module),), value, dtype=weight.dtype, device=weight.device)
        module.register_parameter("layer_scale", nn.Parameter(factors.view(-1, *weight.shape[2:])))
        module.register_forward_hook(lambda module, _, output: output * module.layer_scale)


# Scale-true proxies start a small model at the scale of the large one that it stands in for.
# What a layer-normed token sees of a weight is sigma sqrt(fan_in). Libraries that draw with one deviation whatever the
# width (timm 0.02, initializer_range of Hugging Face) start a model of width 64 at 0.16 where their model of width 768
# has 0.55; those that draw by fan (Xavier, Kaiming, torch.nn) give every width the same. Which rule a weight was drawn
# by is read off the weight itself.

LIBRARY_STD = 0.02  # of timm and of our own architectures; configurations of Hugging Face name theirs


class ProxySettings(Settings):
    """The model that a recipe stands in for."""

    width: PositiveInt
    """Its width; of a model with several stages, that of the first."""


@torch.no_grad()
def scale_true_(model: nn.Module, width: int) -> dict[str, float]:
    """Start every matrix of the blocks (Q, K, V, O, MLP) at the sigma sqrt(fan_in) of a model `width` wide, in place.

    Weights of one fixed deviation are multiplied by sqrt(width / width of the model), in all stages alike; weights
    drawn by fan stay, as do embeddings, positions, norms, biases and the head. Returns the factor of each matrix.
    """
    try:
        sites = find_attention(model)
        weights = list(block_matrices(model, sites))
    except WellcondError as error:
        raise RecipeError(f"proxy: the width of {type(model).__name__} is not known: {error}") from error
    factor = math.sqrt(width / sites[0].in_features)
    fixed = float(getattr(getattr(model, "config", None), "initializer_range", None) or LIBRARY_STD)
    depth = len({weight.block for weight in weights})
    factors = {weight.name: factor if _is_fixed(weight, fixed, depth) else 1.0 for weight in weights}
    for weight in weights:
        weight.parameter.mul_(factors[weight.name])
    return factors


def _is_fixed(weight: Matrix, fixed: float, depth: int) -> bool:
    """Whether a weight was drawn with the library's one deviation, not by fan; RecipeError if that is not known."""
    sizes = weight.parameter.detach().double().abs()
    # timm's truncated normal draws a -2 now and then, a hundred deviations; twelve times the median are eight of them.
    std = float(sizes[sizes <= 12 * sizes.median()].square().mean().sqrt())
    if std == 0.0:
        return False
    tolerance = 6 / math.sqrt(2 * weight.parameter.numel())  # six standard errors
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
        raise RecipeError(
            f"proxy: {weight.name} has standard deviation {std:.4g} at {fan_in} inputs and {fan_out} outputs, {which}, "
            "so its scale in a wider model is not known; remove proxy"
        )
    return fits_library


# Scales of what the first block receives: tokens(embeddings=3.46, positions=25). See `wellcond.init.tokens`.
TOKENS = {"embeddings": find_embeddings, "positions": find_positions}


def check_factors(factors: dict[str, Any]) -> dict[str, float]:
    """Factors in the order embeddings, positions, without those of 1, which change nothing; ValueError for others."""
    for name, factor in factors.items():
        if name not in TOKENS or type(factor) not in (int, float) or not 0 < factor <= 1e6:
            raise ValueError(
                f"tokens: expected factors of {' and '.join(TOKENS)} above 0 and at most 1e6, found {name}={factor!r}"
            )
    return {name: factors[name] for name in TOKENS if factors.get(name, 1) != 1}


@torch.no_grad()
def scale_tokens_(model: nn.Module, factors: dict[str, float]) -> list[str]:
    """Multiply embeddings, positions or both, in place, and return the names of the parameters.

    An output layer that is tied to the word embeddings is the same weight, and follows them. Patch embeddings are
    scaled where their size is decided: weight and bias of the projection, or of the norm that comes after it.
    """
    plan = {kind: dict(find(model)) for kind, find in TOKENS.items() if kind in factors}
    if missing := [kind for kind, found in plan.items() if not found]:
        where, what = type(model).__name__, missing[0]
        raise RecipeError(f"tokens: expected learned {what} in {where}, found none; leave {what} out")
    for kind, found in plan.items():
        for parameter in found.values():
            parameter.mul_(factors[kind])
    return [name for found in plan.values() for name in found]
