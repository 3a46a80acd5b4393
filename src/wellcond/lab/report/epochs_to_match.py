"""Epochs-to-match: how early a method is as good as the baseline is at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from wellcond.lab.records import Comparison, Run
from wellcond.lab.report.statistics import holm, sign_flip_p
from wellcond.lab.report.table import MISSING, Cell, finite_mean, number, show, show_known

SMOOTH = 3
FEWEST_FOR_EXACT = 6
"""With five differences the smallest p of all flips of sign is 2 / 2^5 = 0.0625."""


@dataclass(frozen=True)
class Match:
    """First evaluation at which a curve reaches a target, with the time of training until then; NaN if it does not."""

    total: Mapping[str, float]
    """Epochs and steps of the baseline's whole training."""
    epoch: float = math.nan
    step: float = math.nan
    seconds: float = math.nan

    @property
    def reached(self) -> bool:
        """Whether the target was reached."""
        return not math.isnan(self.step)

    @property
    def saving(self) -> float:
        """1 - e / E."""
        return 1.0 - self.step / self.total["step"] if self.total["step"] else math.nan

    def count(self, unit: str) -> float:
        """Epochs or steps; one more than the whole training if the target was never reached."""
        return float(getattr(self, unit)) if self.reached else self.total[unit] + 1


@dataclass(frozen=True)
class Matching:
    """Epochs-to-match of one method, paired by seed and in the papers' form."""

    by_seed: dict[int, Match]
    """Target: the baseline's last metric of the same seed."""
    of_means: Match | None
    """Curve and target averaged over the seeds that both methods finished; None if there is none."""
    gains: Mapping[int, float] = field(default_factory=dict)
    """How much earlier than the baseline itself, by seed; one that never gets there is one unit later than the end."""
    p: float | None = None
    """Of the gains, by all flips of sign; None below six seeds, where it cannot decide, or without a difference."""
    p_holm: float | None = None
    """Corrected over the methods."""

    @property
    def censored(self) -> int:
        """Number of seeds that never reached their target."""
        return sum(not match.reached for match in self.by_seed.values())

    def mean(self, what: str) -> float:
        """Mean of `epoch`, `step`, `seconds` or `saving` over the seeds that reached their target; NaN of none."""
        return finite_mean(getattr(match, what) for match in self.by_seed.values())

    def show(self, unit: str) -> str:
        """Mean `epoch` or `step` over the seeds that reached the target, and how many did not."""
        if self.censored == len(self.by_seed):
            return show_match(next(iter(self.by_seed.values()), None), unit)
        mean = show(self.mean(unit), 3 if unit == "epoch" else 6)
        return mean + (f" ({self.censored} of {len(self.by_seed)} never)" if self.censored else "")

    def gain_cell(self) -> Cell:
        """The mean gain or, where a seed never gets there, how many do not."""
        if self.gains and self.censored:
            return f"{MISSING} ({self.censored} of {len(self.gains)} never)", {"gain": None}
        gain = finite_mean(self.gains.values())
        return show_known(gain, "{:+.3g}" if gain else "0"), {"gain": gain}


def match_methods(comparison: Comparison, unit: str) -> dict[str, Matching]:
    """Epochs-to-match of every method, with gains over the baseline itself, which a noisy curve makes early."""
    found = {method: match_method(comparison, method) for method in comparison.methods}
    own = found[comparison.baseline].by_seed
    gains = {
        method: {seed: own[seed].count(unit) - match.count(unit) for seed, match in matching.by_seed.items()}
        for method, matching in found.items()
        if method != comparison.baseline
    }
    tests = [sign_flip_p(list(g.values())) if len(g) >= FEWEST_FOR_EXACT else None for g in gains.values()]
    for method, p, p_holm in zip(gains, tests, holm(tests), strict=True):
        found[method] = replace(found[method], gains=gains[method], p=p, p_holm=p_holm)
    return found


def show_match(match: Match | None, unit: str) -> str:
    """One match in words: its epoch or step, or "> E" if censored."""
    if match is None:
        return MISSING
    return show(getattr(match, unit), 6) if match.reached else f"> {show(match.total[unit], 6)}"


def match_unit(comparison: Comparison) -> str:
    """`epoch` where runs have at least two of them, else `step`."""
    return "epoch" if any(number(run.part("progress").get("num_epochs")) >= 2 for run in comparison.runs) else "step"


def match_method(comparison: Comparison, method: str, *, smooth: int = 1) -> Matching:
    """Epochs-to-match of a method against the baseline of its comparison.

    The baseline itself is allowed, and on noisy curves it reaches its own last value early. With `smooth` above one,
    curve and target are both running means: against an unsmoothed target the lag of a running mean would count as
    slowness. A diverged run is censored, even if it reached the target before; unfinished runs are left out.
    """
    baseline = comparison.finished(comparison.baseline)
    runs = [run for run in comparison.of(method) if run.outcome in ("finished", "diverged") and run.seed in baseline]
    found = {run.seed: _first_match([run], baseline, smooth) for run in runs}
    of_means = _first_match([run for run in runs if run.finished], baseline, smooth)
    return Matching({seed: match for seed, match in found.items() if match}, of_means)


def _first_match(runs: Sequence[Run], baseline: Mapping[int, Run], smooth: int) -> Match | None:
    """First evaluation of the mean curve of some runs as good as the last of their baselines; no interpolation."""
    finished, others = [run for run in runs if run.finished], [baseline[run.seed] for run in runs]
    rows, target = _mean_rows(finished, smooth), _mean_rows(others, smooth)
    if not target or (finished and not rows):
        return None
    end, sign = target[-1], 1 if others[0].metric.higher_is_better else -1
    for row in rows:
        if sign * row["value"] >= sign * end["value"]:
            return Match(end, row["epoch"], row["step"], row["seconds"])
    return Match(end)


def _mean_rows(runs: Sequence[Run], smooth: int) -> list[dict[str, float]]:
    """Evaluations averaged over runs at the steps that all of them have, the metric as a running mean."""
    tables = [{int(row["step"]): row for row in run.evaluations} for run in runs]
    shared = sorted(set.intersection(*map(set, tables))) if tables else []
    keys = {"step": "step", "epoch": "epoch", "seconds": "seconds", "value": runs[0].metric.name if runs else ""}
    rows = [
        {name: math.fsum(number(table[step].get(key)) for table in tables) / len(tables) for name, key in keys.items()}
        for step in shared
    ]
    values, width = [row["value"] for row in rows], min(smooth, len(rows))
    for at, row in enumerate(rows, 1):
        row["value"] = math.fsum(values[at - width : at]) / width if at >= width else math.nan
    return rows
