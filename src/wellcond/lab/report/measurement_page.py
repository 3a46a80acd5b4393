"""`render_measurement`: one self-contained page about one measurement. No script, no network."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from wellcond.errors import WellcondError
from wellcond.lab.report.page import render
from wellcond.lab.report.plots import RAMP
from wellcond.lab.report.table import INFINITE, MISSING, cut, log10, number, show

SCHEMA = 1
WIDTH, HEIGHT = 300.0, 130.0
"""Of the plot of a spectrum, in pixels."""
NUM_COLOURS = 8
MOST_POINTS = 160
LONGEST_NAME = 34
Fields = dict[str, Any]


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
    heads = read_heads(data)
    several = any(len(head.row.get("samples") or ()) > 1 for head in heads)
    alive = sorted(head.kappa for head in heads if not head.dead and not math.isnan(head.kappa))
    measured = [log10(head.jacobian.get("pseudo_condition_number")) for head in heads]
    bounds = [number(head.row.get("papers_bound_log10")) for head in heads]
    low, high = colour_range(heads)
    statuses = Counter(head.status for head in heads)
    heat_map = [
        {
            "name": _layer_name(layer), "short": cut(_layer_name(layer), LONGEST_NAME), "problem": layer.get("problem"),
            "cells": {head.index: _cell(head, low, high) for head in heads if head.layer == at},
        }
        for at, layer in enumerate(data["layers"])
    ]  # fmt: skip
    return render(
        "measurement.html", data=data, run=data.get("run") or {}, low=low, high=high, ramp=RAMP, heat_map=heat_map,
        conditioning=describe_conditioning(data.get("conditioning")), several=several,
        median=show(alive[(len(alive) - 1) // 2] if alive else None), worst=show(alive[-1] if alive else None),
        dead=sum(head.dead for head in heads), undiagnosed=sum(not head.diagnosis for head in heads),
        infinite=sum(math.isinf(head.kappa) for head in heads), indices=sorted({head.index for head in heads}),
        problems=[(_layer_name(layer), layer["problem"]) for layer in data["layers"] if layer.get("problem")],
        statuses=[(name, count) for name, count in statuses.items() if name != "exact"],
        verdicts=Counter(str(head.row.get("verdict", "unknown")) for head in heads).most_common(),
        heads=[_head_row(head, "certified, first sample" if several else "certified") for head in heads],
        weights=[_weight_row(head) for head in heads], bounded=sum(map(math.isfinite, bounds)),
        exceeded=sum(math.isfinite(bound) and kappa > bound for kappa, bound in zip(measured, bounds, strict=True)),
        generic=sum(str(head.row.get("how", "")).startswith("generic") for head in heads),
        spectra=_spectra([head for head in heads if head.spectrum]), num_colours=NUM_COLOURS, size=(WIDTH, HEIGHT),
        spectrum_heads=sorted({head.index for head in heads if head.spectrum}),
        too_large=sum(not head.spectrum for head in heads),
    )  # fmt: skip


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
    if not settings or not isinstance(settings, dict):
        return str(settings) if settings else "none: plain weights"
    others = {key: value for key, value in settings.items() if key not in ("method", "sites", "version", "schema")}
    options = ", ".join(f"{key}={json.dumps(value, default=str)}" for key, value in others.items())
    text, sites = f"{settings.get('method', 'unnamed')}" + (f" ({options})" if options else ""), settings.get("sites")
    return f"{text} on {len(sites)} attentions; effective weights are measured" if isinstance(sites, list) else text


class Head:
    """One head of a stored measurement."""

    def __init__(self, at: int, layer: Fields, row: Fields) -> None:
        """Read what is there; a head that was not diagnosed says so."""
        self.layer, self.layer_name, self.row, self.index = at, _layer_name(layer), row, int(row["index"])
        self.jacobian: Fields = row["jacobian"]
        self.diagnosis: Fields = row.get("diagnosis") or {}
        # The condition number asked for, and that over the non-zero spectrum; both are means over samples.
        self.kappa = number(row.get("mean_kappa"))
        self.pseudo = number(row.get("mean_pseudo_kappa", self.jacobian.get("pseudo_condition_number")))
        self.dead, self.status = bool(row.get("dead")), str(self.jacobian.get("status", "unknown"))
        # All singular values, falling; none where only the extremes are known.
        self.spectrum = sorted(map(number, self.jacobian.get("singular_values") or ()), reverse=True)
        unknown = f"not diagnosed, since this is not plain softmax attention ({row.get('how', 'unknown form')})"
        self.explanation = str(self.diagnosis.get("explanation", "")) if self.diagnosis else unknown

    @property
    def label(self) -> str:
        """Layer, head and, of grouped queries, which."""
        queries = list(self.row.get("query_heads") or ())
        group = f" (query heads {queries[0]} to {queries[-1]})" if len(queries) > 1 else ""
        return f"{self.layer_name}, head {self.index}{group}"

    @property
    def interval(self) -> tuple[float, float]:
        """Certified, of the condition number over the non-zero singular values."""
        keys = ("sigma_max_bounds", "sigma_rank_bounds")
        tops, ends = ([number(end) for end in self.jacobian.get(key) or (None, None)] for key in keys)
        low, high = (
            math.nan if math.isnan(top + end) else math.inf if end <= 0 else top / end
            for top, end in zip(tops, reversed(ends), strict=True)
        )
        return low if math.isnan(low) else max(low, 1.0), high


def read_heads(data: dict[str, Any]) -> list[Head]:
    """Every head of a stored measurement."""
    return [Head(at, layer, row) for at, layer in enumerate(data["layers"]) for row in layer["heads"]]


def _layer_name(layer: Fields) -> str:
    """Its name; the model itself has none."""
    return str(layer.get("name") or "(model)")


def _head_row(head: Head, certified: str) -> Fields:
    """One head in the table of verdicts, by column; that of the certified interval is named."""
    low, high = head.interval
    bound, why = number(head.row.get("papers_bound_log10")), str(head.row.get("why_not_finite") or "")
    j, diagnosis, attention = head.jacobian, head.diagnosis, head.diagnosis.get("attention") or {}
    cells = {
        "head": str(head.index), "κ(J)": show(head.kappa, 4), "pseudo κ(J)": show(head.pseudo, 4),
        certified: f"{show(low)} to {show(high)}", "status": f"{head.status}; {why}" if why else head.status,
        "verdict": str(head.row.get("verdict", "unknown")), "which term dominates": head.explanation,
        **{f"|J_{role.upper()}|": show(diagnosis.get(f"norm_{role}")) for role in "qkv"},
        "κ(P)": show(diagnosis.get("kappa_p")), "κ(X)": show(diagnosis.get("kappa_x")),
        "entropy": show(attention.get("entropy"), 4), "diagonal": show(attention.get("diagonal_mass"), 4),
        "σ_max": show(j.get("sigma_max")), "σ_rank": show(j.get("sigma_rank")), "rank": str(j.get("rank", "")),
        "nullity": f"{j.get('nullity', '')}" + (f" ({j['null_space']})" if j.get("null_space") else ""),
        "method": str(j.get("method", "")), "surrogate*": "" if math.isnan(bound) else f"10^{bound:.1f}",
    }  # fmt: skip
    return {"layer": head.layer_name, "dead": head.dead, "reason": str(j.get("reason", "")), "cells": cells}


def _weight_row(head: Head) -> Fields:
    """One head in the table of weights, by column; of an infinite condition number, also rank and what is left."""
    cells = {"head": str(head.index)}
    for role in "qkv":
        weight, name = head.row["weights"][role], f"W_{role.upper()}"
        for sign, key in (("σ_max", "sigma_max"), ("σ_min", "sigma_min"), ("κ", "condition_number")):
            cells[f"{sign} {name}"] = show(weight.get(key))
        nullity, rank, pseudo = (number(weight.get(k)) for k in ("nullity", "rank", "pseudo_condition_number"))
        if nullity > 0:
            cells[f"κ {name}"] += f" (rank {rank:.0f} of {rank + nullity:.0f}, pseudo {show(pseudo)})"
    return {"layer": head.layer_name, "dead": False, "reason": "", "cells": cells}


def ramp_colour(share: float) -> tuple[str, str]:
    """Colour at a share of the ramp, and the colour of text on it."""
    at = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(at), len(RAMP) - 2)
    ends = [bytes.fromhex(colour[1:]) for colour in RAMP[low : low + 2]]
    rgb = [round(a + (b - a) * (at - low)) for a, b in zip(*ends, strict=True)]
    bright = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 140
    return "#{:02x}{:02x}{:02x}".format(*rgb), "#10202e" if bright else "#ffffff"


def colour_range(heads: Iterable[Head]) -> tuple[int, int]:
    """Decades of the colour scale. A dead head is not on it: its condition number says nothing good."""
    return _decades(log10(head.pseudo if math.isinf(head.kappa) else head.kappa) for head in heads if not head.dead)


def _decades(logarithms: Iterable[float]) -> tuple[int, int]:
    """Whole decades around what is finite."""
    finite = [x for x in logarithms if math.isfinite(x)]
    low, high = math.floor(min(finite, default=0.0)), math.ceil(max(finite, default=1.0))
    return low, max(high, low + 1)


def _cell(head: Head, low: int, high: int) -> Fields:
    """Text, colours and description of a head."""
    logarithm, pseudo = log10(head.kappa), log10(head.pseudo)
    kind, (fill, ink) = "finite" if math.isfinite(logarithm) else "infinite", ("", "")
    if head.dead:
        kind, text = "dead", "dead"
    elif logarithm == math.inf and math.isfinite(pseudo):
        (fill, ink), text = ramp_colour((pseudo - low) / (high - low)), f"{pseudo:.1f}*"
    elif head.status == "numerically singular" or logarithm == math.inf:
        bound = log10(head.interval[0])
        known = head.status == "numerically singular" and math.isfinite(bound)
        kind, text = "infinite", f"≥{bound:.1f}" if known else INFINITE
    elif math.isnan(logarithm):
        text = MISSING
    else:
        fill, ink = ramp_colour((logarithm - low) / (high - low))
        text = f"{'~' if head.status != 'exact' else ''}{logarithm:.1f}"
    told, samples = f"{head.label}: condition number {show(head.kappa, 4)}", len(head.row.get("samples") or ())
    if why := head.row.get("why_not_finite"):
        told += f" ({why}), over the non-zero spectrum {show(head.pseudo, 4)}"
    if samples > 1:
        told += f" (geometric mean of {samples} samples, spread {show(head.row.get('spread'))})"
    if head.dead:
        told += ", DEAD HEAD: attention has collapsed, so this number says nothing good"
    told += f"; {head.status}; {head.explanation}"
    return {"head": f"{head.layer}.{head.index}", "kind": kind, "told": told, "fill": fill, "ink": ink, "text": text}


def _spectra(heads: Sequence[Head]) -> list[Fields]:
    """All singular values of the Jacobians, one plot per layer and one line per head, in whole decades."""
    zero = [log10(number(head.jacobian.get("rtol")) * number(head.jacobian["sigma_max"])) for head in heads]
    tops = [log10(head.jacobian["sigma_max"]) for head in heads]
    low, high = _decades([*zero, *tops])

    def place(logarithm: float) -> float:
        """Height of a value; what is below the axis (zero) sits on it."""
        return HEIGHT * (high - min(max(logarithm, low), high)) / (high - low)

    plots = []
    for layer in dict.fromkeys(head.layer for head in heads):
        inside = [head for head in heads if head.layer == layer]
        longest, curves = max(len(head.spectrum) for head in inside), []
        for head in inside:
            sigma, right = head.spectrum, WIDTH / max(longest - 1, 1)
            points = " ".join(f"{right * i:.1f},{place(log10(sigma[i])):.1f}" for i in _thin(len(sigma)))
            told = f"{head.label}: {len(sigma)} singular values from {show(sigma[0])} to {show(sigma[-1])}"
            told += f", rank {head.jacobian.get('rank')}" + (", DEAD HEAD" if head.dead else "")
            look = f"curve c{head.index % NUM_COLOURS}" + (" dashed" if head.dead else "")
            curves.append({"told": told, "points": points, "look": look})
        floor = place(max(z for z, head in zip(zero, heads, strict=True) if head.layer == layer))
        plots.append({"name": inside[0].layer_name, "longest": longest, "floor": floor, "low": low, "high": high,
                      "curves": curves})  # fmt: skip
    return plots


def _thin(count: int) -> list[int]:
    """Indices to draw: all of a short list, else evenly spaced ones and, at both ends, where it bends, every one."""
    if count <= MOST_POINTS:
        return list(range(count))
    ends = set(range(20)) | set(range(count - 20, count))
    return sorted(ends | {round(i * (count - 1) / (MOST_POINTS - 40)) for i in range(MOST_POINTS - 39)})
