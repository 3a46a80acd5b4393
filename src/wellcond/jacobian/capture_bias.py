r"""What a softmax saw beyond s q . k: masks, position biases, or nothing.

    bias = logits - s q k^T,   with q, k recomputed in float64

is exact up to the rounding of the model's own q, k and logits. Differences below that rounding are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.attention.site import AttentionSite
from wellcond.jacobian.capture_align import Alignment, project
from wellcond.linalg.float64 import to_float64

# exp(-745.2) is the smallest positive number of float64: a logit this far below its row's maximum is a masked one.
HIDDEN = -745.2
# No product of tokens is so negative: it is a mask that was added, on a row where it may hide everything.
MASK = -1e8


@dataclass(frozen=True, eq=False)
class LogitBias:
    """What is added to s q . k, (L or 1, H, N, M) with -inf where masked, None if nothing; and s itself.

    `doubt` says why this is not believed; it is empty if it is.
    """

    bias: Tensor | None
    scale: float
    doubt: str


def logit_bias(site: AttentionSite, aligned: Alignment) -> LogitBias:
    """Masks and biases behind the logits of a recorded softmax.

    A bias is believed where the site declares one (`relative_position_bias`) or leaves the mask to its caller
    (`causal` None). Elsewhere the logits must be s q . k, masked or not.
    """
    assert site.scale is not None
    query, key = site.by_role("query"), site.by_role("key")
    q, k = project(query, aligned.x, site.num_heads), project(key, aligned.y, site.num_heads)
    logits, product, hidden = to_float64(aligned.logits), q @ k.mT, masked(aligned.logits)
    scale = site.scale if site.evidence == "adapter" else _refined(site.scale, logits[~hidden], product[~hidden])
    product = scale * product
    noise = abs(scale) * rounding(site, aligned, q, k) + _EPS_FACTOR * _eps(aligned) * (logits.abs() + product.abs())
    bias = (logits - product).masked_fill(hidden, 0.0)
    bias = torch.where(bias.abs() <= noise, 0.0, bias)
    doubt = ""
    if bool(bias.any()) and not site.relative_position_bias and site.causal is not None:
        # A number added to a whole row (a subtracted maximum) changes no probability and no derivative.
        seen = (~hidden).sum(-1, keepdim=True).clamp_min(1)
        rest = (bias - bias.sum(-1, keepdim=True) / seen).masked_fill(hidden, 0.0)
        if bool((rest.abs() > 8 * noise).any()):
            doubt = (
                f"its logits differ from s q.k by up to {float(rest.abs().max()):.3g}, and nothing declared says why"
            )
        bias = torch.zeros_like(bias)
    bias = bias.masked_fill(hidden, -torch.inf)
    if not bool(bias.any()):
        return LogitBias(None, scale, doubt)
    shared = len(bias) > 1 and bool((bias == bias[:1]).all())
    return LogitBias(bias[:1].clone() if shared else bias, scale, doubt)


def _refined(scale: float, logits: Tensor, product: Tensor) -> float:
    """A scale that was measured in a trial run is known to seven digits; the logits tell the others."""
    square = float((product * product).sum())
    fitted = float((logits * product).sum()) / square if square else scale
    return fitted if abs(fitted - scale) <= 1e-6 * abs(scale) else scale


def masked(logits: Tensor) -> Tensor:
    """Entries that a mask hides, or whose probability is zero in float64 because another one is so much larger.

    A row that is hidden as a whole is a query that may attend to nothing. Models give it zero (a mask of -inf) or the
    mean of all values (a finite mask, in which s q . k is lost to rounding).
    """
    mask = max(MASK, torch.finfo(logits.dtype).min / 2)  # the most negative number of float16 is -65504
    logits = to_float64(logits)
    return (logits < mask) | (logits - logits.amax(-1, keepdim=True).clamp_min(mask) < HIDDEN)


_EPS_FACTOR = 4


def _eps(aligned: Alignment) -> float:
    dtypes = (aligned.x.dtype, aligned.operand_dtype, aligned.logits.dtype, aligned.probabilities.dtype)
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def rounding(site: AttentionSite, aligned: Alignment, q: Tensor, k: Tensor) -> Tensor:
    r"""How far the model's own q k^T may be from the exact one, entry by entry.

    An entry of q = W x is off by eps |q| (it is stored) and by u |w||x| (it is summed, in float32 or better):

        |d(q.k)| <= dq . |k| + |q| . dk
    """
    eps = _eps(aligned)
    summed = min(eps, torch.finfo(torch.float32).eps)

    def off(role: str, tokens: Tensor, heads: Tensor) -> Tensor:
        slot = site.by_role(role)
        sizes = to_float64(slot.read()).norm(dim=-1).repeat_interleave(site.num_heads // slot.num_heads, dim=0)
        lengths = to_float64(tokens).norm(dim=-1)
        return eps * heads.abs() + _EPS_FACTOR * summed * lengths[:, None, :, None] * sizes[None, :, None, :]

    dq, dk = off("query", aligned.x, q), off("key", aligned.y, k)
    return dq @ k.abs().mT + q.abs() @ dk.mT
