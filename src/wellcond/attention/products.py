"""Do the products of a forward pass fit a reading of the weights? Scale, causality, rotation and bias of the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wellcond.attention.kernels import FLOOR, ProductRecorder
from wellcond.attention.site import AttentionSite

__all__ = ["RELATIVE_TOLERANCE", "ProductRecorder", "expected_heads", "facts_of", "proportional"]

RELATIVE_TOLERANCE = 1e-5  # some modules compute in float32 inside, whatever they are given


def proportional(found: Tensor, expected: Tensor) -> float | None:
    """The factor c with found = c * expected, or None."""
    if found.shape != expected.shape:
        return None
    factor = float((found * expected).sum() / (expected * expected).sum())
    off = float((found - factor * expected).norm())
    return factor if factor != 0 and off <= RELATIVE_TOLERANCE * float(found.norm()) else None


def match(found: Tensor, expected: Tensor) -> tuple[float, bool] | None:
    """(factor, rotated) if `found` is the expected heads, exactly or up to a rotation of each token (rotary)."""
    factor = proportional(found, expected)
    if factor is not None:
        return factor, False
    if found.shape != expected.shape:
        return None
    # A rotary embedding keeps the length of every token of every head.
    factor = proportional(found.norm(dim=-1), expected.norm(dim=-1))
    return None if factor is None else (factor, True)


def expected_heads(site: AttentionSite, x_ND: Tensor) -> dict[str, Tensor]:
    """q, k, v of every head by the site's own account, (heads, tokens, head_dim); k and v repeated per group."""
    result = {}
    for role, slot in (("q", site.q), ("k", site.k), ("v", site.v)):
        heads = torch.einsum("nc,hdc->hnd", x_ND, slot.read())
        bias = slot.read_bias()
        if bias is not None:
            heads = heads + bias[:, None, :]
        result[role] = heads.repeat_interleave(site.num_heads // slot.num_heads, dim=0)
    return result


def facts_of(recorder: ProductRecorder, heads: dict[str, Tensor]) -> dict[str, Any]:
    """Scale, causality, position bias and rotation, if the recorded products are softmax attention on these heads."""
    q, k, v = heads["q"], heads["k"], heads["v"]
    for left, right in recorder.products:
        found_q, found_k = match(left, q), match(right.mT, k)
        if found_q is None or found_k is None:
            continue
        for weights, values in recorder.products:
            if proportional(values, v) is None:
                continue
            for logits, p in recorder.softmaxes:
                if p.numel() == weights.numel() and torch.equal(p.reshape_as(weights), weights):
                    facts = logit_facts(logits.reshape_as(weights), weights, left @ right)
                    if facts["scale"] is not None:
                        facts["scale"] = float(f"{facts['scale'] * found_q[0] * found_k[0]:.7g}")
                    facts["rotary"] = found_q[1] or found_k[1]
                    return facts
    return {}


def logit_facts(logits: Tensor, p: Tensor, products: Tensor) -> dict[str, Any]:
    """Causality, scale and position bias of a softmax's logits, beside the products that they are made of."""
    above = torch.ones_like(p[0]).triu(1).bool()
    causal = bool((p[:, above] < 1e-12).all())
    seen = (p > 0) & torch.isfinite(logits) & (logits > FLOOR)
    factor = proportional(logits[seen], products[seen])
    # A bias on the logits leaves no common factor: the scale is then not measurable this way.
    return {"causal": causal, "scale": factor, "relative_position_bias": factor is None}
