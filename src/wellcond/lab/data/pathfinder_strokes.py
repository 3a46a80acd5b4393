"""The strokes of Pathfinder images: everything about one paddle, tabulated by its direction.

Paddles begin on pixels and point in one of finitely many directions: whole degrees for the first paddle of a curve,
and towards one of the pixels on a small circle for the others. So a paddle's pixels, its margin, and where the curve
goes from there are looked up, not computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from wellcond.lab.data.pathfinder_options import PathfinderOptions

NUM_DEGREES = 360
"""Directions below this index are whole degrees from -180; those above lead to the pixels of the circle."""
LANCZOS_LOBES = 3
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Strokes:
    """Tables by direction k; offsets are (row, column), windows are squares of side 2 * reach + 1, flattened."""

    reach: int
    line: Floats
    """(k, window): brightness 0 to 1 of a paddle that starts at the centre of the window and points to k."""
    margin: Floats
    """(k, window): how far each pixel belongs to the paddle widened by its margin, 0 to 1."""
    fine_end: Ints
    """(k, 2): end of the paddle from its start, in fractions 1 / antialias_scale of a pixel."""
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
    can_begin: NDArray[np.bool_]
    """(k,): whether a curve may begin in this direction; see `begins_curves`."""


@lru_cache(maxsize=16)
def make_strokes(options: PathfinderOptions) -> Strokes:
    """The tables for these options."""
    length, gap, scale = options.paddle_length, options.paddle_margin, options.antialias_scale
    circle = circle_pixels(length + gap)
    outward = np.arctan2(circle[:, 0], circle[:, 1])
    degrees = np.deg2rad(np.arange(-180, 180))
    angles = np.concatenate([degrees, outward, outward + np.pi])
    turns = np.abs((angles[:, None] - outward + np.pi) % (2 * np.pi) - np.pi)
    turn_weight = np.cos(np.minimum(turns * options.continuity, np.pi / 2)) ** 2

    reach = options.stroke_reach
    side = 2 * reach + 1
    # The small part keeps sin(pi) = 1e-16 from being rounded up to 1.
    fine_end = np.ceil(length * scale * directions(angles) - 1e-9).astype(np.int64)
    line, margin = [], []
    for end in fine_end:
        fine = digital_line(end, reach * scale, max(1, round(options.paddle_thickness * scale)))
        line.append(reduce_image(fine, side).ravel() / 255)
        margin.append(reduce_image(dilate(fine, gap * scale), side).ravel() / 255)
    count = len(circle)
    footprints = [footprint(window.reshape(side, side), length + gap) for window in margin]
    return Strokes(
        reach=reach,
        line=np.array(line),
        margin=np.array(margin),
        fine_end=fine_end,
        head=length * directions(angles),
        back=-(length + gap) * directions(angles),
        advance=(length + 2 * gap) * directions(angles),
        circle=circle,
        turn_weight=turn_weight,
        outward=NUM_DEGREES + np.arange(count),
        inward=NUM_DEGREES + count + np.arange(count),
        footprint=_fill_up(footprints),
        can_begin=np.array([begins_curves(offsets) for offsets in footprints]),
    )


def directions(angles: Floats) -> Floats:
    """Unit vectors (row, column); by `math`, whose last digits differ less from machine to machine than numpy's."""
    return np.array([(math.sin(angle), math.cos(angle)) for angle in angles])


def move(pixels: Ints, offsets: Floats) -> Ints:
    """The pixels that are reached from others, rounded up.

    As published, an offset along an axis has 1e-16 across it instead of 0, which is lost in the sum except near the
    upper and left borders: there curves drift by one pixel per paddle. Without it a small convolutional network tells
    these images from the published ones with an accuracy of 66 % instead of 52 %.
    """
    return np.ceil(pixels + offsets).astype(np.int64)


def circle_pixels(radius: int) -> Ints:
    """Pixels that a circle passes through, sampled at every pixel of its length."""
    angles = np.arange(0, 2 * np.pi, 1 / radius)
    samples = radius * np.stack([np.sin(angles), np.cos(angles)], axis=-1)
    return np.unique(np.floor(samples).astype(np.int64), axis=0)


def digital_line(end: Ints, reach: int, width: int) -> NDArray[np.bool_]:
    """Line from the centre of a square of side 2 * reach + 1 to `end`, `width` pixels across its longer axis."""
    rows, columns = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    steps = int(np.abs(end).max())
    if steps == 0:
        return (rows == 0) & (columns == 0)
    along, across = (rows, columns) if abs(end[0]) > abs(end[1]) else (columns, rows)
    run, rise = (end[0], end[1]) if abs(end[0]) > abs(end[1]) else (end[1], end[0])
    part = along / run
    distance = (across - part * rise) * (1 if rise >= 0 else -1)
    # Half-open, so that a line of width 1 has one pixel per step; halves are rounded away from the start.
    inside = (distance > -width / 2 + 1e-9) & (distance <= width / 2 + 1e-9)
    return (part >= 0) & (part <= 1) & inside


def dilate(image: NDArray[np.bool_], radius: int) -> NDArray[np.bool_]:
    """Pixels within `radius` of a set pixel."""
    rows, columns = np.nonzero(image)
    grid = np.indices(image.shape)
    squares = (grid[0][..., None] - rows) ** 2 + (grid[1][..., None] - columns) ** 2
    return squares.min(-1) <= radius**2


def lanczos_matrix(fine: int, coarse: int) -> Floats:
    """(coarse, fine): reduces a row of pixels with a Lanczos window of three lobes, stretched to the coarse pixel."""
    scale = fine / coarse
    centres = (np.arange(coarse)[:, None] + 0.5) * scale
    distance = (np.arange(fine) + 0.5 - centres) / scale
    weights = np.sinc(distance) * np.sinc(distance / LANCZOS_LOBES) * (np.abs(distance) < LANCZOS_LOBES)
    weights[np.abs(weights) < 1e-12] = 0
    return weights / weights.sum(1, keepdims=True)


def reduce_image(fine: NDArray[np.bool_], coarse: int) -> Floats:
    """Images (..., side, side) reduced to (..., coarse, coarse), in whole steps from 0 to 255 after each axis."""
    matrix = lanczos_matrix(fine.shape[-1], coarse)
    rows = _to_bytes(255.0 * fine @ matrix.T)
    return _to_bytes(matrix @ rows)


def _to_bytes(values: Floats) -> Floats:
    # The small part decides halves the same way whatever the order of summation.
    return np.clip(np.floor(values + 0.5 + 1e-6), 0, 255)


def footprint(margin: Floats, most: int) -> Ints:
    """The pixels fully within the margin of a paddle, one further right and down: the published test for room."""
    offsets = np.argwhere(margin >= 1) - len(margin) // 2 + 1
    return offsets[(np.abs(offsets) <= most).all(1)]


def begins_curves(offsets: Ints) -> bool:
    """Whether a footprint has a pixel of the image wherever in the image it is put, so in all four corners.

    The published test for room answers no for the whole image if its footprint misses the image anywhere. That leaves
    directions up and to the left, for the first of the two curves and for distractors.
    """
    down, right = offsets.T
    return all(((rows >= 0) & (columns >= 0)).any() for rows in (down, -down) for columns in (right, -right))


def _fill_up(footprints: list[Ints]) -> Ints:
    longest = max(1, *(len(offsets) for offsets in footprints))
    filled = np.zeros((len(footprints), longest, 2), np.int64)
    for target, offsets in zip(filled, footprints, strict=True):
        if len(offsets):
            target[:] = offsets[np.arange(longest) % len(offsets)]
    return filled


def disc_pixels(options: PathfinderOptions) -> Ints:
    """Fine pixels of a marker around the fine pixel of its centre."""
    radius = options.marker_radius * options.antialias_scale
    whole = math.floor(radius)
    rows, columns = np.mgrid[-whole : whole + 1, -whole : whole + 1]
    return np.argwhere(rows**2 + columns**2 <= radius**2) - whole
