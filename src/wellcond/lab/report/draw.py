"""How every figure of the laboratory is drawn: one style, and SVG with the same bytes for the same numbers."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from wellcond.errors import needs_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e")
GREY, BETTER, WORSE = "0.45", COLOURS[4], COLOURS[2]
STYLE: dict[str, Any] = {
    "svg.hashsalt": "wellcond",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@contextmanager
def styled(**settings: Any) -> Iterator[None]:
    """Draw and save in the style of the laboratory, with settings of one's own such as ``axes_grid=True``."""
    with needs_extra("matplotlib", "report"):
        import matplotlib
    with matplotlib.rc_context(STYLE | {key.replace("_", "."): value for key, value in settings.items()}):
        yield


def subplots(
    rows: int, columns: int, width: float, height: float, *, layout: str | None = "constrained", **options: Any
) -> tuple[Figure, Any]:
    """A figure of some inches and an array of its axes; `options` are those of `Figure.subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)  # type: ignore[arg-type]
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def to_svg(figure: Figure, *, tight: bool = True) -> bytes:
    """A figure as SVG, without a date."""
    written = io.BytesIO()
    figure.savefig(written, format="svg", metadata={"Date": None}, bbox_inches="tight" if tight else None)
    return written.getvalue()
