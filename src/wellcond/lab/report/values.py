"""Numbers of stored records, as printed and plotted; they may be text ("inf", "nan"), since JSON has neither."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

MISSING = "\N{EN DASH}"
INFINITE = "\N{INFINITY}"
LONGEST_LABEL = 22


def number(value: Any) -> float:
    """A stored number; NaN where there is none.

    Example:
        >>> number("inf"), number(2), number(None)
        (inf, 2.0, nan)
    """
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError):
        return math.nan


def show(value: Any, digits: int = 3) -> str:
    """A number at a glance."""
    x = number(value)
    if math.isnan(x):
        return MISSING
    return f"{x:.{digits}g}".replace("inf", INFINITE)


def plain_number(value: float) -> str:
    """Shortest text that reads back as the same number; empty where there is none.

    Example:
        >>> plain_number(2.0), plain_number(0.1), plain_number(math.nan)
        ('2', '0.1', '')
    """
    if math.isnan(value):
        return ""
    return str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 1e15 else repr(float(value))


def finite_mean(values: Iterable[float]) -> float:
    """Mean of the finite values; NaN if there is none."""
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else math.nan


def log10(value: Any) -> float:
    """Decimal logarithm; -inf of zero, NaN of what has none."""
    x = number(value)
    if math.isnan(x) or x < 0:
        return math.nan
    return -math.inf if x == 0 else math.log10(x)


def show_seeds(count: int) -> str:
    """How many seeds there are.

    Example:
        >>> show_seeds(1), show_seeds(3)
        ('1 seed', '3 seeds')
    """
    return "1 seed" if count == 1 else f"{count} seeds"


def cut(label: str, longest: int = LONGEST_LABEL) -> str:
    """A label short enough for an axis; the middle goes, since methods often differ at their ends only.

    Example:
        >>> cut("conditioned+identity(lam=10)", 18)
        'conditio…(lam=10)'
    """
    half = (longest - 1) // 2
    return label if len(label) <= longest else f"{label[:half]}…{label[-half:]}"
