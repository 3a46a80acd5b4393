"""Classification of token sequences, of text read as bytes, or of images read pixel by pixel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from wellcond.lab.data.base import Dataset, TensorDataset
from wellcond.lab.settings import ImageSide, RecipeError
from wellcond.lab.tasks.base import Batch, SampleKey, Samples, TaskContext, register_task
from wellcond.lab.tasks.byte_text import PADDING, VOCABULARY, PackedDocuments, read_documents
from wellcond.lab.tasks.pixels import LEVELS, grey_pixels
from wellcond.lab.tasks.sequences import SequenceSettings, SequenceTask, check_kept_bytes, pad, text_length

ROWS_AT_ONCE = 4096


class SequenceClassificationSettings(SequenceSettings):
    """Options of the task."""

    name: Literal["sequence_classification"] = "sequence_classification"
    image_size: ImageSide | None = None
    """Side in pixels that images are resized to; their own by default."""
    black: Literal["masked", "visible"] = "masked"
    """Whether pixels of value 0 are masked like padding, as in the release of the Long Range Arena. Visible pixels
    have a token more."""


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


class TextRows:
    """Texts in memory; a pair is joined by a padding token."""

    in_memory = True

    def __init__(
        self, first: PackedDocuments, second: PackedDocuments | None, labels: Tensor, *, length: int, width: int
    ) -> None:
        """Cut to `length` and padded to `width`."""
        self.first, self.second, self.labels, self.length, self.width = first, second, labels, length, width

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.first)

    def fetch(self, keys: Sequence[SampleKey]) -> Batch:
        """Tokens, mask and labels."""
        indices = [index for index, _ in keys]
        tokens, mask = pad([self._sequence(index) for index in indices], self.width)
        return {"input_ids": tokens, "attention_mask": mask, "label": self.labels[indices]}

    def _sequence(self, index: int) -> np.ndarray:
        first = self.first.tokens(index)
        if self.second is None:
            return first
        return np.concatenate([first, [PADDING], self.second.tokens(index)])[: self.length]


@register_task(SequenceClassificationSettings)
class SequenceClassification(SequenceTask):
    """One sequence a label."""

    settings: SequenceClassificationSettings

    def __init__(self, settings: SequenceClassificationSettings, context: TaskContext) -> None:
        """Encode everything once."""
        super().__init__(settings, context)
        data = context.data
        if data.kind != "image" and settings.image_size is not None:
            raise RecipeError(f"task.image_size is for images; {data.name} has {data.kind}")
        # Like bytes, tokens are shifted by one to make room for padding: models never attend to it nor embed it.
        if data.kind == "text":
            self.vocabulary, self.length = VOCABULARY, text_length(settings)
        elif data.kind == "tokens":
            self.vocabulary = 1 + (data.vocabulary_size or 0)
            splits = [data.train, data.evaluation, *(split for name, split in data.others.items() if name == "test")]
            self.length = settings.length or max(len(split[0]["tokens"]) for split in splits)
        else:
            self.vocabulary = LEVELS + (settings.black == "visible")
            self.length = self._number_of_pixels()
        self.width = settings.pad_to or self.length
        if self.width < self.length:
            raise RecipeError(
                f"task.pad_to: expected at least the {self.length} tokens of {data.name}, found {self.width}"
            )
        self.load()

    def _number_of_pixels(self) -> int:
        if self.settings.length is not None:
            raise RecipeError("task.length is for text and tokens; the side of images is task.image_size")
        if self.settings.image_size is not None:
            return self.settings.image_size**2
        first = self.context.data.train[0]["image"]
        height, width = first.shape[-2:] if isinstance(first, Tensor) else reversed(first.size)
        return height * width

    def rows(self, split: Dataset, what: str) -> Samples:
        """Samples by the kind of data."""
        if self.context.data.kind == "text":
            return self._texts(split, what)
        return self._tokens(split, what) if self.context.data.kind == "tokens" else self._pixels(split, what)

    def _texts(self, split: Dataset, what: str) -> TextRows:
        check_kept_bytes(split, self.length, what)
        first, second, lengths = PackedDocuments(), PackedDocuments(), []
        for text, text_pair in read_documents(split, self.progress("reading text")):
            first.append(text[: self.length])
            if text_pair is None:
                lengths.append(len(text))
            else:
                second.append(text_pair[: self.length])
                # The padding between the two is a token, but not one to see.
                lengths.append(len(text) + 1 + len(text_pair) if text or text_pair else 0)
        self.check_lengths(torch.tensor(lengths), self.length, what)
        assert split.labels is not None
        return TextRows(first, second if len(second) else None, split.labels, length=self.length, width=self.width)

    def _tokens(self, split: Dataset, what: str) -> TokenRows:
        tokens = (
            split.inputs
            if isinstance(split, TensorDataset)
            else torch.stack([split[row]["tokens"] for row in range(len(split))])
        )
        starts = range(0, len(tokens), ROWS_AT_ONCE)
        lengths = [self._lengths(tokens[start : start + ROWS_AT_ONCE].long(), start, what) for start in starts]
        self.check_lengths(torch.cat(lengths), self.length, what)
        return self._shifted(tokens, 1, split)

    def _lengths(self, tokens: Tensor, start: int, what: str) -> Tensor:
        """Tokens of each row before the -1 at its end; the first row is number `start` of the split."""
        largest = self.vocabulary - 2
        is_token = (tokens >= 0) & (tokens <= largest)
        lengths = is_token.sum(1)
        at_the_end = torch.arange(tokens.shape[1]) >= lengths[:, None]
        wrong = (~is_token & ~((tokens == -1) & at_the_end)).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            raise RecipeError(
                f"{what}, row {start + row} (the first is 0): expected tokens from 0 to {largest}, found "
                f"{int(tokens[row, column])} at {column}; -1 may only fill the end of a row, as padding"
            )
        return lengths

    def _pixels(self, split: Dataset, what: str) -> TokenRows:
        pixels = grey_pixels(split, self.settings.image_size, what, self.progress("decoding images"))
        if pixels.shape[1] != self.length:
            raise RecipeError(
                f"{what}: expected images of {self.length} pixels, as in training, found {pixels.shape[1]}; set "
                "task.image_size"
            )
        if self.settings.black == "visible":
            return self._shifted(pixels, 1, split)
        self.check_lengths((pixels != PADDING).sum(1), self.length, what)
        return self._shifted(pixels, 0, split)

    def _shifted(self, tokens: Tensor, shift: int, split: Dataset) -> TokenRows:
        """Rows cut and padded, in 16 bits if the tokens fit."""
        kept = tokens[:, : self.length]
        small = self.vocabulary < 2**15
        padded = torch.zeros(len(tokens), self.width, dtype=torch.int16 if small else torch.int64)
        padded[:, : kept.shape[1]] = kept.to(padded.dtype) + shift
        assert split.labels is not None
        return TokenRows(padded, split.labels)

    def auto_class(self) -> str:
        """With a classifier."""
        return "AutoModelForSequenceClassification"
