"""`plots`: the one description of every figure, as plotly traces and layouts in plain data.

The page's script draws them, and `static_figures` writes them as files. Colours are names of the style sheet, such as
`@c0` or `@c0/0.5`, which both look up.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Iterable, Sequence
from os.path import commonprefix
from typing import Any

from wellcond.lab.report.figures import BUDGET, HIGH, HIGH_END, LOW, LOW_END, MEAN, Figure, Panel
from wellcond.lab.report.values import cut

NUM_COLOURS = 10
LARGEST_POWER = 307
MOST_TICKS = 9
FAR = 4.0
"""Times the median distance from zero beyond which a method gets a triangle instead of a place on the axis."""
DASHES = ("solid", "dot", "dashdot", "longdash")
RAMP = ("#ecf4fa", "#accfe6", "#61a0ce", "#2969a8", "#0b2f62")
"""From pale (well conditioned) to dark (ill conditioned); one hue, so that it survives a grey printer."""
Plot = dict[str, Any]


def plots(figure: Figure) -> list[tuple[str, Plot]]:
    """Heading and plot of every panel of a figure."""
    draw = {"lines": _line_plot, "maps": _map_plot}.get(figure.kind, _bar_plot)
    return [(panel.title, draw(figure, panel)) for panel in figure.panels]


def rounded(values: Iterable[float]) -> list[float | None]:
    """Six digits, more than a screen shows; what is not finite has no place on an axis."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def safe(text: str) -> str:
    """Plotly reads tags in text; entities it shows as they are meant."""
    return html.escape(text, quote=False)


def _colour(method: int) -> str:
    return f"@c{method % NUM_COLOURS}"


def _dash(method: int) -> str:
    return DASHES[method // NUM_COLOURS % len(DASHES)]


def axis(title: str, ticks: dict[Any, str] | None = None, **settings: Any) -> Plot:
    """An axis with its title and, if given, its ticks by place."""
    look = {"gridcolor": "@grid", "linecolor": "@line", "zerolinecolor": "@line", "automargin": True}
    placed = {"tickvals": list(ticks), "ticktext": [safe(label) for label in ticks.values()]} if ticks else {}
    return {"title": {"text": safe(title), "standoff": 8}, **look, **placed, **settings}


def layout(height: int, x: Plot, y: Plot, **settings: Any) -> Plot:
    """Of a plot without a legend, which the page has above it."""
    margin = {"l": 52, "r": 12, "t": 8, "b": 44}
    fixed = {"height": height, "margin": margin, "xaxis": x, "yaxis": y, "showlegend": False, "hovermode": "closest"}
    return fixed | settings


def log_axis(values: Iterable[float], span: tuple[float, float] | None = None) -> tuple[float, float, dict[float, str]]:
    """Both ends of a logarithmic axis for some values or a fixed span, and its ticks with their labels.

    The axis covers at least half a decade, since it would zoom into the rounding of flat curves. Labels are plain
    text: an image takes ten times as long to draw formulas.
    """
    usable = [value for value in values if 0 < value < math.inf]
    low, high = span or (min(usable, default=1.0), max(usable, default=10.0))
    # In logarithms, since bounds come near the largest float: room at both ends, and never beyond it.
    bottom, top = math.log10(low), math.log10(high)
    room = max(0.04 * (top - bottom), 0.25 - (top - bottom) / 2)
    low, high = 10.0 ** max(bottom - room, -LARGEST_POWER), 10.0 ** min(top + room, LARGEST_POWER)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    width = math.log10(high) - math.log10(low)
    wide = width > 1.5
    factors = (1.0,) if wide else (1.0, 2.0, 5.0) if width > 0.7 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    every = max(1, math.ceil(len(decades) / 6)) if wide else 1
    ticks = [factor * 10.0**decade for decade in decades[::every] if decade < LARGEST_POWER for factor in factors]
    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    shown = {tick: f"10{str(round(math.log10(tick))).translate(raised)}" if wide else f"{tick:g}" for tick in ticks}
    return low, high, {tick: label for tick, label in shown.items() if low <= tick <= high}


def log_range(values: Iterable[float], span: tuple[float, float] | None = None) -> Plot:
    """Settings of a logarithmic axis for some values or a fixed span."""
    low, high, ticks = log_axis(values, span)
    ends = [round(math.log10(end), 4) for end in (low, high)]
    return {"type": "log", "range": ends, "tickvals": list(ticks), "ticktext": list(ticks.values())}


def _line_plot(figure: Figure, panel: Panel) -> Plot:
    """Means with bands; a method without common steps falls back to its seeds, one line each."""
    bands: list[Plot] = []
    lines: list[Plot] = []
    x_label = panel.x_label or figure.x_label
    for series, seeds in panel.by_series().items():
        means = [seeds[name] for name in (MEAN, LOW, HIGH)] if MEAN in seeds else []
        count = len(seeds) - 3 if means else 1 if series in figure.methods else 0
        place = figure.place(series)
        colour, dash = _colour(place), _dash(place) if count else "dash"
        if count > 1:
            low, high = ([row for row in rows if math.isfinite(row.value)] for rows in (means[1], means[2][::-1]))
            bands.append(
                {
                    "type": "scatter", "mode": "lines", "x": rounded(figure.x(row) for row in (*low, *high)),
                    "y": rounded(row.value for row in (*low, *high)), "fill": "toself", "fillcolor": f"{colour}/0.16",
                    "line": {"width": 0}, "hoverinfo": "skip", "meta": place,
                }
            )  # fmt: skip
        told = {0: "not in any mean", 1: "1 seed"}.get(count, f"mean of {count} seeds")
        for rows in means[:1] or seeds.values():
            shown = [row for row in rows if math.isfinite(figure.x(row))]
            size = 5 if count else 3
            sizes = (
                [2 * size if row.step == panel.chosen[series] else size for row in shown]
                if series in panel.chosen
                else size
            )
            lines.append(
                {
                    "type": "scatter", "mode": "lines+markers" if len(shown) <= 40 else "lines",
                    "x": rounded(map(figure.x, shown)), "y": rounded(row.value for row in shown),
                    "name": safe(series), "meta": place,
                    "line": {"color": colour, "width": 2 if count else 1.3, "dash": dash},
                    "marker": {"size": sizes, "color": colour},
                    "hovertemplate": f"<b>{safe(series)}</b><br>{safe(x_label)} %{{x}}<br>{safe(panel.y_label)} "
                    f"%{{y:.4~g}}<br>{told}<extra></extra>",
                }
            )  # fmt: skip
    look: Plot = {}
    if panel.log:
        drawn = [y for trace in (*bands, *lines) for y in trace["y"] if y is not None]
        look = log_range(drawn, panel.span)
    elif panel.span is not None:
        room = 0.03 * (panel.span[1] - panel.span[0])
        look = {"range": [panel.span[0] - room, panel.span[1] + room]}
    return {"data": [*bands, *lines], "layout": layout(290, _x_axis(x_label, panel), axis(panel.y_label, **look))}


def _x_axis(label: str, panel: Panel) -> Plot:
    """Of time or, logarithmic, of the values that were tried."""
    if not panel.x_label:
        return axis(label)
    tried = sorted({row.step for row in panel.rows})
    shown = {value: f"{value:.3g}" for value in tried[:: math.ceil(len(tried) / MOST_TICKS)]}
    return axis(label, shown, **({"type": "log"} if tried[0] > 0 else {}))


def _bar_plot(figure: Figure, panel: Panel) -> Plot:
    """A bar, or the interval of a mean, and the seeds of each method; of intervals the best first."""
    interval = figure.kind == "intervals"
    found = {
        series: {seed: rows[0].value for seed, rows in seeds.items()} for series, seeds in panel.by_series().items()
    }
    budget = found.pop(BUDGET, {}).get(MEAN)
    if interval:
        found = dict(sorted(found.items(), key=lambda item: -item[1][MEAN]))
    span = _readable_span(list(found.values())) if interval else None
    traces: list[Plot] = []
    for at, (series, seeds) in enumerate(found.items()):
        mean, low, high = (seeds.pop(name, math.nan) for name in (MEAN, LOW_END, HIGH_END))
        place = figure.place(series)
        colour, told = _colour(place), f"<b>{safe(series)}</b><br>"
        common: Plot = {"type": "scatter", "mode": "markers", "y": [at], "meta": place}
        known = f"[{low:+.4g}, {high:+.4g}]" if math.isfinite(low) else "no interval: too few seeds"
        if span is not None and not span[0] <= mean <= span[1]:
            below, inset = mean < span[0], 0.015 * (span[1] - span[0])
            traces.append(
                common
                | {
                    "mode": "markers+text", "x": rounded([span[0] + inset if below else span[1] - inset]),
                    "text": [f"{mean:+.4g} {known}"], "textposition": f"middle {'right' if below else 'left'}",
                    "marker": {"size": 12, "color": colour, "symbol": f"triangle-{'left' if below else 'right'}"},
                    "textfont": {"color": "@ink"}, "hovertemplate": f"{told}mean %{{text}}<extra></extra>",
                }
            )  # fmt: skip
            continue
        if interval:
            half = {"array": rounded([high - mean]), "arrayminus": rounded([mean - low])}
            error = {"type": "data", "symmetric": False, "thickness": 2, "width": 6, "color": colour, **half}
            mark = {"marker": {"size": 10, "color": colour}} | ({"error_x": error} if math.isfinite(low) else {})
            said = f"{told}mean %{{x:.4~g}}<br>{known}<extra></extra>"
            traces.append(common | {"x": rounded([mean]), "hovertemplate": said, **mark})
        elif math.isfinite(mean):
            bar = {"type": "bar", "orientation": "h", "width": 0.6, "marker": {"color": f"{colour}/0.55"}}
            said = f"{told}mean %{{x:.4~g}}<extra></extra>"
            traces.append(common | {"x": rounded([mean]), "hovertemplate": said, **bar})
        reached = [math.isfinite(value) for value in seeds.values()]
        values = [value if done else budget or math.nan for value, done in zip(seeds.values(), reached, strict=True)]
        words = [
            f"seed {seed}: {value:.5g}" if done else f"seed {seed}: > {value:g}"
            for seed, value, done in zip(seeds, values, reached, strict=True)
        ]
        looks = [(7, "circle") if done else (12, "triangle-right") for done in reached]
        traces.append(
            common
            | {
                "x": rounded(values), "text": words,
                "y": [round(at + 0.11 * (i - (len(values) - 1) / 2), 3) for i in range(len(values))],
                "marker": {
                    "opacity": 1, "size": [size for size, _ in looks], "symbol": [symbol for _, symbol in looks],
                    "color": colour, "line": {"width": 1, "color": "@card"},
                },
                "hovertemplate": f"{told}%{{text}} {safe(panel.y_label)}<extra></extra>",
            }
        )  # fmt: skip
    target = 0.0 if interval else budget
    dotted = {"color": "@soft", "width": 1, "dash": "dot"}
    upright = {"type": "line", "x0": target, "x1": target, "y0": 0, "y1": 1, "yref": "paper", "line": dotted}
    ends: Plot = {"rangemode": "tozero"} if not interval else {"range": rounded(span)} if span else {}
    names = {at: cut(name) for at, name in enumerate(found)}
    x, y = axis(panel.y_label, zeroline=False, **ends), axis("", names, **REVERSED)
    height = 78 + 34 * max(len(found), 2)
    return {"data": traces, "layout": layout(height, x, y, shapes=[] if target is None else [upright])}


REVERSED = {"autorange": "reversed", "showgrid": False, "zeroline": False}


def _readable_span(bars: list[dict[str, float]]) -> tuple[float, float] | None:
    """Ends of the axis where a few methods are so far away that the others could not be told apart; else None."""
    points = [[value for value in bar.values() if math.isfinite(value)] for bar in bars]
    typical = statistics.median(max(map(abs, values)) for values in points)
    near = [values for bar, values in zip(bars, points, strict=True) if abs(bar[MEAN]) <= FAR * typical]
    if not near or len(near) == len(bars):
        return None
    low, high = min(0.0, *(min(values) for values in near)), max(0.0, *(max(values) for values in near))
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


def _map_plot(figure: Figure, panel: Panel) -> Plot:
    """A heat map of layers, in the order of the model, by methods."""
    by_layer = panel.by_series()
    layers, methods = list(by_layer), [m for m in figure.methods if any(m in row for row in by_layer.values())]
    cells = [[row[m][0].value if m in row else math.nan for m in methods] for row in by_layer.values()]
    narrow = cells and max(map(max, cells)) - min(map(min, cells)) <= 2
    trace = heat_map(cells, "log₁₀ κ") | {
        "text": [[safe(layer)] * len(methods) for layer in layers],
        "customdata": [[safe(method) for method in methods]] * len(layers),
        "hovertemplate": "%{text}<br>%{customdata}<br>log₁₀ κ %{z:.2f}<extra></extra>",
    }
    if len(methods) <= 8:
        trace["texttemplate"] = "%{z:.2f}" if narrow else "%{z:.1f}"
    turned = {"tickangle": -40} if len(methods) > 3 else {}
    columns = {at: cut(method, 18) for at, method in enumerate(methods)}
    x = axis("", columns, showgrid=False, zeroline=False, ticklabeloverflow="allow", **turned)
    y = axis("layer", short_names(layers), **REVERSED)
    return {"data": [trace], "layout": layout(110 + max(17 * min(len(layers), 48), 90), x, y)}


def heat_map(cells: Sequence[Sequence[float]], title: str) -> Plot:
    """Trace of numbers by rows and columns, dark where they are large."""
    known = [value for row in cells for value in row if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    wide = max(map(len, cells), default=0)
    return {
        "type": "heatmap", "x": list(range(wide)), "y": list(range(len(cells))), "z": list(map(rounded, cells)),
        "zmin": rounded([low])[0], "zmax": rounded([max(high, low + 0.1)])[0],
        "colorscale": [[at / (len(RAMP) - 1), colour] for at, colour in enumerate(RAMP)],
        "colorbar": {"thickness": 10, "outlinewidth": 0, "nticks": 5, "title": {"text": title}},
        "xgap": 1 if wide <= 12 else 0, "ygap": 1 if wide <= 12 else 0,
    }  # fmt: skip


def short_names(names: Sequence[str]) -> dict[int, str]:
    """Ticks of at most 24 layers by place, without the parts that all share, such as `0` of `blocks.0.attn`."""
    parts = [name.split(".") for name in names]
    front, back = (len(commonprefix([part[::way] for part in parts])) for way in (1, -1))
    short = [".".join(part[front : len(part) - back]) or ".".join(part) for part in parts]
    return {at: cut(short[at], 16) for at in range(0, len(names), max(1, math.ceil(len(names) / 24)))}
