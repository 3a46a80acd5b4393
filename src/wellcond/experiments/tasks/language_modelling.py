"""Causal language modelling on bytes: cross entropy of the next token, perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellcond.experiments.settings import RecipeError, Settings
from wellcond.experiments.tasks.base import (
    EVALUATION,
    AbstractTask,
    Batch,
    Metric,
    SampleKey,
    TaskContext,
    need_kind,
    register_task,
)
from wellcond.experiments.tasks.byte_text import VOCABULARY, byte_stream
from wellcond.experiments.tasks.image_classification import logits_of


class LanguageModellingSettings(Settings):
    """Options of the task."""

    name: Literal["language_modelling"] = "language_modelling"
    context: Annotated[int, Field(ge=2)]
    """Tokens a model sees at once; the first of them is not predicted."""


class Blocks:
    """A stream of tokens in blocks that do not overlap; each predicts its own tokens from the second on."""

    in_memory = True

    def __init__(self, stream: Tensor, context: int, what: str) -> None:
        """A rest shorter than a block is left out."""
        count = len(stream) // context
        if count == 0:
            raise RecipeError(f"{what}: expected at least {context} bytes of text (task.context), found {len(stream)}")
        self.rows = stream[: count * context].view(count, context)

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.rows)

    def fetch(self, keys: Sequence[SampleKey]) -> Batch:
        """Tokens."""
        return {"input_ids": self.rows[torch.tensor([index for index, _ in keys])].long()}


@register_task(LanguageModellingSettings)
class LanguageModelling(AbstractTask):
    """Next byte."""

    metric = Metric("perplexity", higher_is_better=False)

    def __init__(self, settings: LanguageModellingSettings, context: TaskContext) -> None:
        """Join the documents of each split into one stream."""
        data = context.data
        need_kind(data, settings.name, "text")
        self.context = settings.context
        self.train, self.evaluation = (
            Blocks(byte_stream(split, what), settings.context, what)
            for split, what in (
                (data.train, f"{data.name}, training split"),
                (data.evaluation, f"{data.name}, evaluation split"),
            )
        )

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary and context; token 0 ends a document."""
        return {"vocab_size": VOCABULARY, "max_position_embeddings": self.context, "bos_token_id": 0, "eos_token_id": 0}

    def auto_class(self) -> str:
        """With a language-model head."""
        return "AutoModelForCausalLM"

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy in nats, summed over the tokens predicted."""
        tokens = batch["input_ids"]
        logits = logits_of(model(input_ids=tokens, use_cache=False))[:, :-1]
        return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")

    def num_terms(self, batch: Batch) -> int:
        """Tokens predicted."""
        return batch["input_ids"][:, 1:].numel()

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Loss and count."""
        loss = self.loss(model, batch).double()
        return {"loss": loss, "count": torch.full_like(loss, self.num_terms(batch))}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Mean loss per byte, and its exponential."""
        loss = sums["loss"] / sums["count"]
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    def probe(self, num_samples: int) -> dict[str, Tensor]:
        """Evaluation blocks."""
        keys = [(index, EVALUATION) for index in range(min(num_samples, len(self.evaluation)))]
        return self.evaluation.fetch(keys)
