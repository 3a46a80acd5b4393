"""`render_measurement`: one self-contained page about one measurement. No script, no network."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from wellcond.errors import WellcondError
from wellcond.lab.report.measurement_charts import (
    NUM_COLOURS,
    HeadView,
    attention_charts,
    head_views,
    heat_map,
    layer_name,
    spectrum_charts,
    weight_charts,
)
from wellcond.lab.report.render import render
from wellcond.lab.report.values import log10, number, show

SCHEMA = 1


class ReportDataError(WellcondError, ValueError):
    """Data that is not a measurement."""


def render_measurement(data: dict[str, Any]) -> str:
    """HTML of a measurement: facts, heat map, weights, spectra, attention, verdicts and what to be careful about.

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
        weight_charts=weight_charts(data, views),
        spectrum_charts=spectrum_charts(data, views),
        spectrum_heads=sorted({view.index for view in whole}),
        too_large=len(views) - len(whole),
        attention_charts=attention_charts(data, views),
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
