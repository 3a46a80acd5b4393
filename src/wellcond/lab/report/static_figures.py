"""`draw_static`: the plots of the page as image files; the same rows give the same bytes."""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

from wellcond.errors import MissingExtraError
from wellcond.lab.report.figures import Figure
from wellcond.lab.report.plots import DASHES, Plot, plots
from wellcond.lab.report.render import asset
from wellcond.lab.report.values import cut

LINES: dict[str, Any] = dict(zip(DASHES, ("-", ":", "-.", (0, (8, 3))), strict=True)) | {"dash": "--"}
MARKERS = {"circle": "o", "triangle-right": ">", "triangle-left": "<"}
SETTINGS: Any = {
    "svg.hashsalt": "wellcond", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e9ec",
    "axes.axisbelow": True, "path.simplify": False, "text.usetex": False,
}  # fmt: skip
PIXELS = 88.0
"""Of the page's plots, to the inch; of an image, for text of the same size."""
CHARACTER = 0.075
"""Width of one in inches."""


def draw_static(figure: Figure) -> bytes:
    """A figure as SVG.

    Raises: MissingExtraError if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report") from error
    drawn = plots(figure)
    columns = min(len(drawn), 2 if figure.kind == "maps" else 3)
    rows = math.ceil(len(drawn) / columns)
    layouts = [plot["layout"] for _, plot in drawn]
    # Rooms in inches; matplotlib's own layout engines measure every text, which takes as long as drawing it.
    left = 0.55 + CHARACTER * max(len(text) for each in layouts for text in each["yaxis"].get("ticktext", ("0.000",)))
    below = 1.2 if any("tickangle" in each["xaxis"] for each in layouts) else 0.65
    width, height = 3.2 if columns > 1 else 5.6, max(each["height"] for each in layouts) / PIXELS - 0.5
    legend = _legend(figure.methods, drawn, columns * (left + width)) if figure.kind == "lines" else {}
    foot = 0.1 + 0.2 * math.ceil(len(legend["labels"]) / legend["ncols"]) if legend else 0.0
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
            ax = canvas.add_subplot(rows, columns, at + 1)
            for trace in plot["data"]:
                _draw_trace(canvas, ax, trace)
            for line in plot["layout"].get("shapes", ()):
                ax.axvline(line["x0"], color=_colour(line["line"]["color"])[0], linewidth=1, linestyle=":")
            for which in "xy":
                _set_axis(ax, which, plot["layout"][f"{which}axis"])
            ax.set_title(_tidy(cut(title, 44)), fontsize=9)
        canvas.text(0.5, 1 - 0.08 / size[1], _tidy(figure.title), fontsize=11, fontweight="bold", ha="center", va="top")
        if legend:
            canvas.legend(**legend, loc="lower center", frameon=False)
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
    found: dict[str, str] = {}
    for name, colour in re.findall(r"--(\w+):(#\w{6})", asset("style.css") + asset("comparison.css")):
        found.setdefault(name, colour)
    return found


def _colour(name: str) -> tuple[str, float]:
    """Colour and opacity of a name such as `@c0/0.5`."""
    plain, _, opacity = name.removeprefix("@").partition("/")
    return _palette()[plain], float(opacity or 1)


def _legend(methods: Sequence[str], drawn: Sequence[tuple[str, Plot]], width: float) -> dict[str, Any]:
    """Lines with their labels, and how many fit beside each other."""
    from matplotlib.lines import Line2D

    traces = [trace for _, plot in drawn for trace in plot["data"]]
    found = {trace["meta"]: trace["line"] for trace in traces if "dash" in trace.get("line", {})}
    # A leading underscore would hide the entry.
    labels = [re.sub("^_", " _", _tidy(cut(methods[at], 40))) for at in sorted(found)]
    looks = [(_colour(found[at]["color"])[0], LINES[found[at]["dash"]]) for at in sorted(found)]
    handles = [Line2D([], [], color=colour, linestyle=dash) for colour, dash in looks]
    fitting = int(width / CHARACTER / (max(map(len, labels), default=0) + 6))
    return {"handles": handles, "labels": labels, "ncols": max(1, min(fitting, len(labels)))}


def _draw_trace(canvas: Any, ax: Any, trace: Plot) -> None:
    x, y = ([math.nan if value is None else value for value in trace[key]] for key in ("x", "y"))
    if trace["type"] == "heatmap":
        from matplotlib.colors import LinearSegmentedColormap

        ramp = LinearSegmentedColormap.from_list("ramp", [colour for _, colour in trace["colorscale"]])
        values = [[math.nan if value is None else value for value in row] for row in trace["z"]]
        picture = ax.imshow(values, aspect="auto", cmap=ramp, vmin=trace["zmin"], vmax=trace["zmax"])
        canvas.colorbar(picture, ax=ax)
    elif trace["type"] == "bar":
        colour, opacity = _colour(trace["marker"]["color"])
        ax.barh(y, x, trace["width"], color=colour, alpha=opacity)
    elif "fill" in trace:
        colour, opacity = _colour(trace["fillcolor"])
        ax.fill(x, y, color=colour, alpha=opacity, linewidth=0)
    elif "lines" in trace["mode"]:
        line = trace["line"]
        look = {"linestyle": LINES[line["dash"]], "linewidth": 0.8 * line["width"]}
        ax.plot(x, y, color=_colour(line["color"])[0], **look)
        if "markers" in trace["mode"]:
            _draw_marks(ax, trace, x, y)
    else:
        _draw_marks(ax, trace, x, y)


def _draw_marks(ax: Any, trace: Plot, x: list[float], y: list[float]) -> None:
    mark = trace["marker"]
    colour = _colour(mark["color"])[0]
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
        low, high = sorted(ax.get_ylim())
        ax.set_ylim(high, low)
    if settings.get("showgrid") is False:
        ax.grid(visible=False, axis=which)
