"""Extreme eigenvalues of a symmetric operator by Lanczos with full reorthogonalisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Estimate:
    """A Ritz value. For the largest eigenvalue it never exceeds the true one; `residual` is |A u - value u|."""

    value: float
    converged: bool
    residual: float
    num_products: int
    vector: Tensor


def largest_eigenvalue(
    product: Product, size: int, *, tolerance: float = 1e-10, max_steps: int = 300, seed: int = 0
) -> Estimate:
    """Largest eigenvalue of a symmetric positive semi-definite operator on R^size, float64.

    Stops when two successive Ritz values agree to `tolerance`, when the Krylov space is exhausted (then the value is
    exact), or after `max_steps`. The Ritz test and not the residual: eigenvalues of attention's Gram matrices come in
    clusters of about d, where the value converges long before the vector (theory.md, section 9).
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(size, generator=generator, dtype=torch.float64)
    basis = [start / start.norm()]
    diagonal: list[float] = []
    off: list[float] = []
    previous, agreed, converged = 0.0, 0, False
    ritz = torch.zeros(1, dtype=torch.float64)
    weights = torch.ones(1, dtype=torch.float64)
    for step in range(min(max_steps, size)):
        w = product(basis[-1])
        diagonal.append(float(basis[-1] @ w))
        stacked = torch.stack(basis)
        for _ in range(2):  # once is not enough when the new direction nearly lies in the old ones
            w = w - stacked.T @ (stacked @ w)
        norm = float(w.norm())
        ritz, vectors = torch.linalg.eigh(_tridiagonal(diagonal, off))
        value, weights = float(ritz[-1]), vectors[:, -1]
        agreed = agreed + 1 if abs(value - previous) <= tolerance * abs(value) else 0
        previous = value
        exhausted = norm <= 1e-13 * max(abs(value), 1e-300) or step == size - 1
        if agreed >= 3 or exhausted:
            converged = True
            break
        off.append(norm)
        basis.append(w / norm)
    vector = torch.stack(basis[: len(weights)]).T @ weights
    residual = float((product(vector) - previous * vector).norm())
    return Estimate(previous, converged, residual, len(diagonal) + 1, vector)


def _tridiagonal(diagonal: list[float], off: list[float]) -> Tensor:
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if off:
        beside = torch.tensor(off, dtype=torch.float64)
        matrix = matrix + torch.diag(beside, 1) + torch.diag(beside, -1)
    return matrix
