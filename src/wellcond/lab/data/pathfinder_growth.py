"""Growing the curves of many Pathfinder images at once, paddle by paddle, without one running over another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wellcond.lab.data.pathfinder_options import PathfinderOptions
from wellcond.lab.data.pathfinder_strokes import NUM_DEGREES, Ints, Strokes, make_strokes, move

COLLISION = 1.8
"""Margins may overlap softly; a pixel where they sum to this is a collision. Published value."""
TAKEN = 0.3
"""A pixel that belongs to a margin by more than this cannot lie under a first paddle. Published value."""
SEED_TRIES = 3
Rows = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Tips:
    """Where one curve per row stands: its newest paddle, which is not yet part of the canvas."""

    start: Ints
    """(n, 2): pixel at which the newest paddle starts; for all but the first, its far end."""
    stroke: Ints
    """(n,): direction in which it is drawn from there."""
    pivot: Ints
    """(n, 2): pixel around which it turned."""
    heading: Ints
    """(n,): direction in which the curve runs."""

    @classmethod
    def none(cls) -> Tips:
        """No curve at all."""
        points, numbers = np.zeros((0, 2), np.int64), np.zeros(0, np.int64)
        return cls(points, numbers, points, numbers)

    def select(self, which: NDArray[np.generic]) -> Tips:
        """The rows that `which` names."""
        return Tips(self.start[which], self.stroke[which], self.pivot[which], self.heading[which])


class Canvas:
    """How far the pixels of `count` images are taken, 0 to 1; with room around them for windows that stick out."""

    def __init__(self, count: int, options: PathfinderOptions) -> None:
        """Empty images, but for the border that `padding` takes."""
        self.options = options
        self.strokes: Strokes = make_strokes(options)
        self.size, self.reach = options.image_size, self.strokes.reach
        self.side = self.size + 2 * self.reach
        self._inside = self._all_but(0)
        self.taken = np.empty((count, self.side**2), np.float32)
        self.clear()
        grid = np.arange(-self.reach, self.reach + 1)
        self._window = (grid[:, None] * self.side + grid).ravel()
        disc = np.arange(-options.paddle_margin, options.paddle_margin + 1)
        near = disc[:, None] ** 2 + disc**2 <= options.paddle_margin**2
        self._near = (disc[:, None] * self.side + disc)[near]
        self._margin = self.strokes.margin.astype(np.float32)

    def clear(self) -> None:
        """Empty the images again."""
        self.taken[:] = self._inside & ~self._all_but(self.options.padding)

    def _all_but(self, border: int) -> Flags:
        """The pixels of the image but for a border, flat."""
        inner = np.zeros((self.side, self.side), bool)
        edge = self.reach + border
        inner[edge : self.side - edge, edge : self.side - edge] = True
        return inner.ravel()

    def _at(self, pixels: Ints) -> Ints:
        return (pixels[..., 0] + self.reach) * self.side + pixels[..., 1] + self.reach

    def holds(self, pixels: Ints) -> Flags:
        """Which pixels (..., 2) lie within the image."""
        return np.asarray(((pixels >= 0) & (pixels < self.size)).all(-1))

    def collides(self, rows: Rows, start: Ints, stroke: Ints) -> Flags:
        """Which paddles would run over a margin."""
        window = (rows * self.side**2 + self._at(start))[:, None] + self._window
        overlap: NDArray[np.float32] = (self.taken.ravel()[window] + self._margin[stroke]).max(1)
        return overlap >= COLLISION

    def occupy(self, rows: Rows, tips: Tips) -> None:
        """Add the margins of the newest paddles."""
        window = self._at(tips.start)[:, None] + self._window
        margin = self._margin[tips.stroke] * self._inside[window]
        self.taken[rows[:, None], window] = np.maximum(self.taken[rows[:, None], window], margin)

    def extend(self, rows: Rows, tips: Tips, random: np.random.Generator) -> tuple[Tips, Flags]:
        """One more paddle for the curve in each row; the flags say where there was room for it.

        The next paddle ends on a pixel of the circle around the next pivot, drawn with the weight
        cos^2(continuity * turn) times how free the surroundings of the pixel are.
        """
        pivot = move(tips.pivot, self.strokes.advance[tips.heading])
        ends = pivot[:, None] + self.strokes.circle
        inside = self.holds(ends)
        centre = rows[:, None] * self.side**2 + self._at(np.clip(ends, 0, self.size - 1))
        taken = np.zeros(centre.shape, np.float32)
        for offset in self._near:
            np.maximum(taken, self.taken.ravel()[centre + offset], out=taken)
        weight = self.strokes.turn_weight[tips.heading] * (1 - taken.astype(np.float64)) * inside
        cumulative = weight.cumsum(1)
        total = cumulative[:, -1]
        chosen = np.zeros(len(rows), np.int64)
        found = np.zeros(len(rows), bool)
        open_rows = np.flatnonzero(total > 1e-4)
        for _ in range(self.options.paddle_tries):
            drawn = random.random(len(open_rows)) * total[open_rows]
            pick = (cumulative[open_rows] > drawn[:, None]).argmax(1)
            start = ends[open_rows, pick]
            clear = ~self.collides(rows[open_rows], start, self.strokes.inward[pick])
            chosen[open_rows[clear]], found[open_rows[clear]] = pick[clear], True
            open_rows = open_rows[~clear]
        self.occupy(rows[found], tips.select(found))
        each = np.arange(len(rows))
        grown = Tips(ends[each, chosen], self.strokes.inward[chosen], pivot, self.strokes.outward[chosen])
        return grown, found

    def first_paddle(self, start: Ints, heading: Ints) -> tuple[Tips, Flags]:
        """Curves that begin at `start`; the flags say where the paddle and its pivot lie within the image."""
        head = move(start, self.strokes.head[heading])
        pivot = move(head, self.strokes.back[heading])
        return Tips(start, heading, pivot, heading), self.holds(head) & self.holds(pivot)

    def room(self, rows: Rows, headings: Ints, border: int) -> Flags:
        """(n, size * size): where a first paddle has room, away from a border of this width."""
        free = self.taken[rows] <= TAKEN
        free &= self._all_but(border) | ~self._inside
        axis = np.arange(self.reach, self.reach + self.size)
        pixels = (axis[:, None] * self.side + axis).ravel()
        footprint = self.strokes.footprint[headings]
        offsets = footprint[..., 0] * self.side + footprint[..., 1]
        room = np.repeat(self.strokes.can_begin[headings][:, None], len(pixels), axis=1)
        flat, base = free.ravel(), np.arange(len(rows))[:, None] * free.shape[1] + pixels
        for column in offsets.T:
            room &= flat[base + column[:, None]]
        return room

    def draw_start(self, room: Flags, random: np.random.Generator) -> Ints:
        """A pixel per row, uniform among those with room, of which there must be one."""
        wanted = (random.random(len(room)) * room.sum(1)).astype(np.int64)
        place = (room.cumsum(1, dtype=np.int32) > wanted[:, None]).argmax(1)
        return np.stack(np.divmod(place, self.size), -1)


def draw_headings(count: int, random: np.random.Generator) -> Ints:
    """Directions in whole degrees."""
    return random.integers(NUM_DEGREES, size=count)
