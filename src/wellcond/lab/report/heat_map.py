"""Layers by heads, coloured by the logarithm of the Jacobian's condition number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from wellcond.lab.report.markup import Markup, figure, join, tag
from wellcond.lab.report.values import INFINITE, MISSING, HeadView, head_views, layer_name, log10, show

# From pale (well conditioned) to dark (ill conditioned); one hue, so that it survives a grey printer.
RAMP = ((236, 244, 250), (172, 207, 230), (97, 160, 206), (41, 105, 168), (11, 47, 98))
CELL_HEIGHT = 30


def ramp_colour(share: float) -> tuple[str, str]:
    """Colour at a share of the ramp, and the colour of text on it."""
    at = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    low = min(int(at), len(RAMP) - 2)
    rgb = [round(a + (b - a) * (at - low)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True)]
    bright = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 140
    return "#{:02x}{:02x}{:02x}".format(*rgb), "#10202e" if bright else "#ffffff"


def colour_range(views: Sequence[HeadView]) -> tuple[float, float]:
    """Whole decades around what is finite and alive; a dead head's condition number says nothing good."""
    finite = [log10(v.finite_kappa) for v in views if not v.dead and math.isfinite(log10(v.finite_kappa))]
    if not finite:
        return 0.0, 1.0
    low, high = math.floor(min(finite)), math.ceil(max(finite))
    return float(low), float(max(high, low + 1))


def draw_heat_map(data: dict[str, Any]) -> Markup:
    """The heat map and its legend."""
    views, layers = head_views(data), data["layers"]
    indices = sorted({view.index for view in views})
    if not indices:
        return tag("p", "No head was measured.")
    column = {index: at for at, index in enumerate(indices)}
    left = 14 + 7.2 * max(min(max(len(layer_name(layer)) for layer in layers), 34), 5)
    cell = min(max((985 - left) / len(indices), 38.0), 76.0)
    low, high = colour_range(views)
    by_layer: dict[int, dict[int, HeadView]] = {}
    for view in views:
        by_layer.setdefault(view.layer, {})[view.index] = view
    parts = [_patterns(), tag("text", "head", x=left - 10, y=16, class_="axis end")]
    parts += [
        tag("text", str(index), x=left + (at + 0.5) * cell, y=16, class_="axis middle") for index, at in column.items()
    ]
    for at, layer in enumerate(layers):
        top = 26 + at * CELL_HEIGHT
        name = layer_name(layer)
        shown = name if len(name) <= 34 else f"{name[:12]}…{name[-21:]}"
        parts.append(
            tag("text", tag("title", name), shown, x=left - 10, y=top + CELL_HEIGHT / 2 + 4, class_="axis end")
        )
        if layer.get("problem"):
            parts.append(
                tag("text", f"not measured: {layer['problem']}", x=left + 4, y=top + CELL_HEIGHT / 2 + 4, class_="axis")
            )
        for view in by_layer.get(at, {}).values():
            parts.append(_cell(view, left + column[view.index] * cell, top, cell, low, high))
    width, height = left + len(indices) * cell + 8, 30 + len(layers) * CELL_HEIGHT
    kind = "strict" if data.get("kappa") == "strict" else "pseudo"
    described = (
        f"{len(layers)} layers by {len(indices)} heads; each cell is log10 of the {kind} condition number of a head's "
        "parameter Jacobian. The same numbers are in the table of verdicts below."
    )
    picture = figure(
        max(width, 360.0), height, "Heat map of Jacobian condition numbers", described, *parts, natural=True
    )
    return join(picture, _legend(low, high))


def describe_cell(view: HeadView) -> str:
    """Everything a cell says, in words."""
    text = f"{view.label}: condition number {show(view.kappa, 4)}"
    if view.why_not_finite:
        text += f" ({view.why_not_finite}), over the non-zero spectrum {show(view.pseudo, 4)}"
    if len(view.row.get("samples") or ()) > 1:
        text += f" (geometric mean of {len(view.row['samples'])} samples, spread {show(view.row.get('spread'))})"
    if view.dead:
        text += ", DEAD HEAD: attention has collapsed, so this number says nothing good"
    return f"{text}; {view.status}; {view.explanation}"


def _cell(view: HeadView, x: float, y: float, width: float, low: float, high: float) -> Markup:
    logarithm = log10(view.kappa)
    if view.dead:
        fill, ink, text = "url(#dead)", "#ffffff", "dead"
    elif logarithm == math.inf and math.isfinite(log10(view.pseudo)):
        fill, ink = ramp_colour((log10(view.pseudo) - low) / (high - low))
        text = f"{log10(view.pseudo):.1f}*"
    elif view.status == "numerically singular" or logarithm == math.inf:
        bound = log10(view.interval[0])
        fill, ink = "url(#infinite)", "#5c0f16"
        known = view.status == "numerically singular" and math.isfinite(bound)
        text = f"≥{bound:.1f}" if known else INFINITE
    elif math.isnan(logarithm):
        fill, ink, text = "none", "currentColor", MISSING
    else:
        fill, ink = ramp_colour((logarithm - low) / (high - low))
        text = f"{'~' if view.status != 'exact' else ''}{logarithm:.1f}"
    box = tag(
        "rect", x=x + 1, y=y + 1, width=width - 2, height=CELL_HEIGHT - 2, rx=3, fill=fill,
        class_="cell dead-cell" if view.dead else "cell",
    )  # fmt: skip
    halo = "cell-text dead-text" if view.dead else "cell-text"
    label = tag("text", text, x=x + width / 2, y=y + CELL_HEIGHT / 2 + 4, fill=ink, class_=halo)
    kind = "dead" if view.dead else "finite" if math.isfinite(logarithm) and fill != "url(#infinite)" else "infinite"
    return tag(
        "g", tag("title", describe_cell(view)), box, label, data_head=f"{view.layer}.{view.index}", data_kind=kind
    )


def _patterns() -> Markup:
    dead = tag(
        "pattern",
        tag("rect", width=10, height=10, fill="#26282b"),
        tag("path", d="M0 0L10 10M10 0L0 10", stroke="#6e7379", stroke_width=1),
        id="dead", width=10, height=10, patternUnits="userSpaceOnUse",
    )  # fmt: skip
    infinite = tag(
        "pattern",
        tag("rect", width=8, height=8, fill="#fbd9d3"),
        tag("path", d="M-2 2L2 -2M0 8L8 0M6 10L10 6", stroke="#e0897e", stroke_width=1.6),
        id="infinite", width=8, height=8, patternUnits="userSpaceOnUse",
    )  # fmt: skip
    return tag("defs", dead, infinite)


def _legend(low: float, high: float) -> Markup:
    stops = [
        tag("stop", offset=f"{at / (len(RAMP) - 1):.0%}", stop_color=ramp_colour(at / (len(RAMP) - 1))[0])
        for at in range(len(RAMP))
    ]
    decades = int(high - low)
    step = max(1, math.ceil(decades / 8))
    ticks = [
        tag("text", f"10^{int(low) + at}", x=20 + 300 * at / decades, y=34, class_="axis middle")
        for at in range(0, decades + 1, step)
    ]
    bar = figure(
        340, 40, "Colour scale", f"From 10^{low:.0f}, pale, to 10^{high:.0f}, dark.",
        tag("defs", tag("linearGradient", *stops, id="ramp")),
        tag("rect", x=20, y=4, width=300, height=14, rx=3, fill="url(#ramp)", class_="cell"),
        *ticks,
    )  # fmt: skip

    def swatch(fill: str, label: str, text: str, look: str = "") -> Markup:
        box = tag("rect", x=1, y=1, width=26, height=18, rx=3, fill=fill, class_="cell")
        return tag(
            "li", tag("svg", box, viewBox="0 0 28 20", style="width:28px", aria_hidden="true"), tag("b", label), text
        )

    return tag(
        "div",
        bar,
        tag(
            "ul",
            tag("li", tag("b", "3.2* "), "infinite, the rank is not full: number and colour of the non-zero spectrum"),
            swatch("url(#infinite)", INFINITE, "infinite, of which (≥) at most a lower bound is known"),
            swatch("url(#dead)", "dead", "attention has collapsed; off the scale: its κ may look good", "dead-cell"),
            tag("li", tag("b", "~ "), "an estimate: only the certified interval in the table is sure"),
            class_="legend",
        ),
        class_="legend-row",
    )  # fmt: skip
