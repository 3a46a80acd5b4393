"""Plots of measurements with matplotlib: heads of a model at one moment, and one quantity over the steps of a training.

Where the strict condition number is infinite, the one over the non-zero spectrum is drawn, as a ring instead of a dot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wellcond.errors import needs_extra

BLUE, RED, GREY, GRID = "#2969a8", "#b3261e", "#5b6570", "#e6e9ec"
COLOURS = ("#2969a8", "#c2571a", "#2e8056", "#9a3b86", "#8a6d0b", "#147f91", "#b3261e", "#6a5acd")
LINEAR = ("entropy", "diagonal_mass", "max_probability", "bound_log10", "rank", "nullity", "seconds")
"""Ends of the names of quantities that are plotted on a linear axis."""
MOST_LABELS = 16
MOST_IN_LEGEND = 12


@dataclass(frozen=True)
class HeadMark:
    """One head at one moment."""

    layer: str
    kappa: float
    """The condition number asked for."""
    pseudo: float
    dead: bool = False


@dataclass(frozen=True)
class Curve:
    """One quantity of one head over the steps."""

    layer: str
    head: int
    steps: Sequence[int]
    values: Sequence[float]
    instead: Sequence[float]
    """What is drawn where a value is infinite; NaN for nothing."""


def plot_heads(marks: Sequence[HeadMark], *, kind: str = "strict", title: str = "", ax: Any = None) -> Any:
    """A dot per head above the name of its layer, and the geometric mean of each layer; returns the `Axes`.

    Raises: MissingExtraError if matplotlib is not installed.
    """
    layers = list(dict.fromkeys(mark.layer for mark in marks))
    given, ax = ax is not None, _axes(ax, width=min(5.6 + 0.3 * len(layers), 14.0))
    styles: dict[str, dict[str, Any]] = {
        "finite": {"color": BLUE, "alpha": 0.8, "label": "head"},
        "infinite": {"facecolors": "white", "edgecolors": BLUE, "linewidths": 1.4,
                     "label": "head with infinite κ(J): over its non-zero spectrum"},
        "dead": {"color": RED, "marker": "x", "label": "dead head: its κ(J) says nothing good"},
    }  # fmt: skip
    places: dict[str, list[tuple[float, float]]] = {name: [] for name in styles}
    means: list[float] = []
    unknown = []
    for at, layer in enumerate(layers):
        inside = [mark for mark in marks if mark.layer == layer]
        alive = []
        for number, mark in enumerate(inside):
            infinite = math.isinf(mark.kappa)
            value = mark.pseudo if infinite else mark.kappa
            x = at + (number - (len(inside) - 1) / 2) * min(0.6 / len(inside), 0.12)
            if not math.isfinite(value):
                unknown.append(x)
                continue
            places["dead" if mark.dead else "infinite" if infinite else "finite"].append((x, value))
            alive += [] if mark.dead else [value]
        means.append(_geometric_mean(alive))
    if any(math.isfinite(mean) for mean in means):
        ax.plot(range(len(layers)), means, color=GREY, linewidth=1.2, zorder=2, marker="_", markersize=16,
                label="geometric mean of a layer, dead heads left out")  # fmt: skip
    for name, style in styles.items():
        if places[name]:
            ax.scatter(*zip(*places[name], strict=True), **({"s": 34, "zorder": 3} | style))
    _at_top(ax, unknown, "not finite over the non-zero spectrum either")
    ax.set_yscale("log")
    ax.set_xlim(-0.6, max(len(layers) - 0.4, 0.6))
    _layer_axis(ax, layers)
    ax.set_ylabel(f"{kind} κ(J)")
    _finish(ax, title, "Condition number of each head's Jacobian")
    _legend(ax, *ax.get_legend_handles_labels(), place=None if given else "outside lower left")
    return ax


def plot_curves(curves: Sequence[Curve], *, quantity: str, title: str = "", ax: Any = None) -> Any:
    """A line per head in the colour of its layer; returns the `Axes`.

    Raises: MissingExtraError if matplotlib is not installed.
    """
    given, ax = ax is not None, _axes(ax, width=8.0)
    layers = list(dict.fromkeys(curve.layer for curve in curves))
    colours = _layer_colours(layers)
    replaced = False
    failed: list[float] = []
    lines: dict[str, Any] = {}
    for curve in curves:
        colour, infinite = colours[curve.layer], [math.isinf(value) for value in curve.values]
        shown = [b if bad else a for a, b, bad in zip(curve.values, curve.instead, infinite, strict=True)]
        known = [(step, y, bad) for step, y, bad in zip(curve.steps, shown, infinite, strict=True) if math.isfinite(y)]
        failed += [step for step, y in zip(curve.steps, shown, strict=True) if not math.isfinite(y)]
        gaps = [y if math.isfinite(y) else math.nan for y in shown]
        [line] = ax.plot(curve.steps, gaps, color=colour, linewidth=1.3, alpha=0.85, zorder=2)
        lines.setdefault(curve.layer or "(model)", line)
        for rings, fill in ((False, colour), (True, "white")):
            dots = [(step, y) for step, y, bad in known if bad == rings]
            if dots and (rings or len(known) <= 40):
                ax.scatter(*zip(*dots, strict=True), s=20, facecolors=fill, edgecolors=colour, zorder=3)
            replaced = replaced or (rings and bool(dots))
    if replaced:
        ax.scatter([], [], s=20, facecolors="white", edgecolors=GREY, label="infinite: over the non-zero spectrum")
    _at_top(ax, sorted(set(failed)), "not finite, or the measurement failed")
    if not quantity.endswith(LINEAR):
        ax.set_yscale("log")
    label = label_of(quantity)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("step")
    ax.set_ylabel(label)
    _finish(ax, title, f"{label} while training")
    every = math.ceil(len(lines) / MOST_IN_LEGEND)
    named = [name for at, name in enumerate(lines) if at % every == 0 or at == len(lines) - 1]
    marks, meanings = ax.get_legend_handles_labels()
    place = None if given else "outside right upper"
    _legend(ax, [*(lines[name] for name in named), *marks], [*named, *meanings], place=place)
    return ax


def _axes(ax: Any, *, width: float) -> Any:
    with needs_extra("matplotlib", "report"):
        from matplotlib import pyplot
    if ax is None:
        _, ax = pyplot.subplots(figsize=(width, 4.2), dpi=110, layout="constrained")
    return ax


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else math.nan


def _layer_colours(layers: Sequence[str]) -> dict[str, Any]:
    """Distinct colours for a few layers; a ramp from the first to the last for many."""
    if len(layers) <= len(COLOURS):
        return dict(zip(layers, COLOURS, strict=False))
    from matplotlib import colormaps

    ramp = colormaps["viridis"]
    return {layer: ramp(0.92 * at / (len(layers) - 1)) for at, layer in enumerate(layers)}


def _at_top(ax: Any, places: Sequence[float], label: str) -> None:
    """Mark what has no height, at the upper edge."""
    if places:
        edge = ax.get_xaxis_transform()
        ax.scatter(places, [0.98] * len(places), s=26, marker="^", color=RED, transform=edge, label=label, zorder=3)


def _layer_axis(ax: Any, layers: Sequence[str]) -> None:
    shown = range(0, len(layers), max(1, math.ceil(len(layers) / MOST_LABELS)))
    short = _without_common_parts(layers)
    turned = sum(len(short[at]) for at in shown) > 70
    ax.set_xticks(list(shown), [short[at] for at in shown], rotation=35 if turned else 0,
                  ha="right" if turned else "center", rotation_mode="anchor")  # fmt: skip
    ax.set_xlabel("layer")


def _without_common_parts(names: Sequence[str]) -> list[str]:
    """Names of layers without the dotted parts that all of them have at their ends.

    Example:
        >>> _without_common_parts(["blocks.0.attn", "blocks.1.attn"])
        ['0', '1']
    """
    parts = [name.split(".") for name in names]
    if len(set(names)) < 2:
        return list(names)
    shortest = min(map(len, parts))
    first = next((i for i in range(shortest) if len({p[i] for p in parts}) > 1), shortest - 1)
    last = next((i for i in range(1, shortest + 1) if len({p[-i] for p in parts}) > 1), shortest)
    cut = [".".join(p[first : len(p) - last + 1]) for p in parts]
    return cut if all(cut) and len(set(cut)) == len(set(names)) else list(names)


def _finish(ax: Any, title: str, default: str) -> None:
    ax.grid(True, which="both", color=GRID, linewidth=0.8)
    ax.grid(False, which="both", axis="x")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(default, loc="left", fontsize=11, fontweight="bold", pad=22 if title else 8)
    if title:
        ax.text(0, 1.03, title, transform=ax.transAxes, fontsize=8.5, color=GREY)


def _legend(ax: Any, handles: Sequence[Any], labels: Sequence[str], *, place: str | None) -> None:
    """Outside the axes at `place` of a figure of our own; inside them, where there is room, if it is None."""
    if not handles:
        return
    holder, style = (ax, {"loc": "best"}) if place is None else (ax.figure, {"loc": place})
    holder.legend(handles, labels, fontsize=8, frameon=False, ncols=2 if place == "outside lower left" else 1, **style)


def label_of(field: str) -> str:
    """A quantity on the axis of a plot.

    Example:
        >>> label_of("condition_number"), label_of("raw_kappa_q"), label_of("normalised_entropy")
        ('strict κ(J)', 'raw κ(W_Q)', 'normalised entropy')
    """
    names = {"condition_number": "strict κ(J)", "pseudo_condition_number": "pseudo κ(J)"}
    words = field.replace("_", " ")
    for role in "qkv":
        for name, symbol in (("kappa", "κ"), ("sigma max", "σ_max"), ("sigma min", "σ_min"), ("norm", "norm J")):
            matrix = f"_{role.upper()}" if name == "norm" else f"(W_{role.upper()})"
            words = words.replace(f"{name} {role}", f"{symbol}{matrix}")
    return names.get(field, words)


def curves_of(points: Sequence[Mapping[str, Any]], quantity: str) -> list[Curve]:
    """Curves of the heads of tracked points, for `plot_curves`; points that do not have the quantity are left out."""
    found: dict[tuple[str, int], list[tuple[int, float, float]]] = {}
    for point in points:
        value = point[quantity]
        if value is None:
            continue
        instead = point["pseudo_condition_number"] if quantity == "condition_number" else math.nan
        found.setdefault((point["layer"], point["head"]), []).append((point["step"], float(value), float(instead)))
    return [
        Curve(layer, head, *(list(column) for column in zip(*sorted(rows), strict=True)))
        for (layer, head), rows in found.items()
    ]
