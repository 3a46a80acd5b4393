"""Statistics of values by seed: means, intervals, paired differences (positive is better), power and verdicts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
from scipy.special import nctdtr, stdtr, stdtrit  # scipy.stats takes seconds to import

from wellcond.lab.records import Metric
from wellcond.lab.report.table import INFINITE, MISSING, Cell, Values, show, show_seeds, show_share

LEVEL = 0.95
FEWEST_SEEDS = 3
ALPHA = 0.05
POWER = 0.8
MOST_SUMS = 2**20

Interval = tuple[float, float]
Kind = Literal["better", "worse", "equal", "undecided"]


@dataclass(frozen=True)
class Summary:
    """Values of one method, one per seed."""

    values: dict[int, float]

    @property
    def count(self) -> int:
        """Number of seeds, or of pairs of them."""
        return len(self.values)

    @property
    def sample(self) -> np.ndarray:
        """The values alone."""
        return np.array(list(self.values.values()))

    @property
    def mean(self) -> float:
        """Arithmetic mean; NaN of nothing."""
        return math.fsum(self.values.values()) / self.count if self.values else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation; exactly zero where values differ by rounding only, NaN below two values."""
        if self.count < 2:
            return math.nan
        spread, values = float(np.std(self.sample, ddof=1)), self.values.values()
        # Differences such as 0.93 - 0.90 and 0.53 - 0.50 are equal but for rounding, and would give p = 1e-30.
        return 0.0 if spread <= 1e-12 * max(map(abs, values)) else spread

    @property
    def interval(self) -> Interval | None:
        """95 % interval of the mean by the t distribution; None below three values."""
        if self.count < FEWEST_SEEDS:
            return None
        mean, error = float(self.sample.mean()), self.std / math.sqrt(self.count)
        half = error * float(stdtrit(self.count - 1, 0.5 + LEVEL / 2))
        return mean - half, mean + half

    def cell(self, metric: Metric) -> tuple[str, Values]:
        """Mean and standard deviation, the latter where there is one; and the numbers for programs."""
        mean, std = self.mean * metric.scale, self.std * metric.scale
        shown = metric.show(self.mean) + ("" if math.isnan(std) else f" ± {metric.show(self.std)}")
        return shown, {"metric": metric.label, "n": self.count, "mean": mean, "sd": std}


@dataclass(frozen=True)
class PairedDifference(Summary):
    """One method minus another over the seeds both finished; positive means that the first is better."""

    method: str
    baseline: str
    relative: float
    """Mean difference over the size of the baseline's mean."""
    p_holm: float | None = None
    """`p` corrected over its question: all pairs with the same baseline and metric."""

    @property
    def bootstrap(self) -> Interval | None:
        """95 % percentile interval of the mean over 10,000 draws with a fixed seed; None below five seeds."""
        if self.count < 5:
            return None
        chosen = np.random.default_rng(0).integers(0, self.count, (10_000, self.count))
        low, high = np.quantile(self.sample[chosen].mean(1), [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
        return float(low), float(high)

    @property
    def p(self) -> float | None:
        """Two-sided paired t test; None below three seeds, or where all differences are equal."""
        if self.count < FEWEST_SEEDS or self.std == 0:
            return None
        return float(2 * stdtr(self.count - 1, -abs(self.sample.mean()) / self.std * math.sqrt(self.count)))

    def p_equal(self, margin: float) -> float:
        """Larger p of two one-sided paired t tests that the mean lies inside ± `margin`; NaN if not defined."""
        if self.count < FEWEST_SEEDS or not self.std > 0 or not margin > 0:
            return math.nan
        return float(stdtr(self.count - 1, (abs(self.sample.mean()) - margin) / (self.std / math.sqrt(self.count))))

    def as_change(self, metric: Metric) -> PairedDifference:
        """The first minus the second as a reader expects it: a fall of perplexity is negative."""
        if metric.higher_is_better:
            return self
        return replace(self, values={seed: -value for seed, value in self.values.items()}, relative=-self.relative)

    def cell(self, metric: Metric) -> tuple[str, Values]:
        """Mean and interval, the latter where there is one; and the numbers for programs."""
        shown, (ends, numbers) = metric.show(self.mean, sign=True), interval_cell(self.interval, metric)
        return f"{shown} {ends}" if self.interval else shown, {
            "pairs": self.count,
            "difference": self.mean * metric.scale,
            "difference_sd": self.std * metric.scale,
            **numbers,
            "relative": self.relative,
            "p": self.p,
            "p_holm": self.p_holm,
        }


NO_PAIRS = PairedDifference({}, "", "", math.nan)


class LogSummary(NamedTuple):
    """Condition numbers on log10: means are geometric, and what is not finite is counted."""

    geometric_mean: float
    """Of the finite values; infinite if all are."""
    interval: Interval | None
    """95 % interval of the geometric mean; None below three finite values."""
    finite: int
    total: int
    infinite_share: float
    """Of the known values."""

    def show(self, mean: str) -> str:
        """A mean, and the share of infinite values, which are in none."""
        share = f" ({INFINITE} in {show_share(self.infinite_share)})" if self.infinite_share else ""
        return f"{mean}{share}" if self.finite else INFINITE if self.infinite_share else MISSING

    def cell(self, name: str, *, interval: bool = False) -> Cell:
        """The geometric mean and, if wanted, its interval."""
        mean, (low, high) = self.geometric_mean, self.interval or (math.nan, math.nan)
        shown = show(mean) + (f" [{show(low)}, {show(high)}]" if interval and self.interval else "")
        numbers = {f"{name}_low": low, f"{name}_high": high} if interval else {}
        return self.show(shown), {name: mean, **numbers, f"{name}_infinite_share": self.infinite_share}


class Verdict(NamedTuple):
    """What one difference decides, and why not more; the reason may be empty."""

    kind: Kind
    reason: str


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction; None stays None and does not count as a test."""
    order = sorted((p, at) for at, p in enumerate(p_values) if p is not None)
    scaled = (min(1.0, (len(order) - rank) * p) for rank, (p, _) in enumerate(order))
    corrected = {at: p for (_, at), p in zip(order, accumulate(scaled, max), strict=True)}
    return [corrected.get(at) for at in range(len(p_values))]


def compare_paired(
    method: str, values: Mapping[int, float], baseline: str, base: Mapping[int, float], *, higher_is_better: bool
) -> PairedDifference:
    """Difference of two methods over the seeds both have."""
    sign = 1.0 if higher_is_better else -1.0
    shared = sorted(set(values) & set(base))
    differences = {seed: sign * (values[seed] - base[seed]) for seed in shared}
    size = abs(Summary({seed: base[seed] for seed in shared}).mean)
    return PairedDifference(differences, method, baseline, Summary(differences).mean / size if size else math.nan)


def correct(differences: Iterable[PairedDifference]) -> list[PairedDifference]:
    """The same differences with Holm's correction over all of them."""
    listed = list(differences)
    return [replace(d, p_holm=p) for d, p in zip(listed, holm([d.p for d in listed]), strict=True)]


def smallest_detectable(std: float, n: int) -> float:
    """The smallest true paired difference that the two-sided t test over `n` pairs shows at `ALPHA` with `POWER`.

    Exact, by the noncentral t distribution; NaN below three pairs, or where the differences have no spread.
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


def sign_flip_p(values: Sequence[float]) -> float | None:
    """Two-sided p of the exact permutation test on paired differences, all 2^n flips of sign; None if all are zero.

    It assumes nothing but that the two methods could have changed places, so it suits counts such as epochs. With `n`
    differences that are not zero, p is at least 2 / 2^n: six are needed to come below 0.05.
    """
    sign = -1 if math.fsum(values) > 0 else 1
    return min(1.0, 2 * _lower_flips([sign * value for value in values])) if any(values) else None


def sign_flip_equality_p(values: Sequence[float], margin: float) -> float:
    """The counterpart of `p_equal` for counts: the larger p of two one-sided exact tests against ± `margin`.

    Each flips the signs of the differences from one end of the margin, which assumes that they are symmetric about
    their centre. With `n` differences p is at least 1 / 2^n: five are needed to come below 0.05.
    """
    return max(_lower_flips([sign * value - margin for value in values]) for sign in (1, -1))


def _lower_flips(values: Sequence[float]) -> float:
    """Share of all flips of sign that give a sum as low as that of the values."""
    unit = max(map(abs, values)) or 1.0
    sums: np.ndarray = np.zeros(1)
    counts: np.ndarray = np.ones(1)
    for size in [abs(value) / unit for value in values if value]:
        both = np.concatenate([sums - size, sums + size]).round(9)
        sums, places = np.unique(both, return_inverse=True)
        counts = np.bincount(places, weights=np.concatenate([counts, counts]))
        if len(sums) > MOST_SUMS:
            raise ValueError(f"expected at most {MOST_SUMS} different sums, found more with {len(values)} differences")
    return float(counts[sums <= math.fsum(values) / unit + 1e-6].sum() / counts.sum())


def judge(
    difference: PairedDifference, margin: float = math.nan, *, diverged: int = 0, baseline_diverged: int = 0
) -> Verdict:
    """Better, worse, equal within a margin (in stored units; NaN for none), or undecided.

    Better and worse need p below 0.05 after Holm's correction. Equal needs both one-sided tests at 5 %, or differences
    that are all zero. Runs that diverged are in no pair, so a side that lost runs cannot come out as better or equal.
    """
    kind: Kind = "undecided"
    reason = ""
    if difference.count < FEWEST_SEEDS:
        reason = f"fewer than {FEWEST_SEEDS} pairs"
    elif difference.p_holm is not None and difference.p_holm < ALPHA:
        kind = "better" if difference.mean > 0 else "worse"
    elif not any(difference.values.values()):
        kind, reason = "equal", "tied in every seed"
    elif difference.std == 0:
        reason = "all differences are equal, so t is not defined"
    elif difference.p_equal(margin) < ALPHA:
        kind = "equal"
    if diverged and kind in ("better", "equal"):
        kind, reason = "undecided", f"{kind} in the runs that survived, but {diverged} diverged"
    elif baseline_diverged and kind in ("worse", "equal"):
        kind, reason = "undecided", f"{kind} where both survived, but {baseline_diverged} of the baseline diverged"
    return Verdict(kind, reason)


def describe_power(metric: Metric, differences: Collection[PairedDifference], seeds: int | None = None) -> list[str]:
    """Which difference `seeds`, by default as many as there are pairs, can show, by the spread of the runs so far."""
    pairs, spread = max((d.count for d in differences), default=0), [d for d in differences if d.std > 0]
    freedom = sum(d.count - 1 for d in spread)
    pooled = math.sqrt(math.fsum(d.std**2 * (d.count - 1) for d in spread) / freedom) if spread else math.nan
    count = pairs if seeds is None else seeds
    smallest = smallest_detectable(pooled, count)
    if math.isnan(smallest):
        return []
    return [
        f"{show_seeds(count)} can show a true difference of {metric.show(smallest)}{metric.unit} (power "
        f"{show_share(POWER)}, level {ALPHA}, one comparison; paired differences here have a standard deviation of "
        f"{metric.show(pooled)}{metric.unit} over {show_seeds(pairs)})."
    ]


def summarise_logs(values: Iterable[float]) -> LogSummary:
    """Summary of some condition numbers."""
    listed = list(values)
    logs = [math.log10(value) for value in listed if math.isfinite(value) and value > 0]
    infinite, around = sum(value == math.inf for value in listed), Summary(dict(enumerate(logs))).interval
    mean = 10 ** (math.fsum(logs) / len(logs)) if logs else math.inf if infinite else math.nan
    interval = None if around is None else (10 ** around[0], 10 ** around[1])
    return LogSummary(mean, interval, len(logs), len(listed), infinite / max(infinite + len(logs), 1))


def show_p(p: float | None) -> str:
    """A p value; never zero."""
    if p is None:
        return MISSING
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"


def interval_cell(interval: Interval | None, metric: Metric, prefix: str = "") -> tuple[str, Values]:
    """An interval of a difference, and both ends for programs."""
    low, high = interval or (math.nan, math.nan)
    shown = f"[{metric.show(low, sign=True)}, {metric.show(high, sign=True)}]" if interval else MISSING
    return shown, {f"{prefix}low": low * metric.scale, f"{prefix}high": high * metric.scale}
