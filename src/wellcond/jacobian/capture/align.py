r"""Which tokens a recorded attention multiplied, and what it added to their products.

The site's account of both is believed only where the recorded operands agree with it.

A projection reads tokens in the shape its module likes: (B, N, D), (N, B, D), (B, D, h, w), (B, nh, nw, w, w, D). The
products are batched over samples, windows and heads, in an order of the module's own. Both are tried in their usual
forms, and a form is accepted if, for every window l, head h and token,

    left = c_q (x_l W_q^T + b_q),   right^T = c_k (y_l W_k^T + b_k),   values = y_l W_v^T + b_v

with one number c_q and one c_k. The logits cannot serve for this: what does not fit would count as a bias. What the
softmax saw beyond s q . k is a mask, a position bias, or nothing:

    bias = logits - s q k^T,   with q, k recomputed in float64

exact up to the rounding of the model's own q, k and logits. Differences below that rounding are zero.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellcond.attention.evaluation import first_tensor
from wellcond.attention.kernels import is_masked
from wellcond.attention.record import SiteRecord, same_numbers
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.linalg.spectrum import to_float64

View = Callable[[Tensor], Tensor]
TOLERANCE = 1e-5
_EPS_FACTOR = 4  # roundings that meet in one entry of a product


@dataclass(frozen=True, eq=False)
class Alignment:
    """Tokens x (L, N, D) and y (L, M, E); logits and probabilities (L, H, N, M) of the same windows, in that order."""

    x: Tensor
    y: Tensor
    logits: Tensor
    probabilities: Tensor
    operand_dtype: torch.dtype


def align(site: AttentionSite, call: SiteRecord) -> Alignment | str:
    """The tokens that this attention multiplied, or the reason why they are not known."""
    if not call.softmaxes:
        return call.not_seen.get("logits", "no softmax was visible")
    reason = "its forward pass multiplies something else than the projected tokens"
    products = [pair for a, b in call.products for pair in ((a, b), (b.mT, a.mT))]
    for logits, p in call.softmaxes:
        for weights, values in products:
            if not same_numbers(weights, p):
                continue
            for left, right in products:
                if left.shape[:2] != weights.shape[:2] or right.mT.shape != (*values.shape[:2], site.head_dim):
                    continue
                for view in head_views(p, site.num_heads):
                    found = _tokens_of(site, call, view(left), view(right.mT), view(values))
                    if not isinstance(found, str):
                        return Alignment(*found, view(logits), view(p), left.dtype)
                    reason = found or reason
    return reason


def head_views(p: Tensor, num_heads: int) -> Iterator[View]:
    """Ways to read the leading dimensions of a softmax as windows and heads: tensors (..., n, m) -> (L, H, n, m)."""
    lead = tuple(p.shape[:-2])
    if not lead and num_heads == 1:
        lead = (1,)
    splits = [(lead, axis) for axis, size in enumerate(lead) if size == num_heads]
    for axis, size in enumerate(lead):
        if size != num_heads and size % num_heads == 0:
            rest = size // num_heads
            splits.append(((*lead[:axis], rest, num_heads, *lead[axis + 1 :]), axis + 1))
            splits.append(((*lead[:axis], num_heads, rest, *lead[axis + 1 :]), axis))
    for shape, axis in splits:
        yield functools.partial(_view_heads, shape=shape, axis=axis)


def _view_heads(tensor: Tensor, shape: tuple[int, ...], axis: int) -> Tensor:
    matrix = tensor.shape[-2:]
    return tensor.reshape(*shape, *matrix).movedim(axis, -3).reshape(-1, shape[axis], *matrix)


def _tokens_of(
    site: AttentionSite, call: SiteRecord, q_LHNd: Tensor, k_LHMd: Tensor, v_LHMd: Tensor
) -> tuple[Tensor, Tensor] | str:
    """Tokens x and y behind these operands; an empty string if they are something else, a reason if one is known."""
    values = _match(site, call, "value", v_LHMd)
    keys = None if values is None else _match(site, call, "key", k_LHMd, like=values[0])
    if keys is None:
        return ""
    y = keys[0]
    values = _match(site, call, "value", v_LHMd, like=y)
    queries = _match(site, call, "query", q_LHNd, like=y)
    if values is None or queries is None:
        return ""
    z, factor = values
    if abs(factor - 1) > tolerance(v_LHMd.dtype, site.by_role("value").parameter.dtype):
        return f"values are multiplied by {factor:.6g}"
    if z.shape != y.shape or not torch.equal(z, y):
        return "keys and values are made of different tokens"
    return queries[0], y


def _match(
    site: AttentionSite, call: SiteRecord, role: str, heads: Tensor, like: Tensor | None = None
) -> tuple[Tensor, float] | None:
    """Tokens behind the heads of one role, and the factor.

    Weights of zero agree with any order of the tokens; the order of `like` is then taken, if it is among them.
    """
    matching = _matching(site, call, role, heads)
    first = next(matching, None)
    if first is None or like is None or like.shape != first[0].shape or torch.equal(like, first[0]):
        return first
    return next((match for match in matching if torch.equal(like, match[0])), first)


def _matching(site: AttentionSite, call: SiteRecord, role: str, heads: Tensor) -> Iterator[tuple[Tensor, float]]:
    slot = site.by_role(role)
    for tokens in candidates(call, role, slot):
        for arranged in arrangements(tokens, slot, heads.shape[0], heads.shape[2]):
            factor = agreement(heads, slot, arranged, site.num_heads)
            if factor is not None:
                yield arranged, factor


def candidates(call: SiteRecord, role: str, slot: Slot) -> Iterator[Tensor]:
    """Tensors that this projection may have read, the surest first."""
    if role in call.inputs:
        yield call.inputs[role]
        return
    if isinstance(slot.owner, nn.MultiheadAttention):  # its arguments are named after the roles
        bound = inspect.signature(slot.owner.forward).bind(*call.args, **call.kwargs)
        yield bound.arguments[role]
        return
    # F.linear(x, self.qkv.weight): the product whose right side is the weight.
    weight = slot.as_matrix(getattr(slot.owner, slot.weight_name).detach())
    for left, right in call.products:
        if right.shape == (1, *weight.T.shape) and torch.equal(right[0], weight.T.to(right.dtype)):
            yield left[0]
    for value in (*call.args, *call.kwargs.values()):
        tensor = first_tensor(value)
        if tensor is not None and tensor.is_floating_point() and tensor.shape[-1:] == (slot.in_features,):
            yield tensor


def is_map(slot: Slot, tokens: Tensor) -> bool:
    """Whether these tokens are a map (B, D, h, w) or (B, D, n), read by a 1x1 convolution."""
    return isinstance(slot.owner, (nn.Conv1d, nn.Conv2d)) and tokens.dim() > 2


def arrangements(tokens: Tensor, slot: Slot, num_windows: int, num_tokens: int) -> Iterator[Tensor]:
    """Ways to read what a projection read as tokens (L, N, D)."""
    if is_map(slot, tokens):
        tokens = tokens.flatten(2).mT
    L, N, D = num_windows, num_tokens, slot.in_features
    if tokens.shape[-1] != D:
        return
    if tokens.numel() == L * N * D:
        yield tokens.reshape(L, N, D)
        if tokens.dim() == 2:  # flattened by F.linear; perhaps from (N, B, D)
            yield tokens.reshape(N, L, D).transpose(0, 1)
        else:
            yield tokens.transpose(0, 1).reshape(L, N, D)  # (N, B, D)
            B = tokens.shape[0]
            if L % B == 0:  # windows of every (L / B)-th token
                yield tokens.reshape(B, N, L // B, D).transpose(1, 2).reshape(L, N, D)
    elif tokens.numel() == N * D:  # projected once, used in every window
        yield tokens.reshape(1, N, D).expand(L, N, D)


def project(slot: Slot, x_LND: Tensor, num_heads: int) -> Tensor:
    """The site's account of one projection in float64, (L, H, N, d); key/value heads repeated for their group."""
    heads = torch.einsum("lnc,hdc->lhnd", to_float64(x_LND), to_float64(slot.read()))
    bias = slot.read_bias()
    if bias is not None:
        heads = heads + to_float64(bias)[None, :, None, :]
    return heads.repeat_interleave(num_heads // slot.num_heads, dim=1)


def tolerance(*dtypes: torch.dtype) -> float:
    """Relative error up to which two computations of one thing in these dtypes agree."""
    return max(TOLERANCE, *(8 * torch.finfo(dtype).eps for dtype in dtypes))


def agreement(found: Tensor, slot: Slot, tokens: Tensor, num_heads: int) -> float | None:
    """The factor c with found = c * (the projected tokens), to rounding, or None."""
    expected = project(slot, tokens, num_heads)
    if found.shape != expected.shape:
        return None
    error, found = tolerance(found.dtype, slot.parameter.dtype), to_float64(found)
    square = float((expected * expected).sum())
    if square == 0:
        return 1.0 if not bool(found.any()) else None
    factor = float((found * expected).sum()) / square
    off = float((found - factor * expected).norm())
    return factor if factor != 0 and off <= error * float(found.norm()) else None


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
    logits, product, hidden = to_float64(aligned.logits), q @ k.mT, is_masked(aligned.logits)
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
