r"""The Jacobian of a plain softmax head, outputs x parameters (theory.md, section 3).

Products with J and its transpose without anything of size n x n: for U (R x dv) and directions dWq, dWk, dWv of the
weights, with K the keys and V the values,

    dS = P * (U V^T - rowsum(P * U V^T))                              the pull-back of U to the logits, times 1/s
    J_Q^T U = s X^T dS K,   J_K^T U = s Y^T dS^T Q,   J_V^T U = Y^T P^T U
    E  = (X dWq) K^T + Q (Y dWk)^T                                    pushed forward to the logits
    J dW = s (P * (E - rowsum(P * E))) V + P Y dWv

From its factors J J^T and J^T J are made without ever forming J: as matrices, those of several heads at once from a
`FactorStack`, and as products for iterations.

Outputs (theory.md, section 3.3), n x n with n = R dv, rows ordered (r, o):

    G_rr' = (x_r . x_r') M_r M_r'^T + (q_r . q_r') B_r B_r'^T + (PY_r . PY_r') I

Parameters, columns ordered Q: (a, c), K: (a, c), V: (a, o):

    Q^T Q: sum_r x_r x_r^T (x) M_r^T M_r      K^T K: sum_r B_r^T B_r (x) q_r q_r^T      V^T V: (PY)^T PY (x) I
    Q^T K: sum_r x_r[a] (M_r^T B_r)[c, a'] q_r[c']       Q^T V: sum_r x_r[a] PY_r[a'] M_r[o, c]
    K^T V: sum_r q_r[c] PY_r[a'] B_r[o, a]

Each sum over r is one matrix product of two tables with R rows, so the cost is R (Dd)^2, not R dv (Dd)^2.

Products of several vectors at once (theory.md, section 3.2) are cheap and in float64, so that the matrix itself, which
only steers the iterations, may be stored in float32 and destroyed by its factor. Rows of a tensor are vectors.

    J^T u = (X^T {M_r^T u_r}_r,  {B_r^T u_r}_r^T Q,  (PY)^T u)          J w = M_r (X w_Q)_r + B_r w_K q_r + (PY w_V)_r

Ranks and null directions: `wellcond.jacobian.ranks`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wellcond.jacobian.diagnosis import lower_parts, lower_square, norm_bound
from wellcond.jacobian.head import (
    CHUNK_BYTES,
    FactorStack,
    Head,
    JacobianFactors,
    build_all_factors,
    build_factors,
    can_stack,
    stack_factors,
    through_softmax,
    with_constant,
)
from wellcond.jacobian.operator import GramOperator, GramSteps, Hints, JacobianOperator, Side
from wellcond.jacobian.ranks import RankBound, counted_biases, wide_rank_bound, wide_shape
from wellcond.linalg.spectrum import SMALLEST_ON_DEVICE, where_decomposed

CACHE_BYTES = 4 * 2**20  # rows that are multiplied, scaled and added while they are near the processor


@dataclass(frozen=True, eq=False)
class SoftmaxJacobian(JacobianOperator):
    """The Jacobian of a plain softmax head, outputs x parameters.

    Attributes:
        head: tokens and weights.
        biases: biases of the head count as parameters.
        built: its factors, where they were built together with those of other heads.
        token_ranks: ranks of tokens that heads share, filled as they are computed.
    """

    head: Head
    biases: bool = False
    built: JacobianFactors | None = None
    token_ranks: dict[Any, tuple[int, bool]] = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """R dv outputs, and the weights of the group."""
        return wide_shape(self.head, biases=self.biases)

    @cached_property
    def factors(self) -> JacobianFactors:
        """Built once, when first needed."""
        return self.built or build_factors(self.head, biases=self.biases)

    def output(self) -> Tensor:
        """P V, (g, N, dv)."""
        return self.head.output()

    def rank_bound(self) -> RankBound:
        """See `wide_rank_bound`."""
        return wide_rank_bound(self.head, biases=self.biases, known=self.token_ranks)

    def matvec(self, v: Tensor) -> Tensor:
        """J v; see the formulas of this file."""
        head, (x, y_k, y_v) = self.head, self._inputs
        p, g, d, dv = self._map, head.num_query_heads, head.head_dim, head.value_dim
        widths = (g * x.shape[1] * d, y_k.shape[1] * d, y_v.shape[1] * dv)
        of_q, of_k, of_v = v.to(x.device).split(widths)
        dq = (x @ of_q.view(g, -1, d)).flatten(0, 1)
        dk, values = y_k @ of_k.view(-1, d), y_v @ of_v.view(-1, dv)
        logits = dq @ head.keys().T + head.queries().flatten(0, 1) @ dk.T
        return (head.scale * through_softmax(p, logits) @ head.values() + p @ values).flatten().cpu()

    def rmatvec(self, u: Tensor) -> Tensor:
        """J^T u; see the formulas of this file."""
        head, (x, y_k, y_v) = self.head, self._inputs
        p, g = self._map, head.num_query_heads
        rows = u.to(x.device).view(head.num_rows, -1)
        pulled = head.scale * through_softmax(p, rows @ head.values().T)
        of_q = x.T @ (pulled @ head.keys()).unflatten(0, (g, -1))
        of_k, of_v = y_k.T @ (pulled.T @ head.queries().flatten(0, 1)), y_v.T @ (p.T @ rows)
        return torch.cat([part.flatten() for part in (of_q, of_k, of_v)]).cpu()

    @cached_property
    def _map(self) -> Tensor:
        return self.head.probabilities().flatten(0, 1)

    @cached_property
    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the query, key and value parameters multiply."""
        with_q, with_k, with_v = counted_biases(self.head, self.biases)
        y = self.head.memory
        return with_constant(self.head.x, with_q), with_constant(y, with_k), with_constant(y, with_v)

    def as_matrix(self) -> Tensor:
        """J with compressed tokens: the same singular values."""
        return explicit_jacobian(self.factors)

    def gram(self, side: Side = "outputs") -> GramOperator:
        """J J^T, or J^T J of the compressed parameters where that is smaller."""
        head, n, columns = self.head, self.head.num_outputs, self.num_columns
        device = head.x.device
        if side == "outputs" or n <= columns:
            return GramOperator(
                n, self._gram_product, lambda: output_gram(self.factors), device=device, steps=self._output_steps
            )
        widest = max(head.num_query_heads * min(head.x.shape), min(head.memory.shape))
        return GramOperator(
            columns,
            self._parameter_product,
            lambda: parameter_gram(self.factors),
            scratch=2 * head.num_rows * widest**2,
            factor_rows=n,
            device=device,
            steps=self._parameter_steps,
        )

    @property
    def num_columns(self) -> int:
        """Columns of J with respect to the weights, compressed."""
        g, d, dv = self.head.num_query_heads, self.head.head_dim, self.head.value_dim
        return g * d * min(self.head.x.shape) + (d + dv) * min(self.head.memory.shape)

    def _gram_product(self, u: Tensor) -> Tensor:
        return self._output_steps().matmat(u.to(self.head.x.device)[None])[0].cpu()

    def _parameter_product(self, w: Tensor) -> Tensor:
        return pull_back(self.factors, push_forward(self.factors, w.to(self.head.x.device)[None]))[0].cpu()

    def _output_steps(self) -> OutputSteps:
        return OutputSteps(self.factors)

    def _parameter_steps(self) -> GramSteps | None:
        """None for biases, whose null space is not known as a basis."""
        from wellcond.jacobian.gauge import parameter_steps  # here, since it is made of the matrices of this file

        return None if self.biases else parameter_steps(self.head, self.factors)

    @property
    def hints(self) -> Hints:
        """Bounds (L) and (U1), the closed form of sigma_min, J by automatic differentiation."""
        return Hints(
            bounds=self.bounds,
            closed_minimum=self.closed_minimum,
            lower_kappa=self.lower_kappa,
            reference=lambda: torch.cat(list(dense_jacobian(self.head, biases=self.biases).values()), dim=1),
            grams=_smaller_grams,
            matrices=_matrices,
        )

    def bounds(self) -> tuple[float, float]:
        """Bounds (L) on sigma_min and (U1) on sigma_max."""
        lower = lower_square(lower_parts(self.factors, len(self.factors.x), less_rounding=True))
        return math.sqrt(lower), norm_bound(self.factors)

    def closed_minimum(self) -> tuple[float, float] | None:
        """An interval for sigma_min that closes when the values can make a constant, V u = 1 (theory.md, section 6).

        Then M_r^T u = 0 and B_r^T u = 0, because Lambda_r 1 = 0: on w (x) u only J_V acts, and with w the last left
        singular vector of P Y the lower bound sigma_R(PY) of (L) is attained. The upper end is |J^T v| of that very
        vector, whatever the residual of V u = 1, so the interval is sure. None if P Y has more rows than columns.
        """
        if self.factors.py.shape[0] > self.factors.py.shape[1]:
            return None
        low, high = self.factors.for_all(_closed_minima).tolist()
        return (low, high) if math.isfinite(high) else None

    def lower_kappa(self) -> float:
        """sigma_max is at least |PY|, and sigma_min at most the upper end of `closed_minimum`."""
        interval = self.closed_minimum()
        return 0.0 if interval is None or interval[1] == 0 else float(self.factors.values("py")[0]) / interval[1]


def _smaller_grams(operators: Sequence[SoftmaxJacobian]) -> Tensor:
    build = output_gram if operators[0].head.num_outputs <= operators[0].num_columns else parameter_gram
    return build(stack_factors([one.factors for one in operators]))


def _matrices(operators: Sequence[SoftmaxJacobian]) -> Tensor:
    return explicit_jacobian(stack_factors([one.factors for one in operators]))


def _closed_minima(stack: FactorStack) -> Tensor:
    """sigma_R(PY) and |J^T (w (x) u)| of each head, (heads, 2); NaN where no u comes near V u = 1."""
    left, sigma, _ = torch.linalg.svd(where_decomposed(stack.py), full_matrices=False)
    v = stack.v.cpu()  # a small problem of any rank, for which a GPU has no driver
    u = torch.linalg.lstsq(v, v.new_ones(*v.shape[:-1], 1), driver="gelsd").solution
    u = (u / torch.linalg.vector_norm(u, dim=-2, keepdim=True))[:, None].to(stack.m.device)  # (heads, 1, dv, 1)
    w = left[..., -1:].to(stack.m.device)
    to_q = stack.x.mT @ (w * (stack.m.mT @ u)[..., 0])
    to_k = stack.q.mT @ (w * (stack.b.mT @ u)[..., 0])
    lengths = [torch.linalg.vector_norm(part, dim=(-2, -1)) for part in (to_q, to_k, stack.py.mT @ w)]
    return torch.stack([sigma[..., -1], torch.linalg.vector_norm(torch.stack(lengths), dim=0).to(sigma.device)], -1)


def stack_size(heads: Sequence[Head], room: int) -> int:
    """How many heads of a layer are measured together: small ones of one shape, as many as fit into `room` bytes."""
    head, operator = heads[0], SoftmaxJacobian(heads[0])
    if head.num_outputs >= SMALLEST_ON_DEVICE or not can_stack(heads):
        return 1
    keys, width = len(head.memory), min(head.memory.shape) + head.head_dim + head.value_dim
    # J and a copy, its factors and one row of their making, and P.
    entries = head.num_outputs * (2 * operator.num_columns + width) + (2 * width + head.num_rows) * keys
    return max(1, room // (8 * entries))


def softmax_jacobians(heads: Sequence[Head], biases: bool = False) -> list[SoftmaxJacobian]:
    """Operators of heads that `can_stack`, with factors built together; one head builds its own when needed."""
    if len(heads) == 1:
        return [SoftmaxJacobian(heads[0], biases)]
    built, ranks = build_all_factors(heads, biases=biases), dict[Any, tuple[int, bool]]()
    return [SoftmaxJacobian(head, biases, factors, ranks) for head, factors in zip(heads, built, strict=True)]


def dense_jacobian(head: Head, *, biases: bool = False) -> dict[str, Tensor]:
    """J_Q, J_K, J_V (R dv, parameters) by automatic differentiation: the reference for small sizes, never optimised.

    Parameters are flattened as the D x d matrix row by row; a bias is the last row of its block.
    """
    g, d = head.num_query_heads, head.head_dim

    def with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight.mT if bias is None or not biases else torch.cat([weight.mT, bias[..., None, :]], dim=-2)

    def output(wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
        def project(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if bias is not None and biases:
                return tokens @ weight[..., :-1, :] + weight[..., -1:, :]
            return tokens @ weight + (0.0 if bias is None else bias[..., None, :])

        q, k = project(head.x, wq, head.query_biases), project(head.memory, wk, head.b_k)
        v = project(head.memory, wv, head.b_v)
        logits = head.scale * q @ k.mT
        logits = logits if head.mask is None else logits + head.mask
        return logits.softmax(-1) @ v

    weights = (
        with_bias(head.query_weights, head.query_biases),
        with_bias(head.w_k, head.b_k),
        with_bias(head.w_v, head.b_v),
    )
    jacobians = torch.func.jacrev(output, argnums=(0, 1, 2))(*weights)
    assert output(*weights).shape == (g, head.num_tokens, head.value_dim) and weights[1].shape[-1] == d
    return {name: j.reshape(head.num_outputs, -1) for name, j in zip("qkv", jacobians, strict=True)}


# --- matrices and products from the factors --------------------------------------------------------------------------


def output_gram(factors: JacobianFactors, *, lower: bool = False) -> Tensor:
    """J J^T of the wide Jacobian, (R dv, R dv); if `lower`, what is above the diagonal is left undefined."""
    *front, rows, dv, _ = factors.m.shape
    n = rows * dv
    m, b = factors.m.flatten(-3, -2), factors.b.flatten(-3, -2)
    x_gram, q_gram = factors.x @ factors.x.mT, factors.q @ factors.q.mT
    py_gram = factors.py @ factors.py.mT
    gram = m.new_empty(*front, n, n)
    size = max(1, (CACHE_BYTES if lower else CHUNK_BYTES) // (m.element_size() * math.prod(front) * n * dv))
    for at in range(0, rows, size):
        end = min(at + size, rows)
        some, lines = slice(at, end), slice(at * dv, end * dv)
        stop = end if lower else rows
        part = gram[..., lines, : stop * dv]
        torch.matmul(m[..., lines, :], m[..., : stop * dv, :].mT, out=part)
        blockwise = part.unflatten(-1, (stop, dv)).unflatten(-3, (end - at, dv))
        blockwise.mul_(x_gram[..., some, None, :stop, None])
        of_keys = (b[..., lines, :] @ b[..., : stop * dv, :].mT).view_as(blockwise)
        blockwise.addcmul_(of_keys, q_gram[..., some, None, :stop, None])
        blockwise.diagonal(dim1=-3, dim2=-1).add_(py_gram[..., some, :stop, None])
    return gram


def parameter_gram(factors: JacobianFactors, *, values: bool = True) -> Tensor:
    """J^T J of the wide Jacobian, in the (compressed) parameters; unless `values`, those of Q and K alone."""
    x, q, py, m, b = factors.x, factors.q, factors.py, factors.m, factors.b
    *front, _, dv, d = m.shape
    Dx, Dy, Dv = x.shape[-1], b.shape[-1], py.shape[-1]
    nq, nk, nv = Dx * d, Dy * d, Dv * dv if values else 0
    gram = x.new_empty(*front, nq + nk + nv, nq + nk + nv)
    to_q, to_k, to_v = slice(0, nq), slice(nq, nq + nk), slice(nq + nk, None)

    def put(first: slice, second: slice, block: Tensor) -> None:
        """Entries (i, j, i', j') of a block with rows (i, j) and columns (i', j')."""
        rows, columns = block.shape[-4:-2], block.shape[-2:]
        gram[..., first, second].unflatten(-1, columns).unflatten(-3, rows).copy_(block)
        if first != second:
            turned = block.movedim((-2, -1), (-4, -3))
            gram[..., second, first].unflatten(-1, rows).unflatten(-3, columns).copy_(turned)

    def product(left: Tensor, right: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
        """sum_r left_r right_r, of tables with the given axes."""
        return (left.mT @ right).view(*front, *sizes)

    # Q^T Q: [a a'] x [c c'] -> (a c) x (a' c')
    put(to_q, to_q, product(table(x, x), (m.mT @ m).flatten(-2), (Dx, Dx, d, d)).transpose(-3, -2))
    put(to_k, to_k, product((b.mT @ b).flatten(-2), table(q, q), (Dy, Dy, d, d)).transpose(-3, -2))
    # [a c'] x [c a']
    put(to_q, to_k, product(table(x, q), (m.mT @ b).flatten(-2), (Dx, d, d, Dy)).movedim(-3, -1))
    if values:
        eye = torch.eye(dv, dtype=x.dtype, device=x.device)
        put(to_v, to_v, (py.mT @ py)[..., :, None, :, None] * eye[:, None, :])
        # [a a'] x [o c], [c a'] x [o a]
        put(to_q, to_v, product(table(x, py), m.flatten(-2), (Dx, Dv, dv, d)).movedim(-1, -3))
        put(to_k, to_v, product(table(q, py), b.flatten(-2), (d, Dv, dv, Dy)).movedim(-1, -4))
    return gram


def table(left: Tensor, right: Tensor) -> Tensor:
    """Rows (r) of all products left_r[i] right_r[j]."""
    return (left[..., :, None] * right[..., None, :]).flatten(-2)


def explicit_jacobian(factors: JacobianFactors) -> Tensor:
    """J itself (R dv, parameters), for the small and the ill-conditioned: nothing is squared."""
    *front, rows, dv, d = factors.m.shape
    widths = (factors.x.shape[-1] * d, factors.b.shape[-1] * d, factors.py.shape[-1] * dv)
    jacobian = factors.m.new_empty(*front, rows, dv, sum(widths))
    j_q, j_k, j_v = jacobian.split(widths, dim=-1)
    torch.mul(factors.x[..., None, :, None], factors.m[..., None, :], out=j_q.unflatten(-1, (-1, d)))
    torch.mul(factors.b[..., None], factors.q[..., None, None, :], out=j_k.unflatten(-1, (-1, d)))
    on_diagonal = j_v.zero_().unflatten(-1, (-1, dv)).diagonal(dim1=-3, dim2=-1)
    on_diagonal.copy_(factors.py[..., None].expand_as(on_diagonal))
    return jacobian.flatten(-3, -2)


def pull_back(factors: JacobianFactors, u: Tensor) -> Tensor:
    """J^T u for rows u (k, R dv): (k, parameters)."""
    by_row = u.view(len(u), len(factors.m), -1).permute(1, 2, 0)  # (r, o, k)
    to_q = (factors.x.T @ (factors.m.mT @ by_row).flatten(1)).unflatten(1, (-1, len(u)))  # (a, c, k)
    to_k = ((factors.b.mT @ by_row).flatten(1).T @ factors.q).unflatten(0, (-1, len(u))).transpose(1, 2)  # (a, c, k)
    to_v = (factors.py.T @ by_row.flatten(1)).unflatten(1, (-1, len(u)))  # (a, o, k)
    return torch.cat([part.flatten(0, 1) for part in (to_q, to_k, to_v)]).T


def push_forward(factors: JacobianFactors, w: Tensor) -> Tensor:
    """J w for rows w (k, parameters): (k, R dv)."""
    (_, dv, d), k = factors.m.shape, len(w)
    widths = (factors.x.shape[1] * d, factors.b.shape[2] * d, factors.py.shape[1] * dv)
    of_q, of_k, of_v = (part.T for part in w.split(widths, dim=1))
    seen = (factors.x @ of_q.reshape(-1, d * k)).unflatten(1, (d, k))  # (r, c, k)
    heard = (factors.q @ of_k.reshape(-1, d, k).transpose(0, 1).flatten(1)).unflatten(1, (-1, k))  # (r, a, k)
    read = (factors.py @ of_v.reshape(-1, dv * k)).unflatten(1, (dv, k))  # (r, o, k)
    return (factors.m @ seen + factors.b @ heard + read).flatten(0, 1).T


def in_float32(factors: JacobianFactors, largest: float) -> JacobianFactors:
    """JacobianFactors of J / `largest`, every factor of moderate size: squares must not leave the range of float32."""
    m_size, b_size = (float(t.abs().max()) or 1.0 for t in (factors.m, factors.b))
    return replace(
        factors,
        x=(factors.x * (m_size / largest)).float(),
        m=(factors.m / m_size).float(),
        q=(factors.q * (b_size / largest)).float(),
        b=(factors.b / b_size).float(),
        py=(factors.py / largest).float(),
        built_with=None,
    )


@dataclass(frozen=True, eq=False)
class OutputSteps(GramSteps):
    """J J^T for iterations."""

    factors: JacobianFactors

    @property
    def size(self) -> int:
        """R dv."""
        return self.factors.m.shape[0] * self.factors.m.shape[1]

    def forward(self, rows: Tensor) -> Tensor:
        """J^T u."""
        return pull_back(self.factors, rows)

    def backward(self, rows: Tensor) -> Tensor:
        """J w."""
        return push_forward(self.factors, rows)

    def lower_float32(self, largest: float) -> Tensor:
        """The lower triangle of J J^T / largest^2."""
        return output_gram(in_float32(self.factors, largest), lower=True)

    def shifted(self, largest: float, bound: float) -> Tensor:
        """The lower triangle of J J^T - bound I; nothing needs `largest` here."""
        gram = output_gram(self.factors, lower=True)
        gram.diagonal().sub_(bound)
        return gram
