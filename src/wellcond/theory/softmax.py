r"""Extreme non-zero eigenvalues of the softmax derivative Lambda_i = diag(p_i) - p_i p_i^T, in log space.

Lambda_i 1 = 0, so kappa(Lambda) is infinite if read literally; the pseudo reading divides by the least non-zero
eigenvalue. Under lambda-corrections that eigenvalue is 1e-280 and smaller, which no eigenvalue routine resolves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.theory.head import Head, log_probabilities

BISECTIONS = 80  # an interval of width 1e3 in log p shrinks below 1e-20


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

        Rows of rank 0 are skipped; NaN if there is no other.
        """
        rows = self.rank > 0
        if not bool(rows.any()):
            return math.nan
        return float(self.log_max[rows].max() - self.log_min[rows].min()) / math.log(10)


def softmax_spectrum(head: Head) -> SoftmaxSpectrum:
    """Spectrum of every Lambda_i, accurate to a few rounding errors of log p relative to each eigenvalue.

    The rank is structural, the number of unmasked entries less one; no eigenvalue is dropped for being small.

    Example:
        >>> x, w = torch.tensor([[1.0], [2.0]]), torch.ones(1, 1)
        >>> round(10 ** softmax_spectrum(Head(x, w, w, w, 1.0)).log10_kappa, 9)
        1.872609003
    """
    log_p = log_probabilities(head)
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
    # which increases from -inf to +inf between neighbours: one root, found by bisection on log mu. Masked entries
    # (log p = -inf) contribute 1 / (1 - inf) = 0, and equal neighbours are their own root.
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if bool(((middle <= low) | (middle >= high)).all()):
            break  # no number lies between
        right = (-torch.expm1(middle[:, None] - log_p)).reciprocal().sum(-1) > 0
        low, high = torch.where(right, low, middle), torch.where(right, middle, high)
    return (low + high) / 2
