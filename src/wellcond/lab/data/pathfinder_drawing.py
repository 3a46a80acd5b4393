"""What Pathfinder images are made of, and how they are drawn: options, curves of paddles, and strokes.

Strokes are everything about one paddle, tabulated by its direction. Paddles begin on pixels and point in one of
finitely many directions: whole degrees for the first paddle of a curve, and towards one of the pixels on a small circle
for the others. So a paddle's pixels, its margin, and where the curve goes from there are looked up, not computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wellcond.lab.data.generated import GeneratorOptions

# The published values; lengths are in pixels.
PADDLE_LENGTH, PADDLE_THICKNESS = 2, 0.5
PADDLE_MARGIN = 1
"""Free pixels around a paddle; two paddles of a curve are twice as far apart."""
PADDING = 1
"""Width of the border that no paddle may enter."""
MARKER_RADIUS = 1.5
SCALE = 2
"""Lines and discs are drawn this much larger, then reduced with a Lanczos window."""
CURVE_CONTRAST, DISTRACTOR_CONTRAST = 1.5, 2.0
"""Brightness of a paddle, where 1 is that of the markers; every image is then scaled to the range 0 to 255."""
PADDLE_TRIES = 3
"""Directions drawn for the next paddle before its curve is given up."""
DISTRACTOR_TRIES = 5
"""Curves begun for each distractor before it is left out."""
REACH = PADDLE_LENGTH + math.ceil(PADDLE_THICKNESS) + PADDLE_MARGIN
"""Pixels from the start of a paddle that it and its margin can reach."""
NUM_DEGREES = 360
"""Directions below this index are whole degrees from -180; those above lead to the pixels of the circle."""
LANCZOS_LOBES = 3
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class PathfinderOptions(GeneratorOptions):
    """Options of `pathfinder`; the defaults are those of the published 32-pixel set."""

    image_size: int = Field(32, ge=12, le=128)
    contour_length: int = Field(14, ge=2, le=64)
    """Paddles in each of the two long curves; 14, 9 and 6 are the three difficulties of the Long Range Arena."""
    num_distractors: int | None = Field(None, ge=0, le=400)
    """Distractors to try for; by default as many as make 20 paddles, below 32 pixels in proportion to the area. Those
    that find no room are left out."""

    @property
    def identity(self) -> dict[str, Any]:
        """With the constants above by the names they had as options: the published numbers rest on these streams."""
        return super().identity | {
            "paddle_length": PADDLE_LENGTH,
            "paddle_thickness": PADDLE_THICKNESS,
            "paddle_margin": PADDLE_MARGIN,
            "padding": PADDING,
            "marker_radius": MARKER_RADIUS,
            "antialias_scale": SCALE,
            "curve_contrast": CURVE_CONTRAST,
            "distractor_contrast": DISTRACTOR_CONTRAST,
            "paddle_tries": PADDLE_TRIES,
            "distractor_tries": DISTRACTOR_TRIES,
            "continuity": 1.0,
            "distractor_length": None,
            "seed_distance": None,
        }

    @property
    def distinct(self) -> bool:
        """Small images repeat: of 1,000 at 12 pixels with two dashes, 278 were among 40,000 others."""
        return self.image_size < 32 or self.contour_length < 6

    @property
    def distractors(self) -> tuple[int, int]:
        """Distractors to try for, and the paddles in each."""
        length = max(1, self.contour_length // 3)
        usual = min(20, 20 * self.image_size**2 // 32**2) // length
        return usual if self.num_distractors is None else self.num_distractors, length


@dataclass(frozen=True, eq=False)
class Strokes:
    """Tables by direction k; offsets are (row, column), windows are squares of side 2 * REACH + 1, flattened."""

    line: Floats
    """(k, window): brightness 0 to 1 of a paddle that starts at the centre of the window and points to k."""
    margin: NDArray[np.float32]
    """(k, window): how far each pixel belongs to the paddle widened by its margin, 0 to 1."""
    head: Floats
    """(k, 2): from the start of a paddle to its end; to be applied with `move`, as the next two are."""
    back: Floats
    """(k, 2): from the end of a first paddle to its pivot, which lies before its start."""
    advance: Floats
    """(k, 2): from the pivot of one paddle to that of the next."""
    circle: Ints
    """(c, 2): pixels around a pivot at which a paddle may end."""
    turn_weight: Floats
    """(k, c): weight of going on to pixel c of the circle after direction k."""
    outward: Ints
    """(c,): direction from the pivot to the pixel of the circle."""
    inward: Ints
    """(c,): direction from the pixel of the circle to the pivot."""
    footprint: Ints
    """(k, f, 2): pixels that must be free for a first paddle; rows are filled up by repetition."""
    can_begin: Flags
    """(k,): whether a curve may begin in this direction; see `_begins_curves`."""


@cache
def make_strokes() -> Strokes:
    """The tables."""
    length, gap, window = PADDLE_LENGTH, PADDLE_MARGIN, 2 * REACH + 1
    # The pixels that a circle passes through, sampled at every pixel of its length.
    around = np.arange(0, 2 * np.pi, 1 / (length + gap))
    samples = (length + gap) * np.stack([np.sin(around), np.cos(around)], axis=-1)
    circle = np.unique(np.floor(samples).astype(np.int64), axis=0)
    outward = np.arctan2(circle[:, 0], circle[:, 1])
    angles = np.concatenate([np.deg2rad(np.arange(-180, 180)), outward, outward + np.pi])
    turns = np.abs((angles[:, None] - outward + np.pi) % (2 * np.pi) - np.pi)
    # By `math`, whose last digits differ less from machine to machine than numpy's.
    directions = np.array([(math.sin(angle), math.cos(angle)) for angle in angles])
    # The small part keeps sin(pi) = 1e-16 from being rounded up to 1.
    fine_end = np.ceil(length * SCALE * directions - 1e-9).astype(np.int64)
    line, margin, footprints = [], [], []
    for end in fine_end:
        fine = _digital_line(end)
        line.append(reduce_image(fine, window).ravel() / 255)
        wide = reduce_image(_dilate(fine), window) / 255
        margin.append(wide.ravel())
        # The pixels fully within the margin of a paddle, one further right and down: the published test for room.
        offsets = np.argwhere(wide >= 1) - REACH + 1
        footprints.append(offsets[(np.abs(offsets) <= length + gap).all(1)])
    longest = max(map(len, footprints))
    return Strokes(
        line=np.array(line),
        margin=np.array(margin, np.float32),
        head=length * directions,
        back=-(length + gap) * directions,
        advance=(length + 2 * gap) * directions,
        circle=circle,
        turn_weight=np.cos(np.minimum(turns, np.pi / 2)) ** 2,
        outward=NUM_DEGREES + np.arange(len(circle)),
        inward=NUM_DEGREES + len(circle) + np.arange(len(circle)),
        footprint=np.stack([np.resize(offsets, (longest, 2)) for offsets in footprints]),
        can_begin=np.array([_begins_curves(offsets) for offsets in footprints]),
    )


def move(pixels: Ints, offsets: Floats) -> Ints:
    """The pixels that are reached from others, rounded up.

    As published, an offset along an axis has 1e-16 across it instead of 0, which is lost in the sum except near the
    upper and left borders: there curves drift by one pixel per paddle. Without it a small convolutional network tells
    these images from the published ones with an accuracy of 66 % instead of 52 %.
    """
    return np.ceil(pixels + offsets).astype(np.int64)


def _digital_line(end: Ints) -> Flags:
    """Line from the centre of a fine window to `end`, as thick as a paddle across its longer axis."""
    reach, width = SCALE * REACH, PADDLE_THICKNESS * SCALE
    along, across = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    run, rise = end
    if abs(run) <= abs(rise):
        along, across, run, rise = across, along, rise, run
    part = along / run
    distance = (across - part * rise) * (1 if rise >= 0 else -1)
    # Half-open, so that a line of width 1 has one pixel per step; halves are rounded away from the start.
    return (part >= 0) & (part <= 1) & (distance > -width / 2 + 1e-9) & (distance <= width / 2 + 1e-9)


def _dilate(image: Flags) -> Flags:
    """Pixels within the margin of a set pixel."""
    rows, columns = np.nonzero(image)
    grid = np.indices(image.shape)
    squares = (grid[0][..., None] - rows) ** 2 + (grid[1][..., None] - columns) ** 2
    return squares.min(-1) <= (PADDLE_MARGIN * SCALE) ** 2


def reduce_image(fine: Flags, coarse: int) -> Floats:
    """Images (..., side, side) reduced to (..., coarse, coarse), in whole steps from 0 to 255 after each axis.

    The window is Lanczos's with three lobes, stretched to the coarse pixel.
    """
    scale = fine.shape[-1] / coarse
    centres = (np.arange(coarse)[:, None] + 0.5) * scale
    distance = (np.arange(fine.shape[-1]) + 0.5 - centres) / scale
    weights = np.sinc(distance) * np.sinc(distance / LANCZOS_LOBES) * (np.abs(distance) < LANCZOS_LOBES)
    weights[np.abs(weights) < 1e-12] = 0
    weights /= weights.sum(1, keepdims=True)

    def to_bytes(values: Floats) -> Floats:
        # The small part decides halves the same way whatever the order of summation.
        return np.clip(np.floor(values + 0.5 + 1e-6), 0, 255)

    return to_bytes(weights @ to_bytes(255.0 * fine @ weights.T))


def _begins_curves(offsets: Ints) -> bool:
    """Whether a footprint has a pixel of the image wherever in the image it is put, so in all four corners.

    The published test for room answers no for the whole image if its footprint misses the image anywhere. That leaves
    directions up and to the left, for the first of the two curves and for distractors.
    """
    down, right = offsets.T
    return all(((rows >= 0) & (columns >= 0)).any() for rows in (down, -down) for columns in (right, -right))


@dataclass(frozen=True, eq=False)
class Paddles:
    """Paddles by the pixel they start at, (..., 2), and the direction they are drawn in, (...)."""

    start: Ints
    stroke: Ints

    @classmethod
    def empty(cls, *shape: int) -> Paddles:
        """Paddles to be filled in."""
        return cls(np.zeros((*shape, 2), np.int64), np.zeros(shape, np.int64))


@dataclass(frozen=True, eq=False)
class Scenes:
    """What is in n images."""

    curves: Paddles
    """(n, 2, contour_length): the first paddle starts at the first end of its curve, the last at the other end."""
    distractors: Paddles
    """(n, num_distractors, distractor_length)."""
    shown: Flags
    """(n, num_distractors): which distractors found room."""
    marked_curve: Ints
    """(n, 2): curve whose first end, and curve whose last end, has a marker."""

    @property
    def labels(self) -> Ints:
        """(n,): 1 where both markers lie on the same curve."""
        return (self.marked_curve[:, 0] == self.marked_curve[:, 1]).astype(np.int64)

    @property
    def markers(self) -> Ints:
        """(n, 2, 2): pixels of the two markers, (row, column)."""
        each = np.arange(len(self.marked_curve))[:, None]
        return self.curves.start[each, self.marked_curve, [0, -1]]


def draw_scenes(scenes: Scenes, size: int) -> NDArray[np.uint8]:
    """Images (n, size, size): the brightest of what lies on a pixel, each image scaled to 0 to 255."""
    strokes, count, side = make_strokes(), len(scenes.labels), size + 2 * REACH
    # Single precision decides halves between two grey values as published.
    canvas = np.zeros((count, side * side), np.float32)
    grid = np.arange(-REACH, REACH + 1)
    window = (grid[:, None] * side + grid).ravel()
    every = np.ones((count, 2), bool)
    for paddles, shown, contrast in (
        (scenes.curves, every, CURVE_CONTRAST),
        (scenes.distractors, scenes.shown, DISTRACTOR_CONTRAST),
    ):
        for curve, number in np.ndindex(*paddles.stroke.shape[1:]):
            rows = np.flatnonzero(shown[:, curve])
            start, stroke = paddles.start[rows, curve, number], paddles.stroke[rows, curve, number]
            pixels = ((start[:, 0] + REACH) * side + start[:, 1] + REACH)[:, None] + window
            brightness = np.maximum(canvas[rows[:, None], pixels], contrast * strokes.line[stroke])
            canvas[rows[:, None], pixels] = brightness
    inner = slice(REACH, REACH + size)
    images = np.maximum(canvas.reshape(count, side, side)[:, inner, inner], _draw_markers(scenes.markers, size))
    peak = images.max((1, 2), keepdims=True)
    return np.floor(images * (255 / peak) + 0.5).astype(np.uint8)


def _draw_markers(markers: Ints, size: int) -> Floats:
    """Two discs per image, brightness 0 to 1."""
    radius = MARKER_RADIUS * SCALE
    grid = np.arange(-int(radius), int(radius) + 1)
    disc = np.argwhere(grid[:, None] ** 2 + grid**2 <= radius**2) - int(radius)
    places, which = np.unique(markers.reshape(-1, 2), axis=0, return_inverse=True)
    discs = np.empty((len(places), size, size), np.uint8)
    for number, place in enumerate(places):
        pixels = SCALE * place + disc
        pixels = pixels[((pixels >= 0) & (pixels < SCALE * size)).all(-1)]
        fine = np.zeros((SCALE * size, SCALE * size), bool)
        fine[pixels[:, 0], pixels[:, 1]] = True
        discs[number] = reduce_image(fine, size)
    return discs[which.reshape(-1, 2)].max(1) / 255
