"""`plots`: every figure as plotly traces and layouts in plain data; `draw_static`: the same as an SVG file.

The page's script draws the plots. Colours are names of the style sheet, such as `@c0` or `@c0/0.5`, which both look up.
"""

from __future__ import annotations

import html
import io
import math
import re
import statistics
import warnings
from collections.abc import Iterable
from functools import cache, partial
from importlib import resources
from operator import attrgetter
from typing import Any

from wellcond.errors import needs_extra
from wellcond.lab.report.figures import BUDGET, HIGH, HIGH_END, LOW, LOW_END, MEAN, Figure, Panel
from wellcond.lab.report.table import cut
from wellcond.pages import style

NUM_COLOURS = 10
FAR = 4.0
"""Times the median distance from zero beyond which a method gets a triangle instead of a place on the axis."""
LINES: dict[str, Any] = {"solid": "-", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3)), "dash": "--"}
"""As plotly and as matplotlib call them: of the methods, and the last of runs that are in no mean."""
MARKERS = {"circle": "o", "triangle-right": ">", "triangle-left": "<"}
SETTINGS: Any = {
    "svg.hashsalt": "wellcond", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e9ec",
    "axes.axisbelow": True, "axes.titlesize": 9, "path.simplify": False, "text.usetex": False,
}  # fmt: skip
CHARACTER = 0.075
"""Width of one in inches."""
Plot = dict[str, Any]
_safe = partial(html.escape, quote=False)
"""Plotly reads tags in text; entities it shows as they are meant."""


def plots(figure: Figure) -> list[tuple[str, Plot]]:
    """Heading and plot of every panel of a figure, without a legend, which the page has above it."""
    look = {"margin": {"l": 52, "r": 12, "t": 8, "b": 44}, "showlegend": False, "hovermode": "closest"}
    draw = _bar_plot if figure.bars else _line_plot
    made = [(panel.title, *draw(figure, panel)) for panel in figure.panels]
    return [(title, {"data": traces, "layout": layout | look}) for title, traces, layout in made]


def _rounded(values: Iterable[float]) -> list[float | None]:
    """Six digits, more than a screen shows; what is not finite has no place on an axis."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _axis(title: str, ticks: dict[Any, str] | None = None, **settings: Any) -> Plot:
    look = {"gridcolor": "@grid", "linecolor": "@line", "zerolinecolor": "@line", "automargin": True}
    placed = {"tickvals": list(ticks), "ticktext": [_safe(label) for label in ticks.values()]} if ticks else {}
    return {"title": {"text": _safe(title), "standoff": 8}, **look, **placed, **settings}


def log_range(values: Iterable[float], span: tuple[float, float] | None = None) -> tuple[float, float]:
    """Both ends of a logarithmic axis, as powers of ten, for some values or a fixed span."""
    usable = [value for value in values if 0 < value < math.inf]
    low, high = span or (min(usable, default=1.0), max(usable, default=10.0))
    # In logarithms, since bounds come near the largest float: room at both ends, and never beyond it. At least half a
    # decade, since the axis would zoom into the rounding of flat curves.
    bottom, top = math.log10(low), math.log10(high)
    room = max(0.04 * (top - bottom), 0.25 - (top - bottom) / 2)
    return max(bottom - room, -307), min(top + room, 307)


def _look(figure: Figure, series: str) -> tuple[int, str, str]:
    """Place of the method of a series (one of a run that did not finish begins with it), its colour and its dash."""
    found = [name for name in figure.methods if series == name or series.startswith(f"{name}, seed ")]
    place = figure.methods.index(max(found, key=len))
    return place, f"@c{place % NUM_COLOURS}", list(LINES)[place // NUM_COLOURS % 4]


def _line_plot(figure: Figure, panel: Panel) -> tuple[list[Plot], Plot]:
    """Means with bands; a method without common steps falls back to its seeds, one line each."""
    bands: list[Plot] = []
    lines: list[Plot] = []
    x_label, place_of = panel.x_label or figure.x_label, attrgetter("epoch" if figure.x_label == "epoch" else "step")
    for series, seeds in panel.by_series().items():
        means = [seeds[name] for name in (MEAN, LOW, HIGH)] if MEAN in seeds else []
        count = len(seeds) - 3 if means else 1 if series in figure.methods else 0
        place, colour, dash = _look(figure, series)
        told = {0: "not in any mean", 1: "1 seed"}.get(count, f"mean of {count} seeds")
        said = f"<b>{_safe(series)}</b><br>{_safe(x_label)} %{{x}}<br>{_safe(panel.y_label)} %{{y:.4~g}}<br>{told}"
        common: Plot = {"type": "scatter", "meta": place, "hovertemplate": f"{said}<extra></extra>"}
        if count > 1:
            low, high = ([row for row in rows if math.isfinite(row.value)] for rows in (means[1], means[2][::-1]))
            bands.append(common | {
                "mode": "lines", "x": _rounded(map(place_of, (*low, *high))),
                "y": _rounded(row.value for row in (*low, *high)), "fill": "toself", "fillcolor": f"{colour}/0.16",
                "line": {"width": 0}, "hoverinfo": "skip",
            })  # fmt: skip
        for rows in means[:1] or seeds.values():
            shown = [row for row in rows if math.isfinite(place_of(row))]
            points = {"x": _rounded(map(place_of, shown)), "y": _rounded(row.value for row in shown)}
            lines.append(common | points | {
                "mode": "lines+markers" if len(shown) <= 40 else "lines", "name": _safe(series),
                "line": {"color": colour, "width": 2 if count else 1.3, "dash": dash if count else "dash"},
                "marker": {"size": 5 if count else 3, "color": colour, "symbol": "circle"},
            })  # fmt: skip
    look: Plot = {}
    if panel.log:
        ends = log_range((y for t in (*bands, *lines) for y in t["y"] if y is not None), panel.span)
        look = {"type": "log", "range": [round(end, 4) for end in ends], "exponentformat": "power"}
    x = _axis(x_label)
    if panel.x_label:  # the values that were tried, at most nine of them
        tried = sorted({row.step for row in panel.rows})
        ticks = {value: f"{value:.3g}" for value in tried[:: math.ceil(len(tried) / 9)]}
        x = _axis(x_label, ticks, **({"type": "log"} if tried[0] > 0 else {}))
    return [*bands, *lines], {"height": 290, "xaxis": x, "yaxis": _axis(panel.y_label, **look)}


def _bar_plot(figure: Figure, panel: Panel) -> tuple[list[Plot], Plot]:
    """The mean of each method, with its interval if it has one, and its seeds, beside the dotted line of a target."""
    found = {name: {seed: rows[0].value for seed, rows in seeds.items()} for name, seeds in panel.by_series().items()}
    target = found.pop(BUDGET, {}).get(MEAN, math.nan)
    span = _readable_span(list(found.values())) if target == 0 else None
    dotted = {"color": "@soft", "width": 1, "dash": "dot"}
    upright = {"mode": "lines", "x": _rounded([target] * 2), "y": [-0.5, len(found) - 0.5], "line": dotted}
    traces: list[Plot] = [{"type": "scatter", "hoverinfo": "skip", **upright}]
    for at, (series, seeds) in enumerate(found.items()):
        mean, low, high = (seeds.pop(name, math.nan) for name in (MEAN, LOW_END, HIGH_END))
        place, colour, _ = _look(figure, series)
        told = f"<b>{_safe(series)}</b><br>%{{text}} {_safe(panel.y_label)}<extra></extra>"
        common: Plot = {"type": "scatter", "mode": "markers", "meta": place, "hovertemplate": told, "y": [at]}
        text = f"mean {mean:.4g}" + (f" [{low:+.4g}, {high:+.4g}]" if math.isfinite(low) else "")
        if span is not None and not span[0] <= mean <= span[1]:
            below, inset = mean < span[0], 0.01 * (span[1] - span[0])
            mark = {"size": 12, "color": colour, "symbol": "triangle-left" if below else "triangle-right"}
            edge = span[0] + inset if below else span[1] - inset
            traces.append(common | {"x": _rounded([edge]), "text": [text], "marker": mark})
            continue
        line = {"mode": "lines", "line": {"color": colour, "width": 2, "dash": "solid"}}
        traces.append(common | line | {"x": _rounded([low, high]), "y": [at, at], "text": [text, text]})
        gap, middle = min(0.11, 0.6 / max(len(seeds), 1)), (len(seeds) - 1) / 2
        places = {seed: round(at + gap * (i - middle), 3) for i, seed in enumerate(seeds)}
        reached = {seed: value for seed, value in seeds.items() if math.isfinite(value)}
        never = {seed: target for seed in seeds if seed not in reached}
        for dots, size, symbol in (({text: mean}, 10, "circle"), (reached, 7, "circle"), (never, 12, "triangle-right")):
            traces.append(common | {
                "x": _rounded(dots.values()), "y": [places.get(seed, at) for seed in dots],
                "text": [_safe(seed) if dots is not reached else f"seed {seed}: {dots[seed]:.5g}" for seed in dots],
                "marker": {"size": size, "color": colour, "symbol": symbol, "line": {"width": 1, "color": "@card"}},
            })  # fmt: skip
    names = {at: cut(name) for at, name in enumerate(found)}
    x = _axis(panel.y_label, zeroline=False) | ({"range": _rounded(span)} if span else {})
    y = _axis("", names, range=[len(found) - 0.5, -0.5], showgrid=False, zeroline=False)
    return traces, {"height": 78 + 34 * max(len(found), 2), "xaxis": x, "yaxis": y}


def _readable_span(bars: list[dict[str, float]]) -> tuple[float, float] | None:
    """Ends of the axis where a few methods are so far away that the others could not be told apart; else None."""
    points = [[value for value in bar.values() if math.isfinite(value)] for bar in bars]
    typical = statistics.median(max(map(abs, values)) for values in points)
    near = [values for bar, values in zip(bars, points, strict=True) if abs(bar[MEAN]) <= FAR * typical]
    if not near or len(near) == len(bars):
        return None
    low, high = min(0.0, *(min(values) for values in near)), max(0.0, *(max(values) for values in near))
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


def draw_static(figure: Figure) -> bytes:
    """A figure as SVG; the same rows give the same bytes."""
    with needs_extra("matplotlib", "report"):
        import matplotlib
        from matplotlib.figure import Figure as Canvas
        from matplotlib.lines import Line2D
    drawn = plots(figure)
    columns = min(len(drawn), 3)
    rows, width = math.ceil(len(drawn) / columns), columns * (4.2 if columns > 1 else 6.8)
    found = {t["meta"]: t["line"] for _, plot in reversed(drawn) for t in plot["data"][::-1] if "name" in t}
    legend = dict(sorted(found.items()))
    # A leading underscore would hide the entry.
    labels = [re.sub("^_", " _", _tidy(cut(figure.methods[at], 40))) for at in legend]
    beside = max(1, int(width / CHARACTER / (max(map(len, labels), default=0) + 6)))
    height = rows * (max(plot["layout"]["height"] for _, plot in drawn) / 88 + 0.5) + 0.2 * len(labels) / beside + 0.4
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # labels may hold any character; one that the font lacks is drawn as a box
        canvas = Canvas(figsize=(width, height), layout="constrained")
        canvas.suptitle(_tidy(cut(figure.title, int(width / CHARACTER))), fontsize=11, fontweight="bold")
        for at, (title, plot) in enumerate(drawn, 1):
            ax = canvas.add_subplot(rows, columns, at, title=_tidy(cut(title, 44)))
            for trace in plot["data"]:
                _draw_trace(ax, trace)
            for which in "xy":
                _set_axis(ax, which, plot["layout"][f"{which}axis"])
        looks = [(_palette()[line["color"]], LINES[line["dash"]]) for line in legend.values()]
        handles = [Line2D([], [], color=colour, linestyle=dash) for colour, dash in looks]
        if handles:
            canvas.legend(handles, labels, loc="outside lower center", ncols=min(beside, len(labels)), frameon=False)
        written = io.BytesIO()
        canvas.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
        return written.getvalue()


def _tidy(text: str) -> str:
    """Characters that cannot be drawn at all go, and no text is read as a formula."""
    return re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]", " ", html.unescape(text)).replace("$", r"\$")


@cache
def _palette() -> dict[str, str]:
    """Colours of the light scheme, as the style sheets have them, by names such as `@c0`."""
    own = (resources.files("wellcond.lab.report") / "templates" / "comparison.css").read_text("utf-8")
    return {f"@{name}": colour for name, colour in reversed(re.findall(r"--(\w+):(#\w{6})", style() + own))}


def _draw_trace(ax: Any, trace: Plot) -> None:
    x, y = ([math.nan if value is None else value for value in trace[key]] for key in ("x", "y"))
    if "fill" in trace:
        colour, opacity = trace["fillcolor"].split("/")
        ax.fill(x, y, color=_palette()[colour], alpha=float(opacity), linewidth=0)
        return
    mode, mark = trace["mode"], trace.get("marker", {})
    line = trace["line"] if "lines" in mode else {"color": mark["color"], "width": 0, "dash": "solid"}
    look = {"color": _palette()[line["color"]], "linestyle": LINES[line["dash"]], "linewidth": 0.8 * line["width"]}
    if "markers" in mode:
        look |= {"marker": MARKERS[mark["symbol"]], "markersize": 0.65 * mark["size"]}
    ax.plot(x, y, solid_capstyle="butt", **look)


def _set_axis(ax: Any, which: str, settings: Plot) -> None:
    axis, ends = getattr(ax, f"{which}axis"), settings.get("range")
    axis.set_label_text(_tidy(cut(settings["title"]["text"], 48)))
    if settings.get("type") == "log":
        getattr(ax, f"set_{which}scale")("log")
        # As plain text: formulas take ten times as long to draw.
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}" if ends and ends[1] - ends[0] < 1 else "")
        ends = ends and [10.0**end for end in ends]
    if "tickvals" in settings:
        axis.set_ticks(settings["tickvals"], [_tidy(text) for text in settings["ticktext"]], minor=False)
        axis.set_ticks([], minor=True)
    if ends:
        getattr(ax, f"set_{which}lim")(*ends)
    if settings.get("showgrid") is False:
        ax.grid(visible=False, axis=which)
