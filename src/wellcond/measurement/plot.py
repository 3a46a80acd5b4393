"""Plots with matplotlib: the heads of a model at one moment, and one quantity over the steps of a training.

Where the strict condition number is infinite, the one over the non-zero spectrum is drawn, as a ring instead of a dot.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wellcond.errors import needs_extra
from wellcond.measurement.records import geometric_mean

if TYPE_CHECKING:
    from wellcond.measurement.records import MeasurementReport
    from wellcond.measurement.tracker import TrackPoint

BLUE, RED, GREY, GRID = "#2969a8", "#b3261e", "#5b6570", "#e6e9ec"
COLOURS = ("#2969a8", "#c2571a", "#2e8056", "#9a3b86", "#8a6d0b", "#147f91", "#b3261e", "#6a5acd")
LINEAR = ("entropy", "diagonal_mass", "max_probability", "bound_log10", "rank", "nullity", "seconds")
"""Ends of the names of quantities that are plotted on a linear axis."""
FINITE, INFINITE = "head", "head with infinite κ(J): over its non-zero spectrum"
DEAD = "dead head: its κ(J) is not meaningful"
STYLES: dict[str, dict[str, Any]] = {
    FINITE: {"color": BLUE, "alpha": 0.8},
    INFINITE: {"facecolors": "white", "edgecolors": BLUE, "linewidths": 1.4},
    DEAD: {"color": RED, "marker": "x"},
}
MOST_LABELS, MOST_IN_LEGEND = 16, 12


def plot_report(report: MeasurementReport, ax: Any = None) -> Any:
    """Draw a dot per head above the name of its layer, and the geometric mean of each layer; returns the `Axes`.

    Raises: MissingExtraError if matplotlib is not installed.
    """
    layers = {layer.name or "(model)": layer.heads for layer in report.layers if layer.heads}
    own, ax = ax is None, _axes(ax, width=min(5.6 + 0.3 * len(layers), 14.0))
    places: dict[str, list[tuple[float, float]]] = {name: [] for name in STYLES}
    means, unknown = [], []
    for at, heads in enumerate(layers.values()):
        alive = []
        for number, head in enumerate(heads):
            infinite = math.isinf(head.mean_kappa())
            value = head.mean_kappa("pseudo") if infinite else head.mean_kappa()
            x = at + (number - (len(heads) - 1) / 2) * min(0.6 / len(heads), 0.12)
            if not math.isfinite(value):
                unknown.append(x)
                continue
            places[DEAD if head.dead else INFINITE if infinite else FINITE].append((x, value))
            alive += [] if head.dead else [value]
        means.append(geometric_mean(alive))
    if any(map(math.isfinite, means)):
        label = "geometric mean of a layer, dead heads left out"
        ax.plot(range(len(layers)), means, color=GREY, linewidth=1.2, zorder=2, marker="_", markersize=16, label=label)
    for name, style in STYLES.items():
        if places[name]:
            ax.scatter(*zip(*places[name], strict=True), s=34, zorder=3, label=name, **style)
    _mark_unknown(ax, unknown, "not finite over the non-zero spectrum either")
    ax.set_yscale("log")
    ax.set_xlim(-0.6, max(len(layers) - 0.4, 0.6))
    _label_layers(ax, list(layers))
    ax.set_ylabel(f"{report.kappa} κ(J)")
    _finish(ax, report.run.get("model", ""), "Condition number of each head's Jacobian")
    _legend(ax, "outside lower left" if own else "best")
    return ax


def plot_points(points: Sequence[TrackPoint], quantity: str, *, title: str = "", ax: Any = None) -> Any:
    """Draw one quantity of tracked points over the steps, a line per head in the colour of its layer.

    Returns: the `Axes`.

    Raises: MissingExtraError if matplotlib is not installed.
    """
    own, ax = ax is None, _axes(ax, width=8.0)
    points = [point for point in points if getattr(point, quantity) is not None]
    colours = _layer_colours(list(dict.fromkeys(point.layer for point in points)))
    every = math.ceil(len(colours) / MOST_IN_LEGEND)
    named = {name for at, name in enumerate(colours) if at % every == 0 or at == len(colours) - 1}
    unknown: set[int] = set()
    replaced = False
    for layer, head in dict.fromkeys((point.layer, point.head) for point in points):
        curve = sorted((p for p in points if (p.layer, p.head) == (layer, head)), key=lambda point: point.step)
        steps = np.array([point.step for point in curve])
        values = np.array([getattr(point, quantity) for point in curve], dtype=float)
        rings = np.zeros(len(curve), dtype=bool)
        if quantity == "condition_number":
            instead = np.array([point.pseudo_condition_number for point in curve], dtype=float)
            rings = np.isinf(values) & np.isfinite(instead)
            values[rings] = instead[rings]
        values[~np.isfinite(values)] = math.nan
        label = (layer or "(model)") if layer in named else None
        named.discard(layer)
        marker = "o" if len(curve) <= 40 else None
        style = {"color": colours[layer], "linewidth": 1.3, "alpha": 0.85, "marker": marker, "markersize": 4.5}
        ax.plot(steps, values, zorder=2, label=label, **style)
        ax.scatter(steps[rings], values[rings], s=20, facecolors="white", edgecolors=colours[layer], zorder=3)
        unknown |= set(steps[np.isnan(values)].tolist())
        replaced |= bool(rings.any())
    if replaced:
        ax.scatter([], [], s=20, facecolors="white", edgecolors=GREY, label="infinite: over the non-zero spectrum")
    _mark_unknown(ax, sorted(unknown), "not finite, or the measurement failed")
    if not quantity.endswith(LINEAR):
        ax.set_yscale("log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("step")
    ax.set_ylabel(label_of(quantity))
    _finish(ax, title, f"{label_of(quantity)} while training")
    _legend(ax, "outside right upper" if own else "best")
    return ax


def _axes(ax: Any, *, width: float) -> Any:
    with needs_extra("matplotlib", "report"):
        from matplotlib import pyplot
    return pyplot.subplots(figsize=(width, 4.2), dpi=110, layout="constrained")[1] if ax is None else ax


def _layer_colours(layers: Sequence[str]) -> dict[str, Any]:
    """Distinct colours for a few layers; a ramp from the first to the last for many."""
    if len(layers) <= len(COLOURS):
        return dict(zip(layers, COLOURS, strict=False))
    from matplotlib import colormaps

    return dict(zip(layers, colormaps["viridis"](np.linspace(0, 0.92, len(layers))), strict=True))


def _mark_unknown(ax: Any, places: Sequence[float], label: str) -> None:
    """Mark what has no height at the upper edge."""
    if places:
        edge = ax.get_xaxis_transform()
        ax.scatter(places, [0.98] * len(places), s=26, marker="^", color=RED, transform=edge, label=label, zorder=3)


def _label_layers(ax: Any, layers: Sequence[str]) -> None:
    step = max(1, math.ceil(len(layers) / MOST_LABELS))
    shown = _without_common_parts(layers)[::step]
    long = sum(map(len, shown)) > 70
    turned = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if long else {}
    ax.set_xticks(range(0, len(layers), step), shown, **turned)
    ax.set_xlabel("layer")


def _without_common_parts(names: Sequence[str]) -> list[str]:
    """Names of layers without the dotted parts that all of them begin and end with.

    Example:
        >>> _without_common_parts(["blocks.0.attn", "blocks.1.attn"])
        ['0', '1']
    """
    parts = [name.split(".") for name in names]
    first = len(os.path.commonprefix(parts))
    last = len(os.path.commonprefix([part[::-1] for part in parts]))
    short = [".".join(part[first : len(part) - last]) for part in parts]
    return short if all(short) and len(set(short)) == len(set(names)) else list(names)


def _finish(ax: Any, title: str, default: str) -> None:
    ax.grid(axis="y", which="both", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(default, loc="left", fontsize=11, fontweight="bold", pad=22 if title else 8)
    ax.text(0, 1.03, title, transform=ax.transAxes, fontsize=8.5, color=GREY)


def _legend(ax: Any, place: str) -> None:
    """Inside the axes if these were given, else outside of them in a figure of our own."""
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        holder = ax if place == "best" else ax.figure
        columns = 2 if place == "outside lower left" else 1
        holder.legend(handles, labels, fontsize=8, frameon=False, ncols=columns, loc=place)


def label_of(field: str) -> str:
    """A quantity on the axis of a plot.

    Example:
        >>> label_of("condition_number"), label_of("raw_kappa_q"), label_of("normalised_entropy"), label_of("norm_k")
        ('strict κ(J)', 'raw κ(W_Q)', 'normalised entropy', 'norm J_K')
    """
    names = {"condition_number": "strict κ(J)", "pseudo_condition_number": "pseudo κ(J)"}
    symbols = {"kappa": "κ", "sigma max": "σ_max", "sigma min": "σ_min"}
    words = field.replace("_", " ")
    words = re.sub(r"norm ([qkv])$", lambda found: f"norm J_{found[1].upper()}", words)
    pattern = rf"({'|'.join(symbols)}) ([qkv])$"
    words = re.sub(pattern, lambda found: f"{symbols[found[1]]}(W_{found[2].upper()})", words)
    return names.get(field, words)
