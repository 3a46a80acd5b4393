"""How statistics are printed, everywhere alike."""

from __future__ import annotations

import math
from collections import Counter

from wellcond.report.run_record import Metric
from wellcond.report.statistics import Interval
from wellcond.report.values import MISSING

PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


def show_counts(outcomes: Counter[str]) -> str:
    """Runs in means, and the others by name.

    Example:
        >>> show_counts(Counter({"finished": 2, "diverged": 1}))
        '2 + 1 diverged'
    """
    others = [f"{outcomes[name]} {name}" for name in ("diverged", "failed", "partial") if outcomes[name]]
    return " + ".join([str(outcomes["finished"]), *others])


def show_interval(interval: Interval | None, metric: Metric) -> str:
    """An interval of a difference."""
    if interval is None:
        return MISSING
    return f"[{metric.show(interval[0], sign=True)}, {metric.show(interval[1], sign=True)}]"


def show_p(p: float | None) -> str:
    """A p value; never zero."""
    if p is None:
        return MISSING
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"


def show_mean(mean: float, std: float, metric: Metric) -> str:
    """Mean and standard deviation, the latter where there is one."""
    if math.isnan(mean):
        return MISSING
    return metric.show(mean) + ("" if math.isnan(std) else f" {PLUS_MINUS} {metric.show(std)}")


def show_relative(share: float) -> str:
    """A difference as a share of the baseline."""
    return MISSING if math.isnan(share) else f"{share:+.1%}"
