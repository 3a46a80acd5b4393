r"""Maps of query and key rows, evaluated with their Jacobians: norms and rotations.

Maps used here (x a row, rho = 1/sqrt(mean square + eps), 1 the all-ones vector):

    LayerNorm  z = x - mean, zhat = rho z:   diag(w) rho (I - 1 1^T/d - zhat zhat^T/d)
    RMSNorm    xhat = rho x:                 diag(w) rho (I - xhat xhat^T/d)
    l2         xhat = x/|x|:                 (I - xhat xhat^T)/|x|;   x/eps where |x| <= eps
    rotary     x cos + (S x) sin:            diag(cos) + diag(sin) S,  S a signed permutation
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from wellcond.errors import check_choice

RotaryLayout = Literal["half", "interleaved"]
Symmetry = Literal["linear", "orthogonal", "centred", "numeric", "none"]


@dataclass(frozen=True, eq=False)
class TokenMap:
    """A map of rows, evaluated: its values (..., T, d') and one Jacobian per row (..., T, d', d).

    `symmetry` names the matrices E that the map commutes with, as in Note [Symmetry] of `normalised`.
    """

    value: Tensor
    jacobian: Tensor
    symmetry: Symmetry = "none"


MapRows = Callable[[Tensor], TokenMap]


def identity_map(rows: Tensor) -> TokenMap:
    """Rows as they are."""
    return TokenMap(rows, eye_like(rows).expand(*rows.shape, -1), "linear")


def layer_norm(
    rows: Tensor, *, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> TokenMap:
    """LayerNorm over the last axis."""
    d = rows.shape[-1]
    centred = rows - rows.mean(-1, keepdim=True)
    rho = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    hat = rho * centred
    # d(rho z) = rho dz - rho^3 z (z . dz)/d with dz = (I - 1 1^T/d) dx, and z . dz = z . dx because z sums to zero
    jacobian = rho[..., None] * (eye_like(rows) - 1 / d - _outer(hat, hat) / d)
    symmetry: Symmetry = "centred" if _constant(weight) and not is_present(bias) else "none"
    return _affine(hat, jacobian, weight, bias, symmetry)


def rms_norm(rows: Tensor, *, weight: Tensor | None = None, eps: float = 1e-6) -> TokenMap:
    """RMSNorm over the last axis."""
    rho = (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    hat = rho * rows
    jacobian = rho[..., None] * (eye_like(rows) - _outer(hat, hat) / rows.shape[-1])
    return _affine(hat, jacobian, weight, None, "orthogonal" if _constant(weight) else "none")


def l2_norm(rows: Tensor, *, eps: float = 1e-12) -> TokenMap:
    """Rows over max(norm, eps), as `torch.nn.functional.normalize`."""
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    inverse = 1 / norm.clamp_min(eps)
    hat = rows * inverse
    radial = _outer(hat, hat) * (norm > eps)[..., None]  # a row within eps is only divided by eps
    return TokenMap(hat, inverse[..., None] * (eye_like(rows) - radial), "orthogonal")


def rotary(rows: Tensor, cos: Tensor, sin: Tensor, *, layout: RotaryLayout) -> TokenMap:
    """Rotary position embedding of the first w channels, w the width of `cos` and `sin`; the others pass.

    Args:
        rows: (..., T, d).
        cos: (T, w), one number per channel, as the models multiply it: both channels of a pair have the same.
        sin: (T, w).
        layout: ``half``, channel c is paired with c + w/2, or ``interleaved``, 2c with 2c + 1.

    Raises:
        UnknownChoiceError: another layout.
        ValueError: a width that is odd or exceeds d.
    """
    check_choice("rotary layout", layout, get_args(RotaryLayout))
    width, d = cos.shape[-1], rows.shape[-1]
    if cos.shape != sin.shape or width % 2 or width > d:
        raise ValueError(f"rotary: expected cos and sin of one even width up to {d}, got {cos.shape} and {sin.shape}")
    swap = rows.new_zeros(d, d)
    first = torch.arange(width // 2) if layout == "half" else torch.arange(0, width, 2)
    second = first + (width // 2 if layout == "half" else 1)
    swap[first, second], swap[second, first] = -1.0, 1.0
    ones, zeros = rows.new_ones(*cos.shape[:-1], d - width), rows.new_zeros(*cos.shape[:-1], d - width)
    cos, sin = torch.cat([cos.to(rows), ones], -1), torch.cat([sin.to(rows), zeros], -1)
    jacobian = (torch.diag_embed(cos) + sin[..., :, None] * swap).expand(*rows.shape, d)
    return TokenMap((jacobian @ rows[..., None])[..., 0], jacobian, "numeric")


def chain(*maps: MapRows) -> MapRows:
    """Maps one after the other, the first one first: `chain(rms_norm, rope)` is rope(rms_norm(rows))."""

    def mapped(rows: Tensor) -> TokenMap:
        result = identity_map(rows)
        for one in maps:
            then = one(result.value)
            kinds = {result.symmetry, then.symmetry} - {"linear"}
            symmetry: Symmetry = "numeric" if len(kinds) > 1 else next(iter(kinds), "linear")
            result = TokenMap(then.value, then.jacobian @ result.jacobian, symmetry)
        return result

    return mapped


def eye_like(rows: Tensor) -> Tensor:
    """The identity of the width of `rows`."""
    return torch.eye(rows.shape[-1], dtype=rows.dtype, device=rows.device)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left[..., :, None] * right[..., None, :]


def _constant(weight: Tensor | None) -> bool:
    return weight is None or bool((weight == weight.flatten()[0]).all())


def is_present(bias: Tensor | None) -> bool:
    """Whether there is a bias that is not zero."""
    return bias is not None and bool(bias.any())


def _affine(hat: Tensor, jacobian: Tensor, weight: Tensor | None, bias: Tensor | None, kind: Symmetry) -> TokenMap:
    if weight is not None:
        weight = weight.detach().to(hat)
        hat, jacobian = hat * weight, jacobian * weight[..., :, None]
    return TokenMap(hat if bias is None else hat + bias.detach().to(hat), jacobian, kind)
