"""Extreme eigenvalues of a symmetric operator by Lanczos with full reorthogonalisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import scipy.linalg
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
    clusters of about d, where the value converges long before the vector (theory.md, section 7.2).
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(size, generator=generator, dtype=torch.float64)
    max_steps = min(max_steps, size)
    basis = torch.empty(max_steps, size, dtype=torch.float64)  # takes memory only as it is filled
    basis[0] = start / start.norm()
    diagonal: list[float] = []
    off: list[float] = []
    value, agreed, converged = 0.0, 0, False
    for step in range(max_steps):
        w = product(basis[step])
        diagonal.append(float(basis[step] @ w))
        known = basis[: step + 1]
        for _ in range(2):  # once is not enough when the new direction nearly lies in the old ones
            w = w - known.T @ (known @ w)
        norm = float(w.norm())
        previous, value = value, _largest_of_tridiagonal(diagonal, off)
        agreed = agreed + 1 if abs(value - previous) <= tolerance * abs(value) else 0
        exhausted = norm <= 1e-13 * max(abs(value), 1e-300) or step == size - 1
        if agreed >= 3 or exhausted:
            converged = True
            break
        if step + 1 == max_steps:
            break
        off.append(norm)
        basis[step + 1] = w / norm
    last = len(diagonal) - 1
    _, weights = scipy.linalg.eigh_tridiagonal(diagonal, off[:last], select="i", select_range=(last, last))
    vector = basis[: len(weights)].T @ torch.from_numpy(weights[:, 0])
    residual = float((product(vector) - value * vector).norm())
    return Estimate(value, converged, residual, len(diagonal) + 1, vector)


def _largest_of_tridiagonal(diagonal: list[float], off: list[float]) -> float:
    """Largest eigenvalue of a symmetric tridiagonal matrix, O(k)."""
    size = len(diagonal)
    if size == 1:
        return diagonal[0]
    # What `scipy.linalg.eigh_tridiagonal` calls, without its checks, which take longer than the eigenvalue itself.
    _, values, _, _, info = scipy.linalg.lapack.dstebz(diagonal, off[: size - 1], 2, 0.0, 1.0, size, size, 0.0, "E")
    if info:
        raise torch.linalg.LinAlgError("the eigenvalues of a tridiagonal matrix did not converge")
    return float(values[0])
