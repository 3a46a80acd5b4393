"""Theorems of paper S on a single weight W or A: the polar correction (3.5) and the identity correction (3.8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.linalg.corrections import polar_correction
from wellcond.linalg.spectrum import spectrum
from wellcond.theory.statement import AbstractStatement, Bound, Hypothesis, all_hold, paper_s, settle


@dataclass(frozen=True, kw_only=True, eq=False)
class PolarTheorem(AbstractStatement):
    """Theorem 3.5: the correction C and the condition number of W + C, which is the value."""

    correction: Tensor
    at_most: float = 2.0

    @property
    def strictly_less(self) -> bool:
        """Proof and text print `strictly less than 2`; true exactly for W of full rank (E21)."""
        return self.value is not None and self.value < self.at_most


def theorem35(weight: Tensor, *, strict: bool = True) -> PolarTheorem:
    r"""Polar correction.

    .. math:: C = \sigma_1(W)\, U V^T, \qquad \kappa(W + C) = \frac{2\sigma_1}{\sigma_1 + \sigma_{\min}} \le 2

    The equation is exact; equality with 2 holds if and only if W is rank-deficient.

    Raises: HypothesisError for W = 0, where C = 0 and kappa is not defined.

    Example:
        >>> theorem35(torch.diag(torch.tensor([3.0, 1.0]))).value
        1.5
    """
    s = spectrum(weight)
    hypotheses = (Hypothesis("W is not zero", s.rank > 0, {"sigma_max": s.sigma_max}),)
    # sigma_i(W + C) = sigma_i + sigma_1. Below full rank sigma_min is rounding, and the exact value is 2.
    sigma_min = 0.0 if s.nullity else s.sigma_min
    statement = PolarTheorem(
        name="theorem35",
        value=2 * s.sigma_max / (s.sigma_max + sigma_min) if s.rank else None,
        hypotheses=hypotheses,
        reference=paper_s("Theorem 3.5"),
        correction=polar_correction(weight.detach().double()[None])[0],
    )
    return settle(statement, strict=strict)


def theorem38(a: Tensor, lam: float, *, strict: bool = True) -> Bound:
    r"""Identity correction, with the hypothesis that makes it true.

    If :math:`\lambda > \sigma_1` and :math:`(\lambda + \sigma_1)/(\lambda - \sigma_1) < \kappa(A)`, then

    .. math:: \kappa(A + \lambda I_k) \le \frac{\lambda + \sigma_1}{\lambda - \sigma_1} < \kappa(A).

    The second condition is :math:`\lambda > \sigma_1 (\kappa + 1)/(\kappa - 1)`. The bound is attained, for instance
    by diag(1, -1, .1) + 2I. The printed requirement that lambda >= 2 plays no role.

    Args:
        a: any m x n matrix; I_k has ones on its main diagonal.
        lam: lambda.
        strict: raise outside the hypotheses.

    Raises: HypothesisError.
    """
    s = spectrum(a)
    # Weyl: |sigma_i(A + lam I) - lam| <= sigma_1(A) for every i, hence sigma_1 in numerator and denominator.
    ratio = (lam + s.sigma_max) / (lam - s.sigma_max) if lam > s.sigma_max else float("inf")
    hypotheses = (
        Hypothesis("lam > sigma_max(A)", lam > s.sigma_max, {"lam": lam, "sigma_max": s.sigma_max}),
        Hypothesis(
            "(lam + sigma_max) / (lam - sigma_max) < kappa(A)",
            ratio < s.condition_number,  # false for A = 0, whose kappa is NaN
            {"ratio": ratio, "kappa": s.condition_number},
        ),
    )
    return settle(
        Bound(
            name="theorem38",
            value=ratio if all_hold(hypotheses) else None,
            hypotheses=hypotheses,
            reference=paper_s("Theorem 3.8, corrected"),
            quantity="kappa(A + lam I)",
            relation="<=",
            parts={"lam": lam, "sigma_max": s.sigma_max, "kappa": s.condition_number},
            observed=_kappa_after(a, lam),
        ),
        strict=strict,
    )


def theorem38_applies(a: Tensor, lam: float) -> bool:
    """Whether the corrected theorem 3.8 promises that lam I lowers the condition number of A.

    Example:
        >>> theorem38_applies(torch.diag(torch.tensor([1.0, -1.0, 0.1])), 2.0)
        True
        >>> theorem38_applies(torch.diag(torch.tensor([-9.5, -1.0])), 10.0)      # kappa rises from 9.5 to 18
        False
    """
    return theorem38(a, lam, strict=False).applies


def theorem38_printed(a: Tensor, lam: float, *, strict: bool = True) -> Bound:
    r"""Identity correction as printed, which is false (E20).

    .. math:: \frac{\sigma_1 + \lambda}{\lambda - \sigma_{\min}} \le \kappa(A),\ \lambda \ge 2
              \;\Rightarrow\; \kappa(A + \lambda I_k) \le \kappa(A)

    It has sigma_min where Weyl's inequality gives sigma_max. `contradicted` says whether A is a counterexample. Use
    `theorem38`.

    Raises: HypothesisError outside the printed hypotheses.
    """
    s = spectrum(a)
    ratio = (s.sigma_max + lam) / (lam - s.sigma_min) if lam != s.sigma_min else float("inf")
    hypotheses = (
        Hypothesis("lam >= 2", lam >= 2, {"lam": lam}),
        Hypothesis(
            "(sigma_max + lam) / (lam - sigma_min) <= kappa(A)",
            ratio <= s.condition_number,
            {"ratio": ratio, "kappa": s.condition_number},
        ),
    )
    return settle(
        Bound(
            name="theorem38_printed",
            value=s.condition_number if all_hold(hypotheses) else None,
            hypotheses=hypotheses,
            reference=paper_s("Theorem 3.8, as printed"),
            quantity="kappa(A + lam I)",
            relation="<=",
            parts={"lam": lam, "sigma_max": s.sigma_max, "sigma_min": s.sigma_min},
            observed=_kappa_after(a, lam),
        ),
        strict=strict,
    )


def _kappa_after(a: Tensor, lam: float) -> float:
    a = a.detach().double()
    return spectrum(a + lam * torch.eye(*a.shape, dtype=a.dtype, device=a.device)).condition_number
