"""Boxes and masks over an image as PNG; the same records give the same bytes."""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

import numpy as np

from wellcond.errors import MissingExtraError
from wellcond.lab.report.detection_records import Found, Picture
from wellcond.lab.report.detections import colours_of, is_labelled, objects_in_words
from wellcond.lab.report.run_record import RunRecordError
from wellcond.lab.report.samples import visible
from wellcond.lab.report.shapes import cut
from wellcond.lab.report.static_figures import SETTINGS, save_canvas, tidy

COLUMNS, WIDTH = 3, 3.6
"""Panels beside each other, and the width of one in inches."""


def draw_detections(picture: Picture) -> bytes:
    """A picture as PNG: the truth, then what each method found.

    Raises:
        MissingExtraError: matplotlib is not installed.
        RunRecordError: the image in the record cannot be decoded.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise MissingExtraError("matplotlib", "report") from error
    panels = [(f"truth, {objects_in_words(len(picture.truth))}", picture.truth)]
    panels += [(f"{part.method}, seed {part.seed}", part.shown(len(picture.truth))) for part in picture.predictions]
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    tall = WIDTH * min(2.0, max(0.4, picture.height / picture.width)) + 0.3
    image = _decode(picture)
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        # Labels may hold any character; one that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        canvas = Canvas(figsize=(WIDTH * columns, tall * rows), dpi=85, layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.subplots(rows, columns, squeeze=False).ravel()
        for ax in axes:
            ax.set_axis_off()
        for ax, (title, objects) in zip(axes, panels, strict=False):
            ax.set_title(tidy(cut(title, 40)), fontsize=9)
            _draw(ax, picture, image, objects)
        return save_canvas(canvas, "png")


def _decode(picture: Picture) -> Any:
    from PIL import Image  # matplotlib needs it, so it is there

    try:
        image = Image.open(io.BytesIO(picture.jpeg), formats=["JPEG"])
        return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RunRecordError(
            picture.source, f"the JPEG of image {picture.image_id} cannot be decoded ({error})", "Repeat the run."
        ) from error


def _draw(ax: Any, picture: Picture, image: Any, objects: list[Found]) -> None:
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    extent = (0, picture.width, picture.height, 0)
    ax.imshow(image, extent=extent, interpolation="bilinear")
    colours = colours_of(picture)
    for found in sorted(objects, key=lambda found: -found.box[2] * found.box[3]):
        values = (np.arange(len(found.runs)) % 2).astype(float)
        mask = np.repeat(values, found.runs).reshape(picture.width, picture.height).T
        overlay = np.empty((*mask.shape, 4))
        overlay[:] = to_rgba(colours[found.category])
        overlay[..., 3] = 0.45 * mask
        ax.imshow(overlay, extent=extent, interpolation="nearest")
        x, y, width, height = found.box
        ax.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=colours[found.category], linewidth=1.4))
        if is_labelled(found, picture):
            text = ax.text(
                max(x, 0.0) + 0.01 * picture.width, max(y, 0.0) + 0.01 * picture.height,
                tidy(cut(visible(found.label))), color="white", fontsize=7, fontweight="bold", va="top",
                clip_on=True,
            )  # fmt: skip
            text.set_path_effects([withStroke(linewidth=1.8, foreground="black")])
    ax.set_xlim(0, picture.width)
    ax.set_ylim(picture.height, 0)
