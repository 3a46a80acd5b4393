"""`draw_static`: the figures as PNG and SVG, from the same rows; the same rows give the same bytes."""

from __future__ import annotations

import io
import math
import re
import warnings
from typing import Any

from wellcond.errors import MissingExtraError
from wellcond.report.heat_map import RAMP
from wellcond.report.load_runs import Comparison
from wellcond.report.series import Figure, Panel
from wellcond.report.shapes import (
    NUM_COLOURS,
    Grid,
    cut,
    layers_of,
    log_axis,
    map_by_method,
    map_over_steps,
    panel_bars,
    panel_budget,
    panel_lines,
)
from wellcond.report.tuning_plots import draw_tuned, tuned_curves

COLOURS = ("#2969a8", "#c2571a", "#2e8056", "#9a3b86", "#8a6d0b", "#147f91", "#b3261e", "#6a5acd", "#4b5563",
           "#6b8e00")  # fmt: skip
PART_COLOURS = ("#2969a8", "#7fb2dc", "#c2571a", "#8a6d0b", "#9aa6b2")
DASHES: tuple[Any, ...] = ("-", ":", "-.", (0, (8, 3)))
SETTINGS: Any = {
    "svg.hashsalt": "wellcond", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e9ec",
    "axes.axisbelow": True, "path.simplify": False, "text.usetex": False,
}  # fmt: skip
COLUMNS = 3


def draw_static(comparison: Comparison, figure: Figure) -> dict[str, bytes]:
    """Bytes of a figure by file ending, `png` and `svg`.

    Raises: MissingExtraError if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report") from error
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        # Labels may hold any character; one that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        whole = figure.kind in ("stack", "map_by_method")
        count = 1 if whole else len(figure.panels)
        columns = min(count, 2 if figure.kind == "bars" else COLUMNS)
        rows = math.ceil(count / columns)
        canvas = Canvas(
            figsize=_size(comparison, figure, rows, columns),
            dpi=110,
            layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06),
        )
        FigureCanvasAgg(canvas)
        axes = canvas.subplots(rows, columns, squeeze=False).ravel()
        if whole:
            _draw_whole(comparison, figure, canvas, axes[0])
        else:
            for panel, ax in zip(figure.panels, axes[:count], strict=True):
                _draw_panel(comparison, figure, panel, canvas, ax)
        for ax in axes[count:]:
            ax.set_axis_off()
        canvas.suptitle(tidy(figure.title), fontsize=11, fontweight="bold")
        _legend(comparison, figure, canvas)
        png = save_canvas(canvas, "png")
        canvas.set_layout_engine("none")  # everything has its place by now; finding it again takes as long as drawing
        return {"png": png, "svg": save_canvas(canvas, "svg")}


def _size(comparison: Comparison, figure: Figure, rows: int, columns: int) -> tuple[float, float]:
    if figure.kind in ("bars", "intervals", "stack"):
        return max(4.6 * columns, 7.0), rows * (1.3 + 0.32 * len(comparison.methods))
    if figure.kind.startswith("map"):
        height = 1.6 + 0.2 * min(len(layers_of(figure)), 40)
        return max(4.0 * columns, 2.5 + 1.1 * len(figure.panels) if columns == 1 else 0.0, 5.0), rows * height
    return max(4.0 * columns, 8.0), 2.9 * rows + 0.5 + 0.08 * len(comparison.methods)


def save_canvas(canvas: Any, kind: str) -> bytes:
    """The file's bytes, without `savefig`, which would draw everything once more to find a size that is known."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    written = io.BytesIO()
    if kind == "png":
        FigureCanvasAgg(canvas).print_png(written, metadata={"Software": None})
    else:
        FigureCanvasSVG(canvas).print_svg(written, metadata={"Date": None, "Creator": None})
    return written.getvalue()


def tidy(text: str) -> str:
    """Characters that cannot be drawn at all go, and no text is read as a formula."""
    return re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]", " ", text).replace("$", r"\$")


def _colour(method: int) -> str:
    return COLOURS[method % NUM_COLOURS]


def _legend(comparison: Comparison, figure: Figure, canvas: Any) -> None:
    if figure.kind not in ("lines", "tuned"):
        return
    from matplotlib.lines import Line2D

    curves: Any = tuned_curves if figure.kind == "tuned" else panel_lines
    drawn = {curve.method for panel in figure.panels for curve in curves(comparison, figure, panel.name)}
    handles = [
        Line2D([], [], color=_colour(at), linestyle=DASHES[at // NUM_COLOURS % len(DASHES)]) for at in sorted(drawn)
    ]
    # A leading underscore would hide the entry.
    labels = [re.sub("^_", " _", tidy(cut(comparison.methods[at], 40))) for at in sorted(drawn)]
    fits = int(canvas.get_figwidth() * 11 / (max(map(len, labels), default=0) + 7))  # 11 characters to the inch
    columns = max(1, min(len(labels), fits))
    canvas.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _draw_panel(comparison: Comparison, figure: Figure, panel: Panel, canvas: Any, ax: Any) -> None:
    if figure.kind == "lines":
        _draw_lines(comparison, figure, panel, ax)
    elif figure.kind == "tuned":
        draw_tuned(ax, tuned_curves(comparison, figure, panel.name), COLOURS, DASHES)
        ax.set_xlabel(tidy(panel.name))
        ax.set_ylabel(tidy(panel.y_label))
    elif figure.kind == "map_over_steps":
        _draw_map(canvas, ax, figure, map_over_steps(figure, panel.name, layers_of(figure)), "step")
    else:
        _draw_bars(comparison, figure, panel, ax)
    ax.set_title(tidy(cut(panel.title, 44)), fontsize=9)


def _draw_whole(comparison: Comparison, figure: Figure, canvas: Any, ax: Any) -> None:
    if figure.kind == "map_by_method":
        _draw_map(canvas, ax, figure, map_by_method(figure), "")
        return
    names = [m for m in comparison.methods if any(row.series == m for row in figure.rows)]
    left = [0.0] * len(names)
    for at, panel in enumerate(figure.panels):
        values = {bar.name: bar.mean for bar in panel_bars(comparison, figure, panel.name)}
        widths = [values.get(name, 0.0) for name in names]
        ax.barh(range(len(names)), widths, 0.6, left=left, color=PART_COLOURS[at], label=panel.title)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    _method_axis(ax, names)
    ax.set_xlabel(figure.panels[0].y_label)
    canvas.legend(frameon=False, ncols=len(figure.panels), loc="outside lower center")


def _draw_lines(comparison: Comparison, figure: Figure, panel: Panel, ax: Any) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    lines = panel_lines(comparison, figure, panel.name)
    for line in lines:
        dash = DASHES[line.method // NUM_COLOURS % len(DASHES)] if line.num_seeds else "--"
        ax.plot(line.x, line.y, color=_colour(line.method), linestyle=dash, linewidth=1.6 if line.num_seeds else 1.0,
                marker="o" if len(line.x) <= 40 else None, markersize=2.5)  # fmt: skip
        if line.low is not None and line.high is not None:
            ax.fill_between(line.x, line.low, line.high, color=_colour(line.method), alpha=0.16, linewidth=0)
    if panel.log:
        low, high, ticks = log_axis(panel, lines)
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(FixedLocator(list(ticks)))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_yticklabels(list(ticks.values()))
        ax.set_ylim(low, high)
    elif panel.span is not None:
        ax.set_ylim(panel.span[0] - 0.03, panel.span[1] + 0.03)
    ax.set_xlabel(figure.x_label)
    ax.set_ylabel(tidy(panel.y_label))


def _draw_bars(comparison: Comparison, figure: Figure, panel: Panel, ax: Any) -> None:
    bars, budget = panel_bars(comparison, figure, panel.name), panel_budget(figure, panel.name)
    interval = figure.kind == "intervals"
    for at, bar in enumerate(bars):
        if interval:
            if math.isfinite(bar.low):
                ax.plot([bar.low, bar.high], [at, at], color=_colour(bar.method), linewidth=2, marker="|")
            ax.plot([bar.mean], [at], color=_colour(bar.method), marker="o", markersize=7)
        elif math.isfinite(bar.mean):
            ax.barh([at], [bar.mean], 0.6, color=_colour(bar.method), alpha=0.55)
        shown = bar.seeds or ({"": bar.mean} if math.isinf(bar.mean) else {})
        for i, value in enumerate(shown.values()):
            place = value if math.isfinite(value) else budget
            if place is not None:
                ax.plot([place], [at + 0.11 * (i - (len(shown) - 1) / 2)], color=_colour(bar.method), markersize=4.5,
                        marker="o" if math.isfinite(value) else ">", markeredgecolor="white", markeredgewidth=0.5,
                        zorder=4)  # fmt: skip
    upright = 0.0 if interval else budget
    if upright is not None:
        ax.axvline(upright, color="#5b6570", linestyle=":", linewidth=1)
    _method_axis(ax, [bar.name for bar in bars])
    ax.set_xlabel(tidy(cut(panel.y_label, 48)))


def _method_axis(ax: Any, names: list[str]) -> None:
    ax.set_yticks(range(len(names)), [tidy(cut(name)) for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(visible=False, axis="y")


def _draw_map(canvas: Any, ax: Any, figure: Figure, grid: Grid, x_label: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("ramp", [tuple(c / 255 for c in rgb) for rgb in RAMP])
    low, high = figure.panels[0].span or (0.0, 1.0)
    picture = ax.imshow(grid.values, aspect="auto", cmap=ramp, vmin=low, vmax=max(high, low + 0.1))
    canvas.colorbar(picture, ax=ax, label="log₁₀ κ", shrink=0.9)
    every = max(1, math.ceil(len(grid.columns) / 6)) if x_label else 1
    columns = range(0, len(grid.columns), every)
    turned = 0 if x_label or len(grid.columns) <= 6 else 30
    ax.set_xticks(
        columns,
        [tidy(cut(grid.columns[at], 18)) for at in columns],
        rotation=turned,
        ha="right" if turned else "center",
    )
    layers = range(0, len(grid.layers), max(1, math.ceil(len(grid.layers) / 12)))
    ax.set_yticks(layers, [tidy(cut(grid.layers[at], 16)) for at in layers])
    ax.grid(visible=False)
    ax.set_xlabel(x_label)
    ax.set_ylabel("layer")
