"""A diagnosis as one self-contained page: no script, no network."""

from __future__ import annotations

from wellcond.doctor.records import SEVERITIES, Diagnosis, LayerFacts
from wellcond.doctor.text import COLUMNS, heading, legend, mark, show_number
from wellcond.pages import environment

ABOUT = {
    "projection-scale": ("scale_q", "scale_k", "scale_v"),
    "value-scale": ("scale_v",),
    "stream": ("attention_share", "mlp_share"),
    "logits": ("logit_spread",),
    "lambda": ("entropy", "diagonal_mass"),
}
"""Columns that a finding is about."""
TITLES = {"kappa(X)": "κ(X)", "kappa(J)": "κ(J)"}


def render_diagnosis(diagnosis: Diagnosis) -> str:
    """HTML of a diagnosis.

    Raises: MissingExtraError if jinja2 is not installed.
    """
    *facts, _, summary = heading(diagnosis)
    shown = {
        title: name
        for title, name in COLUMNS.items()
        if any(getattr(layer, name) is not None for layer in diagnosis.layers)
    }
    return (
        environment()
        .get_template("diagnosis.html")
        .render(
            diagnosis=diagnosis,
            facts=[fact.split(": ", 1) for fact in facts],
            summary=summary,
            severities=SEVERITIES,
            columns=[TITLES.get(title, title) for title in shown],
            rows=[_row(diagnosis, layer, list(shown.values())) for layer in diagnosis.layers],
            legend=legend(diagnosis, shown),
        )
    )


def _row(diagnosis: Diagnosis, layer: LayerFacts, names: list[str]) -> dict[str, object]:
    marked = {
        name: finding.severity
        for finding in reversed(diagnosis.findings)
        if layer.name in finding.layers
        for name in ABOUT.get(finding.kind, ())
    }
    cells = [(show_number(getattr(layer, name)), marked.get(name, "")) for name in names]
    return {"name": layer.name or "(model)", "cells": cells, "remark": mark(layer)}
