"""The correction C of paper S, exactly, for statements about it; training uses `wellcond.linalg.polar`."""

from __future__ import annotations

from torch import Tensor

from wellcond.linalg.orthogonal import polar


def polar_correction(heads: Tensor) -> Tensor:
    r"""Correction of paper S, theorem 3.5.

    .. math:: C = \sigma_1(W)\, U V^T, \qquad \kappa(W + C) = \frac{2 \sigma_1}{\sigma_1 + \sigma_{\min}} \le 2

    Equality holds exactly for rank-deficient W. W = 0 gives C = 0.

    Example:
        >>> import torch
        >>> polar_correction(torch.diag(torch.tensor([3.0, 1.0]))[None])[0].round().tolist()
        [[3.0, 0.0], [0.0, 3.0]]
    """
    return polar(heads, times_norm=True).factor
