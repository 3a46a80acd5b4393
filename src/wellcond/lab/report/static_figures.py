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
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.plots import DASHES, NUM_COLOURS, Plot, plots
from wellcond.lab.report.render import asset
from wellcond.lab.report.series import Figure
from wellcond.lab.report.values import cut

LINES: dict[str, Any] = dict(zip(DASHES, ("-", ":", "-.", (0, (8, 3))), strict=True)) | {"dash": "--"}
MARKERS = {"circle": "o", "triangle-right": ">", "triangle-left": "<", "x": "x"}
SETTINGS: Any = {
    "svg.hashsalt": "wellcond", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e9ec",
    "axes.axisbelow": True, "path.simplify": False, "text.usetex": False,
}  # fmt: skip
COLUMNS = 3
PIXELS = 88.0
"""Of the page's plots, to the inch; of an image, for text of the same size."""
CHARACTER = 0.075
"""Width of one in inches."""


def draw_static(comparison: Comparison, figure: Figure, kinds: Sequence[str] = ("svg",)) -> dict[str, bytes]:
    """Bytes of a figure by file ending, `svg` or `png`.

    Raises: MissingExtraError if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure as Canvas
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report") from error
    drawn = plots(comparison, figure)
    columns = min(len(drawn), COLUMNS)
    rows = math.ceil(len(drawn) / columns)
    left = max(_left(plot["layout"]) for _, plot in drawn)
    bottom = max(_below(plot["layout"]) for _, plot in drawn)
    height = max(plot["layout"]["height"] for _, plot in drawn) / PIXELS - 0.5
    width = 3.1 if columns > 1 else 5.6
    cell = left + width + 0.2, 0.3 + height + bottom
    entries = _entries(comparison, figure, drawn)
    longest = max((len(label) for label, _, _ in entries), default=0)
    per_row = max(1, min(len(entries), int(columns * cell[0] / ((longest + 6) * CHARACTER)))) if entries else 1
    legend = 0.1 + 0.2 * math.ceil(len(entries) / per_row) if entries else 0.0
    scale = 0.5 if figure.kind.startswith("map") else 0.0
    size = columns * cell[0] + scale, 0.35 + rows * cell[1] + legend
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        # Labels may hold any character; one that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        canvas = Canvas(figsize=size, dpi=110)
        for at, (title, plot) in enumerate(drawn):
            row, column = divmod(at, columns)
            x, y = column * cell[0] + left, size[1] - 0.65 - row * cell[1] - height
            ax = canvas.add_axes((x / size[0], y / size[1], width / size[0], height / size[1]))
            _draw(canvas, ax, plot, with_scale=at % columns == columns - 1 or at == len(drawn) - 1)
            ax.set_title(_tidy(cut(title, 44)), fontsize=9)
        canvas.text(0.5, 1 - 0.08 / size[1], _tidy(figure.title), fontsize=11, fontweight="bold", ha="center", va="top")
        if entries:
            handles = [Line2D([], [], color=colour, linestyle=dash) for _, colour, dash in entries]
            labels = [label for label, _, _ in entries]
            canvas.legend(handles, labels, loc="lower center", ncols=per_row, frameon=False)
        return {kind: _save(canvas, kind) for kind in kinds}


def _save(canvas: Any, kind: str) -> bytes:
    """The file's bytes, without `savefig`, which would draw everything once more to find a size that is known."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    written = io.BytesIO()
    if kind == "png":
        FigureCanvasAgg(canvas).print_png(written, metadata={"Software": None})
    else:
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


def _left(layout: Plot) -> float:
    """Room for the labels of the vertical axis, in inches."""
    longest = max(map(len, layout["yaxis"].get("ticktext", ["0.000"])), default=5)
    return 0.2 + CHARACTER * longest + (0.25 if layout["yaxis"]["title"]["text"] else 0.0)


def _below(layout: Plot) -> float:
    """Room below an axis, in inches."""
    longest = max(map(len, layout["xaxis"].get("ticktext", [""])), default=0)
    turned = 0.6 * CHARACTER * longest if "tickangle" in layout["xaxis"] else 0.0
    return 0.35 + turned + (0.25 if layout["xaxis"]["title"]["text"] else 0.0)


def _entries(comparison: Comparison, figure: Figure, drawn: Sequence[tuple[str, Plot]]) -> list[tuple[str, str, Any]]:
    """Label, colour and dash of every entry of the legend."""
    traces = [trace for _, plot in drawn for trace in plot["data"]]
    if figure.kind == "stack":
        return [(_tidy(trace["name"]), _colour(trace["marker"]["color"])[0], "-") for trace in traces]
    if figure.kind not in ("lines", "tuned"):
        return []
    methods = sorted({trace["meta"] for trace in traces})
    # A leading underscore would hide the entry.
    labels = [re.sub("^_", " _", _tidy(cut(comparison.methods[at], 40))) for at in methods]
    dashes = list(LINES.values())
    return [
        (label, _colour(f"@c{at % NUM_COLOURS}")[0], dashes[at // NUM_COLOURS % len(DASHES)])
        for label, at in zip(labels, methods, strict=True)
    ]


def _draw(canvas: Any, ax: Any, plot: Plot, *, with_scale: bool) -> None:
    """All traces of a plot; of heat maps, which share their colours, only the last of a row has a scale."""
    layout = plot["layout"]
    ends: dict[float, float] = {}
    for trace in plot["data"]:
        if trace["type"] == "heatmap":
            _draw_map(canvas, ax, trace, with_scale)
        elif trace["type"] == "bar":
            colour, opacity = _colour(trace["marker"]["color"])
            widths = [value or 0.0 for value in trace["x"]]
            left = [ends.get(y, 0.0) for y in trace["y"]]
            ax.barh(trace["y"], widths, trace["width"], left=left, color=colour, alpha=opacity)
            if layout.get("barmode") == "stack":
                ends |= {y: a + b for y, a, b in zip(trace["y"], left, widths, strict=True)}
        elif "fill" in trace:
            colour, opacity = _colour(trace["fillcolor"])
            ax.fill(trace["x"], trace["y"], color=colour, alpha=opacity, linewidth=0)
        else:
            _draw_scatter(ax, trace)
    for shape in layout.get("shapes", ()):
        ax.axvline(shape["x0"], color=_colour("@soft")[0], linestyle=":", linewidth=1)
    _set_axis(ax, "x", layout["xaxis"])
    _set_axis(ax, "y", layout["yaxis"])


def _draw_scatter(ax: Any, trace: Plot) -> None:
    x, y = ([math.nan if value is None else value for value in trace[key]] for key in "xy")
    mark = trace.get("marker", {})
    where = {"transform": ax.get_xaxis_transform()} if trace.get("yaxis") == "y2" else {}
    if "lines" in trace["mode"]:
        line = trace["line"]
        small = {"marker": "o", "markersize": mark["size"] / 2} if "markers" in trace["mode"] else {}
        ax.plot(x, y, color=_colour(line["color"])[0], linestyle=LINES[line["dash"]], linewidth=0.8 * line["width"],
                **small)  # fmt: skip
        return
    colour = _colour(mark["color"])[0]
    if "error_x" in trace:
        half = trace["error_x"]
        ends = [x[0] - half["arrayminus"][0], x[0] + half["array"][0]]
        ax.plot(ends, y * 2, color=colour, linewidth=2, marker="|")
    if "text" in trace["mode"]:
        right = trace["textposition"].endswith("right")
        ax.annotate(_tidy(trace["text"][0]), (x[0], y[0]), (7 if right else -7, 0), textcoords="offset points",
                    ha="left" if right else "right", va="center", fontsize=8)  # fmt: skip
    sizes, symbols = (
        value if isinstance(value, list) else [value] * len(x) for value in (mark["size"], mark.get("symbol", "circle"))
    )
    for look in dict.fromkeys(zip(sizes, symbols, strict=True)):
        at = [i for i, found in enumerate(zip(sizes, symbols, strict=True)) if found == look]
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.5} if "line" in mark else {}
        ax.plot([x[i] for i in at], [y[i] for i in at], MARKERS[look[1]], color=colour, markersize=0.65 * look[0],
                zorder=4, **edge, **where)  # fmt: skip


def _draw_map(canvas: Any, ax: Any, trace: Plot, with_scale: bool) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("ramp", [colour for _, colour in trace["colorscale"]])
    values = [[math.nan if value is None else value for value in row] for row in trace["z"]]
    picture = ax.imshow(values, aspect="auto", cmap=ramp, vmin=trace["zmin"], vmax=trace["zmax"])
    if not with_scale:
        return
    place = ax.get_position()
    inch = 1 / canvas.get_figwidth()
    beside = canvas.add_axes((place.x1 + 0.1 * inch, place.y0, 0.1 * inch, place.height))
    canvas.colorbar(picture, cax=beside, label="log₁₀ κ")


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
    ends = settings.get("range")
    if ends is not None:
        limits = [10.0**end for end in ends] if settings.get("type") == "log" else ends
        getattr(ax, f"set_{which}lim")(*limits)
    if settings.get("autorange") == "reversed":
        low, high = sorted(ax.get_ylim())
        ax.set_ylim(high, low)
    if settings.get("showgrid") is False:
        ax.grid(visible=False, axis=which)
