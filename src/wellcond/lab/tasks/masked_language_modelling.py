"""Masked language modelling: cross entropy of hidden tokens, their perplexity, and how many are guessed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellcond.attention.distributed import unwrap
from wellcond.lab.data.base import Dataset
from wellcond.lab.data.progress import telling
from wellcond.lab.data.token_cache import open_token_stream
from wellcond.lab.settings import SequenceLength, Settings
from wellcond.lab.tasks.base import (
    EVALUATION,
    AbstractTask,
    Batch,
    Metric,
    SampleKey,
    TaskContext,
    logits_of,
    need_kind,
    register_task,
)
from wellcond.lab.tasks.masking import Masking
from wellcond.lab.tasks.token_blocks import IGNORED, TokenBlocks
from wellcond.lab.tokenizers.base import Tokenizer
from wellcond.lab.tokenizers.choose import make_tokenizer
from wellcond.lab.tokenizers.settings import TokenizerChoice


class MaskedLanguageModellingSettings(Settings):
    """Options of the task."""

    name: Literal["masked_language_modelling"] = "masked_language_modelling"
    length: Annotated[SequenceLength, Field(ge=2)] = 128
    """Tokens of a sequence; documents follow each other, and a sequence may hold the end of one and the next."""
    tokenizer: TokenizerChoice = "bytes"
    mask_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of the tokens of every sequence that are to be guessed."""
    limit_tokens: PositiveInt | None = None
    """Train on the text up to the document in which so many tokens are reached; null: all."""


class MaskedBlocks:
    """Sequences with other tokens hidden in every epoch, and always the same in evaluation."""

    in_memory = True

    def __init__(self, blocks: TokenBlocks, masking: Masking) -> None:
        """Hide tokens of blocks that do not overlap."""
        self.blocks, self.masking = blocks, masking

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.blocks)

    def fetch(self, keys: Sequence[SampleKey]) -> Batch:
        """What the model sees, where it is to guess, and what stood there."""
        return self.masking.apply(self.blocks.tokens(keys).numpy(), keys)


@register_task(MaskedLanguageModellingSettings)
class MaskedLanguageModelling(AbstractTask):
    """Hidden tokens."""

    metric = Metric("perplexity", higher_is_better=False)
    tokenizer: Tokenizer

    def __init__(self, settings: MaskedLanguageModellingSettings, context: TaskContext) -> None:
        """Tokenise every split once; a tokeniser without a mask gets one behind its vocabulary."""
        data = context.data
        need_kind(data, settings.name, "text")
        self.length = settings.length
        names = {name: f"{data.name}, {name} split" for name in ("training", "evaluation", "test")}
        with telling(context.progress):
            self.tokenizer = make_tokenizer(settings.tokenizer, data.train, names["training"], context.base)
            self._set_masking(settings.mask_fraction, context.seed)
            self.train = self._load(data.train, names["training"], settings.limit_tokens)
            self.evaluation = self._load(data.evaluation, names["evaluation"])
            self.test = None if context.test is None else self._load(context.test, names["test"])

    def _set_masking(self, fraction: float, seed: int) -> None:
        special = self.tokenizer.special
        size = self.tokenizer.vocabulary_size
        mask, self.vocabulary = (size, size + 1) if special.mask is None else (special.mask, size)
        self.masking = Masking(
            fraction, mask_token=mask, special=special.ids, vocabulary_size=self.vocabulary, seed=seed
        )

    def _load(self, split: Dataset, what: str, limit: int | None = None) -> MaskedBlocks:
        stream = open_token_stream(split, self.tokenizer, what, limit_tokens=limit)
        return MaskedBlocks(TokenBlocks(stream, self.length, what), self.masking)

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, longest sequence and the padding token."""
        length = "length" if kind == "wellcond" else "max_position_embeddings"
        return {"vocab_size": self.vocabulary, length: self.length, "pad_token_id": self.tokenizer.special.pad}

    def auto_class(self) -> str:
        """With a head that guesses tokens."""
        return "AutoModelForMaskedLM"

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
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "masked_accuracy": sums["correct"] / sums["count"],
        }

    def probe(self, num_samples: int) -> dict[str, Tensor]:
        """Evaluation sequences as the model sees them."""
        keys = [(index, EVALUATION) for index in range(min(num_samples, len(self.evaluation)))]
        return {"input_ids": self.evaluation.fetch(keys)["input_ids"]}


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
