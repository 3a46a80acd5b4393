r"""Mimetic initialisations: products of weights that look like those of trained models.

Trockman and Kolter (ICML 2023),

.. math:: W_Q W_K^T \approx a_1 Z + b_1 I \;(\text{rank } d, \text{ per head}), \qquad W_V W_O = a_2 Z - b_2 I,

with independent entries of variance 1/D in Z. Its authors released no code; ``mimetic`` follows the release of the
group of papers C and S, with its transposes corrected (``transposes="released"`` keeps them as released).

For language models, modded-nanogpt (pull request 214, record 64) sets the values and the output of every head only,

.. math:: W_V = \sqrt\beta \, I, \qquad W_O = -\sqrt\beta \, I \qquad (d \times d),

on the head's own coordinates of the tokens, and adds noise to all entries: ``mimetic_vo``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from wellcond.arguments import PositiveFloat
from wellcond.attention.site import AttentionSite
from wellcond.init.apply import InitContext, Planned, register_init
from wellcond.init.baselines import Distribution, draw_uniform, refuse
from wellcond.init.tokens import Position, position_writes
from wellcond.linalg.orthogonal import draw_normal


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
) -> Iterator[Planned]:
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
        width, value = site.in_features, site.roles["value"]
        yield from _query_and_key(site, context, qk_noise, qk_sign * qk_identity, noise)

        # W_V = U S^(1/2) (D x hd) and W_O = S^(1/2) V^T (hd x D); torch stores both transposed.
        product = _noisy_identity(width, value_noise, value_sign * value_identity, noise, context)
        w_v, w_o = _factor(product, width)
        stored_v, stored_o = (w_v.T, w_o.T) if transposes == "correct" else (w_v, w_o)
        yield site.slots[value], stored_v.reshape(site.num_heads, site.head_dim, width)
        heads_o = stored_o.reshape(width, site.num_heads, site.head_dim).transpose(0, 1)
        yield site.slots["o"], heads_o
    yield from position_writes(context.model, position)


def _query_and_key(
    site: AttentionSite,
    context: InitContext,
    noise: float = 0.7,
    identity: float = 0.7,
    distribution: Distribution = "uniform",
) -> Iterator[Planned]:
    pairs = [
        _factor(_noisy_identity(site.in_features, noise, identity, distribution, context), site.head_dim)
        for _ in range(site.num_heads)
    ]
    yield site.by_role("query"), torch.stack([left.T for left, _ in pairs])
    yield site.by_role("key"), torch.stack([right for _, right in pairs])


def _noisy_identity(width: int, noise: float, identity: float, kind: Distribution, context: InitContext) -> Tensor:
    if kind == "normal":
        z = draw_normal((width, width), generator=context.generator).double() / width**0.5
    else:
        z = draw_uniform((width, width), context).cpu().double() * (3 / width) ** 0.5
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
        raise refuse(site, f"mimetic initialisation needs W_Q W_K^T per head and W_V W_O to be D x D, but {problem}")


# Values and outputs alone, for language models.


@register_init("mimetic_vo")
def mimetic_vo(
    context: InitContext,
    *,
    beta: PositiveFloat = 0.05,
    noise: float = 0.01,
    rest: Literal["keep", "zero"] = "keep",
    qk: Literal["keep", "mimetic"] = "keep",
) -> Iterator[Planned]:
    """V and O of each head as plus and minus sqrt(beta) I on its own coordinates, with noise on all entries.

    Head h reads coordinates hd..(h+1)d of the tokens, and W_O writes their average back, beta times, with the other
    sign: attention begins by taking from each token a little of what it averages over.

    Args:
        context: the model and its sites.
        beta: the product of both.
        noise: standard deviation of what is added to every entry of W_V and W_O.
        rest: entries outside of the heads' own blocks before the noise: as the model has them (the published code), or
            zero (the formula).
        qk: leave W_Q and W_K (the published code), or set them as ``mimetic`` does by default.

    Raises:
        UnknownChoiceError: an option that does not exist.
        UnsupportedLayoutError: shapes on which the products are not defined (grouped queries, hd != D, no W_O).
    """
    for site in context.sites:
        _check_products(site)
    for site in context.sites:
        if qk == "mimetic":
            yield from _query_and_key(site, context)
        heads, d, width = site.num_heads, site.head_dim, site.in_features
        own = torch.block_diag(*torch.ones(heads, d, d)).reshape(heads, d, width).bool()
        identity = beta**0.5 * torch.eye(width).reshape(heads, d, width)
        for role, inside, block in ((site.roles["value"], own, identity), ("o", own.mT, -identity.mT)):
            slot = site.slots[role]
            now = slot.read_raw().detach().float().cpu()
            outside = now if rest == "keep" else torch.zeros_like(now)
            drawn = noise * draw_normal(tuple(now.shape), generator=context.generator)
            yield slot, torch.where(inside, block, outside) + drawn.cpu()
