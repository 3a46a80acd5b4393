"""QK-norm for layers that have none: the projections return queries and keys whose heads have root mean square 1.

    qhat = q / sqrt(mean(q^2) + eps)   for each token and head, without a learned gain, as in nanochat
    qhat = g q / sqrt(mean(q^2) + eps)   with a learned gain g (d) that the heads of a layer share, as in Qwen3

It acts in the forward pass of the module that projects, so whatever the attention does afterwards (a scale, a rotation,
which the norm commutes with, windows, a fused kernel) reads normalised heads. With the usual scale 1/sqrt(d) logits lie
within sqrt(d). Parameters, their names and state dicts stay as they are, but for the gains: parameters `query_gain` and
`key_gain` of the modules that project.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.find import FACTS_ATTRIBUTE
from wellcond.attention.layout import is_projection
from wellcond.attention.names import QK_GAINS
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.errors import UnsupportedLayoutError

EPS = 1e-6
HEAD_NORM = "RMS norm of query and key heads"
"""Among the modifiers of a site that normalises its queries and keys in another way as well."""
ROWS_ATTRIBUTE = "_wellcond_normed_heads"


class NormedForward:
    """In place of a projection's `forward`: the same, with the heads of some rows normalised."""

    def __init__(self, module: nn.Module) -> None:
        """The rows are in the module; `forward` may be one that another library has put there."""
        self.module, self.replaced = module, vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the projection itself returns, normalised."""
        if self.replaced is not None:
            projected = self.replaced(*args, **kwargs)
        else:
            projected = type(self.module).forward(self.module, *args, **kwargs)
        axis = 1 if isinstance(self.module, (nn.Conv1d, nn.Conv2d)) else -1
        for start, rows, gain_name in vars(self.module)[ROWS_ATTRIBUTE]:
            gain = None if gain_name is None else self.module.get_parameter(gain_name)
            if start is None:
                projected = normalise_heads(projected, rows, axis, gain)
            else:
                projected = _normalise_span(projected, start, tuple(rows.shape), axis, gain)
        return projected


def normalise_heads(projected: Tensor, rows: Tensor, axis: int = -1, gain: Tensor | None = None) -> Tensor:
    """RMS norm of heads (heads, d) that are at the positions `rows` of an axis, times a gain (d); others stay.

    Example:
        >>> normalised = normalise_heads(torch.tensor([[3.0, 1.0, -4.0, 0.0]]), torch.tensor([[0, 2]]))
        >>> [round(value, 3) for value in normalised[0].tolist()]
        [0.849, 1.0, -1.131, 0.0]
    """
    axis %= projected.dim()
    flat = rows.flatten().to(projected.device)
    heads = projected.index_select(axis, flat).unflatten(axis, tuple(rows.shape))
    return projected.index_copy(axis, flat, _normalised(heads, axis, gain).flatten(axis, axis + 1))


def _normalise_span(projected: Tensor, start: int, shape: tuple[int, ...], axis: int, gain: Tensor | None) -> Tensor:
    """`normalise_heads` of positions that follow each other, without looking each of them up."""
    axis %= projected.dim()
    count = shape[0] * shape[1]
    before, heads, after = projected.split([start, count, projected.shape[axis] - start - count], axis)
    normalised = _normalised(heads.unflatten(axis, shape), axis, gain).flatten(axis, axis + 1)
    return torch.cat([before, normalised, after], axis)


def _normalised(heads: Tensor, axis: int, gain: Tensor | None) -> Tensor:
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    wide = wide * (wide.square().mean(axis + 1, keepdim=True) + EPS).rsqrt()
    if gain is not None:
        wide = wide * gain.view(-1, *[1] * (heads.dim() - axis - 2))
    return wide.to(heads.dtype)


def add_head_norm_(sites: list[AttentionSite], *, gain: bool = False) -> None:
    """Normalise the queries and keys of all attention layers from now on, in place, with or without a learned gain.

    Raises: UnsupportedLayoutError, with nothing changed, for an attention that has a norm of single queries and keys
        already, or whose projections are not modules of their own.
    """
    for site in sites:
        if site.qk_norm is not None and site.kind != "cross_covariance":
            raise _refused(site, f"its queries and keys are normalised already ({site.qk_norm}).")
        for slot in (site.by_role("query"), site.by_role("key")):
            if not is_projection(slot.owner):
                raise _refused(site, "its queries and keys are not the output of a linear module of their own.")
    for site in sites:
        for role in ("query", "key"):
            _add(site.by_role(role), QK_GAINS[role] if gain else None)


def _add(slot: Slot, gain_name: str | None) -> None:
    state = vars(slot.owner)
    if ROWS_ATTRIBUTE not in state:
        forward = NormedForward(slot.owner)
        state["forward"], state[ROWS_ATTRIBUTE] = forward, []
        state[FACTS_ATTRIBUTE] = with_head_norm
    state[ROWS_ATTRIBUTE].append((None if slot.span is None else slot.span.start, slot.rows, gain_name))
    if gain_name is not None:
        slot.owner.register_parameter(gain_name, nn.Parameter(slot.parameter.new_ones(slot.head_dim)))


def with_head_norm(site: AttentionSite) -> AttentionSite:
    """The site with the norm among its facts; `find_attention` calls this for modules whose queries are normalised."""
    if site.qk_norm is None:
        return replace(site, qk_norm="rms")
    return replace(site, modifiers=(*site.modifiers, HEAD_NORM))


def _refused(site: AttentionSite, why: str) -> UnsupportedLayoutError:
    return UnsupportedLayoutError(
        site.name, f"QK-norm cannot be added: {why} Leave it out", class_name=type(site.module).__name__
    )
