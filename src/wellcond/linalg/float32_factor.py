"""A Cholesky factor in float32, made in place, to solve with approximately."""

from __future__ import annotations

import scipy.linalg
import torch
from torch import Tensor


def factorise_(lower: Tensor, shift: float) -> bool:
    """Replace the lower triangle of a float32 matrix A by L, L L^T = A + shift I. False if it is not positive definite.

    Rows of torch are columns of LAPACK, so its upper factor of the transpose is the lower one of this matrix.
    """
    lower.diagonal().add_(shift)
    if lower.numel() == 0:
        return True
    factor, info = scipy.linalg.lapack.spotrf(lower.numpy().T, lower=0, clean=0, overwrite_a=1)
    assert factor.ctypes.data == lower.data_ptr(), "LAPACK must not copy"
    return bool(info == 0)


def solve(factor: Tensor, rows: Tensor) -> Tensor:
    """(L L^T)^-1 of float64 rows; each is scaled to one, so that small residuals do not underflow."""
    sizes = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    columns = (rows / sizes).float().T
    half = torch.linalg.solve_triangular(factor, columns, upper=False)
    return torch.linalg.solve_triangular(factor.T, half, upper=True).T.double() * sizes
