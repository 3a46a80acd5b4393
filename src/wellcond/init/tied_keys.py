r"""W_K = W_Q = a U at the start: a token prefers itself, so the attention map is far from singular.

Note [Causal]. Every output row of the Jacobian has J_V = P X, and under a causal mask the first rows have little else
(Lambda_i has rank i - 1). P is triangular, so sigma_min(P) <= min_i p_ii. Independent W_Q and W_K of order one make
some p_ii tiny; uniform attention has p_ii = 1/i and kappa(P) of about 3N. With W_K = W_Q the own logit is
s a^2 |U x_i|^2 > 0 and the others average to zero, so P is about p I + (1 - p) C with the average of the past C. Since
||I - C|| <= 1 (C is Cesaro's matrix), sigma_min(p I + (1 - p) C) >= p and kappa <= (2 - p) / p, whatever N.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from wellcond.attention.checks import choose_projections
from wellcond.attention.site import AttentionSite
from wellcond.errors import WeightError

Keys = Literal["independent", "tied"]


def check_keys(
    *, projections: str = "qkv", keys: Keys = "independent", own_token: float = 0.5, tokens: int = 128, **_others: Any
) -> None:
    """Raise for options of `conditioned` and `gaussian` that no site can fulfil."""
    chosen = choose_projections(projections)
    if keys != "tied":
        return
    if not {"q", "k"} <= set(chosen):
        raise WeightError(f"keys='tied' sets q and k together: expected projections with both, got {projections!r}")
    if not tokens >= 2 or not 1 / tokens < own_token < 1:
        raise WeightError(
            "expected at least 2 tokens and an own_token between 1/tokens (uniform attention) and 1, "
            f"got own_token={own_token:g}, tokens={tokens:g}"
        )


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
