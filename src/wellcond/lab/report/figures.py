"""`build_figures`: the points of every figure of a comparison: what the CSV files hold, and all that `plots` draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from wellcond.lab.records import ARITHMETIC, ROLES, Rows, Run
from wellcond.lab.report.analysis import Analysis, HeadTable
from wellcond.lab.report.epochs_to_match import Matching
from wellcond.lab.report.table import csv_text, number

COLUMNS = ("figure", "panel", "series", "seed", "step", "epoch", "value", "scale")
MEAN, LOW, HIGH = "mean", "mean-std", "mean+std"
LOW_END, HIGH_END = "interval-low", "interval-high"
BUDGET = "(budget)"
"""Series of a bar figure whose mean is the line to compare with."""
MOST_POINTS = 300
BAND = "Lines are means over seeds, bands are one standard deviation; dashed lines are runs that did not finish."
HEADS = "Geometric means over heads and layers; infinite values are in none."


class Row(NamedTuple):
    """One point of a figure."""

    series: str
    seed: str
    """A seed, or `mean`, `mean-std`, `mean+std` over the finished runs, or an end of a 95 % interval of the mean."""
    step: float
    epoch: float
    value: float


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    name: str
    title: str
    y_label: str
    rows: Sequence[Row]
    log: bool = False
    x_label: str = ""
    """Of a horizontal axis of its own, which shows the steps of the points as values that were tried."""

    def by_series(self) -> dict[str, dict[str, list[Row]]]:
        """Points by series and seed, in the order in which they were made."""
        found: dict[str, dict[str, list[Row]]] = {}
        for row in self.rows:
            found.setdefault(row.series, {}).setdefault(row.seed, []).append(row)
        return found


@dataclass(frozen=True)
class Figure:
    """Panels with a title and a sentence on what to see."""

    name: str
    section: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    methods: tuple[str, ...]
    """Whose places choose colours."""
    scale: str
    """Of the recipe (tiny, small, paper), not of an axis."""
    x_label: str = ""
    """Of the horizontal axis of lines: `epoch` or `step`."""
    bars: bool = False

    def drawable(self) -> Figure:
        """The figure with the panels that have something to draw."""
        has_points = [panel for panel in self.panels if any(math.isfinite(row.value) for row in panel.rows)]
        return replace(self, panels=tuple(has_points))


def write_csv(figure: Figure) -> str:
    """All points as CSV, numbers in full."""
    rows = ((figure.name, panel.name, *row, figure.scale) for panel in figure.panels for row in panel.rows)
    return csv_text(COLUMNS, rows)


Points = Sequence[tuple[float, float, float]]
"""Step, epoch and value of each."""
Curves = Mapping[str, Sequence[tuple[Run, Points]]]
"""Every run of a method, by method."""


def curve_panel(
    name: str, title: str, y_label: str, curves: Curves, *, log: bool = False, band_of_logs: bool | None = None
) -> Panel:
    """A panel of every run, and of mean and band over the finished runs at the steps that all of them have.

    Mean and band of a logarithmic panel are on log10, unless `band_of_logs` says otherwise. A run that did not finish
    is a series of its own, named after its outcome, and is in no mean.
    """
    of_logs = log if band_of_logs is None else band_of_logs
    rows: list[Row] = []
    for method, listed in curves.items():
        for run, points in listed:
            series = method if run.finished else f"{run.method}, seed {run.seed} ({run.outcome})"
            rows += [Row(series, str(run.seed), *point) for point in points if not math.isnan(point[2])]
        tables = [
            {step: (epoch, value) for step, epoch, value in points if math.isfinite(value) and (value > 0 or not log)}
            for run, points in listed
            if run.finished
        ]
        for step in sorted(set.intersection(*map(set, tables))) if tables else ():
            values = np.array([table[step][1] for table in tables])
            values = np.log10(values) if of_logs else values
            mean, spread = float(values.mean()), float(values.std(ddof=1)) if len(tables) > 1 else 0.0
            for seed, value in ((MEAN, mean), (LOW, mean - spread), (HIGH, mean + spread)):
                rows.append(Row(method, seed, step, tables[0][step][0], 10 ** min(value, 308.0) if of_logs else value))
    return Panel(name, title, y_label, rows, log)


def curves_of(analysis: Analysis, rows_of: Literal["steps", "evaluations"], key: str, factor: float = 1.0) -> Curves:
    """One key of the rows of every run."""
    comparison = analysis.comparison
    return {
        method: [(run, _thin(getattr(run, rows_of), key, factor)) for run in comparison.of(method)]
        for method in comparison.methods
    }


def _thin(rows: Rows, key: str, factor: float) -> Points:
    """One key of some rows; of a long curve means over equal stretches, each placed at its end."""
    known = [row for row in rows if row.get(key) is not None]
    steps, epochs, values = (np.array([number(row.get(name)) for row in known]) for name in ("step", "epoch", key))
    size = max(1, math.ceil(len(known) / MOST_POINTS))
    starts = np.arange(0, len(known), size)
    ends = np.minimum(starts + size, len(known))
    means = np.add.reduceat(values, starts) / (ends - starts) * factor
    return list(zip(steps[ends - 1].tolist(), epochs[ends - 1].tolist(), means.tolist(), strict=True))


def measured(analysis: Analysis, key: str, *, geometric: bool = True) -> Curves:
    """A quantity of the measured heads over training, mean over heads and layers; see `HeadTable.over_steps`."""

    def points(table: HeadTable) -> Points:
        return list(zip(table.steps, table.epochs(), table.over_steps(key, geometric=geometric).tolist(), strict=True))

    return {method: [(table.run, points(table)) for table in tables] for method, tables in analysis.heads.items()}


def build_figures(analysis: Analysis) -> list[Figure]:
    """Figures with at least one point."""
    comparison, metric = analysis.comparison, analysis.comparison.metric
    scores = curves_of(analysis, "evaluations", metric.name, metric.scale)
    side = "right" if metric.higher_is_better else "left"
    jacobian = [
        _measured_panel(analysis, "pseudo_condition_number", "κ(J), measured", name="kappa"),
        _measured_panel(analysis, "bound_log10", "true upper bound", name="bound"),
        _measured_panel(analysis, "papers_bound_log10", "papers' bound (not a bound)", name="papers_bound"),
    ]
    count = sum(table.columns["inexact"].sum() for tables in analysis.heads.values() for table in tables)
    inexact = f"; {count:.0f} are not exact (an estimate, or singular as far as float64 can tell)" if count else ""
    gradients = {role: curves_of(analysis, "steps", f"grad_norm_{role}") for role in ROLES}
    found = [
        (
            "Summary",
            "differences",
            "Paired differences",
            f"To the {side} of the dotted line is better than {comparison.baseline}; a bar is the 95 % interval of the "
            "mean, small dots are seeds. A bar across the line is no evidence. A triangle at the edge is a method "
            "beyond the axis.",
            [_difference_panel(analysis)],
        ),
        (
            "Learning",
            "learning",
            "Learning curves",
            f"{metric.better.capitalize()}; see which method is ahead early and whether the lead lasts. {BAND}",
            [
                curve_panel("metric", f"Evaluation: {metric.name}", metric.label, scores),
                curve_panel("loss", "Evaluation: loss", "loss", curves_of(analysis, "evaluations", "loss")),
                curve_panel("training_loss", "Training: loss", "loss", curves_of(analysis, "steps", "loss")),
            ],
        ),
        (
            "Learning",
            "gradients",
            "Gradient norms of the projections",
            f"A method whose W_Q and W_K lie far below its W_V here hardly learns where to attend. {BAND}",
            [
                curve_panel(f"grad_norm_{role}", f"Gradient of W_{role.upper()}", "gradient norm", curves, log=True)
                for role, curves in gradients.items()
            ],
        ),
        (
            "Conditioning",
            "jacobian",
            "Condition number of the Jacobian",
            f"{HEADS} Every panel has an axis of its own. κ(J) is over the non-zero spectrum (pseudo){inexact}. "
            "What the papers print as a bound is not one: measured values may exceed it. Values beyond 10³⁰⁰ are not "
            f"drawn. {BAND}",
            jacobian,
        ),
        (
            "Conditioning",
            "weights",
            "Condition numbers of the weights, W + C",
            f"{HEADS} 1 is best; see whether training undoes what a method set up (as the forward uses them). {BAND}",
            [_measured_panel(analysis, f"kappa_{role}", f"κ of W_{role.upper()}") for role in ROLES],
        ),
        (
            "Attention",
            "attention",
            "Attention maps",
            "Means over heads and layers. Entropy 1 is uniform attention, 0 is attention to one token, where the "
            "softmax is saturated and W_Q and W_K hardly learn; diagonal mass is attention of a token to itself. "
            f"{BAND}",
            [
                _measured_panel(analysis, "normalised_entropy", "Entropy over ln N", "share of ln N"),
                _measured_panel(analysis, "diagonal_mass", "Diagonal mass", "mean probability"),
                _measured_panel(analysis, "dead", "Dead heads", "share of heads"),
            ],
        ),
    ]
    made = [
        Figure(
            name,
            section,
            title,
            caption,
            tuple(panels),
            comparison.methods,
            comparison.scale,
            analysis.unit,
            bars=name == "differences",
        ).drawable()
        for section, name, title, caption, panels in found
    ]
    return [figure for figure in made if figure.panels]


def _difference_panel(analysis: Analysis) -> Panel:
    """The best first, beside the line of no difference; of a metric that is to fall, the change."""
    metric, known = analysis.comparison.result, [d for d in analysis.differences.values() if d.count]
    rows = [Row(BUDGET, MEAN, math.nan, math.nan, 0.0)] if known else []
    for difference in sorted(known, key=lambda difference: -difference.mean):
        change = difference.as_change(metric)
        low, high = change.interval or (math.nan, math.nan)
        points = {str(seed): value for seed, value in change.values.items()}
        points |= {MEAN: change.mean, LOW_END: low, HIGH_END: high}
        rows += [Row(difference.method, seed, math.nan, math.nan, x * metric.scale) for seed, x in points.items()]
    unit = f" ({metric.unit.strip()})" if metric.unit else ""
    return Panel("metric", "", f"{'gain in' if metric.higher_is_better else 'change of'} {metric.name}{unit}", rows)


def match_rows(unit: str, matchings: Mapping[str, Matching]) -> list[Row]:
    """Bars: epochs or steps to match by seed, infinite where a seed never gets there, and their mean."""
    rows, budgets = [], []
    for method, matching in matchings.items():
        for seed, match in matching.by_seed.items():
            value = getattr(match, unit) if match.reached else math.inf
            rows.append(Row(method, str(seed), match.step, match.epoch, value))
            budgets.append(match.total[unit])
        if matching.censored < len(matching.by_seed):
            rows.append(Row(method, MEAN, *(matching.mean(key) for key in ("step", "epoch", unit))))
    return rows + ([Row(BUDGET, MEAN, math.nan, math.nan, max(budgets))] if budgets else [])


def _measured_panel(analysis: Analysis, key: str, title: str, label: str = "condition number", name: str = "") -> Panel:
    return curve_panel(name or key, title, label, measured(analysis, key), log=key not in ARITHMETIC)
