"""Generator `pathfinder`: do two markers lie on the ends of one dashed curve?

An image has two long curves, distractors, and two markers on ends of one or of both curves. Many images grow at once,
paddle by paddle, without one paddle running over another, and are drawn when they are whole.

Strokes are everything about one paddle, tabulated by its direction. Paddles begin on pixels and point in one of
finitely many directions: whole degrees for the first paddle of a curve, and towards one of the pixels on a small circle
for the others. So a paddle's pixels, its margin, and where the curve goes from there are looked up, not computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from wellcond.errors import DataError
from wellcond.lab.data.base import TensorDataset
from wellcond.lab.data.generated import GeneratorOptions, register_generator

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
COLLISION = 1.8
"""Margins may overlap softly; a pixel where they sum to this is a collision. Published value."""
TAKEN = 0.3
"""A pixel that belongs to a margin by more than this cannot lie under a first paddle. Published value."""
SEED_TRIES = 3
WAVE = 1024
"""Images begun at once; most of them fail and are dropped."""
PATIENCE = 20_000
"""Images begun per image found before the options are called impossible."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class PathfinderOptions(GeneratorOptions):
    """Options of `pathfinder`; the defaults are those of the published 32-pixel set."""

    class_names = ("apart", "joined")
    chunk = 500
    # The constants above by the names they had as options: the published numbers rest on these streams.
    constants: ClassVar[dict[str, Any]] = {
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
    image_size: int = Field(32, ge=12, le=128)
    contour_length: int = Field(14, ge=2, le=64)
    """Paddles in each of the two long curves; 14, 9 and 6 are the three difficulties of the Long Range Arena."""
    num_distractors: int | None = Field(None, ge=0, le=400)
    """Distractors to try for; by default as many as make 20 paddles, below 32 pixels in proportion to the area. Those
    that find no room are left out."""

    @property
    def distinct(self) -> bool:
        """Small images repeat: of 1,000 at 12 pixels with two dashes, 278 were among 40,000 others."""
        return self.image_size < 32 or self.contour_length < 6


class Strokes:
    """Tables by direction k; offsets are (row, column), windows are squares of side 2 * REACH + 1, flattened."""

    def __init__(self) -> None:
        radius = PADDLE_LENGTH + PADDLE_MARGIN
        # The pixels that a circle passes through, sampled at every pixel of its length.
        around = np.arange(0, 2 * np.pi, 1 / radius)
        samples = radius * np.stack([np.sin(around), np.cos(around)], axis=-1)
        # (c, 2): pixels around a pivot at which a paddle may end
        self.circle = np.unique(np.floor(samples).astype(np.int64), axis=0)
        # (c,): direction from the pivot to the pixel of the circle, and back
        self.outward = NUM_DEGREES + np.arange(len(self.circle))
        self.inward = self.outward + len(self.circle)
        outward = np.arctan2(self.circle[:, 0], self.circle[:, 1])
        angles = np.concatenate([np.deg2rad(np.arange(-180, 180)), outward, outward + np.pi])
        turns = np.abs((angles[:, None] - outward + np.pi) % (2 * np.pi) - np.pi)
        # (k, c): weight of going on to pixel c of the circle after direction k
        self.turn_weight = np.cos(np.minimum(turns, np.pi / 2)) ** 2
        # (k, 2): one pixel in the direction; by `math`, whose last digits differ less between machines than numpy's
        self.unit = np.array([(math.sin(angle), math.cos(angle)) for angle in angles])
        # The small part keeps sin(pi) = 1e-16 from being rounded up to 1.
        fine_ends = np.ceil(PADDLE_LENGTH * SCALE * self.unit - 1e-9).astype(np.int64)
        lines = [_digital_line(end) for end in fine_ends]
        margins = [reduce_image(_dilate(line), 2 * REACH + 1) / 255 for line in lines]
        # (k, window): brightness 0 to 1 of a paddle that starts at the centre of the window
        self.line = np.array([reduce_image(line, 2 * REACH + 1).ravel() / 255 for line in lines])
        # (k, window): how far each pixel belongs to the paddle widened by its margin, 0 to 1
        self.margin = np.array([margin.ravel() for margin in margins], np.float32)
        # The pixels fully within the margin of a paddle, one further right and down: the published test for room.
        offsets = [np.argwhere(margin >= 1) - REACH + 1 for margin in margins]
        footprints = [pixels[(np.abs(pixels) <= radius).all(1)] for pixels in offsets]
        longest = max(map(len, footprints))
        # (k, f, 2): pixels that must be free for a first paddle; rows are filled up by repetition
        self.footprint = np.stack([np.resize(pixels, (longest, 2)) for pixels in footprints])
        # (k,): whether a curve may begin in this direction: its footprint must have a pixel of the image in all four
        # corners. The published test for room answers no for the whole image if its footprint misses the image
        # anywhere. That leaves directions up and to the left, for the first of the two curves and for distractors.
        down, right = np.moveaxis(self.footprint, -1, 0)
        corners = [((rows >= 0) & (columns >= 0)).any(1) for rows in (down, -down) for columns in (right, -right)]
        self.can_begin = np.all(corners, axis=0)


make_strokes = cache(Strokes)


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


def _flat(pixels: Ints, side: int) -> Ints:
    """Where pixels (..., 2) are in a flat image of this side, which has room around it for windows that stick out."""
    return (pixels[..., 0] + REACH) * side + pixels[..., 1] + REACH


def _windows(pixels: Ints, side: int) -> Ints:
    """Where the windows around pixels (n, 2) are in a flat image."""
    grid = np.arange(-REACH, REACH + 1)
    return _flat(pixels, side)[:, None] + (grid[:, None] * side + grid).ravel()


@dataclass(frozen=True, eq=False)
class Scenes:
    """What is in n images. A paddle is the pixel it starts at, row and column, and the direction it is drawn in."""

    curves: Ints  # (n, 2, length, 3): the first paddle starts at the first end of its curve, the last at the other
    distractors: Ints  # (n, number, length, 3)
    shown: Flags  # (n, number): which distractors found room
    markers: Ints  # (n, 2, 2): pixels of the two markers
    labels: Ints  # (n,): 1 where both markers lie on the same curve


def draw_scenes(scenes: Scenes, size: int) -> NDArray[np.uint8]:
    """Images (n, size, size): the brightest of what lies on a pixel, each image scaled to 0 to 255."""
    strokes, count, side = make_strokes(), len(scenes.labels), size + 2 * REACH
    # Single precision decides halves between two grey values as published.
    canvas = np.zeros((count, side * side), np.float32)
    curves = scenes.curves, np.ones((count, 2), bool), CURVE_CONTRAST
    for paddles, shown, contrast in (curves, (scenes.distractors, scenes.shown, DISTRACTOR_CONTRAST)):
        for curve, number in np.ndindex(*paddles.shape[1:3]):
            rows = np.flatnonzero(shown[:, curve])
            paddle = paddles[rows, curve, number]
            at = rows[:, None], _windows(paddle[:, :2], side)
            canvas[at] = np.maximum(canvas[at], contrast * strokes.line[paddle[:, 2]])
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


# Growing


@register_generator("pathfinder", PathfinderOptions)
def pathfinder(count: int, options: PathfinderOptions, generator: torch.Generator) -> TensorDataset:
    """Images (n, 1, size, size) of 8 bits; label 1, joined, has one of every two images."""
    scenes = pathfinder_scenes(count, options, generator)
    images = torch.from_numpy(draw_scenes(scenes, options.image_size))
    return TensorDataset("image", images[:, None], torch.from_numpy(scenes.labels))


def pathfinder_scenes(count: int, options: PathfinderOptions, generator: torch.Generator) -> Scenes:
    """The curves and markers behind the images that `pathfinder` makes of the same generator."""
    random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
    # One of each label in every pair of images, so that the beginning of a chunk is balanced too.
    first = random.integers(2, size=(count + 1) // 2)
    labels = np.stack([first, 1 - first], 1).ravel()[:count]
    curves, canvas = _grow_pairs(count, options, random)
    distractors, shown = _add_distractors(canvas, options, random)
    first = random.integers(2, size=count)
    marked = np.stack([first, np.where(labels == 1, first, 1 - first)], 1)
    markers = curves[np.arange(count)[:, None], marked, [0, -1], :2]
    return Scenes(curves, distractors, shown, markers, labels)


class Tips(NamedTuple):
    """Where one curve per row stands."""

    paddle: Ints  # (n, 3): its newest, not yet part of the canvas; all but the first start at their far end
    pivot: Ints  # (n, 2): pixel around which it turned
    heading: Ints  # (n,): direction in which the curve runs

    def select(self, which: NDArray[np.generic]) -> Tips:
        """The rows that `which` names."""
        return Tips(*(values[which] for values in self))


class Canvas:
    """How far the pixels of `count` images are taken, 0 to 1; at first only the border that no paddle may enter."""

    def __init__(self, count: int, size: int) -> None:
        self.size, self.side, self.strokes = size, size + 2 * REACH, make_strokes()
        self._inside = self._all_but(0)
        self.taken = np.empty((count, self.side**2), np.float32)
        self.taken[:] = self._inside & ~self._all_but(PADDING)

    def _all_but(self, border: int) -> Flags:
        """The pixels of the image but for a border, flat."""
        inner = np.zeros((self.side, self.side), bool)
        edge = REACH + border
        inner[edge : self.side - edge, edge : self.side - edge] = True
        return inner.ravel()

    def _holds(self, pixels: Ints) -> Flags:
        return np.asarray(((pixels >= 0) & (pixels < self.size)).all(-1))

    def occupy(self, rows: Ints, tips: Tips) -> None:
        """Add the margins of the newest paddles."""
        window = _windows(tips.paddle[:, :2], self.side)
        margin = self.strokes.margin[tips.paddle[:, 2]] * self._inside[window]
        self.taken[rows[:, None], window] = np.maximum(self.taken[rows[:, None], window], margin)

    def extend(self, rows: Ints, tips: Tips, random: np.random.Generator) -> tuple[Tips, Flags]:
        """One more paddle for the curve in each row; the flags say where there was room for it.

        The next paddle ends on a pixel of the circle around the next pivot, drawn with the weight
        cos^2(turn) times how free the surroundings of the pixel are.
        """
        strokes, flat, begin = self.strokes, self.taken.ravel(), rows[:, None] * self.side**2
        pivot = move(tips.pivot, (PADDLE_LENGTH + 2 * PADDLE_MARGIN) * strokes.unit[tips.heading])
        ends = pivot[:, None] + strokes.circle
        centre = begin + _flat(np.clip(ends, 0, self.size - 1), self.side)
        taken = np.zeros(centre.shape, np.float32)
        disc = np.arange(-PADDLE_MARGIN, PADDLE_MARGIN + 1)
        near = disc[:, None] ** 2 + disc**2 <= PADDLE_MARGIN**2
        for offset in (disc[:, None] * self.side + disc)[near]:
            np.maximum(taken, flat[centre + offset], out=taken)
        weight = strokes.turn_weight[tips.heading] * (1 - taken.astype(np.float64)) * self._holds(ends)
        cumulative = weight.cumsum(1)
        total = cumulative[:, -1]
        chosen, found = np.zeros(len(rows), np.int64), np.zeros(len(rows), bool)
        open_rows = np.flatnonzero(total > 1e-4)
        for _ in range(PADDLE_TRIES):
            drawn = random.random(len(open_rows)) * total[open_rows]
            pick = (cumulative[open_rows] > drawn[:, None]).argmax(1)
            window = begin[open_rows] + _windows(ends[open_rows, pick], self.side)
            clear = (flat[window] + strokes.margin[strokes.inward[pick]]).max(1) < COLLISION
            chosen[open_rows[clear]], found[open_rows[clear]] = pick[clear], True
            open_rows = open_rows[~clear]
        self.occupy(rows[found], tips.select(found))
        paddle = np.column_stack([ends[np.arange(len(rows)), chosen], strokes.inward[chosen]])
        return Tips(paddle, pivot, strokes.outward[chosen]), found

    def first_paddle(self, start: Ints, heading: Ints) -> tuple[Tips, Flags]:
        """Curves that begin at `start`; the flags say where the paddle and its pivot lie within the image."""
        unit = self.strokes.unit[heading]
        head = move(start, PADDLE_LENGTH * unit)
        pivot = move(head, -(PADDLE_LENGTH + PADDLE_MARGIN) * unit)
        return Tips(np.column_stack([start, heading]), pivot, heading), self._holds(head) & self._holds(pivot)

    def room(self, rows: Ints, headings: Ints, border: int) -> Flags:
        """(n, size * size): where a first paddle has room, away from a border of this width."""
        free = (self.taken[rows] <= TAKEN) & (self._all_but(border) | ~self._inside)
        pixels = np.flatnonzero(self._inside)
        footprint = self.strokes.footprint[headings]
        offsets = footprint[..., 0] * self.side + footprint[..., 1]
        room = np.ones((len(rows), len(pixels)), bool)
        flat, base = free.ravel(), np.arange(len(rows))[:, None] * free.shape[1] + pixels
        for column in offsets.T:
            room &= flat[base + column[:, None]]
        return room

    def draw_start(self, room: Flags, random: np.random.Generator) -> Ints:
        """A pixel per row, uniform among those with room, of which there must be one."""
        wanted = (random.random(len(room)) * room.sum(1)).astype(np.int64)
        place = (room.cumsum(1, dtype=np.int32) > wanted[:, None]).argmax(1)
        return np.stack(np.divmod(place, self.size), -1)

    def grow(self, rows: Ints, tips: list[Tips], paddles: Ints, random: np.random.Generator) -> Ints:
        """Fill in `paddles` (images, curves, length, 3) in turn; returns the rows where all curves found room.

        The last paddle of the last curve takes room too; that of another does not, as published.
        """
        for number in range(paddles.shape[2]):
            for curve in range(len(tips)):
                if number > 0:
                    tips[curve], alive = self.extend(rows, tips[curve], random)
                    rows, tips = rows[alive], [each.select(alive) for each in tips]
                paddles[rows, curve, number] = tips[curve].paddle
        self.occupy(rows, tips[-1])
        return rows


def _grow_pairs(count: int, options: PathfinderOptions, random: np.random.Generator) -> tuple[Ints, Canvas]:
    """`count` pairs of curves, and the canvas that they take."""
    kept = Canvas(count, options.image_size)
    curves = np.zeros((count, 2, options.contour_length, 3), np.int64)
    found = begun = 0
    while found < count:
        if begun >= PATIENCE * (found + 1):
            raise DataError(
                f"pathfinder: curves of {options.contour_length} paddles do not fit into images of "
                f"{options.image_size} pixels.",
                expected=f"at least one pair of curves in {PATIENCE} begun",
                found=f"{found} pairs in {begun} begun",
                todo="Lower contour_length, or raise image_size.",
            )
        begun += WAVE
        wave = Canvas(WAVE, options.image_size)
        paddles = np.zeros((WAVE, *curves.shape[1:]), np.int64)
        rows = wave.grow(*_seed_pairs(wave, random), paddles, random)
        # Where an end of one curve lies on an end of the other, the label could be either (1 pair in 200).
        ends = paddles[rows][:, :, [0, -1], :2]
        shared = (ends[:, 0, :, None] == ends[:, 1, None]).all(-1).any((1, 2))
        rows = rows[~shared][: count - found]
        into = slice(found, found + len(rows))
        curves[into], kept.taken[into] = paddles[rows], wave.taken[rows]
        found += len(rows)
    return curves, kept


def _seed_pairs(canvas: Canvas, random: np.random.Generator) -> tuple[Ints, list[Tips]]:
    """First paddles of both curves, 7 pixels of 32 apart; the first is twice as far from every border."""
    distance = 7 * canvas.size // 32
    rows = np.arange(len(canvas.taken))
    # The images are still empty, so that room depends on the direction alone.
    headings = np.flatnonzero(canvas.strokes.can_begin[:NUM_DEGREES])
    room = canvas.room(np.zeros_like(headings), headings, 2 * distance)
    headings, room = headings[room.any(1)], room[room.any(1)]
    which = random.integers(len(headings), size=len(rows))
    start = canvas.draw_start(room[which], random)
    first, fits = canvas.first_paddle(start, headings[which])
    around = np.deg2rad(random.integers(360, size=len(rows)))
    offset = np.round(distance * np.stack([np.sin(around), np.cos(around)], -1)).astype(np.int64)
    second, second_fits = canvas.first_paddle(start + offset, random.integers(NUM_DEGREES, size=len(rows)))
    alive = fits & second_fits
    return rows[alive], [first.select(alive), second.select(alive)]


def _add_distractors(canvas: Canvas, options: PathfinderOptions, random: np.random.Generator) -> tuple[Ints, Flags]:
    """The paddles of distractors, and which of them found room."""
    length = max(1, options.contour_length // 3)
    usual = min(20, 20 * options.image_size**2 // 32**2) // length
    number = usual if options.num_distractors is None else options.num_distractors
    paddles = np.zeros((len(canvas.taken), number, length, 3), np.int64)
    shown = np.zeros(paddles.shape[:2], bool)
    for curve in range(number):
        for _ in range(DISTRACTOR_TRIES):
            rows, tips = _seed_distractor(canvas, np.flatnonzero(~shown[:, curve]), random)
            before = canvas.taken[rows]
            shown[canvas.grow(rows, [tips], paddles[:, curve : curve + 1], random), curve] = True
            failed = ~shown[rows, curve]
            canvas.taken[rows[failed]] = before[failed]
    return paddles, shown


def _seed_distractor(canvas: Canvas, rows: Ints, random: np.random.Generator) -> tuple[Ints, Tips]:
    """The first paddle of a distractor in those of the rows where there is room in the direction drawn."""
    places, tips = [], []
    for _ in range(SEED_TRIES):
        headings = random.integers(NUM_DEGREES, size=len(rows))
        can_begin = canvas.strokes.can_begin[headings]
        rows, headings = rows[can_begin], headings[can_begin]
        room = canvas.room(rows, headings, 1)
        some = room.any(1)
        rows, headings = rows[some], headings[some]
        new, fits = canvas.first_paddle(canvas.draw_start(room[some], random), headings)
        places.append(rows[fits])
        tips.append(new.select(fits))
        rows = rows[~fits]
    return np.concatenate(places), Tips(*map(np.concatenate, zip(*tips, strict=True)))
