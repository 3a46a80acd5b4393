"""Many ListOps expressions at once, as arrays: their nodes level by level, each level from the first tree to the last.

The arguments of a level's operators are the next level, in the same order, so the arguments of one operator lie side by
side there, and sums or minima over them are `reduceat`. Values, lengths and positions take one pass over the levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wellcond.lab.data.listops_language import CLOSING, FIRST_OPENING, OPERATORS, PADDING, is_opening

MIN, MAX, MED, SM = range(len(OPERATORS))


@dataclass(frozen=True, eq=False)
class Level:
    """Nodes at one depth."""

    arguments: np.ndarray
    """Number of arguments of each node; 0 for a digit."""
    symbols: np.ndarray
    """The digit, or the number of the operator."""

    @property
    def operators(self) -> np.ndarray:
        """Which nodes are operators."""
        return self.arguments > 0

    @property
    def starts(self) -> np.ndarray:
        """First argument of each operator, in the next level."""
        counts = self.arguments[self.operators]
        return np.cumsum(counts) - counts


def answers(levels: Sequence[Level]) -> np.ndarray:
    """Value of each tree."""
    below = np.zeros(0, np.int64)
    for level in reversed(levels):
        values = level.symbols.astype(np.int64)
        where = np.flatnonzero(level.operators)
        if len(where):
            values[where] = _apply(level.symbols[where], level.arguments[where], level.starts, below)
        below = values
    return below


def _apply(operators: np.ndarray, counts: np.ndarray, starts: np.ndarray, values: np.ndarray) -> np.ndarray:
    results = np.where(operators == MIN, np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts))
    results = np.where(operators == SM, np.add.reduceat(values, starts) % 10, results)
    median = np.flatnonzero(operators == MED)
    if len(median):
        counts = counts[median]
        first = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(median)), counts)
        chosen = values[np.arange(len(owner)) + np.repeat(starts[median] - first, counts)]
        # Sorted by operator, then by value: the operators stay in their places.
        ordered = np.sort(owner * 10 + chosen) - owner * 10
        results[median] = (ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) // 2
    return results


def to_rows(levels: Sequence[Level], width: int) -> np.ndarray:
    """Tokens of each tree, int8 of shape (trees, width), padded at the end; no tree may be longer than that."""
    sizes: list[np.ndarray] = []
    for level in reversed(levels):
        size = np.ones(len(level.arguments), np.int64)
        if level.operators.any():
            size[level.operators] = 2 + np.add.reduceat(sizes[-1], level.starts)
        sizes.append(size)
    sizes.reverse()
    rows = np.full(len(sizes[0]) * width, PADDING, np.int8)
    position = np.arange(len(sizes[0])) * width
    for depth, (level, size) in enumerate(zip(levels, sizes, strict=True)):
        where = level.operators
        rows[position] = level.symbols + FIRST_OPENING * where
        rows[position[where] + size[where] - 1] = CLOSING
        if not where.any():
            break
        # An argument begins behind the opening and its elder siblings.
        before = np.cumsum(sizes[depth + 1]) - sizes[depth + 1]
        position = before + np.repeat(position[where] + 1 - before[level.starts], level.arguments[where])
    return rows.reshape(-1, width)


def from_rows(rows: np.ndarray) -> tuple[list[Level], np.ndarray]:
    """Levels of the rows of tokens that are one expression each, and which rows those are."""
    opening, closing = is_opening(rows), rows == CLOSING
    change = opening.astype(np.int16) - closing
    after = np.cumsum(change, axis=1, dtype=np.int16)
    before = after - change
    inside = rows != PADDING
    lengths = inside.sum(1)
    columns = np.arange(rows.shape[1])
    # One expression: its depth returns to 0 with its last symbol and not before, and no operator is closed at once.
    is_end = inside & (after <= 0)
    good = (lengths > 0) & (is_end.sum(1) == 1) & (is_end.argmax(1) == lengths - 1) & (after.min(1) >= 0)
    good &= ~(opening[:, :-1] & closing[:, 1:]).any(1) & ~(inside & (columns >= lengths[:, None])).any(1)
    rows, opening, closing, before, after = (part[good].ravel() for part in (rows, opening, closing, before, after))
    is_node = (opening | (rows >= 0)) & ~closing
    nodes, ends = np.flatnonzero(is_node), np.flatnonzero(closing)
    node_depth, end_depth = before[nodes], after[ends]
    levels: list[Level] = []
    places = nodes[node_depth == 0]
    while len(places):
        below = nodes[node_depth == len(levels) + 1]
        where = opening[places]
        # At one depth brackets do not nest, so they close in the order in which they open.
        counts = np.searchsorted(below, ends[end_depth == len(levels)]) - np.searchsorted(below, places[where])
        arguments = np.zeros(len(places), np.int64)
        arguments[where] = counts
        levels.append(Level(arguments, rows[places].astype(np.int64) - FIRST_OPENING * where))
        places = below
    return levels, good
