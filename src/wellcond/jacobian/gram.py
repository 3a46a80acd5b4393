r"""J J^T and J^T J of a head from its factors, without ever forming J: as matrices, and as products for iterations.

Matrices are also those of several heads at once, from a `FactorStack`.

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

Note [Gauge basis]. J^T J has the null directions (W_Q E, -W_K E^T, 0) (theory.md, section 4). Their inner products are
<E, F> = tr(E^T A F) + tr(E B F^T) with A = W_Q^T W_Q and B = W_K^T W_K. So eigenvectors A u_i = a_i u_i and
B v_j = b_j v_j give an orthonormal basis of them without any large factorisation,

    z_ij = (W_Q u_i v_j^T, -W_K v_j u_i^T, 0) / sqrt(a_i + b_j)

and J^T J + lambda_max Z Z^T is positive definite where the gauge is all of the null space, with the non-zero spectrum
of J^T J untouched. A query bias b that is no parameter leaves E with E^T b = 0 only: E = C F for an orthonormal basis C
of the complement of b, hence W_Q C for W_Q, and -W_K F^T C^T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wellcond.jacobian.head import CHUNK_BYTES, Head, JacobianFactors, compressed
from wellcond.linalg.spectrum import row_space

CACHE_BYTES = 4 * 2**20  # rows that are multiplied, scaled and added while they are near the processor
SCHUR_ROWS = 1024  # of the lower triangle that are updated together
GAUGE_ROWS = 16
GAUGE_LIMIT = 1e6
"""Lengths of gauge directions that differ by more have lost the accuracy that Z needs."""


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


def stack_gram(factors: JacobianFactors) -> Tensor:
    """H = J_Q^T J_Q + J_K^T J_K + J_V^T J_V, the Gram matrix of the papers' stacked [J_Q; J_K; J_V] (Dd, Dd).

    It needs one identification of the three parameter spaces: equal widths, and the same order (a, c) in all of them.
    """
    x, q, py, m, b = factors.x, factors.q, factors.py, factors.m, factors.b
    *front, rows, dv, d = m.shape
    D = x.shape[-1]
    if not (dv == d and b.shape[-1] == py.shape[-1] == D):
        raise ValueError("the stacked convention needs query, key and value parameters of one shape, without biases")
    gram = x.new_empty(*front, D, d, D, d)
    mm, qq = (m.mT @ m).flatten(-2), table(q, q)
    size = max(1, CHUNK_BYTES // (8 * math.prod(front) * D * (d * d + rows)))
    for at in range(0, D, size):
        some = slice(at, min(at + size, D))
        part = gram[..., some, :, :, :]  # (a c) x (a' c') from [a a'] x [c c']
        shape = (*front, -1, D, d, d)
        part.copy_((table(x[..., some], x).mT @ mm).view(shape).transpose(-3, -2))
        part.add_(((b[..., some].mT @ b).flatten(-2).mT @ qq).view(shape).transpose(-3, -2))
    gram.diagonal(dim1=-3, dim2=-1).add_((py.mT @ py)[..., None])
    return gram.flatten(-2).flatten(-3, -2)


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


class OutputSteps:
    """J J^T for iterations, from the three functions that a kind of factors has."""

    num_null = 0

    def __init__(
        self,
        factors: Any,
        lower_gram: Callable[[Any], Tensor] = lambda factors: output_gram(factors, lower=True),
        pull: Callable[[Any, Tensor], Tensor] = pull_back,
        push: Callable[[Any, Tensor], Tensor] = push_forward,
        narrow: Callable[[Any, float], Any] = in_float32,
    ) -> None:
        """From factors, the lower triangle of their J J^T, J^T u, J w, and the factors of J / largest in float32."""
        self.factors, self._lower_gram, self._pull, self._push, self._narrow = factors, lower_gram, pull, push, narrow

    @property
    def size(self) -> int:
        """R dv."""
        return self.factors.m.shape[0] * self.factors.m.shape[1]

    def lower_float32(self, largest: float) -> Tensor:
        """The lower triangle of J J^T / largest^2."""
        return self._lower_gram(self._narrow(self.factors, largest))

    def shifted(self, largest: float, bound: float) -> Tensor:
        """The lower triangle of J J^T - bound I; nothing needs `largest` here."""
        gram = self._lower_gram(self.factors)
        gram.diagonal().sub_(bound)
        return gram

    def matmat(self, rows: Tensor) -> Tensor:
        """J J^T u."""
        return self._push(self.factors, self._pull(self.factors, rows))

    def scaled_matmat(self, rows: Tensor, largest: float) -> Tensor:
        """J J^T u / largest^2."""
        return self.matmat(rows) / largest**2

    def norm_of(self, vector: Tensor) -> float:
        """|J^T u| / |u|: nothing is squared that loses digits."""
        return float(self._pull(self.factors, vector[None]).norm() / vector.norm())


@dataclass(frozen=True, eq=False)
class ParameterSteps:
    """J^T J, its null directions lifted to the upper end of the spectrum; see Note [Gauge basis].

    `w_q` (columns of x, d) and `w_k` (columns of b, d) are the weights in the coordinates of the factors; `fixed`
    (k, d) are biases of the queries that are no parameters.
    """

    factors: JacobianFactors
    w_q: Tensor
    w_k: Tensor
    fixed: Tensor | None = None

    @property
    def size(self) -> int:
        """Compressed parameters."""
        dv, d = self.factors.m.shape[1:]
        return (self.factors.x.shape[1] + self.factors.b.shape[2]) * d + self.factors.py.shape[1] * dv

    @cached_property
    def gauge(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(W_Q C u_i)_i, (W_K v_j)_j, (C u_i)_i and (v_j)_j as columns; the first two lack 1 / sqrt(a_i + b_j)."""
        d = self.w_q.shape[1]
        inside = torch.eye(d, dtype=torch.float64, device=self.w_q.device)
        if self.fixed is not None:
            _, sigma, right = torch.linalg.svd(self.fixed)
            inside = right[int((sigma > d * torch.finfo(torch.float64).eps * sigma[0]).sum()) :].T
        w_q = self.w_q @ inside
        _, u = torch.linalg.eigh(w_q.T @ w_q)
        _, v = torch.linalg.eigh(self.w_k.T @ self.w_k)
        return w_q @ u, self.w_k @ v, inside @ u, v

    @cached_property
    def inverse_sizes(self) -> Tensor:
        """1 / sqrt(a_i + b_j)."""
        of_q, of_k, _, _ = self.gauge
        return (of_q.square().sum(0)[:, None] + of_k.square().sum(0)).rsqrt()

    @property
    def num_null(self) -> int:
        """Null directions of the gauge."""
        return self.inverse_sizes.numel()

    def lower_float32(self, largest: float) -> Tensor:
        """J^T J / largest^2 + Z Z^T."""
        return self._lifted(in_float32(self.factors, largest), 1.0)

    def shifted(self, largest: float, bound: float) -> Tensor | None:
        """A Schur complement of A = J^T J + largest^2 Z Z^T - bound I, the lower triangle: that of Q and K.

        A is positive definite exactly if the block of V, (C - bound I) (x) I with C = (PY)^T PY, and this complement
        are. None if that block is not. It is a third smaller than A, and these are the first steps of a factorisation
        of A, the rest of which the caller takes: rounding is that of one Cholesky factorisation.

        With C - bound I = L L^T, every channel o of the values subtracts F_o F_o^T, where F_o L^T = [J_Q, J_K]^T J_V,o.
        """
        x, q, py, m, b = (getattr(self.factors, name) for name in ("x", "q", "py", "m", "b"))
        own = py.T @ py
        own.diagonal().sub_(bound)
        factor, info = torch.linalg.cholesky_ex(own)
        if int(info) > 0:
            return None
        gram = self._lifted(self.factors, largest**2, values=False)
        gram.diagonal().sub_(bound)
        of_q, of_k = table(x, py), table(q, py)
        (Dx, Dv), Dy, d = (x.shape[1], py.shape[1]), b.shape[2], m.shape[2]
        for channel in range(m.shape[1]):
            to_q = (of_q.T @ m[:, channel]).view(Dx, Dv, d).transpose(1, 2)  # (a, c, a')
            to_k = (of_k.T @ b[:, channel]).view(d, Dv, Dy).permute(2, 0, 1)
            seen = torch.cat([to_q.reshape(-1, Dv), to_k.reshape(-1, Dv)])
            half = torch.linalg.solve_triangular(factor, seen.T, upper=False)
            for at in range(0, len(gram), SCHUR_ROWS):
                end = min(at + SCHUR_ROWS, len(gram))
                gram[at:end, :end].addmm_(half[:, at:end].T, half[:, :end], alpha=-1)
        return gram

    def _lifted(self, factors: JacobianFactors, height: float, *, values: bool = True) -> Tensor:
        """J^T J + height Z Z^T of factors in any precision, the lower triangle; unless `values`, of Q and K alone.

        With columns p_i of W_Q u, r_j of W_K v and s_ij = 1 / (a_i + b_j), entries of Z Z^T are

            Q, Q: sum_ij s_ij p_i[a] p_i[a'] v_j[c] v_j[c']        K, K: sum_ij s_ij r_j[a] r_j[a'] u_i[c] u_i[c']
            K, Q: -sum_ij s_ij r_j[a] u_i[c] p_i[a'] v_j[c']
        """
        gram = parameter_gram(factors, values=values)
        p, r, u, v = (t.to(gram.dtype) for t in self.gauge)
        sizes = (height * self.inverse_sizes**2).to(gram.dtype)
        d = self.w_q.shape[1]
        of_q, of_k = slice(0, len(p) * d), slice(len(p) * d, (len(p) + len(r)) * d)

        def entries(first: slice, second: slice) -> Tensor:
            return gram[first, second].unflatten(1, (-1, d)).unflatten(0, (-1, d))  # (a, c, a', c')

        def pairs(left: Tensor, right: Tensor) -> Tensor:
            return (left[:, None, :] * right[None, :, :]).flatten(0, 1)

        of_v, of_u, of_pu = (sizes @ pairs(v, v).T), (sizes.T @ pairs(u, u).T), (pairs(p, u) @ sizes).T
        for at in range(0, max(len(p), len(r)), GAUGE_ROWS):  # a few rows a at a time: no second matrix
            some = slice(at, at + GAUGE_ROWS)
            qq = pairs(p[some], p) @ of_v  # [a a'] x [c c']
            entries(of_q, of_q)[some].add_(qq.view(len(p[some]), len(p), d, d).transpose(1, 2))
            kk = pairs(r[some], r) @ of_u
            entries(of_k, of_k)[some].add_(kk.view(len(r[some]), len(r), d, d).transpose(1, 2))
            kq = pairs(r[some], v) @ of_pu  # [a c'] x [a' c]
            entries(of_k, of_q)[some].sub_(kq.view(len(r[some]), d, len(p), d).permute(0, 3, 2, 1))
        return gram

    def matmat(self, rows: Tensor) -> Tensor:
        """J^T J w."""
        return pull_back(self.factors, push_forward(self.factors, rows))

    def scaled_matmat(self, rows: Tensor, largest: float) -> Tensor:
        """(J^T J / largest^2 + Z Z^T) w."""
        found = self.matmat(rows) / largest**2
        (of_q, of_k, u, v), d = self.gauge, self.w_q.shape[1]
        q_width, k_width = len(of_q) * d, len(of_k) * d
        in_q = rows[:, :q_width].unflatten(1, (-1, d))
        in_k = rows[:, q_width : q_width + k_width].unflatten(1, (-1, d))
        weights = (of_q.T @ in_q @ v - u.T @ in_k.mT @ of_k) * self.inverse_sizes**2
        found[:, :q_width] += (of_q @ weights @ v.T).flatten(1)
        found[:, q_width : q_width + k_width] -= (of_k @ weights.mT @ u.T).flatten(1)
        return found

    def norm_of(self, vector: Tensor) -> float:
        """|J w| / |w|."""
        return float(push_forward(self.factors, vector[None]).norm() / vector.norm())


def parameter_steps(head: Head, factors: JacobianFactors) -> ParameterSteps | None:
    """J^T J of a head whose biases are no parameters, in coordinates of the span of its tokens.

    None where the weights leave the gauge directions ill-determined.
    """
    y = compressed(head.memory)
    span_y = row_space(y)
    span_x = span_y if head.y is None else row_space(compressed(head.x))
    g = head.num_query_heads
    reduced = replace(
        factors,
        x=factors.x @ (torch.block_diag(*[span_x] * g) if g > 1 else span_x),
        b=factors.b @ span_y,
        py=factors.py @ span_y,
        built_with=None,
    )
    fixed = head.query_biases
    of_weights = factors.q if fixed is None else factors.q - fixed.repeat_interleave(head.num_tokens, 0)
    keys = factors.k if head.b_k is None else factors.k - head.b_k
    w_q, w_k = (torch.linalg.lstsq(a, b).solution for a, b in ((reduced.x, of_weights), (y @ span_y, keys)))
    found = ParameterSteps(reduced, w_q, w_k, fixed)
    largest, smallest = (float(f(found.inverse_sizes)) for f in (torch.max, torch.min))
    return found if 0 < largest <= smallest * GAUGE_LIMIT else None
