"""What an attention multiplies, where its kernel shows it: operands of every product, inputs and outputs of softmaxes.

Every product of a forward pass, however it was written (`@`, einsum, scaled_dot_product_attention with the plain
backend), reaches torch's dispatcher as `bmm` or `mm`; a dispatch mode records their operands, and the softmax between
them gives scale and causality.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from wellcond.attention.site import AttentionSite

RELATIVE_TOLERANCE = 1e-5  # some modules compute in float32 inside, whatever they are given


class ProductRecorder(TorchDispatchMode):
    """Records operands of every matrix product, and input and output of every softmax."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.products: list[tuple[Tensor, Tensor]] = []
        self.softmaxes: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and keep what it multiplied."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("bmm", "mm"):
            self.products.append((as_batch(args[0]), as_batch(args[1])))
        elif name in ("baddbmm", "addmm"):
            self.products.append((as_batch(args[1]), as_batch(args[2])))
        elif name in ("_softmax", "_safe_softmax"):
            self.softmaxes.append((args[0].detach().clone(), result.detach().clone()))
        return result


def as_batch(matrix: Tensor) -> Tensor:
    """A recorded operand as (batch, rows, columns)."""
    return matrix.detach().clone().reshape(-1, *matrix.shape[-2:])


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
    seen = (p > 0) & torch.isfinite(logits) & (logits > -1e8)
    factor = proportional(logits[seen], products[seen])
    # A bias on the logits leaves no common factor: the scale is then not measurable this way.
    return {"causal": causal, "scale": factor, "relative_position_bias": factor is None}
