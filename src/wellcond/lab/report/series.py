"""Rows behind every figure: what the CSV files hold, and all that a plot is drawn from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from wellcond.lab.report.records import Run
from wellcond.lab.report.table import csv_text
from wellcond.lab.report.values import plain_number

COLUMNS = ("figure", "panel", "series", "seed", "step", "epoch", "value", "scale")
MEAN, LOW, HIGH = "mean", "mean-std", "mean+std"
LOW_END, HIGH_END = "interval-low", "interval-high"
BUDGET = "(budget)"
MOST_POINTS = 300

Kind = Literal["lines", "bars", "intervals", "maps", "tuned"]


@dataclass(frozen=True, slots=True)
class Row:
    """One point of one figure."""

    figure: str
    panel: str
    series: str
    seed: str
    """A seed, or `mean`, `mean-std`, `mean+std` over the finished runs, or an end of a 95 % interval of the mean."""
    step: float
    epoch: float
    value: float
    scale: str
    """Scale of the recipe (tiny, small, paper), not of an axis."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    name: str
    title: str
    y_label: str
    log: bool = False
    span: tuple[float, float] | None = None
    """Fixed range of values, where panels must be comparable."""
    limits: tuple[float, float] | None = None
    """Smallest and largest value that can be; a band ends there."""


@dataclass(frozen=True)
class Figure:
    """Panels with a title, a sentence on what to see, and rows."""

    name: str
    section: str
    title: str
    caption: str
    kind: Kind
    panels: tuple[Panel, ...]
    rows: tuple[Row, ...]
    x_label: str = ""
    """Of the horizontal axis of lines: `epoch` or `step`."""

    def of(self, panel: str) -> dict[str, dict[str, list[Row]]]:
        """Rows of a panel by series and seed, in the order in which they were made."""
        found: dict[str, dict[str, list[Row]]] = {}
        for row in self.rows:
            if row.panel == panel:
                found.setdefault(row.series, {}).setdefault(row.seed, []).append(row)
        return found

    def x(self, row: Row) -> float:
        """Horizontal place of a row."""
        return row.epoch if self.x_label == "epoch" else row.step


@dataclass(frozen=True)
class Curve:
    """One quantity of one run over training."""

    run: Run
    steps: Sequence[float]
    epochs: Sequence[float]
    values: Sequence[float]


def curve_rows(scale: str, figure: str, panel: Panel, curves: Mapping[str, Sequence[Curve]]) -> list[Row]:
    """Rows of a panel: every run, then mean and band over the finished runs at the steps that all of them have.

    Mean and band of a logarithmic panel are on log10. A run that did not finish is a series of its own, named after its
    outcome, and is in no mean.

    Args:
        scale: of the recipe.
        figure: name of the figure.
        panel: where they are drawn.
        curves: by method.
    """
    rows: list[Row] = []
    lowest, highest = panel.limits or (-math.inf, math.inf)
    for method, listed in curves.items():
        for curve in listed:
            name = method if curve.run.finished else unfinished_name(curve.run)
            rows += [
                Row(figure, panel.name, name, str(curve.run.seed), step, epoch, float(value), scale)
                for step, epoch, value in zip(curve.steps, curve.epochs, curve.values, strict=True)
                if not math.isnan(value)
            ]
        for seed, step, epoch, mean in _means([curve for curve in listed if curve.run.finished], panel.log):
            value = min(max(mean, lowest), highest)
            rows.append(Row(figure, panel.name, method, seed, step, epoch, value, scale))
    return rows


def unfinished_name(run: Run) -> str:
    """Series of a run that is in no mean.

    Example:
        >>> from pathlib import Path
        >>> unfinished_name(Run(Path("."), {"method": "polar", "seed": 2, "status": "diverged", "metric": {}}))
        'polar, seed 2 (diverged)'
    """
    return f"{run.method}, seed {run.seed} ({run.outcome})"


def _means(curves: Sequence[Curve], log: bool) -> Iterable[tuple[str, float, float, float]]:
    tables = [
        {
            step: (epoch, value)
            for step, epoch, value in zip(curve.steps, curve.epochs, curve.values, strict=True)
            if math.isfinite(value) and not (log and value <= 0)
        }
        for curve in curves
    ]
    if not tables:
        return
    for step in sorted(set.intersection(*map(set, tables))):
        points = np.array([table[step][1] for table in tables])
        points = np.log10(points) if log else points
        mean = float(points.mean())
        spread = float(points.std(ddof=1)) if len(tables) > 1 else 0.0
        epoch = tables[0][step][0]
        for seed, value in ((MEAN, mean), (LOW, mean - spread), (HIGH, mean + spread)):
            yield seed, step, epoch, 10**value if log else value


def with_points(panels: Iterable[Panel], rows: Iterable[Row]) -> tuple[Panel, ...]:
    """The panels that have something to draw."""
    shown = {row.panel for row in rows if math.isfinite(row.value)}
    return tuple(panel for panel in panels if panel.name in shown)


def thin(steps: np.ndarray, epochs: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A long curve as means over equal stretches, each placed at its end."""
    size = math.ceil(len(values) / MOST_POINTS)
    if size <= 1:
        return steps, epochs, values
    ends = np.minimum(np.arange(size, len(values) + size, size), len(values))
    starts = np.concatenate([[0], ends[:-1]])
    means = np.add.reduceat(values, starts) / (ends - starts)
    return steps[ends - 1], epochs[ends - 1], means


def write_csv(rows: Iterable[Row]) -> str:
    """Rows as CSV, numbers in full."""
    cells = ((getattr(row, column) for column in COLUMNS) for row in rows)
    return csv_text(COLUMNS, ([cell if isinstance(cell, str) else plain_number(cell) for cell in row] for row in cells))
