"""Semi-orthogonal matrices: drawn at random, and the nearest one to a given matrix (polar factor)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from wellcond.arguments import check_choice
from wellcond.linalg import spectrum

Source = Literal["svd", "qr"]


@dataclass(frozen=True)
class Polar:
    """Polar factors U V^T of a batch of matrices W = U S V^T, with the extreme singular values of W."""

    factor: Tensor
    sigma_max: Tensor
    sigma_min: Tensor


def polar(matrices: Tensor, *, times_norm: bool = False) -> Polar:
    r"""Polar factor and extreme singular values of each matrix of a batch (count, m, n), in the input's dtype.

    .. math:: W = U S V^T \;\mapsto\; U V^T = (W W^T)^{-1/2} W

    The second form needs one symmetric eigenproblem of the short side, many times cheaper than an SVD. Squaring loses
    a factor kappa(W)^2 of the precision, so each matrix is accepted from the cheapest route that keeps its answer
    within 100 rounding errors of the dtype asked for: Gram matrix in that dtype, Gram matrix in float64, SVD in
    float64. The choice depends on the matrix alone, so the same weights always give the same factor.

    With `times_norm` the factor comes multiplied by sigma_max, which is cheaper than doing so afterwards. A zero matrix
    has factor 0. A rank-deficient one gets one of its many polar factors (all singular values 1). A matrix with NaN or
    infinite entries gets factor 0 and NaN singular values.

    Example:
        >>> polar(torch.tensor([[[0.0, -3.0], [1.0, 0.0]]])).factor[0].round().tolist()
        [[0.0, -1.0], [1.0, 0.0]]
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        tall = polar(matrices.mT, times_norm=times_norm)
        return Polar(tall.factor.mT, tall.sigma_max, tall.sigma_min)
    target = torch.promote_types(matrices.dtype, torch.float32)
    work = matrices.to(target)
    # NaN, infinity and squares that overflow all show in the trace of the Gram matrix, which is cheap to look at.
    gram = work @ work.mT
    suspicious = not bool(torch.isfinite(gram.diagonal(dim1=-2, dim2=-1).sum()))
    finite = torch.isfinite(work).all(-1).all(-1) if suspicious else None
    if finite is not None:
        work = torch.where(finite[:, None, None], work, torch.zeros((), dtype=target, device=work.device))
        result, _ = _polar_from_svd(_in_float64(work), times_norm)
        result = Polar(
            result.factor.to(work.device, target),
            result.sigma_max.to(work.device, target).masked_fill(~finite, float("nan")),
            result.sigma_min.to(work.device, target).masked_fill(~finite, float("nan")),
        )
    else:
        result, lost = _polar_from_gram(work, times_norm, gram)
        allowed = 100 * torch.finfo(target).eps
        if target is not torch.float64:
            result, lost = _redo_where(lost > allowed, work, result, lost, times_norm, _polar_from_gram)
        result, _ = _redo_where(lost > allowed, work, result, lost, times_norm, _polar_from_svd)
    return Polar(result.factor.to(matrices.dtype), result.sigma_max, result.sigma_min)


def _polar_from_gram(wide: Tensor, times_norm: bool, gram: Tensor | None = None) -> tuple[Polar, Tensor]:
    """(W W^T)^{-1/2} W, and the relative error eps * kappa^2 to expect of it (infinite if singular)."""
    eigenvalues, vectors = torch.linalg.eigh(wide @ wide.mT if gram is None else gram)
    smallest, largest = eigenvalues[:, 0], eigenvalues[:, -1]
    lost = torch.finfo(wide.dtype).eps * largest / smallest
    lost = torch.where(smallest > 0, lost, torch.full_like(lost, float("inf")))
    norm = largest.clamp_min(0).sqrt()
    roots = eigenvalues.clamp_min(torch.finfo(wide.dtype).tiny).rsqrt()
    roots = roots * norm[:, None] if times_norm else roots
    inverse_root = (vectors * roots[:, None, :]) @ vectors.mT
    # The result in the memory order of the input, so that transposed weights are not transposed twice.
    column_major = wide.stride(-2) == 1 and wide.stride(-1) != 1
    factor = (wide.mT @ inverse_root).mT if column_major else inverse_root @ wide
    return Polar(factor, norm, smallest.clamp_min(0).sqrt()), lost


def _polar_from_svd(wide: Tensor, times_norm: bool) -> tuple[Polar, Tensor]:
    u, s, vh = torch.linalg.svd(wide, full_matrices=False)
    # A zero matrix has no direction at all: its factor is 0, not an arbitrary rotation.
    factor = (u @ vh) * (s[:, :1, None] if times_norm else s[:, :1, None] > 0)
    return Polar(factor, s[:, 0], s[:, -1]), torch.zeros_like(s[:, 0])


def _in_float64(tensor: Tensor) -> Tensor:
    """The same numbers in float64, on the CPU where the device has none."""
    return tensor.double() if spectrum.has_float64(tensor.device) else tensor.cpu().double()


def _redo_where(
    mask: Tensor, work: Tensor, old: Polar, lost: Tensor, times_norm: bool, method: Callable[..., tuple[Polar, Tensor]]
) -> tuple[Polar, Tensor]:
    """Recompute the matrices in `mask` in float64 by `method`."""
    if not bool(mask.any()):
        return old, lost
    new, new_lost = method(_in_float64(work[mask]), times_norm)

    def merged(into: Tensor, values: Tensor) -> Tensor:
        into = into.clone()
        into[mask] = values.to(into.device, into.dtype)
        return into

    result = Polar(
        merged(old.factor, new.factor), merged(old.sigma_max, new.sigma_max), merged(old.sigma_min, new.sigma_min)
    )
    return result, merged(lost, new_lost)


def random_semi_orthogonal(
    count: int,
    rows: int,
    columns: int,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
    source: Source = "svd",
) -> Tensor:
    """Independent semi-orthogonal matrices (count, rows, columns), uniformly distributed (Haar), float32.

    The shorter side is orthonormal: all min(rows, columns) singular values are 1. Numbers are drawn on the
    generator's device (the CPU without one) and moved, so a seed gives the same matrices on every device.

    Args:
        count: number of matrices.
        rows: output features of one head.
        columns: input features.
        generator: source of randomness; torch's global one if None.
        device: where to compute and return them.
        source: ``svd``, the polar factor of a Gaussian (paper C, A.1.1), or ``qr`` with the signs fixed, as
            `torch.nn.init.orthogonal_` does: the same distribution, other numbers.

    Raises: UnknownChoiceError for another source.
    """
    check_choice("orthogonal", source, get_args(Source))
    normal = draw_normal((count, rows, columns), generator=generator, device=device)
    if source == "svd":
        return polar(normal).factor
    tall = normal if rows >= columns else normal.mT
    q, r = torch.linalg.qr(tall)
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    return q if rows >= columns else q.mT


def draw_normal(
    shape: tuple[int, ...], *, generator: torch.Generator | None, device: torch.device | str = "cpu"
) -> Tensor:
    """Standard normal float32 numbers, drawn on the generator's device, then moved."""
    source = "cpu" if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=source, dtype=torch.float32).to(device)


def identity_heads(num_heads: int, head_dim: int, in_features: int, layout: str) -> Tensor:
    """Rectangular identity for every head (heads, d, D), float32.

    ``per_head``: the same I in every head, which then all read coordinates 0..d-1. ``joint``: the identity of the
    whole hd x D matrix, so that head k reads coordinates kd..(k+1)d; rows beyond D stay zero.
    """
    if layout == "per_head":
        return torch.eye(head_dim, in_features).expand(num_heads, -1, -1)
    return torch.eye(num_heads * head_dim, in_features).reshape(num_heads, head_dim, -1)
