r"""Row equilibration, the weight conditioning of Saratchandran, Wang and Lucey (arXiv 2409.03424).

.. math:: W \mapsto c \, \mathrm{diag}(1 / |w_i|) \, W, \qquad c = |W|_F / \sqrt{\text{number of rows}}

A classical preconditioner: no diagonal one can be better than the one with rows of equal norm by more than the square
root of the number of rows (van der Sluis, 1969). The factor c keeps the Frobenius norm, so that logits and values keep
their size; without it rows have length 1, as in the paper.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from wellcond.arguments import check_choice
from wellcond.conditioning.methods import Correction, Layout, register_condition

Scale = Literal["frobenius", "unit"]


@register_condition("equilibrated")
def equilibrated(
    *,
    scale: Scale = "frobenius",
    layout: Layout = "per_head",
    gradient: Literal["through", "straight_through"] = "through",
) -> Correction:
    """Rows of equal norm, at the Frobenius norm of the weight.

    Args:
        scale: keep the Frobenius norm, or rows of length 1 (the paper).
        layout: equal rows within each head, or over all heads of a projection.
        gradient: differentiated through the norms (the paper), or the gradient of the effective weight.
    """
    check_choice("scale", scale, ("frobenius", "unit"))
    correct = partial(equal_rows, keep_norm=scale == "frobenius")
    settings = {"scale": scale, "layout": layout, "gradient": gradient}
    return Correction(correct, layout=layout, gradient=gradient, settings=settings)


def equal_rows(matrices: Tensor, *, keep_norm: bool = True) -> Tensor:
    """Matrices (count, rows, in) with rows of equal norm; a row of zeros stays zero.

    Example:
        >>> equal_rows(torch.tensor([[[3.0, 0.0], [0.0, 4.0]]]))[0].norm(dim=1)
        tensor([3.5355, 3.5355])
    """
    with torch.autocast(matrices.device.type, enabled=False):
        wide = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
        square = wide.square().sum(-1, keepdim=True)
        there = square > 0
        directions = wide * torch.where(there, square, 1.0).rsqrt()
        if keep_norm:
            mean = square.sum(-2, keepdim=True) / there.sum(-2, keepdim=True).clamp_min(1)
            directions = directions * torch.where(mean > 0, mean, 1.0).sqrt()
        return directions.to(matrices.dtype)
