r"""Mimetic initialisation (Trockman and Kolter, ICML 2023): products of weights look like those of trained models.

.. math:: W_Q W_K^T \approx a_1 Z + b_1 I \;(\text{rank } d, \text{ per head}), \qquad W_V W_O = a_2 Z - b_2 I

Z has independent entries of variance 1/D. The authors released no code; the algorithm follows the release of the
group of papers C and S, with its transposes corrected (``transposes="released"`` keeps them as released).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from wellcond.attention.site import AttentionSite
from wellcond.errors import UnsupportedLayoutError
from wellcond.init.plan import InitContext, Write, head_write, register_init
from wellcond.init.positions import Position, position_writes
from wellcond.linalg.orthogonal import draw_normal

Noise = Literal["uniform", "normal"]
Transposes = Literal["correct", "released"]


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
    noise: Noise = "uniform",
    position: Position = "keep",
    transposes: Transposes = "correct",
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
        _check_shapes(site)
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
        assert site.o is not None
        yield head_write(site, value, stored_v.reshape(site.num_heads, site.head_dim, width))
        heads_o = stored_o.reshape(width, site.num_heads, site.head_dim).transpose(0, 1)
        yield head_write(site, "o", heads_o)
    yield from position_writes(context.model, position)


def _noisy_identity(width: int, noise: float, identity: float, kind: Noise, context: InitContext) -> Tensor:
    if kind == "normal":
        z = draw_normal((width, width), generator=context.generator).double() / width**0.5
    else:
        source = "cpu" if context.generator is None else context.generator.device
        uniform = torch.rand((width, width), generator=context.generator, device=source).cpu().double()
        z = (2 * uniform - 1) * (3 / width) ** 0.5
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


def _check_shapes(site: AttentionSite) -> None:
    inner = site.num_heads * site.v.head_dim
    problem = None
    if site.num_kv_heads != site.num_heads:
        problem = f"{site.num_heads} query heads share {site.num_kv_heads} key/value heads"
    elif site.o is None:
        problem = "it has no output projection W_O"
    elif not inner == site.in_features == site.k.in_features == site.v.in_features == site.o.out_features:
        problem = f"heads x head_dim = {inner} and the widths in ({site.in_features}) and out differ"
    if problem:
        raise UnsupportedLayoutError(
            site.name,
            f"mimetic initialisation needs W_Q W_K^T per head and W_V W_O to be D x D, but {problem}. "
            "Choose another method, or leave the site out with sites=...",
            class_name=type(site.module).__name__,
        )
