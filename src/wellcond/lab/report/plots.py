"""`plots`: the one description of every figure, as plotly traces and layouts in plain data.

The page's script draws them, and `static_figures` writes them as files. Colours are names of the style sheet, such as
`@c0` or `@c0/0.5`, which both look up.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.series import BUDGET, HIGH, HIGH_END, LOW, LOW_END, MEAN, Figure, Panel, Row, unfinished_name
from wellcond.lab.report.tuning import BEST
from wellcond.lab.report.values import cut, log_axis

NUM_COLOURS = 10
MOST_TICKS = 9
FAR = 4.0
"""Times the median distance from zero beyond which a method gets a triangle instead of a place on the axis."""
DASHES = ("solid", "dot", "dashdot", "longdash")
RAMP = ((236, 244, 250), (172, 207, 230), (97, 160, 206), (41, 105, 168), (11, 47, 98))
"""From pale (well conditioned) to dark (ill conditioned); one hue, so that it survives a grey printer."""
Plot = dict[str, Any]


def plots(comparison: Comparison, figure: Figure) -> list[tuple[str, Plot]]:
    """Heading and plot of every panel of a figure."""
    if figure.kind == "stack":
        return [("", _stack_plot(comparison, figure))]
    if figure.kind == "map_by_method":
        cells = {(row.series, row.panel): row.value for row in figure.rows}
        return [("", _map_plot(figure, [panel.name for panel in figure.panels], cells))]
    draw = {"lines": _line_plot, "tuned": _tuned_plot, "map_over_steps": _steps_plot}.get(figure.kind, _bar_plot)
    return [(panel.title, draw(comparison, figure, panel)) for panel in figure.panels]


def _places(comparison: Comparison) -> dict[str, int]:
    """Place of the method that a series belongs to, unfinished runs included; it chooses the colour."""
    places = {method: at for at, method in enumerate(comparison.methods)}
    return {unfinished_name(run): places[run.method] for run in comparison.runs if not run.finished} | places


def _number(value: float) -> float | None:
    """Six digits are more than a screen shows; what is not finite has no place on an axis."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [_number(value) for value in values]


def _safe(text: str) -> str:
    """Plotly reads tags in text; entities it shows as they are meant."""
    return html.escape(text, quote=False)


def _colour(method: int) -> str:
    return f"@c{method % NUM_COLOURS}"


def _dash(method: int) -> str:
    return DASHES[method // NUM_COLOURS % len(DASHES)]


def _axis(title: str, **settings: Any) -> Plot:
    look = {"gridcolor": "@grid", "linecolor": "@line", "zerolinecolor": "@line", "automargin": True}
    return {"title": {"text": _safe(title), "standoff": 8}, **look, **settings}


def _ticks(ticks: dict[Any, str]) -> Plot:
    return {"tickvals": list(ticks), "ticktext": [_safe(label) for label in ticks.values()]}


def _layout(height: int, x: Plot, y: Plot, **settings: Any) -> Plot:
    margin = {"l": 52, "r": 12, "t": 8, "b": 44}
    fixed = {"height": height, "margin": margin, "xaxis": x, "yaxis": y, "showlegend": False, "hovermode": "closest"}
    return fixed | settings


@dataclass(frozen=True)
class _Line:
    """A curve, with a band if it is a mean over several seeds; `num_seeds` is 0 for a run that is in no mean."""

    name: str
    method: int
    x: list[float]
    y: list[float]
    num_seeds: int
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def _panel_lines(comparison: Comparison, figure: Figure, panel: str) -> list[_Line]:
    """Means with bands; a method without common steps falls back to its seeds, one line each."""
    places, lines = _places(comparison), []
    for series, seeds in figure.of(panel).items():
        if MEAN in seeds:
            mean, low, high = (
                [row for row in seeds[name] if not math.isnan(figure.x(row))] for name in (MEAN, LOW, HIGH)
            )
            count = len(seeds) - 3
            band = [[row.value for row in rows] for rows in (low, high)] if count > 1 else []
            x, y = [figure.x(row) for row in mean], [row.value for row in mean]
            lines.append(_Line(series, places[series], x, y, count, *band))
            continue
        for seed, listed in seeds.items():
            rows = [row for row in listed if math.isfinite(row.value) and not math.isnan(figure.x(row))]
            name = series if series not in comparison.methods else f"{series}, seed {seed}"
            lines.append(_Line(name, places[series], [figure.x(row) for row in rows], [row.value for row in rows], 0))
    return [line for line in lines if line.x]


def _line_plot(comparison: Comparison, figure: Figure, panel: Panel) -> Plot:
    lines = _panel_lines(comparison, figure, panel.name)
    traces: list[Plot] = []
    for line in lines:
        around = _numbers([*line.low, *line.high[::-1]])
        if around and (not panel.log or all(value is not None and value > 0 for value in around)):
            traces.append(
                {
                    "type": "scatter", "mode": "lines", "x": _numbers(line.x + line.x[::-1]), "y": around,
                    "fill": "toself", "fillcolor": f"{_colour(line.method)}/0.16", "line": {"width": 0},
                    "hoverinfo": "skip", "meta": line.method,
                }
            )  # fmt: skip
    for line in lines:
        seeds = {0: "not in any mean", 1: "1 seed"}.get(line.num_seeds, f"mean of {line.num_seeds} seeds")
        dash = _dash(line.method) if line.num_seeds else "dash"
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
    y = _axis(panel.y_label)
    if panel.log:
        low, high, ticks = log_axis([y for line in lines for y in (*line.y, *line.low, *line.high)], panel.span)
        y |= {"type": "log", "range": [round(math.log10(end), 4) for end in (low, high)], **_ticks(ticks)}
    elif panel.span is not None:
        room = 0.03 * (panel.span[1] - panel.span[0])
        y["range"] = [panel.span[0] - room, panel.span[1] + room]
    return {"data": traces, "layout": _layout(290, _axis(figure.x_label), y)}


def _tuned_plot(comparison: Comparison, figure: Figure, panel: Panel) -> Plot:
    """Score over a tuned value: means as lines, seeds as dots, diverged runs as crosses."""
    places, tried = _places(comparison), set[float]()
    traces: list[Plot] = []
    for series, by_seed in figure.of(panel.name).items():
        method, name = places[series], _safe(series)
        each = [row for seed, rows in by_seed.items() if seed not in (MEAN, BEST) for row in rows]
        means = {row.step: row.value for row in by_seed.get(MEAN, [])}
        values = sorted({row.step for row in each})
        tried |= set(values)
        common = {"type": "scatter", "meta": method, "name": name}
        told = f"<b>{name}</b><br>%{{x:.3~g}}: %{{y:.4~g}}"
        traces.append(
            common
            | {
                "mode": "lines", "x": values, "connectgaps": False,
                "y": _numbers(means.get(x, math.nan) for x in values),
                "line": {"color": _colour(method), "width": 2, "dash": _dash(method)},
                "hovertemplate": f"{told}, mean<extra></extra>",
            }
        )  # fmt: skip
        dots = [(f"seed {row.seed}", row, 5) for row in each if math.isfinite(row.value)]
        dots += [("chosen, mean", row, 12) for row in by_seed.get(BEST, [])]
        traces.append(
            common
            | {
                "mode": "markers", "x": [row.step for _, row, _ in dots], "y": _numbers(r.value for _, r, _ in dots),
                "text": [what for what, _, _ in dots], "hovertemplate": f"{told}, %{{text}}<extra></extra>",
                "marker": {"color": _colour(method), "size": [size for _, _, size in dots]},
            }
        )  # fmt: skip
        if diverged := [row for row in each if math.isnan(row.value)]:
            traces.append(
                common
                | {
                    "mode": "markers", "x": [row.step for row in diverged], "y": [0.04] * len(diverged),
                    "yaxis": "y2", "text": [f"seed {row.seed}" for row in diverged],
                    "marker": {"color": _colour(method), "size": 9, "symbol": "x"},
                    "hovertemplate": f"<b>{name}</b><br>%{{x:.3~g}}: diverged, %{{text}}<extra></extra>",
                }
            )  # fmt: skip
    shown = sorted(tried)[:: math.ceil(len(tried) / MOST_TICKS)]
    look = {"type": "log"} if all(value > 0 for value in tried) else {}
    x = _axis(panel.name, **_ticks({value: f"{value:.3g}" for value in shown}), **look)
    # Crosses of diverged runs stand at the lower edge, whatever the scores are.
    edge = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    return {"data": traces, "layout": _layout(380, x, _axis(panel.y_label), yaxis2=edge)}


@dataclass(frozen=True)
class _Bar:
    """Mean, ends of an interval (NaN where there is none) and seeds of one method."""

    name: str
    method: int
    mean: float
    low: float
    high: float
    seeds: dict[str, float]


def _panel_bars(comparison: Comparison, figure: Figure, panel: str) -> list[_Bar]:
    """One bar per method that has one, in the order of the methods; of intervals the best first."""
    places, bars = _places(comparison), []
    for series, rows in figure.of(panel).items():
        if series != BUDGET:
            seeds = {seed: listed[0].value for seed, listed in rows.items()}
            mean, low, high = (seeds.pop(name, math.nan) for name in (MEAN, LOW_END, HIGH_END))
            bars.append(_Bar(series, places[series], mean, low, high, seeds))
    return sorted(bars, key=lambda bar: (-bar.mean if figure.kind == "intervals" else 0.0, bar.method))


def _method_axis(names: list[str]) -> Plot:
    ticks = _ticks({at: cut(name) for at, name in enumerate(names)})
    return _axis("", autorange="reversed", showgrid=False, zeroline=False, **ticks)


def _bar_plot(comparison: Comparison, figure: Figure, panel: Panel) -> Plot:
    bars, interval = _panel_bars(comparison, figure, panel.name), figure.kind == "intervals"
    budget = next((row.value for row in figure.rows if row.panel == panel.name and row.series == BUDGET), None)
    span = _readable_span(bars) if interval else None
    traces: list[Plot] = []
    for at, bar in enumerate(bars):
        if span is not None and not span[0] <= bar.mean <= span[1]:
            traces.append(_beyond(bar, at, span))
            continue
        mean: Plot = {"x": [_number(bar.mean)], "y": [at], "meta": bar.method}
        told = f"<b>{_safe(bar.name)}</b><br>mean %{{x:.4~g}}"
        if math.isfinite(bar.mean) and interval:
            known = math.isfinite(bar.low)
            between = f"[{bar.low:.4g}, {bar.high:.4g}]" if known else "no interval: too few seeds"
            half = {"array": [_number(bar.high - bar.mean)], "arrayminus": [_number(bar.mean - bar.low)]}
            error = {"type": "data", "symmetric": False, "thickness": 2, "width": 6, "color": _colour(bar.method)}
            traces.append(
                {
                    "type": "scatter", "mode": "markers", **mean,
                    "marker": {"size": 10, "color": _colour(bar.method)},
                    **({"error_x": error | half} if known else {}),
                    "hovertemplate": f"{told}<br>{between}<extra></extra>",
                }
            )  # fmt: skip
        elif math.isfinite(bar.mean):
            traces.append(
                {
                    "type": "bar", "orientation": "h", **mean, "width": 0.6,
                    "marker": {"color": f"{_colour(bar.method)}/0.55"}, "hovertemplate": f"{told}<extra></extra>",
                }
            )  # fmt: skip
        elif math.isinf(bar.mean) and budget is not None:
            traces.append(_dots(bar, {"all seeds": math.inf}, at, budget, panel.y_label))
        if bar.seeds:
            traces.append(_dots(bar, bar.seeds, at, budget, panel.y_label))
    line = 0.0 if interval else budget
    dotted = {"color": "@soft", "width": 1, "dash": "dot"}
    upright = {"type": "line", "x0": line, "x1": line, "y0": 0, "y1": 1, "yref": "paper", "line": dotted}
    ends: Plot = {} if span is None else {"range": _numbers(span)}
    x = _axis(panel.y_label, **(ends if interval else {"rangemode": "tozero"}), zeroline=False)
    y, shapes = _method_axis([bar.name for bar in bars]), [] if line is None else [upright]
    return {"data": traces, "layout": _layout(78 + 34 * max(len(bars), 2), x, y, shapes=shapes)}


def _readable_span(bars: list[_Bar]) -> tuple[float, float] | None:
    """Ends of the axis where a few methods are so far away that the others could not be told apart; else None."""

    def points(bar: _Bar) -> list[float]:
        return [value for value in (bar.mean, bar.low, bar.high, *bar.seeds.values()) if math.isfinite(value)]

    reach = [max(map(abs, points(bar)), default=0.0) for bar in bars]
    typical = statistics.median(reach) if reach else 0.0
    near = [bar for bar in bars if abs(bar.mean) <= FAR * typical]
    if not near or len(near) == len(bars):
        return None
    values = [0.0, *(value for bar in near for value in points(bar))]
    room = 0.05 * (max(values) - min(values))
    return min(values) - room, max(values) + room


def _beyond(bar: _Bar, at: int, span: tuple[float, float]) -> Plot:
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


def _dots(bar: _Bar, seeds: dict[str, float], at: int, budget: float | None, label: str) -> Plot:
    """Each seed; a triangle at the end of the budget where the target was never reached."""
    values = [value if math.isfinite(value) else budget for value in seeds.values()]
    reached = [math.isfinite(value) for value in seeds.values()]
    told = [
        f"{'' if seed == 'all seeds' else 'seed '}{_safe(seed)}: " + (f"{value:.5g}" if done else f"> {value:g}")
        for seed, value, done in zip(seeds, values, reached, strict=True)
    ]
    return {
        "type": "scatter", "mode": "markers", "x": [None if v is None else _number(v) for v in values],
        "y": [round(at + 0.11 * (i - (len(values) - 1) / 2), 3) for i in range(len(values))],
        "meta": bar.method, "text": told,
        "marker": {
            "opacity": 1, "size": [7 if d else 12 for d in reached], "color": _colour(bar.method),
            "symbol": ["circle" if d else "triangle-right" for d in reached],
            "line": {"width": 1, "color": "@card"},
        },
        "hovertemplate": f"<b>{_safe(bar.name)}</b><br>%{{text}} {_safe(label)}<extra></extra>",
    }  # fmt: skip


def _stack_plot(comparison: Comparison, figure: Figure) -> Plot:
    names = [m for m in comparison.methods if any(row.series == m for row in figure.rows)]
    traces = []
    for at, panel in enumerate(figure.panels):
        values = {row.series: row.value for row in figure.rows if row.panel == panel.name}
        traces.append(
            {
                "type": "bar", "orientation": "h", "x": _numbers(values.get(n, math.nan) for n in names),
                "y": list(range(len(names))), "width": 0.6, "name": panel.title, "marker": {"color": f"@p{at}"},
                "text": [_safe(n) for n in names], "textposition": "none",
                "hovertemplate": f"<b>%{{text}}</b><br>{panel.title} %{{x:.4~g}} s<extra></extra>",
            }
        )  # fmt: skip
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
    x, y, height = _axis("seconds per run"), _method_axis(names), 130 + 34 * max(len(names), 2)
    layout = _layout(height, x, y, barmode="stack", showlegend=True, legend=legend)
    layout["margin"]["t"] = 46
    return {"data": traces, "layout": layout}


def _steps_plot(comparison: Comparison, figure: Figure, panel: Panel) -> Plot:
    rows: list[Row] = [row for row in figure.rows if row.panel == panel.name]
    steps = sorted({row.step for row in rows})
    return _map_plot(figure, steps, {(row.series, row.step): row.value for row in rows})


def _map_plot(figure: Figure, columns: Sequence[Any], cells: dict[Any, float]) -> Plot:
    """A heat map of layers, in the order of the model, by methods or steps."""
    layers = list(dict.fromkeys(row.series for row in figure.rows))
    over_steps = figure.kind == "map_over_steps"
    names = [f"{column:g}" if over_steps else column for column in columns]
    low, high = figure.panels[0].span or (0.0, 1.0)
    ramp = [[at / (len(RAMP) - 1), "#{:02x}{:02x}{:02x}".format(*rgb)] for at, rgb in enumerate(RAMP)]
    gap = 1 if len(names) <= 12 else 0
    x_name = "step" if over_steps else "method"
    trace = {
        "type": "heatmap", "x": list(range(len(names))), "y": list(range(len(layers))),
        "z": [_numbers(cells.get((layer, column), math.nan) for column in columns) for layer in layers],
        "zmin": _number(low), "zmax": _number(max(high, low + 0.1)), "colorscale": ramp,
        "colorbar": {"thickness": 10, "outlinewidth": 0, "nticks": 5, "title": {"text": "log₁₀ κ"}},
        "xgap": gap, "ygap": gap, "text": [[_safe(layer)] * len(names) for layer in layers],
        "customdata": [[_safe(name) for name in names]] * len(layers),
        "hovertemplate": f"%{{text}}<br>{x_name} %{{customdata}}<br>log₁₀ κ %{{z:.2f}}<extra></extra>",
    }  # fmt: skip
    if len(names) <= 8:
        trace |= {"texttemplate": "%{z:.1f}" if high - low > 2 else "%{z:.2f}"}
    shown = range(0, len(names), max(1, math.ceil(len(names) / 6)) if over_steps else 1)
    short, thinned = _short_names(layers), range(0, len(layers), max(1, math.ceil(len(layers) / 24)))
    turned = {"tickangle": -40} if not over_steps and len(shown) > 5 else {}
    x = _axis("step" if over_steps else "", showgrid=False, zeroline=False, ticklabeloverflow="allow", **turned,
              **_ticks({at: cut(names[at], 18) for at in shown}))  # fmt: skip
    y = _axis("layer", autorange="reversed", showgrid=False, zeroline=False,
              **_ticks({at: cut(short[at], 16) for at in thinned}))  # fmt: skip
    return {"data": [trace], "layout": _layout(110 + max(17 * min(len(layers), 48), 90), x, y)}


def _short_names(names: Sequence[str]) -> list[str]:
    """Names of layers without the parts that all of them share, such as `0` of `blocks.0.attn`."""
    parts = [name.split(".") for name in names]
    if len(parts) < 2:
        return list(names)
    spare = min(map(len, parts)) - 1
    front = next((at for at in range(spare) if len({part[at] for part in parts}) > 1), spare)
    left = spare - front
    back = next((at for at in range(left) if len({part[-1 - at] for part in parts}) > 1), left)
    return [".".join(part[front : len(part) - back]) for part in parts]
