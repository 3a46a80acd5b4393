r"""The smallest eigenvalue of a positive definite matrix from an approximate factor of it, by Davidson's method.

A factor in float32 costs half of one in float64, in time and in memory, and here it decides only how many steps are
taken, not what they converge to. A x is multiplied in float64, and each step adds to the space

    T r_i,   r_i = A x_i - theta_i x_i,   T ~ A^-1

for the lowest Ritz pairs (theta_i, x_i). For T = A^-1 this is x_i - theta_i A^-1 x_i: the block Krylov space of the
inverse, hence the method of Lanczos on it. Solving with several right-hand sides reads the factor as often as with one.

When to stop. Let x = sum c_i v_i be a Ritz vector of length 1 with value theta, lambda_1 <= theta < lambda_*, and let
every c_i with lambda_1 < lambda_i < lambda_* be zero. Then with gamma = 1 - theta / lambda_*

    r^T A^-1 r = sum (lambda_i - theta)^2 / lambda_i c_i^2  >=  gamma sum_{i > 1} (lambda_i - theta) c_i^2
                                                             =  gamma (theta - lambda_1) c_1^2

because sum (lambda_i - theta) c_i^2 = 0. The lowest Ritz vectors of the block are free of each other, so lambda_* is
read off the first Ritz value behind it, and T stands for A^-1. Neither is sure, so this is an estimate of the error,
which the tests compare with the error itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wellcond.linalg.lanczos import Estimate, Product

BLOCK = 16
MAX_STEPS = 50
AGREEMENT = 1e-10  # of successive values, where more eigenvalues than the block holds are equal and there is no gap


def smallest_eigenvalue(
    product: Product,
    precondition: Product,
    size: int,
    *,
    tolerance: float = 1e-8,
    max_steps: int = MAX_STEPS,
    seed: int = 0,
) -> Estimate:
    """Smallest eigenvalue of a symmetric positive definite operator on R^size, and its vector; float64.

    `product` and `precondition` map rows (block, size) to rows: A u, and approximately A^-1 u. The value is a Rayleigh
    quotient and never below the true one; it is within `tolerance` of it, relatively, where `converged`.
    """
    generator = torch.Generator().manual_seed(seed)
    block = min(BLOCK, size)
    max_steps = min(max_steps, size // block)
    basis = torch.empty(max_steps * block, size, dtype=torch.float64)  # takes memory only as it is filled
    images = torch.empty_like(basis)
    projected = torch.zeros(max_steps * block, max_steps * block, dtype=torch.float64)
    new = precondition(torch.randn(block, size, generator=generator, dtype=torch.float64))
    value, agreed, converged = 0.0, 0, False
    for step in range(max_steps):
        old, now = slice(0, step * block), slice(step * block, (step + 1) * block)
        known = slice(0, now.stop)
        basis[now] = _orthonormal(new, basis[old])
        images[now] = product(basis[now])
        projected[known, now] = basis[known] @ images[now].T
        projected[now, known] = projected[known, now].T
        ritz, weights = torch.linalg.eigh(projected[known, known])
        lowest = weights[:, :block].T
        vectors = lowest @ basis[known]
        residuals = lowest @ images[known] - ritz[:block, None] * vectors
        previous, value = value, float(ritz[0])
        if value <= 0:
            break
        new = precondition(residuals)
        gap = 1 - value / float(ritz[block]) if step else 0.0
        agreed = agreed + 1 if abs(value - previous) <= AGREEMENT * value else 0
        converged = float(residuals[0] @ new[0]) <= tolerance * gap * value or agreed >= 3 or now.stop == size
        if converged:
            break
    return Estimate(value, converged, float(residuals[0].norm()), now.stop, vectors[0])


def _orthonormal(rows: Tensor, known: Tensor) -> Tensor:
    """An orthonormal basis of the rows less what is known."""
    for _ in range(2):  # once is not enough when the new directions nearly lie in the old ones
        rows = rows - (rows @ known.T) @ known
        rows = torch.linalg.qr(rows.T).Q.T
    return rows
