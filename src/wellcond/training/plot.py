"""Plots and panels of a monitor: a map of heads over steps, curves, and layouts for TensorBoard and W&B."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from wellcond.arguments import check_choice
from wellcond.errors import MonitorError, UnknownChoiceError, needs_extra
from wellcond.files import write_atomically
from wellcond.training.series import Series, logged_name

KINDS = ("map", "curves")
PANELS = ("max_logit", "entropy", "first_share", "attention_share", "sec_qk", "kappa_q")
MOST_LABELS = 16
MOST_COLUMNS = 240
"""Steps of a map; of more readings, evenly spaced ones are drawn."""


def plot_series(series: Series, column: str = "max_logit", kind: str = "map", ax: Any = None) -> Any:
    """Draw one column: a map of every head over the steps, or the worst and the mean head of each layer as curves.

    Returns: the `Axes`.

    Raises:
        MissingExtraError: matplotlib is not installed.
        UnknownChoiceError: a column or a kind that does not exist.
        MonitorError: nothing was read yet.
    """
    check_choice("kind of plot", kind, KINDS)
    if column not in series.columns:
        raise UnknownChoiceError("column of this run", column, series.columns)
    values = series.column(column).astype(np.float64)
    rows: np.ndarray = np.flatnonzero(~np.isnan(values).all(1)) if len(values) else np.empty(0, int)
    if not len(rows):
        raise MonitorError(f"{column} was not seen in any step: there is nothing to plot")
    with needs_extra("matplotlib", "report"):
        from matplotlib import pyplot
    if ax is None:
        _, ax = pyplot.subplots(figsize=(8, min(2.5 + 0.12 * series.num_heads, 10)), layout="constrained")
    if kind == "map":
        _draw_map(ax, series, column, values, rows)
    else:
        _draw_curves(ax, series, values, rows)
        ax.set_ylabel(column)
    ax.set_xlabel("step")
    ax.set_title(f"{column} of every head" if kind == "map" else f"{column}: largest head of each layer")
    return ax


def _draw_map(ax: Any, series: Series, column: str, values: np.ndarray, rows: np.ndarray) -> None:
    shown = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), MOST_COLUMNS)).round().astype(int))]
    table = np.where(np.isinf(values[shown]), np.nan, values[shown]).T
    ax.set_facecolor("0.85")  # shows where a number is missing
    image = ax.imshow(table, aspect="auto", interpolation="nearest", cmap="viridis", origin="upper")
    ax.figure.colorbar(image, ax=ax, label=f"{column} (grey: not seen or not finite)")
    ticks = np.unique(np.linspace(0, len(shown) - 1, min(len(shown), 8)).round().astype(int))
    ax.set_xticks(ticks, [str(series.steps[int(shown[at])]) for at in ticks])
    labels = series.parts[:: math.ceil(len(series.layers) / MOST_LABELS)]
    ax.set_yticks([part.start for _, part in labels], [name or "(model)" for name, _ in labels])
    for _, part in series.parts[1:]:
        ax.axhline(part.start - 0.5, color="white", linewidth=0.6)


def _draw_curves(ax: Any, series: Series, values: np.ndarray, rows: np.ndarray) -> None:
    steps = [series.steps[int(at)] for at in rows]
    finite = np.where(np.isfinite(values), values, np.nan)[rows]
    for name, part in series.parts:
        ax.plot(steps, np.fmax.reduce(finite[:, part], axis=1), label=name or "(model)", linewidth=1.4)
    if len(series.layers) <= MOST_LABELS:
        ax.legend(fontsize="small")
    ax.grid(alpha=0.3)


def write_layout(series: Series, file: str | os.PathLike[str], prefix: str = "") -> None:
    """Write panels as JSON, for each layer and column a chart with a line per head.

    Under ``tensorboard`` is what ``SummaryWriter.add_custom_scalars`` takes, under ``wandb`` sections of line plots in
    plain data, for ``wandb_workspaces``; `prefix` is what a trainer puts before the names that a callback logs.

    Raises: MonitorError if it cannot be written.
    """
    board: dict[str, dict[str, list[Any]]] = {}
    sections: list[dict[str, Any]] = []
    for layer, count in series.layers:
        name = f"heads of {layer or 'attention'}"
        shown = [column for column in PANELS if column in series.columns]
        lines = {column: [prefix + logged_name(layer, head, column) for head in range(count)] for column in shown}
        board[name] = {column: ["Multiline", names] for column, names in lines.items()}
        panels = [{"title": column, "x": "Step", "y": names} for column, names in lines.items()]
        sections.append({"name": name, "panels": panels})
    try:
        write_atomically(Path(file), json.dumps({"tensorboard": board, "wandb": sections}, indent=1) + "\n")
    except OSError as error:
        raise MonitorError(f"{file} cannot be written ({error.strerror}); give another file") from error
