"""What paired differences decide: power, verdicts with a margin of equality, exact tests for counts.

Every function works on differences that are paired by seed, of which positive is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import nctdtr, stdtr, stdtrit  # scipy.stats takes seconds to import

from wellcond.lab.report.records import Metric
from wellcond.lab.report.statistics import FEWEST_SEEDS, PairedDifference, sample_std
from wellcond.lab.report.table import MISSING, Cell

ALPHA = 0.05
POWER = 0.8
MOST_SUMS = 2**20
_CLOSE = 1e-6
"""Sums that differ by less, in units of the largest difference, are the same."""

Kind = Literal["better", "worse", "equal", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """What one difference decides."""

    kind: Kind
    margin: float
    """A difference below it counts as none; NaN where there is no margin."""
    p_equal: float | None
    """Larger p of the two one-sided tests against the margin; None where they are not defined."""
    reason: str = ""
    """Why there is no other verdict, or what limits it; may be empty."""

    def cell(self, metric: Metric) -> Cell:
        """One or a few words."""
        shown: str = self.kind
        if self.kind == "equal":
            shown = f"equal: {self.reason}" if self.reason else f"equal within {metric.show(self.margin)}"
        elif self.kind in ("better", "worse") and self.p_equal is not None and self.p_equal < ALPHA:
            shown += f", by less than {metric.show(self.margin)}"
        return shown, {"verdict": self.kind}


NO_VERDICT: Cell = (MISSING, {"verdict": ""})


def smallest_detectable(std: float, n: int) -> float:
    """The smallest true paired difference that the two-sided t test over `n` pairs shows at `ALPHA` with `POWER`.

    Exact, by the noncentral t distribution, given the standard deviation of the paired differences; NaN below three
    pairs, or where the differences have no spread.
    """
    if n < FEWEST_SEEDS or not 0 < std < math.inf:
        return math.nan
    critical, low, high = float(stdtrit(n - 1, 1 - ALPHA / 2)), 0.0, 10.0  # three pairs need most: 5.7 standard errors
    while high - low > 1e-9 * high:
        effect = (low + high) / 2
        # nctdtr is inaccurate far below its centre, where the probability of the wrong sign is nothing anyway.
        wrong_sign = float(nctdtr(n - 1, effect, -critical)) if effect < 5 else 0.0
        found = 1.0 - float(nctdtr(n - 1, effect, critical)) + wrong_sign
        low, high = (effect, high) if found < POWER else (low, effect)
    return std * high / math.sqrt(n)


def equality_p(values: Sequence[float], margin: float) -> float | None:
    """Two one-sided paired t tests that the mean difference lies inside ± `margin`: the larger p of the two.

    Returns: None below three pairs, without spread, or without a positive margin.
    """
    std = sample_std(values)
    if len(values) < FEWEST_SEEDS or not std > 0 or not margin > 0:
        return None
    error, mean = std / math.sqrt(len(values)), float(np.mean(values))
    return float(stdtr(len(values) - 1, (abs(mean) - margin) / error))


def sign_flip_p(values: Sequence[float]) -> float | None:
    """Two-sided p of the exact permutation test on paired differences: all 2^n flips of sign.

    It assumes nothing but that the two methods could have changed places, so it suits counts such as epochs. With `n`
    differences that are not zero, p is at least 2 / 2^n: six are needed to come below 0.05.

    Returns: None where no difference is other than zero.

    Raises: ValueError for so many different values that the flips cannot be counted (about 20 and more).
    """
    if not any(values):
        return None
    sums, shares = _flipped_sums(values)
    return float(shares[np.abs(sums) >= abs(math.fsum(values)) - _CLOSE * max(map(abs, values))].sum())


def sign_flip_equality_p(values: Sequence[float], margin: float) -> float:
    """The counterpart of `equality_p` for counts: the larger p of two one-sided exact tests against ± `margin`.

    Each flips the signs of the differences from one end of the margin, which assumes that they are symmetric about
    their centre. With `n` differences p is at least 1 / 2^n: five are needed to come below 0.05.
    """
    tails = []
    for sign in (1, -1):
        shifted = [sign * value - margin for value in values]  # all negative if the differences are below the margin
        sums, shares = _flipped_sums(shifted)
        tails.append(float(shares[sums <= math.fsum(shifted) + _CLOSE * max(map(abs, shifted))].sum()))
    return max(tails)


def _flipped_sums(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Every sum that flips of sign can give, and the share of the flips that gives it."""
    sizes = np.abs(np.asarray(values, dtype=float))
    sizes = sizes[sizes > 0]
    unit = float(sizes.max(initial=0.0)) or 1.0
    sums: np.ndarray = np.zeros(1)
    counts: np.ndarray = np.ones(1)
    for size in sizes / unit:
        both = np.concatenate([sums - size, sums + size]).round(9)
        sums, places = np.unique(both, return_inverse=True)
        counts = np.bincount(places, weights=np.concatenate([counts, counts]))
        if len(sums) > MOST_SUMS:
            raise ValueError(f"expected at most {MOST_SUMS} different sums, found more with {len(sizes)} differences")
    return sums * unit, counts / counts.sum()


def judge(
    difference: PairedDifference, margin: float = math.nan, *, diverged: int = 0, baseline_diverged: int = 0
) -> Verdict:
    """Better, worse, equal within a margin, or undecided.

    Better and worse need p below 0.05 after Holm's correction over the question, which is every pair against one
    baseline on one metric. Equal needs both one-sided tests at 5 %. Differences that are zero in every pair are equal
    without a test. Runs that diverged are in no pair, so a side that lost runs cannot come out as better or equal.

    The margin is in stored units, such as half of a paper's gain; NaN for none.
    """
    values = list(difference.values.values())
    p_equal = equality_p(values, margin)
    kind: Kind = "undecided"
    reason = ""
    if difference.count < FEWEST_SEEDS:
        reason = f"fewer than {FEWEST_SEEDS} pairs"
    elif difference.p_holm is not None and difference.p_holm < ALPHA:
        kind = "better" if difference.mean > 0 else "worse"
    elif not any(values):
        kind, reason = "equal", "tied in every seed"
    elif difference.without_spread:
        reason = "all differences are equal, so t is not defined"
    elif p_equal is not None and p_equal < ALPHA:
        kind = "equal"
    if diverged and kind in ("better", "equal"):
        kind, reason = "undecided", f"{kind} in the runs that survived, but {diverged} diverged"
    elif baseline_diverged and kind in ("worse", "equal"):
        reason = f"{kind} where both survived, but {baseline_diverged} of the baseline diverged"
        kind = "undecided"
    return Verdict(kind, margin, p_equal, reason)


def typical_std(differences: Sequence[PairedDifference]) -> float:
    """Standard deviation of paired differences, pooled over methods; NaN where none has a spread."""
    known = [(d.std**2, d.count - 1) for d in differences if d.count > 1 and d.std > 0]
    weight = sum(freedom for _, freedom in known)
    return math.sqrt(math.fsum(v * f for v, f in known) / weight) if weight else math.nan
