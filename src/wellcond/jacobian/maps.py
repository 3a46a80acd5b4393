r"""Maps of query and key rows, norms and rotations: their Jacobians, and which directions of W_Q and W_K they cancel.

x a row, rho = 1/sqrt(mean square + eps), 1 the all-ones vector:

    LayerNorm  z = x - mean, zhat = rho z:   diag(w) rho (I - 1 1^T/d - zhat zhat^T/d)
    RMSNorm    xhat = rho x:                 diag(w) rho (I - xhat xhat^T/d)
    l2         xhat = x/|x|:                 (I - xhat xhat^T)/|x|;   x/eps where |x| <= eps
    rotary     x cos + (S x) sin:            diag(cos) + diag(sin) S,  S a signed permutation

# Note [Gauge of maps]
`gauge_of` counts what cancels in every product of mapped rows (theory.md, section 5.5). A direction (W_Q E, W_K F)
changes qhat_r . khat_j by q_r^T (E A_rj + A_rj F^T) k_j with A_rj = N_r^T N_j. It is null for all pairs if
F^T = -A^-1 E A for one A, and E commutes with every A_rj A^-1. For rotations these matrices commute with each other, so
one random combination Z of them has the commutant of all. On an eigenspace of Z of dimension k, E is any matrix: k^2
real numbers for a real eigenvalue (channels that are not rotated), 2 k^2 for a pair of complex ones (k planes that turn
alike; one plane: a + b S).

Norms allow the skew E only: k (k - 1) / 2 and k^2. They hide the direction of a row, and N_r is taken as its polar
factor. That E is null is then tested, not taken for granted. Where a norm has a weight that differs from channel to
channel, nothing is counted, and the rank that follows is an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from wellcond.errors import check_choice
from wellcond.linalg.spectrum import resolve_rank, row_space

RotaryLayout = Literal["half", "interleaved"]
Symmetry = Literal["linear", "orthogonal", "centred", "numeric", "none"]

SAME = 1e-11  # eigenvalues of a normal matrix of this size are right to 1e-13
LINEAR = 1e-11
NULL = 1e-8  # of a random direction, which passes polar factors of nearly singular N_r
ROWS = 64  # Jacobians of maps that enter the random combinations


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


@dataclass(frozen=True, eq=False)
class MappedSide:
    """Queries or keys (rows, d) without a bias that is no parameter, that bias (count, d), and the map of the rows."""

    rows: Tensor
    fixed: Tensor
    value: Tensor
    jacobian: Tensor
    read: Tensor
    """What the map read: rows and bias."""


@dataclass(frozen=True, eq=False)
class Isotypic:
    """An eigenspace of Z: coordinates of queries are rows @ right, those of mapped keys left @ A rows."""

    right: Tensor
    left: Tensor
    is_real: bool
    is_fixed: bool
    """Nothing rotates it: a constant added to the keys adds a constant to each row of logits."""

    @property
    def size(self) -> int:
        """Its dimension k, over the real or complex numbers."""
        return self.right.shape[1]


@dataclass(frozen=True)
class Gauge:
    """Dimensions of the directions that cancel, and of those of a constant key that no softmax sees."""

    cancelling: int
    constant: int


def gauge_of(query: MappedSide, key: MappedSide) -> Gauge:
    """Of two maps whose Jacobians are known as numbers only."""
    linear = _is_linear(query) and _is_linear(key)
    query, key = _visible(query), _visible(key)
    if query.rows.shape[1] != key.rows.shape[1] or not query.rows.shape[1]:
        return Gauge(0, 0)
    n_q, n_k = (_some(side.jacobian if linear else _polar(side.jacobian)) for side in (query, key))
    a, other = (_combination(n_q, seed).T @ _combination(n_k, seed + 1) for seed in (0, 2))
    if float(torch.linalg.cond(a)) > 1e8:
        return Gauge(0, 0)
    parts = list(_isotypic(torch.linalg.solve(a, other, left=False), n_q, n_k))
    constant = sum(part.size for part in parts if part.is_real and part.is_fixed) if linear else 0
    if linear:
        return Gauge(sum(_general(part, query, key, a) for part in parts), constant)
    if bool(query.fixed.any() or key.fixed.any()) or not _is_null(_random_skew(parts), query, key, a):
        return Gauge(0, constant)
    return Gauge(sum(_skew(part, query, key, a) for part in parts), constant)


def _is_linear(side: MappedSide) -> bool:
    off = (side.jacobian @ side.read[..., None])[..., 0] - side.value
    return float(off.norm()) <= LINEAR * float(side.value.norm())


def _visible(side: MappedSide) -> MappedSide:
    """The same in a basis of what the map sees at all (LayerNorm: not the mean)."""
    b = row_space(side.jacobian.flatten(0, 1))
    if b.shape[0] == b.shape[1]:
        return side
    return MappedSide(side.rows @ b, side.fixed @ b, side.value, side.jacobian @ b, side.read @ b)


def _some(jacobians: Tensor) -> Tensor:
    order = torch.randperm(len(jacobians), generator=torch.Generator().manual_seed(0))
    return jacobians[order[:ROWS]]


def _polar(jacobians: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(_some(jacobians), full_matrices=False)
    return u @ vh


def _combination(jacobians: Tensor, seed: int) -> Tensor:
    weights = torch.randn(len(jacobians), dtype=jacobians.dtype, generator=torch.Generator().manual_seed(seed))
    return torch.einsum("r,rcd->cd", weights, jacobians)


def _isotypic(z: Tensor, n_q: Tensor, n_k: Tensor) -> Iterator[Isotypic]:
    values, right = torch.linalg.eig(z)
    left, tolerance = torch.linalg.inv(right), SAME * float(values.abs().max())
    waiting = list(range(len(values)))
    while waiting:
        first = values[waiting[0]]
        same = [at for at in waiting if abs(values[at] - first) <= tolerance]
        waiting = [at for at in waiting if at not in same]
        if first.imag < -tolerance:  # its conjugate stands for both
            continue
        part = Isotypic(right[:, same], left[same], bool(abs(first.imag) <= tolerance), False)
        yield Isotypic(part.right, part.left, part.is_real, _unmoved(part, n_q) and _unmoved(part, n_k))


def _unmoved(part: Isotypic, jacobians: Tensor) -> bool:
    """Whether all maps act alike on an eigenspace."""
    images = jacobians.to(part.right.dtype) @ part.right
    return float((images - images[:1]).norm()) <= 1e-10 * float(images.norm())


def _rank(rows: Tensor) -> int:
    return int(resolve_rank(torch.linalg.svdvals(rows), tuple(rows.shape))) if rows.numel() else 0


def _coordinates(part: Isotypic, side: MappedSide, a: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows and fixed biases of queries (a None) or keys in an eigenspace."""
    maps = part.right if a is None else (part.left @ a.to(part.left.dtype)).T
    return side.rows.to(maps.dtype) @ maps, side.fixed.to(maps.dtype) @ maps


def _general(part: Isotypic, query: MappedSide, key: MappedSide, a: Tensor) -> int:
    """Matrices E on an eigenspace that leave the fixed biases, less those that move neither queries nor keys."""
    k, (q, b_q), (kk, b_k) = part.size, _coordinates(part, query, None), _coordinates(part, key, a)
    if part.is_fixed:
        b_k = b_k[:0]
    free = (k - _rank(b_q)) * (k - _rank(b_k))
    unmoving = (k - _rank(torch.cat([q, b_q]))) * (k - _rank(torch.cat([kk, b_k])))
    return (free - unmoving) * (1 if part.is_real else 2)


def _skew(part: Isotypic, query: MappedSide, key: MappedSide, a: Tensor) -> int:
    """The same for skew E and no fixed biases."""
    k, (q, _), (kk, _) = part.size, _coordinates(part, query, None), _coordinates(part, key, a)
    free = k - _rank(torch.cat([q, kk if part.is_real else kk.conj()]))
    return (k * (k - 1) - free * (free - 1)) // 2 if part.is_real else k * k - free * free


def _random_skew(parts: list[Isotypic]) -> Tensor:
    d = parts[0].right.shape[0]
    drawn = torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).to(parts[0].right.dtype)
    e = sum(((p.right @ (p.left @ drawn @ p.right) @ p.left).real for p in parts), start=torch.zeros(d, d).double())
    return (e - e.T) / 2


def _is_null(e: Tensor, query: MappedSide, key: MappedSide, a: Tensor) -> bool:
    """Whether (W_Q E, W_K F) changes no product of mapped rows."""
    f = -torch.linalg.solve(a, e @ a).T
    dq, dk = ((side.jacobian @ (side.rows @ m)[..., None])[..., 0] for side, m in ((query, e), (key, f)))
    sizes = dq.norm() * key.value.norm() + query.value.norm() * dk.norm()
    return float((dq @ key.value.T + query.value @ dk.T).norm()) <= NULL * float(sizes)
