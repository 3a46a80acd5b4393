"""Epochs-to-match: how early a method is as good as the baseline is at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.run_record import Run
from wellcond.lab.report.statistics import holm
from wellcond.lab.report.values import MISSING, number, show
from wellcond.lab.report.verdicts import sign_flip_p

SMOOTH = 3
FEWEST_FOR_EXACT = 6
"""With five differences the smallest p of all flips of sign is 2 / 2^5 = 0.0625."""


@dataclass(frozen=True)
class Match:
    """First evaluation at which a curve reaches a target; censored (None) if it never does."""

    epoch: float | None
    step: int | None
    seconds: float | None
    """Time of training until then."""
    total_epochs: float
    total_steps: int

    @property
    def reached(self) -> bool:
        """Whether the target was reached."""
        return self.step is not None

    @property
    def saving(self) -> float | None:
        """1 - e / E; None if censored."""
        return None if self.step is None or not self.total_steps else 1.0 - self.step / self.total_steps


@dataclass(frozen=True)
class Matching:
    """Epochs-to-match of one method, paired by seed and in the papers' form."""

    method: str
    by_seed: dict[int, Match]
    """Target: the baseline's last metric of the same seed."""
    of_means: Match | None
    """Curve and target averaged over the seeds that both methods finished; None if there is none."""
    smooth: int

    @property
    def reached(self) -> list[Match]:
        """Seeds that are not censored."""
        return [match for match in self.by_seed.values() if match.reached]

    @property
    def censored(self) -> int:
        """Number of seeds that never reached their target."""
        return len(self.by_seed) - len(self.reached)

    def mean(self, what: str) -> float:
        """Mean of `epoch`, `step`, `seconds` or `saving` over the seeds that reached their target; NaN of none."""
        values = [number(getattr(match, what)) for match in self.reached]
        return math.fsum(values) / len(values) if values else math.nan

    def show(self, unit: str) -> str:
        """Mean over the seeds that reached the target, and how many did not.

        Args:
            unit: ``epoch`` or ``step``.
        """
        if not self.by_seed:
            return MISSING
        if not self.reached:
            return f"> {show(_total(next(iter(self.by_seed.values())), unit), 6)}"
        mean = show(self.mean(unit), 3 if unit == "epoch" else 6)
        return mean + (f" ({self.censored} of {len(self.by_seed)} never)" if self.censored else "")


@dataclass(frozen=True)
class MatchGain:
    """How much earlier than the baseline itself a method is as good as the baseline is at its end."""

    values: dict[int, float]
    """By seed, positive is earlier; a seed that never gets there counts as one unit later than the end."""
    never: int
    """Number of seeds that never get there."""
    p: float | None
    """Exact test over all flips of sign; None below six seeds, where it cannot decide, or without a difference."""
    p_holm: float | None
    """Corrected over the methods."""

    @property
    def mean(self) -> float:
        """Over the seeds; NaN where one never gets there, or there are none."""
        return math.nan if self.never or not self.values else math.fsum(self.values.values()) / len(self.values)

    def show(self) -> str:
        """The mean, or how many seeds never get there."""
        if self.never:
            return f"{MISSING} ({self.never} of {len(self.values)} never)"
        return MISSING if math.isnan(self.mean) else f"{self.mean:+.3g}" if self.mean else "0"


def match_gains(baseline: str, matchings: Mapping[str, Matching], unit: str) -> dict[str, MatchGain]:
    """Gains of all methods but the baseline over the count of the baseline itself, which a noisy curve makes early."""

    def count(match: Match) -> float:
        place = match.epoch if unit == "epoch" else match.step
        return _total(match, unit) + 1 if place is None else float(place)

    own = matchings[baseline].by_seed
    values = {
        method: {seed: count(own[seed]) - count(match) for seed, match in matching.by_seed.items() if seed in own}
        for method, matching in matchings.items()
        if method != baseline
    }
    tests = {
        method: sign_flip_p(list(gains.values())) if len(gains) >= FEWEST_FOR_EXACT else None
        for method, gains in values.items()
    }
    corrected = holm(list(tests.values()))
    return {
        method: MatchGain(gains, matchings[method].censored, tests[method], p)
        for (method, gains), p in zip(values.items(), corrected, strict=True)
    }


def _total(match: Match, unit: str) -> float:
    return match.total_epochs if unit == "epoch" else match.total_steps


def show_match(match: Match | None, unit: str) -> str:
    """One match in words: its epoch or step, or "> E" if censored."""
    if match is None:
        return MISSING
    if not match.reached:
        return f"> {show(_total(match, unit), 6)}"
    return show(match.epoch if unit == "epoch" else match.step, 6)


def match_unit(comparison: Comparison) -> str:
    """`epoch` where runs have at least two of them, else `step`."""
    totals = [number((run.record.get("progress") or {}).get("num_epochs")) for run in comparison.runs]
    return "epoch" if any(total >= 2 for total in totals) else "step"


def running_mean(values: Sequence[float], smooth: int) -> list[float]:
    """Mean of each value and the ones before it, `smooth` in all; NaN until there are as many.

    Example:
        >>> running_mean([1.0, 2.0, 6.0], 3)
        [nan, nan, 3.0]
    """
    return [
        math.fsum(values[at + 1 - smooth : at + 1]) / smooth if at + 1 >= smooth else math.nan
        for at in range(len(values))
    ]


def first_match(values: Sequence[float], target: float, *, higher_is_better: bool) -> int | None:
    """Index of the first value at least as good as the target; no interpolation. None if there is none.

    Example:
        >>> first_match([0.1, 0.5, 0.4, 0.6], 0.5, higher_is_better=True)
        1
    """
    for at, value in enumerate(values):
        if value >= target if higher_is_better else value <= target:
            return at
    return None


def match_method(comparison: Comparison, method: str, *, smooth: int = 1) -> Matching:
    """Epochs-to-match of a method against the baseline of its comparison.

    With `smooth` above one, curve and target are both running means: against an unsmoothed target the lag of a
    running mean would count as slowness. A diverged run is censored, even if it reached the target before; unfinished
    runs are left out.

    Args:
        comparison: the runs.
        method: label; the baseline itself is allowed, and on noisy curves it reaches its own last value early.
        smooth: evaluations in a running mean.
    """
    metric = comparison.metric
    baseline = comparison.finished(comparison.baseline)
    by_seed = {}
    for run in comparison.of(method):
        other = baseline.get(run.seed)
        if other is None or run.outcome not in ("finished", "diverged"):
            continue
        target = _smooth(_curve(other), smooth)
        if not target:
            continue
        curve = _smooth(_curve(run), smooth) if run.finished else []
        at = first_match(curve, target[-1], higher_is_better=metric.higher_is_better)
        by_seed[run.seed] = _match(run.evaluations, at, other.evaluations)
    return Matching(method, by_seed, _match_of_means(comparison, method, smooth), smooth)


def _curve(run: Run) -> list[float]:
    return [number(row.get(run.metric.name)) for row in run.evaluations]


def _smooth(curve: Sequence[float], smooth: int) -> list[float]:
    return list(curve) if smooth == 1 else running_mean(curve, min(smooth, max(len(curve), 1)))


def _match(rows: Sequence[dict[str, Any]], at: int | None, baseline: Sequence[dict[str, Any]]) -> Match:
    epochs, steps = number(baseline[-1].get("epoch")), int(baseline[-1]["step"])
    if at is None:
        return Match(None, None, None, epochs, steps)
    row = rows[at]
    return Match(number(row.get("epoch")), int(row["step"]), number(row.get("seconds")), epochs, steps)


def _match_of_means(comparison: Comparison, method: str, smooth: int) -> Match | None:
    runs, baseline = comparison.finished(method), comparison.finished(comparison.baseline)
    shared = sorted(set(runs) & set(baseline))
    rows = _mean_rows([runs[seed] for seed in shared])
    target = _mean_rows([baseline[seed] for seed in shared])
    if not rows or not target:
        return None
    curves = [_smooth([row["value"] for row in some], smooth) for some in (rows, target)]
    at = first_match(curves[0], curves[1][-1], higher_is_better=comparison.metric.higher_is_better)
    return _match(rows, at, target)


def _mean_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Evaluations averaged over runs, at the steps that all of them have."""
    if not runs:
        return []
    tables = [{int(row["step"]): row for row in run.evaluations} for run in runs]
    shared = sorted(set.intersection(*(set(table) for table in tables)))

    def mean(step: int, key: str) -> float:
        return math.fsum(number(table[step].get(key)) for table in tables) / len(tables)

    name = runs[0].metric.name
    return [
        {"step": step, "epoch": mean(step, "epoch"), "seconds": mean(step, "seconds"), "value": mean(step, name)}
        for step in shared
    ]
