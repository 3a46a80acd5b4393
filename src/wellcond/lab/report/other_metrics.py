"""Metrics besides the one that runs are judged by: perplexity per word, masked accuracy, and the like."""

from __future__ import annotations

import math
from typing import Any

from wellcond.lab.report.analysis import Analysis
from wellcond.lab.report.formats import PLUS_MINUS, show_mean
from wellcond.lab.report.glue_scores import NO_METRICS
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.run_record import Metric, Run
from wellcond.lab.report.statistics import Summary
from wellcond.lab.report.table import Table
from wellcond.lab.report.table_values import Values
from wellcond.lab.report.values import number


def other_metrics(comparison: Comparison) -> tuple[str, ...]:
    """Names of further numbers in the scores of the runs, in the order in which they were written."""
    known = {*NO_METRICS, "weights", comparison.metric.name}
    names = [name for run in comparison.runs if run.finished for name in _scores(comparison, run) if name not in known]
    return tuple(dict.fromkeys(names))


def _scores(comparison: Comparison, run: Run) -> dict[str, Any]:
    return run.test if comparison.tested else run.record.get("final") or {}


def other_metrics_table(analysis: Analysis) -> Table:
    """Mean and spread by method."""
    comparison = analysis.comparison
    names = other_metrics(comparison)
    rows = []
    values: list[Values] = []
    for method in comparison.methods:
        scores = {seed: _scores(comparison, run) for seed, run in comparison.finished(method).items()}
        cells = []
        plain: Values = {"method": method}
        for name in names:
            known = {seed: number(found.get(name)) for seed, found in scores.items()}
            summary = Summary({seed: value for seed, value in known.items() if math.isfinite(value)})
            cells.append(show_mean(summary.mean, summary.std, Metric(name, higher_is_better=True, percent=False)))
            plain |= {f"{name}_mean": summary.mean, f"{name}_sd": summary.std, f"{name}_n": summary.count}
        rows.append((method, *cells))
        values.append(plain)
    on = f"On the test split, {comparison.tested_weights}" if comparison.tested else "At the last evaluation"
    note = f"{on}; mean {PLUS_MINUS} std of finished runs, each number as it was recorded."
    header = ("method", *(name.replace("_", " ") for name in names))
    return Table("other_metrics", "Other metrics", header, tuple(rows), (note,), values=tuple(values))
