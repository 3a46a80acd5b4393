"""What the tasks that classify sequences share: options, padding, checks, loss and score."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn

from wellcond.lab.data.base import Dataset
from wellcond.lab.settings import RecipeError, SequenceLength, Settings
from wellcond.lab.tasks.base import (
    EVALUATION,
    Batch,
    ClassificationTask,
    Samples,
    TaskContext,
    check_labels,
    logits_of,
    need_classes,
)
from wellcond.lab.tasks.byte_text import PADDING


class SequenceSettings(Settings):
    """Options of every task on sequences."""

    name: str
    length: SequenceLength | None = None
    """Longer sequences are cut to it; needed for text, the length of the data for tokens."""
    pad_to: SequenceLength | None = None
    """Sequences are padded to it; to `length` by default."""
    too_long: Literal["cut", "error"] | None = None
    """What to do with a sequence longer than `length`; null: cut text, but refuse tokens, half of which may mean
    something else (an expression cut in two has another value)."""
    empty: Literal["error", "keep"] = "keep"
    """What to do with a sequence of no tokens, all of which is masked. A model may answer it with anything but NaN,
    which ends the run with an error."""

    @model_validator(mode="after")
    def _room_for_the_length(self) -> SequenceSettings:
        if self.pad_to is not None and self.length is not None and self.pad_to < self.length:
            raise ValueError(f"pad_to: expected at least the length, {self.length}, found {self.pad_to}")
        return self


class SequenceTask(ClassificationTask):
    """Logits of one or two sequences against a label."""

    inputs: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask")
    """Parts of a batch that the model takes."""
    vocabulary: int
    width: int
    """Tokens of a sequence with its padding."""

    def __init__(self, settings: SequenceSettings, context: TaskContext) -> None:
        """Encode all splits once; the test split is the one named so, if it has labels."""
        self.settings, self.context = settings, context
        self.num_classes = need_classes(context.data, settings.name)
        self.has_empty = False

    def load(self) -> None:
        """Make the sets of samples; a subclass calls it once it knows its lengths."""
        data = self.context.data
        test = self.context.test
        self.train, self.evaluation = self._load(data.train, "training"), self._load(data.evaluation, "evaluation")
        self.test = None if test is None else self._load(test, "test")

    def _load(self, split: Dataset, name: str) -> Samples:
        what = f"{self.context.data.name}, {name} split"
        assert split.labels is not None  # there are classes
        check_labels(split.labels, self.num_classes, what)
        return self.rows(split, what)

    @abstractmethod
    def rows(self, split: Dataset, what: str) -> Samples:
        """The samples of a split; errors begin with `what`."""

    def progress(self, text: str) -> Callable[[int, int], None] | None:
        """Where to report the preparation of a split to."""
        told = self.context.progress
        return None if told is None else lambda done, total: told(text, done, total)

    def check_lengths(self, lengths: Tensor, length: int, what: str) -> None:
        """Raise RecipeError for a sequence that is too long or empty, unless the settings allow it.

        Args:
            lengths: Tokens of each sequence before it is cut.
            length: Most tokens that are kept.
            what: The split, and which document of a pair.
        """
        too_long = (lengths > length).nonzero()
        default = "error" if self.context.data.kind == "tokens" else "cut"
        if len(too_long) and (self.settings.too_long or default) == "error":
            row = int(too_long[0])
            raise RecipeError(
                f"{what}, row {row} (the first is 0): expected at most {length} tokens (task.length), found "
                f"{int(lengths[row])}; raise task.length, or cut the sequence with task.too_long: cut"
            )
        empty = (lengths == 0).nonzero()
        if len(empty) and self.settings.empty == "error":
            raise RecipeError(
                f"{what}, row {int(empty[0])} (the first is 0): expected a sequence of at least one token that is not "
                f"masked, found none, as in {len(empty)} rows; remove these rows from the data, or let the model see "
                "padding alone with task.empty: keep"
            )
        self.has_empty = self.has_empty or bool(len(empty))

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, classes and the padding token; for our own models the length too."""
        arguments = {"vocab_size": self.vocabulary, "num_labels": self.num_classes, "pad_token_id": PADDING}
        return arguments | ({"length": self.width} if kind == "wellcond" else {})

    def probe(self, num_samples: int) -> dict[str, Tensor]:
        """Evaluation sequences."""
        keys = [(index, EVALUATION) for index in range(min(num_samples, len(self.evaluation)))]
        batch = self.evaluation.fetch(keys)
        return {name: batch[name] for name in self.inputs}

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Of each sequence or pair."""
        logits = logits_of(model(**{name: batch[name] for name in self.inputs}))
        if self.has_empty:
            self._refuse_nan(logits.detach(), batch)
        return logits

    def _refuse_nan(self, logits: Tensor, batch: Batch) -> None:
        """A softmax over nothing but masked tokens is NaN; a model that has NaN everywhere has diverged instead."""
        masks = [batch[name] for name in self.inputs if name.endswith("mask")]
        seen = torch.stack([mask.any(1) for mask in masks]).all(0)
        finite = logits.isfinite().all(1)
        if bool(finite[seen].all()) and not bool(finite[~seen].all()):
            raise RecipeError(
                "task.empty: keep, but the model's output for a sequence of padding alone is not finite; remove empty "
                "sequences from the data (task.empty: error names the first), or use another model"
            )


def pad(sequences: Sequence[np.ndarray], width: int) -> tuple[Tensor, Tensor]:
    """Sequences as one batch, (n, width), and the mask of what is no padding.

    Example:
        >>> import numpy as np
        >>> pad([np.array([5, 6]), np.array([7])], 3)[0].tolist()
        [[5, 6, 0], [7, 0, 0]]
    """
    rows = np.full((len(sequences), width), PADDING, dtype=np.int64)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    tokens = torch.from_numpy(rows)
    return tokens, (tokens != PADDING).long()


def text_length(settings: SequenceSettings) -> int:
    """The length of texts, or a RecipeError."""
    if settings.length is None:
        raise RecipeError(f"{settings.name} of text: expected task.length, for instance 256")
    return settings.length


def check_kept_bytes(split: Dataset, length: int, what: str) -> None:
    """Raise RecipeError if the source keeps fewer bytes of a text (`max_bytes`) than the task would use."""
    kept = getattr(split, "max_bytes", None)
    if kept is not None and kept < length:
        raise RecipeError(
            f"{what}: expected texts of up to {length} bytes (task.length), found only their first {kept}; raise "
            "data.max_bytes or lower task.length"
        )
