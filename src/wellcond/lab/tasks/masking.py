"""Which tokens of a sequence are hidden, and behind what: a pure function of seed, sample and draw.

As in the release of Crammed BERT, the share of masked tokens is exact in every sequence, not only on average, and so
are the shares of [MASK], of random tokens and of tokens left as they are among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wellcond.lab.seeding import derive
from wellcond.lab.tasks.base import EVALUATION, Batch, SampleKey
from wellcond.lab.tasks.token_blocks import IGNORED

Words = NDArray[np.uint64]
HIDDEN, RANDOM = 0.8, 0.1
"""Shares of masked tokens that become [MASK] and that become a random token; the others stay."""

# SplitMix64 (Steele, Lea, Flood 2014): number n of the stream of a seed s is mix(s + n * gamma), any n at once.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def random_words(seed: int, keys: Sequence[SampleKey], count: int) -> Words:
    """`count` random 64-bit numbers for each key, (keys, count), the same whatever other keys there are.

    Example:
        >>> both = random_words(0, [(3, 0), (4, 0)], 2)
        >>> bool((both[1] == random_words(0, [(4, 0)], 2)[0]).all()), len(set(both.flatten().tolist()))
        (True, 4)
    """
    sample, draw = np.array(keys, dtype=np.int64).astype(np.uint64).T
    start = _mix(_mix(np.uint64(seed) + _GAMMA * sample) + _GAMMA * draw)
    return _mix(start[:, None] + _GAMMA * np.arange(1, count + 1, dtype=np.uint64))


class Masking:
    """Hides a share of the ordinary tokens of every sequence."""

    def __init__(
        self, fraction: float, *, mask_token: int, special: Sequence[int], vocabulary_size: int, seed: int
    ) -> None:
        """Take over the rules.

        Args:
            fraction: Of the tokens that are not special, rounded to a whole number, but at least one.
            mask_token: What hides them.
            special: Tokens that are neither masked nor drawn as random ones.
            vocabulary_size: Ids are below it.
            seed: Of the run.
        """
        self.fraction, self.mask_token = fraction, mask_token
        self.is_special = np.zeros(vocabulary_size, dtype=bool)
        self.is_special[[mask_token, *special]] = True
        self.ordinary = np.flatnonzero(~self.is_special)
        # Every seed is evaluated on the same masked tokens.
        self.seeds = derive(seed, "masking"), derive(0, "masking for evaluation")

    def apply(self, tokens: NDArray[np.int64], keys: Sequence[SampleKey]) -> Batch:
        """Mask sequences of one length.

        Returns: `input_ids` (sequences, length) with masked tokens; `positions` (sequences, most that are masked) of
        these tokens in their sequence; `labels`, what stood there. A sequence with fewer has label -100 in the rest.
        """
        length = tokens.shape[1]
        most = self._number(np.array(length))
        words = self._words(keys, length + int(most))
        special = self.is_special[tokens]
        # The smallest of as many random numbers as there are tokens choose without bias, and in a random order.
        ranks = np.where(special, np.iinfo(np.uint64).max, words[:, :length])
        positions = ranks.argsort(axis=1, kind="stable")[:, : int(most)]
        chosen = np.take_along_axis(tokens, positions, axis=1)
        number = self._number(length - special.sum(axis=1))[:, None]
        place = np.arange(int(most))
        hidden, replaced = (np.rint(share * number) for share in (HIDDEN, HIDDEN + RANDOM))
        drawn = self.ordinary[words[:, length:] % np.uint64(len(self.ordinary))]
        seen = np.where(place < hidden, self.mask_token, np.where(place < replaced, drawn, chosen))
        masked = tokens.copy()
        np.put_along_axis(masked, positions, seen, axis=1)
        labels = np.where(place < number, chosen, IGNORED)
        return {
            name: _tensor(value)
            for name, value in (("input_ids", masked), ("positions", positions), ("labels", labels))
        }

    def _number(self, ordinary: NDArray[Any]) -> NDArray[np.int64]:
        return np.minimum(np.maximum(np.rint(self.fraction * ordinary).astype(np.int64), 1), ordinary)

    def _words(self, keys: Sequence[SampleKey], count: int) -> Words:
        """Random numbers of keys for training and for evaluation, which batches do not mix."""
        training, evaluation = self.seeds
        return random_words(evaluation if keys[0][1] == EVALUATION else training, keys, count)


def _tensor(values: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
