"""Heads of a stored measurement, and where the marks of its four charts stand; `charts.html` draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from wellcond.lab.report.plots import RAMP
from wellcond.lab.report.values import INFINITE, MISSING, log10, number, show

WIDTH, PANEL = 980.0, 320.0
LEFT, RIGHT = 62.0, 14.0
TOP, BOTTOM = 12.0, 148.0
CELL_HEIGHT = 30
NUM_COLOURS = 8
MOST_POINTS = 160
LONGEST_NAME = 34
CHARACTER = 6.4
"""Width of one on an axis."""
Chart = dict[str, Any]


@dataclass(frozen=True)
class HeadView:
    """One head of a stored report, with what plots and tables ask of it."""

    layer: int
    layer_name: str
    index: int
    label: str
    row: dict[str, Any]
    jacobian: dict[str, Any]
    diagnosis: dict[str, Any]
    """Empty if there is none, and so is `attention`, the statistics of its attention map."""
    attention: dict[str, Any]
    kappa: float
    """The condition number asked for; `pseudo` is over the non-zero spectrum. Both are means over samples."""
    pseudo: float
    why_not_finite: str
    num_samples: int
    dead: bool
    """Attention has collapsed."""
    status: str
    """How the Jacobian's singular values are known."""
    interval: tuple[float, float]
    """Certified, of the condition number over the non-zero singular values."""
    spectrum: Sequence[float]
    """All singular values of the Jacobian, falling; empty where only the extremes are known."""
    explanation: str
    """What dominates, in words."""


def head_view(layer: int, name: str, row: dict[str, Any]) -> HeadView:
    """A head of a stored report."""
    jacobian, diagnosis, queries = row["jacobian"], row.get("diagnosis") or {}, list(row.get("query_heads") or ())
    group = f" (query heads {queries[0]} to {queries[-1]})" if len(queries) > 1 else ""
    unknown = f"not diagnosed, since this is not plain softmax attention ({row.get('how', 'unknown form')})"
    tops, ends = (
        [number(end) for end in jacobian.get(key) or (None, None)] for key in ("sigma_max_bounds", "sigma_rank_bounds")
    )
    low, high = (
        math.nan if math.isnan(top + end) else math.inf if end <= 0 else top / end
        for top, end in zip(tops, reversed(ends), strict=True)
    )
    return HeadView(
        layer=layer, layer_name=name, index=int(row["index"]), label=f"{name}, head {int(row['index'])}{group}",
        row=row, jacobian=jacobian, diagnosis=diagnosis, attention=diagnosis.get("attention") or {},
        kappa=number(row.get("mean_kappa")),
        pseudo=number(row.get("mean_pseudo_kappa", jacobian.get("pseudo_condition_number"))),
        why_not_finite=str(row.get("why_not_finite") or ""), num_samples=len(row.get("samples") or ()),
        dead=bool(row.get("dead")), status=str(jacobian.get("status", "unknown")),
        interval=(low if math.isnan(low) else max(low, 1.0), high),
        spectrum=sorted(map(number, jacobian.get("singular_values") or ()), reverse=True),
        explanation=str(diagnosis.get("explanation", "")) if diagnosis else unknown,
    )  # fmt: skip


def layer_name(layer: dict[str, Any]) -> str:
    """Its name; the model itself has none."""
    return str(layer.get("name") or "(model)")


def head_views(data: dict[str, Any]) -> list[HeadView]:
    """Every head of a stored report."""
    layers = enumerate(data["layers"])
    return [head_view(at, layer_name(layer), row) for at, layer in layers for row in layer["heads"]]


def ramp_colour(share: float) -> tuple[str, str]:
    """Colour at a share of the ramp, and the colour of text on it."""
    at = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(at), len(RAMP) - 2)
    rgb = [round(a + (b - a) * (at - low)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True)]
    bright = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 140
    return "#{:02x}{:02x}{:02x}".format(*rgb), "#10202e" if bright else "#ffffff"


def _decades(logarithms: Iterable[float]) -> tuple[int, int]:
    """Whole decades around what is finite."""
    finite = [x for x in logarithms if math.isfinite(x)]
    low, high = math.floor(min(finite, default=0.0)), math.ceil(max(finite, default=1.0))
    return low, max(high, low + 1)


def colour_range(views: Sequence[HeadView]) -> tuple[int, int]:
    """Decades of the colour scale. A dead head is not on it: its condition number says nothing good."""
    alive = [view for view in views if not view.dead]
    return _decades(log10(view.pseudo if math.isinf(view.kappa) else view.kappa) for view in alive)


def heat_map(data: dict[str, Any], views: Sequence[HeadView]) -> Chart:
    """Layers by heads, coloured by the logarithm of the Jacobian's condition number."""
    layers, indices = data["layers"], sorted({view.index for view in views})
    left = 14 + 7.2 * max(min(max((len(layer_name(layer)) for layer in layers), default=0), LONGEST_NAME), 5)
    cell = min(max((985 - left) / max(len(indices), 1), 38.0), 76.0)
    low, high = colour_range(views)
    rows = []
    for at, layer in enumerate(layers):
        name = layer_name(layer)
        cells = [
            {"x": left + indices.index(view.index) * cell, **_cell(view, low, high)}
            for view in views
            if view.layer == at
        ]
        short = name if len(name) <= LONGEST_NAME else f"{name[:12]}…{name[-21:]}"
        rows.append({"name": name, "short": short, "problem": layer.get("problem"), "cells": cells,
                     "y": 26 + at * CELL_HEIGHT})  # fmt: skip
    kind = "strict" if data.get("kappa") == "strict" else "pseudo"
    ticks = range(0, high - low + 1, max(1, math.ceil((high - low) / 8)))
    return {
        "label": "Heat map of Jacobian condition numbers",
        "described": f"{len(layers)} layers by {len(indices)} heads; each cell is log10 of the {kind} condition number "
        "of a head's parameter Jacobian. The same numbers are in the table of verdicts below.",
        "width": max(left + len(indices) * cell + 8, 360.0), "height": 30 + len(layers) * CELL_HEIGHT,
        "left": left, "cell": cell, "row_height": CELL_HEIGHT, "rows": rows, "low": low, "high": high,
        "heads": [(index, left + (at + 0.5) * cell) for at, index in enumerate(indices)],
        "stops": [ramp_colour(at / (len(RAMP) - 1))[0] for at in range(len(RAMP))],
        "ticks": [(low + at, 20 + 300 * at / (high - low)) for at in ticks],
    }  # fmt: skip


def _cell(view: HeadView, low: int, high: int) -> Chart:
    """Text, colours and description of a head."""
    logarithm, pseudo = log10(view.kappa), log10(view.pseudo)
    kind = "finite" if math.isfinite(logarithm) else "infinite"
    if view.dead:
        fill, ink, text, kind = "url(#dead)", "#ffffff", "dead", "dead"
    elif logarithm == math.inf and math.isfinite(pseudo):
        (fill, ink), text = ramp_colour((pseudo - low) / (high - low)), f"{pseudo:.1f}*"
    elif view.status == "numerically singular" or logarithm == math.inf:
        bound = log10(view.interval[0])
        known = view.status == "numerically singular" and math.isfinite(bound)
        fill, ink, text, kind = "url(#infinite)", "#5c0f16", f"≥{bound:.1f}" if known else INFINITE, "infinite"
    elif math.isnan(logarithm):
        fill, ink, text = "none", "currentColor", MISSING
    else:
        fill, ink = ramp_colour((logarithm - low) / (high - low))
        text = f"{'~' if view.status != 'exact' else ''}{logarithm:.1f}"
    told = f"{view.label}: condition number {show(view.kappa, 4)}"
    if view.why_not_finite:
        told += f" ({view.why_not_finite}), over the non-zero spectrum {show(view.pseudo, 4)}"
    if view.num_samples > 1:
        told += f" (geometric mean of {view.num_samples} samples, spread {show(view.row.get('spread'))})"
    if view.dead:
        told += ", DEAD HEAD: attention has collapsed, so this number says nothing good"
    told += f"; {view.status}; {view.explanation}"
    return {"head": f"{view.layer}.{view.index}", "kind": kind, "told": told, "fill": fill, "ink": ink, "text": text}


class _LogAxis:
    """A vertical axis in whole decades."""

    def __init__(self, logarithms: Iterable[float]) -> None:
        self.low, self.high = _decades(logarithms)

    def __call__(self, logarithm: float) -> float:
        """Height of a value; what is below the axis (zero) sits on it."""
        inside = min(max(logarithm, self.low), self.high)
        return BOTTOM - (inside - self.low) / (self.high - self.low) * (BOTTOM - TOP)

    @property
    def ticks(self) -> list[tuple[int, float]]:
        """Decades with a grid line, and its height."""
        step = max(1, math.ceil((self.high - self.low) / 6))
        return [(decade, self(decade)) for decade in range(self.low, self.high + 1, step)]


def _fitting(name: str, at: int, width: float) -> str:
    """The name of a layer, or its number where the name does not fit."""
    return name if len(name) <= max(int(width / CHARACTER), 2) else str(at)


def weight_charts(data: dict[str, Any], views: Sequence[HeadView]) -> list[Chart]:
    """sigma_max and sigma_min of W_Q, W_K and W_V of every head: a bar from one to the other."""
    counts = [len(layer["heads"]) for layer in data["layers"]]
    step = min(max((WIDTH - LEFT - RIGHT) / max(sum(counts) + len(counts), 1), 5.5), 60.0)
    places, layers, start = [], [], LEFT
    for at, (layer, count) in enumerate(zip(data["layers"], counts, strict=True)):
        width, name = (count + 1) * step, layer_name(layer)
        places += [start + (head + 1) * step for head in range(count)]
        layers.append({"start": start, "x": start + width / 2, "name": name, "text": _fitting(name, at, width)})
        start += width
    extremes = ("sigma_max", "sigma_min")
    axis = _LogAxis(log10(v.row["weights"][role][key]) for v in views for role in "qkv" for key in extremes)
    charts = []
    for role in "qkv" if views else "":
        weights = [view.row["weights"][role] for view in views]
        kappas = sorted(number(weight["condition_number"]) for weight in weights)
        bars = [
            {
                "x": x, "top": axis(log10(weight["sigma_max"])), "bottom": axis(log10(weight["sigma_min"])),
                "deficient": bool(weight.get("nullity")),
                "told": f"{view.label}: sigma_max {show(weight['sigma_max'])}, sigma_min {show(weight['sigma_min'])}, "
                f"condition number {show(weight['condition_number'])}, rank {weight.get('rank')}",
            }
            for view, weight, x in zip(views, weights, places, strict=True)
        ]  # fmt: skip
        charts.append(
            {
                "role": role.upper(), "label": f"Extreme singular values of W_{role.upper()}",
                "described": f"{len(views)} heads; condition numbers from {show(kappas[0])} to {show(kappas[-1])}. "
                "Exact values are in the table of weights.",
                "left": LEFT, "right": start, "width": start + RIGHT, "height": 176, "ticks": axis.ticks,
                "layers": layers, "bars": bars,
            }
        )  # fmt: skip
    return charts


def spectrum_charts(data: dict[str, Any], views: Sequence[HeadView]) -> list[Chart]:
    """All singular values of the Jacobians, one panel per layer and one line per head, where they were computed."""
    known = [view for view in views if view.spectrum]
    zero = {view.label: log10(number(view.jacobian.get("rtol")) * number(view.jacobian["sigma_max"])) for view in known}
    axis = _LogAxis([*zero.values(), *(log10(view.jacobian["sigma_max"]) for view in known)])
    left, right, charts = 44.0, PANEL - 8, []
    for at, layer in enumerate(data["layers"]):
        inside = [view for view in known if view.layer == at]
        if not inside:
            continue
        longest, curves = max(len(view.spectrum) for view in inside), []
        for view in inside:
            sigma = view.spectrum
            points = " ".join(
                f"{left + (right - left) * i / max(longest - 1, 1):.1f},{axis(log10(sigma[i])):.1f}"
                for i in _thin(len(sigma))
            )
            told = f"{view.label}: {len(sigma)} singular values from {show(sigma[0])} to {show(sigma[-1])}"
            told += f", rank {view.jacobian.get('rank')}" + (", DEAD HEAD" if view.dead else "")
            look = f"curve c{view.index % NUM_COLOURS}" + (" dashed" if view.dead else "")
            curves.append({"told": told, "points": points, "look": look})
        charts.append(
            {
                "name": layer_name(layer), "label": f"Jacobian spectrum of {layer_name(layer)}",
                "described": f"{len(inside)} heads; up to {longest} singular values each, falling, on a logarithmic "
                "axis.",
                "left": left, "right": right, "width": PANEL, "height": 176, "ticks": axis.ticks, "longest": longest,
                "zero": axis(max(zero[view.label] for view in inside)), "curves": curves,
            }
        )  # fmt: skip
    return charts


def _thin(count: int) -> list[int]:
    """Indices to draw: all of a short list, else evenly spaced ones and, at both ends, where it bends, every one."""
    if count <= MOST_POINTS:
        return list(range(count))
    ends = set(range(20)) | set(range(count - 20, count))
    return sorted(ends | {round(i * (count - 1) / (MOST_POINTS - 40)) for i in range(MOST_POINTS - 39)})


def attention_charts(data: dict[str, Any], views: Sequence[HeadView]) -> list[Chart]:
    """Normalised entropy and diagonal mass: a dot per head, a line through the means of layers."""

    def entropy(view: HeadView) -> float:
        # Zero is zero, by whatever it is divided; a head may have collapsed so far that one key is all it sees.
        collapsed = view.dead and number(view.attention.get("entropy")) == 0
        return 0.0 if collapsed else number(view.attention.get("normalised_entropy"))

    def diagonal(view: HeadView) -> float:
        return number(view.attention.get("diagonal_mass"))

    drawn = [
        _strip(data, views, "Normalised entropy", "1 is uniform attention, 0 is attention to one token", entropy),
        _strip(data, views, "Diagonal mass", "mean probability of a token for itself", diagonal),
    ]
    return [chart for chart in drawn if chart["dots"]]


def _strip(
    data: dict[str, Any], views: Sequence[HeadView], name: str, meaning: str, value: Callable[[HeadView], float]
) -> Chart:
    layers = data["layers"]
    step = min(max((WIDTH - LEFT - RIGHT) / max(len(layers), 1), 26.0), 150.0)
    right, marks, dots, told = LEFT + step * len(layers), [], [], []
    runs: list[list[str]] = [[]]

    def height(x: float) -> float:
        return BOTTOM - min(max(x, 0.0), 1.0) * (BOTTOM - TOP)

    for at, layer in enumerate(layers):
        inside = [(view, value(view)) for view in views if view.layer == at and math.isfinite(value(view))]
        centre, full = LEFT + (at + 0.5) * step, layer_name(layer)
        marks.append({"x": centre, "name": full, "text": _fitting(full, at, step)})
        if not inside:
            runs.append([])  # no line across what is not known
            continue
        for i, (view, x) in enumerate(inside):
            spread = (i - (len(inside) - 1) / 2) * min(step * 0.7 / len(inside), 12)
            said = f"{view.label}: {name.lower()} {x:.4f}{', DEAD HEAD' if view.dead else ''}"
            dots.append({"x": centre + spread, "y": height(x), "dead": view.dead, "told": said})
        mean = sum(x for _, x in inside) / len(inside)
        runs[-1].append(f"{centre:.1f},{height(mean):.1f}")
        told.append(f"{full} {mean:.3f}")
    return {
        "name": name, "meaning": meaning, "label": f"{name} per layer",
        "described": f"{meaning}. Means over heads: {'; '.join(told)}.",
        "left": LEFT, "right": right, "width": right + RIGHT, "height": 176, "layers": marks, "dots": dots,
        "ticks": [(f"{tick:g}", height(tick)) for tick in (0.0, 0.25, 0.5, 0.75, 1.0)],
        "lines": [" ".join(points) for points in runs if len(points) > 1],
    }  # fmt: skip
