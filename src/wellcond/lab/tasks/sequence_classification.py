"""The tasks of the Long Range Arena: classification of tokens, of text as bytes, of pixels, and of pairs of texts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn

from wellcond.lab.data.base import Dataset, TensorDataset, report_progress
from wellcond.lab.data.images import BYTE_LIMIT, as_tensor_images
from wellcond.lab.data.text import text_columns
from wellcond.lab.settings import ImageSide, RecipeError, SequenceLength, Settings
from wellcond.lab.tasks.base import ArraySamples, Batch, ClassificationTask, Keys, TaskContext, logits_of, register_task

PADDING = 0
"""Models neither attend to it nor embed it; every other token is shifted by one to make room for it."""
BYTES, LEVELS = 257, 256
"""Vocabularies of text and of grey pixels."""
ROWS_AT_ONCE = 4096


class SequenceClassificationSettings(Settings):
    """Options of the task."""

    name: Literal["sequence_classification", "pair_classification"] = "sequence_classification"
    length: SequenceLength | None = None
    """Longer texts are cut to it, longer sequences of tokens are an error: an expression cut in two has another value.
    Needed for text, the length of the data for tokens."""
    pad_to: SequenceLength | None = None
    """Sequences are padded to it; to `length` by default."""
    image_size: ImageSide | None = None
    """Side in pixels that images are resized to; their own by default."""
    black: Literal["masked", "visible"] = "masked"
    """Whether pixels of value 0 are masked like padding, as in the release of the Long Range Arena. Visible pixels
    have a token more."""

    @model_validator(mode="after")
    def _room_for_the_length(self) -> SequenceClassificationSettings:
        if self.pad_to is not None and self.length is not None and self.pad_to < self.length:
            raise ValueError(f"pad_to: expected at least the length, {self.length}, found {self.pad_to}")
        return self


class PairClassificationSettings(SequenceClassificationSettings):
    """Options of the task; the lengths are those of each text."""

    name: Literal["pair_classification"] = "pair_classification"


@register_task(SequenceClassificationSettings)
class SequenceClassification(ClassificationTask):
    """Logits of a sequence against its label."""

    prefixes: ClassVar[tuple[str, ...]] = ("",)
    """Of the sequences of a sample, in the names of a batch."""
    auto_class: ClassVar[str | None] = "AutoModelForSequenceClassification"

    def __init__(self, settings: SequenceClassificationSettings, context: TaskContext) -> None:
        """Encode all splits once; the test split is the one named so, if it has labels."""
        self.settings, self.context = settings, context
        self.num_classes = context.need_classes(settings.name)
        self.inputs = [f"{prefix}{name}" for prefix in self.prefixes for name in ("input_ids", "attention_mask")]
        self.has_empty = False
        self.vocabulary, self.length = self._sizes()
        self.width = settings.pad_to or self.length
        if self.width < self.length:
            raise RecipeError(
                f"task.pad_to: expected at least the {self.length} tokens of {context.data.name}, found {self.width}"
            )
        samples = {}
        for name, split in context.splits.items():
            what = f"{context.data.name}, {name} split"
            assert split.labels is not None  # there are classes
            read = {"text": self._texts, "tokens": self._tokens, "image": self._pixels}[context.data.kind]
            samples[name] = ArraySamples({**read(split, what), "label": split.labels}, self._batch)
        self.train, self.evaluation, self.test = samples["training"], samples["evaluation"], samples.get("test")

    def _sizes(self) -> tuple[int, int]:
        """Tokens that there are, and the most in a sequence."""
        data, settings = self.context.data, self.settings
        self.context.need_kind(settings.name, *(("text", "tokens", "image") if len(self.prefixes) == 1 else ("text",)))
        if data.kind != "image" and settings.image_size is not None:
            raise RecipeError(f"task.image_size is for images; {data.name} has {data.kind}")
        if data.kind == "text":
            if settings.length is None:
                raise RecipeError(f"{settings.name} of text: expected task.length, for instance 256")
            return BYTES, settings.length
        if data.kind == "tokens":
            splits = [data.train, data.evaluation, *(split for name, split in data.others.items() if name == "test")]
            longest = max(len(split[0]["tokens"]) for split in splits)
            return 1 + (data.vocabulary_size or 0), settings.length or longest
        if settings.length is not None:
            raise RecipeError("task.length is for text and tokens; the side of images is task.image_size")
        first = data.train[0]["image"]
        height, width = first.shape[-2:] if isinstance(first, Tensor) else first.size
        return LEVELS + (settings.black == "visible"), (settings.image_size or height) * (settings.image_size or width)

    def _texts(self, split: Dataset, what: str) -> dict[str, Tensor]:
        """Bytes in UTF-8, half a surrogate pair as its three bytes; and how many there are of each text."""
        found = 1 + ("text_pair" in split[0])
        if found != len(self.prefixes):
            raise RecipeError(
                f"{what}: {self.settings.name} expects {len(self.prefixes)} texts a sample, found {found}; pairs are "
                "two columns in data.input, and task.name: pair_classification"
            )
        texts = {prefix: np.zeros((len(split), self.length), np.uint8) for prefix in self.prefixes}
        lengths = {prefix: np.zeros(len(split), np.int64) for prefix in self.prefixes}
        done = 0
        for columns in text_columns(split):
            for prefix, column in zip(self.prefixes, columns, strict=True):
                for row, text in enumerate(column, done):
                    encoded = np.frombuffer(text.encode("utf-8", "surrogatepass")[: self.length], np.uint8)
                    texts[prefix][row, : len(encoded)] = encoded
                    lengths[prefix][row] = len(encoded)
            done += len(columns[0])
            report_progress("reading text", done, len(split))
        arrays: dict[str, Tensor] = {}
        for which, prefix in zip(("first", "second"), self.prefixes, strict=False):
            sizes = torch.from_numpy(lengths[prefix])
            self._check_lengths(sizes, what if len(self.prefixes) == 1 else f"{what}, {which} text")
            arrays |= {f"{prefix}bytes": torch.from_numpy(texts[prefix]), f"{prefix}length": sizes}
        return arrays

    def _tokens(self, split: Dataset, what: str) -> dict[str, Tensor]:
        """Tokens; -1 at the end of a row is padding."""
        tokens = (
            split.inputs
            if isinstance(split, TensorDataset)
            else torch.stack([split[row]["tokens"] for row in range(len(split))])
        )
        lengths, largest = [], self.vocabulary - 2
        for start in range(0, len(tokens), ROWS_AT_ONCE):
            rows = tokens[start : start + ROWS_AT_ONCE].long()
            is_token = (rows >= 0) & (rows <= largest)
            lengths.append(is_token.sum(1))
            at_the_end = torch.arange(rows.shape[1]) >= lengths[-1][:, None]
            wrong = (~is_token & ~((rows == -1) & at_the_end)).nonzero()
            if len(wrong):
                row, column = wrong[0].tolist()
                raise RecipeError(
                    f"{what}, row {start + row} (the first is 0): expected tokens from 0 to {largest}, found "
                    f"{int(rows[row, column])} at {column}; -1 may only fill the end of a row, as padding"
                )
        self._check_lengths(torch.cat(lengths), what)
        return self._padded(tokens[:, : self.length], shift=1)

    def _pixels(self, split: Dataset, what: str) -> dict[str, Tensor]:
        """Grey pixels 0 to 255 of every image, (n, height * width), row by row."""
        size = self.settings.image_size
        # Colour becomes grey as by PIL's convert("L"); its bilinear filter averages when it shrinks.
        images = as_tensor_images(split, channels=1, size=size, resampling="bilinear")
        if images is None:
            raise RecipeError(
                f"{what}: expected images of one size, less than {BYTE_LIMIT} bytes in all; set task.image_size, for "
                "instance 32"
            )
        if images[0].numel() != self.length or (size is not None and images.shape[-1] != size):
            expected = f"{size} x {size} pixels (task.image_size)" if size else f"{self.length} pixels, as in training"
            raise RecipeError(
                f"{what}: expected images of {expected}, found {images.shape[-2]} x {images.shape[-1]}; set "
                "task.image_size, by which tensors are not resized"
            )
        if images.is_floating_point():
            raise RecipeError(f"{what}: expected images of bytes, whose values are tokens, found floats")
        pixels = images.flatten(1)
        if self.settings.black == "masked":
            self._check_lengths((pixels != PADDING).sum(1), what)
        return self._padded(pixels, shift=int(self.settings.black == "visible"))

    def _padded(self, tokens: Tensor, shift: int) -> dict[str, Tensor]:
        small = self.vocabulary < 2**15
        padded = torch.zeros(len(tokens), self.width, dtype=torch.int16 if small else torch.int64)
        padded[:, : tokens.shape[1]] = tokens.to(padded.dtype) + shift
        return {"input_ids": padded}

    def _check_lengths(self, lengths: Tensor, what: str) -> None:
        """Raise RecipeError for a sequence that is too long or, in a pair, empty."""
        too_long, empty = (lengths > self.length).nonzero(), (lengths == 0).nonzero()
        if len(too_long):
            row = int(too_long[0])
            raise RecipeError(
                f"{what}, row {row} (the first is 0): expected at most {self.length} tokens (task.length), found "
                f"{int(lengths[row])}; raise task.length"
            )
        if len(empty) and len(self.prefixes) > 1:
            raise RecipeError(
                f"{what}, row {int(empty[0])} (the first is 0): expected at least one byte, found none, as in "
                f"{len(empty)} rows; remove these rows from the data"
            )
        self.has_empty = self.has_empty or bool(len(empty))

    def _batch(self, arrays: Batch, _: Keys) -> Batch:
        """Tokens, masks and labels; texts are padded here, so that they take one byte a token in memory."""
        batch: Batch = {}
        for prefix in self.prefixes:
            if "input_ids" in arrays:
                tokens = arrays["input_ids"].long()
            else:
                text = arrays[f"{prefix}bytes"]
                inside = torch.arange(text.shape[1]) < arrays[f"{prefix}length"][:, None]
                tokens = torch.zeros(len(text), self.width, dtype=torch.int64)
                tokens[:, : text.shape[1]] = torch.where(inside, text.long() + 1, PADDING)
            batch |= {f"{prefix}input_ids": tokens, f"{prefix}attention_mask": (tokens != PADDING).long()}
        return batch | {"label": arrays["label"]}

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, classes and the padding token; for our own models the length too."""
        arguments = {"vocab_size": self.vocabulary, "num_labels": self.num_classes, "pad_token_id": PADDING}
        return arguments | ({"length": self.width} if kind == "wellcond" else {})

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits (batch, classes).

        A softmax over nothing but masked tokens is NaN; a model that has NaN everywhere has diverged instead.
        """
        logits = logits_of(model(**{name: batch[name] for name in self.inputs}))
        if self.has_empty:
            seen = batch["attention_mask"].any(1)
            finite = logits.detach().isfinite().all(1)
            if bool(finite[seen].all()) and not bool(finite[~seen].all()):
                raise RecipeError(
                    "the model's output for a sequence of padding alone is not finite; remove empty sequences from the "
                    "data, or use another model"
                )
        return logits


@register_task(PairClassificationSettings)
class PairClassification(SequenceClassification):
    """Two texts a label; the model takes `pair_input_ids` and `pair_attention_mask` beside the usual two."""

    prefixes = ("", "pair_")
    auto_class = None  # no model of transformers takes two sequences by themselves
