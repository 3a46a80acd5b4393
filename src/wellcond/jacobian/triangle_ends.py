"""The lower end of the spectrum of an upper triangular matrix R, by solving with it: nothing is squared but vectors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from wellcond.linalg.lanczos import Estimate, largest_eigenvalue


def _solve_twice(triangle: Tensor, u: Tensor) -> Tensor:
    """R^-1 R^-T u, for R upper triangular."""
    half = torch.linalg.solve_triangular(triangle.T, u[:, None], upper=False)
    return torch.linalg.solve_triangular(triangle, half, upper=True)[:, 0]


def largest_of_inverse(triangle: Tensor) -> Estimate:
    """Largest eigenvalue of R^-1 R^-T, one over the square of the lowest singular value of R."""
    return largest_eigenvalue(lambda u: _solve_twice(triangle, u), len(triangle))


def lowest_singular_values(triangle: Tensor, count: int) -> Tensor:
    """`count` of them, by ARPACK to six digits."""
    import scipy.sparse.linalg as sparse  # here, since it adds a filter to `warnings`

    side = len(triangle)

    def product(u: np.ndarray) -> np.ndarray:
        return _solve_twice(triangle, torch.from_numpy(u)).numpy()

    inverse = sparse.LinearOperator((side, side), product, dtype=np.float64)
    first = np.random.default_rng(0).standard_normal(side)
    values = sparse.eigsh(inverse, min(count, side - 1), v0=first, tol=1e-6, return_eigenvectors=False)
    return 1 / torch.from_numpy(values).sqrt()
