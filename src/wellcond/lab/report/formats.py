"""How statistics are printed, everywhere alike."""

from __future__ import annotations

import math
from collections import Counter

from wellcond.lab.report.run_record import Metric
from wellcond.lab.report.statistics import Interval, LogSummary
from wellcond.lab.report.values import INFINITE, MISSING, show
from wellcond.lab.report.verdicts import Verdict

PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


def show_counts(outcomes: Counter[str]) -> str:
    """Runs in means, and the others by name, with the share of runs that diverged among those that ended.

    Example:
        >>> show_counts(Counter({"finished": 2, "diverged": 1}))
        '2 + 1 diverged (33 %)'
    """
    others = [f"{outcomes[name]} {name}" for name in ("diverged", "failed", "partial") if outcomes[name]]
    if outcomes["diverged"]:
        others[0] += f" ({show_share(outcomes['diverged'] / (outcomes['finished'] + outcomes['diverged']))})"
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


def show_share(share: float) -> str:
    """A share in whole percent, never 0 for what is there.

    Example:
        >>> show_share(0.25), show_share(0.001)
        ('25 %', '< 1 %')
    """
    return "< 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def show_kappa(summary: LogSummary, *, interval: bool = False) -> str:
    """A mean of condition numbers, and the share of infinite ones, which are in no mean."""
    if not summary.finite:
        return INFINITE if summary.infinite else MISSING
    shown = show(summary.geometric_mean)
    if interval and summary.interval is not None:
        shown += f" [{show(summary.interval[0])}, {show(summary.interval[1])}]"
    return shown + (f" ({INFINITE} in {show_share(summary.infinite_share)})" if summary.infinite else "")


def show_verdict(verdict: Verdict | None, metric: Metric) -> str:
    """One or a few words."""
    if verdict is None:
        return MISSING
    if verdict.kind == "equal":
        return f"equal: {verdict.reason}" if verdict.reason else f"equal within {metric.show(verdict.margin)}"
    small = verdict.kind in ("better", "worse") and verdict.within_margin
    return f"{verdict.kind}, by less than {metric.show(verdict.margin)}" if small else verdict.kind
