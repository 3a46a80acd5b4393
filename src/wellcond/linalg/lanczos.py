r"""Extreme eigenvalues of symmetric operators that are known by their products, in float64.

# Note [Davidson]
The smallest eigenvalue of a positive definite matrix A from an approximate factor of it. A factor in float32 costs half
of one in float64, in time and in memory, and here it decides only how many steps are taken, not what they converge to.
A x is multiplied in float64, and each step adds to the space

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

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]

BLOCK = 16
"""Vectors that Davidson's method takes at a time."""
MAX_STEPS = 50
ACCURACY = 1e-8  # relative, of the least eigenvalue
AGREEMENT = 1e-10  # of successive values, where more eigenvalues than the block holds are equal and there is no gap


@dataclass(frozen=True, eq=False)
class Estimate:
    """A Ritz value. For the largest eigenvalue it never exceeds the true one; `residual` is |A u - value u|."""

    value: float
    converged: bool
    residual: float
    num_products: int
    vector: Tensor


def largest_eigenvalue(product: Product, size: int, *, tolerance: float = 1e-10, max_steps: int = 300) -> Estimate:
    """Largest eigenvalue of a symmetric positive semi-definite operator on R^size, float64, on the CPU."""
    found = largest_eigenvalues(lambda rows: product(rows[0])[None], 1, size, tolerance=tolerance, max_steps=max_steps)
    return found[0]


def largest_eigenvalues(
    product: Product,
    count: int,
    size: int,
    *,
    tolerance: float = 1e-10,
    max_steps: int = 300,
    device: torch.device | None = None,
) -> list[Estimate]:
    """Largest eigenvalue of each of `count` operators at once; `product` maps rows (count, size) on `device` to rows.

    Each stops when two successive Ritz values agree to `tolerance`, when its Krylov space is exhausted (then the value
    is exact), or after `max_steps`. The Ritz test and not the residual: eigenvalues of attention's Gram matrices come
    in clusters of about d, where the value converges long before the vector (theory.md, section 7.2).
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(size, generator=generator, dtype=torch.float64).to(device)
    max_steps = min(max_steps, size)
    basis = start.new_empty(count, max_steps, size)  # takes memory only as it is filled
    basis[:, 0] = start / start.norm()
    runs = [_Tridiagonal(tolerance, max_steps, size) for _ in range(count)]
    for step in range(max_steps):
        w, known = product(basis[:, step])[:, :, None], basis[:, : step + 1]
        inner = known @ w
        w = w - known.mT @ inner
        w -= known.mT @ (known @ w)  # again: the new direction may nearly lie in the old ones
        norm = torch.linalg.vector_norm(w, dim=1)
        for run, entries in zip(runs, torch.cat([inner[:, -1], norm], 1).tolist(), strict=True):
            run.add(*entries)
        if step + 1 == max_steps or all(run.ended for run in runs):
            break
        torch.div(w[:, :, 0], norm.clamp_min(1e-300), out=basis[:, step + 1])
    weights = np.zeros((count, 1, step + 1))
    for of_run, run in zip(weights, runs, strict=True):
        of_run[0, : len(run.diagonal)] = run.weights()
    vectors = (torch.from_numpy(weights).to(device) @ basis[:, : step + 1])[:, 0]
    # A basis = basis T + w e_last^T, so that the residual of basis weights is w times the last weight.
    last = [abs(float(of_run[0, len(run.diagonal) - 1])) for of_run, run in zip(weights, runs, strict=True)]
    return [
        Estimate(run.value, run.converged, run.off[-1] * weight, len(run.diagonal), vector)
        for run, weight, vector in zip(runs, last, vectors, strict=True)
    ]


class _Tridiagonal:
    """The matrix of one Lanczos run as it grows, and its largest Ritz value."""

    def __init__(self, tolerance: float, max_steps: int, size: int) -> None:
        self.tolerance, self.max_steps, self.size = tolerance, max_steps, size
        self.diagonal: list[float] = []
        self.off: list[float] = []
        self.value, self.agreed, self.converged, self.ended = 0.0, 0, False, False

    def add(self, diagonal: float, norm: float) -> None:
        """One step: an entry of the diagonal, and the norm of what is left for the next vector."""
        if self.ended:
            return
        self.diagonal.append(diagonal)
        previous, (self.value, self.weights) = self.value, _largest_of_tridiagonal(self.diagonal, self.off)
        self.off.append(norm)
        self.agreed = self.agreed + 1 if abs(self.value - previous) <= self.tolerance * abs(self.value) else 0
        exhausted = norm <= 1e-13 * max(abs(self.value), 1e-300)
        self.converged = self.agreed >= 3 or exhausted or len(self.diagonal) == self.size
        self.ended = self.converged or len(self.diagonal) == self.max_steps


def _largest_of_tridiagonal(diagonal: list[float], off: list[float]) -> tuple[float, Callable[[], np.ndarray]]:
    """Largest eigenvalue of a symmetric tridiagonal matrix, O(k), and what computes its vector."""
    size = len(diagonal)
    if size == 1:
        return diagonal[0], lambda: np.ones(1)
    # What `scipy.linalg.eigh_tridiagonal` calls, without its checks, which take longer than the eigenvalue itself.
    off = off[: size - 1]
    _, values, block, split, info = scipy.linalg.lapack.dstebz(diagonal, off, 2, 0.0, 1.0, size, size, 0.0, "B")
    if info:
        raise torch.linalg.LinAlgError("the eigenvalues of a tridiagonal matrix did not converge")
    return float(values[0]), lambda: scipy.linalg.lapack.dstein(diagonal, off, values[:1], block, split)[0][:, 0]


def smallest_eigenvalue(
    product: Product,
    precondition: Product,
    size: int,
    *,
    max_steps: int = MAX_STEPS,
    device: torch.device | None = None,
) -> Estimate:
    """Smallest eigenvalue of a symmetric positive definite operator on R^size, and its vector; Note [Davidson].

    `product` and `precondition` map rows (block, size) on `device` to rows: A u, and approximately A^-1 u. The value is
    a Rayleigh quotient and never below the true one; it is within ACCURACY of it, relatively, where `converged`.
    """
    generator = torch.Generator().manual_seed(0)
    block = min(BLOCK, size)
    max_steps = min(max_steps, size // block)
    start = torch.randn(block, size, generator=generator, dtype=torch.float64).to(device)
    basis = start.new_empty(max_steps * block, size)  # takes memory only as it is filled
    images, projected = torch.empty_like(basis), start.new_zeros(max_steps * block, max_steps * block)
    new = precondition(start)
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
        converged = float(residuals[0] @ new[0]) <= ACCURACY * gap * value or agreed >= 3 or now.stop == size
        if converged:
            break
    return Estimate(value, converged, float(residuals[0].norm()), now.stop, vectors[0])


def _orthonormal(rows: Tensor, known: Tensor) -> Tensor:
    """An orthonormal basis of the rows less what is known."""
    for _ in range(2):  # once is not enough when the new directions nearly lie in the old ones
        rows = rows - (rows @ known.T) @ known
        rows = torch.linalg.qr(rows.T).Q.T
    return rows
