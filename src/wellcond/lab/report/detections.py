"""Boxes and masks that models found, drawn over the image beside the truth."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from typing import Any

from wellcond.lab.report.detection_records import Found, Picture
from wellcond.lab.report.markup import Markup, tag
from wellcond.lab.report.samples import visible
from wellcond.lab.report.table import plain_markdown

LEAD = (
    "What the models find in the first evaluation images after training, beside the truth. A colour is a category, the "
    "same in all pictures of an image; of the predictions the best are drawn, as many as there are objects but at "
    "least five, each with its score. Point at a box to read its label."
)
COLOURS = ("#ff4d4d", "#35c3ff", "#ffd21f", "#5fe36b", "#ff7be5", "#ff9a2e", "#b59bff", "#2ff0d0")
"""Bright, as they must be seen on photographs."""
FINEST = 256
"""Columns of a mask that are drawn at most."""
SMALLEST_LABELLED = 0.02
"""Share of the image that a box must cover for its label to be drawn; others only show theirs when pointed at."""


def detection_parts(pictures: Sequence[Picture]) -> list[dict[str, Any]]:
    """What the page shows of each image: the truth, then what each method found."""
    return [_part(at, picture) for at, picture in enumerate(pictures)]


def _part(at: int, picture: Picture) -> dict[str, Any]:
    colours = colours_of(picture)
    name = f"picture-{at}"
    href = f"data:image/jpeg;base64,{base64.b64encode(picture.jpeg).decode('ascii')}"
    image = tag("image", id=name, href=href, width=picture.width, height=picture.height, preserveAspectRatio="none")
    again = tag("use", href=f"#{name}")
    count = len(picture.truth)
    # Beside the truth there is room for two columns of methods.
    rows = max(1, math.ceil(len(picture.predictions) / 2))
    panels = [_panel(picture, "Truth", objects_in_words(count), image, picture.truth, colours, rows=rows)]
    for part in picture.predictions:
        shown = part.shown(count)
        note = f"the best {len(shown)} of {len(part.objects)} recorded" if shown else "nothing found"
        panels.append(_panel(picture, f"{part.method}, seed {part.seed}", note, again, shown, colours))
    return {
        "kind": "detections",
        "title": f"Image {picture.image_id}: {visible(picture.name)}",
        "colours": [(visible(category), colour) for category, colour in colours.items()],
        "panels": panels,
    }


def colours_of(picture: Picture) -> dict[str, str]:
    """A colour for each category of an image; they come round again after eight."""
    return {category: COLOURS[at % len(COLOURS)] for at, category in enumerate(picture.categories)}


def objects_in_words(count: int) -> str:
    """How many objects there are."""
    return "1 object" if count == 1 else f"{count} objects" if count else "no objects"


def _panel(
    picture: Picture,
    title: str,
    note: str,
    image: Markup,
    objects: Sequence[Found],
    colours: dict[str, str],
    *,
    rows: int = 1,
) -> dict[str, Any]:
    unit = max(picture.height, picture.width) / 250
    # Large objects first: small ones stay on top, and can be pointed at.
    ordered = sorted(objects, key=lambda found: -found.box[2] * found.box[3])
    shapes = [_shape(found, picture, colours[found.category], unit) for found in ordered]
    labels = [_label(found, picture, unit) for found in ordered if is_labelled(found, picture)]
    words = ", ".join(visible(found.label) for found in objects) or note
    drawing = tag(
        "svg", image, *shapes, *labels, viewBox=f"0 0 {picture.width} {picture.height}", role="img",
        aria_label=f"{title}: {words}",
    )  # fmt: skip
    return {"title": title, "note": note, "drawing": drawing, "rows": rows}


def _shape(found: Found, picture: Picture, colour: str, unit: float) -> Markup:
    x, y, width, height = found.box
    return tag(
        "g",
        tag("title", visible(found.label)),
        tag("path", d=mask_path(found.runs, picture.height, picture.width), fill=colour, fill_opacity=0.45,
            shape_rendering="crispEdges"),
        tag("rect", x=x, y=y, width=max(0.0, width), height=max(0.0, height), fill="transparent", stroke=colour,
            stroke_width=1.5 * unit),
    )  # fmt: skip


def is_labelled(found: Found, picture: Picture) -> bool:
    """Whether there is room for its label."""
    return found.box[2] * found.box[3] >= SMALLEST_LABELLED * picture.height * picture.width


def _label(found: Found, picture: Picture, unit: float) -> Markup:
    x, y = found.box[:2]
    size = 11 * unit
    # Inside of the picture, also where a box begins outside.
    left, base = max(x, 0.0) + 2 * unit, max(y, 0.0) + size
    return tag(
        "text", visible(found.label), x=left, y=min(base, picture.height - 2 * unit), class_="found-label",
        style=f"font-size:{size:.4g}px;stroke-width:{2.5 * unit:.4g}px", pointer_events="none",
    )  # fmt: skip


def mask_path(runs: Sequence[int], height: int, width: int) -> str:
    """An SVG path of rectangles that cover a mask, given by its runs; of a wide image every second column or fewer.

    Example:
        >>> mask_path([1, 2, 2, 2, 1], height=4, width=2)
        'M0 1h2v2h-2z'
    """
    step = -(-width // FINEST)
    parts: list[str] = []
    open_at: dict[tuple[int, int], int] = {}
    columns = _column_parts(runs, height)
    for left in range(0, width + step, step):
        middle = left + step // 2
        here = columns.get(middle, []) if left < width else []
        # A part that the columns before have too becomes wider; one that ends here is written.
        for part in [part for part in open_at if part not in here]:
            start = open_at.pop(part)
            wide, tall = min(left, width) - start, part[1] - part[0]
            parts.append(f"M{start} {part[0]}h{wide}v{tall}h-{wide}z")
        for part in here:
            open_at.setdefault(part, left)
    return "".join(parts)


def _column_parts(runs: Sequence[int], height: int) -> dict[int, list[tuple[int, int]]]:
    """First row and the one behind the last of each part of each column that belongs to the object."""
    found: dict[int, list[tuple[int, int]]] = {}
    position = 0
    for at, run in enumerate(runs):
        end = position + run
        while at % 2 and position < end:
            column, row = divmod(position, height)
            stop = min(height, row + end - position)
            found.setdefault(column, []).append((row, stop))
            position += stop - row
        position = end
    return found


def file_name(at: int) -> str:
    """Name of the image file of a picture, without ending."""
    return f"detections_{at + 1}"


def detections_markdown(pictures: Sequence[Picture]) -> Iterator[str]:
    """Lines of a section, with the pictures as image files."""
    if not pictures:
        return
    yield from ("## Detections", "", "What the models find in the first evaluation images, beside the truth.", "")
    for at, picture in enumerate(pictures):
        title = plain_markdown(f"Image {picture.image_id}: {visible(picture.name)}")
        yield from (f"### {title}", "", f"![{title}](figures/{file_name(at)}.png)", "")
        for part in picture.predictions:
            shown = ", ".join(visible(found.label) for found in part.shown(len(picture.truth))) or "nothing found"
            yield f"- {plain_markdown(f'{part.method}, seed {part.seed}: {shown}')}"
        truth = ", ".join(visible(found.label) for found in picture.truth) or "no objects"
        yield from (f"- truth: {plain_markdown(truth)}", "")
