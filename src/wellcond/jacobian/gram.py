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
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wellcond.jacobian.head import CHUNK_BYTES, JacobianFactors
from wellcond.jacobian.operator import GramSteps

CACHE_BYTES = 4 * 2**20  # rows that are multiplied, scaled and added while they are near the processor


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
