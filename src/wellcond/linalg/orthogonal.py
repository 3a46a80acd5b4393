"""Semi-orthogonal matrices: drawn at random, and the nearest one to a given matrix (polar factor)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from wellcond.arguments import check_choice
from wellcond.linalg.spectrum import has_float64

Source = Literal["svd", "qr"]


def polar(matrices: Tensor) -> Tensor:
    r"""Polar factor of each matrix of a batch (count, m, n), in its dtype, float32 or float64.

    .. math:: W = U S V^T \;\mapsto\; U V^T = (W W^T)^{-1/2} W

    The second form needs one symmetric eigenproblem of the short side, many times cheaper than an SVD. Squaring loses
    a factor kappa(W)^2 of the precision, so each matrix is accepted from the cheapest route that keeps its answer
    within 100 rounding errors of the dtype asked for: Gram matrix in that dtype, Gram matrix in float64, SVD in
    float64. The choice depends on the matrix alone, so the same weights always give the same factor. A rank-deficient
    matrix gets one of its many polar factors (all singular values 1).

    Example:
        >>> polar(torch.tensor([[[0.0, -3.0], [1.0, 0.0]]]))[0].round().tolist()
        [[0.0, -1.0], [1.0, 0.0]]
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return polar(matrices.mT).mT
    factor, lost = _polar_from_gram(matrices)
    methods = [_polar_from_svd] if matrices.dtype is torch.float64 else [_polar_from_gram, _polar_from_svd]
    for method in methods:
        again = lost > 100 * torch.finfo(matrices.dtype).eps
        if bool(again.any()):
            # Where the device has no float64, on the CPU.
            work = matrices[again] if has_float64(matrices.device) else matrices[again].cpu()
            better, lost_now = method(work.double())
            factor, lost = factor.clone(), lost.clone()
            factor[again], lost[again] = better.to(factor), lost_now.to(lost)
    return factor


def _polar_from_gram(wide: Tensor) -> tuple[Tensor, Tensor]:
    """(W W^T)^{-1/2} W, and the relative error eps * kappa^2 to expect of it (infinite if singular)."""
    eigenvalues, vectors = torch.linalg.eigh(wide @ wide.mT)
    smallest, info = eigenvalues[:, 0], torch.finfo(wide.dtype)
    lost = torch.where(smallest > 0, info.eps * eigenvalues[:, -1] / smallest, torch.inf)
    inverse_root = (vectors * eigenvalues.clamp_min(info.tiny).rsqrt()[:, None, :]) @ vectors.mT
    # The result in the memory order of the input, so that transposed weights are not transposed twice.
    column_major = wide.stride(-2) == 1 and wide.stride(-1) != 1
    return (wide.mT @ inverse_root).mT if column_major else inverse_root @ wide, lost


def _polar_from_svd(wide: Tensor) -> tuple[Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(wide, full_matrices=False)
    return u @ vh, torch.zeros_like(s[:, 0])


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
        return polar(normal)
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
