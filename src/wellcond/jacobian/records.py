"""The spectrum of a Jacobian as a frozen record, and the condition number of a layer from those of its heads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wellcond.linalg.records import show_kappas

Convention = Literal["wide", "stack"]
MethodName = Literal["dense", "gram", "cholesky", "implicit"]
Status = Literal["exact", "estimate", "numerically singular"]


@dataclass(frozen=True)
class JacobianSpectrum:
    """Extreme singular values of an attention head's parameter Jacobian, and how they are known.

    `status` is ``exact`` (to rounding), ``estimate`` (only the certified interval is sure) or ``numerically singular``
    (the smallest singular value could not be told from zero). A condition number is infinite only where the rank is
    deficient; where its size was not resolved it is NaN, and `smallest_kappa` and `largest_kappa` enclose it.
    """

    convention: Convention
    shape: tuple[int, int]
    sigma_max: float
    sigma_min: float
    """The last of the min(shape) singular values; NaN where only its interval is known."""
    sigma_rank: float
    """The last one that is not zero; NaN where only its interval is known."""
    rank: int
    nullity: int
    """min(shape) - rank."""
    null_space: str
    """Names of structural null directions, empty if there are none that matter."""
    sigma_max_bounds: tuple[float, float]
    sigma_rank_bounds: tuple[float, float]
    rtol: float
    method: MethodName
    reason: str
    status: Status
    num_products: int = 0
    singular_values: tuple[float, ...] | None = None
    dtype: str = "float64"

    def __repr__(self) -> str:
        """One line, without the singular values."""
        kappas = show_kappas(self.condition_number, self.pseudo_condition_number)
        shape, rank = f"{self.shape[0]} x {self.shape[1]}", f"rank {self.rank} of {min(self.shape)}"
        return f"JacobianSpectrum({self.convention}, {shape}, {kappas}, {rank}, {self.status} by {self.method})"

    @property
    def condition_number(self) -> float:
        """Strict: infinite if the rank is not full, NaN if the Jacobian is zero."""
        if self.rank == 0:
            return float("nan")
        return float("inf") if self.nullity or self.sigma_min == 0 else self.sigma_max / self.sigma_min

    @property
    def pseudo_condition_number(self) -> float:
        """Over the non-zero singular values."""
        if self.rank == 0 or self.sigma_rank == 0:
            return float("nan") if self.rank == 0 else float("inf")
        return self.sigma_max / self.sigma_rank

    @property
    def smallest_kappa(self) -> float:
        """Certified lower bound on the condition number over the non-zero singular values; NaN where none is known."""
        low, high = self.sigma_max_bounds[0], self.sigma_rank_bounds[1]
        return low / high if high > 0 else float("nan")

    @property
    def largest_kappa(self) -> float:
        """Certified upper bound on the condition number over the non-zero singular values; infinite where none is."""
        high, low = self.sigma_max_bounds[1], self.sigma_rank_bounds[0]
        return high / low if low > 0 else float("inf")

    @property
    def why_not_finite(self) -> str:
        """Why the strict condition number is infinite or not known; empty where it is finite."""
        if self.rank == 0:
            return "the Jacobian is zero"
        if self.nullity:
            named = f", null space: {self.null_space}" if self.null_space else ""
            return f"rank {self.rank} of {min(self.shape)}{named}"
        if math.isnan(self.sigma_min):
            above = f" and at most {self.largest_kappa:.3g}" if math.isfinite(self.largest_kappa) else ""
            return f"not resolved: at least {self.smallest_kappa:.3g}{above}"
        return "the smallest singular value is zero to float64 rounding" if self.sigma_min == 0 else ""

    def kappa(self, kind: Literal["strict", "pseudo"] = "strict") -> float:
        """One of the two condition numbers by name."""
        return self.condition_number if kind == "strict" else self.pseudo_condition_number

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with both condition numbers."""
        return dataclasses.asdict(self) | {
            "condition_number": self.condition_number,
            "pseudo_condition_number": self.pseudo_condition_number,
        }


def union_condition_number(spectra: Sequence[JacobianSpectrum], kind: Literal["strict", "pseudo"] = "strict") -> float:
    """Condition number of a layer without W_O from the spectra of its heads (or groups of heads).

    Its heads share neither outputs nor parameters, so the singular values of the layer are the union of theirs.

    Strict: infinite as soon as one head has a deficient rank, or if some heads have more outputs than parameters and
    others fewer: then the layer has min(shape) above the number of singular values of its heads.
    """
    if not spectra:
        raise ValueError("expected the spectrum of at least one head")
    largest = max(one.sigma_max for one in spectra)
    if largest == 0:
        return math.nan
    if kind == "pseudo":
        last = [one.sigma_rank for one in spectra if one.rank]
        if any(math.isnan(sigma) for sigma in last):
            return math.nan
        return largest / min(last) if min(last) > 0 else math.inf
    rows, columns = (sum(one.shape[axis] for one in spectra) for axis in (0, 1))
    complete = min(rows, columns) == sum(min(one.shape) for one in spectra)
    last = [one.sigma_min for one in spectra]
    if not complete or 0 in last or any(one.nullity for one in spectra):
        return math.inf
    return math.nan if any(math.isnan(sigma) for sigma in last) else largest / min(last)
