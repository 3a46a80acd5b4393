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

from wellcond.arguments import check_number, check_tensor
from wellcond.errors import WeightError
from wellcond.linalg.records import Spectrum

Product = Callable[[Tensor], Tensor]

BLOCK = 16
"""Vectors that Davidson's method takes at a time."""
MAX_STEPS = 50
SMALLEST_ON_DEVICE = 1024
"""Smaller side below which a matrix is decomposed on the CPU: CUDA takes such matrices one by one, in small steps."""
BISECTIONS = 80  # an interval of width 1e3 in log p shrinks below 1e-20
LARGEST_SECTION, SECTION_ENTRIES = 16, 2**18
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


def move_to(device: torch.device, record: object, names: Sequence[str]) -> None:
    """Take tensors of a frozen record to a device; None stays."""
    for name in names:
        tensor = getattr(record, name)
        object.__setattr__(record, name, None if tensor is None else tensor.to(device))


def where_decomposed(matrices: Tensor) -> Tensor:
    """Matrices where their decomposition is fast: small ones go to the CPU, all of a batch together."""
    return matrices.cpu() if min(matrices.shape[-2:]) < SMALLEST_ON_DEVICE else matrices


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values in float64, largest first; batched over leading axes. On the CPU where the device has no float64.

    Raises: WeightError if an entry is not finite.
    """
    if not bool(torch.isfinite(matrix).all()):
        raise WeightError("expected finite entries, found NaN or infinity: singular values are not defined")
    return torch.linalg.svdvals(where_decomposed(to_float64(matrix)))


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
        TypeError: something else than a dense tensor of real numbers.
        ValueError: not one matrix, an empty one, a tolerance that is no number from 0 to 1.
        WeightError: entries that are not finite.

    Example:
        >>> spectrum(2.0 * torch.eye(3)).condition_number
        1.0
        >>> spectrum(torch.diag(torch.tensor([2.0, 1.0, 0.0]))).pseudo_condition_number
        2.0
    """
    check_tensor("matrix", matrix, (2,))
    rtol = None if rtol is None else check_number("rtol", rtol, at_least=0, below=1)
    return spectra(matrix[None], rtol=rtol)[0]


def spectra(matrices: Tensor, *, rtol: float | None = None) -> list[Spectrum]:
    """`spectrum` of each matrix of a batch (count, m, n)."""
    return [spectrum_of_values(sigma, tuple(matrices.shape), rtol=rtol) for sigma in singular_values(matrices).cpu()]


def spectrum_of_values(sigma: Tensor, shape: tuple[int, ...], *, rtol: float | None = None) -> Spectrum:
    """`spectrum` of a matrix of the given shape whose singular values are known."""
    rank = int(resolve_rank(sigma, shape, rtol=rtol))
    return Spectrum(
        sigma_max=float(sigma[0]),
        sigma_min=float(sigma[-1]),
        sigma_rank=float(sigma[rank - 1]) if rank else 0.0,
        rank=rank,
        nullity=len(sigma) - rank,
        rtol=default_rtol(shape) if rtol is None else rtol,
    )


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
    """Largest eigenvalue of a symmetric positive semi-definite operator on R^size, float64, on the CPU."""
    found = largest_eigenvalues(
        lambda rows: product(rows[0])[None], 1, size, tolerance=tolerance, max_steps=max_steps, seed=seed
    )
    return found[0]


def largest_eigenvalues(
    product: Product,
    count: int,
    size: int,
    *,
    tolerance: float = 1e-10,
    max_steps: int = 300,
    seed: int = 0,
    device: torch.device | None = None,
) -> list[Estimate]:
    """Largest eigenvalue of each of `count` operators at once; `product` maps rows (count, size) on `device` to rows.

    Each stops when two successive Ritz values agree to `tolerance`, when its Krylov space is exhausted (then the value
    is exact), or after `max_steps`. The Ritz test and not the residual: eigenvalues of attention's Gram matrices come
    in clusters of about d, where the value converges long before the vector (theory.md, section 7.2).
    """
    generator = torch.Generator().manual_seed(seed)
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


@dataclass(frozen=True, eq=False)
class SoftmaxSpectrum:
    """Per row i: the rank of Lambda_i and the natural logarithms of its extreme non-zero eigenvalues.

    A row with a single unmasked entry has Lambda_i = 0, rank 0, and both logarithms -inf.
    """

    rank: Tensor
    log_max: Tensor
    log_min: Tensor

    @property
    def norm(self) -> float:
        """Lmax = max_i ||Lambda_i||, at most 1/2."""
        return math.exp(float(self.log_max.max()))

    @property
    def log10_kappa(self) -> float:
        r"""log10 of kappa(Lambda) = max_i lambda_max(Lambda_i) / min_i lambda_min,nonzero(Lambda_i).

        Lambda_i 1 = 0, so kappa(Lambda) is infinite if read literally; this is the pseudo reading. Rows of rank 0 are
        skipped; NaN if there is no other.
        """
        rows = self.rank > 0
        if not bool(rows.any()):
            return math.nan
        return float(self.log_max[rows].max() - self.log_min[rows].min()) / math.log(10)


def softmax_eigenvalues(log_p: Tensor) -> SoftmaxSpectrum:
    """Spectrum of every Lambda_i from rows log p_i, -inf where masked.

    Accurate to a few rounding errors of log p relative to each eigenvalue.
    The rank is structural, the number of unmasked entries less one; no eigenvalue is dropped for being small: under
    lambda-corrections it is 1e-280 and smaller, which no eigenvalue routine resolves.
    """
    rank = torch.isfinite(log_p).sum(-1) - 1
    inside = rank > 0
    log_max = torch.full_like(log_p[:, 0], -torch.inf)
    log_min = log_max.clone()
    if bool(inside.any()):
        rows = log_p[inside]
        top = rows.topk(2, -1).values
        bottom = rows.masked_fill(torch.isneginf(rows), torch.inf).topk(2, -1, largest=False).values
        low, high = torch.cat([top[:, 1], bottom[:, 0]]), torch.cat([top[:, 0], bottom[:, 1]])
        log_max[inside], log_min[inside] = _root(rows.repeat(2, 1), low, high).chunk(2)
    return SoftmaxSpectrum(rank, log_max, log_min)


def _root(log_p: Tensor, low: Tensor, high: Tensor) -> Tensor:
    # diag(p) - p p^T is a rank-one update of a diagonal matrix: mu is an eigenvalue between two neighbouring p_j iff
    #     1 = sum_j p_j^2 / (p_j - mu) = sum_j p_j + mu sum_j p_j / (p_j - mu).
    # With sum_j p_j = 1 and mu != 0 this is
    #     f(mu) = sum_j p_j / (p_j - mu) = sum_j 1 / (1 - e^(log mu - log p_j)) = 0,
    # which increases from -inf to +inf between neighbours: one root, found by sections of log mu, more than two at once
    # where they are small. Masked entries (log p = -inf) contribute 1 / (1 - inf) = 0, and equal neighbours are their
    # own root.
    parts = max(2, min(LARGEST_SECTION, SECTION_ENTRIES // log_p.numel()))
    fractions = torch.arange(1, parts, dtype=torch.float64, device=log_p.device) / parts
    for _ in range(math.ceil(BISECTIONS / math.log2(parts))):
        inner = low[:, None] + (high - low)[:, None] * fractions
        if bool(((inner <= low[:, None]) | (inner >= high[:, None])).all()):
            break  # no number lies between
        left = (-torch.expm1(inner[:, :, None] - log_p[:, None, :])).reciprocal().sum(-1) <= 0
        ends, at = torch.cat([low[:, None], inner, high[:, None]], 1), left.sum(-1, keepdim=True)
        low, high = ends.gather(1, at)[:, 0], ends.gather(1, at + 1)[:, 0]
    return (low + high) / 2
