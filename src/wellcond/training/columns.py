"""The columns of `AttentionMonitor`: what is read of one call of an attention kernel, per head.

A column is a function of a `LiveCall` with a decorator. It returns numbers of shape (samples, heads, ...), or a text
that says why it cannot. It reads nothing from the device, draws no random number and allocates nothing of N x N.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wellcond.attention.kernels import ADDED, is_masked
from wellcond.attention.live import LiveCall
from wellcond.errors import OptionError

Reduction = Literal["mean", "max"]
Reading = Callable[[LiveCall], "Tensor | str"]
ROWS_AT_ONCE = 64
"""Of an attention map, of which the entropy is computed."""
HIDDEN_CHECK = "_lse_error"
TOLERANCE = 0.02
"""Of the log-sum-exp of a foreign operator, relative to 1 + its magnitude, on the rows that are computed again."""


@dataclass(frozen=True)
class Column:
    """One number per head, reduced over samples, tokens, microbatches and processes."""

    name: str
    read: Reading
    reduce: Reduction
    meaning: str
    root: bool = False
    """Whether the square root of the mean is what is shown."""


COLUMNS: dict[str, Column] = {}


def register_column(name: str, *, reduce: Reduction = "mean", root: bool = False) -> Callable[[Reading], Reading]:
    """Decorate a function that reads a number per head from a kernel call: a column of `AttentionMonitor`.

    Args:
        name: of the column.
        reduce: over samples, tokens, microbatches and processes: ``mean`` or ``max``. Numbers that are not finite are
            left out of a mean, and count as infinity in a maximum.
        root: the square root of the mean is what is shown, as for norms.

    Raises: OptionError for a name that is taken, or for another reduction.

    Example:
        >>> @register_column("v_max", reduce="max")
        ... def v_max(call):
        ...     "Largest entry of v."
        ...     return "v was not seen" if call.v is None else call.v.abs().amax(-1)
        >>> COLUMNS["v_max"].meaning
        'Largest entry of v.'
        >>> del COLUMNS["v_max"]
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise OptionError(f"name of a column: expected a word such as 'v_max', got {name!r}", found=name)
    if reduce not in ("mean", "max"):
        raise OptionError(f"reduce: expected 'mean' or 'max', got {reduce!r}", found=reduce)
    if name in COLUMNS and COLUMNS[name].read.__module__.startswith("wellcond."):
        raise OptionError(f"{name!r} is a column of wellcond, already; choose another name", found=name)

    def decorate(read: Reading) -> Reading:
        COLUMNS[name] = Column(name, read, reduce, (read.__doc__ or "").strip().splitlines()[0], root)
        return read

    return decorate


@register_column("max_logit", reduce="max")
def max_logit(call: LiveCall) -> Tensor | str:
    """Largest logit; where only the log-sum-exp is known, the upper bound lse."""
    if call.logits is not None:
        return call.logits.amax(-1)
    return call.why or "its kernel returns no log-sum-exp" if call.lse is None else call.lse


@register_column("max_logit_low", reduce="max")
def max_logit_low(call: LiveCall) -> Tensor | str:
    """Lower bound of the largest logit: `max_logit` itself where that is exact, else lse - ln(keys)."""
    if call.logits is not None or call.lse is None:
        return max_logit(call)
    if call.sees_all:
        return call.lse - math.log(max(call.num_keys, 1))
    return call.lse - call.visible_keys().clamp_min(1).log()


@register_column("entropy")
def entropy(call: LiveCall) -> Tensor | str:
    """Entropy of a token's attention, in nats."""
    if call.probabilities is not None:
        parts = call.probabilities.split(ROWS_AT_ONCE, dim=-2)
        return torch.cat([torch.special.entr(part.float()).sum(-1) for part in parts], -1)
    weighted = None if call.lse is None or call.adds_numbers else call.weighted_keys()
    if weighted is not None and call.q is not None and call.scale is not None and call.lse is not None:
        # H_i = lse_i - sum_j p_ij l_ij, and the logits l_ij are s q_i . k_j.
        return (call.lse - call.scale * (call.q * weighted).sum(-1, dtype=torch.float32)).clamp_min(0.0)
    if call.foreign:
        return call.why or f"{call.foreign} is not called a second time"
    rows = call.sampled_rows() if call.lse is not None else None
    if rows is None:
        return call.why or "its kernel returns no log-sum-exp"
    return torch.special.entr(rows[0].softmax(-1)).sum(-1)


@register_column("first_share")
def first_share(call: LiveCall) -> Tensor | str:
    """Probability of the first key."""
    if call.probabilities is not None:
        return call.probabilities[..., 0]
    logits = _logits_with(call, None if call.k is None else call.k[..., :1, :])
    if isinstance(logits, str) or call.lse is None:
        return str(logits)
    mask = call.full_mask()
    return (_hidden(logits, None if mask is None else mask[..., 0]) - call.lse).exp()


@register_column("self_share")
def self_share(call: LiveCall) -> Tensor | str:
    """Probability of a token for itself."""
    if call.cross:
        return "queries and keys are of two sequences"
    if call.probabilities is not None:
        p = call.probabilities
        return p.diagonal(dim1=-2, dim2=-1) if p.shape[-1] == p.shape[-2] else "there are not as many keys as queries"
    if call.q is not None and call.q.shape[-2] != call.num_keys:
        return "there are not as many keys as queries"
    logits = _logits_with(call, call.k)
    if isinstance(logits, str) or call.lse is None:
        return str(logits)
    mask = call.full_mask()
    return (_hidden(logits, None if mask is None else mask.diagonal(dim1=-2, dim2=-1)) - call.lse).exp()


def _logits_with(call: LiveCall, k: Tensor | None) -> Tensor | str:
    """Logits of every query with one key each, (samples, heads, tokens)."""
    if call.q is None or k is None or call.scale is None or call.lse is None:
        return call.why or "its kernel returns no log-sum-exp"
    if call.q.shape[1] == k.shape[1]:
        return call.scale * (call.q * k).sum(-1, dtype=torch.float32)
    q = call.q.unflatten(1, (k.shape[1], -1))
    return call.scale * (q * k.unsqueeze(2)).sum(-1, dtype=torch.float32).flatten(1, 2)


def _hidden(logits: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return logits
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask


@register_column("logit_std")
def logit_std(call: LiveCall) -> Tensor | str:
    """Standard deviation of a token's logits, over 16 tokens of every sample."""
    rows = call.sampled_rows()
    if rows is None or (call.foreign and call.lse is None):
        return call.why or "its queries and keys were not seen"
    logits, visible = rows
    if call.sees_all and call.num_keys > 1:
        apart = logits - logits.mean(-1, keepdim=True)
        return torch.linalg.vector_norm(apart, dim=-1) / math.sqrt(call.num_keys)
    seen = ~is_masked(logits, visible, depth=ADDED)
    count = seen.sum(-1)
    mean = torch.where(seen, logits, 0.0).sum(-1) / count
    square = torch.where(seen, (logits - mean[..., None]).square(), 0.0).sum(-1) / count
    return torch.where(count > 1, square.sqrt(), math.nan)


@register_column("q_norm", root=True)
def q_norm(call: LiveCall) -> Tensor | str:
    """Length of a query as the kernel gets it (root mean square over tokens)."""
    return _or_why(call.squares("q"), "queries")


@register_column("k_norm", root=True)
def k_norm(call: LiveCall) -> Tensor | str:
    """Length of a key."""
    return _or_why(call.squares("k"), "keys")


@register_column("v_norm", root=True)
def v_norm(call: LiveCall) -> Tensor | str:
    """Length of a value."""
    return _or_why(call.squares("v"), "values")


@register_column("v_spread")
def v_spread(call: LiveCall) -> Tensor | str:
    """How far values of a sample differ from their mean, relative to their length: 0 where all tokens are the same."""
    squares = call.squares("v")
    if call.v is None or squares is None:
        return _or_why(None, "values")
    v = call.v.float()
    apart = torch.linalg.vector_norm(v - v.mean(-2, keepdim=True), dim=(-2, -1))
    return apart / squares.sum(-1).sqrt()


def _or_why(squares: Tensor | None, what: str) -> Tensor | str:
    return f"its {what} were not seen" if squares is None else squares


def lse_error(call: LiveCall) -> Tensor | str:
    """How far the log-sum-exp that a foreign operator returned is from that of the rows computed again."""
    rows = call.sampled_rows() if call.foreign else None
    if call.lse is None or rows is None or call.q is None:
        return ""
    at = call.sampled_positions()
    right = rows[0].logsumexp(-1)
    return (call.lse.index_select(-1, at) - right).abs() / (1 + right.abs())


CHECK = Column(HIDDEN_CHECK, lse_error, "max", "")
