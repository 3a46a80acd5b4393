"""Measured quantities of stored runs, by seed, in the form that the rules of claims compare."""

from __future__ import annotations

import math

import numpy as np

from wellcond.lab.report.analysis import Analysis


def first_or_last_logs(analysis: Analysis, method: str, key: str, *, last: bool) -> dict[int, float]:
    """Mean log10 of a quantity over all heads at its first or last measurement, by seed; finite values only."""
    found = {}
    for table in analysis.tables(method):
        steps = table.columns["step"][~np.isnan(table.columns[key])]
        if len(steps):
            values = table.at(key, float(steps.max() if last else steps.min()))
            mean = _mean_log(values)
            if math.isfinite(mean):
                found[table.run.seed] = mean
    return found


def count_inexact(analysis: Analysis, methods: tuple[str, ...], key: str, *, last: bool) -> tuple[int, int]:
    """How many of the values that `first_or_last_logs` reads are estimates, or singular in float64, and of how many."""
    inexact = total = 0
    for table in [table for method in methods for table in analysis.tables(method)]:
        known = ~np.isnan(table.columns[key])
        if known.any():
            steps = table.columns["step"]
            chosen = known & (steps == (steps[known].max() if last else steps[known].min()))
            inexact, total = inexact + int(table.columns["inexact"][chosen].sum()), total + int(chosen.sum())
    return inexact, total


def count_infinite(analysis: Analysis, method: str, key: str, *, last: bool) -> int:
    """How many of the values that `first_or_last_logs` reads are infinite, and so in no mean."""
    total = 0
    for table in analysis.tables(method):
        steps = table.columns["step"][~np.isnan(table.columns[key])]
        if len(steps):
            total += int(np.isinf(table.at(key, float(steps.max() if last else steps.min()))).sum())
    return total


def savings(analysis: Analysis, method: str) -> dict[int, float]:
    """Share of the epochs saved until the baseline's last value, by seed; 0 where it is never reached."""
    matching = analysis.matchings.get(method)
    return {} if matching is None else {seed: match.saving or 0.0 for seed, match in matching.by_seed.items()}


def distance_below(analysis: Analysis, method: str, what: str, limit: str) -> tuple[float, float]:
    """Least and largest log10 of the limit over the measurement; as `count_above`."""
    found = []
    for table in [t for name in analysis.heads for t in analysis.heads[name] if method in ("", name)]:
        with np.errstate(divide="ignore"):
            distance = table.columns[limit] - np.log10(table.columns[what])
        found.append(distance[np.isfinite(distance)])
    every = np.concatenate(found)
    return float(every.min()), float(every.max())


def count_above(analysis: Analysis, method: str, what: str, limit: str) -> tuple[int, int]:
    """Measurements of a head that exceed a column that holds log10, and all of them.

    Args:
        analysis: of the runs.
        method: only this one; all with an empty name.
        what: a column.
        limit: another, in log10.
    """
    above = total = 0
    for table in [t for name in analysis.heads for t in analysis.heads[name] if method in ("", name)]:
        values = table.columns[what]
        known = ~np.isnan(values) & ~np.isnan(table.columns[limit])
        with np.errstate(divide="ignore"):
            too_large = np.log10(values[known]) > table.columns[limit][known]
        above, total = above + int(too_large.sum()), total + int(known.sum())
    return above, total


def _mean_log(values: np.ndarray) -> float:
    usable = values[np.isfinite(values) & (values > 0)]
    return float(np.log10(usable).mean()) if len(usable) else math.nan
