"""`render_measurement`: one self-contained page about one measurement. No script, no network."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
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
CONVENTIONS = {
    "wide": "wide: the parameter Jacobian itself, outputs by parameters, blocks of W_Q, W_K and W_V side by side",
    "stack": "stack: the papers' matrix, the blocks of W_Q, W_K and W_V on top of each other",
}
KAPPAS = {
    "strict": "strict: largest over smallest singular value; infinite where the rank is not full",
    "pseudo": "pseudo: largest over smallest non-zero singular value",
}
COMBINES = {
    "mean": "samples measured one by one, geometric mean",
    "stack": "all samples as one Jacobian, since they share the weights",
}
VERDICTS = {
    "dead head": "attention has collapsed: W_Q and W_K receive almost no gradient",
    "P": "the attention map dominates",
    "X": "the tokens dominate",
    "norms": "the sizes of J_Q, J_K and J_V differ most",
    "balanced": "nothing stands out",
    "unknown": "not diagnosed: not plain softmax attention",
}
WORDS = ("layer", "status", "verdict", "which term dominates", "method")
"""Columns of words; all others are numbers and stand at the right."""


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
    run = data.get("run") or {}
    certified = "certified, first sample" if any(view.num_samples > 1 for view in views) else "certified"
    heads, weights = [_head_row(view, certified) for view in views], [_weight_row(view) for view in views]
    whole = [view for view in views if view.spectrum]
    return render(
        "measurement.html",
        title=f"Conditioning of {run.get('model') or 'a model'}",
        facts=_facts(data, run),
        tiles=_tiles(data, views),
        heat_map=heat_map(data, views),
        verdicts=_verdict_counts(views),
        words=WORDS,
        columns=["layer", *heads[0]["cells"]] if heads else [],
        heads=heads,
        problems=[(layer_name(layer), layer["problem"]) for layer in data["layers"] if layer.get("problem")],
        weight_charts=weight_charts(data, views),
        weight_columns=["layer", *weights[0]["cells"]] if weights else [],
        weights=weights,
        too_large=len(views) - len(whole),
        spectrum_charts=spectrum_charts(data, views),
        spectrum_heads=sorted({view.index for view in whole}),
        num_colours=NUM_COLOURS,
        attention_charts=attention_charts(data, views),
        notes=_notes(data, views),
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


def _facts(data: dict[str, Any], run: dict[str, Any]) -> list[tuple[str, str]]:
    convention, kappa, combine = (str(data.get(key, "")) for key in ("convention", "kappa", "combine"))
    facts = [
        ("Model", str(run.get("model") or "not recorded")),
        ("Input", str(run.get("input") or "not recorded")),
        ("Jacobian", CONVENTIONS.get(convention, convention)),
        ("Condition number", KAPPAS.get(kappa, kappa)),
        ("Samples", COMBINES.get(combine, combine or "not recorded")),
        ("Conditioning", describe_conditioning(data.get("conditioning"))),
        ("Version", f"wellcond {run['version']}" if run.get("version") else "not recorded"),
    ]
    if run.get("command"):
        facts.append(("Command", str(run["command"])))
    return facts


def describe_conditioning(settings: Any) -> str:
    """Correction of a model in words."""
    if not settings:
        return "none: plain weights"
    if not isinstance(settings, dict):
        return str(settings)
    others = {key: value for key, value in settings.items() if key not in ("method", "sites", "version", "schema")}
    text = f"{settings.get('method', 'unnamed')}"
    if others:
        text += " (" + ", ".join(f"{key}={json.dumps(value, default=str)}" for key, value in others.items()) + ")"
    sites = settings.get("sites")
    return f"{text} on {len(sites)} attentions; effective weights are measured" if isinstance(sites, list) else text


def _tiles(data: dict[str, Any], views: Sequence[HeadView]) -> list[dict[str, Any]]:
    alive = sorted(view.kappa for view in views if not view.dead and not math.isnan(view.kappa))
    dead, infinite = sum(view.dead for view in views), sum(math.isinf(view.kappa) for view in views)
    unknown = sum(not view.diagnosis for view in views)
    undiagnosed = f", {unknown} not diagnosed" if unknown else ""
    inexact = sum(view.status != "exact" for view in views)
    unmeasured = sum(bool(layer.get("problem")) for layer in data["layers"])

    def tile(value: str, label: str, alarm: bool = False) -> dict[str, Any]:
        return {"value": value, "label": label, "alarm": alarm}

    tiles = [
        tile(str(len(views)), f"heads in {len(data['layers'])} attentions"),
        tile(show(alive[(len(alive) - 1) // 2]) if alive else show(None), "median κ(J), dead heads left out"),
        tile(show(alive[-1]) if alive else show(None), "worst κ(J), dead heads left out"),
        tile(str(dead), ("dead head" if dead == 1 else "dead heads") + undiagnosed, dead > 0),
        tile(str(infinite), "infinite κ(J)", infinite > 0),
        tile(str(inexact), "not exact", inexact > 0),
    ]
    if unmeasured:
        tiles.append(tile(str(unmeasured), "attentions not measured", True))
    return tiles


def _verdict_counts(views: Sequence[HeadView]) -> list[tuple[str, str]]:
    counts = Counter(str(view.row.get("verdict", "unknown")) for view in views)
    return [
        (verdict, f"{count} × {VERDICTS.get(verdict, 'see the explanation')}")
        for verdict, count in counts.most_common()
    ]


def _head_row(view: HeadView, certified: str) -> dict[str, Any]:
    """One head in the table of verdicts, by column; that of the certified interval is named."""
    low, high = view.interval
    bound = number(view.row.get("papers_bound_log10"))
    j, diagnosis, attention = view.jacobian, view.diagnosis, view.attention
    null = f" ({j['null_space']})" if j.get("null_space") else ""
    cells = {
        "head": str(view.index),
        "κ(J)": show(view.kappa, 4),
        "pseudo κ(J)": show(view.pseudo, 4),
        certified: f"{show(low)} to {show(high)}",
        "status": f"{view.status}; {view.why_not_finite}" if view.why_not_finite else view.status,
        "verdict": str(view.row.get("verdict", "unknown")),
        "which term dominates": view.explanation,
        **{f"|J_{role.upper()}|": show(diagnosis.get(f"norm_{role}")) for role in "qkv"},
        "κ(P)": show(diagnosis.get("kappa_p")),
        "κ(X)": show(diagnosis.get("kappa_x")),
        "entropy": show(attention.get("entropy"), 4),
        "diagonal": show(attention.get("diagonal_mass"), 4),
        "σ_max": show(j.get("sigma_max")),
        "σ_rank": show(j.get("sigma_rank")),
        "rank": str(j.get("rank", "")),
        "nullity": f"{j.get('nullity', '')}{null}",
        "method": str(j.get("method", "")),
        "surrogate*": "" if math.isnan(bound) else f"10^{bound:.1f}",
    }
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


def _notes(data: dict[str, Any], views: Sequence[HeadView]) -> list[str]:
    notes = [
        "A condition number of one head on one input is not a property of the model: other inputs give other numbers.",
        "Dead heads: where attention has collapsed, the Jacobian is nearly that of W_V alone. Its condition number is "
        "that of the tokens and can look excellent while W_Q and W_K no longer learn. Such heads are kept off the "
        "colour scale and out of medians.",
        "Certified interval: σ_max and the last non-zero σ are enclosed by rounding bounds or by inequalities that "
        "hold for certain; the interval is about the condition number over non-zero singular values. Where the "
        "nullity is not zero, the strict condition number is infinite all the same.",
    ]
    counts = Counter(view.status for view in views)
    if set(counts) - {"exact"}:
        said = ", ".join(f"{count} {status}" for status, count in counts.items() if status != "exact")
        notes.append(
            f"Not exact: {said} of {len(views)} heads. An estimate may be off by any factor its interval allows; "
            "'numerically singular' means that σ_min cannot be told from zero in float64, so only a lower bound on the "
            "condition number is known."
        )
    else:
        notes.append("Every Jacobian here has status 'exact': its singular values are right to float64 rounding.")
    bounds = [(view, number(view.row.get("papers_bound_log10"))) for view in views]
    known = [(view, bound) for view, bound in bounds if math.isfinite(bound)]
    if known:
        broken = sum(log10(view.jacobian.get("pseudo_condition_number")) > bound for view, bound in known)
        notes.append(
            "The surrogate is the expression that the papers print as an upper bound on κ(J). It is not a bound, in "
            "either convention, and lowering it need not lower κ(J). Here the measured pseudo condition number exceeds "
            f"it in {broken} of {len(known)} heads{'.' if broken else '; that is luck, not a theorem.'}"
        )
    if data.get("convention") == "stack":
        notes.append(
            "The stacked matrix is the papers' convention. It is not the Jacobian of the head's output, and its "
            "condition number is not comparable with that of the wide one."
        )
    if any(view.num_samples > 1 for view in views):
        notes.append(
            "Several samples: κ(J) is the geometric mean; intervals, ranks, spectra, norms and verdicts are of "
            "the first sample."
        )
    generic = sum(str(view.row.get("how", "")).startswith("generic") for view in views)
    if generic:
        notes.append(
            f"{generic} heads are not plain softmax attention: their Jacobians go through the module's own "
            "derivatives, and there is no diagnosis that could unmask a dead head."
        )
    return notes
