"""The corrections C of spectral conditioning, as maps W -> C on batches of heads (count, d, D).

The forward pass uses W + C, and C carries no gradient.
"""

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


def balanced_correction(heads: Tensor, *, target: float = 2.0) -> Tensor:
    r"""The polar correction rescaled so that the spectral norm stays that of W.

    With b = 1/target, the effective weight mixes W with its polar factor,

    .. math:: W + C = (1 - b)\, W + b\, \sigma_1(W)\, U V^T,

    so its singular values (1-b) sigma_i + b sigma_1 lie between b sigma_1 and sigma_1: the largest is unchanged and
    kappa(W + C) <= target, with equality for rank-deficient W. target = 2 is half of W + C of theorem 3.5.

    Example:
        >>> import torch
        >>> w = torch.diag(torch.tensor([3.0, 1.0]))[None]
        >>> (w + balanced_correction(w))[0].round().tolist()
        [[3.0, 0.0], [0.0, 2.0]]
    """
    return (polar_correction(heads) - heads) / target
