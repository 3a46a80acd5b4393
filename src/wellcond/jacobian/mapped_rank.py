r"""Upper bounds on the rank of the Jacobian of a head whose queries and keys pass maps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wellcond.jacobian.maps import MappedSide, gauge_of, is_present
from wellcond.linalg.spectrum import numerical_rank, row_space
from wellcond.theory.ranks import Structure, contains_ones

if TYPE_CHECKING:
    from wellcond.jacobian.normalised import NormalisedHead


def mapped_structure(form: NormalisedHead) -> Structure:
    r"""Sizes, and an upper bound on the rank.

    Note [Symmetry]. Directions of the query (key) parameters that cannot move qhat:
      - a (x) z with N_r z = 0 for every r: the kernel common to all rows (LayerNorm: z = 1), once per token dimension;
      - Wq itself if N_r q_r = 0 for every r (norms without eps do not see the scale of their input), once per head.
    Directions of both that cancel, (Wq E, Wk F): if the map commutes with the group of E,
      - linear, F = -E^T:                   d^2, less those with Q E = 0 and K E^T = 0
      - orthogonal, E skew, F = E:          d (d-1)/2, less those with Q E = 0 and K E = 0
      - centred (LayerNorm without affine): the same on the d - 1 dimensions orthogonal to 1
      - numeric (rotations, what a trace found): counted by `gauge_of`
    None of these where a position term multiplies the queries, for it does not turn with the keys.
    A bias that is present but no parameter breaks them, as does an affine norm; then they are not counted.
    Logits of a row count only up to a constant, so at most sum_r (#keys seen - 1) dimensions pass the softmax.
    Generic weights have this rank under self-attention with more tokens than channels, for one of the maps above and
    no fixed biases; for combinations of maps, affine norms or a handful of keys it is an upper bound only.
    """
    head, d, g = form.head, form.head.head_dim, form.num_query_heads
    with_q, with_k, with_v = form.counted
    rx, ry = numerical_rank(head.x), numerical_rank(head.memory)
    qx, ky, vy = (numerical_rank(tokens) for tokens in form.read())
    inputs_q, inputs_k = head.x.shape[1] + with_q, head.memory.shape[1] + with_k
    parameters = g * d * inputs_q + d * inputs_k + head.value_dim * (head.memory.shape[1] + with_v)
    fixed_q, fixed_k = is_present(head.b_q) and not with_q, is_present(head.b_k) and not with_k
    queries, keys = head.queries().flatten(0, 1), head.keys()
    per_head = len(queries) // g
    seen = sum(
        _visible(form.query.jacobian[at : at + per_head], queries[at : at + per_head], qx, fixed_q)
        for at in range(0, len(queries), per_head)
    ) + _visible(form.key.jacobian, keys, ky, fixed_k)
    gauge, constant = _gauge(form, fixed_q, fixed_k)
    logits = min(max(0, seen - gauge - constant), _free_logits(form))
    rank = min(form.num_outputs, logits + head.value_dim * vy)
    names = []
    if rank < form.num_outputs:
        names = ["upper bound on the rank", f"gauge (W_Q E, W_K F): {gauge}"]
        names += [f"the same added to all keys: {constant}"] if constant else []
        names.append(f"unseen by the maps or outside the span of the tokens: {g * d * inputs_q + d * inputs_k - seen}")
    return Structure(form.num_outputs, parameters, rx, ry, rank, "; ".join(names))


def _visible(jacobians: Tensor, rows: Tensor, inputs: int, fixed_bias: bool) -> int:
    """Dimensions of one projection's parameters that can move the mapped rows, at most."""
    basis = row_space(jacobians.flatten(0, 1))
    moved = torch.linalg.vector_norm((jacobians @ rows[:, :, None])[..., 0], dim=-1)
    sizes = torch.linalg.matrix_norm(jacobians) * torch.linalg.vector_norm(rows, dim=-1)
    unmoved = bool((moved <= 1e-13 * rows.shape[1] * sizes).all())
    in_kernel = float((rows @ basis).norm()) <= 1e-10 * float(rows.norm())  # then it is counted already
    return basis.shape[1] * inputs - int(unmoved and not in_kernel and not fixed_bias)


def _gauge(form: NormalisedHead, fixed_q: bool, fixed_k: bool) -> tuple[int, int]:
    """Dimensions of the directions (Wq E, Wk F) of Note [Symmetry], and of a constant key that no softmax sees."""
    head, symmetry = form.head, form.query.symmetry
    queries, keys = head.queries().flatten(0, 1), head.keys()
    d, both = queries.shape[1], torch.cat([queries, keys])
    if symmetry != form.key.symmetry or symmetry == "none":
        return 0, 0
    if symmetry == "numeric":
        return _numeric_gauge(form, queries, keys, fixed_q, fixed_k)
    if fixed_q or fixed_k:
        return 0, 0
    if symmetry == "linear":
        return d * d - (d - numerical_rank(queries)) * (d - numerical_rank(keys)), 0
    if symmetry == "centred":
        d, both = d - 1, both - both.mean(-1, keepdim=True)
    free = d - numerical_rank(both)
    return (d * (d - 1) - free * (free - 1)) // 2, 0


def _numeric_gauge(
    form: NormalisedHead, queries: Tensor, keys: Tensor, fixed_q: bool, fixed_k: bool
) -> tuple[int, int]:
    head, real = form.head, form.num_keys_of_tokens
    b_q, b_k = head.query_biases, head.b_k
    none = keys.new_zeros(0, head.head_dim)
    per_row = None if b_q is None or not fixed_q else b_q.repeat_interleave(head.num_tokens, 0)
    query = MappedSide(queries if per_row is None else queries - per_row, none if per_row is None else b_q,  # type: ignore[arg-type]
                       form.query.value, form.query.jacobian, queries)  # fmt: skip
    fixed = none if b_k is None or not fixed_k else b_k[None]
    key = MappedSide(keys[:real] - fixed.sum(0), fixed, form.key.value[:real], form.key.jacobian[:real], keys[:real])
    found = gauge_of(query, key)
    turned = form.softmax is not None and form.softmax.by_query is not None
    has_constant = contains_ones(form.read()[1][:real])
    no_other = real == len(keys) and form.p.shape == getattr(form.softmax, "p", form.p).shape
    return 0 if turned else found.cancelling, found.constant if has_constant and no_other and _even_slopes(form) else 0


def _even_slopes(form: NormalisedHead) -> bool:
    """Whether all logits of a row follow their products alike: no soft-cap."""
    slope = form.slope
    if isinstance(slope, float):
        return True
    seen = form.p > 0
    high, low = slope.masked_fill(~seen, -torch.inf).amax(-1), slope.masked_fill(~seen, torch.inf).amin(-1)
    return bool((high - low <= 1e-12 * high.abs()).all())


def _free_logits(form: NormalisedHead) -> int:
    """sum_r (#keys that row r sees - 1), or all of them beside a sink."""
    if form.softmax is not None:
        sinks = form.softmax.p.shape[1] > form.p.shape[1]
        return int((form.p > 0).sum()) - (0 if sinks else form.head.num_rows)
    head = form.head
    rows, keys = head.num_rows, head.memory.shape[0]
    if head.mask is None:
        return rows * (keys - 1)
    seen = (head.mask > -torch.inf).expand(head.num_query_heads, -1, -1)
    return int(seen.sum()) - rows
