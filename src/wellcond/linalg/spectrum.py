"""Singular values, rank and condition number in float64; `resolve_rank` holds the only tolerance rule."""

from __future__ import annotations

import torch
from torch import Tensor

from wellcond.errors import WeightError
from wellcond.records import Spectrum


def has_float64(device: torch.device) -> bool:
    """Whether a device can hold float64; Apple's GPUs (MPS) cannot."""
    return device.type != "mps"


def to_float64(tensor: Tensor) -> Tensor:
    """The same numbers in float64 without a gradient, on the CPU where the device has none."""
    tensor = tensor.detach()
    return (tensor if has_float64(tensor.device) else tensor.cpu()).to(torch.float64)


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
