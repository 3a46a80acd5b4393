"""Score over a tuned value: means as lines, seeds as dots, diverged runs as crosses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.series import MEAN, Figure, Row
from wellcond.lab.report.shapes import NUM_COLOURS, method_of_series
from wellcond.lab.report.tuning import BEST

MOST_TICKS = 9


@dataclass(frozen=True)
class TunedCurve:
    """What is drawn of one method in one panel, as (value, score)."""

    name: str
    method: int
    mean: list[tuple[float, float]]
    """NaN, a gap in the line, where a run diverged."""
    seeds: list[tuple[float, float, str]]
    best: list[tuple[float, float]]
    diverged: list[tuple[float, str]]


def tuned_curves(comparison: Comparison, figure: Figure, panel: str) -> list[TunedCurve]:
    """Curves of a panel, by method."""
    places = method_of_series(comparison)
    curves = []
    for name, by_seed in figure.of(panel).items():
        rows: list[Row] = [row for listed in by_seed.values() for row in listed]
        each = [row for row in rows if row.seed not in (MEAN, BEST)]
        means = {row.step: row.value for row in by_seed.get(MEAN, [])}
        curves.append(
            TunedCurve(
                name,
                places[name],
                [(x, means.get(x, math.nan)) for x in sorted({row.step for row in each})],
                [(row.step, row.value, row.seed) for row in each if math.isfinite(row.value)],
                [(row.step, row.value) for row in by_seed.get(BEST, [])],
                [(row.step, row.seed) for row in each if math.isnan(row.value)],
            )
        )
    return curves


def is_logarithmic(curves: list[TunedCurve]) -> bool:
    """Whether the values may stand on a logarithmic axis."""
    return all(x > 0 for curve in curves for x, _ in curve.mean)


def axis_ticks(curves: list[TunedCurve]) -> dict[float, str]:
    """Values that were tried, or some of them, with their labels."""
    tried = sorted({x for curve in curves for x, _ in curve.mean})
    every = math.ceil(len(tried) / MOST_TICKS)
    return {value: f"{value:.3g}" for value in tried[::every]}


def tuned_traces(curves: list[TunedCurve], colours: list[str], dashes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Traces of plotly; names must be safe already."""
    traces: list[dict[str, Any]] = []
    for curve in curves:
        colour = colours[curve.method % NUM_COLOURS]
        common = {"type": "scatter", "meta": curve.method, "name": curve.name}
        told = f"<b>{curve.name}</b><br>%{{x:.3~g}}: %{{y:.4~g}}"
        dash = dashes[curve.method // NUM_COLOURS % len(dashes)]
        traces.append(
            common
            | {
                "mode": "lines", "x": [x for x, _ in curve.mean], "connectgaps": False,
                "y": [float(f"{y:.6g}") if math.isfinite(y) else None for _, y in curve.mean],
                "line": {"color": colour, "width": 2, "dash": dash},
                "hovertemplate": f"{told}, mean<extra></extra>",
            }
        )  # fmt: skip
        dots = [("seed " + seed, x, y, 5) for x, y, seed in curve.seeds]
        dots += [("chosen, mean", x, y, 12) for x, y in curve.best]
        traces.append(
            common
            | {
                "mode": "markers", "x": [x for _, x, _, _ in dots], "y": [float(f"{y:.6g}") for _, _, y, _ in dots],
                "text": [what for what, _, _, _ in dots], "hovertemplate": f"{told}, %{{text}}<extra></extra>",
                "marker": {"color": colour, "size": [size for _, _, _, size in dots]},
            }
        )  # fmt: skip
        if curve.diverged:
            traces.append(
                common
                | {
                    "mode": "markers", "x": [x for x, _ in curve.diverged], "y": [0.04] * len(curve.diverged),
                    "yaxis": "y2", "text": [f"seed {seed}" for _, seed in curve.diverged],
                    "marker": {"color": colour, "size": 9, "symbol": "x"},
                    "hovertemplate": f"<b>{curve.name}</b><br>%{{x:.3~g}}: diverged, %{{text}}<extra></extra>",
                }
            )  # fmt: skip
    return traces
