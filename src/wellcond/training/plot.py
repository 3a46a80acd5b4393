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
from wellcond.training.series import Series

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
    firsts = np.cumsum([0, *(count for _, count in series.layers)])
    every = math.ceil(len(series.layers) / MOST_LABELS)
    labels = [(int(first), name) for first, (name, _) in zip(firsts, series.layers, strict=False)][::every]
    ax.set_yticks([first for first, _ in labels], [name or "(model)" for _, name in labels])
    for first in firsts[1:-1]:
        ax.axhline(first - 0.5, color="white", linewidth=0.6)


def _draw_curves(ax: Any, series: Series, values: np.ndarray, rows: np.ndarray) -> None:
    steps, first = [series.steps[int(at)] for at in rows], 0
    for name, count in series.layers:
        part = np.where(np.isfinite(values[rows, first : first + count]), values[rows, first : first + count], np.nan)
        first += count
        ax.plot(steps, np.fmax.reduce(part, axis=1), label=name or "(model)", linewidth=1.4)
    if len(series.layers) <= MOST_LABELS:
        ax.legend(fontsize="small")
    ax.grid(alpha=0.3)


def panel_names(series: Series, prefix: str = "") -> dict[str, dict[str, list[str]]]:
    """Names of logged numbers by layer and column, as the callbacks log them, after what a trainer puts before them.

    Example:
        >>> panel_names(Series([("attn", 2)], ["max_logit"]))
        {'attn': {'max_logit': ['wellcond.attn/head00.max_logit', 'wellcond.attn/head01.max_logit']}}
    """
    shown = [column for column in PANELS if column in series.columns]
    return {
        layer or "attention": {
            column: [f"{prefix}wellcond.{layer or 'attention'}/head{head:02d}.{column}" for head in range(count)]
            for column in shown
        }
        for layer, count in series.layers
    }


def tensorboard_layout(series: Series, prefix: str = "") -> dict[str, dict[str, list[Any]]]:
    """A chart for each layer and column with a line per head: ``SummaryWriter.add_custom_scalars(layout)``."""
    return {
        f"heads of {layer}": {column: ["Multiline", names] for column, names in columns.items()}
        for layer, columns in panel_names(series, prefix).items()
    }


def wandb_layout(series: Series, prefix: str = "") -> list[dict[str, Any]]:
    """Sections of line plots, a section for each layer, in plain data: for ``wandb_workspaces`` (see the docs)."""
    return [
        {
            "name": f"heads of {layer}",
            "panels": [{"title": column, "x": "Step", "y": names} for column, names in columns.items()],
        }
        for layer, columns in panel_names(series, prefix).items()
    ]


def write_layout(series: Series, file: str | os.PathLike[str], prefix: str = "") -> None:
    """Write both layouts to a JSON file, under ``tensorboard`` and ``wandb``.

    Raises: MonitorError if it cannot be written.
    """
    content = {"tensorboard": tensorboard_layout(series, prefix), "wandb": wandb_layout(series, prefix)}
    try:
        write_atomically(Path(file), json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise MonitorError(f"{file} cannot be written ({error.strerror}); give another file") from error
