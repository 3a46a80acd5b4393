r"""J^T J for iterations, its null directions lifted to the upper end of the spectrum.

# Note [Gauge basis]
J^T J has the null directions (W_Q E, -W_K E^T, 0) (theory.md, section 4). Their inner products are
<E, F> = tr(E^T A F) + tr(E B F^T) with A = W_Q^T W_Q and B = W_K^T W_K. So eigenvectors A u_i = a_i u_i and
B v_j = b_j v_j give an orthonormal basis of them without any large factorisation,

    z_ij = (W_Q u_i v_j^T, -W_K v_j u_i^T, 0) / sqrt(a_i + b_j)

and J^T J + lambda_max Z Z^T is positive definite where the gauge is all of the null space, with the non-zero spectrum
of J^T J untouched. A query bias b that is no parameter leaves E with E^T b = 0 only: E = C F for an orthonormal basis C
of the complement of b, hence W_Q C for W_Q, and -W_K F^T C^T.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from wellcond.jacobian.factors import JacobianFactors, parameter_gram, table
from wellcond.jacobian.head import Head, compressed
from wellcond.jacobian.operator import GramSteps
from wellcond.linalg.spectrum import row_space

SCHUR_ROWS = 1024  # of the lower triangle that are updated together
GAUGE_ROWS = 16
GAUGE_LIMIT = 1e6
"""Lengths of gauge directions that differ by more have lost the accuracy that Z needs."""


@dataclass(frozen=True, eq=False)
class ParameterSteps(GramSteps):
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

    @cached_property
    def num_null(self) -> int:  # type: ignore[override]
        """Null directions of the gauge."""
        return self.inverse_sizes.numel()

    def lower_float32(self, largest: float) -> Tensor:
        """J^T J / largest^2 + Z Z^T."""
        return self._lifted(self.factors.in_float32(largest), 1.0)

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

    def forward(self, rows: Tensor) -> Tensor:
        """J w."""
        return self.factors.backward(rows)

    def backward(self, rows: Tensor) -> Tensor:
        """J^T u."""
        return self.factors.forward(rows)

    def scaled_matmat(self, rows: Tensor, largest: float) -> Tensor:
        """(J^T J / largest^2 + Z Z^T) w."""
        found = super().scaled_matmat(rows, largest)
        (of_q, of_k, u, v), d = self.gauge, self.w_q.shape[1]
        q_width, k_width = len(of_q) * d, len(of_k) * d
        in_q = rows[:, :q_width].unflatten(1, (-1, d))
        in_k = rows[:, q_width : q_width + k_width].unflatten(1, (-1, d))
        weights = (of_q.T @ in_q @ v - u.T @ in_k.mT @ of_k) * self.inverse_sizes**2
        found[:, :q_width] += (of_q @ weights @ v.T).flatten(1)
        found[:, q_width : q_width + k_width] -= (of_k @ weights.mT @ u.T).flatten(1)
        return found


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
