r"""Fractional powers of singular values out of matrix products alone, as `polar` has their zeroth power.

With W = U S V^T and A = W W^T / sigma_1^2,

.. math:: \sigma_1 U (S / \sigma_1)^\varepsilon V^T = A^{-(1 - \varepsilon) / 2} \, W

Four square roots, each by the polynomials of the polar factor, take the eigenvalues of A from [1e-10, 1] to [0.24, 1],
on which a Chebyshev polynomial has the power. Below a half it multiplies the polar factor A^(-1/2) W instead of W.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from numpy.polynomial.chebyshev import chebinterpolate
from torch import Tensor

from wellcond.linalg.polar import HEADROOM, TINY, inverse_root, largest_eigenvalue, schedule
from wellcond.linalg.spectrum import has_float64
from wellcond.private import constant_when_compiled

FLOOR = {torch.float64: 1e-10, torch.float32: 1e-6}
"""Added to the eigenvalues of A: singular values below its root, relative to the largest, are lifted less."""
ROOTS = 4
DEGREE = 20


@torch.no_grad()
def with_power(weights: Tensor, eps: float) -> Tensor:
    """`sigma_1 U (S / sigma_1)^eps V^T` for matrices (count, rows, columns), 0.2 % off at most; zeros stay zero.

    Example:
        >>> weights = torch.diag(torch.tensor([4.0, 1.0]))[None]
        >>> with_power(weights, 0.5)[0].diagonal().round(decimals=1).tolist()
        [4.0, 2.0]
    """
    if weights.shape[-2] > weights.shape[-1]:
        return with_power(weights.mT, eps).mT
    wide = torch.float64 if has_float64(weights.device) else torch.float32
    with torch.autocast(weights.device.type, enabled=False):
        work = weights.to(wide)
        eye = torch.eye(work.shape[-2], dtype=wide, device=work.device)
        gram = torch.baddbmm(eye, work, work.mT, beta=TINY[wide])
        floor = FLOOR[wide]
        root = (gram / (HEADROOM * largest_eigenvalue(gram)) + floor * eye) / (1 + floor)
        for number in range(ROOTS):
            inverse, _ = inverse_root(root, schedule(math.sqrt(floor)))
            assert inverse is not None
            if number == 0 and eps < 0.5:
                work = torch.bmm(inverse, work)  # the polar factor, times sigma_1
            root, floor = torch.bmm(root, inverse), math.sqrt(floor)
        rest = eps if eps < 0.5 else eps - 1
        lifted = _polynomial(root, _coefficients(rest / 2 * 2**ROOTS, 0.9 * floor))
        return torch.bmm(lifted, work).to(weights.dtype)


def _polynomial(matrices: Tensor, series: tuple[float, float, tuple[float, ...]]) -> Tensor:
    """A Chebyshev series by Clenshaw's recurrence; its interval comes first."""
    low, high, coefficients = series
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device).expand_as(matrices)
    moved = (2 * matrices - (low + high) * eye) / (high - low)
    now, former = torch.zeros_like(matrices), torch.zeros_like(matrices)
    for coefficient in reversed(coefficients[1:]):
        now, former = coefficient * eye + 2 * torch.bmm(moved, now) - former, now
    return coefficients[0] * eye + torch.bmm(moved, now) - former


_SERIES: dict[tuple[float, float], tuple[float, float, tuple[float, ...]]] = {}


def _coefficients(power: float, low: float) -> tuple[float, float, tuple[float, ...]]:
    """Of x^power on [low, 1.001], from its values at Chebyshev points."""
    key = (power, low)
    if key not in _SERIES:
        high = 1.001

        def moved_power(t: Any) -> Any:
            return (0.5 * (low + high) + 0.5 * (high - low) * t) ** power

        _SERIES[key] = low, high, tuple(chebinterpolate(moved_power, 4 * DEGREE - 1)[: DEGREE + 1].tolist())
    return _SERIES[key]


constant_when_compiled(_coefficients)


def graying_by_dct(weights: Tensor, eps: float) -> Tensor:
    """As `with_power`, with the orthonormal DCT over the rows in the place of the left singular vectors.

    Singular values are then the norms of the frequencies. Rows are tokens: (count, tokens, width).

    Example:
        >>> graying_by_dct(torch.ones(1, 2, 1), 0.5)[0].flatten().round(decimals=3).tolist()
        [1.0, 1.0]
    """
    with torch.autocast(weights.device.type, enabled=False):
        work = weights.to(torch.promote_types(weights.dtype, torch.float32))
        basis = dct_basis(work.shape[-2], work.dtype, work.device)
        frequencies = basis @ work
        norms = frequencies.norm(dim=-1, keepdim=True)
        largest = norms.amax(-2, keepdim=True)
        ratio = torch.where(norms > 0, norms / torch.where(largest > 0, largest, 1.0), 1.0)
        return (basis.T @ (frequencies * ratio ** (eps - 1))).to(weights.dtype)


def dct_basis(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal DCT-II as a matrix (frequencies, positions)."""
    places = torch.arange(count, dtype=dtype, device=device)
    basis = torch.cos(math.pi / count * (places[None, :] + 0.5) * places[:, None]) * math.sqrt(2 / count)
    return torch.where(places[:, None] == 0, basis / math.sqrt(2), basis)
