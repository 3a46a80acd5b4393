"""`analyse`: everything that tables, figures and findings share, computed once per comparison."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import numpy as np

from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.match import SMOOTH, MatchGain, Matching, match_gains, match_method, match_unit
from wellcond.lab.report.records import ARITHMETIC, MEASURED, Run
from wellcond.lab.report.statistics import (
    LogSummary,
    PairedDifference,
    Summary,
    differences_to_baseline,
    required_differences,
    summarise_logs,
)
from wellcond.lab.report.table import finite_mean, number
from wellcond.lab.report.verdicts import Verdict, judge

KEYS = tuple(key for key in MEASURED if key not in ("layer", "head", "status"))
"""What the report reads of every row; the rows themselves are not kept, since there can be hundreds of thousands."""


@dataclass(frozen=True)
class HeadTable:
    """Conditioning rows of one run, column by column."""

    run: Run
    layers: tuple[str, ...]
    """Names of layers, in the order of the model."""
    layer_index: np.ndarray
    columns: dict[str, np.ndarray]
    """Keys of `KEYS`, NaN where a value is null or absent; and `inexact`: the Jacobian is an estimate or a bound."""

    @cached_property
    def steps(self) -> np.ndarray:
        """Measured steps, rising."""
        return np.unique(self.columns["step"])

    @cached_property
    def step_index(self) -> np.ndarray:
        """Place of every row in `steps`."""
        return np.searchsorted(self.steps, self.columns["step"])

    def epochs(self) -> np.ndarray:
        """Epoch of every measured step."""
        found = np.full(len(self.steps), np.nan)
        found[self.step_index] = self.columns["epoch"]
        return found

    def over_steps(self, key: str) -> np.ndarray:
        """Mean over the finite values of all heads and layers at every step; NaN where there is none.

        Arithmetic for attention maps, geometric for all else; of stored logarithms back as a number, infinite above
        1e300.
        """
        log = key not in ARITHMETIC and not key.endswith("_log10")
        means = _grouped(self.columns[key], self.step_index, len(self.steps), log)
        return np.where(means > 300, np.inf, 10.0 ** np.minimum(means, 300)) if key.endswith("_log10") else means

    def layers_at_end(self, key: str) -> dict[str, float]:
        """Mean log10 over the heads of each layer at the last measurement of a quantity, where it is finite."""
        here = self.columns["step"] == self.last_step(key)
        means = np.log10(_grouped(self.columns[key][here], self.layer_index[here], len(self.layers), log=True))
        return {name: value for name, value in zip(self.layers, means.tolist(), strict=True) if math.isfinite(value)}

    def at(self, key: str, step: float) -> list[float]:
        """Values of all heads at one step, where they are not NaN."""
        values = self.columns[key][self.columns["step"] == step]
        return values[~np.isnan(values)].tolist()

    def at_end(self, key: str) -> list[float]:
        """Values of all heads at the last step at which a quantity was measured; empty if it never was."""
        return self.at(key, self.last_step(key))

    def last_step(self, key: str) -> float:
        """Last step at which a quantity was measured, infinite included; -1 if it never was."""
        return float(self.columns["step"][~np.isnan(self.columns[key])].max(initial=-1.0))


def read_heads(run: Run) -> HeadTable | None:
    """Measured heads of a run; None if nothing was measured."""
    rows = run.conditioning
    if not rows:
        return None
    try:  # numpy reads None, "inf" and "nan", many times faster than one by one
        columns = dict(zip(KEYS, np.array(list(map(itemgetter(*KEYS), rows)), dtype=float).T, strict=True))
    except (KeyError, TypeError, ValueError):
        columns = {key: np.array([number(row.get(key)) for row in rows]) for key in KEYS}
    columns["inexact"] = np.array([row.get("status") not in (None, "", "exact") for row in rows], dtype=float)
    layers = tuple(dict.fromkeys(str(row["layer"]) for row in rows))
    place = {name: at for at, name in enumerate(layers)}
    return HeadTable(run, layers, np.array([place[str(row["layer"])] for row in rows]), columns)


def _grouped(values: np.ndarray, index: np.ndarray, count: int, log: bool) -> np.ndarray:
    """Mean of the usable values of each group; geometric with `log`."""
    usable = np.isfinite(values) & (values > 0) if log else np.isfinite(values)
    numbers = np.log10(values[usable]) if log else values[usable]
    sums = np.bincount(index[usable], weights=numbers, minlength=count)
    sizes = np.bincount(index[usable], minlength=count)
    means = np.full(count, np.nan)
    np.divide(sums, sizes, out=means, where=sizes > 0)
    return 10.0**means if log else means


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

    def outcomes(self, method: str) -> Counter[str]:
        """How many runs finished, diverged, failed, or are partial."""
        return Counter(run.outcome for run in self.comparison.of(method))

    def tables(self, method: str) -> list[HeadTable]:
        """Measured heads of the finished runs."""
        return [table for table in self.heads[method] if table.run.finished]

    def last_jacobian(self, method: str, key: str = "pseudo_condition_number") -> LogSummary:
        """Condition numbers of all heads at the last measurement of every finished run."""
        return summarise_logs(value for table in self.tables(method) for value in table.at_end(key))

    def attention(self, method: str, *, last: bool) -> AttentionState | None:
        """Attention maps at the first or the last measurement; None if none is known."""
        steps = [(t, float(t.steps[-1 if last else 0])) for t in self.tables(method) or self.heads[method]]
        entropy, diagonal, dead = ([value for t, at in steps for value in t.at(key, at)] for key in ARITHMETIC)
        if not entropy and not diagonal:
            return None
        return AttentionState(steps[-1][1], finite_mean(entropy), finite_mean(diagonal), int(sum(dead)), len(dead))

    def step_ratio(self, method: str) -> float:
        """Seconds per step over the baseline's of the same seed, mean over seeds."""
        return finite_mean(step_ratios(self.comparison, method).values())


def step_ratios(comparison: Comparison, method: str) -> dict[int, float]:
    """Seconds per step over the baseline's of the same seed, by seed."""
    runs, base = (comparison.finished(name) for name in (method, comparison.baseline))
    return {seed: seconds_per_step(run) / seconds_per_step(base[seed]) for seed, run in runs.items() if seed in base}


def seconds_per_step(run: Run) -> float:
    """Time of one training step without evaluation and measuring; NaN if the run was not alone on its cores."""
    seconds = number(run.record.get("seconds_per_step"))
    return seconds if seconds > 0 and run.alone else math.nan


def analyse(comparison: Comparison, *, margin: float | None = None) -> Analysis:
    """Statistics of a comparison.

    Args:
        comparison: the runs.
        margin: a difference of results that counts as none, such as half of a paper's gain, in stored units (0.01 is
            one point of accuracy). By default one standard deviation of the baseline over seeds: less than another seed
            makes. Half of it could not be shown by ten seeds: their two one-sided tests need a margin of about 0.8
            standard deviations where pairing does not help.
    """
    methods, unit = comparison.methods, match_unit(comparison)
    summaries = {method: Summary(comparison.results(method)) for method in methods}
    matchings, smoothed = (
        {method: match_method(comparison, method, smooth=smooth) for method in methods} for smooth in (1, SMOOTH)
    )
    differences = differences_to_baseline(comparison, summaries)
    required = required_differences(comparison, summaries, differences)
    margin = summaries[comparison.baseline].std if margin is None else margin
    gains = match_gains(comparison.baseline, matchings, unit)
    heads = {method: [table for run in comparison.of(method) if (table := read_heads(run))] for method in methods}
    return Analysis(comparison, unit, summaries, differences, required, margin, matchings, smoothed, gains, heads)
