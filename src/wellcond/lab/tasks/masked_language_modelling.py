"""Masked language modelling: cross entropy of hidden tokens, their perplexity, and how many are guessed.

Which tokens are hidden, and behind what, is a pure function of seed, sample and draw. As in the release of Crammed
BERT, the share of masked tokens is exact in every sequence, not only on average, and so are the shares of [MASK], of
random tokens and of tokens left as they are among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from wellcond.attention.distributed import unwrap
from wellcond.lab.data.text import TokenStream
from wellcond.lab.seeding import derive
from wellcond.lab.settings import SequenceLength, Settings
from wellcond.lab.tasks.base import EVALUATION, IGNORED, Batch, Keys, Samples, logits_of, register_task
from wellcond.lab.tasks.language_modelling import TokenStreamTask, perplexity, tokens_at
from wellcond.lab.tokenizers import TokenizerChoice

Words = NDArray[np.uint64]
MASKED, HIDDEN, RANDOM = 0.25, 0.8, 0.1
"""Share of the tokens of every sequence that are masked; of these, shares that become [MASK] and that become a random
token; the others stay."""


class MaskedLanguageModellingSettings(Settings):
    """Options of the task."""

    name: Literal["masked_language_modelling"] = "masked_language_modelling"
    length: Annotated[SequenceLength, Field(ge=2)] = 128
    """Tokens of a sequence; documents follow each other, and a sequence may hold the end of one and the next."""
    tokenizer: TokenizerChoice = "bytes"
    limit_tokens: PositiveInt | None = None
    """Train on the text up to the document in which so many tokens are reached; null: all."""


# SplitMix64 (Steele, Lea, Flood 2014): number n of the stream of a seed s is mix(s + n * gamma), any n at once.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def random_words(seed: int, keys: Keys, count: int) -> Words:
    """`count` random 64-bit numbers for each key, (keys, count), the same whatever other keys there are."""
    sample, draw = np.array(keys, dtype=np.int64).astype(np.uint64).T
    start = _mix(_mix(np.uint64(seed) + _GAMMA * sample) + _GAMMA * draw)
    return _mix(start[:, None] + _GAMMA * np.arange(1, count + 1, dtype=np.uint64))


class MaskedBlocks(Samples):
    """Sequences of one length, with other tokens hidden in every epoch, and always the same in evaluation.

    Of the tokens that are not special a share is hidden, rounded, but at least one; special ones are not drawn either.
    """

    def __init__(
        self, stream: TokenStream, length: int, *, mask: int, special: Sequence[int], vocabulary: int, seed: int
    ) -> None:
        self.stream, self.length, self.mask_token = stream, length, mask
        self.is_special = np.zeros(vocabulary, dtype=bool)
        self.is_special[[mask, *special]] = True
        self.ordinary = np.flatnonzero(~self.is_special)
        # Every seed is evaluated on the same masked tokens.
        self.seeds = derive(seed, "masking"), derive(0, "masking for evaluation")

    def __len__(self) -> int:
        return len(self.stream) // self.length  # a rest that is shorter is left out

    def fetch(self, keys: Keys) -> Batch:
        """What the model sees, where it is to guess, and what stood there."""
        places = np.array([index for index, _ in keys])[:, None] * self.length + np.arange(self.length)
        return self.hide(tokens_at(self.stream, places).numpy(), keys)

    def hide(self, tokens: NDArray[np.int64], keys: Keys) -> Batch:
        """Mask sequences of one length.

        Returns: `input_ids` (sequences, length) with masked tokens; `positions` (sequences, most that are masked) of
        these tokens in their sequence; `label`, what stood there. A sequence with fewer has label -100 in the rest.
        """
        length = tokens.shape[1]
        most = int(self._number(np.array(length)))
        training, evaluation = self.seeds  # batches do not mix the two
        words = random_words(evaluation if keys[0][1] == EVALUATION else training, keys, length + most)
        special = self.is_special[tokens]
        # The smallest of as many random numbers as there are tokens choose without bias, and in a random order.
        ranks = np.where(special, np.iinfo(np.uint64).max, words[:, :length])
        positions = ranks.argsort(axis=1, kind="stable")[:, :most]
        chosen = np.take_along_axis(tokens, positions, axis=1)
        number = self._number(length - special.sum(axis=1))[:, None]
        place = np.arange(most)
        hidden, replaced = (np.rint(share * number) for share in (HIDDEN, HIDDEN + RANDOM))
        drawn = self.ordinary[words[:, length:] % np.uint64(len(self.ordinary))]
        seen = np.where(place < hidden, self.mask_token, np.where(place < replaced, drawn, chosen))
        masked = tokens.copy()
        np.put_along_axis(masked, positions, seen, axis=1)
        batch = {"input_ids": masked, "positions": positions, "label": np.where(place < number, chosen, IGNORED)}
        return {name: torch.from_numpy(np.ascontiguousarray(values, np.int64)) for name, values in batch.items()}

    def _number(self, ordinary: NDArray[Any]) -> NDArray[np.int64]:
        return np.minimum(np.maximum(np.rint(MASKED * ordinary).astype(np.int64), 1), ordinary)


@register_task(MaskedLanguageModellingSettings)
class MaskedLanguageModelling(TokenStreamTask):
    """Hidden tokens."""

    auto_class = "AutoModelForMaskedLM"

    @property
    def vocabulary(self) -> int:
        """Number of tokens; a tokeniser without a mask gets one behind its own."""
        return self.tokenizer.vocabulary_size + ("mask" not in self.tokenizer.special)

    def blocks(self, stream: TokenStream, *, training: bool) -> MaskedBlocks:
        """Masked alike in every split."""
        special, size = self.tokenizer.special, self.vocabulary
        mask, unmasked = special.get("mask", size - 1), list(special.values())
        return MaskedBlocks(stream, self.length, mask=mask, special=unmasked, vocabulary=size, seed=self.seed)

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, longest sequence and the padding token."""
        length = "length" if kind == "wellcond" else "max_position_embeddings"
        return {"vocab_size": self.vocabulary, length: self.length, "pad_token_id": self.tokenizer.special.get("pad")}

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Of the places to guess, those of one sequence after the other.

        A model whose forward takes `positions` computes no others: the product with the vocabulary is a large part of
        a step.
        """
        tokens, positions = batch["input_ids"], batch["positions"]
        rows, length = tokens.shape
        flat = (positions + length * torch.arange(rows, device=tokens.device)[:, None]).flatten()
        if "positions" in inspect.signature(type(unwrap(model)).forward).parameters:
            return logits_of(model(input_ids=tokens, positions=flat))
        return logits_of(model(input_ids=tokens)).flatten(0, 1)[flat]

    def metrics(self, sums: Mapping[str, Any], samples: Samples) -> dict[str, float]:
        """Mean loss of a hidden token, its exponential, and the share of right guesses."""
        means = super().metrics(sums, samples)
        return {"loss": means["loss"], "perplexity": perplexity(means["loss"]), "masked_accuracy": means["accuracy"]}
