r"""Singular values and ranks of matrices, extreme eigenvalues of symmetric operators; everything in float64.

`resolve_rank` holds the only tolerance rule.

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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from wellcond.errors import WeightError
from wellcond.records import Spectrum

Product = Callable[[Tensor], Tensor]

BLOCK = 16
"""Vectors that Davidson's method takes at a time."""
MAX_STEPS = 50
AGREEMENT = 1e-10  # of successive values, where more eigenvalues than the block holds are equal and there is no gap


def has_float64(device: torch.device) -> bool:
    """Whether a device can hold float64; Apple's GPUs (MPS) cannot."""
    return device.type != "mps"


def to_float64(tensor: Tensor) -> Tensor:
    """The same numbers in float64 without a gradient, on the CPU where the device has none."""
    tensor = tensor.detach()
    return (tensor if has_float64(tensor.device) else tensor.cpu()).to(torch.float64)


def cast_to_float64(record: object, names: Sequence[str], unchecked: Sequence[str] = ()) -> None:
    """Take tensors of a frozen record to float64, on the CPU where their device has none; None stays.

    Raises: WeightError for NaN or infinite entries, except in those that are `unchecked`.
    """
    for name in names:
        tensor = getattr(record, name)
        if tensor is None:
            continue
        if name not in unchecked and not bool(torch.isfinite(tensor).all()):
            raise WeightError(f"{name} has NaN or infinite entries: the Jacobian is not defined")
        object.__setattr__(record, name, to_float64(tensor))


def move_to_cpu(record: object, names: Sequence[str]) -> None:
    """Take tensors of a frozen record to the CPU; None stays."""
    for name in names:
        tensor = getattr(record, name)
        object.__setattr__(record, name, None if tensor is None else tensor.cpu())


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values in float64, largest first; batched over leading axes. On the CPU where the device has no float64.

    Raises: WeightError if an entry is not finite.
    """
    if not bool(torch.isfinite(matrix).all()):
        raise WeightError("expected finite entries, found NaN or infinity: singular values are not defined")
    return torch.linalg.svdvals(to_float64(matrix))


def default_rtol(shape: tuple[int, ...]) -> float:
    """The tolerance max(m, n) * eps of float64 below which a singular value is rounding."""
    return max(shape[-2:]) * torch.finfo(torch.float64).eps


def resolve_rank(sigma: Tensor, shape: tuple[int, ...], *, rtol: float | None = None) -> Tensor:
    """Number of singular values above rtol * sigma_1, batched over leading axes.

    `>` and not `>=`, so that a zero matrix has rank 0.
    """
    rtol = default_rtol(shape) if rtol is None else rtol
    return (sigma > rtol * sigma[..., :1]).sum(-1)


def numerical_rank(matrix: Tensor) -> int:
    """Number of singular values of one matrix that are not rounding."""
    return int(resolve_rank(singular_values(matrix), tuple(matrix.shape)))


def row_space(rows: Tensor, *, rtol: float | None = None) -> Tensor:
    """An orthonormal basis of what the rows of a float64 matrix span, as columns."""
    _, sigma, right = torch.linalg.svd(rows, full_matrices=False)
    return right[: int(resolve_rank(sigma, tuple(rows.shape), rtol=rtol))].T


def spectrum(matrix: Tensor, *, rtol: float | None = None) -> Spectrum:
    r"""Extreme singular values, rank and condition number of one matrix.

    .. math:: \kappa(W) = \sigma_1(W) / \sigma_{\min(m,n)}(W)

    Raises:
        ValueError: not one matrix.
        WeightError: entries that are not finite.

    Example:
        >>> spectrum(2.0 * torch.eye(3)).condition_number
        1.0
        >>> spectrum(torch.diag(torch.tensor([2.0, 1.0, 0.0]))).pseudo_condition_number
        2.0
    """
    if matrix.dim() != 2:
        raise ValueError(f"expected a matrix, got a tensor of shape {tuple(matrix.shape)}")
    return spectra(matrix[None], rtol=rtol)[0]


def spectra(matrices: Tensor, *, rtol: float | None = None) -> list[Spectrum]:
    """`spectrum` of each matrix of a batch (count, m, n)."""
    sigma = singular_values(matrices)
    ranks = resolve_rank(sigma, tuple(matrices.shape), rtol=rtol).tolist()
    used = default_rtol(tuple(matrices.shape)) if rtol is None else rtol
    return [
        Spectrum(
            sigma_max=float(s[0]),
            sigma_min=float(s[-1]),
            sigma_rank=float(s[rank - 1]) if rank else 0.0,
            rank=rank,
            nullity=len(s) - rank,
            rtol=used,
        )
        for s, rank in zip(sigma.cpu(), ranks, strict=True)
    ]


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
    basis = np.empty((max_steps, size))  # takes memory only as it is filled; a call of numpy costs less than of torch
    basis[0] = start / start.norm()
    diagonal: list[float] = []
    off: list[float] = []
    value, agreed, converged = 0.0, 0, False
    for step in range(max_steps):
        w, known = product(torch.from_numpy(basis[step])).numpy(), basis[: step + 1]
        inner = known @ w
        diagonal.append(float(inner[-1]))
        w = w - inner @ known
        w -= (known @ w) @ known  # again: the new direction may nearly lie in the old ones
        norm = math.sqrt(w @ w)
        previous, (value, vector) = value, _largest_of_tridiagonal(diagonal, off)
        agreed = agreed + 1 if abs(value - previous) <= tolerance * abs(value) else 0
        exhausted = norm <= 1e-13 * max(abs(value), 1e-300) or step == size - 1
        if agreed >= 3 or exhausted:
            converged = True
            break
        if step + 1 == max_steps:
            break
        off.append(norm)
        np.divide(w, norm, out=basis[step + 1])
    weights = vector()
    # A basis = basis T + w e_last^T, so that the residual of basis weights is w times the last weight.
    found = torch.from_numpy(weights @ basis[: len(weights)])
    return Estimate(value, converged, norm * abs(float(weights[-1])), len(diagonal), found)


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
    tolerance: float = 1e-8,
    max_steps: int = MAX_STEPS,
    seed: int = 0,
    device: torch.device | None = None,
) -> Estimate:
    """Smallest eigenvalue of a symmetric positive definite operator on R^size, and its vector; Note [Davidson].

    `product` and `precondition` map rows (block, size) on `device` to rows: A u, and approximately A^-1 u. The value is
    a Rayleigh quotient and never below the true one; it is within `tolerance` of it, relatively, where `converged`.
    """
    generator = torch.Generator().manual_seed(seed)
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
