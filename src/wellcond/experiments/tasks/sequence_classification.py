"""Classification of token sequences, or of text read as bytes: cross entropy, accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import PositiveInt
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
    need_classes,
    need_kind,
    register_task,
)
from wellcond.experiments.tasks.byte_text import PADDING, VOCABULARY, padded_documents
from wellcond.experiments.tasks.image_classification import classification_sums, logits_of
from wellcond.experiments.tasks.image_sets import check_labels


class SequenceClassificationSettings(Settings):
    """Options of the task."""

    name: Literal["sequence_classification"] = "sequence_classification"
    length: PositiveInt | None = None
    """Sequences are cut or padded to it; needed for text, the length of the data for tokens."""


class TokenRows:
    """Sequences of one length in memory."""

    in_memory = True

    def __init__(self, tokens: Tensor, labels: Tensor) -> None:
        """Token 0 is padding, which is masked."""
        self.tokens, self.labels = tokens, labels

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.tokens)

    def fetch(self, keys: Sequence[SampleKey]) -> Batch:
        """Tokens, mask and labels."""
        indices = torch.tensor([index for index, _ in keys])
        tokens = self.tokens[indices].long()
        return {"input_ids": tokens, "attention_mask": (tokens != PADDING).long(), "label": self.labels[indices]}


@register_task(SequenceClassificationSettings)
class SequenceClassification(AbstractTask):
    """Logits against a label."""

    metric = Metric("accuracy", higher_is_better=True, percent=True)

    def __init__(self, settings: SequenceClassificationSettings, context: TaskContext) -> None:
        """Encode everything once."""
        data = context.data
        need_kind(data, settings.name, "text", "tokens")
        self.num_classes = need_classes(data, settings.name)
        if data.kind == "text" and settings.length is None:
            raise RecipeError("sequence_classification of text: expected task.length, for instance 256")
        # Like bytes, tokens are shifted by one to make room for padding: models never attend to it nor embed it.
        self.vocabulary = VOCABULARY if data.kind == "text" else 1 + (data.vocabulary_size or 0)
        self.train, self.evaluation = (
            self._rows(split, settings.length, f"{data.name}, {name} split", context)
            for name, split in (("training", data.train), ("evaluation", data.evaluation))
        )
        self.length = self.train.tokens.shape[1]

    def _rows(self, split: Any, length: int | None, what: str, context: TaskContext) -> TokenRows:
        if context.data.kind == "text":
            assert length is not None
            told = context.progress
            tokens = padded_documents(split, length, None if told is None else lambda a, b: told("reading text", a, b))
        else:
            tokens = torch.stack([split[row]["tokens"] for row in range(len(split))])
            largest = self.vocabulary - 2
            outside = tokens[(tokens < 0) | (tokens > largest)]
            if len(outside):
                raise RecipeError(f"{what}: expected tokens from 0 to {largest}, found {int(outside[0])}")
            length = length or tokens.shape[1]
            tokens = torch.nn.functional.pad(tokens[:, :length] + 1, (0, max(0, length - tokens.shape[1])))
        check_labels(split.labels, self.num_classes, what)
        return TokenRows(tokens, split.labels)

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, classes and the padding token."""
        return {"vocab_size": self.vocabulary, "num_labels": self.num_classes, "pad_token_id": PADDING}

    def auto_class(self) -> str:
        """With a classifier."""
        return "AutoModelForSequenceClassification"

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy."""
        return cross_entropy(self._logits(model, batch), batch["label"], reduction="sum")

    def num_terms(self, batch: Batch) -> int:
        """One per sequence."""
        return len(batch["label"])

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Loss, correct answers and count."""
        return classification_sums(self._logits(model, batch), batch["label"])

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Mean loss and accuracy."""
        return {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}

    def probe(self, num_samples: int) -> dict[str, Tensor]:
        """Evaluation sequences."""
        keys = [(index, EVALUATION) for index in range(min(num_samples, len(self.evaluation)))]
        batch = self.evaluation.fetch(keys)
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return logits_of(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]))
