"""ListOps of the Long Range Arena: nested lists of digits under MIN, MAX, MED and SM; the class is the answer.

An expression is a digit, or an operator with arguments: `[MAX 2 9 [MIN 4 7 ] 0 ]`; the round brackets of the published
files, which carry no information, are left out.

The generator draws many expressions at once, as arrays: their nodes level by level, each level from the first tree to
the last. The arguments of a level's operators are the next level, in the same order, so the arguments of one operator
lie side by side there, and sums over them are `reduceat`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from pydantic import Field

from wellcond.errors import DataError
from wellcond.lab.data.base import TensorDataset
from wellcond.lab.data.generated import GeneratorOptions, register_generator

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
}
SYMBOLS = (*"0123456789", *(f"[{name}" for name in OPERATORS), "]")
"""By token id."""
FIRST_OPENING, CLOSING, PADDING = 10, 14, -1

OPERATOR_PROBABILITY = 0.25
RAREST = 1e-6
"""Lengths that a smaller part of all expressions has are refused."""
Level = tuple[np.ndarray, np.ndarray]
"""Nodes of many trees at one depth: number of arguments of each (0 for a digit), and its token."""


class ListOpsOptions(GeneratorOptions):
    """Options of `listops`; the defaults are the published ones."""

    class_names = tuple("0123456789")
    vocabulary_size = len(SYMBOLS)
    chunk = 1000
    max_depth: int = Field(10, ge=2, le=50)
    max_args: int = Field(10, ge=2, le=100)
    min_length: int = Field(500, ge=0)
    max_length: int = Field(2000, ge=2, le=16384)
    """Expressions are longer than `min_length` and shorter than `max_length`, brackets counted, and padded to it."""

    @property
    def distinct(self) -> bool:
        """Always: short expressions would repeat."""
        return True


@register_generator("listops", ListOpsOptions)
def listops(count: int, options: ListOpsOptions, generator: torch.Generator) -> TensorDataset:
    """Token ids (n, max_length), padded with -1; drawn as the published generator draws, and with its lengths.

    A node above `max_depth` (the root has depth 1) is an operator with probability 1/4, with 2 to `max_args` arguments,
    all numbers and operators alike likely; else a digit. Whole trees are drawn until enough have a length asked for.
    """
    accepted = length_distribution(options)[options.min_length + 1 :].sum()
    if accepted < RAREST:
        raise DataError(
            "listops: hardly any expression has a length that was asked for.",
            expected=f"lengths between {options.min_length} and {options.max_length} in at least {RAREST:g} of all",
            found=f"{accepted:.2g} of all, with max_depth = {options.max_depth} and max_args = {options.max_args}",
        )
    seed = int(torch.randint(2**62, (), generator=generator))
    random = np.random.Generator(np.random.PCG64(seed))
    rows, found = [], 0
    # Rounded, so that another machine, whose last bits differ, draws as many trees at once and so the same ones.
    drawn_for_one = 2 ** (-round(8 * math.log2(accepted)) / 8)
    while found < count:
        num_trees = min(2**15, math.ceil(1.1 * (count - found) * drawn_for_one) + 16)
        levels = _draw_trees(num_trees, count - found, options, random)
        if levels:
            rows.append(to_rows(levels, options.max_length))
            found += len(rows[-1])
    tokens = np.concatenate(rows)
    labels = torch.tensor([evaluate(row[row != PADDING].tolist()) for row in tokens])
    return TensorDataset("tokens", torch.from_numpy(tokens), labels)


def _draw_trees(num_trees: int, most: int, options: ListOpsOptions, random: np.random.Generator) -> list[Level]:
    """The first trees of those drawn that have a length asked for."""
    tree = np.arange(num_trees)
    # What is known of each length: a node counts 1 until it turns out an operator, which counts 2 and its arguments.
    length = np.ones(num_trees, np.int64)
    drawn: list[tuple[np.ndarray, np.ndarray]] = []
    for depth in range(1, options.max_depth + 1):
        arguments = np.zeros(len(tree), np.int64)
        if depth < options.max_depth:
            where = np.flatnonzero(random.random(len(tree)) < OPERATOR_PROBABILITY)
            arguments[where] = 2 + np.floor(random.random(len(where)) * (options.max_args - 1)).astype(np.int64)
            owners, counts = tree[where], arguments[where]
            length += np.bincount(owners, counts + 1, num_trees).astype(np.int64)
        drawn.append((tree, arguments))
        if depth == options.max_depth or not len(where):
            break
        # Trees that are too long already are not drawn to their end.
        going_on = length[owners] < options.max_length
        tree = np.repeat(owners[going_on], counts[going_on])
    wanted = (length > options.min_length) & (length < options.max_length)
    wanted[np.flatnonzero(wanted)[most:]] = False
    levels = []
    for tree, arguments in drawn:
        arguments = arguments[wanted[tree]]
        if len(arguments):
            is_operator = arguments > 0
            chosen = random.random(len(arguments)) * np.where(is_operator, len(OPERATORS), 10)
            levels.append((arguments, np.floor(chosen).astype(np.int64) + FIRST_OPENING * is_operator))
    return levels


def length_distribution(options: ListOpsOptions) -> np.ndarray:
    """Probabilities of the lengths 0 .. max_length - 1 of drawn trees.

    With P the generating function of the lengths one level below: x 3/4 + x^2 / 4 mean(P^k, k = 2 .. max_args).
    """
    from scipy.signal import fftconvolve  # takes a second to import, in every process that trains

    size = options.max_length
    probabilities = np.zeros(size)
    probabilities[1] = 1.0
    for _ in range(options.max_depth - 1):
        power, total = probabilities, np.zeros(size)
        for _ in range(2, options.max_args + 1):
            power = fftconvolve(power, probabilities)[:size]
            total += power
        probabilities = np.zeros(size)
        probabilities[2:] = OPERATOR_PROBABILITY * total[:-2] / (options.max_args - 1)
        probabilities[1] += 1 - OPERATOR_PROBABILITY
    return probabilities


def to_rows(levels: Sequence[Level], width: int) -> np.ndarray:
    """Tokens of each tree, int8 of shape (trees, width), padded at the end; no tree may be longer than that."""
    sizes: list[np.ndarray] = []
    for arguments, _ in reversed(levels):
        size, where = np.ones(len(arguments), np.int64), np.flatnonzero(arguments)
        if len(where):
            size[where] = 2 + np.add.reduceat(sizes[-1], _first_arguments(arguments[where]))
        sizes.append(size)
    sizes.reverse()
    rows = np.full(len(sizes[0]) * width, PADDING, np.int8)
    position = np.arange(len(sizes[0])) * width
    for depth, (arguments, symbols) in enumerate(levels):
        where = np.flatnonzero(arguments)
        rows[position] = symbols
        rows[position[where] + sizes[depth][where] - 1] = CLOSING
        if len(where):
            # An argument begins behind the opening and its elder siblings.
            counts, before = arguments[where], np.cumsum(sizes[depth + 1]) - sizes[depth + 1]
            position = before + np.repeat(position[where] + 1 - before[_first_arguments(counts)], counts)
    return rows.reshape(-1, width)


def _first_arguments(counts: np.ndarray) -> np.ndarray:
    """Where the arguments of each operator begin in the next level."""
    return np.cumsum(counts) - counts


def evaluate(tokens: Iterable[int]) -> int:
    """The answer of an expression."""
    values: list[int] = []
    rules, open_operators = list(OPERATORS.values()), []
    for token in tokens:
        if token < FIRST_OPENING:
            values.append(token)
        elif token != CLOSING:
            open_operators.append((rules[token - FIRST_OPENING], values))
            values = []
        else:
            rule, outer = open_operators.pop()
            values = [*outer, rule(values)]
    return values[0]
