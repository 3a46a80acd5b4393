r"""Polar factors out of matrix products alone: no decomposition, no branch on data, nothing is read by the host.

A correction that follows the weights is computed in every forward pass, so it must not stall a GPU's queue. With
W = U S V^T of shape (d, D), d <= D, and G = W W^T,

.. math:: U V^T = G^{-1/2}\, W, \qquad G^{-1/2} \approx \prod_k q_k(G_k), \quad G_{k+1} = q_k(G_k)^2\, G_k

where sigma q_k(sigma^2) is the odd polynomial of degree 5 that is closest to 1 on the interval in which the singular
values lie after k steps (Amsel, Persson, Musco and Gower, The Polar Express, arXiv 2505.16932). All of it happens on
d x d matrices; the weight itself is touched twice. `torch.linalg.polar` (torch 2.15) is a decomposition, which waits.

**Precision.** Squaring doubles the digits that a small singular value needs, so Gram matrix and first steps are in
float64, as long as small eigenvalues are small; the rest is in float32.

**Singular matrices.** No polynomial moves a singular value off zero. A fixed semi-orthogonal E, `eps` times as large as
W, is added to W, which lifts it to about `eps` sigma_1. Healthy matrices change by about `eps` relative to sigma_1, and
with W' = W + eps sigma_1 E = H' P' the mixture `keep W + share sigma_1 P'` is at least
share sigma_1 - keep eps sigma_1 in every direction: its condition number sees `eps`, whatever the condition of W.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wellcond.linalg.spectrum import has_float64
from wellcond.private import constant_when_compiled

Quintic = tuple[float, float, float]

SQUARINGS = (4, 4)  # between two normalisations, so that float32 does not underflow; G^256 in total
TINY = {torch.float64: 1e-150, torch.float32: 1e-30}
HEADROOM = 1.005  # the estimate of sigma_1^2 may be 0.2 % below the truth, and the polynomials end at 1
CHUNK_BYTES = {"cpu": 2**22}  # of float64 weights at a time: what the caches of a CPU hold
GPU_CHUNK_BYTES = 2**28


@dataclass(frozen=True)
class Accuracy:
    """How far down singular values are lifted to 1, relative to the largest."""

    smallest: float
    """The smallest singular value that becomes 1."""
    num_wide_steps: int
    """Steps in float64: after them squared singular values are within float32."""
    eps: float = 0.0
    """Size of the semi-orthogonal term relative to sigma_1."""


NARROW_DEVICE = Accuracy(eps=2e-3, smallest=1e-3, num_wide_steps=0)  # no float64 (MPS)
SQUARE = Accuracy(eps=5e-5, smallest=1e-7, num_wide_steps=9)
AGAIN = Accuracy(smallest=1e-4, num_wide_steps=5)
ALIGNED = 0.01


def accuracy_of(rows: int, columns: int, wide: torch.dtype) -> Accuracy:
    """The constants for matrices (rows, columns) with rows <= columns.

    E meets the null space of a singular W in a random matrix. Its smallest singular value is about 1 - sqrt(d/D) for D
    well above d, and about 1/d for square W, now and then much less; see `_mix`.
    """
    if wide is not torch.float64:
        return NARROW_DEVICE
    if columns < 2 * rows:
        return SQUARE
    return Accuracy(eps=2e-5 / (1 - math.sqrt(rows / columns)), smallest=1e-5, num_wide_steps=5)


def mix_with_polar(weights: Tensor, *, keep: float, share: float) -> Tensor:
    r"""`keep W + share sigma_1(W) U V^T` for each matrix of a batch (count, d, D), in the dtype of `weights`.

    A zero matrix stays zero. NaN and infinity stay visible in their own matrix. No gradient is recorded.

    Example:
        >>> weights = torch.diag(torch.tensor([3.0, 1.0]))[None]
        >>> mix_with_polar(weights, keep=0.5, share=0.5)[0].round().tolist()
        [[3.0, 0.0], [0.0, 2.0]]
    """
    if weights.shape[-2] > weights.shape[-1]:
        return mix_with_polar(weights.mT, keep=keep, share=share).mT
    wide = torch.float64 if has_float64(weights.device) else torch.float32
    bytes_of_one = weights.shape[-2] * weights.shape[-1] * wide.itemsize
    at_a_time = CHUNK_BYTES.get(weights.device.type, GPU_CHUNK_BYTES) // bytes_of_one
    with torch.no_grad(), torch.autocast(weights.device.type, enabled=False):
        if at_a_time >= len(weights):
            return _mix(weights, keep, share, wide)
        return torch.cat([_mix(part, keep, share, wide) for part in weights.split(max(at_a_time, 1))])


def mix_with_svd(weights: Tensor, *, keep: float, share: float) -> Tensor:
    r"""What `mix_with_polar` computes, by a singular value decomposition of each matrix, for comparison.

    Example:
        >>> weights = torch.diag(torch.tensor([3.0, 1.0]))[None]
        >>> mix_with_svd(weights, keep=0.5, share=0.5)[0].round().tolist()
        [[3.0, 0.0], [0.0, 2.0]]
    """
    work = weights.detach().to(torch.promote_types(weights.dtype, torch.float32))
    with torch.autocast(weights.device.type, enabled=False):
        left, sigma, right = torch.linalg.svd(work, full_matrices=False)
        return (keep * work + share * sigma[..., :1, None] * (left @ right)).to(weights.dtype)


def _mix(weights: Tensor, keep: float, share: float, wide: torch.dtype) -> Tensor:
    d, columns = weights.shape[-2:]
    accuracy = accuracy_of(d, columns, wide)
    _, direction = _constants(d, columns, wide, weights.device)
    share *= 1 + torch.finfo(weights.dtype).eps / 4  # 16-bit types round what was just enough
    work = weights.to(wide)
    # ||W||_F d^(-1/4) is within d^(1/4) of sigma_1 either way, which is close enough for `eps`.
    work = torch.addcmul(work, _norm(work), direction, value=accuracy.eps * d**-0.25)
    if accuracy is SQUARE:
        # A null direction that E barely met comes out too small, but comes out: adding a part of the result, which is
        # aligned with W and so changes no direction, makes it large enough for a second time.
        work = torch.bmm(_factor(work, 1.0, ALIGNED, accuracy), work)
        accuracy, share = AGAIN, (share - ALIGNED * keep) / (1 + ALIGNED)
    return torch.bmm(_factor(work, keep, share, accuracy), work).to(weights.dtype)


def _factor(work: Tensor, keep: float, share: float, accuracy: Accuracy) -> Tensor:
    """Keep I + share sigma_1 (W W^T)^(-1/2): its product with W is keep W + share sigma_1 U V^T."""
    eye, _ = _constants(work.shape[-2], work.shape[-1], work.dtype, work.device)
    # A zero matrix gets the Gram matrix of a tiny one, so that nothing is divided by zero.
    gram = torch.baddbmm(eye, work, work.mT, beta=TINY[work.dtype])
    scaled = gram / (HEADROOM * largest_eigenvalue(gram))
    steps = schedule(accuracy.smallest)
    wide_steps, narrow_steps = steps[: accuracy.num_wide_steps], steps[accuracy.num_wide_steps :]
    root, scaled = inverse_root(scaled, wide_steps)
    rest, _ = inverse_root(scaled.float(), narrow_steps, is_last=True)
    assert rest is not None
    # sigma_1 G^(-1/2) = (G / (HEADROOM sigma_1^2))^(-1/2) / sqrt(HEADROOM)
    share /= math.sqrt(HEADROOM)
    return torch.baddbmm(
        eye, rest.to(work.dtype), eye.expand_as(gram) if root is None else root, beta=keep, alpha=share
    )


def _norm(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)


def largest_eigenvalue(gram: Tensor) -> Tensor:
    r"""Largest eigenvalue (count, 1, 1) of positive definite matrices, from below, at most 0.2 % off.

    With A = G^256 by repeated squaring in float32, ||A G||_F / ||A||_F weighs eigenvalues by their 512th power: others
    count only if they are within about 1/512 of the largest.
    """
    norm = _norm(gram)
    narrow = power = (gram / norm).float()
    for squarings in SQUARINGS:
        for _ in range(squarings):
            power = torch.bmm(power, power)
        power = power / _norm(power)
    return _norm(torch.bmm(power, narrow)) * norm


def inverse_root(scaled: Tensor, steps: tuple[Quintic, ...], is_last: bool = False) -> tuple[Tensor | None, Tensor]:
    """The product of all q_k(G_k), None for no steps, and what is left of G: `scaled`^(-1/2) and I at the end."""
    eye, _ = _constants(scaled.shape[-1], scaled.shape[-1], scaled.dtype, scaled.device)
    root: Tensor | None = None
    for number, (a, b, c) in enumerate(steps):
        rest = torch.baddbmm(scaled, scaled, scaled, beta=b, alpha=c)  # q(G) = a I + rest
        root = torch.add(rest, eye, alpha=a) if root is None else torch.baddbmm(root, root, rest, beta=a)
        if is_last and number == len(steps) - 1:
            break
        half = torch.baddbmm(scaled, scaled, rest, beta=a)
        scaled = torch.baddbmm(half, half, rest, beta=a)
    return root, scaled


# Looked up while a graph is traced, and constants in it; functools.cache would be traced through.
_CONSTANTS: dict[tuple[int, int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}
_SCHEDULES: dict[float, tuple[Quintic, ...]] = {}


def _constants(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The identity (rows, rows) and a fixed random semi-orthogonal matrix (rows, columns)."""
    key = (rows, columns, dtype, device)
    if key not in _CONSTANTS:
        with torch.inference_mode(False), torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            normal = torch.randn(columns, rows, dtype=torch.float64, generator=generator, device="cpu")
            direction = torch.linalg.qr(normal)[0].mT.contiguous()
            eye = torch.eye(rows, dtype=dtype, device="cpu")
            _CONSTANTS[key] = (eye.to(device), direction.to(dtype).to(device))
    return _CONSTANTS[key]


def schedule(smallest: float) -> tuple[Quintic, ...]:
    """Polynomials a x + b x^3 + c x^5 that take singular values in [smallest, 1] to 1 within 1e-6, one after another.

    Example:
        >>> a, b, c = schedule(1e-5)[-1]
        >>> abs(a + b + c - 1) < 1e-6
        True
    """
    if smallest not in _SCHEDULES:
        low = smallest
        steps: list[Quintic] = []
        while 1 - low > 1e-6:
            a, b, c = best_quintic(low, 2 - low if steps else 1.0)
            steps.append((a, b, c))
            low = a * low + b * low**3 + c * low**5  # the polynomial takes [low, high] to [p(low), 2 - p(low)]
        _SCHEDULES[smallest] = tuple(steps)
    return _SCHEDULES[smallest]


for function in (_constants, schedule):
    constant_when_compiled(function)


def best_quintic(low: float, high: float) -> Quintic:
    """The odd polynomial of degree 5 closest to 1 on [low, high], by Remez's exchange.

    The error of the best one is extreme with alternating signs at four points: the ends and two zeros of p' between.
    """
    if low > high * (1 - 5e-6):  # Newton-Schulz, its limit
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    inner = np.array([(3 * low + high) / 4, (low + 3 * high) / 4])
    error, last = math.inf, -math.inf
    while abs(error - last) > 1e-15:
        points = np.array([low, *inner, high])
        system = np.stack([points, points**3, points**5, np.array([1.0, -1.0, 1.0, -1.0])], axis=1)
        a, b, c, error_now = np.linalg.solve(system, np.ones(4))
        last, error = error, float(error_now)
        spread = math.sqrt(9 * b * b - 20 * a * c)
        inner = np.sqrt((-3 * b + np.array([-spread, spread])) / (10 * c))
    return float(a), float(b), float(c)
