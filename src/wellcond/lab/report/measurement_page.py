"""`render_measurement`: one self-contained page about one measurement. No script, no network; charts are SVG."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from wellcond.errors import WellcondError
from wellcond.lab.report.plots import RAMP
from wellcond.lab.report.render import render
from wellcond.lab.report.values import INFINITE, MISSING, log10, number, show

SCHEMA = 1
PANEL = 320.0
TOP, BOTTOM = 12.0, 148.0
CELL_HEIGHT = 30
NUM_COLOURS = 8
MOST_POINTS = 160
LONGEST_NAME = 34
Chart = dict[str, Any]


class ReportDataError(WellcondError, ValueError):
    """Data that is not a measurement."""


def render_measurement(data: dict[str, Any]) -> str:
    """HTML of a measurement: facts, heat map, verdicts, weights, spectra and what to be careful about.

    Args:
        data: `MeasurementReport.to_dict()`, or the JSON of it read back. ``data["run"]`` names ``model``, ``input``,
            ``version`` and, if there, ``command``.

    Raises: ReportDataError if it is not a measurement.

    Example:
        >>> page = render_measurement({"schema": 1, "layers": [], "convention": "wide", "kappa": "strict"})
        >>> page.startswith("<!DOCTYPE html>")
        True
    """
    _check(data)
    views = head_views(data)
    several = any(view.num_samples > 1 for view in views)
    alive = sorted(view.kappa for view in views if not view.dead and not math.isnan(view.kappa))
    whole = [view for view in views if view.spectrum]
    measured = [log10(view.jacobian.get("pseudo_condition_number")) for view in views]
    bounds = [number(view.row.get("papers_bound_log10")) for view in views]
    return render(
        "measurement.html",
        data=data,
        run=data.get("run") or {},
        conditioning=describe_conditioning(data.get("conditioning")),
        median=show(alive[(len(alive) - 1) // 2] if alive else None),
        worst=show(alive[-1] if alive else None),
        dead=sum(view.dead for view in views),
        undiagnosed=sum(not view.diagnosis for view in views),
        infinite=sum(math.isinf(view.kappa) for view in views),
        problems=[(layer_name(layer), layer["problem"]) for layer in data["layers"] if layer.get("problem")],
        statuses=[(name, n) for name, n in Counter(view.status for view in views).items() if name != "exact"],
        verdicts=Counter(str(view.row.get("verdict", "unknown")) for view in views).most_common(),
        heads=[_head_row(view, "certified, first sample" if several else "certified") for view in views],
        weights=[_weight_row(view) for view in views],
        several=several,
        bounded=sum(map(math.isfinite, bounds)),
        exceeded=sum(math.isfinite(bound) and kappa > bound for kappa, bound in zip(measured, bounds, strict=True)),
        generic=sum(str(view.row.get("how", "")).startswith("generic") for view in views),
        heat_map=heat_map(data, views),
        spectrum_charts=spectrum_charts(data, views),
        spectrum_heads=sorted({view.index for view in whole}),
        too_large=len(views) - len(whole),
        num_colours=NUM_COLOURS,
    )


def _check(data: Any) -> None:
    if not isinstance(data, dict) or not isinstance(data.get("layers"), (list, tuple)):
        found = f"keys {sorted(map(str, data))[:8]}" if isinstance(data, dict) else type(data).__name__
        raise ReportDataError(
            f"expected a measurement (a mapping with 'layers', as MeasurementReport.to_dict() gives), found {found}. "
            "Make one with: wellcond measure MODEL -o report.json"
        )
    if data.get("schema") != SCHEMA:
        raise ReportDataError(
            f"expected a measurement of schema {SCHEMA}, found {data.get('schema')!r}. It is of another version of "
            "wellcond: measure again, or use that version"
        )
    for layer in data["layers"]:
        if not isinstance(layer, dict) or not isinstance(layer.get("heads"), (list, tuple)):
            raise ReportDataError("expected 'heads' in every layer of a measurement, found a layer without them")
        if any(isinstance(head, dict) and head.get("jacobian", {}) is None for head in layer["heads"]):
            raise ReportDataError("this measurement has no Jacobians (jacobian=False); measure with them for a page")


def describe_conditioning(settings: Any) -> str:
    """Correction of a model in words."""
    if not settings:
        return "none: plain weights"
    if not isinstance(settings, dict):
        return str(settings)
    others = {key: value for key, value in settings.items() if key not in ("method", "sites", "version", "schema")}
    options = ", ".join(f"{key}={json.dumps(value, default=str)}" for key, value in others.items())
    text, sites = f"{settings.get('method', 'unnamed')}" + (f" ({options})" if options else ""), settings.get("sites")
    return f"{text} on {len(sites)} attentions; effective weights are measured" if isinstance(sites, list) else text


def _head_row(view: HeadView, certified: str) -> dict[str, Any]:
    """One head in the table of verdicts, by column; that of the certified interval is named."""
    low, high = view.interval
    bound = number(view.row.get("papers_bound_log10"))
    j, diagnosis, attention = view.jacobian, view.diagnosis, view.attention
    cells = {
        "head": str(view.index), "κ(J)": show(view.kappa, 4), "pseudo κ(J)": show(view.pseudo, 4),
        certified: f"{show(low)} to {show(high)}",
        "status": f"{view.status}; {view.why_not_finite}" if view.why_not_finite else view.status,
        "verdict": str(view.row.get("verdict", "unknown")), "which term dominates": view.explanation,
        **{f"|J_{role.upper()}|": show(diagnosis.get(f"norm_{role}")) for role in "qkv"},
        "κ(P)": show(diagnosis.get("kappa_p")), "κ(X)": show(diagnosis.get("kappa_x")),
        "entropy": show(attention.get("entropy"), 4), "diagonal": show(attention.get("diagonal_mass"), 4),
        "σ_max": show(j.get("sigma_max")), "σ_rank": show(j.get("sigma_rank")), "rank": str(j.get("rank", "")),
        "nullity": f"{j.get('nullity', '')}" + (f" ({j['null_space']})" if j.get("null_space") else ""),
        "method": str(j.get("method", "")), "surrogate*": "" if math.isnan(bound) else f"10^{bound:.1f}",
    }  # fmt: skip
    return {"layer": view.layer_name, "dead": view.dead, "reason": str(j.get("reason", "")), "cells": cells}


def _weight_row(view: HeadView) -> dict[str, Any]:
    """One head in the table of weights, by column; of an infinite condition number, also rank and what is left."""
    cells = {"head": str(view.index)}
    for role in "qkv":
        weight, name = view.row["weights"][role], f"W_{role.upper()}"
        for sign, key in (("σ_max", "sigma_max"), ("σ_min", "sigma_min"), ("κ", "condition_number")):
            cells[f"{sign} {name}"] = show(weight.get(key))
        nullity, rank, pseudo = (number(weight.get(k)) for k in ("nullity", "rank", "pseudo_condition_number"))
        if nullity > 0:
            cells[f"κ {name}"] += f" (rank {rank:.0f} of {rank + nullity:.0f}, pseudo {show(pseudo)})"
    return {"layer": view.layer_name, "dead": False, "reason": "", "cells": cells}


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
    ends = [bytes.fromhex(colour[1:]) for colour in RAMP[low : low + 2]]
    rgb = [round(a + (b - a) * (at - low)) for a, b in zip(*ends, strict=True)]
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
        "stops": RAMP,
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
