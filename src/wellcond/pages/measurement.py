"""`render_measurement`: one self-contained page about one measurement. No script, no network."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from wellcond.errors import ReportDataError
from wellcond.pages import environment, number, show

SCHEMA = 1
RAMP = ((236, 244, 250), (172, 207, 230), (97, 160, 206), (41, 105, 168), (11, 47, 98))
"""From pale (well conditioned) to dark (ill conditioned); one hue, so that it survives a grey printer."""
DEAD = "background:#26282b;color:#fff"
WIDTH, HEIGHT = 300, 130
MOST_POINTS = 160
Fields = dict[str, Any]


def render_measurement(data: dict[str, Any]) -> str:
    """HTML of a measurement: facts, heads, weights, spectra and what to be careful about.

    Args:
        data: `MeasurementReport.to_dict()`, or the JSON of it read back.

    Raises: ReportDataError if it is not a measurement.
    """
    if not isinstance(data, dict) or not isinstance(data.get("layers"), (list, tuple)) or data.get("schema") != SCHEMA:
        raise ReportDataError(
            f"expected a measurement of schema {SCHEMA} (a mapping with 'layers', as MeasurementReport.to_dict() "
            "gives), found something else. Make one with: wellcond measure MODEL -o report.json"
        )
    try:
        heads = [_head(layer, row) for layer in data["layers"] for row in layer["heads"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ReportDataError(
            f"expected 'heads' in every layer, each with its Jacobian, found a layer without heads or no Jacobians "
            f"({error!r}); measure with jacobian=True"
        ) from error
    _colour([head for head in heads if not head["dead"]])
    drawn = [head for head in heads if head["spectrum"]]
    layers = dict.fromkeys(head["layer"] for head in drawn)
    title = "Heads. * The papers' surrogate is not a bound; see the notes."
    of_weights = "Extreme singular values of the weights; of grouped queries, the worst"
    template = environment().get_template("measurement.html")
    return template.render(
        data=data,
        run=data.get("run") or {},
        heads=heads,
        table=_table(title, [head["cells"] for head in heads], words=(0, 4, 5, 6, 16)),
        weights=_table(of_weights, [_weights(head) for head in heads]),
        statuses=Counter(head["status"] for head in heads if head["status"] != "exact").most_common(),
        several=any(len(head["row"].get("samples") or ()) > 1 for head in heads),
        size=(WIDTH, HEIGHT),
        spectra=[_spectra(layer, [head for head in drawn if head["layer"] == layer]) for layer in layers],
    )


def _table(title: str, rows: list[dict[str, str]], words: tuple[int, ...] = (0,)) -> Fields:
    """Rows by column as the template `table.html` takes them; `words` are columns that hold no numbers."""
    header = list(rows[0]) if rows else []
    shown = [list(row.values()) for row in rows]
    return {"title": title, "header": header, "rows": shown, "text_columns": words, "notes": ()}


def _head(layer: Fields, row: Fields) -> Fields:
    jacobian, diagnosis, queries = row["jacobian"], row.get("diagnosis") or {}, list(row.get("query_heads") or ())
    attention = diagnosis.get("attention") or {}
    status, why = str(jacobian.get("status", "unknown")), str(row.get("why_not_finite") or "")
    kappa, bound = number(row.get("mean_kappa")), number(row.get("papers_bound_log10"))
    pseudo = number(row.get("mean_pseudo_kappa", jacobian.get("pseudo_condition_number")))
    unknown = f"not diagnosed, since this is not plain softmax attention ({row.get('how', 'unknown form')})"
    layer_name = str(layer.get("name") or "(model)")
    name = f"{layer_name}, head {row['index']}"
    name += f" (query heads {queries[0]} to {queries[-1]})" if len(queries) > 1 else ""
    nullity = str(jacobian.get("nullity", ""))
    nullity += f" ({jacobian['null_space']})" if jacobian.get("null_space") else ""
    cells = {
        "head": name,
        "κ(J)": ("" if status == "exact" else "~") + show(kappa, 4),
        "pseudo κ(J)": show(pseudo, 4),
        "certified": " to ".join(map(show, _interval(jacobian))),
        "status": f"{status}; {why}" if why else status,
        "verdict": str(row.get("verdict", "unknown")),
        "which term dominates": str(diagnosis.get("explanation", "")) if diagnosis else unknown,
        **{f"|J_{role.upper()}|": show(diagnosis.get(f"norm_{role}")) for role in "qkv"},
        "κ(P)": show(diagnosis.get("kappa_p")),
        "κ(X)": show(diagnosis.get("kappa_x")),
        "entropy": show(attention.get("entropy"), 4),
        "diagonal": show(attention.get("diagonal_mass"), 4),
        "rank": str(jacobian.get("rank", "")),
        "nullity": nullity,
        "method": str(jacobian.get("method", "")),
        "surrogate*": "" if math.isnan(bound) else f"10^{bound:.1f}",
    }
    dead = bool(row.get("dead"))
    return {
        "row": row,
        "cells": cells,
        "layer": layer_name,
        "status": status,
        "dead": dead,
        "kappa": pseudo if math.isinf(kappa) else kappa,
        "style": DEAD if dead else "",
        "spectrum": sorted(map(number, jacobian.get("singular_values") or ()), reverse=True),
        "exceeds": None if math.isnan(bound) else bool(pseudo > 10 ** min(bound, 300.0)),
    }


def _interval(jacobian: Fields) -> list[float]:
    """Certified interval of the condition number over the non-zero singular values."""
    tops, ends = (map(number, jacobian.get(f"{key}_bounds") or (None, None)) for key in ("sigma_max", "sigma_rank"))
    return [
        math.inf if end <= 0 < top else max(top / end, 1.0) if end > 0 else math.nan
        for top, end in zip(tops, reversed(list(ends)), strict=True)
    ]


def _colour(heads: list[Fields]) -> None:
    """Colours on log10 of the condition number. A dead head is not among them: its number is not meaningful."""
    known = [head for head in heads if 0 < head["kappa"] < math.inf]
    logs = [math.log10(head["kappa"]) for head in known]
    for head, logarithm in zip(known, logs, strict=True):
        at = (logarithm - min(logs)) / max(max(logs) - min(logs), 1.0) * (len(RAMP) - 1)
        low = min(int(at), len(RAMP) - 2)
        rgb = [round(a + (b - a) * (at - low)) for a, b in zip(*RAMP[low : low + 2], strict=True)]
        head["style"] = f"background:rgb({rgb[0]},{rgb[1]},{rgb[2]});color:#{'10202e' if at < 2.2 else 'fff'}"


def _weights(head: Fields) -> dict[str, str]:
    """One head in the table of weights, by column; of an infinite condition number, also rank and what is left."""
    cells = {"head": head["cells"]["head"]}
    for role in "qkv":
        weight, name = head["row"]["weights"][role], f"W_{role.upper()}"
        for sign, key in (("σ_max", "sigma_max"), ("σ_min", "sigma_min"), ("κ", "condition_number")):
            cells[f"{sign} {name}"] = show(weight.get(key))
        nullity, rank, pseudo = (number(weight.get(k)) for k in ("nullity", "rank", "pseudo_condition_number"))
        if nullity > 0:
            cells[f"κ {name}"] += f" (rank {rank:.0f} of {rank + nullity:.0f}, pseudo {show(pseudo)})"
    return cells


def _spectra(layer: str, heads: list[Fields]) -> Fields:
    """All singular values of the Jacobians of a layer over their largest, one falling line per head, in decades."""
    # At most sixteen decades, all that float64 resolves; what is below sits on the axis.
    falls = [
        [-math.log10(max(x / head["spectrum"][0], 1e-16)) if x > 0 else 16.0 for x in head["spectrum"]]
        for head in heads
    ]
    longest, curves = max(map(len, falls)), []
    decades = math.ceil(max(1.0, *(x for fall in falls for x in fall)))
    for head, fall in zip(heads, falls, strict=True):
        sigma, every, right = head["spectrum"], math.ceil(len(fall) / MOST_POINTS), WIDTH / max(longest - 1, 1)
        points = [f"{right * i:.1f},{HEIGHT * fall[i] / decades:.1f}" for i in range(0, len(fall), every)]
        title = f"{head['cells']['head']}: {len(sigma)} singular values from {show(sigma[0])} to {show(sigma[-1])}"
        look = f"curve c{int(head['row']['index']) % 8}" + (" dashed" if head["dead"] else "")
        curves.append({"title": title, "points": " ".join(points), "look": look})
    return {"name": layer, "longest": longest, "decades": decades, "curves": curves}
