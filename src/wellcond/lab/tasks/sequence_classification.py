"""The tasks of the Long Range Arena: classification of tokens, of text as bytes, of pixels, and of pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from wellcond.errors import RecipeError
from wellcond.lab.data.base import Dataset, report_progress
from wellcond.lab.data.images import BYTE_LIMIT, as_tensor_images
from wellcond.lab.data.text import text_columns
from wellcond.lab.settings import ImageSide, SequenceLength, Settings
from wellcond.lab.tasks.base import Batch, ClassificationTask, Keys, Samples, TaskContext, register_task

PADDING = 0  # which models do not attend to; every other token is shifted by one to make room for it
ROWS_AT_ONCE = 4096


class SequenceClassificationSettings(Settings):
    """Options of the task."""

    name: Literal["sequence_classification", "pair_classification"] = "sequence_classification"
    length: SequenceLength | None = None
    """Needed for text, which is cut to it; of tokens that of the data by default, and more are an error."""
    pad_to: SequenceLength | None = None
    """Sequences are padded to it; to `length` by default."""
    image_size: ImageSide | None = None
    """Side in pixels that images are resized to; their own by default."""
    black: Literal["masked", "visible"] = "masked"
    """Whether pixels of value 0 are masked like padding, as in the release of the Long Range Arena."""


class PairClassificationSettings(SequenceClassificationSettings):
    """Options of the task; the lengths are those of each text."""

    name: Literal["pair_classification"] = "pair_classification"


@dataclass(frozen=True)
class Sequences(Samples):
    """Tokens in memory, in few bits; padded in a batch, to need less memory."""

    tokens: Mapping[str, Tensor]
    """By the prefix of their names in a batch, (samples, tokens)."""
    labels: Tensor
    width: int  # that a batch is padded to

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, keys: Keys) -> Batch:
        """Tokens, masks and labels."""
        rows = torch.tensor([index for index, _ in keys])
        batch: Batch = {}
        for prefix, rows_of_all in self.tokens.items():
            tokens = rows_of_all[rows].long()
            tokens = torch.nn.functional.pad(tokens, (0, self.width - tokens.shape[1]), value=PADDING)
            batch |= {f"{prefix}input_ids": tokens, f"{prefix}attention_mask": (tokens != PADDING).long()}
        return batch | {"label": self.labels[rows]}


@register_task(SequenceClassificationSettings)
class SequenceClassification(ClassificationTask):
    """Logits of a sequence against its label."""

    kinds: ClassVar[tuple[str, ...]] = ("text", "tokens", "image")
    auto_class: ClassVar[str | None] = "AutoModelForSequenceClassification"
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    """Of the sequences of a sample, in the names of a batch."""

    def __init__(self, settings: SequenceClassificationSettings, context: TaskContext) -> None:
        super().__init__(settings, context)
        self.num_classes = self.count_classes()
        self.inputs = [f"{prefix}{name}" for prefix in self.prefixes for name in ("input_ids", "attention_mask")]
        self.vocabulary, self.length = self._sizes()
        self.width = settings.pad_to or self.length
        if self.width < self.length:
            raise RecipeError(
                f"task.pad_to: expected at least the {self.length} tokens of {self.data.name}, found {self.width}"
            )
        self.set_splits(self._sequences)

    def _sequences(self, split: Any, name: str) -> Sequences:
        encode = {"text": self._texts, "tokens": self._tokens, "image": self._pixels}[self.data.kind]
        return Sequences(encode(split, f"{self.data.name}, {name} split"), split.labels, self.width)

    def _sizes(self) -> tuple[int, int]:
        """Tokens that there are, and the most in a sequence."""
        data, settings = self.data, self.settings
        if data.kind == "text":
            if settings.length is None:
                raise RecipeError(f"{settings.name} of text: expected task.length, for instance 256")
            return 1 + 256, settings.length
        if data.kind == "tokens":
            longest = max(len(split[0]["tokens"]) for split in self.context.splits.values())
            return 1 + (data.vocabulary_size or 0), settings.length or longest
        first = data.train[0]["image"]
        height, width = first.shape[-2:] if isinstance(first, Tensor) else first.size
        return 256 + (settings.black == "visible"), (settings.image_size or height) * (settings.image_size or width)

    def _texts(self, split: Dataset, what: str) -> dict[str, Tensor]:
        """Bytes in UTF-8, half a surrogate pair as its three bytes."""
        found = 1 + ("text_pair" in split[0])
        if found != len(self.prefixes):
            raise RecipeError(
                f"{what}: {self.settings.name} expects {len(self.prefixes)} texts a sample, found {found}; pairs are "
                "two columns in data.input, and task.name: pair_classification"
            )
        texts = {prefix: np.zeros((len(split), self.length), np.int16) for prefix in self.prefixes}
        done = 0
        for columns in text_columns(split):
            for rows, column in zip(texts.values(), columns, strict=True):
                for row, text in enumerate(column, done):
                    encoded = np.frombuffer(text.encode("utf-8", "surrogatepass")[: self.length], np.uint8)
                    rows[row, : len(encoded)] = encoded.astype(np.int16) + 1
            done += len(columns[0])
            report_progress("reading text", done, len(split))
        return {prefix: torch.from_numpy(rows) for prefix, rows in texts.items()}

    def _tokens(self, split: Any, what: str) -> dict[str, Tensor]:
        """Tokens; -1 at the end of a row is padding."""
        tokens, largest = split.inputs, self.vocabulary - 2
        for part, rows in enumerate(tokens.split(ROWS_AT_ONCE)):
            inside = torch.arange(rows.shape[1]) < (rows >= 0).sum(1, keepdim=True).clamp(max=self.length)
            wrong = torch.where(inside, (rows < 0) | (rows > largest), rows != -1).any(1)
            for row in wrong.nonzero().flatten().tolist():
                found = rows[row]
                raise RecipeError(
                    f"{what}, row {part * ROWS_AT_ONCE + row} (the first is 0): expected at most {self.length} tokens "
                    f"(task.length) from 0 to {largest}, and then only -1, as padding; found {int((found >= 0).sum())} "
                    f"from {int(found.min())} to {int(found.max())}"
                )
        return {"": tokens[:, : self.length].to(torch.int16 if self.vocabulary < 2**15 else torch.int64) + 1}

    def _pixels(self, split: Dataset, what: str) -> dict[str, Tensor]:
        """Grey pixels 0 to 255 of every image, (n, height * width), row by row."""
        images = as_tensor_images(split, channels=1, size=self.settings.image_size, resampling="bilinear")
        if images is None or images.is_floating_point() or images[0].numel() != self.length:
            raise RecipeError(
                f"{what}: expected images of bytes, less than {BYTE_LIMIT} in all, each of {self.length} pixels; set "
                "task.image_size, for instance 32; tensors are not resized"
            )
        return {"": images.flatten(1).to(torch.int16) + (self.settings.black == "visible")}

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, classes and the padding token, which of our own models is 0; these are made for one length."""
        own = {"length": self.width} if kind == "wellcond" else {"pad_token_id": PADDING}
        return {"vocab_size": self.vocabulary, "num_labels": self.num_classes, **own}


@register_task(PairClassificationSettings)
class PairClassification(SequenceClassification):
    """Two texts a label; the model takes `pair_input_ids` and `pair_attention_mask` beside the usual two."""

    prefixes = ("", "pair_")
    kinds = ("text",)
    auto_class = None  # no model of transformers takes two sequences by themselves
