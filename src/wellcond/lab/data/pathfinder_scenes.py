"""Scenes of Pathfinder images: two long curves, distractors, and two markers on ends of one or of both curves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wellcond.lab.data.errors import DataError
from wellcond.lab.data.pathfinder_growth import SEED_TRIES, Canvas, Rows, Tips, draw_headings
from wellcond.lab.data.pathfinder_options import PathfinderOptions
from wellcond.lab.data.pathfinder_strokes import NUM_DEGREES, Ints

WAVE_IMAGES, WAVE_PIXELS = 1024, 2**22
"""Images begun at once, and their pixels; most of them fail and are dropped."""
PATIENCE = 20_000
"""Images begun per image found before the options are called impossible."""


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
    shown: NDArray[np.bool_]
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
        each = np.arange(len(self.marked_curve))
        first = self.curves.start[each, self.marked_curve[:, 0], 0]
        last = self.curves.start[each, self.marked_curve[:, 1], -1]
        return np.stack([first, last], 1)


def make_scenes(labels: Ints, options: PathfinderOptions, random: np.random.Generator) -> Scenes:
    """One scene for each label.

    Raises:
        DataError: the curves do not fit into the image.
    """
    count = len(labels)
    curves, canvas = _grow_pairs(count, options, random)
    distractors, shown = _add_distractors(canvas, random)
    first = random.integers(2, size=count)
    last = np.where(labels == 1, first, 1 - first)
    return Scenes(curves, distractors, shown, np.stack([first, last], 1))


def _grow_pairs(count: int, options: PathfinderOptions, random: np.random.Generator) -> tuple[Paddles, Canvas]:
    """`count` pairs of curves, and the canvas that they take."""
    kept = Canvas(count, options)
    wave = Canvas(min(WAVE_IMAGES, max(16, WAVE_PIXELS // kept.side**2)), options)
    curves = Paddles.empty(count, 2, options.contour_length)
    found = begun = 0
    while found < count:
        if begun >= PATIENCE * (found + 1):
            raise DataError(
                f"pathfinder: curves of {options.contour_length} paddles do not fit into images of "
                f"{options.image_size} pixels.",
                expected=f"at least one pair of curves in {PATIENCE} begun",
                found=f"{found} pairs in {begun} begun",
                todo="Lower contour_length, paddle_length or paddle_margin, or raise image_size.",
            )
        wave.clear()
        begun += len(wave.taken)
        rows, paddles = _grow_wave(wave, random)
        rows = rows[: count - found]
        into = slice(found, found + len(rows))
        curves.start[into], curves.stroke[into] = paddles.start[rows], paddles.stroke[rows]
        kept.taken[into] = wave.taken[rows]
        found += len(rows)
    return curves, kept


def _grow_wave(canvas: Canvas, random: np.random.Generator) -> tuple[Rows, Paddles]:
    """Rows whose two curves reached their full length, and the paddles of all rows."""
    options = canvas.options
    paddles = Paddles.empty(len(canvas.taken), 2, options.contour_length)
    rows, pair = _seed_pairs(canvas, random)
    for number in range(options.contour_length):
        for curve in range(2):
            if number > 0:
                pair[curve], alive = canvas.extend(rows, pair[curve], random)
                rows, pair = rows[alive], [tips.select(alive) for tips in pair]
            paddles.start[rows, curve, number] = pair[curve].start
            paddles.stroke[rows, curve, number] = pair[curve].stroke
    # The last paddle of the first curve takes no room from distractors, as published.
    canvas.occupy(rows, pair[1])
    return rows[~_share_an_end(paddles.start[rows])], paddles


def _share_an_end(start: Ints) -> NDArray[np.bool_]:
    """Where an end of one curve lies on an end of the other, so that the label would be either (1 pair in 200)."""
    ends = start[:, :, [0, -1]]
    shared: NDArray[np.bool_] = (ends[:, 0, :, None] == ends[:, 1, None]).all(-1).any((1, 2))
    return shared


def _seed_pairs(canvas: Canvas, random: np.random.Generator) -> tuple[Rows, list[Tips]]:
    """First paddles of both curves: the first near the middle, the second at the seed distance from it."""
    distance = canvas.options.resolved_seed_distance
    rows = np.arange(len(canvas.taken))
    # The images are still empty, so that room depends on the direction alone.
    headings = np.flatnonzero(canvas.strokes.can_begin[:NUM_DEGREES])
    room = canvas.room(np.zeros_like(headings), headings, 2 * distance)
    headings, room = headings[room.any(1)], room[room.any(1)]
    if not len(headings):
        return rows[:0], 2 * [Tips.none()]
    which = random.integers(len(headings), size=len(rows))
    start = canvas.draw_start(room[which], random)
    first, fits = canvas.first_paddle(start, headings[which])
    around = np.deg2rad(random.integers(360, size=len(rows)))
    offset = np.round(distance * np.stack([np.sin(around), np.cos(around)], -1)).astype(np.int64)
    second, second_fits = canvas.first_paddle(start + offset, draw_headings(len(rows), random))
    alive = fits & second_fits
    return rows[alive], [first.select(alive), second.select(alive)]


def _add_distractors(canvas: Canvas, random: np.random.Generator) -> tuple[Paddles, NDArray[np.bool_]]:
    options = canvas.options
    shape = (len(canvas.taken), options.resolved_num_distractors, options.resolved_distractor_length)
    paddles, shown = Paddles.empty(*shape), np.zeros(shape[:2], bool)
    for number in range(shape[1]):
        for _ in range(options.distractor_tries):
            rows, tips = _seed_distractor(canvas, np.flatnonzero(~shown[:, number]), random)
            before, position = canvas.taken[rows], np.arange(len(rows))
            for step in range(shape[2]):
                if step > 0:
                    tips, alive = canvas.extend(rows[position], tips, random)
                    position, tips = position[alive], tips.select(alive)
                paddles.start[rows[position], number, step] = tips.start
                paddles.stroke[rows[position], number, step] = tips.stroke
            canvas.occupy(rows[position], tips)
            shown[rows[position], number] = True
            failed = ~shown[rows, number]
            canvas.taken[rows[failed]] = before[failed]
    return paddles, shown


def _seed_distractor(canvas: Canvas, rows: Rows, random: np.random.Generator) -> tuple[Rows, Tips]:
    """The first paddle of a distractor in those of the rows where there is room in the direction drawn."""
    places, tips = [rows[:0]], [Tips.none()]
    for _ in range(SEED_TRIES):
        headings = draw_headings(len(rows), random)
        can_begin = canvas.strokes.can_begin[headings]
        rows, headings = rows[can_begin], headings[can_begin]
        room = canvas.room(rows, headings, 1)
        some = room.any(1)
        rows, headings = rows[some], headings[some]
        new, fits = canvas.first_paddle(canvas.draw_start(room[some], random), headings)
        places.append(rows[fits])
        tips.append(new.select(fits))
        rows = rows[~fits]
    joined = (np.concatenate([getattr(t, name) for t in tips]) for name in ("start", "stroke", "pivot", "heading"))
    return np.concatenate(places), Tips(*joined)
