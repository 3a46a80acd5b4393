"""Frozen records of results."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


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

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with both condition numbers."""
        return dataclasses.asdict(self) | {
            "condition_number": self.condition_number,
            "pseudo_condition_number": self.pseudo_condition_number,
        }
