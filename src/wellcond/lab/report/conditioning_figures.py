"""Rows of the figures about conditioning: weights, Jacobians, layers, attention maps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from wellcond.lab.report.analysis import Analysis
from wellcond.lab.report.formats import show_share
from wellcond.lab.report.head_table import ROLES, HeadTable
from wellcond.lab.report.series import MEAN, Curve, Figure, Panel, Row, curve_rows, with_points
from wellcond.lab.report.training_figures import BAND

HEADS = "Geometric means over heads and layers. "
NOT_A_BOUND = "papers' bound (not a bound)"
Reader = Callable[[HeadTable], np.ndarray]


def conditioning_figures(analysis: Analysis) -> list[Figure]:
    """Every figure that needs conditioning rows; figures without a single point are left out."""
    figures = [
        _jacobian(analysis),
        _weights(analysis, "kappa", "weights", "Condition numbers of the weights, W + C", "as the forward uses them"),
        _sigmas(analysis),
        *([_raw_weights(analysis)] if corrected(analysis) else []),
        *_layer_figures(analysis),
        _attention(analysis),
    ]
    return [figure for figure in figures if figure.panels]


def _curves(analysis: Analysis, read: Reader) -> dict[str, list[Curve]]:
    return {
        method: [
            Curve(table.run, table.steps.tolist(), table.epochs().tolist(), read(table).tolist()) for table in tables
        ]
        for method, tables in analysis.heads.items()
    }


def _lines(
    analysis: Analysis, section: str, name: str, title: str, caption: str, panels: list[tuple[Panel, Reader]]
) -> Figure:
    rows: list[Row] = []
    for panel, read in panels:
        curves = _curves(analysis, read)
        rows += curve_rows(analysis.comparison, name, panel.name, curves, log=panel.log, limits=panel.span)
    kept = with_points((panel for panel, _ in panels), rows)
    return Figure(
        name, section, title, caption, "lines", kept, tuple(rows),
        x_label=analysis.unit, by_epoch=analysis.unit == "epoch",
    )  # fmt: skip


def _geometric(key: str) -> Reader:
    return lambda table: table.over_steps(key, log=True)


def _arithmetic(key: str) -> Reader:
    return lambda table: table.over_steps(key, log=False)


def _singular(analysis: Analysis, *keys: str) -> str:
    """A sentence on the infinite condition numbers, which are in no mean; empty if there are none."""
    found = {}
    for method, tables in analysis.heads.items():
        values = np.concatenate([table.columns[key] for table in tables for key in keys] or [np.empty(0)])
        share = np.isinf(values).sum() / max(1, (~np.isnan(values)).sum())
        if share:
            found[method] = show_share(float(share))
    told = ", ".join(f"{method} {share}" for method, share in found.items())
    return f" Infinite, and in no mean: {told} of the measured heads." if told else ""


def _weights(analysis: Analysis, key: str, name: str, title: str, which: str) -> Figure:
    panels = [
        (Panel(f"{key}_{r}", f"κ of W_{r.upper()}", "condition number", log=True), _geometric(f"{key}_{r}"))
        for r in ROLES
    ]
    caption = f"{HEADS}1 is best; see whether training undoes what a method set up ({which})."
    caption += f"{_singular(analysis, *(f'{key}_{role}' for role in ROLES))} {BAND}"
    return _lines(analysis, "Conditioning", name, title, caption, panels)


def _raw_weights(analysis: Analysis) -> Figure:
    """The same without the corrections: what the optimiser trains."""
    title = "Condition numbers of the trained weights, W"
    return _weights(analysis, "raw_kappa", "weights_raw", title, "without C")


def _sigmas(analysis: Analysis) -> Figure:
    panels = [
        (Panel(f"sigma_max_{r}", f"σ_max of W_{r.upper()}", "singular value", log=True), _geometric(f"sigma_max_{r}"))
        for r in ROLES
    ]
    caption = (
        f"{HEADS}A method may lower κ by raising σ_min or by changing the scale of both; σ_min is σ_max / κ. {BAND}"
    )
    title = "Largest singular values of the weights, W + C"
    return _lines(analysis, "Conditioning", "weights_sigma", title, caption, panels)


def _jacobian(analysis: Analysis) -> Figure:
    readers: list[tuple[str, str, Reader]] = [
        ("kappa", "κ(J), measured", _geometric("pseudo_condition_number")),
        ("bound", "true upper bound", lambda table: table.log10_over_steps("bound_log10")),
        ("papers_bound", NOT_A_BOUND, lambda table: table.log10_over_steps("papers_bound_log10")),
    ]
    finite, total = strict_counts(analysis)
    caption = f"{HEADS}All panels have the same axis. κ(J) is over the non-zero spectrum (pseudo)"
    if finite < total:
        caption += f"; the strict κ(J) is finite in {finite} of {total} measurements of a head"
    elif total:
        caption += "; the strict one is finite everywhere"
    inexact = sum(int(t.columns["inexact"].sum()) for tables in analysis.heads.values() for t in tables)
    if inexact:
        caption += f"; {inexact} of {total} are not exact (an estimate, or singular as far as float64 can tell)"
    caption += f".{_singular(analysis, 'pseudo_condition_number')}"
    caption += f" What the papers print as a bound is not one: measured values may exceed it. {BAND}"
    panels = [(Panel(name, title, "condition number", log=True), read) for name, title, read in readers]
    figure = _lines(analysis, "Conditioning", "jacobian", "Condition number of the Jacobian", caption, panels)
    beyond = sorted({row.series for row in figure.rows if row.value == math.inf})
    if beyond:
        figure = replace(figure, caption=f"{figure.caption} Beyond 10³⁰⁰ and not drawn: {', '.join(beyond)}.")
    finite_values = [row.value for row in figure.rows if 0 < row.value < math.inf]
    if not finite_values:
        return figure
    span = (min(finite_values) / 1.5, max(finite_values) * 1.5)
    return replace(figure, panels=tuple(replace(panel, span=span) for panel in figure.panels))


def corrected(analysis: Analysis) -> bool:
    """Whether any correction acts, so that W and W + C differ."""
    return any(
        not np.array_equal(table.columns[f"kappa_{r}"], table.columns[f"raw_kappa_{r}"], equal_nan=True)
        for tables in analysis.heads.values()
        for table in tables
        for r in ROLES
    )


def strict_counts(analysis: Analysis) -> tuple[int, int]:
    """Measurements of a head with finite strict condition number, and all of them."""
    columns = [t.columns["condition_number"] for tables in analysis.heads.values() for t in tables]
    finite = sum(int(np.isfinite(column).sum()) for column in columns)
    return finite, sum(int((~np.isnan(column)).sum()) for column in columns)


def _attention(analysis: Analysis) -> Figure:
    panels = [
        (
            Panel("normalised_entropy", "Entropy over ln N", "share of ln N", span=(0.0, 1.0)),
            _arithmetic("normalised_entropy"),
        ),
        (Panel("diagonal_mass", "Diagonal mass", "mean probability", span=(0.0, 1.0)), _arithmetic("diagonal_mass")),
        (Panel("dead", "Dead heads", "share of heads", span=(0.0, 1.0)), _arithmetic("dead")),
    ]
    caption = (
        "Means over heads and layers. Entropy 1 is uniform attention, 0 is attention to one token, where the softmax "
        f"is saturated and W_Q and W_K hardly learn; diagonal mass is attention of a token to itself. {BAND}"
    )
    return _lines(analysis, "Attention", "attention", "Attention maps", caption, panels)


def _layer_figures(analysis: Analysis) -> list[Figure]:
    named = [
        ("pseudo_condition_number", "jacobian", "κ(J)"),
        *((f"kappa_{r}", f"w{r}", f"κ of W_{r.upper()}") for r in ROLES),
    ]
    saturated = [
        method
        for method in analysis.comparison.methods
        if (state := analysis.attention(method, last=True)) is not None and state.saturated
    ]
    care = f" Attention is saturated in {', '.join(saturated)}: pale says nothing good there." if saturated else ""
    figures = []
    for key, name, sign in named:
        last = _map_rows(analysis, f"layers_end_{name}", key, last=True)
        title = f"log₁₀ {sign} at the end"
        caption = f"Which layers of which method are ill conditioned (dark), at the last measurement of {sign}."
        caption += f"{_singular(analysis, key)}{care}"
        figures.append(_map(f"layers_end_{name}", title, caption, "map_by_method", last))
    rows = _map_rows(analysis, "layers_jacobian", "pseudo_condition_number", last=False)
    figures.append(
        _map(
            "layers_jacobian",
            "log₁₀ κ(J) over training, layer by layer",
            "When and where the Jacobian gets better or worse; all panels have the same colours, dark is ill "
            "conditioned. Geometric means over heads and seeds, non-zero spectrum."
            f"{_singular(analysis, 'pseudo_condition_number')}{care}",
            "map_over_steps",
            rows,
        )
    )
    return figures


def _map(name: str, title: str, caption: str, kind: str, rows: list[Row]) -> Figure:
    values = [row.value for row in rows]
    span = (min(values), max(values)) if values else None
    panels = tuple(Panel(method, method, "layer", span=span) for method in dict.fromkeys(row.panel for row in rows))
    kept = tuple(rows)
    return Figure(name, "Layers", title, caption, kind, panels, kept, x_label="step", by_epoch=False)  # type: ignore[arg-type]


def _map_rows(analysis: Analysis, figure: str, key: str, *, last: bool) -> list[Row]:
    """log10 of a quantity by method (panel), layer (series) and step, mean over finished runs."""
    rows = []
    for method in analysis.comparison.methods:
        sums: dict[tuple[float, str], list[float]] = {}
        epochs: dict[float, float] = {}
        for table in analysis.tables(method) or analysis.heads[method]:
            with np.errstate(invalid="ignore"):
                values = np.log10(table.by_layer(key))
            wanted = table.last_step(key)
            for at, step in enumerate(table.steps.tolist()):
                if last and step != wanted:
                    continue
                epochs[step] = float(table.epochs()[at])
                for place, layer in enumerate(table.layers):
                    if math.isfinite(values[at, place]):
                        sums.setdefault((step, layer), []).append(float(values[at, place]))
        for (step, layer), found in sums.items():
            mean = math.fsum(found) / len(found)
            rows.append(Row(figure, method, layer, MEAN, step, epochs[step], mean, analysis.comparison.scale))
    return rows
