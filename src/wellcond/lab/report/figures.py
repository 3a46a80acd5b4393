"""`build_figures`: the rows of every figure of a comparison, in the order in which they are shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from wellcond.lab.report.analysis import ROLES, Analysis
from wellcond.lab.report.match import Matching
from wellcond.lab.report.records import Run
from wellcond.lab.report.series import (
    BUDGET,
    HIGH_END,
    LOW_END,
    MEAN,
    Curve,
    Figure,
    Panel,
    Row,
    curve_rows,
    thin,
    with_points,
)
from wellcond.lab.report.table import show_share
from wellcond.lab.report.values import number

BAND = (
    "Lines are means over seeds, bands are one standard deviation (cut off where no value can be); dashed lines are "
    "runs that did not finish."
)
HEADS = "Geometric means over heads and layers. "
KAPPA_J = "pseudo_condition_number"
Curves = dict[str, list[Curve]]


def build_figures(analysis: Analysis) -> list[Figure]:
    """Figures with at least one point."""
    figures = [
        _differences(analysis), *_learning_figures(analysis), _matching(analysis), _jacobian(analysis),
        *_weight_figures(analysis), _layers(analysis), _attention(analysis),
    ]  # fmt: skip
    return [figure for figure in figures if figure.panels and figure.rows]


def _differences(analysis: Analysis) -> Figure:
    comparison, metric = analysis.comparison, analysis.comparison.result
    rows: list[Row] = []
    for method, difference in analysis.differences.items():
        if difference.count:
            low, high = difference.interval or (math.nan, math.nan)
            points = {str(seed): value for seed, value in difference.values.items()}
            points |= {MEAN: difference.mean, LOW_END: low, HIGH_END: high}
            rows += [
                Row("differences", "metric", method, seed, math.nan, math.nan, value * metric.scale, comparison.scale)
                for seed, value in points.items()
            ]
    unit = f" ({metric.unit.strip()})" if metric.unit else ""
    panel = Panel("metric", "", f"gain in {metric.name}{unit}")
    caption = (
        f"To the right of the dotted line is better than {comparison.baseline}; a bar is the 95 % interval of the mean "
        "over seeds, small dots are seeds. A bar across the line is no evidence. A triangle at the edge is a method "
        "beyond the axis, with its mean and interval."
    )
    return Figure("differences", "Summary", "Paired differences", caption, "intervals", (panel,), tuple(rows))


def _lines(
    analysis: Analysis, section: str, name: str, title: str, caption: str, panels: list[tuple[Panel, Curves]]
) -> Figure:
    """A figure of curves, each with its band."""
    rows = [row for panel, curves in panels for row in curve_rows(analysis.comparison.scale, name, panel, curves)]
    shown = with_points((panel for panel, _ in panels), rows)
    return Figure(name, section, title, f"{caption} {BAND}", "lines", shown, tuple(rows), x_label=analysis.unit)


def curves_of(
    analysis: Analysis, rows_of: Callable[[Run], list[dict[str, Any]]], key: str, factor: float = 1.0
) -> Curves:
    """One key of some rows of every run, by method, long curves thinned."""
    found: Curves = {}
    for run in [run for method in analysis.comparison.methods for run in analysis.comparison.of(method)]:
        rows = [row for row in rows_of(run) if row.get(key) is not None]
        columns = [np.array([number(row.get(name)) for row in rows]) for name in ("step", "epoch", key)]
        steps, epochs, values = thin(*columns)
        curve = Curve(run, steps.tolist(), epochs.tolist(), (values * factor).tolist())
        found.setdefault(run.method, []).append(curve)
    return found


def _learning_figures(analysis: Analysis) -> list[Figure]:
    metric = analysis.comparison.metric

    def evaluated(key: str, factor: float = 1.0) -> Curves:
        return curves_of(analysis, lambda run: run.evaluations, key, factor)

    def trained(key: str) -> Curves:
        return curves_of(analysis, lambda run: run.steps, key)

    return [
        _lines(
            analysis, "Learning", "learning", "Learning curves",
            f"{metric.better.capitalize()}; see which method is ahead early and whether the lead lasts. Each point of "
            "the training loss is a mean over the steps since the last.",
            [
                (Panel("metric", f"Evaluation: {metric.name}", metric.label, limits=metric.limits),
                 evaluated(metric.name, metric.scale)),
                (Panel("loss", "Evaluation: loss", "loss"), evaluated("loss")),
                (Panel("training_loss", "Training: loss", "loss"), trained("loss")),
            ],
        ),
        _lines(
            analysis, "Learning", "gradients", "Gradient norms of the projections",
            "A method whose W_Q and W_K lie far below its W_V here hardly learns where to attend.",
            [
                (Panel(f"grad_norm_{role}", f"Gradient of W_{role.upper()}", "gradient norm", log=True),
                 trained(f"grad_norm_{role}"))
                for role in ROLES
            ],
        ),
    ]  # fmt: skip


def match_rows(name: str, panel: str, scale: str, unit: str, matchings: dict[str, Matching]) -> tuple[Row, ...]:
    """Rows of bars: epochs or steps to match by seed, infinite where a seed never gets there, and their mean."""
    rows, budgets = [], []
    for method, matching in matchings.items():
        for seed, match in matching.by_seed.items():
            value = number(getattr(match, unit)) if match.reached else math.inf
            rows.append(Row(name, panel, method, str(seed), number(match.step), number(match.epoch), value, scale))
            budgets.append(match.total(unit))
        if matching.reached:
            step, epoch, mean = (matching.mean(key) for key in ("step", "epoch", unit))
            rows.append(Row(name, panel, method, MEAN, step, epoch, mean, scale))
    if budgets:
        rows.append(Row(name, panel, BUDGET, MEAN, math.nan, math.nan, max(budgets), scale))
    return tuple(rows)


def _matching(analysis: Analysis) -> Figure:
    unit = analysis.unit
    rows = match_rows("matching", "paired", analysis.comparison.scale, unit, analysis.matchings)
    caption = (
        f"Shorter is better: {unit}s until a method is as good as {analysis.comparison.baseline} is at its end (dotted "
        "line). Paired by seed; dots are seeds, triangles are seeds that never get there and are not in the mean. The "
        "baseline's own bar below the line shows how much of a saving is noise of the curve. The table has the papers' "
        "form, which takes mean curves, and running means."
    )
    panel, title = Panel("paired", "", f"{unit}s to match"), f"{unit.capitalize()}s to match the baseline"
    return Figure("matching", "Matching", title, caption, "bars", (panel,), rows)


def measured(analysis: Analysis, key: str) -> Curves:
    """A quantity of the measured heads over training, mean over heads and layers, by method."""
    return {
        method: [Curve(t.run, t.steps.tolist(), t.epochs().tolist(), t.over_steps(key).tolist()) for t in tables]
        for method, tables in analysis.heads.items()
    }


def _singular(analysis: Analysis, *keys: str) -> str:
    """A sentence on the infinite condition numbers, which are in no mean; empty if there are none."""
    found = []
    for method, tables in analysis.heads.items():
        values = np.concatenate([table.columns[key] for table in tables for key in keys] or [np.empty(0)])
        if share := float(np.isinf(values).sum() / max(1, (~np.isnan(values)).sum())):
            found.append(f"{method} {show_share(share)}")
    return f" Infinite, and in no mean: {', '.join(found)} of the measured heads." if found else ""


def _weight_figures(analysis: Analysis) -> list[Figure]:
    """Condition numbers of W + C, as the forward uses it, and under a correction of W, which is trained."""

    def figure(name: str, title: str, key: str, which: str) -> Figure:
        keys = {role: f"{key}_{role}" for role in ROLES}
        caption = f"{HEADS}1 is best; see whether training undoes what a method set up ({which})."
        panels = [
            (Panel(key, f"κ of W_{role.upper()}", "condition number", log=True), measured(analysis, key))
            for role, key in keys.items()
        ]
        caption += _singular(analysis, *keys.values())
        return _lines(analysis, "Conditioning", name, title, caption, panels)

    corrected = any(
        not np.array_equal(table.columns[f"kappa_{r}"], table.columns[f"raw_kappa_{r}"], equal_nan=True)
        for tables in analysis.heads.values()
        for table in tables
        for r in ROLES
    )
    own = figure("weights", "Condition numbers of the weights, W + C", "kappa", "as the forward uses them")
    raw = figure("weights_raw", "Condition numbers of the trained weights, W", "raw_kappa", "without C")
    return [own, raw] if corrected else [own]


def _jacobian(analysis: Analysis) -> Figure:
    tables = [table for listed in analysis.heads.values() for table in listed]
    strict = np.concatenate([table.columns["condition_number"] for table in tables] or [np.empty(0)])
    finite, total = int(np.isfinite(strict).sum()), int((~np.isnan(strict)).sum())
    caption = f"{HEADS}All panels have the same axis. κ(J) is over the non-zero spectrum (pseudo)"
    if finite < total:
        caption += f"; the strict κ(J) is finite in {finite} of {total} measurements of a head"
    if inexact := sum(int(table.columns["inexact"].sum()) for table in tables):
        caption += f"; {inexact} of {total} are not exact (an estimate, or singular as far as float64 can tell)"
    caption += f".{_singular(analysis, KAPPA_J)}"
    caption += " What the papers print as a bound is not one: measured values may exceed it."
    shown = (
        ("kappa", "κ(J), measured", KAPPA_J), ("bound", "true upper bound", "bound_log10"),
        ("papers_bound", "papers' bound (not a bound)", "papers_bound_log10"),
    )  # fmt: skip
    panels = [(Panel(name, title, "condition number", log=True), measured(analysis, key)) for name, title, key in shown]
    figure = _lines(analysis, "Conditioning", "jacobian", "Condition number of the Jacobian", caption, panels)
    if beyond := sorted({row.series for row in figure.rows if row.value == math.inf}):
        figure = replace(figure, caption=f"{figure.caption} Beyond 10³⁰⁰ and not drawn: {', '.join(beyond)}.")
    values = [row.value for row in figure.rows if 0 < row.value < math.inf]
    span = (min(values) / 1.5, max(values) * 1.5) if values else None
    return replace(figure, panels=tuple(replace(panel, span=span) for panel in figure.panels))


def _attention(analysis: Analysis) -> Figure:
    shown = (
        ("normalised_entropy", "Entropy over ln N", "share of ln N"),
        ("diagonal_mass", "Diagonal mass", "mean probability"),
        ("dead", "Dead heads", "share of heads"),
    )
    whole = (0.0, 1.0)
    panels = [
        (Panel(key, title, label, span=whole, limits=whole), measured(analysis, key)) for key, title, label in shown
    ]
    caption = (
        "Means over heads and layers. Entropy 1 is uniform attention, 0 is attention to one token, where the softmax "
        "is saturated and W_Q and W_K hardly learn; diagonal mass is attention of a token to itself."
    )
    return _lines(analysis, "Attention", "attention", "Attention maps", caption, panels)


def _layers(analysis: Analysis) -> Figure:
    """Heat maps of layers by methods at the last measurement of each quantity, log10, mean over finished runs."""
    comparison = analysis.comparison
    named = {KAPPA_J: "log₁₀ κ(J)"} | {f"kappa_{role}": f"log₁₀ κ of W_{role.upper()}" for role in ROLES}
    rows = []
    for key in named:
        for method in comparison.methods:
            found: dict[str, list[float]] = {}
            for table in analysis.tables(method) or analysis.heads[method]:
                for layer, value in table.layers_at_end(key).items():
                    found.setdefault(layer, []).append(value)
            for layer, logs in found.items():
                mean = math.fsum(logs) / len(logs)
                rows.append(Row("layers", key, layer, method, math.nan, math.nan, mean, comparison.scale))
    states = {method: analysis.attention(method, last=True) for method in comparison.methods}
    saturated = [method for method, state in states.items() if state is not None and state.saturated]
    care = f" Attention is saturated in {', '.join(saturated)}: pale says nothing good there." if saturated else ""
    caption = "Which layers of which method are ill conditioned (dark), at the last measurement. Geometric means over "
    caption += f"heads and seeds.{_singular(analysis, *named)}{care}"
    panels = with_points((Panel(key, title, "layer") for key, title in named.items()), rows)
    return Figure("layers", "Layers", "At the end, layer by method", caption, "maps", panels, tuple(rows))
