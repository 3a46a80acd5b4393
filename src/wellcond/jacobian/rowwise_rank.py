r"""Upper bounds on the rank of the Jacobian of a head whose queries and keys pass maps.

# Note [Gauge of maps]
`gauge_of` counts the directions (W_Q E, W_K F) that cancel in every product of mapped rows (theory.md, section 5.5).
E is in the commutant of all A_rj A^-1, A_rj = N_r^T N_j, which is that of one random combination Z of them. On an
eigenspace of Z of dimension k, E has k^2 real numbers for a real eigenvalue, 2 k^2 for a pair of complex ones.

Norms allow the skew E only: k (k - 1) / 2 and k^2. They hide the direction of a row, and N_r is taken as its polar
factor. That E is null is then tested, not taken for granted. Where a norm has a weight that differs from channel to
channel, nothing is counted, and the rank that follows is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wellcond.jacobian.head import contains_ones, counted_biases
from wellcond.jacobian.operator import RankBound
from wellcond.linalg.spectrum import numerical_rank, resolve_rank, row_space

if TYPE_CHECKING:
    from wellcond.jacobian.rowwise import RowwiseHead

SAME = 1e-11  # eigenvalues of a normal matrix of this size are right to 1e-13
LINEAR = 1e-11
NULL = 1e-8  # of a random direction, which passes polar factors of nearly singular N_r
ROWS = 64  # Jacobians of maps that enter the random combinations


def rowwise_rank_bound(operator: RowwiseHead) -> RankBound:
    r"""An upper bound on the rank.

    Note [Symmetry]. Directions of the query (key) parameters that cannot move qhat:
      - a (x) z with N_r z = 0 for every r: the kernel common to all rows (LayerNorm: z = 1), once per token dimension;
      - Wq itself if N_r q_r = 0 for every r (norms without eps do not see the scale of their input), once per head.
    Directions of both that cancel, (Wq E, Wk F), are counted by `gauge_of`. None of these where a position term
    multiplies the queries, for it does not turn with the keys. A bias that is present but no parameter breaks them, as
    does an affine norm; then they are not counted.
    Logits of a row count only up to a constant, so at most sum_r (#keys seen - 1) dimensions pass the softmax.
    Generic weights have this rank under self-attention with more tokens than channels, for one norm or rotation and no
    fixed biases; for combinations of maps, affine norms or a handful of keys it is an upper bound only.
    """
    head, d, g = operator.head, operator.head.head_dim, operator.head.num_query_heads
    with_q, with_k, _ = counted_biases(head, operator.biases)
    qx, ky, vy = (numerical_rank(tokens) for tokens in operator.inputs())
    fixed_q, fixed_k = _is_present(head.b_q) and not with_q, _is_present(head.b_k) and not with_k
    queries, keys = head.queries().flatten(0, 1), head.keys()
    per_head = len(queries) // g
    seen = sum(
        _seen_directions(operator.query.jacobians[at : at + per_head], queries[at : at + per_head], qx, fixed_q)
        for at in range(0, len(queries), per_head)
    ) + _seen_directions(operator.key.jacobians, keys, ky, fixed_k)
    gauge, constant = _cancelling_directions(operator, queries, keys, fixed_q, fixed_k)
    logits = min(max(0, seen - gauge - constant), _free_logits(operator))
    rank = min(operator.shape[0], logits + head.value_dim * vy)
    names = []
    if rank < operator.shape[0]:
        parameters = g * d * (head.x.shape[1] + with_q) + d * (head.memory.shape[1] + with_k)
        names = ["upper bound on the rank", f"gauge (W_Q E, W_K F): {gauge}"]
        names += [f"the same added to all keys: {constant}"] if constant else []
        names.append(f"unseen by the maps or outside the span of the tokens: {parameters - seen}")
    return RankBound(rank, "; ".join(names), numerical_rank(head.memory))


def _is_present(bias: Tensor | None) -> bool:
    return bias is not None and bool(bias.any())


def _seen_directions(jacobians: Tensor, rows: Tensor, inputs: int, fixed_bias: bool) -> int:
    """Dimensions of one projection's parameters that can move the mapped rows, at most."""
    basis = row_space(jacobians.flatten(0, 1))
    moved = torch.linalg.vector_norm((jacobians @ rows[:, :, None])[..., 0], dim=-1)
    sizes = torch.linalg.matrix_norm(jacobians) * torch.linalg.vector_norm(rows, dim=-1)
    unmoved = bool((moved <= 1e-13 * rows.shape[1] * sizes).all())
    in_kernel = float((rows @ basis).norm()) <= 1e-10 * float(rows.norm())  # then it is counted already
    return basis.shape[1] * inputs - int(unmoved and not in_kernel and not fixed_bias)


def _cancelling_directions(
    operator: RowwiseHead, queries: Tensor, keys: Tensor, fixed_q: bool, fixed_k: bool
) -> tuple[int, int]:
    """Dimensions of the directions (Wq E, Wk F) of Note [Symmetry], and of a constant key that no softmax sees."""
    head, real, softmax = operator.head, operator.num_keys_of_tokens, operator.softmax
    b_q, b_k = head.query_biases, head.b_k
    none = keys.new_zeros(0, head.head_dim)
    unbiased, fixed = queries, none
    if b_q is not None and fixed_q:
        unbiased, fixed = queries - b_q.repeat_interleave(head.num_tokens, 0), b_q
    query = MappedProjection(unbiased, fixed, operator.query.value, operator.query.jacobians, queries)
    fixed = none if b_k is None or not fixed_k else b_k[None]
    key = MappedProjection(
        keys[:real] - fixed.sum(0), fixed, operator.key.value[:real], operator.key.jacobians[:real], keys[:real]
    )
    cancelling, constant = gauge_of(query, key)
    has_constant = contains_ones(operator.inputs()[1][:real])
    no_other = real == len(keys) and operator.p.shape == softmax.p.shape
    constant = constant if has_constant and no_other and _even_slopes(operator) else 0
    return 0 if softmax.by_query is not None else cancelling, constant


def _even_slopes(operator: RowwiseHead) -> bool:
    """Whether all logits of a row follow their products alike: no soft-cap."""
    slope, seen = operator.softmax.slope, operator.p > 0
    high, low = slope.masked_fill(~seen, -torch.inf).amax(-1), slope.masked_fill(~seen, torch.inf).amin(-1)
    return bool((high - low <= 1e-12 * high.abs()).all())


def _free_logits(operator: RowwiseHead) -> int:
    """sum_r (#keys that row r sees - 1), or all of them beside a sink."""
    sinks = operator.softmax.p.shape[1] > operator.p.shape[1]
    return int((operator.p > 0).sum()) - (0 if sinks else operator.head.num_rows)


@dataclass(frozen=True, eq=False)
class MappedProjection:
    """Queries or keys (rows, d) without a bias that is no parameter, that bias (count, d), and the map of the rows."""

    rows: Tensor
    fixed: Tensor
    value: Tensor
    jacobian: Tensor
    read: Tensor
    """What the map read: rows and bias."""


@dataclass(frozen=True, eq=False)
class Isotypic:
    """An eigenspace of Z: coordinates of queries are rows @ right, those of mapped keys left @ A rows."""

    right: Tensor
    left: Tensor
    is_real: bool
    is_fixed: bool
    """Nothing rotates it: a constant added to the keys adds a constant to each row of logits."""

    @property
    def size(self) -> int:
        """Its dimension k, over the real or complex numbers."""
        return self.right.shape[1]


def gauge_of(query: MappedProjection, key: MappedProjection) -> tuple[int, int]:
    """Dimensions of the directions that cancel, and of those of a constant key that no softmax sees."""
    linear = _is_linear(query) and _is_linear(key)
    query, key = _in_visible_basis(query), _in_visible_basis(key)
    if query.rows.shape[1] != key.rows.shape[1] or not query.rows.shape[1]:
        return 0, 0
    n_q, n_k = (_some(side.jacobian if linear else _polar(side.jacobian)) for side in (query, key))
    a, other = (_combination(n_q, seed).T @ _combination(n_k, seed + 1) for seed in (0, 2))
    if float(torch.linalg.cond(a)) > 1e8:
        return 0, 0
    parts = list(_isotypic(torch.linalg.solve(a, other, left=False), n_q, n_k))
    constant = sum(part.size for part in parts if part.is_real and part.is_fixed) if linear else 0
    if linear:
        return sum(_general(part, query, key, a) for part in parts), constant
    if bool(query.fixed.any() or key.fixed.any()) or not _is_null(_random_skew(parts), query, key, a):
        return 0, constant
    return sum(_skew(part, query, key, a) for part in parts), constant


def _is_linear(side: MappedProjection) -> bool:
    off = (side.jacobian @ side.read[..., None])[..., 0] - side.value
    return float(off.norm()) <= LINEAR * float(side.value.norm())


def _in_visible_basis(side: MappedProjection) -> MappedProjection:
    """The same in a basis of what the map sees at all (LayerNorm: not the mean)."""
    b = row_space(side.jacobian.flatten(0, 1))
    if b.shape[0] == b.shape[1]:
        return side
    return MappedProjection(side.rows @ b, side.fixed @ b, side.value, side.jacobian @ b, side.read @ b)


def _some(jacobians: Tensor) -> Tensor:
    order = torch.randperm(len(jacobians), generator=torch.Generator().manual_seed(0))
    return jacobians[order[:ROWS]]


def _polar(jacobians: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(_some(jacobians), full_matrices=False)
    return u @ vh


def _combination(jacobians: Tensor, seed: int) -> Tensor:
    weights = torch.randn(len(jacobians), dtype=jacobians.dtype, generator=torch.Generator().manual_seed(seed))
    return torch.einsum("r,rcd->cd", weights, jacobians)


def _isotypic(z: Tensor, n_q: Tensor, n_k: Tensor) -> Iterator[Isotypic]:
    values, right = torch.linalg.eig(z)
    left, tolerance = torch.linalg.inv(right), SAME * float(values.abs().max())
    waiting = list(range(len(values)))
    while waiting:
        first = values[waiting[0]]
        same = [at for at in waiting if abs(values[at] - first) <= tolerance]
        waiting = [at for at in waiting if at not in same]
        if first.imag < -tolerance:  # its conjugate stands for both
            continue
        basis = right[:, same]
        unmoved = _acts_alike(n_q, basis) and _acts_alike(n_k, basis)
        yield Isotypic(basis, left[same], bool(abs(first.imag) <= tolerance), unmoved)


def _acts_alike(jacobians: Tensor, basis: Tensor) -> bool:
    """Whether all maps do the same to an eigenspace."""
    images = jacobians.to(basis.dtype) @ basis
    return float((images - images[:1]).norm()) <= 1e-10 * float(images.norm())


def _rank(rows: Tensor) -> int:
    return int(resolve_rank(torch.linalg.svdvals(rows), tuple(rows.shape))) if rows.numel() else 0


def _coordinates(part: Isotypic, side: MappedProjection, a: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows and fixed biases of queries (a None) or keys in an eigenspace."""
    maps = part.right if a is None else (part.left @ a.to(part.left.dtype)).T
    return side.rows.to(maps.dtype) @ maps, side.fixed.to(maps.dtype) @ maps


def _general(part: Isotypic, query: MappedProjection, key: MappedProjection, a: Tensor) -> int:
    """Matrices E on an eigenspace that leave the fixed biases, less those that move neither queries nor keys."""
    k, (q, b_q), (kk, b_k) = part.size, _coordinates(part, query, None), _coordinates(part, key, a)
    if part.is_fixed:
        b_k = b_k[:0]
    free = (k - _rank(b_q)) * (k - _rank(b_k))
    unmoving = (k - _rank(torch.cat([q, b_q]))) * (k - _rank(torch.cat([kk, b_k])))
    return (free - unmoving) * (1 if part.is_real else 2)


def _skew(part: Isotypic, query: MappedProjection, key: MappedProjection, a: Tensor) -> int:
    """The same for skew E and no fixed biases."""
    k, (q, _), (kk, _) = part.size, _coordinates(part, query, None), _coordinates(part, key, a)
    free = k - _rank(torch.cat([q, kk if part.is_real else kk.conj()]))
    return (k * (k - 1) - free * (free - 1)) // 2 if part.is_real else k * k - free * free


def _random_skew(parts: list[Isotypic]) -> Tensor:
    d = parts[0].right.shape[0]
    drawn = torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).to(parts[0].right.dtype)
    e = sum(((p.right @ (p.left @ drawn @ p.right) @ p.left).real for p in parts), start=torch.zeros(d, d).double())
    return (e - e.T) / 2


def _is_null(e: Tensor, query: MappedProjection, key: MappedProjection, a: Tensor) -> bool:
    """Whether (W_Q E, W_K F) changes no product of mapped rows."""
    f = -torch.linalg.solve(a, e @ a).T
    dq, dk = ((side.jacobian @ (side.rows @ m)[..., None])[..., 0] for side, m in ((query, e), (key, f)))
    sizes = dq.norm() * key.value.norm() + query.value.norm() * dk.norm()
    return float((dq @ key.value.T + query.value @ dk.T).norm()) <= NULL * float(sizes)
