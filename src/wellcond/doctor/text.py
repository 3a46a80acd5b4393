"""A diagnosis as plain text, and as a page."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection

from wellcond.doctor.records import SEVERITIES, Diagnosis, Finding, LayerFacts, count
from wellcond.pages import environment, shorten

COLUMNS: dict[str, str] = {
    "kappa(X)": "kappa_tokens",
    "logits": "logit_spread",
    "entropy": "entropy",
    "diag": "diagonal_mass",
    "Q": "scale_q",
    "K": "scale_k",
    "V": "scale_v",
    "O": "scale_o",
    "kappa(W)": "kappa_weights",
    "rank": "effective_rank",
    "SEC QK": "sec_qk",
    "SEC OV": "sec_ov",
    "attn": "attention_share",
    "mlp": "mlp_share",
    "kappa(J)": "kappa_jacobian",
}
ADDED = "attn, mlp: what they add, relative to the stream"
LEGEND = {
    "kappa(X)": "kappa(X): condition number of the tokens that enter",
    "logits": "logits: their standard deviation",
    "entropy": "entropy: 1 is uniform",
    "diag": "diag: probability of a token for itself",
    "Q": "Q to O: sigma sqrt(fan_in)",
    "kappa(W)": "kappa(W), rank: worst condition number and effective rank of W_Q to W_O of a head",
    "SEC QK": "SEC: share of the largest d/16 squared singular values of W_Q^T W_K and W_O W_V, the largest of a head",
    "attn": ADDED,
    "kappa(J)": "kappa(J): condition number of the Jacobian, the worst head",
}
"""By the first column that an entry is about."""
NARROWEST = 14
"""For names of layers; where there is less, columns are left out."""
LEAST = ("diag", "mlp", "O", "K", "entropy")
"""Columns that may be left out, in that order."""
ABOUT = {
    "projection-scale": ("scale_q", "scale_k", "scale_v"),
    "value-scale": ("scale_v",),
    "stream": ("attention_share", "mlp_share"),
    "logits": ("logit_spread",),
    "lambda": ("entropy", "diagonal_mass"),
}
"""Columns of the table of layers that a finding is about."""
TITLES = {"kappa(X)": "κ(X)", "kappa(J)": "κ(J)"}


def show_diagnosis(diagnosis: Diagnosis, width: int) -> str:
    """What was examined, findings, and a table of layers, in at most `width` columns."""
    parts = ["\n".join(_wrap(line, width) for line in heading(diagnosis))]
    first: dict[tuple[str, str], int] = {}
    for number, finding in enumerate(diagnosis.findings, 1):
        same = first.setdefault((finding.remedy, finding.evidence), number)
        parts.append(_show_finding(number, finding, width, same))
    parts += [_wrap(f"not understood: {' '.join(refusal.split())}", width) for refusal in diagnosis.not_understood]
    columns = _columns(diagnosis)
    shown = _fitting(columns, width)
    lines = legend(diagnosis, shown)
    if left_out := [title for title in columns if title not in shown]:
        lines.insert(0, f"{width} columns are too narrow for {', '.join(left_out)}; --json has them.")
    return "\n\n".join([*parts, _table(diagnosis, shown, width), "\n".join(_wrap(line, width) for line in lines)])


def legend(diagnosis: Diagnosis, columns: Collection[str]) -> list[str]:
    """What the columns that are shown, and names in the findings, mean."""
    used = any("wc." in finding.remedy for finding in diagnosis.findings)
    entries = "; ".join(text for column, text in LEGEND.items() if column in columns)
    if "mlp" not in columns:
        entries = entries.replace(ADDED, "attn: what the attention adds, relative to the stream")
    names = (
        "wc is wellcond (import wellcond as wc), batch what the model is called with; records are files in wellcond's "
        "repository."
    )
    return [*([f"{entries}."] if entries else []), *([names] if used else [])]


def heading(diagnosis: Diagnosis) -> list[str]:
    """What was examined, and how many findings there are."""
    state = {
        True: "before training (no norm was trained)",
        False: "trained: rules for untrained models do not apply",
        None: "cannot tell whether this model is trained (no norm shows it): rules for untrained models were not "
        "applied; for a new model pass trained=False (--fresh)",
    }[diagnosis.fresh]
    lines = [f"{name}: {diagnosis.run[name]}" for name in ("model", "input") if name in diagnosis.run]
    lines.append(f"state: {state}")
    if diagnosis.conditioning is not None:
        lines.append(f"conditioned by: {diagnosis.conditioning['method']} (effective weights)")
    found = count(len(diagnosis.findings), "finding") if diagnosis.findings else "Nothing to fix"
    unknown = " by the rules for every model" if diagnosis.fresh is None else ""
    return [*lines, "", f"{found}{unknown} in {count(len(diagnosis.layers), 'attention layer')}."]


def _show_finding(number: int, finding: Finding, width: int, same: int) -> str:
    """A finding; where its line was printed already, the number of the finding that has it."""
    record = f" [{finding.record}]" if finding.record else ""
    rows = [("fix", finding.remedy), ("records", finding.evidence + record)]
    if same != number:
        rows = [("fix", f"the line of {same}")]
    lines = [_wrap(finding.verdict, width, first=f"{number}. {finding.severity}: ", rest="   ")]
    for label, text in rows:
        lines.append(_wrap(text, width, first=f"   {label + ':':9}", rest=" " * 12))
    return "\n".join(lines)


def _wrap(text: str, width: int, *, first: str = "", rest: str = "") -> str:
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _columns(diagnosis: Diagnosis) -> dict[str, list[str]]:
    """The cells of each column; columns in which every layer is empty are left out."""
    columns = {
        title: [show_number(getattr(layer, name)) for layer in diagnosis.layers]
        for title, name in COLUMNS.items()
        if any(getattr(layer, name) is not None for layer in diagnosis.layers)
    }
    marks = [mark(layer) for layer in diagnosis.layers]
    if any(marks):
        columns["remarks"] = marks
    return columns


def _widths(columns: dict[str, list[str]]) -> dict[str, int]:
    return {title: max(len(title), *map(len, cells)) for title, cells in columns.items()}


def _fitting(columns: dict[str, list[str]], width: int) -> dict[str, list[str]]:
    """The columns that fit beside a short name of a layer; those of LEAST make room."""
    shown = dict(columns)
    for title in LEAST:
        if width - sum(size + 2 for size in _widths(shown).values()) < NARROWEST and title in shown:
            del shown[title]
    return shown


def _table(diagnosis: Diagnosis, shown: dict[str, list[str]], width: int) -> str:
    widths = _widths(shown)
    room = max(NARROWEST, width - sum(size + 2 for size in widths.values()))
    short = shorten((layer.name or "(model)" for layer in diagnosis.layers), room)
    names = [short[layer.name or "(model)"] for layer in diagnosis.layers]
    first = max(len("layer"), *map(len, names))

    def line(name: str, cells: list[str]) -> str:
        return (
            name.ljust(first) + "".join(f"  {c:>{w}}" for c, w in zip(cells, widths.values(), strict=True))
        ).rstrip()

    rows = [line(name, [cells[at] for cells in shown.values()]) for at, name in enumerate(names)]
    return "\n".join([line("layer", list(shown)), *rows])


def mark(layer: LayerFacts) -> str:
    """What stands out in a layer, in a word or two."""
    dead, pairs = len(layer.dead_heads), len(layer.duplicate_heads)
    if not layer.called:
        return "not called"
    if layer.logits_hidden:
        return "logits not seen"
    if not layer.finite:
        return "not finite"
    return f"{dead} dead" if dead else f"{pairs} alike" if pairs else ""


def show_number(number: float | None) -> str:
    """Three digits.

    Example:
        >>> show_number(0.12345), show_number(1.0), show_number(152.3), show_number(1234.5), show_number(None)
        ('0.123', '1.00', '152', '1.23e+03', '-')
    """
    if number is None or math.isnan(number):
        return "-"
    return f"{number:.3f}" if abs(number) < 0.9995 else f"{number:#.3g}".removesuffix(".")


def render_diagnosis(diagnosis: Diagnosis) -> str:
    """HTML of a diagnosis: findings, and a table of the attention layers.

    Raises: MissingExtraError if jinja2 is not installed.
    """
    *facts, _, summary = heading(diagnosis)
    known = [n for n in COLUMNS.values() if any(getattr(layer, n) is not None for layer in diagnosis.layers)]
    shown = {title: name for title, name in COLUMNS.items() if name in known}
    template = environment().get_template("diagnosis.html")
    return template.render(
        diagnosis=diagnosis,
        facts=[fact.split(": ", 1) for fact in facts],
        summary=summary,
        severities=SEVERITIES,
        columns=[TITLES.get(title, title) for title in shown],
        rows=[_layer_row(diagnosis, layer, known) for layer in diagnosis.layers],
        legend=legend(diagnosis, shown),
    )


def _layer_row(diagnosis: Diagnosis, layer: LayerFacts, names: list[str]) -> dict[str, object]:
    marked = {
        name: finding.severity
        for finding in reversed(diagnosis.findings)
        if layer.name in finding.layers
        for name in ABOUT.get(finding.kind, ())
    }
    cells = [(show_number(getattr(layer, name)), marked.get(name, "")) for name in names]
    return {"name": layer.name or "(model)", "cells": cells, "remark": mark(layer)}
