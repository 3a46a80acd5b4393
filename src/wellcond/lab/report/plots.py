"""`plots`: every figure as plotly traces and layouts in plain data; `draw_static`: the same as image files.

The page's script draws the plots. Colours are names of the style sheet, such as `@c0` or `@c0/0.5`, which both look up.
"""

from __future__ import annotations

import html
import io
import math
import re
import statistics
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from os.path import commonprefix
from typing import Any

from wellcond.errors import needs_extra
from wellcond.lab.report.figures import BUDGET, HIGH, HIGH_END, LOW, LOW_END, MEAN, Figure, Panel
from wellcond.lab.report.table import cut

NUM_COLOURS = 10
LARGEST_POWER = 307
MOST_TICKS = 9
FAR = 4.0
"""Times the median distance from zero beyond which a method gets a triangle instead of a place on the axis."""
RAMP = ("#ecf4fa", "#accfe6", "#61a0ce", "#2969a8", "#0b2f62")
"""From pale (well conditioned) to dark (ill conditioned); one hue, so that it survives a grey printer."""
REVERSED = {"autorange": "reversed", "showgrid": False, "zeroline": False}
DASHES: dict[str, Any] = {"solid": "-", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
"""Of the methods, as plotly and as matplotlib call them."""
LINES = DASHES | {"dash": "--"}
MARKERS = {"circle": "o", "triangle-right": ">", "triangle-left": "<"}
SETTINGS: Any = {
    "svg.hashsalt": "wellcond", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e9ec",
    "axes.axisbelow": True, "axes.titlesize": 9, "path.simplify": False, "text.usetex": False,
}  # fmt: skip
PIXELS = 88.0
"""Of the page's plots, to the inch; of an image, for text of the same size."""
CHARACTER = 0.075
"""Width of one in inches."""
Plot = dict[str, Any]


def asset(name: str) -> str:
    """Text of a style sheet or script of this package, which becomes part of a page."""
    return (resources.files("wellcond.lab.report") / "templates" / name).read_text("utf-8")


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
    bottom, top = max(bottom - room, -LARGEST_POWER), min(top + room, LARGEST_POWER)
    decades, wide = range(math.floor(bottom), math.ceil(top) + 1), top - bottom > 1.5
    factors = (1.0,) if wide else (1.0, 2.0, 5.0) if top - bottom > 0.7 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    every = max(1, math.ceil(len(decades) / 6)) if wide else 1
    ticks = [factor * 10.0**decade for decade in decades[::every] if decade < LARGEST_POWER for factor in factors]
    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    shown = {tick: f"10{str(round(math.log10(tick))).translate(raised)}" if wide else f"{tick:g}" for tick in ticks}
    low, high = 10.0**bottom, 10.0**top
    return low, high, {tick: label for tick, label in shown.items() if low <= tick <= high}


def _look(figure: Figure, series: str) -> tuple[int, str, str]:
    """Place of the method of a series, its colour and its dash."""
    place = figure.place(series)
    return place, f"@c{place % NUM_COLOURS}", list(DASHES)[place // NUM_COLOURS % len(DASHES)]


def _line_plot(figure: Figure, panel: Panel) -> Plot:
    """Means with bands; a method without common steps falls back to its seeds, one line each."""
    bands: list[Plot] = []
    lines: list[Plot] = []
    x_label = panel.x_label or figure.x_label
    for series, seeds in panel.by_series().items():
        means = [seeds[name] for name in (MEAN, LOW, HIGH)] if MEAN in seeds else []
        count = len(seeds) - 3 if means else 1 if series in figure.methods else 0
        place, colour, dash = _look(figure, series)
        common: Plot = {"type": "scatter", "meta": place}
        if count > 1:
            low, high = ([row for row in rows if math.isfinite(row.value)] for rows in (means[1], means[2][::-1]))
            bands.append(common | {
                "mode": "lines", "x": rounded(figure.x(row) for row in (*low, *high)),
                "y": rounded(row.value for row in (*low, *high)), "fill": "toself", "fillcolor": f"{colour}/0.16",
                "line": {"width": 0}, "hoverinfo": "skip",
            })  # fmt: skip
        told = {0: "not in any mean", 1: "1 seed"}.get(count, f"mean of {count} seeds")
        size = 5 if count else 3
        for rows in means[:1] or seeds.values():
            shown = [row for row in rows if math.isfinite(figure.x(row))]
            sizes = [2 * size if row.step == panel.chosen.get(series) else size for row in shown]
            lines.append(common | {
                "mode": "lines+markers" if len(shown) <= 40 else "lines", "name": safe(series),
                "x": rounded(map(figure.x, shown)), "y": rounded(row.value for row in shown),
                "line": {"color": colour, "width": 2 if count else 1.3, "dash": dash if count else "dash"},
                "marker": {"size": sizes if series in panel.chosen else size, "color": colour},
                "hovertemplate": f"<b>{safe(series)}</b><br>{safe(x_label)} %{{x}}<br>{safe(panel.y_label)} "
                f"%{{y:.4~g}}<br>{told}<extra></extra>",
            })  # fmt: skip
    look: Plot = {}
    if panel.log:
        bottom, top, ticks = log_axis((y for t in (*bands, *lines) for y in t["y"] if y is not None), panel.span)
        look = {"type": "log", "range": [round(math.log10(end), 4) for end in (bottom, top)],
                "tickvals": list(ticks), "ticktext": list(ticks.values())}  # fmt: skip
    elif panel.span is not None:
        room = 0.03 * (panel.span[1] - panel.span[0])
        look = {"range": [panel.span[0] - room, panel.span[1] + room]}
    x = axis(x_label)
    if panel.x_label:  # the values that were tried
        tried = sorted({row.step for row in panel.rows})
        shown_ticks = {value: f"{value:.3g}" for value in tried[:: math.ceil(len(tried) / MOST_TICKS)]}
        x = axis(x_label, shown_ticks, **({"type": "log"} if tried[0] > 0 else {}))
    return {"data": [*bands, *lines], "layout": layout(290, x, axis(panel.y_label, **look))}


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
        place, colour, _ = _look(figure, series)
        told = f"<b>{safe(series)}</b><br>"
        common: Plot = {"type": "scatter", "mode": "markers", "y": [at], "meta": place}
        known = f"[{low:+.4g}, {high:+.4g}]" if math.isfinite(low) else "no interval: too few seeds"
        if span is not None and not span[0] <= mean <= span[1]:
            below, inset = mean < span[0], 0.015 * (span[1] - span[0])
            traces.append(common | {
                "mode": "markers+text", "x": rounded([span[0] + inset if below else span[1] - inset]),
                "text": [f"{mean:+.4g} {known}"], "textposition": f"middle {'right' if below else 'left'}",
                "marker": {"size": 12, "color": colour, "symbol": f"triangle-{'left' if below else 'right'}"},
                "textfont": {"color": "@ink"}, "hovertemplate": f"{told}mean %{{text}}<extra></extra>",
            })  # fmt: skip
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
        traces.append(common | {
            "x": rounded(values),
            "y": [round(at + 0.11 * (i - (len(values) - 1) / 2), 3) for i in range(len(values))],
            "text": [f"seed {seed}: {value:.5g}" if done else f"seed {seed}: > {value:g}"
                     for seed, value, done in zip(seeds, values, reached, strict=True)],
            "marker": {
                "opacity": 1, "size": [7 if done else 12 for done in reached], "color": colour,
                "symbol": ["circle" if done else "triangle-right" for done in reached],
                "line": {"width": 1, "color": "@card"},
            },
            "hovertemplate": f"{told}%{{text}} {safe(panel.y_label)}<extra></extra>",
        })  # fmt: skip
    target = 0.0 if interval else budget
    dotted = {"color": "@soft", "width": 1, "dash": "dot"}
    upright = {"type": "line", "x0": target, "x1": target, "y0": 0, "y1": 1, "yref": "paper", "line": dotted}
    ends: Plot = {"rangemode": "tozero"} if not interval else {"range": rounded(span)} if span else {}
    names = {at: cut(name) for at, name in enumerate(found)}
    x, y = axis(panel.y_label, zeroline=False, **ends), axis("", names, **REVERSED)
    height = 78 + 34 * max(len(found), 2)
    return {"data": traces, "layout": layout(height, x, y, shapes=[] if target is None else [upright])}


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
    """A heat map of layers, in the order of the model, by methods; dark where numbers are large."""
    by_layer = panel.by_series()
    layers, methods = list(by_layer), [m for m in figure.methods if any(m in row for row in by_layer.values())]
    cells = [[row[m][0].value if m in row else math.nan for m in methods] for row in by_layer.values()]
    known = [value for row in cells for value in row if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    gap = 1 if len(methods) <= 12 else 0
    trace = {
        "type": "heatmap", "x": list(range(len(methods))), "y": list(range(len(layers))),
        "z": list(map(rounded, cells)), "zmin": rounded([low])[0], "zmax": rounded([max(high, low + 0.1)])[0],
        "colorscale": [[at / (len(RAMP) - 1), colour] for at, colour in enumerate(RAMP)],
        "colorbar": {"thickness": 10, "outlinewidth": 0, "nticks": 5, "title": {"text": "log₁₀ κ"}},
        "xgap": gap, "ygap": gap, "text": [[safe(layer)] * len(methods) for layer in layers],
        "customdata": [[safe(method) for method in methods]] * len(layers),
        "hovertemplate": "%{text}<br>%{customdata}<br>log₁₀ κ %{z:.2f}<extra></extra>",
    }  # fmt: skip
    if len(methods) <= 8:
        trace["texttemplate"] = "%{z:.2f}" if high - low <= 2 else "%{z:.1f}"
    turned = {"tickangle": -40} if len(methods) > 3 else {}
    columns = {at: cut(method, 18) for at, method in enumerate(methods)}
    x = axis("", columns, showgrid=False, zeroline=False, ticklabeloverflow="allow", **turned)
    y = axis("layer", short_names(layers), **REVERSED)
    return {"data": [trace], "layout": layout(110 + max(17 * min(len(layers), 48), 90), x, y)}


def short_names(names: Sequence[str]) -> dict[int, str]:
    """Ticks of at most 24 layers by place, without the parts that all share, such as `0` of `blocks.0.attn`."""
    parts = [name.split(".") for name in names]
    front, back = (len(commonprefix([part[::way] for part in parts])) for way in (1, -1))
    short = [".".join(part[front : len(part) - back]) or ".".join(part) for part in parts]
    return {at: cut(short[at], 16) for at in range(0, len(names), max(1, math.ceil(len(names) / 24)))}


def draw_static(figure: Figure) -> bytes:
    """A figure as SVG; the same rows give the same bytes.

    Raises: MissingExtraError if matplotlib is not installed.
    """
    with needs_extra("matplotlib", "report"):
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure as Canvas
    drawn = plots(figure)
    columns = min(len(drawn), 2 if figure.kind == "maps" else 3)
    rows, layouts = math.ceil(len(drawn) / columns), [plot["layout"] for _, plot in drawn]
    legend = {t["meta"]: t["line"] for _, plot in drawn for t in plot["data"] if "dash" in t.get("line", {})}
    # A leading underscore would hide the entry.
    labels = [re.sub("^_", " _", _tidy(cut(figure.methods[at], 40))) for at in sorted(legend)]
    # Rooms in inches; matplotlib's own layout engines measure every text, which takes longer than drawing it.
    left = 0.55 + CHARACTER * max(len(text) for each in layouts for text in each["yaxis"].get("ticktext", ("0.000",)))
    below = 1.2 if any("tickangle" in each["xaxis"] for each in layouts) else 0.65
    width, height = 3.2 if columns > 1 else 5.6, max(each["height"] for each in layouts) / PIXELS - 0.5
    beside = max(1, int(columns * (left + width) / CHARACTER / (max(map(len, labels), default=0) + 6)))
    foot = 0.1 + 0.2 * math.ceil(len(labels) / beside) if labels else 0.0
    size = columns * (left + width) + 0.2, rows * (height + below) + 0.35 * (rows + 1) + foot
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        # Labels may hold any character; one that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        canvas = Canvas(figsize=size, dpi=110)
        canvas.subplots_adjust(
            left=left / size[0], right=1 - 0.2 / size[0], wspace=left / width, top=1 - 0.7 / size[1],
            bottom=(below + foot) / size[1], hspace=(below + 0.35) / height,
        )  # fmt: skip
        for at, (title, plot) in enumerate(drawn):
            ax = canvas.add_subplot(rows, columns, at + 1, title=_tidy(cut(title, 44)))
            for trace in plot["data"]:
                _draw_trace(canvas, ax, trace)
            for line in plot["layout"].get("shapes", ()):
                ax.axvline(line["x0"], color=_paint(line["line"]["color"])[0], linewidth=1, linestyle=":")
            for which in "xy":
                _set_axis(ax, which, plot["layout"][f"{which}axis"])
        canvas.text(0.5, 1 - 0.08 / size[1], _tidy(figure.title), fontsize=11, fontweight="bold", ha="center", va="top")
        if legend:
            from matplotlib.lines import Line2D

            looks = [(_paint(legend[at]["color"])[0], LINES[legend[at]["dash"]]) for at in sorted(legend)]
            handles = [Line2D([], [], color=colour, linestyle=dash) for colour, dash in looks]
            canvas.legend(handles, labels, loc="lower center", ncols=min(beside, len(labels)), frameon=False)
        written = io.BytesIO()
        # Not by `savefig`, which would draw everything once more to find a size that is known.
        FigureCanvasSVG(canvas).print_svg(written, metadata={"Date": None, "Creator": None})
        return written.getvalue()


def _tidy(text: str) -> str:
    """Characters that cannot be drawn at all go, and no text is read as a formula."""
    return re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]", " ", html.unescape(text)).replace("$", r"\$")


@cache
def _palette() -> dict[str, str]:
    """Colours of the light scheme by name, as the style sheets have them."""
    found = re.findall(r"--(\w+):(#\w{6})", asset("style.css") + asset("comparison.css"))
    return dict(reversed(found))


def _paint(name: str) -> tuple[str, float]:
    """Colour and opacity of a name such as `@c0/0.5`."""
    plain, _, opacity = name.removeprefix("@").partition("/")
    return _palette()[plain], float(opacity or 1)


def _draw_trace(canvas: Any, ax: Any, trace: Plot) -> None:
    x, y = ([math.nan if value is None else value for value in trace[key]] for key in ("x", "y"))
    if trace["type"] == "heatmap":
        from matplotlib.colors import LinearSegmentedColormap

        ramp = LinearSegmentedColormap.from_list("ramp", RAMP)
        values = [[math.nan if value is None else value for value in row] for row in trace["z"]]
        picture = ax.imshow(values, aspect="auto", cmap=ramp, vmin=trace["zmin"], vmax=trace["zmax"])
        canvas.colorbar(picture, ax=ax)
    elif trace["type"] == "bar" or "fill" in trace:
        colour, opacity = _paint(trace["fillcolor"] if "fill" in trace else trace["marker"]["color"])
        if "fill" in trace:
            ax.fill(x, y, color=colour, alpha=opacity, linewidth=0)
        else:
            ax.barh(y, x, trace["width"], color=colour, alpha=opacity)
    else:
        if "lines" in trace["mode"]:
            line = trace["line"]
            colour, dash = _paint(line["color"])[0], LINES[line["dash"]]
            ax.plot(x, y, color=colour, linestyle=dash, linewidth=0.8 * line["width"])
        if "markers" in trace["mode"]:
            _draw_marks(ax, trace, x, y)


def _draw_marks(ax: Any, trace: Plot, x: list[float], y: list[float]) -> None:
    mark = trace["marker"]
    colour = _paint(mark["color"])[0]
    if "error_x" in trace:
        half = trace["error_x"]
        ax.plot([x[0] - half["arrayminus"][0], x[0] + half["array"][0]], y * 2, color=colour, linewidth=2, marker="|")
    if "text" in trace["mode"]:
        right = trace["textposition"].endswith("right")
        ax.annotate(_tidy(trace["text"][0]), (x[0], y[0]), (7 if right else -7, 0), textcoords="offset points",
                    ha="left" if right else "right", va="center", fontsize=8)  # fmt: skip
    sizes, symbols = (
        value if isinstance(value, list) else [value] * len(x) for value in (mark["size"], mark.get("symbol", "circle"))
    )
    edge = {"edgecolors": "white", "linewidths": 0.5} if "line" in mark else {}
    for symbol in dict.fromkeys(symbols):
        at = [i for i, found in enumerate(symbols) if found == symbol]
        places, areas = ([values[i] for i in at] for values in (x, y)), [(0.65 * sizes[i]) ** 2 for i in at]
        ax.scatter(*places, s=areas, marker=MARKERS[symbol], color=colour, zorder=4, **edge)


def _set_axis(ax: Any, which: str, settings: Plot) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axis = getattr(ax, f"{which}axis")
    axis.set_label_text(_tidy(cut(settings["title"]["text"], 48)))
    if settings.get("type") == "log":
        getattr(ax, f"set_{which}scale")("log")
        axis.set_minor_locator(NullLocator())
    if "tickvals" in settings:
        axis.set_major_locator(FixedLocator(settings["tickvals"]))
        turned = {"rotation": 40, "ha": "right"} if "tickangle" in settings else {}
        axis.set_ticklabels([_tidy(text) for text in settings["ticktext"]], **turned)
    if "range" in settings:
        limits = [10.0**end for end in settings["range"]] if settings.get("type") == "log" else settings["range"]
        getattr(ax, f"set_{which}lim")(*limits)
    if settings.get("autorange") == "reversed":
        ax.set_ylim(*sorted(ax.get_ylim(), reverse=True))
    if settings.get("showgrid") is False:
        ax.grid(visible=False, axis=which)
