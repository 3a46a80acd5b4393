"""`build_figures`: the rows of every figure of a comparison, in the order in which they are shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from wellcond.lab.report.analysis import ROLES, Analysis, HeadTable, seconds_per_step
from wellcond.lab.report.records import Run
from wellcond.lab.report.run_tables import PARTS
from wellcond.lab.report.series import (
    BUDGET,
    HIGH_END,
    LOW_END,
    MEAN,
    Curve,
    Figure,
    Kind,
    Panel,
    Row,
    curve_rows,
    thin,
    with_points,
)
from wellcond.lab.report.table import show_share
from wellcond.lab.report.values import finite_mean, number

BAND = (
    "Lines are means over seeds, bands are one standard deviation (cut off where no value can be); dashed lines are "
    "runs that did not finish."
)
HEADS = "Geometric means over heads and layers. "
KAPPA_J = "pseudo_condition_number"
Reader = Callable[[HeadTable], np.ndarray]


def build_figures(analysis: Analysis) -> list[Figure]:
    """Figures with at least one point."""
    figures = [
        _differences(analysis), *_learning_figures(analysis), _matching(analysis), *_cost_figures(analysis),
        _jacobian(analysis), *_weight_figures(analysis), *_layer_figures(analysis), _attention(analysis),
    ]  # fmt: skip
    return [figure for figure in figures if figure.panels and figure.rows]


def _points(analysis: Analysis, figure: str, panel: str, method: str, points: dict[str, float]) -> list[Row]:
    """Rows of a method that belong to no step, by seed."""
    scale = analysis.comparison.scale
    return [Row(figure, panel, method, seed, math.nan, math.nan, value, scale) for seed, value in points.items()]


def _differences(analysis: Analysis) -> Figure:
    baseline, metric = analysis.comparison.baseline, analysis.comparison.result
    rows: list[Row] = []
    for method, difference in analysis.differences.items():
        if difference.count:
            low, high = difference.interval or (math.nan, math.nan)
            points = {str(seed): value for seed, value in difference.values.items()}
            points |= {MEAN: difference.mean, LOW_END: low, HIGH_END: high}
            shown = {seed: value * metric.scale for seed, value in points.items()}
            rows += _points(analysis, "differences", "metric", method, shown)
    unit = f" ({metric.unit.strip()})" if metric.unit else ""
    panel = Panel("metric", "", f"gain in {metric.name}{unit}")
    caption = (
        f"To the right of the dotted line is better than {baseline}; a bar is the 95 % interval of the mean "
        "over seeds, small dots are seeds. A bar across the line is no evidence. A triangle at the edge is a method "
        "beyond the axis, with its mean and interval."
    )
    return Figure("differences", "Summary", "Paired differences", caption, "intervals", (panel,), tuple(rows))


def _lines(
    analysis: Analysis,
    section: str,
    name: str,
    title: str,
    caption: str,
    panels: list[tuple[Panel, dict[str, list[Curve]]]],
) -> Figure:
    """A figure of curves, each with its band."""
    rows: list[Row] = []
    for panel, curves in panels:
        limits = analysis.comparison.metric.limits if panel.name == "metric" else None if panel.log else panel.span
        rows += curve_rows(analysis.comparison, name, panel.name, curves, log=panel.log, limits=limits)
    return Figure(
        name, section, title, f"{caption} {BAND}", "lines", with_points((panel for panel, _ in panels), rows),
        tuple(rows), x_label=analysis.unit, by_epoch=analysis.unit == "epoch",
    )  # fmt: skip


def curves_of(
    analysis: Analysis, rows_of: Callable[[Run], list[dict[str, Any]]], key: str, factor: float = 1.0
) -> dict[str, list[Curve]]:
    """One key of some rows of every run, by method, long curves thinned."""
    found: dict[str, list[Curve]] = {}
    for run in [run for method in analysis.comparison.methods for run in analysis.comparison.of(method)]:
        rows = [row for row in rows_of(run) if row.get(key) is not None]
        columns = [np.array([number(row.get(name)) for row in rows]) for name in ("step", "epoch", key)]
        steps, epochs, values = thin(*columns)
        curve = Curve(run, steps.tolist(), epochs.tolist(), (values * factor).tolist())
        found.setdefault(run.method, []).append(curve)
    return found


def _learning_figures(analysis: Analysis) -> list[Figure]:
    metric = analysis.comparison.metric
    better = "Higher" if metric.higher_is_better else "Lower"

    def evaluated(key: str, factor: float = 1.0) -> dict[str, list[Curve]]:
        return curves_of(analysis, lambda run: run.evaluations, key, factor)

    def trained(key: str) -> dict[str, list[Curve]]:
        return curves_of(analysis, lambda run: run.steps, key)

    return [
        _lines(
            analysis, "Learning", "learning", "Learning curves",
            f"{better} {metric.name} is better; see which method is ahead early and whether the lead lasts.",
            [
                (Panel("metric", f"Evaluation: {metric.name}", metric.label), evaluated(metric.name, metric.scale)),
                (Panel("loss", "Evaluation: loss", "loss"), evaluated("loss")),
            ],
        ),
        _lines(
            analysis, "Learning", "training", "Training loss",
            "How fast each method fits its training data; each point is a mean over the steps since the last.",
            [(Panel("loss", "Training loss", "loss"), trained("loss"))],
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


def _matching(analysis: Analysis) -> Figure:
    comparison, unit = analysis.comparison, analysis.unit
    rows, budgets = [], []
    for method, matching in analysis.matchings.items():
        for seed, match in matching.by_seed.items():
            value = number(getattr(match, unit)) if match.reached else math.inf
            place = number(match.step), number(match.epoch)
            rows.append(Row("matching", "paired", method, str(seed), *place, value, comparison.scale))
            budgets.append(match.total(unit))
        if matching.reached:
            place = matching.mean("step"), matching.mean("epoch")
            rows.append(Row("matching", "paired", method, MEAN, *place, matching.mean(unit), comparison.scale))
    if budgets:
        rows += _points(analysis, "matching", "paired", BUDGET, {MEAN: max(budgets)})
    caption = (
        f"Shorter is better: {unit}s until a method is as good as {comparison.baseline} is at its end (dotted line). "
        "Paired by seed; dots are seeds, triangles are seeds that never get there and are not in the mean. The "
        "baseline's own bar below the line shows how much of a saving is noise of the curve. The table has the papers' "
        "form, which takes mean curves, and running means."
    )
    return Figure(
        "matching", "Matching", f"{unit.capitalize()}s to match the baseline", caption, "bars",
        (Panel("paired", "", f"{unit}s to match"),), tuple(rows), by_epoch=unit == "epoch",
    )  # fmt: skip


def _cost_figures(analysis: Analysis) -> list[Figure]:
    comparison = analysis.comparison
    base = comparison.finished(comparison.baseline)
    time: list[Row] = []
    for part in PARTS:
        for method in comparison.methods:
            alone = [run for run in comparison.finished(method).values() if run.alone]
            mean = finite_mean(number(run.part("seconds").get(part)) for run in alone)
            time += [] if math.isnan(mean) else _points(analysis, "cost_time", part, method, {MEAN: mean})

    def bars(name: str, panel: str, value: Callable[[Run], float]) -> tuple[Row, ...]:
        rows: list[Row] = []
        for method in comparison.methods:
            values = {str(seed): value(run) for seed, run in comparison.finished(method).items()}
            known = {seed: x for seed, x in values.items() if math.isfinite(x)}
            rows += _points(
                analysis, name, panel, method, known | ({MEAN: finite_mean(known.values())} if known else {})
            )
        return tuple(rows)

    def ratio(run: Run) -> float:
        return seconds_per_step(run) / seconds_per_step(base[run.seed]) if run.seed in base else math.nan

    return [
        Figure(
            "cost_step", "Cost", "Seconds per step",
            "What a method costs at every step, 1 being the baseline; evaluation and measuring are not counted.",
            "bars", (Panel("step_ratio", "Time of a training step", f"relative to {comparison.baseline}"),),
            bars("cost_step", "step_ratio", ratio),
        ),
        Figure(
            "cost_time", "Cost", "Wall time",
            "Where the wall time of a run goes, mean over finished runs that had their cores to themselves; measuring "
            "is the price of these reports.",
            "stack", with_points((Panel(part, part, "seconds per run") for part in PARTS), time), tuple(time),
        ),
        Figure(
            "cost_memory", "Cost", "Peak memory",
            "Largest memory in use during a run; on a CPU this is the whole process, libraries included.",
            "bars", (Panel("memory", "Peak memory", "megabytes"),),
            bars("cost_memory", "memory", lambda run: number(run.record.get("peak_memory_bytes")) / 1e6),
        ),
    ]  # fmt: skip


def _measured(analysis: Analysis, read: Reader) -> dict[str, list[Curve]]:
    """A quantity of the measured heads over training, by method."""
    return {
        method: [Curve(t.run, t.steps.tolist(), t.epochs().tolist(), read(t).tolist()) for t in tables]
        for method, tables in analysis.heads.items()
    }


def _mean_over_heads(analysis: Analysis, key: str, *, log: bool) -> dict[str, list[Curve]]:
    return _measured(analysis, lambda table: table.over_steps(key, log=log))


def _singular(analysis: Analysis, *keys: str) -> str:
    """A sentence on the infinite condition numbers, which are in no mean; empty if there are none."""
    found = []
    for method, tables in analysis.heads.items():
        values = np.concatenate([table.columns[key] for table in tables for key in keys] or [np.empty(0)])
        if share := float(np.isinf(values).sum() / max(1, (~np.isnan(values)).sum())):
            found.append(f"{method} {show_share(share)}")
    return f" Infinite, and in no mean: {', '.join(found)} of the measured heads." if found else ""


def _weight_figures(analysis: Analysis) -> list[Figure]:
    """Condition numbers and scale of W + C, as the forward uses it, and under a correction of W, which is trained."""

    def figure(name: str, title: str, key: str, sign: str, label: str, caption: str) -> Figure:
        panels = [
            (Panel(f"{key}_{role}", f"{sign} of W_{role.upper()}", label, log=True),
             _mean_over_heads(analysis, f"{key}_{role}", log=True))
            for role in ROLES
        ]  # fmt: skip
        return _lines(analysis, "Conditioning", name, title, HEADS + caption, panels)

    def kappas(name: str, title: str, key: str, which: str) -> Figure:
        caption = f"1 is best; see whether training undoes what a method set up ({which})."
        caption += _singular(analysis, *(f"{key}_{role}" for role in ROLES))
        return figure(name, title, key, "κ", "condition number", caption)

    corrected = any(
        not np.array_equal(table.columns[f"kappa_{r}"], table.columns[f"raw_kappa_{r}"], equal_nan=True)
        for tables in analysis.heads.values()
        for table in tables
        for r in ROLES
    )
    raw = kappas("weights_raw", "Condition numbers of the trained weights, W", "raw_kappa", "without C")
    return [
        kappas("weights", "Condition numbers of the weights, W + C", "kappa", "as the forward uses them"),
        figure(
            "weights_sigma", "Largest singular values of the weights, W + C", "sigma_max", "σ_max", "singular value",
            "A method may lower κ by raising σ_min or by changing the scale of both; σ_min is σ_max / κ.",
        ),
        *([raw] if corrected else []),
    ]  # fmt: skip


def _jacobian(analysis: Analysis) -> Figure:
    tables = [table for listed in analysis.heads.values() for table in listed]
    strict = np.concatenate([table.columns["condition_number"] for table in tables] or [np.empty(0)])
    finite, total = int(np.isfinite(strict).sum()), int((~np.isnan(strict)).sum())
    caption = f"{HEADS}All panels have the same axis. κ(J) is over the non-zero spectrum (pseudo)"
    if finite < total:
        caption += f"; the strict κ(J) is finite in {finite} of {total} measurements of a head"
    elif total:
        caption += "; the strict one is finite everywhere"
    if inexact := sum(int(table.columns["inexact"].sum()) for table in tables):
        caption += f"; {inexact} of {total} are not exact (an estimate, or singular as far as float64 can tell)"
    caption += f".{_singular(analysis, KAPPA_J)}"
    caption += " What the papers print as a bound is not one: measured values may exceed it."
    curves = {
        ("kappa", "κ(J), measured"): _mean_over_heads(analysis, KAPPA_J, log=True),
        ("bound", "true upper bound"): _measured(analysis, lambda t: t.log10_over_steps("bound_log10")),
        ("papers_bound", "papers' bound (not a bound)"): _measured(
            analysis, lambda t: t.log10_over_steps("papers_bound_log10")
        ),
    }
    panels = [(Panel(name, title, "condition number", log=True), found) for (name, title), found in curves.items()]
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
    panels = [
        (Panel(key, title, label, span=(0.0, 1.0)), _mean_over_heads(analysis, key, log=False))
        for key, title, label in shown
    ]
    caption = (
        "Means over heads and layers. Entropy 1 is uniform attention, 0 is attention to one token, where the softmax "
        "is saturated and W_Q and W_K hardly learn; diagonal mass is attention of a token to itself."
    )
    return _lines(analysis, "Attention", "attention", "Attention maps", caption, panels)


def _layer_figures(analysis: Analysis) -> list[Figure]:
    """Heat maps: layers by methods at the end, and layers by steps for each method."""
    states = {method: analysis.attention(method, last=True) for method in analysis.comparison.methods}
    saturated = [method for method, state in states.items() if state is not None and state.saturated]
    care = f" Attention is saturated in {', '.join(saturated)}: pale says nothing good there." if saturated else ""

    def figure(name: str, title: str, caption: str, key: str, kind: Kind) -> Figure:
        rows = _map_rows(analysis, name, key, last=kind == "map_by_method")
        values = [row.value for row in rows]
        span = (min(values), max(values)) if values else None
        panels = tuple(Panel(method, method, "layer", span=span) for method in dict.fromkeys(row.panel for row in rows))
        caption += f"{_singular(analysis, key)}{care}"
        return Figure(name, "Layers", title, caption, kind, panels, tuple(rows), x_label="step", by_epoch=False)

    named = [(KAPPA_J, "jacobian", "κ(J)"), *((f"kappa_{r}", f"w{r}", f"κ of W_{r.upper()}") for r in ROLES)]
    which = "Which layers of which method are ill conditioned (dark), at the last measurement of"
    return [
        *(
            figure(f"layers_end_{name}", f"log₁₀ {sign} at the end", f"{which} {sign}.", key, "map_by_method")
            for key, name, sign in named
        ),
        figure(
            "layers_jacobian",
            "log₁₀ κ(J) over training, layer by layer",
            "When and where the Jacobian gets better or worse; all panels have the same colours, dark is ill "
            "conditioned. Geometric means over heads and seeds, non-zero spectrum.",
            KAPPA_J,
            "map_over_steps",
        ),
    ]


def _map_rows(analysis: Analysis, figure: str, key: str, *, last: bool) -> list[Row]:
    """log10 of a quantity by method (panel), layer (series) and step, mean over finished runs."""
    rows = []
    for method in analysis.comparison.methods:
        found: dict[tuple[float, str], list[float]] = {}
        epochs: dict[float, float] = {}
        for table in analysis.tables(method) or analysis.heads[method]:
            with np.errstate(invalid="ignore"):
                values = np.log10(table.by_layer(key))
            wanted = table.last_step(key)
            for at, (step, epoch) in enumerate(zip(table.steps.tolist(), table.epochs().tolist(), strict=True)):
                if last and step != wanted:
                    continue
                epochs[step] = epoch
                for layer, value in zip(table.layers, values[at].tolist(), strict=True):
                    if math.isfinite(value):
                        found.setdefault((step, layer), []).append(value)
        for (step, layer), logs in found.items():
            mean = math.fsum(logs) / len(logs)
            rows.append(Row(figure, method, layer, MEAN, step, epochs[step], mean, analysis.comparison.scale))
    return rows
