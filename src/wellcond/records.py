"""Frozen records of results."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


def show_kappas(strict: float, pseudo: float) -> str:
    """A condition number; where it is infinite, the one over the non-zero spectrum beside it.

    Example:
        >>> show_kappas(12.345678, 12.345678), show_kappas(float("inf"), 3.5)
        ('kappa 12.35', 'kappa inf, pseudo 3.5')
    """
    known = math.isinf(strict) and math.isfinite(pseudo)
    return f"kappa {strict:.4g}" + (f", pseudo {pseudo:.4g}" if known else "")


@dataclass(frozen=True)
class Spectrum:
    """Extreme singular values of one matrix and what follows from them."""

    sigma_max: float
    sigma_min: float
    """The last of the min(m, n) singular values, zero or not."""
    sigma_rank: float
    """The last one that counts as non-zero."""
    rank: int
    nullity: int
    """min(m, n) - rank."""
    rtol: float

    def __repr__(self) -> str:
        """One line."""
        rank = f"rank {self.rank} of {self.rank + self.nullity}"
        ends = f"sigma {self.sigma_max:.4g} to {self.sigma_min:.4g}"
        return f"Spectrum({show_kappas(self.condition_number, self.pseudo_condition_number)}, {ends}, {rank})"

    @property
    def condition_number(self) -> float:
        """Strict condition number: infinite below full rank, NaN for a zero matrix."""
        if self.rank == 0:
            return float("nan")
        return float("inf") if self.nullity else self.sigma_max / self.sigma_min

    @property
    def pseudo_condition_number(self) -> float:
        """Condition number over the non-zero singular values; NaN for a zero matrix."""
        return float("nan") if self.rank == 0 else self.sigma_max / self.sigma_rank

    @property
    def why_not_finite(self) -> str:
        """Why the strict condition number is infinite or not defined; empty where it is finite."""
        if self.rank == 0:
            return "the matrix is zero"
        return f"rank {self.rank} of {self.rank + self.nullity}" if self.nullity else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with both condition numbers."""
        return dataclasses.asdict(self) | {
            "condition_number": self.condition_number,
            "pseudo_condition_number": self.pseudo_condition_number,
        }
