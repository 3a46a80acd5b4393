"""Numbers of stored records, which may be text ("inf", "nan") since JSON has neither, as printed and as plotted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

MISSING = "\N{EN DASH}"
INFINITE = "\N{INFINITY}"
LONGEST_LABEL = 22
LARGEST_POWER = 307


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


def log_axis(values: Iterable[float], span: tuple[float, float] | None = None) -> tuple[float, float, dict[float, str]]:
    """Both ends of a logarithmic axis for some values or a fixed span, and its ticks with their labels.

    The axis covers at least half a decade, since it would zoom into the rounding of flat curves. Labels are plain
    text: an image takes ten times as long to draw formulas.
    """
    usable = [value for value in values if 0 < value < math.inf]
    low, high = span or (min(usable, default=1.0), max(usable, default=10.0))
    # In logarithms, since bounds come near the largest float: room at both ends, and never beyond it.
    bottom, top = math.log10(low), math.log10(high)
    room = max(0.04 * (top - bottom), 0.25 - (top - bottom) / 2)
    low, high = 10.0 ** max(bottom - room, -LARGEST_POWER), 10.0 ** min(top + room, LARGEST_POWER)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    width = math.log10(high) - math.log10(low)
    wide = width > 1.5
    factors = (1.0,) if wide else (1.0, 2.0, 5.0) if width > 0.7 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    every = max(1, math.ceil(len(decades) / 6)) if wide else 1
    ticks = [factor * 10.0**decade for decade in decades[::every] if decade < LARGEST_POWER for factor in factors]
    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    shown = {tick: f"10{str(round(math.log10(tick))).translate(raised)}" if wide else f"{tick:g}" for tick in ticks}
    return low, high, {tick: label for tick, label in shown.items() if low <= tick <= high}
