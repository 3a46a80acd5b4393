"""`analyse`: everything that tables, figures and findings share, computed once per comparison."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from wellcond.lab.report.head_table import HeadTable, read_heads
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.match import SMOOTH, MatchGain, Matching, match_gains, match_method, match_unit
from wellcond.lab.report.run_record import Run
from wellcond.lab.report.statistics import (
    LogSummary,
    PairedDifference,
    Summary,
    differences_to_baseline,
    required_differences,
    summarise_logs,
)
from wellcond.lab.report.values import number
from wellcond.lab.report.verdicts import Verdict, default_margin, judge


@dataclass(frozen=True)
class AttentionState:
    """Attention maps of a method's finished runs at one moment, over all heads."""

    step: float
    entropy: float
    """Mean entropy over ln N; NaN if not known."""
    diagonal_mass: float
    dead: int
    heads: int

    @property
    def saturated(self) -> bool:
        """Nearly all attention goes to one token."""
        return self.entropy < 0.05 or self.diagonal_mass > 0.95 or (self.heads > 0 and self.dead > self.heads / 2)


@dataclass(frozen=True)
class Analysis:
    """A comparison with its statistics, by method."""

    comparison: Comparison
    unit: str
    """`epoch` or `step`: what matching is counted in."""
    summaries: dict[str, Summary]
    """Results: on the test split where there is one, else of the last evaluation."""
    differences: dict[str, PairedDifference]
    required: list[PairedDifference]
    margin: float
    """A difference of results below it counts as none; NaN where the baseline has fewer than two results."""
    last_summaries: dict[str, Summary]
    """Of the last evaluation."""
    last_differences: dict[str, PairedDifference]
    matchings: dict[str, Matching]
    smoothed: dict[str, Matching]
    match_gains: dict[str, MatchGain]
    heads: dict[str, list[HeadTable]]
    """Tables of all runs that have conditioning rows."""

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """Of every method against the baseline."""
        return {method: self.judge(difference) for method, difference in self.differences.items() if difference.count}

    def judge(self, difference: PairedDifference) -> Verdict:
        """What a difference of results decides."""
        lost, lost_baseline = (self.outcomes(m)["diverged"] for m in (difference.method, difference.baseline))
        return judge(difference, self.margin, diverged=lost, baseline_diverged=lost_baseline)

    @property
    def not_alone(self) -> list[Run]:
        """Finished runs that did not have their cores to themselves, as far as is known."""
        return [run for run in self.comparison.runs if run.finished and not run.alone]

    def outcomes(self, method: str) -> Counter[str]:
        """How many runs finished, diverged, failed, or are partial."""
        return Counter(run.outcome for run in self.comparison.of(method))

    def tables(self, method: str) -> list[HeadTable]:
        """Measured heads of the finished runs."""
        return [table for table in self.heads[method] if table.run.finished]

    def last_jacobian(self, method: str, key: str = "pseudo_condition_number") -> LogSummary:
        """Condition numbers of all heads at the last measurement of every finished run."""
        values: list[float] = []
        for table in self.tables(method):
            step = table.last_step(key)
            values += [] if step is None else table.at(key, step).tolist()
        return summarise_logs(values)

    def attention(self, method: str, *, last: bool) -> AttentionState | None:
        """Attention maps at the first or the last measurement; None if none is known."""
        entropy: list[float] = []
        diagonal: list[float] = []
        dead: list[float] = []
        at = math.nan
        for table in self.tables(method) or self.heads[method]:
            at = float(table.steps[-1 if last else 0])
            entropy += table.at("normalised_entropy", at).tolist()
            diagonal += table.at("diagonal_mass", at).tolist()
            dead += table.at("dead", at).tolist()
        if not entropy and not diagonal:
            return None
        return AttentionState(at, _mean(entropy), _mean(diagonal), int(sum(dead)), len(dead))

    def step_ratio(self, method: str) -> float:
        """Seconds per step over the baseline's of the same seed, mean over seeds."""
        runs, base = (self.comparison.finished(name) for name in (method, self.comparison.baseline))
        ratios = [seconds_per_step(run) / seconds_per_step(base[seed]) for seed, run in runs.items() if seed in base]
        return _mean([ratio for ratio in ratios if math.isfinite(ratio)])


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def seconds_per_step(run: Run) -> float:
    """Time of one training step without evaluation and measuring; NaN if the run was not alone on its cores."""
    seconds = number(run.record.get("seconds_per_step"))
    return seconds if seconds > 0 and run.alone else math.nan


def analyse(comparison: Comparison, *, margin: float | None = None) -> Analysis:
    """Statistics of a comparison.

    Args:
        comparison: the runs.
        margin: a difference of results that counts as none, such as half of a paper's gain, in stored units (0.01 is
            one point of accuracy); one standard deviation of the baseline over seeds by default.
    """
    methods = comparison.methods
    summaries = {method: Summary(comparison.results(method)) for method in methods}
    last_summaries = {method: Summary(comparison.last_values(method)) for method in methods}
    unit = match_unit(comparison)
    matchings = {method: match_method(comparison, method) for method in methods}
    differences = differences_to_baseline(comparison, summaries)
    own = list(summaries[comparison.baseline].values.values())
    return Analysis(
        comparison=comparison,
        unit=unit,
        summaries=summaries,
        differences=differences,
        required=required_differences(comparison, summaries, differences),
        margin=default_margin(own) if margin is None else margin,
        last_summaries=last_summaries,
        last_differences=differences_to_baseline(comparison, last_summaries),
        matchings=matchings,
        smoothed={method: match_method(comparison, method, smooth=SMOOTH) for method in methods},
        match_gains=match_gains(comparison.baseline, matchings, unit),
        heads={
            method: [table for table in map(read_heads, comparison.of(method)) if table is not None]
            for method in methods
        },
    )  # fmt: skip
