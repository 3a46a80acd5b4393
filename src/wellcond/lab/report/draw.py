"""How every figure is drawn: one style, SVG with the same bytes for the same numbers, and SVG inside of a page."""

from __future__ import annotations

import io
import math
import re
import statistics
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from wellcond.errors import needs_extra
from wellcond.lab.report.figures import BUDGET, HIGH, HIGH_END, LOW, LOW_END, MEAN, Figure, Panel, Row
from wellcond.lab.report.names import rename
from wellcond.lab.report.table import cut
from wellcond.pages import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e")
"""Of figures that are made for a document; those of a report have the colours of its page."""
GREY, BETTER, WORSE = "0.45", COLOURS[4], COLOURS[2]
STYLE: dict[str, Any] = {
    "svg.hashsalt": "wellcond",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
REPORT = {
    "font.family": "DejaVu Sans",
    "axes.grid": True,
    "grid.color": "#e6e9ec",
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "path.simplify": False,
    "text.usetex": False,
}
NUM_COLOURS = 10
FAR = 4.0
"""Times the median distance from zero beyond which a method gets a triangle instead of a place on the axis."""
DASHES: tuple[Any, ...] = ("-", ":", "-.", (0, (8, 3)))
MOST_MARKED = 40
"""Points of a curve beyond which it has no markers."""
CHARACTER = 0.075
"""Width of one in inches."""
SVG, LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


# For every figure.


@contextmanager
def styled(settings: Mapping[str, Any] = STYLE) -> Iterator[None]:
    """Draw and save in the style of the laboratory, or under some settings of matplotlib."""
    with needs_extra("matplotlib", "report"):
        import matplotlib
    chosen: Any = dict(settings)  # matplotlib lists the names that it takes
    with matplotlib.rc_context(chosen), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a character that the font lacks is drawn as a box
        warnings.filterwarnings("ignore", "overflow", RuntimeWarning)  # of ticks beyond an axis that ends at 1e307
        yield


def subplots(
    rows: int, columns: int, width: float, height: float, *, layout: str | None = "constrained", **options: Any
) -> tuple[Canvas, Any]:
    """A figure of some inches and an array of its axes; `options` are those of `Figure.subplots`."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(width, height), layout=layout)  # type: ignore[arg-type]
    return canvas, canvas.subplots(rows, columns, squeeze=False, **options)


def to_svg(canvas: Canvas, *, tight: bool = True) -> bytes:
    """A figure as SVG, without a date."""
    written = io.BytesIO()
    canvas.savefig(written, format="svg", metadata={"Date": None}, bbox_inches="tight" if tight else None)
    return written.getvalue()


def inline_svg(svg: bytes, name: str, colours: Mapping[str, str]) -> str:
    """SVG as an element of a page: fonts and `colours` of the page, no metadata, ids that no other figure has."""
    text = svg.decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg ") :], flags=re.DOTALL)
    for drawn, shown in colours.items():
        text = text.replace(drawn, shown)
    text = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", text)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", text)


# Figures of a report.


@dataclass
class Pen:
    """Draws the series of a figure, and notes what the points of each show when they are pointed at."""

    figure: Figure
    shown: list[tuple[int, str, Sequence[str]]] = field(default_factory=list)
    """Place of the method, text of the series and texts of its points, in the order of drawing."""

    def look(self, series: str) -> tuple[int, str, Any]:
        """Place of the method of a series (one of a run that did not finish begins with it), its colour and dashes."""
        found = [name for name in self.figure.methods if series == name or series.startswith(f"{name}, seed ")]
        place = self.figure.methods.index(max(found, key=len))
        return place, palette()[f"c{place % NUM_COLOURS}"], DASHES[place // NUM_COLOURS % 4]

    def name(self, series: str) -> str:
        """A series as a reader knows it."""
        return rename(series, self.figure.methods)

    def note(self, place: int, text: str, points: Sequence[str] = ()) -> str:
        """The id of an artist of a series."""
        self.shown.append((place, text, points))
        return f"series-{len(self.shown) - 1}"

    def draw(self, ax: Axes, panel: Panel) -> None:
        """One panel."""
        if self.figure.bars:
            self.draw_bars(ax, panel)
        else:
            self.draw_lines(ax, panel)

    def draw_lines(self, ax: Axes, panel: Panel) -> None:
        """Means with bands; a method without common steps falls back to its seeds, one line each."""
        x_label = panel.x_label or self.figure.x_label
        values: list[float] = []
        for series, seeds in panel.by_series().items():
            means = [seeds[name] for name in (MEAN, LOW, HIGH)] if MEAN in seeds else []
            count = len(seeds) - 3 if means else 1 if series in self.figure.methods else 0
            place, colour, dashes = self.look(series)
            text = f"{self.name(series)}, {({0: 'not in any mean', 1: '1 seed'}).get(count, f'mean of {count} seeds')}"
            if count > 1:
                (x, low), (_, high) = self.points(means[1]), self.points(means[2])
                ax.fill_between(x, low, high, color=colour, alpha=0.16, lw=0, gid=self.note(place, text))
                values += [*low, *high]
            for rows in means[:1] or seeds.values():
                x, y = self.points(rows)
                marked = "o" if len(x) <= MOST_MARKED else None
                places = [f"{text}\n{x_label} {a:g}\n{panel.y_label} {b:.4g}" for a, b in zip(x, y, strict=True)]
                ax.plot(
                    x,
                    y,
                    color=colour,
                    linestyle=dashes if count else "--",
                    lw=1.6 if count else 1.0,
                    marker=marked,
                    ms=3.2 if count else 2.0,
                    gid=self.note(place, text, places if marked else ()),
                )
                values += y
        ax.set_xlabel(_tidy(cut(x_label, 48)))
        ax.set_ylabel(_tidy(cut(panel.y_label, 48)))
        if panel.log:
            _set_log(ax, "y", log_range(values))
        if panel.x_label:  # the values that were tried, at most five of them
            tried = sorted({row.step for row in panel.rows})
            if tried[0] > 0:
                _set_log(ax, "x")
            ticks = tried[:: math.ceil(len(tried) / 5)]
            ax.xaxis.set_ticks(ticks, [f"{value:.3g}" for value in ticks])
            ax.xaxis.set_ticks([], minor=True)

    def points(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        """Coordinates of rows; a value that is not finite has no place on an axis."""
        by_epoch = self.figure.x_label == "epoch"
        shown = [(row.epoch if by_epoch else row.step, row.value) for row in rows]
        shown = [(x, y if math.isfinite(y) else math.nan) for x, y in shown if math.isfinite(x)]
        return [x for x, _ in shown], [y for _, y in shown]

    def draw_bars(self, ax: Axes, panel: Panel) -> None:
        """The mean of each method, with its interval if it has one, and its seeds, beside the line of a target."""
        bars = {
            name: {seed: rows[0].value for seed, rows in seeds.items()} for name, seeds in panel.by_series().items()
        }
        target = bars.pop(BUDGET, {}).get(MEAN, math.nan)
        span = _readable_span(list(bars.values())) if target == 0 else None
        if math.isfinite(target):
            ax.axvline(target, color=palette()["soft"], lw=0.8, ls=":")
        for at, (series, found) in enumerate(bars.items()):
            mean, low, high = (found.get(name, math.nan) for name in (MEAN, LOW_END, HIGH_END))
            seeds = {name: value for name, value in found.items() if name not in (MEAN, LOW_END, HIGH_END)}
            place, colour, _ = self.look(series)
            name = self.name(series)
            text = f"{name}: mean {mean:.4g}" + (f" [{low:+.4g}, {high:+.4g}]" if math.isfinite(low) else "")
            ax.text(0.01, at - 0.2, _tidy(cut(name, 60)), transform=ax.get_yaxis_transform(), va="bottom", fontsize=8.5)
            dots: dict[str, Any] = {"color": colour, "ls": "", "mec": palette()["card"], "mew": 0.8}
            if span is not None and not span[0] <= mean <= span[1]:
                below, inset = mean < span[0], 0.01 * (span[1] - span[0])
                edge = span[0] + inset if below else span[1] - inset
                ax.plot(edge, at + 0.1, marker="<" if below else ">", ms=8, gid=self.note(place, text, [text]), **dots)
                continue
            ax.plot([low, high], [at + 0.1, at + 0.1], color=colour, lw=1.6, gid=self.note(place, text))
            ax.plot(mean, at + 0.1, marker="o", ms=6.5, gid=self.note(place, text, [text]), **dots)
            gap, middle = min(0.08, 0.4 / max(len(seeds), 1)), (len(seeds) - 1) / 2
            for number, (seed, value) in enumerate(seeds.items()):
                reached, y = math.isfinite(value), at + 0.1 + gap * (number - middle)
                label = f"{name}, seed {seed}: {f'{value:.5g}' if reached else 'never'}"
                ax.plot(
                    value if reached else target,
                    y,
                    marker="o" if reached else ">",
                    ms=4.5 if reached else 8,
                    gid=self.note(place, label, [label]),
                    **dots,
                )
        ax.set_xlabel(_tidy(cut(panel.y_label, 48)))
        ax.yaxis.set_ticks([])
        ax.set_ylim(len(bars) - 0.6, -0.6)
        ax.grid(visible=False, axis="y")
        if span:
            ax.set_xlim(span)


def draw_static(figure: Figure) -> bytes:
    """A figure with its title and a legend as an SVG file."""
    with styled(STYLE | REPORT):
        from matplotlib.lines import Line2D

        pen, columns = Pen(figure), min(len(figure.panels), 3)
        rows, width = math.ceil(len(figure.panels) / columns), columns * (4.2 if columns > 1 else 6.8)
        series = dict.fromkeys(name for panel in figure.panels for name in panel.by_series() if name != BUDGET)
        looks = {place: (colour, dashes) for place, colour, dashes in sorted(map(pen.look, series), key=lambda a: a[0])}
        # A leading underscore would hide the entry.
        labels = (
            [] if figure.bars else [re.sub("^_", " ", _tidy(cut(pen.name(figure.methods[at]), 40))) for at in looks]
        )
        beside = max(1, int(width / CHARACTER / (max(map(len, labels), default=0) + 6)))
        height = rows * (_height(figure) + 0.5) + 0.2 * len(labels) / beside + 0.4
        canvas, axes = subplots(rows, columns, width, height)
        canvas.suptitle(_tidy(cut(figure.title, int(width / CHARACTER))), fontsize=11, fontweight="bold")
        for ax in axes.flat[len(figure.panels) :]:
            ax.axis("off")
        for ax, panel in zip(axes.flat, figure.panels, strict=False):
            ax.set_title(_tidy(cut(panel.title, 44)))
            pen.draw(ax, panel)
        handles = [Line2D([], [], color=colour, linestyle=dashes) for colour, dashes in looks.values()]
        if labels:
            canvas.legend(handles, labels, loc="outside lower center", ncols=min(beside, len(labels)), frameon=False)
        return to_svg(canvas, tight=False)


def draw_panels(figure: Figure) -> list[tuple[str, str, list[int]]]:
    """Every panel for a page: its title, an SVG element, and the places of its methods.

    Series can be hidden by `data-method`, the place of their method; pointing at a point shows what it is.
    """
    made = []
    width = 4.2
    with styled(STYLE | REPORT | {"savefig.transparent": True}):
        for at, panel in enumerate(figure.panels):
            pen = Pen(figure)
            height = _height(figure)
            canvas, [[ax]] = subplots(1, 1, width, height, layout=None)  # a computed layout takes twice as long
            left = 0.15 if figure.bars else 0.8
            canvas.subplots_adjust(left / width, 0.5 / height, 1 - 0.15 / width, 1 - 0.1 / height)
            pen.draw(ax, panel)
            named = _with_titles(to_svg(canvas, tight=False), pen.shown)
            names = {colour: name for name, colour in palette().items() if name != "accent"}  # which is c0 as well
            colours = {colour: f"var(--{name})" for colour, name in (names | {"#000000": "ink"}).items()}
            svg = inline_svg(named, f"{figure.name}-{at}", colours)
            made.append((panel.title, svg, sorted({place for place, _, _ in pen.shown})))
    return made


def _with_titles(svg: bytes, shown: Sequence[tuple[int, str, Sequence[str]]]) -> bytes:
    """SVG whose series are marked with the place of their method and say what they are."""
    for prefix, space in (("", SVG), ("xlink", LINK)):
        ElementTree.register_namespace(prefix, space)
    root = ElementTree.fromstring(svg)
    groups = {group.get("id"): group for group in root.iter(f"{{{SVG}}}g")}
    for number, (place, text, points) in enumerate(shown):
        group = groups[f"series-{number}"]
        group.attrib.pop("id")
        group.set("data-method", str(place))
        marks = [use for use in group.iter(f"{{{SVG}}}use")]
        for use, said in zip(marks, points, strict=False) if len(marks) == len(points) else ():
            ElementTree.SubElement(use, f"{{{SVG}}}title").text = _plain(said)
        title = ElementTree.Element(f"{{{SVG}}}title")
        title.text = _plain(text)
        group.insert(0, title)
    root.set("width", "100%")
    root.attrib.pop("height")
    return ElementTree.tostring(root)


def log_range(values: Iterable[float]) -> tuple[float, float]:
    """Both ends of a logarithmic axis, as powers of ten, for some values."""
    usable = [value for value in values if 0 < value < math.inf]
    low, high = min(usable, default=1.0), max(usable, default=10.0)
    # In logarithms, since bounds come near the largest float: room at both ends, and never beyond it. At least half a
    # decade, since the axis would zoom into the rounding of flat curves.
    bottom, top = math.log10(low), math.log10(high)
    room = max(0.04 * (top - bottom), 0.25 - (top - bottom) / 2)
    return max(bottom - room, -307), min(top + room, 307)


def _set_log(ax: Axes, which: str, ends: tuple[float, float] | None = None) -> None:
    """A logarithmic axis, with plain text at its ticks: formulas take ten times as long to draw."""
    from matplotlib.ticker import MaxNLocator

    getattr(ax, f"set_{which}scale")("log")
    axis = getattr(ax, f"{which}axis")
    axis.set_minor_formatter("")
    if ends and ends[1] - ends[0] < 1:
        axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter("{x:g}")
    if ends:
        getattr(ax, f"set_{which}lim")(*(10.0**end for end in ends))


def _height(figure: Figure) -> float:
    """Height of a panel in inches."""
    if not figure.bars:
        return 3.3
    most = max(len({row.series for row in panel.rows} - {BUDGET}) for panel in figure.panels)
    return 0.9 + 0.42 * max(most, 2)


def _readable_span(bars: list[dict[str, float]]) -> tuple[float, float] | None:
    """Ends of the axis where a few methods are so far away that the others could not be told apart; else None."""
    points = [[value for value in bar.values() if math.isfinite(value)] for bar in bars]
    typical = statistics.median(max(map(abs, values)) for values in points)
    near = [values for bar, values in zip(bars, points, strict=True) if abs(bar[MEAN]) <= FAR * typical]
    if not near or len(near) == len(bars):
        return None
    low, high = min(0.0, *(min(values) for values in near)), max(0.0, *(max(values) for values in near))
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


@cache
def palette() -> dict[str, str]:
    """Colours of the light scheme by their names in the style sheets, such as `c0`."""
    own = (resources.files("wellcond.lab.report") / "templates" / "comparison.css").read_text("utf-8")
    return dict(reversed(re.findall(r"--(\w+):(#\w{6})", style() + own)))


def _plain(text: str) -> str:
    """Text without characters that XML cannot hold."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]", " ", text)


def _tidy(text: str) -> str:
    """Text for a figure: nothing in it is read as a formula."""
    return re.sub(r"\s", " ", _plain(text)).replace("$", r"\$")
