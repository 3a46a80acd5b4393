"""What every data source returns: splits with random access, bundled with their classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Kind = Literal["image", "text", "tokens", "detection"]


class Dataset(Protocol):
    """Random access to examples; picklable, so that `DataLoader` workers can hold it.

    An example is a dict: `image` (a PIL image, or a tensor (C, H, W)), `text` (and `text_pair`), or `tokens` (a
    vector of int64), and `label` (int) unless the split is unlabelled; for detection see `CocoSplit`. Tokens are ids
    from 0; the sequences of a split have one length, and shorter ones are filled with -1, which is padding and stands
    at the end only.
    """

    @property
    def labels(self) -> Tensor | None:
        """Class of every example, int64 of shape (n,), or its number, float64; None when unlabelled."""

    def __len__(self) -> int:
        """Number of examples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The example at `index`."""

    def content(self, index: int) -> bytes:
        """Bytes that identify the input at `index` on every machine: as stored, not as a decoder renders them."""


@dataclass(frozen=True, eq=False)
class TensorDataset:
    """Examples held as one tensor, `inputs` of shape (n, ...); tokens may be held in fewer bits than 64."""

    key: Literal["image", "tokens"]
    inputs: Tensor
    labels: Tensor | None

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The example at `index`."""
        index = check_index(index, len(self))
        values = self.inputs[index]
        example: dict[str, Any] = {self.key: values.long() if self.key == "tokens" else values}
        if self.labels is not None:
            example["label"] = int(self.labels[index])
        return example

    def content(self, index: int) -> bytes:
        """Values as integers; floats in steps of 1/256, coarse enough to hide the rounding of another processor."""
        values = self.inputs[index]
        if values.is_floating_point():
            values = (values.double() * 256).round()
        return values.to(torch.int64).contiguous().numpy().astype("<i8").tobytes()


@dataclass(frozen=True, eq=False)
class Data:
    """A training split, an evaluation split, and what they are about."""

    name: str
    kind: Kind
    train: Dataset
    evaluation: Dataset
    class_names: tuple[str, ...] | None
    """In the order of the labels; None when unlabelled, or when labels are numbers."""
    description: str
    """Sizes and origin in words; holds no path of this machine."""
    others: Mapping[str, Dataset] = field(default_factory=dict)
    """Further splits of the source by name, such as a test split beside the validation split."""
    vocabulary_size: int | None = None
    """Number of token ids; only for tokens."""

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None when there are none."""
        return None if self.class_names is None else len(self.class_names)


def check_index(index: int, length: int) -> int:
    """The index counted from the front.

    Raises:
        IndexError: outside of -length .. length - 1.
    """
    if not -length <= index < length:
        raise IndexError(f"index {index} of a split of {length} examples.")
    return int(index) % length


def describe_sizes(train: Dataset, evaluation: Dataset, class_names: tuple[str, ...] | None) -> str:
    """The sentence on sizes that ends a description."""
    labels = "unlabelled" if train.labels is None else "labelled with numbers"
    classes = labels if class_names is None else f"{len(class_names)} classes"
    return f"{len(train)} training and {len(evaluation)} evaluation examples, {classes}"


def draw_subset(length: int, limit: int | None, *, seed: int = 0) -> Tensor | None:
    """Indices of `limit` examples drawn with a fixed seed, in their original order; None for all of them."""
    if limit is None or limit >= length:
        return None
    drawn = torch.randperm(length, generator=torch.Generator().manual_seed(seed))[:limit]
    return drawn.sort().values
