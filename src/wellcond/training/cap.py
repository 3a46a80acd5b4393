r"""A spectral cap: after a step, no singular value of a head's weight is above `w_max`.

With :math:`W = U S V^T` of shape (d, D), :math:`X = W W^T / w^2` and :math:`Z = X^{1/2}`, whose eigenvalues are
:math:`z = \sigma / w`,

.. math:: W' = (I - R\, X^{-1/2})\, W, \qquad R = \max(Z - I, 0) = \tfrac12 (Z - I)(I + \mathrm{sign}(Z - I))

has singular values :math:`\sigma - w \max(z - 1, 0) = \min(\sigma, w)`. Inverse root and sign are odd polynomials of
degree 5 (the Polar Express, as in `wellcond.linalg.polar`) of d x d matrices: no decomposition, nothing read by the
host. Singular values below the cap are multiplied by :math:`R = 0`, so the inverse root need not be right there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.checks import Chosen, check_writable
from wellcond.attention.sharding import full_tensor, is_distributed, local_shard, to_local
from wellcond.errors import OptionError
from wellcond.linalg.polar import HEADROOM, Quintic, largest_eigenvalue, schedule
from wellcond.linalg.spectrum import has_float64
from wellcond.training.rows import AfterStep, HeadView, check_from_zero

VERB = "wellcond.SpectralCap"
SMALLEST_RATIO = 1e-4
"""The inverse root is right down to this share of the largest singular value: the cap may be 10,000 times below it."""
SIGN = 1e-8
"""Eigenvalues this near to zero, relative to the largest, have a sign that is not quite +-1."""
LAST: Quintic = (15 / 8, -10 / 8, 3 / 8)
"""Newton-Schulz: takes an error of 1e-6 to one of rounding."""
MARGIN = 1e-5
"""Relative distance below the cap at which capped singular values end, for the rounding of the polynomials."""


@torch.no_grad()
def capped(weights: Tensor, w_max: float) -> Tensor:
    """Matrices (count, rows, columns) with every singular value above `w_max` replaced by it; others are kept.

    A matrix whose largest singular value is more than 0.3 % below `w_max` is returned bit for bit. NaN and infinity
    stay in their own matrix.

    Example:
        >>> weights = torch.diag(torch.tensor([3.0, 1.0]))[None]
        >>> capped(weights, 2.0)[0].diagonal().round(decimals=3).tolist()
        [2.0, 1.0]
    """
    if weights.shape[-2] > weights.shape[-1]:
        return capped(weights.mT, w_max).mT
    wide = torch.float64 if has_float64(weights.device) else torch.float32
    with torch.autocast(weights.device.type, enabled=False):
        return _capped(weights, w_max, wide)


def _capped(weights: Tensor, w_max: float, wide: torch.dtype) -> Tensor:
    work = weights.to(wide)
    limit = w_max * (1 - MARGIN)
    eye = torch.eye(work.shape[-2], dtype=wide, device=work.device)
    gram = torch.baddbmm(eye, work, work.mT, beta=torch.finfo(torch.float32).tiny) / limit**2
    largest = HEADROOM * largest_eigenvalue(gram)
    root = _inverse_root(gram / largest) / largest.sqrt()
    above = torch.bmm(gram, root) - eye  # Z - I
    above = 0.5 * (above + torch.bmm(above, _sign(above / largest.sqrt().clamp_min(1.0))))
    result = (work - torch.bmm(torch.bmm(above, root), work)).to(weights.dtype)
    return torch.where(largest * limit**2 > w_max**2, result, weights)


def _inverse_root(scaled: Tensor) -> Tensor:
    """`scaled`^(-1/2) of positive definite matrices with eigenvalues up to 1; less where these are tiny."""
    eye = torch.eye(scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
    root = eye.expand_as(scaled)
    for a, b, c in (*schedule(SMALLEST_RATIO), LAST):
        factor = a * eye + b * scaled + c * torch.bmm(scaled, scaled)
        root = torch.bmm(root, factor)
        scaled = torch.bmm(torch.bmm(factor, scaled), factor)
    return root


def _sign(matrices: Tensor) -> Tensor:
    """Sign of symmetric matrices with eigenvalues in [-1, 1]: an odd polynomial."""
    for a, b, c in (*schedule(SIGN), LAST):
        square = torch.bmm(matrices, matrices)
        matrices = a * matrices + torch.bmm(matrices, b * square + c * torch.bmm(square, square))
    return matrices


class SpectralCap(AfterStep):
    """Hold the largest singular value of every head's weights at `w_max`, after each step of an optimiser.

    Only singular values above the cap are changed, and only heads that have one; a head more than 0.3 % below the cap
    stays as it is, bit for bit. There are no new parameters. All of it is matrix products on the device: nothing is
    read by the host. Sharded weights are gathered for it, so that every process must step.

    Args:
        model: the model, wrapped (DDP, fully_shard) if it is going to be.
        optimizer: made after the model was wrapped; or a list of several, in the order of their steps.
        w_max: the largest singular value that a head's weight may have.
        projections: which of q, k, v, o.
        sites: only these layers, from `find_attention(model)`, or a pattern of paths; all by default.

    Raises:
        OptionError: a cap that is not positive, unknown projections; an optimiser that does not hold the weights.
        ConditioningError: a conditioned model, whose forward pass uses another weight; fold it first.

    Example:
        >>> model = nn.MultiheadAttention(8, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        >>> cap = SpectralCap(model, optimizer, w_max=0.5)
        >>> model.in_proj_weight.grad = torch.zeros(24, 8)
        >>> optimizer.step()
        >>> from wellcond import find_attention
        >>> float(torch.linalg.matrix_norm(find_attention(model)[0].q.read().detach(), 2).max()) <= 0.5
        True

    Reference: Newhouse et al., Training Transformers with Enforced Lipschitz Constants, arXiv 2507.13338 (the idea of a
    cap by odd polynomials; this one keeps what is below it).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        w_max: float,
        *,
        projections: str = "qkvo",
        sites: Chosen | None = None,
    ) -> None:
        check_from_zero(VERB, w_max=w_max)
        if w_max == 0:
            raise OptionError(f"{VERB}: expected w_max above 0, got 0")
        if not projections or set(projections) - set("qkvo"):
            raise OptionError(f"{VERB}: expected projections among 'qkvo', such as 'qk', got {projections!r}")
        super().__init__(VERB, model, optimizer, sites)
        check_writable(self._inner, self._sites, projections, VERB)
        self.w_max = float(w_max)
        self._heads: dict[Tensor, list[HeadView]] = {}
        for site in self._sites:
            slots = [slot for role, slot in site.slots.items() if role in projections]
            self._check_held((site.name, slot.parameter) for slot in slots)
            for slot in slots:
                self._heads.setdefault(slot.parameter, []).append(HeadView(slot))
        self._start(self._act)

    def __repr__(self) -> str:
        """One line: the cap and how many projections it holds."""
        return f"SpectralCap(w_max={self.w_max:g}: {sum(map(len, self._heads.values()))} projections)"

    @torch.no_grad()
    def _act(self) -> None:
        for parameter, views in self._heads.items():
            sharded = is_distributed(parameter)
            whole = full_tensor(parameter).clone() if sharded else parameter
            for view in views:
                view.put_(whole, capped(view.take(whole), self.w_max))
            if sharded:
                to_local(parameter).copy_(local_shard(parameter).of(whole))
