"""Plots of weights, Jacobian spectra and attention statistics, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from wellcond.lab.report.markup import Markup, figure, join, tag
from wellcond.lab.report.values import HeadView, head_views, layer_name, log10, number, show

WIDTH = 980.0
LEFT, RIGHT = 62.0, 14.0
PANEL = 320.0
NUM_COLOURS = 8
MOST_POINTS = 160


class LogAxis:
    """A vertical axis in whole decades."""

    def __init__(self, logarithms: Iterable[float], top: float, bottom: float) -> None:
        """Cover the finite logarithms between two heights."""
        finite = [x for x in logarithms if math.isfinite(x)]
        self.low = math.floor(min(finite, default=0.0))
        self.high = max(math.ceil(max(finite, default=1.0)), self.low + 1)
        self.top, self.bottom = top, bottom

    def __call__(self, logarithm: float) -> float:
        """Height of a value; what is below the axis (zero) sits on it."""
        inside = min(max(logarithm, self.low), self.high)
        return self.bottom - (inside - self.low) / (self.high - self.low) * (self.bottom - self.top)

    def draw(self, left: float, right: float) -> Markup:
        """Grid lines with labels."""
        step = max(1, math.ceil((self.high - self.low) / 6))
        parts = []
        for decade in range(self.low, self.high + 1, step):
            y = self(decade)
            parts.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
            parts.append(_power_of_ten(decade, left - 6, y + 4))
        return join(*parts)


def _power_of_ten(decade: int, x: float, y: float) -> Markup:
    return tag("text", "10", tag("tspan", str(decade), dy=-4, font_size=8), x=x, y=y, class_="axis end")


def _positions(data: dict[str, Any], views: Sequence[HeadView]) -> tuple[list[float], Markup, float]:
    """Horizontal place of every head, grouped by layer; separators and names of layers; total width."""
    counts = [len(layer["heads"]) for layer in data["layers"]]
    slots = sum(counts) + len(counts)
    step = max((WIDTH - LEFT - RIGHT) / max(slots, 1), 5.5)
    step = min(step, 60.0)
    places, marks, at = [], [], LEFT
    for layer, count in zip(data["layers"], counts, strict=True):
        places += [at + (head + 1) * step for head in range(count)]
        width = (count + 1) * step
        marks.append((at, width, layer_name(layer)))
        at += width
    assert len(places) == len(views)
    parts = []
    for number_, (start, width, name) in enumerate(marks):
        if number_:
            parts.append(tag("line", x1=start, x2=start, y1=8, y2=150, class_="grid"))
        fits = max(int(width / 6.4), 2)
        text = name if len(name) <= fits else str(number_)
        parts.append(tag("text", tag("title", name), text, x=start + width / 2, y=168, class_="axis middle"))
    return places, join(*parts), at


def draw_weights(data: dict[str, Any]) -> Markup:
    """sigma_max and sigma_min of W_Q, W_K and W_V of every head: a bar from one to the other."""
    views = head_views(data)
    if not views:
        return tag("p", "No head was measured.")
    logs = [
        log10(view.row["weights"][role][key]) for view in views for role in "qkv" for key in ("sigma_max", "sigma_min")
    ]
    panels = []
    for role in "qkv":
        axis = LogAxis(logs, 12, 148)
        places, marks, right = _positions(data, views)
        bars = [_bar(view, role, x, axis) for view, x in zip(views, places, strict=True)]
        kappas = sorted(number(view.row["weights"][role]["condition_number"]) for view in views)
        described = (
            f"{len(views)} heads; condition numbers from {show(kappas[0])} to {show(kappas[-1])}. "
            "Exact values are in the table of weights."
        )
        drawing = figure(
            right + RIGHT, 176, f"Extreme singular values of W_{role.upper()}", described,
            axis.draw(LEFT, right), marks, *bars, natural=True,
        )  # fmt: skip
        panels.append(tag("figure", tag("figcaption", "W", tag("sub", role.upper())), drawing))
    return join(*panels)


def _bar(view: HeadView, role: str, x: float, axis: LogAxis) -> Markup:
    weights = view.row["weights"][role]
    top, bottom = axis(log10(weights["sigma_max"])), axis(log10(weights["sigma_min"]))
    deficient = bool(weights.get("nullity"))
    told = (
        f"{view.label}: sigma_max {show(weights['sigma_max'])}, sigma_min {show(weights['sigma_min'])}, "
        f"condition number {show(weights['condition_number'])}, rank {weights.get('rank')}"
    )
    low_end = (
        tag("path", d=f"M{x - 4:g} {bottom - 5:g}h8l-4 7z", class_="bad-mark")
        if deficient
        else tag("circle", cx=x, cy=bottom, r=2.6, class_="low-mark")
    )
    return tag(
        "g",
        tag("title", told),
        tag("line", x1=x, x2=x, y1=top, y2=bottom, class_="range bad" if deficient else "range"),
        tag("circle", cx=x, cy=top, r=2.6, class_="high-mark"),
        low_end,
    )


def draw_spectra(data: dict[str, Any]) -> Markup:
    """All singular values of the Jacobians, one panel per layer and one line per head, where they were computed."""
    views = [view for view in head_views(data) if view.spectrum is not None]
    missing = len(head_views(data)) - len(views)
    note = (
        tag(
            "p",
            f"{missing} of {missing + len(views)} heads are too large for a full spectrum; their extreme singular "
            "values are in the table of verdicts.",
        )
        if missing
        else Markup("")
    )
    if not views:
        return note
    logs = [_floor(view) for view in views] + [log10(view.jacobian["sigma_max"]) for view in views]
    panels = []
    for at, layer in enumerate(data["layers"]):
        inside = [view for view in views if view.layer == at]
        if inside:
            panels.append(_spectrum_panel(layer_name(layer), inside, logs))
    return join(note, tag("div", *panels, class_="panels"), _head_legend({view.index for view in views}))


def _floor(view: HeadView) -> float:
    """Below this, a singular value counts as zero."""
    return log10(number(view.jacobian.get("rtol")) * number(view.jacobian["sigma_max"]))


def _spectrum_panel(name: str, views: Sequence[HeadView], logs: Sequence[float]) -> Markup:
    axis = LogAxis(logs, 10, 148)
    left, right = 44.0, PANEL - 8
    longest = max(len(view.spectrum or ()) for view in views)
    lines = []
    for view in views:
        sigma = view.spectrum or ()
        picked = _thin(len(sigma))
        points = " ".join(
            f"{left + (right - left) * i / max(longest - 1, 1):.1f},{axis(log10(sigma[i])):.1f}" for i in picked
        )
        told = f"{view.label}: {len(sigma)} singular values from {show(sigma[0])} to {show(sigma[-1])}"
        told += f", rank {view.jacobian.get('rank')}" + (", DEAD HEAD" if view.dead else "")
        shape = f"curve c{view.index % NUM_COLOURS}" + (" dashed" if view.dead else "")
        lines.append(tag("g", tag("title", told), tag("polyline", points=points, class_=shape)))
    floor = axis(max(_floor(view) for view in views))
    drawing = figure(
        PANEL, 176, f"Jacobian spectrum of {name}",
        f"{len(views)} heads; up to {longest} singular values each, falling, on a logarithmic axis.",
        axis.draw(left, right), tag("line", x1=left, x2=right, y1=floor, y2=floor, class_="floor"), *lines,
        tag("text", "1", x=left, y=168, class_="axis middle"),
        tag("text", "index", x=(left + right) / 2, y=168, class_="axis middle"),
        tag("text", str(longest), x=right, y=168, class_="axis end"),
    )  # fmt: skip
    return tag("figure", tag("figcaption", name), drawing)


def _thin(count: int) -> list[int]:
    """Indices to draw: all of a short list, else evenly spaced ones and, at both ends, where it bends, every one."""
    if count <= MOST_POINTS:
        return list(range(count))
    ends = set(range(20)) | set(range(count - 20, count))
    return sorted(ends | {round(i * (count - 1) / (MOST_POINTS - 40)) for i in range(MOST_POINTS - 39)})


def _head_legend(indices: set[int]) -> Markup:
    def entry(index: int) -> Markup:
        line = tag("line", x1=0, x2=22, y1=6, y2=6, class_=f"curve c{index % NUM_COLOURS}")
        return tag(
            "li", tag("svg", line, viewBox="0 0 22 12", style="width:22px", aria_hidden="true"), f" head {index}"
        )

    many = len(indices) > NUM_COLOURS
    listed = [entry(index) for index in sorted(indices)[:NUM_COLOURS]]
    more = [tag("li", f"colours repeat after {NUM_COLOURS} heads; point at a line for its name")] if many else []
    zero = tag(
        "li", tag("b", "- - "), "below the grey dashed line a value counts as zero; dashed curves are dead heads"
    )
    return tag("ul", *listed, *more, zero, class_="legend inline")


def draw_attention(data: dict[str, Any]) -> Markup:
    """Normalised entropy and diagonal mass: a dot per head, a line through the means of layers."""
    views = head_views(data)

    def entropy(view: HeadView) -> float:
        normalised = number(view.attention.get("normalised_entropy"))
        # Zero is zero, by whatever it is divided; a head may have collapsed so far that one key is all it sees.
        return 0.0 if view.dead and number(view.attention.get("entropy")) == 0 else normalised

    def diagonal(view: HeadView) -> float:
        return number(view.attention.get("diagonal_mass"))

    drawn = [
        _strip(data, views, "Normalised entropy", "1 is uniform attention, 0 is attention to one token", entropy),
        _strip(data, views, "Diagonal mass", "mean probability of a token for itself", diagonal),
    ]
    shown = [panel for panel in drawn if panel]
    return join(*shown) if shown else tag("p", "No attention map is known: none of these attentions is plain softmax.")


def _strip(
    data: dict[str, Any], views: Sequence[HeadView], name: str, meaning: str, value: Callable[[HeadView], float]
) -> Markup:
    known = [(view, value(view)) for view in views if math.isfinite(value(view))]
    if not known:
        return Markup("")
    layers = data["layers"]
    step = min(max((WIDTH - LEFT - RIGHT) / len(layers), 26.0), 150.0)
    top, bottom = 12.0, 148.0

    def height(x: float) -> float:
        return bottom - min(max(x, 0.0), 1.0) * (bottom - top)

    parts, told = [], []
    runs: list[list[str]] = [[]]
    right = LEFT + step * len(layers)
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(tag("line", x1=LEFT, x2=right, y1=height(tick), y2=height(tick), class_="grid"))
        parts.append(tag("text", f"{tick:g}", x=LEFT - 6, y=height(tick) + 4, class_="axis end"))
    for at, layer in enumerate(layers):
        inside = [(view, x) for view, x in known if view.layer == at]
        centre, full = LEFT + (at + 0.5) * step, layer_name(layer)
        fits = max(int(step / 6.4), 2)
        label = full if len(full) <= fits else str(at)
        parts.append(tag("text", tag("title", full), label, x=centre, y=168, class_="axis middle"))
        if not inside:
            runs.append([])  # no line across what is not known
            continue
        for i, (view, x) in enumerate(inside):
            spread = (i - (len(inside) - 1) / 2) * min(step * 0.7 / len(inside), 12)
            mark = "dot dead-dot" if view.dead else "dot"
            title = tag("title", f"{view.label}: {name.lower()} {x:.4f}{', DEAD HEAD' if view.dead else ''}")
            parts.append(tag("circle", title, cx=centre + spread, cy=height(x), r=4, class_=mark))
        mean = sum(x for _, x in inside) / len(inside)
        runs[-1].append(f"{centre:.1f},{height(mean):.1f}")
        told.append(f"{full} {mean:.3f}")
    lines = [tag("polyline", points=" ".join(points), class_="mean-line") for points in runs if len(points) > 1]
    picture = figure(
        right + RIGHT, 176, f"{name} per layer", f"{meaning}. Means over heads: {'; '.join(told)}.",
        *parts, *lines, natural=True,
    )  # fmt: skip
    caption = tag("figcaption", name, tag("small", f" {meaning}"))
    return tag("figure", caption, picture)
