"""ListOps of the Long Range Arena: nested lists of digits under MIN, MAX, MED and SM; the class is the answer."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from pydantic import Field, model_validator

from wellcond.lab.data.errors import DataError
from wellcond.lab.data.generated import Generated, GeneratorOptions, register_generator
from wellcond.lab.data.listops_language import OPERATORS, SYMBOLS
from wellcond.lab.data.listops_trees import Level, answers, to_rows

OPERATOR_PROBABILITY = 0.25
RAREST = 1e-6
"""Fewer expressions than this part of the drawn ones within the lengths asked for are refused."""
MOST_AT_ONCE = 2**15


class ListOpsOptions(GeneratorOptions):
    """Options of `listops`; the defaults are the published ones."""

    max_depth: int = Field(10, ge=2, le=50)
    max_args: int = Field(10, ge=2, le=100)
    min_length: int = Field(500, ge=0)
    max_length: int = Field(2000, ge=2, le=16384)
    """Expressions are longer than `min_length` and shorter than `max_length`, brackets counted, and padded to it."""

    @model_validator(mode="after")
    def _check_lengths(self) -> ListOpsOptions:
        if self.min_length + 1 >= self.max_length:
            raise ValueError(
                f"an expression is longer than min_length and shorter than max_length: expected a max_length of at "
                f"least {self.min_length + 2}, got {self.max_length}."
            )
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = 2 + self.max_args * longest
            if longest > self.min_length:
                return self
        raise ValueError(
            f"with max_depth = {self.max_depth} and max_args = {self.max_args} no expression is longer than {longest}, "
            f"got min_length = {self.min_length}. Lower min_length or raise the others."
        )


@register_generator("listops", ListOpsOptions, chunk=1000, distinct=True)
def listops(count: int, options: ListOpsOptions, generator: torch.Generator) -> Generated:
    """Token ids (n, max_length), padded with -1; drawn as the published generator draws, and with its lengths.

    A node above `max_depth` (the root has depth 1) is an operator with probability 1/4, with 2 to `max_args` arguments,
    all numbers and operators alike likely; else a digit. Whole trees are drawn until enough have a length asked for.

    Raises:
        DataError: next to none has.
    """
    accepted = acceptance(options)
    if accepted < RAREST:
        raise DataError(
            "listops: hardly any expression has a length that was asked for.",
            expected=f"lengths between {options.min_length} and {options.max_length} in at least {RAREST:g} of all",
            found=f"{accepted:.2g} of all, with max_depth = {options.max_depth} and max_args = {options.max_args}",
            todo="Widen the lengths, or change max_depth and max_args.",
        )
    seed = int(torch.randint(2**62, (), generator=generator))
    random = np.random.Generator(np.random.PCG64(seed))
    rows, labels, found = [], [], 0
    # Rounded, so that another machine, whose last bits differ, draws as many trees at once and so the same ones.
    drawn_for_one = 2 ** (-round(8 * math.log2(accepted)) / 8)
    while found < count:
        num_trees = min(MOST_AT_ONCE, math.ceil(1.1 * (count - found) * drawn_for_one) + 16)
        levels = _label(_draw_shapes(num_trees, count - found, options, random), random)
        if levels:
            rows.append(to_rows(levels, options.max_length))
            labels.append(answers(levels))
            found += len(rows[-1])
    names = tuple(str(digit) for digit in range(10))
    tokens, values = (torch.from_numpy(np.concatenate(parts)) for parts in (rows, labels))
    return Generated("tokens", tokens, values, names, len(SYMBOLS))


def _draw_shapes(num_trees: int, most: int, options: ListOpsOptions, random: np.random.Generator) -> list[np.ndarray]:
    """Numbers of arguments, level by level, of the first drawn trees that have a length asked for."""
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
    kept = [arguments[wanted[tree]] for tree, arguments in drawn]
    return [arguments for arguments in kept if len(arguments)]


def _label(shapes: list[np.ndarray], random: np.random.Generator) -> list[Level]:
    levels = []
    for arguments in shapes:
        choices = np.where(arguments > 0, len(OPERATORS), 10)
        symbols = np.floor(random.random(len(arguments)) * choices).astype(np.int64)
        levels.append(Level(arguments, symbols))
    return levels


def acceptance(options: ListOpsOptions) -> float:
    """Part of all drawn trees whose length is one asked for, exactly."""
    probabilities = length_distribution(options.max_depth, options.max_args, options.max_length)
    return float(probabilities[options.min_length + 1 :].sum())


@functools.lru_cache(maxsize=4)
def length_distribution(max_depth: int, max_args: int, max_length: int) -> np.ndarray:
    """Probabilities of the lengths 0 .. max_length - 1.

    With P the generating function of the lengths one level below: x 3/4 + x^2 / 4 mean(P^k, k = 2 .. max_args).
    """
    from scipy.signal import fftconvolve  # takes a second to import, in every process that trains

    probabilities = np.zeros(max_length)
    probabilities[1] = 1.0
    for _ in range(max_depth - 1):
        power, total = probabilities, np.zeros(max_length)
        for _ in range(2, max_args + 1):
            power = fftconvolve(power, probabilities)[:max_length]
            total += power
        longer = np.zeros(max_length)
        longer[2:] = OPERATOR_PROBABILITY * total[:-2] / (max_args - 1)
        longer[1] += 1 - OPERATOR_PROBABILITY
        probabilities = longer
    probabilities.flags.writeable = False
    return probabilities
