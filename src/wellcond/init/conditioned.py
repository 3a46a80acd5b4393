r"""Conditioned initialisation (paper C) and its controls: semi-orthogonal Q and K, identity V.

The paper writes W as D x d; stored heads are its transpose, d x D.

Note [Causal]. With ``keys="tied"``, W_K = W_Q = a U, a token prefers itself, so the attention map is far from singular.
Every output row of the Jacobian has J_V = P X, and under a causal mask the first rows have little else (Lambda_i has
rank i - 1). P is triangular, so sigma_min(P) <= min_i p_ii. Independent W_Q and W_K of order one make some p_ii tiny;
uniform attention has p_ii = 1/i and kappa(P) of about 3N. With W_K = W_Q the own logit is s a^2 |U x_i|^2 > 0 and the
others average to zero, so P is about p I + (1 - p) C with the average of the past C. Since ||I - C|| <= 1 (C is
Cesaro's matrix), sigma_min(p I + (1 - p) C) >= p and kappa <= (2 - p) / p, whatever N.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from wellcond.arguments import PositiveFloat
from wellcond.attention.checks import choose_projections
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.errors import OptionError, WeightError
from wellcond.init.apply import InitContext, Planned, register_init
from wellcond.linalg.orthogonal import Source, draw_normal, identity_heads, random_semi_orthogonal

Value = Literal["per_head", "joint", "orthogonal"]
Heads = Literal["independent", "joint"]
Roles = Literal["by_role", "by_name"]
Output = Literal["identity", "orthogonal"]
Keys = Literal["independent", "tied"]


def check_keys(
    *, projections: str = "qkv", keys: Keys = "independent", own_token: float = 0.5, tokens: int = 128, **_others: Any
) -> None:
    """Raise for options of `conditioned` and `gaussian` that no site can fulfil."""
    chosen = choose_projections(projections)
    if keys != "tied":
        return
    if not {"q", "k"} <= set(chosen):
        raise OptionError(f"keys='tied' sets q and k together: expected projections with both, got {projections!r}")
    if not tokens >= 2 or not 1 / tokens < own_token < 1:
        raise OptionError(
            "expected at least 2 tokens and an own_token between 1/tokens (uniform attention) and 1, "
            f"got own_token={own_token:g}, tokens={tokens:g}"
        )


def warn_of_values(sites: Sequence[AttentionSite], options: Mapping[str, Any]) -> str | None:
    """Warn of W_V at scale 1 under a causal mask, unless another option makes up for it."""
    causal = next((site for site in sites if site.causal), None)
    large = "v" in options["projections"] and options.get("std") is None
    fixed = options.get("value_scale", 1.0) != 1.0 or options.get("match_norm") or options.get("keys") == "tied"
    if causal is None or not large or fixed:
        return None
    avoid = "projections='qk'" + (" or value_scale='default'" if "value_scale" in options else "")
    return (
        f"W_V is set at scale 1, and {causal.name or 'the model'} is causal: an average of the past then outweighs "
        "the token that it is added to. A small GPT-2 had perplexity 56.6 with 'conditioned', 44.6 with it on Q and K "
        f"alone and 45.7 by default (results/evidence/causal.jsonl). Use {avoid}."
    )


def _semi_orthogonal_heads(slot: Slot, context: InitContext, source: Source, heads: Heads) -> Tensor:
    num_heads, head_dim = slot.rows.shape
    count, rows = (num_heads, head_dim) if heads == "independent" else (1, num_heads * head_dim)
    drawn = random_semi_orthogonal(
        count, rows, slot.in_features, generator=context.generator, device=slot.parameter.device, source=source
    )
    return drawn.reshape(num_heads, head_dim, -1)


@register_init("conditioned", check=check_keys, warn=warn_of_values)
def conditioned(
    context: InitContext,
    *,
    orthogonal: Source = "svd",
    heads: Heads = "independent",
    value: Value = "per_head",
    value_scale: float | Literal["default"] = 1.0,
    projections: str = "qkv",
    output: bool | Output = False,
    roles: Roles = "by_role",
    match_norm: bool = False,
    keys: Keys = "independent",
    own_token: float = 0.5,
    tokens: int = 128,
) -> Iterator[Planned]:
    """W_Q and W_K semi-orthogonal, W_V the rectangular identity (paper C, section 3.3).

    Args:
        context: the model and its sites.
        orthogonal: how a semi-orthogonal matrix is drawn; both give the Haar distribution.
        heads: draw each head independently (the paper), or one matrix for all heads of a projection.
        value: W_V: the same identity in every head (the paper), one identity over all heads, or semi-orthogonal.
        value_scale: factor on W_V; ``default``: every head of it keeps the Frobenius norm that it has now, which is the
            default's in a model that was just built.
        projections: which of q, k, v to set.
        output: also set W_O: True or ``"orthogonal"``, or ``"identity"``.
        roles: where an attention stores its linear path under another name (DaViT's channel attention keeps it in the
            q slice), give the identity to the slice on the linear path, or to the slice called v.
        match_norm: rescale every head to the Frobenius norm it has now (control for scale).
        keys: drawn apart from the queries (the paper), or ``tied``: W_K = W_Q = a U at first, for causal attention,
            which independent keys condition worse than the usual initialisation does.
        own_token: with tied keys, what a typical layer-normed token gives to itself among `tokens` visible ones; it
            sets a (unless `match_norm` does).
        tokens: the context length; only its logarithm matters.
    """
    chosen = choose_projections(projections)
    output = "orthogonal" if output is True else output
    keep_value_norm = value_scale == "default"
    value_factor = 1.0 if value_scale == "default" else value_scale
    for site in context.sites:
        linear_path = site.roles["value"] if roles == "by_role" else "v"
        scale = tied_scale(site, own_token, tokens) if keys == "tied" else 1.0
        for role in chosen:
            slot = site.slots[role]
            if role == linear_path and value != "orthogonal":
                weights = value_factor * identity_heads(slot.num_heads, slot.head_dim, slot.in_features, value)
            elif not (keys == "tied" and role == "k"):  # else the weights of q, which comes before
                weights = _semi_orthogonal_heads(slot, context, orthogonal, heads)
                weights = weights * (value_factor if role == linear_path else scale)
            keep_norm = match_norm or (keep_value_norm and role == linear_path)
            yield slot, _with_norm_of(slot, weights) if keep_norm else weights
        if output and site.o is not None:
            yield site.slots["o"], _output_heads(site, context, output, orthogonal)


def _with_norm_of(slot: Slot, weights: Tensor) -> Tensor:
    now = slot.read_raw().detach().float().flatten(1).norm(dim=1)
    planned = weights.to(now.device).flatten(1).norm(dim=1)
    return weights.to(now.device) * (now / planned)[:, None, None]


def _output_heads(site: AttentionSite, context: InitContext, kind: Output, source: Source) -> Tensor:
    """W_O as one identity or one semi-orthogonal matrix, cut into heads (heads, out, d)."""
    assert site.o is not None
    num_heads, head_dim = site.o.rows.shape
    rows, columns = site.o.out_features, num_heads * head_dim
    if kind == "identity":
        whole = torch.eye(rows, columns)
    else:
        whole = random_semi_orthogonal(
            1, rows, columns, generator=context.generator, device=site.o.parameter.device, source=source
        )[0]
    return whole.reshape(rows, num_heads, head_dim).transpose(0, 1)


@register_init("orthogonal", check=check_keys, warn=warn_of_values)
def orthogonal(
    context: InitContext, *, orthogonal: Source = "svd", heads: Heads = "independent", projections: str = "qkv"
) -> Iterator[Planned]:
    """Q, K and V all semi-orthogonal: `conditioned` without the identity."""
    yield from conditioned(context, orthogonal=orthogonal, heads=heads, value="orthogonal", projections=projections)


@register_init("gaussian", check=check_keys, warn=warn_of_values)
def gaussian(
    context: InitContext,
    *,
    std: PositiveFloat | None = None,
    value: Literal["gaussian", "per_head", "joint"] = "gaussian",
    projections: str = "qkv",
    keys: Keys = "independent",
    own_token: float = 0.5,
    tokens: int = 128,
) -> Iterator[Planned]:
    """Independent normal entries of standard deviation 1/sqrt(D): the control that matches only the scale.

    Each head has the same expected Frobenius norm sqrt(d) as a semi-orthogonal one.

    Args:
        context: the model and its sites.
        std: another standard deviation.
        value: W_V Gaussian too, or the identity of `conditioned`.
        projections: which of q, k, v to set.
        keys: ``tied``: W_K = W_Q, with the scale that `conditioned` would give them (unless `std` is given).
        own_token: as in `conditioned`.
        tokens: as in `conditioned`.
    """
    chosen = choose_projections(projections)
    for site in context.sites:
        scale = tied_scale(site, own_token, tokens) if keys == "tied" else 1.0
        for role in chosen:
            slot = site.slots[role]
            if role == site.roles["value"] and value != "gaussian":
                identity = identity_heads(slot.num_heads, slot.head_dim, slot.in_features, value)
                yield slot, identity
                continue
            if not (keys == "tied" and role == "k"):
                shape = (*slot.rows.shape, slot.in_features)
                normal = draw_normal(shape, generator=context.generator, device=slot.parameter.device)
            usual = slot.in_features**-0.5 * (scale if role in "qk" else 1.0)
            yield slot, normal * (usual if std is None else std)


def tied_scale(site: AttentionSite, own_token: float, tokens: int) -> float:
    """Factor a of W_K = W_Q = a U for a site, see `own_token_scale`.

    Raises: WeightError where queries and keys cannot be tied, or where a cannot set the own-token probability.
    """
    problem = _obstacle(site)
    if problem is None:
        assert site.scale is not None
        width = min(site.head_dim, site.in_features)
        a = own_token_scale(site.scale, width, own_token, tokens)
        if a is not None:
            return a
        most = 1 / (1 + (tokens - 1) * math.exp(-width / 2))
        problem = (
            f"heads of width {width} cannot tell a token from {tokens - 1} others well enough for "
            f"own_token={own_token:g}; lower it (at most {most:.2g} here) or tokens"
        )
    raise WeightError(
        f"{site.name or 'the model itself'}: keys='tied' is not possible: {problem}. Choose keys='independent' "
        "or leave the site out with sites=... Nothing was changed"
    )


def own_token_scale(scale: float, width: int, own_token: float, tokens: int) -> float | None:
    r"""The a with which a typical token gives itself probability `own_token` among `tokens` visible ones.

    .. math:: t - t^2 / (2 d) = \ln(n - 1) + \ln(p / (1 - p)), \qquad t = s a^2 d

    For layer-normed tokens, |x|^2 = D, and a random semi-orthogonal U, z = U x is about N(0, I_d). The own logit is
    s a^2 |z_i|^2, about t; the others are s a^2 z_i . z_j, about N(0, t^2/d), whose exponentials average to
    exp(t^2 / 2d). Hence p = 1 / (1 + (n - 1) exp(t^2 / 2d - t)).

    Args:
        scale: s, of the logits; positive.
        width: d, of the head.
        own_token: p.
        tokens: n; only its logarithm matters.

    Returns: a; None if no a does, since t - t^2/2d is at most d/2.

    Example:
        >>> round(own_token_scale(64**-0.5, 64, 0.5, 1024), 2)
        0.96
    """
    gap = math.log(tokens - 1) + math.log(own_token / (1 - own_token))
    if 2 * gap > width:
        return None
    t = width * (1 - math.sqrt(1 - 2 * gap / width))
    return math.sqrt(t / (scale * width))


def _obstacle(site: AttentionSite) -> str | None:
    if site.kind != "softmax":
        return f"its attention is of kind {site.kind}, which does not compare tokens one by one"
    if site.cross or site.q.in_features != site.k.in_features:
        return "queries and keys read different tokens (cross attention)"
    if site.num_kv_heads != site.num_heads:
        return f"{site.num_heads} query heads share {site.num_kv_heads} key heads, so tied heads would be copies"
    if site.qk_norm is not None:
        return "queries and keys are normalised, so the scale of the weights does not set the logits"
    if site.scale is None:
        return "its logit scale is learned or not known"
    return None
