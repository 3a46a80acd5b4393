"""Numbers of a stored report, which may be text ("inf", "nan") because JSON has neither, and how they are printed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MISSING = "\N{EN DASH}"
INFINITE = "\N{INFINITY}"


def number(value: Any) -> float:
    """A stored number; NaN where there is none.

    Example:
        >>> number("inf"), number(2), number(None)
        (inf, 2.0, nan)
    """
    if value is None:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def show(value: Any, digits: int = 3) -> str:
    """A number at a glance."""
    x = number(value)
    if math.isnan(x):
        return MISSING
    if math.isinf(x):
        return INFINITE if x > 0 else f"-{INFINITE}"
    return f"{x:.{digits}g}"


def plain_number(value: float) -> str:
    """Shortest text that reads back as the same number; empty where there is none.

    Example:
        >>> plain_number(2.0), plain_number(0.1), plain_number(math.nan)
        ('2', '0.1', '')
    """
    if math.isnan(value):
        return ""
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 1e15 else repr(float(value))


def log10(value: Any) -> float:
    """Decimal logarithm; -inf of zero, NaN of what has none."""
    x = number(value)
    if math.isnan(x) or x < 0:
        return math.nan
    return -math.inf if x == 0 else math.log10(x)


@dataclass(frozen=True)
class HeadView:
    """One head of a stored report, with the questions that every plot asks."""

    layer: int
    layer_name: str
    row: dict[str, Any]

    @property
    def index(self) -> int:
        """Number of the key/value head."""
        return int(self.row["index"])

    @property
    def label(self) -> str:
        """Layer and head in words."""
        queries = list(self.row.get("query_heads") or ())
        group = f" (query heads {queries[0]} to {queries[-1]})" if len(queries) > 1 else ""
        return f"{self.layer_name}, head {self.index}{group}"

    @property
    def jacobian(self) -> dict[str, Any]:
        """Its Jacobian's record."""
        return self.row["jacobian"]

    @property
    def diagnosis(self) -> dict[str, Any]:
        """Its diagnosis; empty if there is none."""
        return self.row.get("diagnosis") or {}

    @property
    def attention(self) -> dict[str, Any]:
        """Statistics of its attention map; empty if there are none."""
        return self.diagnosis.get("attention") or {}

    @property
    def kappa(self) -> float:
        """The condition number asked for, mean over samples."""
        return number(self.row.get("mean_kappa"))

    @property
    def pseudo(self) -> float:
        """The condition number over the non-zero spectrum, mean over samples."""
        return number(self.row.get("mean_pseudo_kappa", self.jacobian.get("pseudo_condition_number")))

    @property
    def finite_kappa(self) -> float:
        """The condition number asked for, or where that is infinite the one over the non-zero spectrum."""
        return self.pseudo if math.isinf(self.kappa) else self.kappa

    @property
    def why_not_finite(self) -> str:
        """Why the condition number asked for is infinite; empty where it is finite, or in older records."""
        return str(self.row.get("why_not_finite") or "")

    @property
    def dead(self) -> bool:
        """Attention has collapsed."""
        return bool(self.row.get("dead"))

    @property
    def status(self) -> str:
        """How the Jacobian's singular values are known."""
        return str(self.jacobian.get("status", "unknown"))

    @property
    def interval(self) -> tuple[float, float]:
        """Certified interval of the condition number over the non-zero singular values."""
        top, bottom = (self.jacobian.get(key) or (None, None) for key in ("sigma_max_bounds", "sigma_rank_bounds"))
        low = _ratio(number(top[0]), number(bottom[1]))
        return (low if math.isnan(low) else max(low, 1.0)), _ratio(number(top[1]), number(bottom[0]))

    @property
    def spectrum(self) -> Sequence[float] | None:
        """All singular values of the Jacobian, falling; None where only the extremes are known."""
        values = self.jacobian.get("singular_values")
        return None if not values else sorted((number(value) for value in values), reverse=True)

    @property
    def explanation(self) -> str:
        """What dominates, in words."""
        if self.diagnosis:
            return str(self.diagnosis.get("explanation", ""))
        return f"not diagnosed, since this is not plain softmax attention ({self.row.get('how', 'unknown form')})"


def _ratio(top: float, bottom: float) -> float:
    if math.isnan(top) or math.isnan(bottom):
        return math.nan
    return math.inf if bottom <= 0 else top / bottom


def head_views(data: dict[str, Any]) -> list[HeadView]:
    """Every head of a stored report."""
    return [
        HeadView(number_, layer_name(layer), row)
        for number_, layer in enumerate(data["layers"])
        for row in layer["heads"]
    ]


def layer_name(layer: dict[str, Any]) -> str:
    """Its name; the model itself has none."""
    return str(layer.get("name") or "(model)")


def show_seeds(count: int) -> str:
    """How many seeds there are.

    Example:
        >>> show_seeds(1), show_seeds(3)
        ('1 seed', '3 seeds')
    """
    return "1 seed" if count == 1 else f"{count} seeds"
