"""Run a model once and take out, for every attention, what its Jacobian needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.find import find_attention
from wellcond.attention.site import AttentionSite
from wellcond.errors import WeightError
from wellcond.jacobian.capture_align import align, candidates, head_views, is_map
from wellcond.jacobian.capture_bias import logit_bias
from wellcond.jacobian.capture_record import CapturedAttention, NotPlainError, fingerprint
from wellcond.jacobian.capture_watch import SiteCall, watch_sites

__all__ = ["CapturedAttention", "NotPlainError", "capture_attention", "capture_sites"]

# Position decides which keys a query sees, and nothing else changes: masks, or windows as samples of their own.
HARMLESS = ("local window",)


def capture_attention(
    model: nn.Module, batch: Any, *, sites: Sequence[AttentionSite] | None = None, max_samples: int | None = None
) -> list[CapturedAttention]:
    """Run the model's own forward pass once and keep what each attention read, multiplied and put out.

    The pass is in evaluation mode and without gradients; training flags, hooks, gradients and the random state are left
    as they were. Of a module that is called several times (ALBERT's shared layer), the first call is kept, with a note.

    Args:
        model: any model, in any floating point dtype.
        batch: a tensor, a mapping of keyword arguments, or a tuple of arguments of `model`.
        sites: only these attentions (from `find_attention(model)`); by default all that are recognised.
        max_samples: keep at most so many samples or windows of each attention; the first ones.

    Returns: one `CapturedAttention` per site, in the order of the sites. One that the batch never reaches has no
        tokens, and says so.

    Raises:
        AttentionNotFoundError: nothing was recognised.
        WeightError: NaN or infinite tokens, logits or probabilities, with the name of the layer.
        ValueError: no site is reached by this batch, or one that was asked for is not.

    Example:
        >>> from torch import nn
        >>> attention = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> [captured] = capture_attention(attention, (x, x, x))
        >>> captured.is_plain, captured.head(0).output().shape
        (True, torch.Size([1, 5, 4]))
    """
    if sites is None:
        return capture_sites(model, batch, find_attention(model, strict=False), max_samples=max_samples, required=False)
    return capture_sites(model, batch, sites, max_samples=max_samples)


def capture_sites(
    model: nn.Module,
    batch: Any,
    sites: Sequence[AttentionSite],
    *,
    max_samples: int | None = None,
    required: bool = True,
) -> list[CapturedAttention]:
    """`capture_attention` of sites that are known; unless `required`, some of them may not be reached by the batch."""
    found: dict[int, CapturedAttention] = {}

    def finish(site: AttentionSite, call: SiteCall) -> None:
        _check_finite(site, call)
        found[id(site)] = _describe(site, call, max_samples)

    counts = watch_sites(model, batch, sites, finish)
    missing = [site.name for site, count in zip(sites, counts, strict=True) if not count]
    if missing and (required or len(missing) == len(sites)):
        raise ValueError(f"the forward pass on this batch never calls {', '.join(missing[:5])}")
    return [
        _with_note(found[id(site)], count) if id(site) in found else _not_called(site)
        for site, count in zip(sites, counts, strict=True)
    ]


def _with_note(captured: CapturedAttention, count: int) -> CapturedAttention:
    if count == 1:
        return captured
    note = f"called {count} times, the first call is kept"
    return replace(captured, note=f"{captured.note}; {note}" if captured.note else note)


def _not_called(site: AttentionSite) -> CapturedAttention:
    why = "the forward pass on this batch does not call it"
    return CapturedAttention(site, None, None, None, None, site.q.parameter.dtype, why, why)


def why_site_is_not_plain(site: AttentionSite) -> str:
    """What the site itself says against softmax(s Q K^T + bias) V; empty if nothing."""
    if site.kind != "softmax":
        return f"its kind is {site.kind}"
    if site.evidence == "structure":
        return "only the place of its projections is known, not what it computes"
    reasons = {
        "queries and keys are rotated (rotary)": site.rotary,
        f"queries and keys are normalised ({site.qk_norm})": site.qk_norm is not None,
        "heads are mixed (talking heads)": site.talking_heads,
    }
    said = [reason for reason, holds in reasons.items() if holds]
    said += [modifier for modifier in site.modifiers if modifier not in HARMLESS]
    if not said and site.scale is None:
        said = ["its scale is not known"]
    return "; ".join(said)


def _describe(site: AttentionSite, call: SiteCall, max_samples: int | None) -> CapturedAttention:
    some, mark = slice(None, max_samples), fingerprint(site)
    dtype, why = site.q.parameter.dtype, why_site_is_not_plain(site)
    if not why:
        aligned = align(site, call)
        if not isinstance(aligned, str):
            seen = logit_bias(site, aligned)
            bias = None if seen.bias is None else seen.bias[some].clone()
            memory = None if _equal(aligned.x, aligned.y) else aligned.y[some].clone()
            x, p = aligned.x[some].clone(), aligned.probabilities[some].clone()
            return CapturedAttention(site, x, memory, bias, p, dtype, seen.doubt, "", seen.scale, call, mark)
        why = aligned
    x_, y_, p_ = (None if tensor is None else tensor[some].clone() for tensor in _as_seen(site, call))
    note = "tokens and probabilities are as seen, not checked against each other"
    return CapturedAttention(site, x_, y_, None, p_, dtype, why, note, site.scale, call, mark)


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first, second)


def _as_seen(site: AttentionSite, call: SiteCall) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Tokens and probabilities of an attention that is not plain, in the form of a plain one as far as they have it."""
    softmaxes = [p for _, p in call.softmaxes] if site.kind == "softmax" else []
    views = (view(p) for p in softmaxes for view in head_views(p, site.num_heads))
    probabilities = next(views, None)

    def tokens(role: str, axis: int) -> Tensor | None:
        slot = site.by_role(role)
        possible = list(candidates(call, role, slot))
        if not possible:
            return None
        # F.linear flattens what it reads; the module's own argument may be the same before that.
        same = [t for t in possible if t.dim() > 2 and _equal(t.reshape(-1, t.shape[-1]), possible[0])]
        seen = same[0] if same else possible[0]
        if is_map(slot, seen):
            return seen.flatten(2).mT
        if seen.dim() == 2 and role in call.inputs:
            return seen[:, None]
        seen = seen.reshape(-1, *seen.shape[-2:])
        count = seen.shape[1] if probabilities is None else probabilities.shape[axis]
        # (N, B, D), where the softmax shows N
        return seen.transpose(0, 1) if seen.shape[0] == count != seen.shape[1] else seen

    x, y = tokens("query", -2), tokens("key", -1)
    if x is not None and y is not None and _equal(x, y):
        y = None
    return x, y, probabilities


def _check_finite(site: AttentionSite, call: SiteCall) -> None:
    name = site.name or type(site.module).__name__
    for role, tokens in call.inputs.items():
        if not bool(torch.isfinite(tokens).all()):
            raise WeightError(f"{name}: the {role} projection reads NaN or infinite numbers on this batch")
    for logits, p in call.softmaxes:
        if bool(torch.isnan(logits).any()) or bool((logits == torch.inf).any()):
            raise WeightError(f"{name}: its logits are NaN or infinite on this batch")
        if bool(torch.isnan(p).any()):
            raise WeightError(f"{name}: its softmax gives NaN on this batch; is some token masked from everything?")
