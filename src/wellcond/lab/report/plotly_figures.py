"""Panels as plotly traces and layouts, in plain data. Colours are names that the page's script looks up."""

from __future__ import annotations

import html
import math
import statistics
from dataclasses import replace
from typing import Any

from wellcond.lab.report.heat_map import RAMP
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.series import Figure, Panel
from wellcond.lab.report.shapes import (
    NUM_COLOURS,
    Bar,
    Grid,
    Line,
    cut,
    layers_of,
    log_axis,
    map_by_method,
    map_over_steps,
    panel_bars,
    panel_budget,
    panel_lines,
)
from wellcond.lab.report.tuning_plots import TunedCurve, axis_ticks, is_logarithmic, tuned_curves, tuned_traces

FAR = 4.0
"""Times the median distance from zero beyond which a method gets a triangle instead of a place on the axis."""
DASHES = ("solid", "dot", "dashdot", "longdash")
Plot = dict[str, Any]


def plots(comparison: Comparison, figure: Figure) -> list[tuple[str, Plot]]:
    """Heading and plot of every panel of a figure."""
    if figure.kind == "lines":
        return [(p.title, _line_plot(figure, p, panel_lines(comparison, figure, p.name))) for p in figure.panels]
    if figure.kind in ("bars", "intervals"):
        return [
            (p.title, _bar_plot(figure, p, panel_bars(comparison, figure, p.name), panel_budget(figure, p.name)))
            for p in figure.panels
        ]
    if figure.kind == "tuned":
        return [(p.title, _tuned_plot(p, tuned_curves(comparison, figure, p.name))) for p in figure.panels]
    if figure.kind == "stack":
        return [("", _stack_plot(comparison, figure))]
    if figure.kind == "map_by_method":
        return [("", _map_plot(figure, map_by_method(figure), "method"))]
    layers = layers_of(figure)
    return [(p.title, _map_plot(figure, map_over_steps(figure, p.name, layers), "step")) for p in figure.panels]


def _number(value: float) -> float | None:
    """Six digits are more than a screen shows; what is not finite has no place on an axis."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _numbers(values: list[float]) -> list[float | None]:
    return [_number(value) for value in values]


def _safe(text: str) -> str:
    """Plotly reads tags in text; entities it shows as they are meant."""
    return html.escape(text, quote=False)


def _colour(method: int) -> str:
    return f"@c{method % NUM_COLOURS}"


def _axis(title: str, **settings: Any) -> Plot:
    look = {"gridcolor": "@grid", "linecolor": "@line", "zerolinecolor": "@line", "automargin": True}
    return {"title": {"text": _safe(title), "standoff": 8}, **look, **settings}


def _layout(height: int, x: Plot, y: Plot, **settings: Any) -> Plot:
    return {
        "height": height,
        "margin": {"l": 52, "r": 12, "t": 8, "b": 44},
        "xaxis": x,
        "yaxis": y,
        "showlegend": False,
        "hovermode": "closest",
        **settings,
    }


def _line_plot(figure: Figure, panel: Panel, lines: list[Line]) -> Plot:
    traces: list[Plot] = []
    for line in lines:
        if line.low is None or line.high is None:
            continue
        around = _numbers(line.low + line.high[::-1])
        if not panel.log or all(value is not None and value > 0 for value in around):
            traces.append(
                {
                    "type": "scatter", "mode": "lines", "x": _numbers(line.x + line.x[::-1]), "y": around,
                    "fill": "toself", "fillcolor": f"{_colour(line.method)}/0.16", "line": {"width": 0},
                    "hoverinfo": "skip", "meta": line.method,
                }
            )  # fmt: skip
    for line in lines:
        dash = DASHES[line.method // NUM_COLOURS % len(DASHES)] if line.num_seeds else "dash"
        seeds = "not in any mean" if not line.num_seeds else _count(line.num_seeds, "seed")
        traces.append(
            {
                "type": "scatter", "mode": "lines+markers" if len(line.x) <= 40 else "lines",
                "x": _numbers(line.x), "y": _numbers(line.y), "name": _safe(line.name), "meta": line.method,
                "line": {"color": _colour(line.method), "width": 2 if line.num_seeds else 1.3, "dash": dash},
                "marker": {"size": 5 if line.num_seeds else 3, "color": _colour(line.method)},
                "hovertemplate": f"<b>{_safe(line.name)}</b><br>{figure.x_label} %{{x}}<br>"
                f"{_safe(panel.y_label)} %{{y:.4~g}}<br>{seeds}<extra></extra>",
            }
        )  # fmt: skip
    y = _axis(panel.y_label, **(_log_axis(panel, lines) if panel.log else {}))
    if panel.span is not None and not panel.log:
        room = 0.03 * (panel.span[1] - panel.span[0])
        y["range"] = [panel.span[0] - room, panel.span[1] + room]
    return {"data": traces, "layout": _layout(290, _axis(figure.x_label), y)}


def _tuned_plot(panel: Panel, curves: list[TunedCurve]) -> Plot:
    safe = [replace(curve, name=_safe(curve.name)) for curve in curves]
    ticks = axis_ticks(curves)
    look = {"type": "log"} if is_logarithmic(curves) else {}
    x = _axis(panel.name, tickvals=list(ticks), ticktext=list(ticks.values()), **look)
    # Crosses of diverged runs stand at the lower edge, whatever the scores are.
    edge = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    traces = tuned_traces(safe, [_colour(at) for at in range(NUM_COLOURS)], DASHES)
    return {"data": traces, "layout": _layout(380, x, _axis(panel.y_label), yaxis2=edge)}


def _log_axis(panel: Panel, lines: list[Line]) -> Plot:
    low, high, ticks = log_axis(panel, lines)
    span = [round(math.log10(end), 4) for end in (low, high)]
    return {"type": "log", "range": span, "tickvals": list(ticks), "ticktext": list(ticks.values())}


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"mean of {number} {what}s"


def _method_axis(names: list[str]) -> Plot:
    ticks = {"tickvals": list(range(len(names))), "ticktext": [_safe(cut(name)) for name in names]}
    return _axis("", autorange="reversed", showgrid=False, zeroline=False, **ticks)


def _bar_plot(figure: Figure, panel: Panel, bars: list[Bar], budget: float | None) -> Plot:
    traces: list[Plot] = []
    interval = figure.kind == "intervals"
    span = _readable_span(bars) if interval else None
    for at, bar in enumerate(bars):
        if span is not None and not span[0] <= bar.mean <= span[1]:
            traces.append(_beyond(bar, at, span))
            continue
        if math.isfinite(bar.mean) and interval:
            half = {"array": [_number(bar.high - bar.mean)], "arrayminus": [_number(bar.mean - bar.low)]}
            told = f"[{bar.low:.4g}, {bar.high:.4g}]" if math.isfinite(bar.low) else "no interval: too few seeds"
            traces.append(
                {
                    "type": "scatter", "mode": "markers", "x": [_number(bar.mean)], "y": [at], "meta": bar.method,
                    "marker": {"size": 10, "color": _colour(bar.method)},
                    **({"error_x": {"type": "data", "symmetric": False, "thickness": 2, "width": 6,
                                    "color": _colour(bar.method), **half}} if math.isfinite(bar.low) else {}),
                    "hovertemplate": f"<b>{_safe(bar.name)}</b><br>mean %{{x:.4~g}}<br>{told}<extra></extra>",
                }
            )  # fmt: skip
        elif math.isfinite(bar.mean):
            traces.append(
                {
                    "type": "bar", "orientation": "h", "x": [_number(bar.mean)], "y": [at], "width": 0.6,
                    "meta": bar.method, "marker": {"color": f"{_colour(bar.method)}/0.55"},
                    "hovertemplate": f"<b>{_safe(bar.name)}</b><br>mean %{{x:.4~g}}<extra></extra>",
                }
            )  # fmt: skip
        elif math.isinf(bar.mean) and budget is not None:
            traces.append(_dots(bar, {"all seeds": math.inf}, at, budget, panel.y_label))
        if bar.seeds:
            traces.append(_dots(bar, bar.seeds, at, budget, panel.y_label))
    line = 0.0 if interval else budget
    shapes = [] if line is None else [_upright(line)]
    ends: Plot = {} if span is None else {"range": [_number(end) for end in span]}
    x = _axis(panel.y_label, **(ends if interval else {"rangemode": "tozero"}), zeroline=False)
    height = 78 + 34 * max(len(bars), 2)
    return {"data": traces, "layout": _layout(height, x, _method_axis([b.name for b in bars]), shapes=shapes)}


def _readable_span(bars: list[Bar]) -> tuple[float, float] | None:
    """Ends of the axis where a few methods are so far away that the others could not be told apart; else None."""

    def points(bar: Bar) -> list[float]:
        return [value for value in (bar.mean, bar.low, bar.high, *bar.seeds.values()) if math.isfinite(value)]

    reach = {bar.method: max(map(abs, points(bar)), default=0.0) for bar in bars}
    typical = statistics.median(reach.values()) if reach else 0.0
    near = [bar for bar in bars if abs(bar.mean) <= FAR * typical]
    if not near or len(near) == len(bars):
        return None
    values = [0.0, *(value for bar in near for value in points(bar))]
    room = 0.05 * (max(values) - min(values))
    return min(values) - room, max(values) + room


def _beyond(bar: Bar, at: int, span: tuple[float, float]) -> Plot:
    """A triangle at the edge for a method beyond the axis, with its mean in words."""
    below = bar.mean < span[0]
    told = f"{bar.mean:+.4g}" + (f" [{bar.low:+.4g}, {bar.high:+.4g}]" if math.isfinite(bar.low) else "")
    inset = 0.015 * (span[1] - span[0])
    return {
        "type": "scatter", "mode": "markers+text", "x": [_number(span[0] + inset if below else span[1] - inset)],
        "y": [at], "text": [told], "textposition": "middle right" if below else "middle left", "meta": bar.method,
        "marker": {"size": 12, "color": _colour(bar.method), "symbol": f"triangle-{'left' if below else 'right'}"},
        "textfont": {"color": "@ink"}, "hovertemplate": f"<b>{_safe(bar.name)}</b><br>mean %{{text}}<extra></extra>",
    }  # fmt: skip


def _dots(bar: Bar, seeds: dict[str, float], at: int, budget: float | None, label: str) -> Plot:
    """Each seed; a triangle at the end of the budget where the target was never reached."""
    values = [value if math.isfinite(value) else budget for value in seeds.values()]
    reached = [math.isfinite(value) for value in seeds.values()]
    spread = [0.11 * (i - (len(values) - 1) / 2) for i in range(len(values))]
    told = [
        f"{'' if seed == 'all seeds' else 'seed '}{_safe(seed)}: " + (f"{value:.5g}" if done else f"> {value:g}")
        for seed, value, done in zip(seeds, values, reached, strict=True)
    ]
    return {
        "type": "scatter", "mode": "markers", "x": [None if v is None else _number(v) for v in values],
        "y": [round(at + s, 3) for s in spread], "meta": bar.method, "text": told,
        "marker": {
            "opacity": 1, "size": [7 if d else 12 for d in reached], "color": _colour(bar.method),
            "symbol": ["circle" if d else "triangle-right" for d in reached],
            "line": {"width": 1, "color": "@card"},
        },
        "hovertemplate": f"<b>{_safe(bar.name)}</b><br>%{{text}} {_safe(label)}<extra></extra>",
    }  # fmt: skip


def _upright(x: float) -> Plot:
    look = {"color": "@soft", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": look}


def _stack_plot(comparison: Comparison, figure: Figure) -> Plot:
    names = [m for m in comparison.methods if any(row.series == m for row in figure.rows)]
    traces = []
    for at, panel in enumerate(figure.panels):
        values = {bar.name: bar.mean for bar in panel_bars(comparison, figure, panel.name)}
        traces.append(
            {
                "type": "bar", "orientation": "h", "x": [_number(values.get(n, math.nan)) for n in names],
                "y": list(range(len(names))), "width": 0.6, "name": panel.title, "marker": {"color": f"@p{at}"},
                "text": [_safe(n) for n in names], "textposition": "none",
                "hovertemplate": f"<b>%{{text}}</b><br>{panel.title} %{{x:.4~g}} s<extra></extra>",
            }
        )  # fmt: skip
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
    layout = _layout(
        130 + 34 * max(len(names), 2), _axis("seconds per run"), _method_axis(names), barmode="stack",
        showlegend=True, legend=legend,
    )  # fmt: skip
    layout["margin"]["t"] = 46
    return {"data": traces, "layout": layout}


def _map_plot(figure: Figure, grid: Grid, x_name: str) -> Plot:
    low, high = figure.panels[0].span or (0.0, 1.0)
    ramp = [[at / (len(RAMP) - 1), "#{:02x}{:02x}{:02x}".format(*rgb)] for at, rgb in enumerate(RAMP)]
    names = [[_safe(name)] * len(grid.columns) for name in grid.full_layers]
    columns = [[_safe(column) for column in grid.columns]] * len(grid.layers)
    bar = {"thickness": 10, "outlinewidth": 0, "nticks": 5, "title": {"text": "log₁₀ κ"}}
    gap = 1 if len(grid.columns) <= 12 else 0
    trace = {
        "type": "heatmap", "x": list(range(len(grid.columns))), "y": list(range(len(grid.layers))),
        "z": [_numbers(row) for row in grid.values], "zmin": _number(low), "zmax": _number(max(high, low + 0.1)),
        "colorscale": ramp, "colorbar": bar, "xgap": gap, "ygap": gap, "text": names, "customdata": columns,
        "hovertemplate": f"%{{text}}<br>{x_name} %{{customdata}}<br>log₁₀ κ %{{z:.2f}}<extra></extra>",
    }  # fmt: skip
    if len(grid.columns) <= 8:
        trace |= {"texttemplate": "%{z:.1f}" if high - low > 2 else "%{z:.2f}"}
    every = max(1, math.ceil(len(grid.columns) / 6)) if x_name == "step" else 1
    shown = list(range(0, len(grid.columns), every))
    x_ticks = {"tickvals": shown, "ticktext": [_safe(cut(grid.columns[at], 18)) for at in shown]}
    thinned = list(range(0, len(grid.layers), max(1, math.ceil(len(grid.layers) / 24))))
    y_ticks = {"tickvals": thinned, "ticktext": [_safe(cut(grid.layers[at], 16)) for at in thinned]}
    height = 110 + max(17 * min(len(grid.layers), 48), 90)
    turned = {"tickangle": -40} if x_name != "step" and len(shown) > 5 else {}
    x = _axis("step" if x_name == "step" else "", showgrid=False, zeroline=False, ticklabeloverflow="allow",
              **turned, **x_ticks)  # fmt: skip
    return {
        "data": [trace],
        "layout": _layout(height, x, _axis("layer", autorange="reversed", showgrid=False, zeroline=False, **y_ticks)),
    }
