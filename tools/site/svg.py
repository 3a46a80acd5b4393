"""How a figure of the documentation becomes part of a page: SVG in the colour of the page's text, and a caption."""

from __future__ import annotations

import html
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

import wellcond as wc
from wellcond.lab.report.draw import STYLE, inline_svg, styled, to_svg

INK = "#010203"  # becomes the colour of the page's text
OF_SITE = {
    "axes.titlesize": 9.5,
    "legend.frameon": False,
    "savefig.transparent": True,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
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
    with styled(STYLE | OF_SITE | {"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore", wc.NumericalWarning)  # lambda = 10 is shown because it saturates
        drawn = FIGURES[name].draw()
        svg = to_svg(drawn)
        plt.close(drawn)
    return inline_svg(svg, name, {INK: "currentColor"})
