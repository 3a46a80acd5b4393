"""What the papers print, as functions of an input; those that are false as printed have counterexamples.

Statements that hold, with their proofs, are in docs/theory.md; those that only the tests need are here.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.jacobian.factors import build_factors
from wellcond.jacobian.head import contains_ones
from wellcond.linalg.orthogonal import polar
from wellcond.linalg.spectrum import singular_values, spectrum
from wellcond.theory import Head, papers_bound, structural_ranks


@dataclass(frozen=True)
class Printed:
    """The statement `observed <= value`, and whether its hypotheses hold for the input."""

    applies: bool
    value: float
    observed: float
    ratio: float = math.nan
    """Of theorem 3.8: what its hypothesis compares with kappa(A)."""

    @property
    def contradicted(self) -> bool:
        """Whether the observed quantity is larger, beyond rounding, though the hypotheses hold."""
        return self.applies and self.observed - self.value > 1e-12 * abs(self.value)


@dataclass(frozen=True, eq=False)
class PolarTheorem:
    """Theorem 3.5: the correction C = sigma_1(W) U V^T, and kappa(W + C) = 2 sigma_1 / (sigma_1 + sigma_min)."""

    correction: Tensor
    value: float

    @property
    def strictly_less(self) -> bool:
        """Proof and text print `strictly less than 2`; true exactly for W of full rank (E21)."""
        return self.value < 2


def theorem35(weight: Tensor) -> PolarTheorem:
    s = spectrum(weight)
    # sigma_i(W + C) = sigma_i + sigma_1. Below full rank sigma_min is rounding, and the exact value is 2.
    sigma_min = 0.0 if s.nullity else s.sigma_min
    value = 2 * s.sigma_max / (s.sigma_max + sigma_min) if s.rank else math.nan
    return PolarTheorem(s.sigma_max * polar(weight.double()[None])[0], value)


def theorem38(a: Tensor, lam: float) -> Printed:
    """Identity correction, with the hypothesis that makes it true: (lam + sigma_1) / (lam - sigma_1) < kappa(A).

    Weyl: |sigma_i(A + lam I) - lam| <= sigma_1(A) for every i, hence sigma_1 in numerator and denominator. The bound is
    attained, for instance by diag(1, -1, .1) + 2I. The printed requirement that lambda >= 2 plays no role.
    """
    s = spectrum(a)
    ratio = (lam + s.sigma_max) / (lam - s.sigma_max) if lam > s.sigma_max else math.inf
    return Printed(ratio < s.condition_number, ratio, kappa_after(a, lam), ratio)


def theorem38_printed(a: Tensor, lam: float) -> Printed:
    """As printed, which is false (E20): it has sigma_min where Weyl's inequality gives sigma_max."""
    s = spectrum(a)
    ratio = (s.sigma_max + lam) / (lam - s.sigma_min) if lam != s.sigma_min else math.inf
    applies = lam >= 2 and ratio <= s.condition_number
    return Printed(applies, s.condition_number, kappa_after(a, lam), ratio)


def kappa_after(a: Tensor, lam: float) -> float:
    return spectrum(a + lam * torch.eye(*a.shape, dtype=a.dtype)).condition_number


def papers_second_term(head: Head) -> Printed:
    """The second term of the papers' bound: printed kappa(P); the bound has kappa(X) kappa(P) (E11)."""
    x, p = (spectrum(m).pseudo_condition_number for m in (head.x, head.probabilities()[0]))
    return Printed(True, p, x * p)


def proposition32_printed(conditioned: Head, other: Head) -> Printed:
    """Proposition 3.2 of paper C, false (E13): weights with kappa(W) = 1 have the smaller bound B, on equal tokens.

    The proof keeps kappa(P) and kappa(Lambda) fixed, but both depend on the weights. Numbers are log10 of the bounds.
    """
    mine, theirs = papers_bound(conditioned), papers_bound(other)
    is_conditioned = all(abs(kappa - 1) < 1e-9 for kappa in (mine.kappa_q, mine.kappa_k, mine.kappa_v))
    return Printed(is_conditioned and torch.equal(conditioned.x, other.x), theirs.log10, mine.log10)


def has_assumed_rank(head: Head) -> dict[str, bool]:
    """Whether J has full rank, as both papers assume: of the stack dr of dD columns, of the wide one N dv rows."""
    ranks = structural_ranks(head, strict=False).ranks
    rows, columns = head.num_tokens * head.value_dim, (2 * head.head_dim + head.value_dim) * head.width
    wide = ranks.wide == min(rows, columns)
    return {"wide": wide, "stack": ranks.stack == min(3 * rows, head.head_dim * head.width)}


def sigma_min_upper_bound(head: Head) -> float:
    """Upper bound on the least singular value of J_wide, for any head: the Rayleigh quotient of J J^T over v (x) u.

    v is the last left singular vector of PX. The sum over tokens i and j of v_i v_j G_ij is
    T T^T + sigma_N(PX)^2 I with T = sum_i v_i [M_i (x) x_i^T, B_i (x) q_i^T]; singular values of T avoid squaring.
    """
    factors = build_factors(head)
    left, s, _ = torch.linalg.svd(factors.py, full_matrices=True)
    v = left[:, -1]
    px = float(s[-1]) if head.num_tokens <= head.width else 0.0
    t_q = torch.einsum("i,ioc,ia->oca", v, factors.m, factors.x).flatten(1)
    t_k = torch.einsum("i,ioa,ic->oca", v, factors.b, factors.q).flatten(1)
    t = torch.cat([t_q, t_k], 1)
    return math.hypot(float(singular_values(t)[-1]) if t.shape[1] >= t.shape[0] else 0.0, px)


def gauge_direction(head: Head, e: Tensor) -> tuple[Tensor, Tensor]:
    """(Wq E, -Wk E^T) as torch stores weights: Wq -> Wq (I + tE), Wk -> Wk (I + tE)^-T leaves every logit unchanged."""
    return e.T @ head.w_q, -e @ head.w_k


def key_shift_direction(head: Head, z: Tensor) -> Tensor:
    """The direction of W_K that moves every key by z, and so every row of logits by a constant; 1 in range(X)."""
    assert contains_ones(head.x)
    return torch.outer(z, torch.linalg.pinv(head.x).sum(-1))


def deficient_rank(head: Head) -> int:
    """What the rank of J_wide cannot exceed for N > r = rank X if V u = 1 for some u: N dv - (N - r).

    Lambda_i V u = 0, so G (w (x) u) = (P X X^T P^T w) (x) u, which vanishes for w in ker X^T P^T.
    """
    assert contains_ones(head.values())
    return head.num_outputs - (head.num_tokens - spectrum(head.x).rank)
