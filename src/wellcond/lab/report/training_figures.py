"""Rows of the figures about training: learning curves, gradients, epochs-to-match, cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from wellcond.lab.report.analysis import Analysis, seconds_per_step
from wellcond.lab.report.match import Matching
from wellcond.lab.report.run_record import Run
from wellcond.lab.report.series import BUDGET, MEAN, Curve, Figure, Panel, Row, curve_rows, thin, with_points
from wellcond.lab.report.values import number

BAND = (
    "Lines are means over seeds, bands are one standard deviation (cut off where no value can be); dashed lines are "
    "runs that did not finish."
)
PARTS = ("training", "evaluation", "measuring", "checkpointing", "setup")


def training_figures(analysis: Analysis) -> list[Figure]:
    """Every figure that needs no conditioning rows; figures without a single point are left out."""
    figures = [
        _learning(analysis), _training(analysis), _gradients(analysis), _matching(analysis),
        _step_cost(analysis), _time(analysis), _memory(analysis),
    ]  # fmt: skip
    return [figure for figure in figures if figure.panels and figure.rows]


def curves_of(
    analysis: Analysis, rows_of: Callable[[Run], list[dict[str, Any]]], key: str, factor: float = 1.0
) -> dict[str, list[Curve]]:
    """One key of some rows of every run, by method, long curves thinned."""
    found: dict[str, list[Curve]] = {}
    for method in analysis.comparison.methods:
        for run in analysis.comparison.of(method):
            rows = [row for row in rows_of(run) if row.get(key) is not None]
            columns = [np.array([number(row.get(name)) for row in rows]) for name in ("step", "epoch", key)]
            steps, epochs, values = thin(*columns)
            found.setdefault(method, []).append(Curve(run, steps.tolist(), epochs.tolist(), (values * factor).tolist()))
    return found


def _lines(analysis: Analysis, name: str, title: str, caption: str, panels: list[tuple[Panel, dict]]) -> Figure:
    rows: list[Row] = []
    for panel, curves in panels:
        limits = analysis.comparison.metric.limits if panel.name == "metric" else None
        rows += curve_rows(analysis.comparison, name, panel.name, curves, log=panel.log, limits=limits)
    return Figure(
        name, "Learning", title, caption, "lines", with_points((p for p, _ in panels), rows), tuple(rows),
        x_label=analysis.unit, by_epoch=analysis.unit == "epoch",
    )  # fmt: skip


def _learning(analysis: Analysis) -> Figure:
    metric = analysis.comparison.metric
    better = "Higher" if metric.higher_is_better else "Lower"
    panels = [
        (
            Panel("metric", f"Evaluation: {metric.name}", metric.label),
            curves_of(analysis, lambda run: run.evaluations, metric.name, metric.scale),
        ),
        (Panel("loss", "Evaluation: loss", "loss"), curves_of(analysis, lambda run: run.evaluations, "loss")),
    ]
    caption = f"{better} {metric.name} is better; see which method is ahead early and whether the lead lasts. {BAND}"
    return _lines(analysis, "learning", "Learning curves", caption, panels)


def _training(analysis: Analysis) -> Figure:
    panels = [(Panel("loss", "Training loss", "loss"), curves_of(analysis, lambda run: run.steps, "loss"))]
    caption = f"How fast each method fits its training data; each point is a mean over the steps since the last. {BAND}"
    return _lines(analysis, "training", "Training loss", caption, panels)


def _gradients(analysis: Analysis) -> Figure:
    keys = (("q", "W_Q"), ("k", "W_K"), ("v", "W_V"))
    panels = [
        (
            Panel(f"grad_norm_{role}", f"Gradient of {name}", "gradient norm", log=True),
            curves_of(analysis, lambda run: run.steps, f"grad_norm_{role}"),
        )
        for role, name in keys
    ]
    caption = f"A method whose W_Q and W_K lie far below its W_V here hardly learns where to attend. {BAND}"
    return _lines(analysis, "gradients", "Gradient norms of the projections", caption, panels)


def _matching(analysis: Analysis) -> Figure:
    comparison, unit = analysis.comparison, analysis.unit
    rows = _match_rows(analysis.matchings, unit, comparison.scale)
    panels = (Panel("paired", "", f"{unit}s to match"),) if rows else ()
    caption = (
        f"Shorter is better: {unit}s until a method is as good as {comparison.baseline} is at its end (dotted line). "
        "Paired by seed; dots are seeds, triangles are seeds that never get there and are not in the mean. The "
        "baseline's own bar below the line shows how much of a saving is noise of the curve. The table has the papers' "
        "form, which takes mean curves, and running means."
    )
    return Figure(
        "matching", "Matching", f"{unit.capitalize()}s to match the baseline", caption, "bars", panels, tuple(rows),
        by_epoch=unit == "epoch",
    )  # fmt: skip


def _match_rows(matchings: dict[str, Matching], unit: str, scale: str) -> list[Row]:
    rows = []
    budgets = []
    for method, matching in matchings.items():
        for seed, match in matching.by_seed.items():
            # infinite: the target was never reached
            value = math.inf if not match.reached else number(match.epoch if unit == "epoch" else match.step)
            place = number(match.step), number(match.epoch)
            rows.append(Row("matching", "paired", method, str(seed), *place, value, scale))
            budgets.append(match.total_epochs if unit == "epoch" else match.total_steps)
        if matching.reached:
            place = matching.mean("step"), matching.mean("epoch")
            rows.append(Row("matching", "paired", method, MEAN, *place, matching.mean(unit), scale))
    if budgets:
        rows.append(Row("matching", "paired", BUDGET, MEAN, math.nan, math.nan, max(budgets), scale))
    return rows


def _bars(
    analysis: Analysis, name: str, panel: Panel, value: Callable[[Run], float], means: dict[str, float]
) -> list[Row]:
    scale = analysis.comparison.scale
    rows = []
    for method in analysis.comparison.methods:
        for seed, run in analysis.comparison.finished(method).items():
            if math.isfinite(value(run)):
                rows.append(Row(name, panel.name, method, str(seed), math.nan, math.nan, value(run), scale))
        if math.isfinite(means[method]):
            rows.append(Row(name, panel.name, method, MEAN, math.nan, math.nan, means[method], scale))
    return rows


def _step_cost(analysis: Analysis) -> Figure:
    comparison = analysis.comparison
    base = comparison.finished(comparison.baseline)
    panel = Panel("step_ratio", "Time of a training step", f"relative to {comparison.baseline}")

    def ratio(run: Run) -> float:
        return seconds_per_step(run) / seconds_per_step(base[run.seed]) if run.seed in base else math.nan

    rows = _bars(analysis, "cost_step", panel, ratio, {m: analysis.step_ratio(m) for m in comparison.methods})
    caption = "What a method costs at every step, 1 being the baseline; evaluation and measuring are not counted."
    return Figure("cost_step", "Cost", "Seconds per step", caption, "bars", (panel,), tuple(rows))


def _time(analysis: Analysis) -> Figure:
    comparison = analysis.comparison
    rows = []
    for part in PARTS:
        for method in comparison.methods:
            runs = [run for run in comparison.finished(method).values() if run.alone]
            seconds = [number((run.record.get("seconds") or {}).get(part)) for run in runs]
            known = [value for value in seconds if math.isfinite(value)]
            if known:
                mean = math.fsum(known) / len(known)
                rows.append(Row("cost_time", part, method, MEAN, math.nan, math.nan, mean, comparison.scale))
    panels = tuple(Panel(part, part, "seconds per run") for part in PARTS if any(row.panel == part for row in rows))
    caption = (
        "Where the wall time of a run goes, mean over finished runs that had their cores to themselves; measuring is "
        "the price of these reports."
    )
    return Figure("cost_time", "Cost", "Wall time", caption, "stack", panels, tuple(rows))


def _memory(analysis: Analysis) -> Figure:
    panel = Panel("memory", "Peak memory", "megabytes")

    def megabytes(run: Run) -> float:
        return number(run.record.get("peak_memory_bytes")) / 1e6

    def mean(values: Sequence[float]) -> float:
        known = [value for value in values if math.isfinite(value)]
        return math.fsum(known) / len(known) if known else math.nan

    comparison = analysis.comparison
    means = {m: mean([megabytes(run) for run in comparison.finished(m).values()]) for m in comparison.methods}
    rows = _bars(analysis, "cost_memory", panel, megabytes, means)
    caption = "Largest memory in use during a run; on a CPU this is the whole process, libraries included."
    return Figure("cost_memory", "Cost", "Peak memory", caption, "bars", (panel,), tuple(rows))
