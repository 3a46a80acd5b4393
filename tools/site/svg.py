"""How a figure of the documentation becomes part of a page: SVG in the colour of the page's text, and a caption."""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

import wellcond as wc

INK = "#010203"  # becomes the colour of the page's text
STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.transparent": True,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class SiteFigure:
    """A figure: how it is drawn, what stands for it where it cannot be seen, and what is written below it."""

    draw: Callable[[], plt.Figure]
    alt: str
    caption: str


FIGURES: dict[str, SiteFigure] = {}


def figure(name: str, *, alt: str, caption: str) -> Callable[[Callable[[], plt.Figure]], Callable[[], plt.Figure]]:
    """Name a function that draws a figure."""

    def register(draw: Callable[[], plt.Figure]) -> Callable[[], plt.Figure]:
        FIGURES[name] = SiteFigure(draw, alt, caption)
        return draw

    return register


def figure_as_html(name: str) -> str:
    """A figure with its caption, to stand in a page."""
    found = FIGURES[name]
    label = f'<svg role="img" aria-label="{html.escape(found.alt)}" '
    drawing = figure_as_svg(name).replace("<svg ", label, 1)
    caption = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(found.caption))
    return f'<figure class="wc-figure" id="figure-{name}">{drawing}<figcaption>{caption}</figcaption></figure>'


def figure_as_svg(name: str) -> str:
    """A figure as an SVG element in the colour of the text around it; its ids are those of no other figure."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore", wc.NumericalWarning)  # lambda = 10 is shown because it saturates
        drawn = FIGURES[name].draw()
        file = io.StringIO()
        drawn.savefig(file, format="svg", metadata={"Date": None}, bbox_inches="tight")
        plt.close(drawn)
    text = file.getvalue()
    text = text[text.index("<svg ") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", text)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", text)
