r"""Bounds on the extreme singular values that hold for every head, from its blocks (theory.md, section 6).

    (L)   sigma_min(J)^2 >= sigma_R(X)^2 min_r sigma_min(M_r)^2 + sigma_R(PY)^2
    (U1)  sigma_max(J)^2 <= |X|^2 max_r |M_r|^2 + |Q|^2 max_r |B_r|^2 + |PY|^2

J J^T is the sum of three positive semi-definite terms, and J_Q J_Q^T = blockdiag(M) (X X^T (x) I) blockdiag(M)^T.
sigma_R is the R-th singular value, zero when the R rows are dependent: (L) then says nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wellcond.jacobian.head import Blocks


def lower_bound(blocks: Blocks) -> float:
    """The square root of (L): never above sigma_min of the wide Jacobian's R dv rows."""
    m_min = 0.0
    if blocks.m.shape[2] >= blocks.m.shape[1]:
        m_min = float(torch.linalg.svdvals(blocks.m)[:, -1].min())
    return ((_last(blocks.x) * m_min) ** 2 + _last(blocks.py) ** 2) ** 0.5


def upper_bound(blocks: Blocks) -> float:
    """The square root of (U1): never below sigma_max, in both conventions."""
    m_max, b_max = (float(torch.linalg.matrix_norm(t, 2).max()) for t in (blocks.m, blocks.b))
    bound = ((_norm(blocks.x) * m_max) ** 2 + (_norm(blocks.q) * b_max) ** 2 + _norm(blocks.py) ** 2) ** 0.5
    return bound * (1 + 1e-12)  # rounding must not make it smaller than what it bounds


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def _last(matrix: Tensor) -> float:
    """The singular value number `rows`; zero if there are more rows than columns."""
    if matrix.shape[0] > matrix.shape[1]:
        return 0.0
    sigma = torch.linalg.svdvals(matrix)
    # Less the rounding of the SVD: dependent rows must not get a positive bound.
    return max(0.0, float(sigma[-1]) - max(matrix.shape) * torch.finfo(torch.float64).eps * float(sigma[0]))
