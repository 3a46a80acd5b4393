"""What Pathfinder images are made of, and how they are drawn: options, curves of paddles, and strokes.

Strokes are everything about one paddle, tabulated by its direction. Paddles begin on pixels and point in one of
finitely many directions: whole degrees for the first paddle of a curve, and towards one of the pixels on a small circle
for the others. So a paddle's pixels, its margin, and where the curve goes from there are looked up, not computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from wellcond.lab.data.generated import GeneratorOptions

NUM_DEGREES = 360
"""Directions below this index are whole degrees from -180; those above lead to the pixels of the circle."""
LANCZOS_LOBES = 3
FINE_PIXELS = 2**20
"""Of markers drawn at once."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class PathfinderOptions(GeneratorOptions):
    """Options of `pathfinder`; lengths are in pixels. The defaults are those of the published 32-pixel set."""

    image_size: int = Field(32, ge=12, le=256)
    contour_length: int = Field(14, ge=2, le=64)
    """Paddles in each of the two long curves; 14, 9 and 6 are the three difficulties of the Long Range Arena."""
    distractor_length: int | None = Field(None, ge=1, le=64)
    """Paddles in each distractor; by default a third of `contour_length`, rounded down, and at least one."""
    num_distractors: int | None = Field(None, ge=0, le=400)
    """Distractors to try for; by default as many as make 20 paddles, below 32 pixels in proportion to the area. Those
    that find no room are left out."""
    paddle_length: int = Field(2, ge=1, le=32)
    paddle_thickness: float = Field(0.5, gt=0, le=16)
    paddle_margin: int = Field(1, ge=1, le=16)
    """Free pixels around a paddle; two paddles of a curve are twice as far apart."""
    continuity: float = Field(1.0, ge=0.25, le=10)
    """A turn by the angle a between paddles has weight cos^2(continuity * a), and none beyond a right angle of that."""
    marker_radius: float = Field(1.5, gt=0, le=32)
    padding: int = Field(1, ge=1, le=64)
    """Width of the border that no paddle may enter."""
    seed_distance: int | None = Field(None, ge=1, le=128)
    """Distance between the first ends of the two curves, the first of which lies at least twice as far from every
    border; by default 7 in 32 pixels, and in proportion."""
    antialias_scale: int = Field(2, ge=1, le=8)
    """Lines and discs are drawn this much larger, then reduced with a Lanczos window."""
    curve_contrast: float = Field(1.5, gt=0)
    distractor_contrast: float = Field(2.0, gt=0)
    """Brightness of a paddle, where 1 is that of the markers; every image is then scaled to the range 0 to 255."""
    paddle_tries: int = Field(3, ge=1, le=100)
    """Directions drawn for the next paddle before its curve is given up."""
    distractor_tries: int = Field(5, ge=1, le=100)
    """Curves begun for each distractor before it is left out."""

    @model_validator(mode="after")
    def _check_room(self) -> PathfinderOptions:
        if 4 * self.resolved_seed_distance >= self.image_size:
            raise ValueError(f"four times the seed_distance must be less than image_size = {self.image_size}")
        if 2 * self.padding >= self.image_size - 2 * self.stroke_reach:
            raise ValueError(f"a padding of {self.padding} leaves no room for paddles in {self.image_size} pixels")
        return self

    @property
    def distinct(self) -> bool:
        """Small images repeat: of 1,000 at 12 pixels with two dashes, 278 were among 40,000 others."""
        return self.image_size < 32 or self.contour_length < 6

    @property
    def resolved_distractor_length(self) -> int:
        """Paddles in each distractor."""
        return self.distractor_length or max(1, self.contour_length // 3)

    @property
    def resolved_num_distractors(self) -> int:
        """Distractors to try for."""
        if self.num_distractors is not None:
            return self.num_distractors
        return min(20, 20 * self.image_size**2 // 32**2) // self.resolved_distractor_length

    @property
    def resolved_seed_distance(self) -> int:
        """Distance between the first ends of the two curves."""
        return self.seed_distance or max(1, 7 * self.image_size // 32)

    @property
    def stroke_reach(self) -> int:
        """Pixels from the start of a paddle that it and its margin can reach."""
        return self.paddle_length + math.ceil(self.paddle_thickness) + self.paddle_margin


@dataclass(frozen=True, eq=False)
class Strokes:
    """Tables by direction k; offsets are (row, column), windows are squares of side 2 * reach + 1, flattened."""

    reach: int
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


@lru_cache(maxsize=16)
def make_strokes(options: PathfinderOptions) -> Strokes:
    """The tables for these options."""
    length, gap, scale = options.paddle_length, options.paddle_margin, options.antialias_scale
    reach = options.stroke_reach
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
    fine_end = np.ceil(length * scale * directions - 1e-9).astype(np.int64)
    line, margin, footprints = [], [], []
    for end in fine_end:
        fine = _digital_line(end, reach * scale, max(1, round(options.paddle_thickness * scale)))
        line.append(reduce_image(fine, 2 * reach + 1).ravel() / 255)
        wide = reduce_image(_dilate(fine, gap * scale), 2 * reach + 1) / 255
        margin.append(wide.ravel())
        # The pixels fully within the margin of a paddle, one further right and down: the published test for room.
        offsets = np.argwhere(wide >= 1) - reach + 1
        footprints.append(offsets[(np.abs(offsets) <= length + gap).all(1)])
    longest = max(1, *map(len, footprints))
    return Strokes(
        reach=reach,
        line=np.array(line),
        margin=np.array(margin, np.float32),
        head=length * directions,
        back=-(length + gap) * directions,
        advance=(length + 2 * gap) * directions,
        circle=circle,
        turn_weight=np.cos(np.minimum(turns * options.continuity, np.pi / 2)) ** 2,
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


def _digital_line(end: Ints, reach: int, width: int) -> Flags:
    """Line from the centre of a square of side 2 * reach + 1 to `end`, `width` pixels across its longer axis."""
    along, across = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    run, rise = end
    if not end.any():
        return (along == 0) & (across == 0)
    if abs(run) <= abs(rise):
        along, across, run, rise = across, along, rise, run
    part = along / run
    distance = (across - part * rise) * (1 if rise >= 0 else -1)
    # Half-open, so that a line of width 1 has one pixel per step; halves are rounded away from the start.
    return (part >= 0) & (part <= 1) & (distance > -width / 2 + 1e-9) & (distance <= width / 2 + 1e-9)


def _dilate(image: Flags, radius: int) -> Flags:
    """Pixels within `radius` of a set pixel."""
    rows, columns = np.nonzero(image)
    grid = np.indices(image.shape)
    squares = (grid[0][..., None] - rows) ** 2 + (grid[1][..., None] - columns) ** 2
    return squares.min(-1) <= radius**2


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


def draw_scenes(scenes: Scenes, options: PathfinderOptions) -> NDArray[np.uint8]:
    """Images (n, size, size): the brightest of what lies on a pixel, each image scaled to 0 to 255."""
    strokes = make_strokes(options)
    count, size, reach = len(scenes.labels), options.image_size, strokes.reach
    side = size + 2 * reach
    # Single precision decides halves between two grey values as published.
    canvas = np.zeros((count, side * side), np.float32)
    grid = np.arange(-reach, reach + 1)
    window = (grid[:, None] * side + grid).ravel()
    every = np.ones((count, 2), bool)
    for paddles, shown, contrast in (
        (scenes.curves, every, options.curve_contrast),
        (scenes.distractors, scenes.shown, options.distractor_contrast),
    ):
        for curve, number in np.ndindex(*paddles.stroke.shape[1:]):
            rows = np.flatnonzero(shown[:, curve])
            start, stroke = paddles.start[rows, curve, number], paddles.stroke[rows, curve, number]
            pixels = ((start[:, 0] + reach) * side + start[:, 1] + reach)[:, None] + window
            brightness = np.maximum(canvas[rows[:, None], pixels], contrast * strokes.line[stroke])
            canvas[rows[:, None], pixels] = brightness
    inner = slice(reach, reach + size)
    images = np.maximum(canvas.reshape(count, side, side)[:, inner, inner], _draw_markers(scenes.markers, options))
    peak = images.max((1, 2), keepdims=True)
    return np.floor(images * (255 / peak) + 0.5).astype(np.uint8)


def _draw_markers(markers: Ints, options: PathfinderOptions) -> Floats:
    """Two discs per image, brightness 0 to 1."""
    scale, size = options.antialias_scale, options.image_size
    fine_size, radius = size * scale, options.marker_radius * scale
    grid = np.arange(-int(radius), int(radius) + 1)
    disc = np.argwhere(grid[:, None] ** 2 + grid**2 <= radius**2) - int(radius)
    places, which = np.unique(markers.reshape(-1, 2), axis=0, return_inverse=True)
    discs = np.empty((len(places), size, size), np.uint8)
    block = max(1, FINE_PIXELS // fine_size**2)
    for first in range(0, len(places), block):
        pixels = scale * places[first : first + block, None] + disc
        inside = ((pixels >= 0) & (pixels < fine_size)).all(-1)
        index = np.broadcast_to(np.arange(len(pixels))[:, None], inside.shape)
        fine = np.zeros((len(pixels), fine_size, fine_size), bool)
        fine[index[inside], pixels[inside][:, 0], pixels[inside][:, 1]] = True
        discs[first : first + block] = reduce_image(fine, size)
    return discs[which.reshape(-1, 2)].max(1) / 255
