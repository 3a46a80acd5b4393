"""Statistics of a comparison: paired by seed, positive is better, and silent where there are too few seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtr, stdtrit  # scipy.stats takes seconds to import

from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.records import Metric
from wellcond.lab.report.table import INFINITE, MISSING, PLUS_MINUS, Values, show, show_share

LEVEL = 0.95
FEWEST_SEEDS = 3
FEWEST_FOR_BOOTSTRAP = 5
NUM_DRAWS = 10_000
REQUIRED = (
    (("conditioned", ""), ("mimetic", "")),
    (("conditioned", ""), ("gaussian", "")),
    (("default", "identity"), ("default", "")),
    (("default", "polar"), ("default", "identity")),
)
"""First minus second, each as (init, condition): what the papers' claims rest on."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Summary:
    """Values of one method, one per seed."""

    values: dict[int, float]

    @property
    def count(self) -> int:
        """Number of seeds, or of pairs of them."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Arithmetic mean; NaN of nothing."""
        return math.fsum(self.values.values()) / self.count if self.values else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation, divisor n - 1; NaN below two values."""
        return sample_std(list(self.values.values()))

    def show(self, metric: Metric) -> str:
        """Mean and standard deviation, the latter where there is one."""
        return metric.show(self.mean) + ("" if math.isnan(self.std) else f" {PLUS_MINUS} {metric.show(self.std)}")

    def columns(self, metric: Metric) -> Values:
        """The numbers for programs."""
        scale = metric.scale
        return {"metric": metric.label, "n": self.count, "mean": self.mean * scale, "sd": self.std * scale}


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
    def interval(self) -> Interval | None:
        """95 % interval of the mean by the t distribution; None below three seeds."""
        return t_interval(list(self.values.values()))

    @property
    def bootstrap(self) -> Interval | None:
        """95 % percentile interval of the mean over 10,000 draws with a fixed seed; None below five seeds."""
        if self.count < FEWEST_FOR_BOOTSTRAP:
            return None
        chosen = np.random.default_rng(0).integers(0, self.count, (NUM_DRAWS, self.count))
        means = np.array(list(self.values.values()))[chosen].mean(1)
        low, high = np.quantile(means, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
        return float(low), float(high)

    @property
    def p(self) -> float | None:
        """Two-sided paired t test; None below three seeds, or where all differences are equal."""
        if self.count < FEWEST_SEEDS or self.without_spread:
            return None
        mean = float(np.mean(list(self.values.values())))
        return float(2 * stdtr(self.count - 1, -abs(mean) / self.std * math.sqrt(self.count)))

    @property
    def without_spread(self) -> bool:
        """All differences are equal: the t test has nothing to divide by."""
        return self.count >= FEWEST_SEEDS and self.std == 0

    def show(self, metric: Metric) -> str:
        """Mean and interval, the latter where there is one."""
        return metric.show(self.mean, sign=True) + (f" {show_interval(self.interval, metric)}" if self.interval else "")

    def columns(self, metric: Metric) -> Values:
        """The numbers for programs; empty without pairs."""
        found: Values = {
            "difference": self.mean * metric.scale, "difference_sd": self.std * metric.scale,
            **interval_values(self.interval, metric.scale), "relative": self.relative, "p": self.p,
            "p_holm": self.p_holm,
        }  # fmt: skip
        return {"pairs": self.count} | (found if self.count else dict.fromkeys(found))


NO_PAIRS = PairedDifference({}, "", "", math.nan)


@dataclass(frozen=True)
class LogSummary:
    """Condition numbers on log10: means are geometric, and what is not finite is counted."""

    geometric_mean: float
    interval: Interval | None
    """95 % interval of the geometric mean; None below three finite values."""
    finite: int
    total: int
    infinite: int = 0

    @property
    def infinite_share(self) -> float:
        """Share of the known values that are infinite; 0 of nothing."""
        return self.infinite / (self.finite + self.infinite) if self.infinite else 0.0

    def show(self, *, interval: bool = False) -> str:
        """The mean, and the share of infinite values, which are in no mean."""
        if not self.finite:
            return INFINITE if self.infinite else MISSING
        ends = f" [{show(self.interval[0])}, {show(self.interval[1])}]" if interval and self.interval else ""
        share = f" ({INFINITE} in {show_share(self.infinite_share)})" if self.infinite else ""
        return f"{show(self.geometric_mean)}{ends}{share}"


def sample_std(values: Sequence[float]) -> float:
    """Sample standard deviation; exactly zero where values differ by rounding only."""
    if len(values) < 2:
        return math.nan
    spread = float(np.std(np.asarray(values, dtype=float), ddof=1))
    # Differences such as 0.93 - 0.90 and 0.53 - 0.50 are equal but for rounding, and would give p = 1e-30.
    return 0.0 if spread <= 1e-12 * max(map(abs, values)) else spread


def t_interval(values: Sequence[float]) -> Interval | None:
    """95 % interval of the mean by the t distribution; None below three values."""
    if len(values) < FEWEST_SEEDS:
        return None
    mean, half = float(np.mean(values)), sample_std(values) / math.sqrt(len(values))
    half *= float(stdtrit(len(values) - 1, 0.5 + LEVEL / 2))
    return mean - half, mean + half


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction; None stays None and does not count as a test."""
    order = sorted((p, at) for at, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, at) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        corrected[at] = highest
    return corrected


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


def differences_of(
    comparison: Comparison, summaries: Mapping[str, Summary], pairs: Sequence[tuple[str, str]]
) -> list[PairedDifference]:
    """First minus second of every pair, corrected over the pairs."""
    better = comparison.metric.higher_is_better
    return correct(
        compare_paired(a, summaries[a].values, b, summaries[b].values, higher_is_better=better) for a, b in pairs
    )


def differences_to_baseline(comparison: Comparison, summaries: Mapping[str, Summary]) -> dict[str, PairedDifference]:
    """Every method minus the baseline, corrected over the methods."""
    pairs = [(method, comparison.baseline) for method in comparison.methods if method != comparison.baseline]
    return {difference.method: difference for difference in differences_of(comparison, summaries, pairs)}


def required_differences(
    comparison: Comparison, summaries: Mapping[str, Summary], to_baseline: Mapping[str, PairedDifference]
) -> list[PairedDifference]:
    """Differences of the required pairs, corrected over the pairs with the same second method.

    Those to the comparison's baseline are the ones that are there already.
    """
    pairs = required_pairs(comparison)
    found = {(method, comparison.baseline): difference for method, difference in to_baseline.items()}
    for second in {second for _, second in pairs if second != comparison.baseline}:
        same = [pair for pair in pairs if pair[1] == second]
        found |= dict(zip(same, differences_of(comparison, summaries, same), strict=True))
    return [found[pair] for pair in pairs]


def required_pairs(comparison: Comparison) -> list[tuple[str, str]]:
    """The comparisons that must be printed whenever both methods are there; keys made for a mask against plain ones.

    Around the attention both must be the same: tokens, the start of the rest, and set fields but for the rate.
    """
    kinds, around, tied = {}, {}, set()
    for run in comparison.runs:
        spec = run.part("method_spec")
        options, fields = spec.get("init_options") or {}, spec.get("set") or {}
        kinds[run.method] = str(spec.get("init") or "default"), str(spec.get("condition") or "")
        rest = {field: value for field, value in fields.items() if field != "optimizer.lr"}
        around[run.method] = spec.get("tokens") or {}, "library" in options, rest
        tied |= {run.method} if "keys" in options else set()
    present = [method for method in comparison.methods if method in kinds]
    alike = [(a, b) for a in present for b in present if around[a] == around[b]]
    claims = [pair for wanted in REQUIRED for pair in alike if (kinds[pair[0]], kinds[pair[1]]) == wanted]
    return claims + [(a, b) for a, b in alike if a in tied and b not in tied and kinds[a] == kinds[b]]


def summarise_logs(values: Iterable[float]) -> LogSummary:
    """Geometric mean of the finite values among some condition numbers."""
    listed = list(values)
    logs = [math.log10(value) for value in listed if math.isfinite(value) and value > 0]
    mean = 10 ** (math.fsum(logs) / len(logs)) if logs else math.nan
    around = t_interval(logs)
    interval = None if around is None else (10 ** around[0], 10 ** around[1])
    return LogSummary(mean, interval, len(logs), len(listed), sum(value == math.inf for value in listed))


def show_interval(interval: Interval | None, metric: Metric) -> str:
    """An interval of a difference."""
    return MISSING if interval is None else f"[{', '.join(metric.show(end, sign=True) for end in interval)}]"


def show_p(p: float | None) -> str:
    """A p value; never zero."""
    if p is None:
        return MISSING
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"


def interval_values(interval: Interval | None, scale: float = 1.0, prefix: str = "") -> Values:
    """Both ends of an interval, for programs."""
    low, high = interval or (math.nan, math.nan)
    return {f"{prefix}low": low * scale, f"{prefix}high": high * scale}
