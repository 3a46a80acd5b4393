r"""Initialisations that others have proposed, and the model's own: what every other method is compared with.

``default`` runs the initialisation of the model's library again. Mimetic initialisation (Trockman and Kolter, ICML
2023) makes products of weights look like those of trained models,

.. math:: W_Q W_K^T \approx a_1 Z + b_1 I \;(\text{rank } d, \text{ per head}), \qquad W_V W_O = a_2 Z - b_2 I,

with independent entries of variance 1/D in Z. Its authors released no code; the algorithm follows the release of the
group of papers C and S, with its transposes corrected (``transposes="released"`` keeps them as released). nanochat
(Karpathy, 2025) has Q, K, V of unit scale and no output until W_O has moved.

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
from wellcond.init.apply import InitContext, Write, head_write, register_init
from wellcond.init.tokens import Position, embedding_layers, position_writes
from wellcond.linalg.orthogonal import draw_normal

Distribution = Literal["uniform", "normal"]
FUNCTION_NAMES = ("_init_weights", "init_weight_vit")


def _device(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def _draw_uniform(shape: tuple[int, ...], context: InitContext) -> Tensor:
    """Uniform within -1 and 1, on the generator's device."""
    drawn = torch.rand(shape, generator=context.generator, device=_device(context.generator))
    return 2 * drawn - 1


def _refuse(site: AttentionSite, problem: str) -> UnsupportedLayoutError:
    advice = "Choose another method, or leave the site out with sites=..."
    return UnsupportedLayoutError(site.name, f"{problem}. {advice}", class_name=type(site.module).__name__)


# The family's own initialisation, run again, for the attention only.


@register_init("default")
def default(
    context: InitContext, *, rule: Literal["family", "torch"] = "family", output: bool = True
) -> Iterator[Write]:
    """Plan Q, K, V (and W_O) as the model's own initialisation would draw them, biases included.

    Args:
        context: the model and its sites.
        rule: ``family``, what the model's constructor does (timm, Hugging Face, torch.nn); ``torch``, what a bare
            nn.Linear does, uniform within 1/sqrt(in_features), which timm's ``weight_init="skip"`` amounts to.
        output: include W_O.
    """
    slots = [
        (f"{site.name} ({role}", slot)
        for site in context.sites
        for role, slot in site.slots.items()
        if role != "o" or output
    ]
    if rule == "torch":
        for what, slot in slots:
            bound = slot.in_features**-0.5
            yield Write(f"{what})", slot, _draw_uniform(tuple(slot.read_raw().shape), context) * bound)
            bias = slot.read_bias()
            if bias is not None:
                drawn = _draw_uniform(tuple(bias.shape), context) * bound
                yield Write(f"{what} bias)", slot, drawn, to_bias=True)
        return
    # The model's own code draws from the global generator: give it a fork, seeded from ours.
    seed = int(torch.randint(2**62, (), generator=context.generator, device=_device(context.generator)))
    replica = plain_copy(context.model)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # Not torch.manual_seed, which seeds the generators of all devices; the copy is on the CPU.
        torch.default_generator.manual_seed(seed)
        run_family_initialisation(replica)
    counterparts = dict(zip(context.model.modules(), replica.modules(), strict=True))
    for what, slot in slots:
        fresh = counterparts[slot.owner]._parameters[slot.weight_name]
        assert fresh is not None
        yield Write(f"{what})", slot, slot.take_heads(fresh.detach()))
        bias = slot.stored_bias()
        if slot.bias_name is not None and bias is not None:
            fresh = counterparts[slot.bias_owner or slot.owner]._parameters.get(slot.bias_name)
            if fresh is not None:
                yield Write(f"{what} bias)", bias, fresh.detach())


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


@register_init("mimetic")
def mimetic(
    context: InitContext,
    *,
    qk_noise: float = 0.7,
    qk_identity: float = 0.7,
    value_noise: float = 0.4,
    value_identity: float = 0.4,
    qk_sign: Literal[1, -1] = 1,
    value_sign: Literal[1, -1] = -1,
    noise: Distribution = "uniform",
    position: Position = "keep",
    transposes: Literal["correct", "released"] = "correct",
) -> Iterator[Write]:
    """Plan mimetic weights for Q, K (per head) and V, O (per layer).

    Args:
        context: the model and its sites.
        qk_noise: a1.
        qk_identity: b1.
        value_noise: a2.
        value_identity: b2.
        qk_sign: sign of b1.
        value_sign: sign of b2: -1 is published for vision; for language the published sources give none, try both.
        noise: distribution of Z.
        position: also set the position embedding: ``sincos2d`` (vision) or ``sincos1d`` (sequences).
        transposes: ``correct``, or as in the release, where W_V W_O is not the intended product.

    Raises:
        UnknownChoiceError: an option that does not exist.
        UnsupportedLayoutError: shapes on which the products are not defined (grouped queries, hd != D, no W_O).
    """
    for site in context.sites:
        _check_products(site)
    for site in context.sites:
        width = site.in_features
        query, key, value = site.roles["query"], site.roles["key"], site.roles["value"]
        pairs = [
            _factor(_noisy_identity(width, qk_noise, qk_sign * qk_identity, noise, context), site.head_dim)
            for _ in range(site.num_heads)
        ]
        yield head_write(site, query, torch.stack([left.T for left, _ in pairs]))
        yield head_write(site, key, torch.stack([right for _, right in pairs]))

        # W_V = U S^(1/2) (D x hd) and W_O = S^(1/2) V^T (hd x D); torch stores both transposed.
        product = _noisy_identity(width, value_noise, value_sign * value_identity, noise, context)
        w_v, w_o = _factor(product, width)
        stored_v, stored_o = (w_v.T, w_o.T) if transposes == "correct" else (w_v, w_o)
        yield head_write(site, value, stored_v.reshape(site.num_heads, site.head_dim, width))
        heads_o = stored_o.reshape(width, site.num_heads, site.head_dim).transpose(0, 1)
        yield head_write(site, "o", heads_o)
    yield from position_writes(context.model, position)


def _noisy_identity(width: int, noise: float, identity: float, kind: Distribution, context: InitContext) -> Tensor:
    if kind == "normal":
        z = draw_normal((width, width), generator=context.generator).double() / width**0.5
    else:
        z = _draw_uniform((width, width), context).cpu().double() * (3 / width) ** 0.5
    return noise * z + identity * torch.eye(width, dtype=torch.float64)


def _factor(product: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Balanced factors L (D x rank), R (rank x D) of the best rank-`rank` approximation of a D x D matrix."""
    # The leading singular pairs from the symmetric eigenproblem of A A^T: their sigma are far from 0, so squaring is
    # harmless, and it is several times cheaper than an SVD.
    if rank < product.shape[0]:
        squares, u = torch.linalg.eigh(product @ product.T)
        u, root = u[:, -rank:].flip(1), squares[-rank:].flip(0).sqrt().sqrt()
        return u * root, (u.T @ product) / root[:, None]
    u, s, vh = torch.linalg.svd(product)
    return u * s.sqrt(), s.sqrt()[:, None] * vh


def _check_products(site: AttentionSite) -> None:
    inner = site.num_heads * site.v.head_dim
    problem = None
    if site.num_kv_heads != site.num_heads:
        problem = f"{site.num_heads} query heads share {site.num_kv_heads} key/value heads"
    elif site.o is None:
        problem = "it has no output projection W_O"
    elif not inner == site.in_features == site.k.in_features == site.v.in_features == site.o.out_features:
        problem = f"heads x head_dim = {inner} and the widths in ({site.in_features}) and out differ"
    if problem:
        raise _refuse(site, f"mimetic initialisation needs W_Q W_K^T per head and W_V W_O to be D x D, but {problem}")


@register_init("nanochat")
def nanochat(context: InitContext, *, distribution: Distribution = "uniform") -> Iterator[Write]:
    """Q, K and V independent of standard deviation 1/sqrt(D), W_O zero; biases stay.

    Args:
        context: the model and its sites.
        distribution: ``uniform``, as nanochat draws (within sqrt(3/D)), or ``normal``.

    Raises: UnsupportedLayoutError for an attention without an output projection.
    """
    for site in context.sites:
        if site.o is None:
            raise _refuse(
                site, "nanochat's initialisation sets the output projection W_O to zero, but this attention has none"
            )
        for role in "qkv":
            slot = site.slots[role]
            shape = (*slot.rows.shape, slot.in_features)
            if distribution == "normal":
                drawn = draw_normal(shape, generator=context.generator) * slot.in_features**-0.5
            else:
                drawn = _draw_uniform(shape, context) * (3 / slot.in_features) ** 0.5
            yield head_write(site, role, drawn)
        yield head_write(site, "o", torch.zeros(site.o.num_heads, site.o.out_features, site.o.head_dim))


# What others have proposed for whole blocks, attention and MLP.


@register_init("small")
def small(context: InitContext, *, gamma: PositiveFloat = 0.8) -> Iterator[Write]:
    """Every matrix of the blocks Gaussian with standard deviation fan_in^-gamma; biases, norms and tokens stay.

    Args:
        context: the model and its sites.
        gamma: 0.5 is the usual scale.

    Raises: WellcondError for an attention that stands in no list of blocks.
    """
    for matrix in block_matrices(context.model, context.sites):
        drawn = draw_normal(tuple(matrix.parameter.shape), generator=context.generator)
        yield Write(matrix.name, matrix.parameter, drawn * matrix.fan_in**-gamma)


@register_init("t_fixup")
def t_fixup(context: InitContext) -> Iterator[Write]:
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
            yield head_write(site, role, draw_normal(shape, generator=context.generator) * scale)
    for matrix in matrices:
        if id(matrix.parameter) not in held:
            drawn = draw_normal(tuple(matrix.parameter.shape), generator=context.generator)
            scale = shrink * math.sqrt(2 / (matrix.fan_in + matrix.fan_out))
            yield Write(matrix.name, matrix.parameter, drawn * scale)
    for name, layer in embedding_layers(context.model):
        if isinstance(layer, nn.Embedding):
            drawn = draw_normal(tuple(layer.weight.shape), generator=context.generator)
            scale = (9 * depth) ** -0.25 * layer.embedding_dim**-0.5
            yield Write(f"{name}.weight", layer.weight, drawn * scale)
