"""Masked language modelling: cross entropy of hidden tokens, their perplexity, and how many are guessed.

Which tokens are hidden, and behind what, is a pure function of seed, sample and draw. As in the release of Crammed
BERT, the share of masked tokens is exact in every sequence, not only on average, and so are the shares of [MASK], of
random tokens and of tokens left as they are among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellcond.attention.distributed import unwrap
from wellcond.lab.data.text import TokenStream, open_token_stream
from wellcond.lab.seeding import derive
from wellcond.lab.settings import SequenceLength, Settings
from wellcond.lab.tasks.base import EVALUATION, AbstractTask, Batch, Keys, Metric, TaskContext, logits_of, register_task
from wellcond.lab.tasks.language_modelling import IGNORED, need_tokens, perplexity, tokens_at
from wellcond.lab.tokenizers import Tokenizer, TokenizerChoice, make_tokenizer

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


class Masking:
    """Hides a share of the ordinary tokens of every sequence."""

    def __init__(self, *, mask_token: int, special: Sequence[int], vocabulary_size: int, seed: int) -> None:
        """A share of the tokens that are not special, rounded, but at least one; special ones are not drawn either."""
        self.mask_token = mask_token
        self.is_special = np.zeros(vocabulary_size, dtype=bool)
        self.is_special[[mask_token, *special]] = True
        self.ordinary = np.flatnonzero(~self.is_special)
        # Every seed is evaluated on the same masked tokens.
        self.seeds = derive(seed, "masking"), derive(0, "masking for evaluation")

    def apply(self, tokens: NDArray[np.int64], keys: Keys) -> Batch:
        """Mask sequences of one length.

        Returns: `input_ids` (sequences, length) with masked tokens; `positions` (sequences, most that are masked) of
        these tokens in their sequence; `labels`, what stood there. A sequence with fewer has label -100 in the rest.
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
        labels = np.where(place < number, chosen, IGNORED)
        batch = {"input_ids": masked, "positions": positions, "labels": labels}
        return {name: torch.from_numpy(np.ascontiguousarray(values, np.int64)) for name, values in batch.items()}

    def _number(self, ordinary: NDArray[Any]) -> NDArray[np.int64]:
        return np.minimum(np.maximum(np.rint(MASKED * ordinary).astype(np.int64), 1), ordinary)


@dataclass(frozen=True)
class MaskedBlocks:
    """Sequences with other tokens hidden in every epoch, and always the same in evaluation."""

    stream: TokenStream
    length: int
    masking: Masking
    in_memory: ClassVar[bool] = True

    def __len__(self) -> int:
        """Number of sequences; a rest that is shorter is left out."""
        return len(self.stream) // self.length

    def fetch(self, keys: Keys) -> Batch:
        """What the model sees, where it is to guess, and what stood there."""
        places = np.array([index for index, _ in keys])[:, None] * self.length + np.arange(self.length)
        return self.masking.apply(tokens_at(self.stream, places).numpy(), keys)


@register_task(MaskedLanguageModellingSettings)
class MaskedLanguageModelling(AbstractTask):
    """Hidden tokens."""

    metric = Metric("perplexity", higher_is_better=False)
    auto_class = "AutoModelForMaskedLM"
    tokenizer: Tokenizer

    def __init__(self, settings: MaskedLanguageModellingSettings, context: TaskContext) -> None:
        """Tokenise every split once; a tokeniser without a mask gets one behind its vocabulary."""
        data, self.length = context.data, settings.length
        context.need_kind(settings.name, "text")
        samples = {}
        what = f"{data.name}, training split"
        self.tokenizer = make_tokenizer(settings.tokenizer, data.train, what, context.base)
        special, size = self.tokenizer.special, self.tokenizer.vocabulary_size
        mask, self.vocabulary = (special["mask"], size) if "mask" in special else (size, size + 1)
        ids = list(special.values())
        masking = Masking(mask_token=mask, special=ids, vocabulary_size=self.vocabulary, seed=context.seed)
        for name, split in context.splits.items():
            what, limit = f"{data.name}, {name} split", settings.limit_tokens if name == "training" else None
            stream = open_token_stream(split, self.tokenizer, what, limit_tokens=limit)
            need_tokens(stream, self.length, what)
            samples[name] = MaskedBlocks(stream, self.length, masking)
        self.train, self.evaluation, self.test = samples["training"], samples["evaluation"], samples.get("test")

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, longest sequence and the padding token."""
        length = "length" if kind == "wellcond" else "max_position_embeddings"
        return {"vocab_size": self.vocabulary, length: self.length, "pad_token_id": self.tokenizer.special.get("pad")}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy in nats, summed over the hidden tokens."""
        return _cross_entropy(masked_logits(model, batch), batch["labels"])

    def num_terms(self, batch: Batch) -> Tensor:
        """Hidden tokens."""
        return (batch["labels"] != IGNORED).sum()

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Loss, right guesses and count."""
        logits = masked_logits(model, batch)
        return {
            "loss": _cross_entropy(logits, batch["labels"]).double(),
            "correct": (logits.argmax(-1) == batch["labels"].flatten()).sum().double(),
            "count": self.num_terms(batch).double(),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Mean loss of a hidden token, its exponential, and the share of right guesses."""
        loss = sums["loss"] / sums["count"]
        return {"loss": loss, "perplexity": perplexity(loss), "masked_accuracy": sums["correct"] / sums["count"]}


def masked_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Logits (places to guess, vocabulary), those of one sequence after the other.

    A model whose forward takes `positions` computes no others: the product with the vocabulary is a large part of a
    step.
    """
    tokens, positions = batch["input_ids"], batch["positions"]
    rows, length = tokens.shape
    flat = (positions + length * torch.arange(rows, device=tokens.device)[:, None]).flatten()
    if "positions" in inspect.signature(type(unwrap(model)).forward).parameters:
        return logits_of(model(input_ids=tokens, positions=flat))
    return logits_of(model(input_ids=tokens)).flatten(0, 1)[flat]


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
