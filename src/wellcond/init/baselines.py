r"""Initialisations that others have proposed, and the model's own: what every other method is compared with.

``default`` runs the initialisation of the model's library again. nanochat (Karpathy, 2025) has Q, K, V of unit scale
and no output until W_O has moved.

T-Fixup (Huang et al., ICML 2020) draws every matrix by Xavier's rule and shrinks what adds to the stream,

.. math:: W_V, W_O, W_{MLP} \gets 0.67 \, N^{-1/4} \, W, \qquad E \gets (9N)^{-1/4} E, \; E \sim N(0, 1/D),

in a model of N blocks, so that it trains without norms and without warm-up. Small initialisation (arXiv:2606.17945)
draws every matrix with standard deviation :math:`\mathrm{fan}_{in}^{-\gamma}`, :math:`\gamma` above the usual 1/2.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from wellcond.arguments import PositiveFloat
from wellcond.attention.blocks import block_matrices
from wellcond.attention.evaluation import plain_copy
from wellcond.attention.layout import is_conv1d
from wellcond.attention.site import AttentionSite
from wellcond.errors import UnsupportedLayoutError
from wellcond.init.apply import InitContext, Planned, Write, register_init
from wellcond.init.tokens import embedding_layers
from wellcond.linalg.orthogonal import draw_normal

Distribution = Literal["uniform", "normal"]
FUNCTION_NAMES = ("_init_weights", "init_weight_vit")


def _device(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def draw_uniform(shape: tuple[int, ...], context: InitContext) -> Tensor:
    """Uniform within -1 and 1, on the generator's device."""
    drawn = torch.rand(shape, generator=context.generator, device=_device(context.generator))
    return 2 * drawn - 1


def refuse(site: AttentionSite, problem: str) -> UnsupportedLayoutError:
    """The error about an attention layer that an initialisation cannot set."""
    advice = "Choose another method, or leave the site out with sites=..."
    return UnsupportedLayoutError(site.name, f"{problem}. {advice}", class_name=type(site.module).__name__)


# The family's own initialisation, run again, for the attention only.


@register_init("default")
def default(
    context: InitContext, *, rule: Literal["family", "torch"] = "family", output: bool = True
) -> Iterator[Planned]:
    """Plan Q, K, V (and W_O) as the model's own initialisation would draw them, biases included.

    Args:
        context: the model and its sites.
        rule: ``family``, what the model's constructor does (timm, Hugging Face, torch.nn); ``torch``, what a bare
            nn.Linear does, uniform within 1/sqrt(in_features), which timm's ``weight_init="skip"`` amounts to.
        output: include W_O.
    """
    slots = [slot for site in context.sites for role, slot in site.slots.items() if role != "o" or output]
    if rule == "torch":
        for slot in slots:
            bound = slot.in_features**-0.5
            yield slot, draw_uniform(tuple(slot.read_raw().shape), context) * bound
            bias = slot.read_bias()
            if bias is not None:
                drawn = draw_uniform(tuple(bias.shape), context) * bound
                yield Write(f"the bias beside {slot.weight_name}", slot, drawn, to_bias=True)
        return
    # The model's own code draws from the global generator: give it a fork, seeded from ours.
    seed = int(torch.randint(2**62, (), generator=context.generator, device=_device(context.generator)))
    replica = plain_copy(context.model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # Not torch.manual_seed, which seeds the generators of all devices; the copy is on the CPU.
        torch.default_generator.manual_seed(seed)
        run_family_initialisation(replica)
    counterparts = dict(zip(context.model.modules(), replica.modules(), strict=True))
    for slot in slots:
        fresh = counterparts[slot.owner]._parameters[slot.weight_name]
        assert fresh is not None
        yield slot, slot.take_heads(fresh.detach())
        bias = slot.stored_bias()
        if slot.bias_name is not None and bias is not None:
            fresh = counterparts[slot.bias_owner or slot.owner]._parameters.get(slot.bias_name)
            if fresh is not None:
                yield Write(slot.bias_name, bias, fresh.detach())


def run_family_initialisation(model: nn.Module) -> None:
    """Re-run a model's own weight initialisation in place.

    First what the constructors of its parts do (`reset_parameters`), then what the model as a whole does: the method
    `init_weights` or `_init_weights`, or the function of that name in its source file (timm, Hugging Face). A model
    without any is searched for parts that have one, so that a wrapper does not hide its backbone's. They run with
    their default arguments: what was passed to the constructor (`weight_init="jax"`) is not known any more.
    """
    for module in reversed(list(model.modules())):  # parts before wholes, as constructors run
        _reset(module)
    _run_own(model)


def _run_own(model: nn.Module) -> None:
    whole = getattr(model, "init_weights", None)
    per_module = getattr(model, "_init_weights", None)
    if hasattr(model, "config") and callable(per_module):  # Hugging Face
        _clear_initialised_flags(model)
        model.apply(per_module)
        return
    if callable(whole):
        whole()
        return
    if not callable(per_module):
        per_module = _function_beside(type(model))
    if per_module is None:
        for child in model.children():
            _run_own(child)
        return
    takes_name = "name" in inspect.signature(per_module).parameters
    for name, module in reversed(list(model.named_modules())):
        per_module(module, **({"name": name} if takes_name else {}))
    fix_depth = getattr(model, "fix_init_weight", None)
    if callable(fix_depth):
        fix_depth()


def _function_beside(cls: type) -> Callable[..., None] | None:
    """Timm keeps some initialisations as functions in the file of the model."""
    if not cls.__module__.startswith("timm.models."):
        return None
    file = vars(sys.modules[cls.__module__])
    return next((file[name] for name in FUNCTION_NAMES if callable(file.get(name))), None)


def _clear_initialised_flags(model: nn.Module) -> None:
    """Hugging Face marks modules and parameters it has initialised, and skips them."""
    for marked in (*model.modules(), *model.parameters()):
        if getattr(marked, "_is_hf_initialized", False):
            marked._is_hf_initialized = False  # type: ignore[attr-defined, union-attr]


def _reset(module: nn.Module) -> None:
    if is_conv1d(module):  # it has no method of its own for what its constructor does
        nn.init.normal_(module.weight, std=0.02)  # type: ignore[arg-type]
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            reset()


# What others have proposed for the attention.


@register_init("nanochat")
def nanochat(context: InitContext, *, distribution: Distribution = "uniform") -> Iterator[Planned]:
    """Q, K and V independent of standard deviation 1/sqrt(D), W_O zero; biases stay.

    Args:
        context: the model and its sites.
        distribution: ``uniform``, as nanochat draws (within sqrt(3/D)), or ``normal``.

    Raises: UnsupportedLayoutError for an attention without an output projection.
    """
    for site in context.sites:
        if site.o is None:
            raise refuse(
                site, "nanochat's initialisation sets the output projection W_O to zero, but this attention has none"
            )
        for role in "qkv":
            slot = site.slots[role]
            shape = (*slot.rows.shape, slot.in_features)
            if distribution == "normal":
                drawn = draw_normal(shape, generator=context.generator) * slot.in_features**-0.5
            else:
                drawn = draw_uniform(shape, context) * (3 / slot.in_features) ** 0.5
            yield slot, drawn
        yield site.o, torch.zeros(site.o.num_heads, site.o.out_features, site.o.head_dim)


# What others have proposed for whole blocks, attention and MLP.


@register_init("small")
def small(context: InitContext, *, gamma: PositiveFloat = 0.8) -> Iterator[Planned]:
    """Every matrix of the blocks Gaussian with standard deviation fan_in^-gamma; biases, norms and tokens stay.

    Args:
        context: the model and its sites.
        gamma: 0.5 is the usual scale.

    Raises: WellcondError for an attention that stands in no list of blocks.
    """
    for matrix in block_matrices(context.model, context.sites):
        drawn = draw_normal(tuple(matrix.parameter.shape), generator=context.generator)
        yield matrix.parameter, drawn * matrix.fan_in**-gamma


@register_init("t_fixup")
def t_fixup(context: InitContext) -> Iterator[Planned]:
    """Xavier's rule for every matrix of the blocks; V, W_O, MLPs and word embeddings shrunk with depth; biases stay.

    Norms and warm-up, which the paper leaves out, are the model's and the schedule's. Embeddings of patches stay.

    Raises: WellcondError for an attention that stands in no list of blocks.
    """
    matrices = list(block_matrices(context.model, context.sites))
    depth = len(context.sites)
    shrink = 0.67 * depth**-0.25
    held = set[int]()
    for site in context.sites:
        for role, slot in site.slots.items():
            held.add(id(slot.parameter))
            rows = slot.num_heads * slot.head_dim
            fan_in, fan_out = (rows, slot.out_features) if role == "o" else (slot.in_features, rows)
            shape = (slot.num_heads, fan_out, slot.head_dim) if role == "o" else (*slot.rows.shape, fan_in)
            scale = math.sqrt(2 / (fan_in + fan_out)) * (shrink if role in ("o", site.roles["value"]) else 1.0)
            yield slot, draw_normal(shape, generator=context.generator) * scale
    for matrix in matrices:
        if id(matrix.parameter) not in held:
            drawn = draw_normal(tuple(matrix.parameter.shape), generator=context.generator)
            scale = shrink * math.sqrt(2 / (matrix.fan_in + matrix.fan_out))
            yield matrix.parameter, drawn * scale
    for _, layer in embedding_layers(context.model):
        if isinstance(layer, nn.Embedding):
            drawn = draw_normal(tuple(layer.weight.shape), generator=context.generator)
            scale = (9 * depth) ** -0.25 * layer.embedding_dim**-0.5
            yield layer.weight, drawn * scale
