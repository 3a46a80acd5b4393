"""Rows of a figure arranged as lines, bars, intervals or grids: what both the page and the image files draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wellcond.lab.report.head_table import short_names
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.series import BUDGET, HIGH, HIGH_END, LOW, LOW_END, MEAN, Figure, Panel, unfinished_name

NUM_COLOURS = 10
LONGEST_LABEL = 22


@dataclass(frozen=True)
class Line:
    """A curve, with a band if it is a mean over several seeds."""

    name: str
    method: int
    """Place of its method, which chooses the colour."""
    x: list[float]
    y: list[float]
    low: list[float] | None
    high: list[float] | None
    num_seeds: int
    """0 for a run that is in no mean."""


@dataclass(frozen=True)
class Bar:
    """Mean and seeds of one method."""

    name: str
    method: int
    mean: float
    """NaN if there is none."""
    seeds: dict[str, float]
    low: float
    high: float
    """Ends of an interval; NaN where there is none."""


@dataclass(frozen=True)
class Grid:
    """A heat map: rows are layers."""

    columns: list[str]
    layers: list[str]
    full_layers: list[str]
    values: list[list[float]]


def method_of_series(comparison: Comparison) -> dict[str, int]:
    """Place of the method that a series belongs to, unfinished runs included."""
    places = {method: at for at, method in enumerate(comparison.methods)}
    unfinished = {unfinished_name(run): places[run.method] for run in comparison.runs if not run.finished}
    return unfinished | places


def panel_lines(comparison: Comparison, figure: Figure, panel: str) -> list[Line]:
    """Means with bands; a method without common steps falls back to its seeds, one line each."""
    places = method_of_series(comparison)
    lines = []
    for series, seeds in figure.of(panel).items():
        if MEAN in seeds:
            kept = {name: [row for row in seeds[name] if not math.isnan(figure.x(row))] for name in (MEAN, LOW, HIGH)}
            rows = kept[MEAN]
            low, high = ([row.value for row in kept[name]] for name in (LOW, HIGH))
            count = len(seeds) - 3
            line = Line(series, places[series], [figure.x(row) for row in rows], [row.value for row in rows],
                        low if count > 1 else None, high if count > 1 else None, count)  # fmt: skip
            lines.append(line)
            continue
        for seed, listed in seeds.items():
            rows = [row for row in listed if math.isfinite(row.value) and not math.isnan(figure.x(row))]
            name = series if series not in comparison.methods else f"{series}, seed {seed}"
            x, y = [figure.x(row) for row in rows], [row.value for row in rows]
            lines.append(Line(name, places[series], x, y, None, None, 0))
    return [line for line in lines if line.x]


def panel_bars(comparison: Comparison, figure: Figure, panel: str) -> list[Bar]:
    """One bar per method that has one, in the order of the methods; of intervals the best first."""
    places = method_of_series(comparison)

    def value(rows: list, default: float = math.nan) -> float:
        return rows[0].value if rows else default

    bars = []
    for series, seeds in figure.of(panel).items():
        if series == BUDGET:
            continue
        each = {seed: value(rows) for seed, rows in seeds.items() if seed not in (MEAN, LOW_END, HIGH_END)}
        mean, low, high = (value(seeds.get(name, [])) for name in (MEAN, LOW_END, HIGH_END))
        bars.append(Bar(series, places[series], mean, each, low, high))
    return sorted(bars, key=lambda bar: (-bar.mean if figure.kind == "intervals" else 0.0, bar.method))


def panel_budget(figure: Figure, panel: str) -> float | None:
    """The baseline's whole training, where a panel is measured against it."""
    found = [row.value for row in figure.rows if row.panel == panel and row.series == BUDGET]
    return found[0] if found else None


def map_over_steps(figure: Figure, panel: str, layers: Sequence[str]) -> Grid:
    """Layers by steps of one method."""
    found = figure.of(panel)
    steps = sorted({row.step for seeds in found.values() for rows in seeds.values() for row in rows})
    cells = {(row.series, row.step): row.value for seeds in found.values() for rows in seeds.values() for row in rows}
    short = short_names(list(layers))
    values = [[cells.get((layer, step), math.nan) for step in steps] for layer in layers]
    return Grid([f"{step:g}" for step in steps], [short[layer] for layer in layers], list(layers), values)


def map_by_method(figure: Figure) -> Grid:
    """Layers by methods at the last step."""
    layers = layers_of(figure)
    cells = {(row.series, row.panel): row.value for row in figure.rows}
    methods = [panel.name for panel in figure.panels]
    short = short_names(layers)
    values = [[cells.get((layer, method), math.nan) for method in methods] for layer in layers]
    return Grid(methods, [short[layer] for layer in layers], layers, values)


def layers_of(figure: Figure) -> list[str]:
    """Layers of a heat map, in the order of the model."""
    return list(dict.fromkeys(row.series for row in figure.rows))


LARGEST_POWER = 307


def log_axis(panel: Panel, lines: Sequence[Line]) -> tuple[float, float, dict[float, str]]:
    """Both ends of a logarithmic axis, and its ticks with their labels.

    The axis covers at least half a decade, since it would zoom into the rounding of flat curves. Labels are plain
    text: an image takes ten times as long to draw formulas.
    """
    values = [y for line in lines for y in line.y + (line.low or []) + (line.high or []) if 0 < y < math.inf]
    low, high = panel.span or (min(values, default=1.0), max(values, default=10.0))
    # In logarithms, since bounds come near the largest float: room at both ends, and never beyond it.
    bottom, top = math.log10(low), math.log10(high)
    room = max(0.04 * (top - bottom), 0.25 - (top - bottom) / 2)
    low, high = 10.0 ** max(bottom - room, -LARGEST_POWER), 10.0 ** min(top + room, LARGEST_POWER)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    width = math.log10(high) - math.log10(low)
    wide = width > 1.5
    factors = (1.0,) if wide else (1.0, 2.0, 5.0) if width > 0.7 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    every = max(1, math.ceil(len(decades) / 6)) if wide else 1
    ticks = [factor * 10.0**decade for decade in decades[::every] if decade < LARGEST_POWER for factor in factors]
    return low, high, {tick: _power(tick) if wide else f"{tick:g}" for tick in ticks if low <= tick <= high}


def _power(tick: float) -> str:
    return "10" + str(round(math.log10(tick))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def cut(label: str, longest: int = LONGEST_LABEL) -> str:
    """A label short enough for an axis; the middle goes, since methods often differ at their ends only.

    Example:
        >>> cut("conditioned+identity(lam=10)", 18)
        'conditio…(lam=10)'
    """
    half = (longest - 1) // 2
    return label if len(label) <= longest else f"{label[:half]}…{label[-half:]}"
