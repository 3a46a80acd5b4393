"""Statistics as the columns of a CSV file: plain numbers in the units that are shown, NaN where there is none."""

from __future__ import annotations

import math

from wellcond.lab.report.run_record import Metric
from wellcond.lab.report.statistics import Interval, LogSummary, PairedDifference, Summary
from wellcond.lab.report.table import Value

Values = dict[str, Value]


def interval_values(interval: Interval | None, scale: float = 1.0, prefix: str = "") -> Values:
    """Both ends of an interval.

    Example:
        >>> interval_values((0.01, 0.02), 100)
        {'low': 1.0, 'high': 2.0}
    """
    low, high = interval or (math.nan, math.nan)
    return {f"{prefix}low": low * scale, f"{prefix}high": high * scale}


def summary_values(summary: Summary, metric: Metric) -> Values:
    """Mean and standard deviation over seeds."""
    return {"metric": metric.label, "n": summary.count, "mean": summary.mean * metric.scale,
            "sd": summary.std * metric.scale}  # fmt: skip


def difference_values(difference: PairedDifference | None, metric: Metric) -> Values:
    """A paired difference with its 95 % interval; empty of a method without pairs."""
    if difference is None or not difference.count:
        return {"pairs": 0, "difference": None, "difference_sd": None, "low": None, "high": None, "relative": None,
                "p": None, "p_holm": None}  # fmt: skip
    return {
        "pairs": difference.count,
        "difference": difference.mean * metric.scale,
        "difference_sd": difference.std * metric.scale,
        **interval_values(difference.interval, metric.scale),
        "relative": difference.relative,
        "p": difference.p,
        "p_holm": difference.p_holm,
    }


def kappa_values(summary: LogSummary, name: str) -> Values:
    """A geometric mean with its 95 % interval and the share of infinite values, which are in no mean."""
    mean = summary.geometric_mean if summary.finite else math.inf if summary.infinite else math.nan
    return {name: mean, **interval_values(summary.interval, prefix=f"{name}_"),
            f"{name}_infinite_share": summary.infinite_share}  # fmt: skip
