r"""Bounds on the singular values of the parameter Jacobian, and the papers' surrogate for its condition number.

wide = [J_Q J_K J_V], the Jacobian (N dv x ...); stack = [J_Q; J_K; J_V], the papers' dimension count, for dv = d. With
the factors of `wellcond.jacobian.head`, J J^T (wide) and J^T J (stack) are sums of three PSD terms,

    wide:  J J^T = bd(M_i)(X X^T (x) I) bd(M_i)^T + bd(B_i)(Q Q^T (x) I) bd(B_i)^T + P X X^T P^T (x) I
    stack: J^T J = (X (x) I)^T bd(M_i^T M_i) (X (x) I) + ... + X^T P^T P X (x) I

and lambda_min(A + B) >= lambda_min(A) + lambda_min(B), lambda_max(A + B) <= lambda_max(A) + lambda_max(B). The bounds
involve norms of W and P, not kappa(W): no bound in kappa(W) alone can exist (Wq -> tWq, Wk -> Wk/t).

`wellcond.theory` states these bounds with their hypotheses, theory.md, section 6, proves them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wellcond.jacobian.head import FactorStack, Head, JacobianFactors, stack_heads
from wellcond.jacobian.records import Convention
from wellcond.linalg.spectrum import (
    SECTION_ENTRIES,
    SoftmaxSpectrum,
    default_rtol,
    resolve_rank,
    softmax_eigenvalues,
    where_decomposed,
)


def lower_parts(factors: JacobianFactors, rank: int, *, less_rounding: bool = False) -> dict[str, float]:
    """Numbers that (L) is made of at rank r of the tokens; zero where there are fewer than r singular values.

    `less_rounding` takes the rounding of the SVD off, so that dependent rows get no positive bound.
    """

    def sigma_r(matrix: Tensor, sigma: Tensor) -> float:
        if rank > len(sigma):
            return 0.0
        return max(0.0, float(sigma[rank - 1]) - rounding(matrix) * float(sigma[0]))

    def rounding(matrix: Tensor) -> float:
        return default_rtol(tuple(matrix.shape)) if less_rounding else 0.0

    # bd(M_i) bd(M_i)^T >= min_i sigma_dv(M_i)^2, and sigma_dv = 0 for a tall M_i (d < dv).
    tall = factors.m.shape[2] < factors.m.shape[1]
    of_m = factors.m_values
    m = 0.0 if tall else max(0.0, float((of_m[:, -1] - rounding(factors.m) * of_m[:, 0]).min()))
    of_x, of_px = sigma_r(factors.x, factors.x_values), sigma_r(factors.py, factors.py_values)
    return {"sigma_r(X)": of_x, "min sigma_min(M_i)": m, "sigma_r(PX)": of_px}


def upper_parts(factors: JacobianFactors) -> dict[str, float]:
    """Numbers that (U1) is made of."""
    return {
        "||X||": float(factors.x_values[0]),
        "max ||M_i||": float(factors.m_values[:, 0].max()),
        "||Q||": float(factors.for_all(_query_norms)),
        "max ||B_i||": float(factors.for_all(_token_side_norms).max()),
        "||PX||": float(factors.py_values[0]),
    }


def _query_norms(stack: FactorStack) -> Tensor:
    return _norms(stack.q)


def _token_side_norms(stack: FactorStack) -> Tensor:
    return _norms(stack.b)


def _norms(matrices: Tensor) -> Tensor:
    """Of each matrix; squaring loses nothing of a largest singular value."""
    return torch.linalg.eigvalsh(where_decomposed(matrices @ matrices.mT))[..., -1].clamp_min(0).sqrt()


def lower_square(parts: Mapping[str, float]) -> float:
    """(L) from its parts."""
    x, m, px = parts.values()
    return (x * m) ** 2 + px**2


def upper_square(parts: Mapping[str, float]) -> float:
    """(U1) from its parts."""
    x, m, q, b, px = parts.values()
    return (x * m) ** 2 + (q * b) ** 2 + px**2


def norm_bound(factors: JacobianFactors) -> float:
    """The square root of (U1), which rounding must not make smaller than what it bounds."""
    return math.sqrt(upper_square(upper_parts(factors))) * (1 + 1e-12)


def log10_kappa_bound(head: Head, factors: JacobianFactors, *, convention: Convention = "wide") -> float | None:
    """log10 of sqrt(U1 / L), an upper bound on kappa(J); None where that says nothing but rounding."""
    rank = int(resolve_rank(factors.x_values, tuple(head.x.shape)))
    if rank == 0 or (convention == "wide" and rank < head.num_tokens):
        return None
    lower = lower_square(lower_parts(factors, rank, less_rounding=True))
    return None if lower == 0 else (math.log10(upper_square(upper_parts(factors))) - math.log10(lower)) / 2


def softmax_spectra(heads: Sequence[Head]) -> list[SoftmaxSpectrum]:
    """Spectra of the derivatives Lambda_i of the softmax, of heads that `can_stack`, together as far as they are small.

    Example:
        >>> x, w = torch.tensor([[1.0], [2.0]]), torch.ones(1, 1)
        >>> round(10 ** softmax_spectra([Head(x, w, w, w, 1.0)])[0].log10_kappa, 9)
        1.872609003
    """
    at_once = max(1, SECTION_ENTRIES // (heads[0].num_rows * len(heads[0].memory)))
    found = []
    for at in range(0, len(heads), at_once):
        some = heads[at : at + at_once]
        of_all = softmax_eigenvalues(stack_heads(some).log_probabilities().flatten(0, 2))
        parts = (numbers.cpu().chunk(len(some)) for numbers in (of_all.rank, of_all.log_max, of_all.log_min))
        found += [SoftmaxSpectrum(*of_head) for of_head in zip(*parts, strict=True)]
    return found


@dataclass(frozen=True, eq=False)
class SurrogateFactors:
    r"""What the papers' bound is made of: condition numbers of X, Wq, Wk, Wv (in this order), of P, and Lambda_i.

    .. math:: B = \kappa(X)^3 \kappa(\Lambda) \kappa(W_v) (\kappa(W_q) + \kappa(W_k)) + \kappa(X) \kappa(P)

    It is no bound on kappa(J), in either convention; see `wellcond.theory.papers_bound`.
    """

    kappa: dict[str, float]
    kappa_p: float
    lambdas: SoftmaxSpectrum

    @property
    def log10(self) -> float | None:
        """log10 of B, which may exceed any float; None if a factor is not defined."""
        if any(math.isnan(k) for k in self.kappa.values()) or not bool((self.lambdas.rank > 0).any()):
            return None
        x, q, k, v = (math.log10(number) for number in self.kappa.values())
        first = 3 * x + self.lambdas.log10_kappa + v + _log10_sum(q, k)
        return _log10_sum(first, x + math.log10(self.kappa_p))


def _log10_sum(a: float, b: float) -> float:
    """log10(10^a + 10^b)."""
    return float(np.logaddexp(a * math.log(10), b * math.log(10))) / math.log(10)
