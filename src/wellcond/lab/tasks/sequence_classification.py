"""The tasks of the Long Range Arena: classification of tokens, of text as bytes, of pixels, and of pairs of texts."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor, nn

from wellcond.lab.data.base import Dataset, TensorDataset, report_progress
from wellcond.lab.data.images import BYTE_LIMIT, as_tensor_images
from wellcond.lab.settings import ImageSide, RecipeError, SequenceLength, Settings
from wellcond.lab.tasks.base import (
    ArraySamples,
    Batch,
    ClassificationTask,
    SampleKey,
    Samples,
    TaskContext,
    check_labels,
    first_samples,
    logits_of,
    need_classes,
    need_kind,
    register_task,
)
from wellcond.lab.tokenizers.base import text_columns

PADDING = 0
"""Models neither attend to it nor embed it; every other token is shifted by one to make room for it."""
BYTES, LEVELS = 257, 256
"""Vocabularies of text and of grey pixels."""
ROWS_AT_ONCE = 4096


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


class PackedBytes:
    """Documents one behind the other in memory, at one byte a token: byte b is token b + 1.

    Example:
        >>> documents = PackedBytes([b"ab", b""])
        >>> len(documents), documents.tokens(0).tolist(), documents.tokens(1).tolist()
        (2, [98, 99], [])
    """

    def __init__(self, documents: Sequence[bytes] = ()) -> None:
        """Begin with some documents."""
        self._content, self._ends = bytearray(), array("q", [0])
        for document in documents:
            self.append(document)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._ends) - 1

    def append(self, document: bytes) -> None:
        """Add one document."""
        self._content += document
        self._ends.append(len(self._content))

    def tokens(self, index: int) -> np.ndarray:
        """One document, int64."""
        content = memoryview(self._content)[self._ends[index] : self._ends[index + 1]]
        return np.add(np.frombuffer(content, np.uint8), 1, dtype=np.int64)


@dataclass(frozen=True)
class TextSamples:
    """Texts in memory, by the prefix of their names in a batch; padding is added when a batch is made."""

    texts: Mapping[str, Sequence[PackedBytes]]
    """Several of one prefix are joined by a padding token."""
    labels: Tensor
    length: int
    """Tokens are cut to it."""
    width: int
    """And padded to it."""
    in_memory: ClassVar[bool] = True

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.labels)

    def fetch(self, keys: Sequence[SampleKey]) -> Batch:
        """Tokens, masks and labels."""
        indices = [index for index, _ in keys]
        batch: Batch = {}
        for prefix, parts in self.texts.items():
            rows = np.full((len(indices), self.width), PADDING, dtype=np.int64)
            for row, index in zip(rows, indices, strict=True):
                joined = np.concatenate([tokens for part in parts for tokens in ([PADDING], part.tokens(index))][1:])
                row[: min(len(joined), self.length)] = joined[: self.length]
            tokens = torch.from_numpy(rows)
            batch |= {f"{prefix}input_ids": tokens, f"{prefix}attention_mask": (tokens != PADDING).long()}
        return batch | {"label": self.labels[indices]}


def _with_mask(batch: Batch, _: Sequence[SampleKey]) -> Batch:
    tokens = batch["input_ids"].long()
    return batch | {"input_ids": tokens, "attention_mask": (tokens != PADDING).long()}


class SequenceTask(ClassificationTask):
    """Logits of one or two sequences against a label."""

    inputs: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask")
    """Parts of a batch that the model takes."""

    def __init__(self, settings: SequenceSettings, context: TaskContext) -> None:
        """Encode all splits once; the test split is the one named so, if it has labels."""
        self.settings, self.context = settings, context
        self.num_classes = need_classes(context.data, settings.name)
        self.has_empty = False
        self.vocabulary, self.length = self.sizes()
        self.width = settings.pad_to or self.length
        if self.width < self.length:
            raise RecipeError(
                f"task.pad_to: expected at least the {self.length} tokens of {context.data.name}, found {self.width}"
            )
        samples = {}
        for name, split in context.splits.items():
            what = f"{context.data.name}, {name} split"
            assert split.labels is not None  # there are classes
            check_labels(split.labels, self.num_classes, what)
            samples[name] = self.samples(split, split.labels, what)
        self.train, self.evaluation, self.test = samples["training"], samples["evaluation"], samples.get("test")

    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Tokens that there are, and the most in a sequence."""

    @abstractmethod
    def samples(self, split: Dataset, labels: Tensor, what: str) -> Samples:
        """The samples of a split; errors begin with `what`."""

    def text_length(self) -> int:
        """The length of texts, which only the settings say."""
        if self.settings.length is None:
            raise RecipeError(f"{self.settings.name} of text: expected task.length, for instance 256")
        return self.settings.length

    def read_texts(self, split: Dataset, what: str) -> Iterator[list[bytes]]:
        """The text of every example in UTF-8 or, of a pair, both; half a surrogate pair as its three bytes."""
        kept = getattr(split, "max_bytes", None)
        if kept is not None and kept < self.length:
            raise RecipeError(
                f"{what}: expected texts of up to {self.length} bytes (task.length), found only their first {kept}; "
                "raise data.max_bytes or lower task.length"
            )
        done = 0
        for columns in text_columns(split):
            for row in zip(*columns, strict=True):
                yield [text.encode("utf-8", "surrogatepass") for text in row]
            done += len(columns[0])
            report_progress("reading text", done, len(split))

    def check_lengths(self, lengths: Tensor, what: str) -> None:
        """Raise RecipeError for a sequence that is too long or empty, unless the settings allow it."""
        too_long = (lengths > self.length).nonzero()
        default = "error" if self.context.data.kind == "tokens" else "cut"
        if len(too_long) and (self.settings.too_long or default) == "error":
            row = int(too_long[0])
            raise RecipeError(
                f"{what}, row {row} (the first is 0): expected at most {self.length} tokens (task.length), found "
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
        batch = first_samples(self.evaluation, num_samples)
        return {name: batch[name] for name in self.inputs}

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits (batch, classes).

        A softmax over nothing but masked tokens is NaN; a model that has NaN everywhere has diverged instead.
        """
        logits = logits_of(model(**{name: batch[name] for name in self.inputs}))
        if self.has_empty:
            masks = [batch[name] for name in self.inputs if name.endswith("mask")]
            seen = torch.stack([mask.any(1) for mask in masks]).all(0)
            finite = logits.detach().isfinite().all(1)
            if bool(finite[seen].all()) and not bool(finite[~seen].all()):
                raise RecipeError(
                    "task.empty: keep, but the model's output for a sequence of padding alone is not finite; remove "
                    "empty sequences from the data (task.empty: error names the first), or use another model"
                )
        return logits


class SequenceClassificationSettings(SequenceSettings):
    """Options of the task."""

    name: Literal["sequence_classification"] = "sequence_classification"
    image_size: ImageSide | None = None
    """Side in pixels that images are resized to; their own by default."""
    black: Literal["masked", "visible"] = "masked"
    """Whether pixels of value 0 are masked like padding, as in the release of the Long Range Arena. Visible pixels
    have a token more."""


@register_task(SequenceClassificationSettings)
class SequenceClassification(SequenceTask):
    """One sequence a label."""

    settings: SequenceClassificationSettings

    def sizes(self) -> tuple[int, int]:
        """By the kind of data."""
        data, settings = self.context.data, self.settings
        if data.kind != "image" and settings.image_size is not None:
            raise RecipeError(f"task.image_size is for images; {data.name} has {data.kind}")
        if data.kind == "text":
            return BYTES, self.text_length()
        if data.kind == "tokens":
            splits = [data.train, data.evaluation, *(split for name, split in data.others.items() if name == "test")]
            longest = max(len(split[0]["tokens"]) for split in splits)
            return 1 + (data.vocabulary_size or 0), settings.length or longest
        if settings.length is not None:
            raise RecipeError("task.length is for text and tokens; the side of images is task.image_size")
        first = data.train[0]["image"]
        height, width = first.shape[-2:] if isinstance(first, Tensor) else first.size
        return LEVELS + (settings.black == "visible"), (settings.image_size or height) * (settings.image_size or width)

    def samples(self, split: Dataset, labels: Tensor, what: str) -> Samples:
        """By the kind of data."""
        if self.context.data.kind == "text":
            return self._texts(split, labels, what)
        tokens = self._tokens(split, what) if self.context.data.kind == "tokens" else self._pixels(split, what)
        small = self.vocabulary < 2**15
        padded = torch.zeros(len(tokens), self.width, dtype=torch.int16 if small else torch.int64)
        shift = self.context.data.kind == "tokens" or self.settings.black == "visible"
        kept = tokens[:, : self.length]
        padded[:, : kept.shape[1]] = kept.to(padded.dtype) + int(shift)
        return ArraySamples({"input_ids": padded, "label": labels}, _with_mask)

    def _texts(self, split: Dataset, labels: Tensor, what: str) -> TextSamples:
        """Texts; a pair is joined by a padding token."""
        parts: list[PackedBytes] = []
        lengths = []
        for texts in self.read_texts(split, what):
            parts = parts or [PackedBytes() for _ in texts]
            for part, text in zip(parts, texts, strict=True):
                part.append(text[: self.length])
            # The padding between two is a token, but not one to see.
            lengths.append(sum(map(len, texts)) + len(texts) - 1 if any(texts) else 0)
        self.check_lengths(torch.tensor(lengths), what)
        return TextSamples({"": parts}, labels, self.length, self.width)

    def _tokens(self, split: Dataset, what: str) -> Tensor:
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
        self.check_lengths(torch.cat(lengths), what)
        return tokens

    def _pixels(self, split: Dataset, what: str) -> Tensor:
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
            if not (images.min() >= 0 and images.max() <= 1):
                raise RecipeError(
                    f"{what}: expected bytes or floats from 0 to 1, which are pixels, found normalised images from "
                    f"{float(images.min()):.3g} to {float(images.max()):.3g}"
                )
            images = (images * (LEVELS - 1)).round().to(torch.uint8)
        pixels = images.flatten(1)
        if self.settings.black == "masked":
            self.check_lengths((pixels != PADDING).sum(1), what)
        return pixels

    def auto_class(self) -> str:
        """With a classifier."""
        return "AutoModelForSequenceClassification"


class PairClassificationSettings(SequenceSettings):
    """Options of the task; the lengths are those of each text."""

    name: Literal["pair_classification"] = "pair_classification"
    empty: Literal["error", "keep"] = "error"


@register_task(PairClassificationSettings)
class PairClassification(SequenceTask):
    """Two texts a label; the model takes `pair_input_ids` and `pair_attention_mask` beside the usual two."""

    inputs: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask", "pair_input_ids", "pair_attention_mask")

    def sizes(self) -> tuple[int, int]:
        """Of bytes."""
        need_kind(self.context.data, self.settings.name, "text")
        return BYTES, self.text_length()

    def samples(self, split: Dataset, labels: Tensor, what: str) -> TextSamples:
        """Both texts of every pair."""
        if "text_pair" not in split[0]:
            raise RecipeError(
                f"{what}: expected pairs of texts, found single ones; name two columns in data.input, or use "
                "task.name: sequence_classification"
            )
        packed = (PackedBytes(), PackedBytes())
        lengths = []
        for pair in self.read_texts(split, what):
            for text, documents in zip(pair, packed, strict=True):
                documents.append(text[: self.length])
            lengths.append([len(text) for text in pair])
        for which, numbers in zip(("first", "second"), torch.tensor(lengths).T, strict=True):
            self.check_lengths(numbers, f"{what}, {which} text")
        return TextSamples({"": packed[:1], "pair_": packed[1:]}, labels, self.length, self.width)

    def auto_class(self) -> None:
        """No model of transformers takes two sequences by themselves."""
        return None
