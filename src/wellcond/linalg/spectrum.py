r"""Singular values and ranks of matrices, and the spectrum of the derivative of a softmax; everything in float64.

`resolve_rank` holds the only tolerance rule. What a device can do and how much memory there is is known here too.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellcond.arguments import check_number, check_tensor
from wellcond.errors import WeightError

SMALLEST_ON_DEVICE = 1024
"""Smaller side below which a matrix is decomposed on the CPU: CUDA takes such matrices one by one, in small steps."""
MEMINFO = Path("/proc/meminfo")
FALLBACK_BYTES = 4 * 2**30
BISECTIONS = 80  # an interval of width 1e3 in log p shrinks below 1e-20
LARGEST_SECTION, SECTION_ENTRIES = 16, 2**18


def show_kappas(strict: float, pseudo: float) -> str:
    """A condition number; where it is infinite, the one over the non-zero spectrum beside it.

    Example:
        >>> show_kappas(12.345678, 12.345678), show_kappas(float("inf"), 3.5)
        ('kappa 12.35', 'kappa inf, pseudo 3.5')
    """
    known = math.isinf(strict) and math.isfinite(pseudo)
    return f"kappa {strict:.4g}" + (f", pseudo {pseudo:.4g}" if known else "")


class ConditionNumbers:
    """What follows from extreme singular values and the rank, of a matrix or of a Jacobian."""

    sigma_max: float
    sigma_min: float
    sigma_rank: float
    rank: int
    nullity: int

    @property
    def condition_number(self) -> float:
        """Strict: infinite if the rank is not full, NaN if all is zero."""
        if self.rank == 0:
            return float("nan")
        return float("inf") if self.nullity or self.sigma_min == 0 else self.sigma_max / self.sigma_min

    @property
    def pseudo_condition_number(self) -> float:
        """Over the non-zero singular values; NaN if there are none."""
        if self.rank == 0 or self.sigma_rank == 0:
            return float("nan") if self.rank == 0 else float("inf")
        return self.sigma_max / self.sigma_rank

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with both condition numbers."""
        return dataclasses.asdict(self) | {  # type: ignore[call-overload]
            "condition_number": self.condition_number,
            "pseudo_condition_number": self.pseudo_condition_number,
        }


@dataclass(frozen=True)
class Spectrum(ConditionNumbers):
    """Extreme singular values of one matrix and what follows from them."""

    sigma_max: float
    sigma_min: float
    """The last of the min(m, n) singular values, zero or not."""
    sigma_rank: float
    """The last one that counts as non-zero."""
    rank: int
    nullity: int
    """min(m, n) - rank."""
    rtol: float

    def __repr__(self) -> str:
        rank = f"rank {self.rank} of {self.rank + self.nullity}"
        ends = f"sigma {self.sigma_max:.4g} to {self.sigma_min:.4g}"
        return f"Spectrum({show_kappas(self.condition_number, self.pseudo_condition_number)}, {ends}, {rank})"

    @property
    def why_not_finite(self) -> str:
        """Why the strict condition number is infinite or not defined; empty where it is finite."""
        if self.rank == 0:
            return "the matrix is zero"
        return f"rank {self.rank} of {self.rank + self.nullity}" if self.nullity else ""


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


def available_bytes(device: torch.device | None = None) -> int:
    """Memory that is free on a GPU; or that can be taken without swapping, page cache that can be dropped included.

    From psutil where it is installed, else from the kernel (Linux). Elsewhere half of the memory of the machine is
    assumed to be free, or `FALLBACK_BYTES` where that is not known either; `memory_limit` says it better.
    """
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        import psutil
    except ImportError:
        return _kernel_available() or _physical_bytes() // 2 or FALLBACK_BYTES
    return int(psutil.virtual_memory().available)


def _kernel_available() -> int:
    """MemAvailable of the Linux kernel; 0 where there is none."""
    try:
        lines = MEMINFO.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return 0
    kibibytes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(next(kibibytes, 0))


def _physical_bytes() -> int:
    """Memory of the machine; 0 where it cannot be asked for (Windows)."""
    try:
        return max(0, os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


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
