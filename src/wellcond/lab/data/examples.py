"""Datasets of torch as data of an experiment: an example by number, whatever it is made of."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellcond.errors import DataError
from wellcond.lab.data.base import (
    Data,
    RowDataset,
    TensorDataset,
    draw_fraction,
    draw_subset,
    listed,
    report_progress,
)
from wellcond.lab.data.images import image_of_array
from wellcond.lab.data.tables import TableConfig, read_classes, read_labels
from wellcond.lab.seeding import derive


@contextlib.contextmanager
def fixed_randomness(index: int) -> Iterator[None]:
    """Seed torch, NumPy and `random` by the number of an example, and restore them."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    number = derive(0, "own data", index)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@dataclass(frozen=True, eq=False)
class ExampleDataset(RowDataset):
    """Examples of a map-style dataset.

    Reading one is seeded by its number: a transform that draws random numbers gives the same example in every epoch and
    after resuming. Augmentation that differs by epoch is the recipe's.
    """

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.row_of(index)
        found = _read(self.data, row)
        values = [_input(found.get(column)) for column in self.columns]
        if any(kind != self.kind for kind, _ in values):
            raise DataError(
                f"{self.locate(row)}: the input is not {self.kind}, as the first example is.",
                expected=KINDS,
                found=listed(type(found.get(column)).__name__ for column in self.columns),
                row=row,
            )
        keys = ("text", "text_pair") if self.kind == "text" else (self.kind,)
        example = dict(zip(keys, (value for _, value in values), strict=False))
        return example if self.labels is None else example | {"label": self.labels[index].item()}

    def content(self, index: int) -> bytes:
        """The texts in UTF-8, or the values of an image."""
        example = self[index]
        if self.kind == "text":
            return b"\0".join(example[key].encode() for key in ("text", "text_pair") if key in example)
        value = example[self.kind]
        value = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        return str(tuple(value.shape)).encode() + TensorDataset("image", value[None], None).content(0)


KINDS = (
    "an image (PIL, array (height, width, channels) of bytes, or tensor (channels, height, width)), a text, or token "
    "ids of shape (length,)"
)


def _read(data: Any, row: int) -> dict[Any, Any]:
    """The parts of an example by key, or by place: those of a tuple, or the example itself at 0."""
    with fixed_randomness(row):
        example = data[row]
    if isinstance(example, Mapping):
        return dict(example)
    return dict(enumerate(example)) if isinstance(example, (tuple, list)) else {0: example}


def _input(value: Any) -> tuple[str | None, Any]:
    """What kind of input a value is, none for no input, and the value as tasks read it."""
    if isinstance(value, str):
        return "text", value
    if isinstance(value, np.ndarray) and value.ndim > 1:
        value = image_of_array(value)
    if hasattr(value, "getbands"):
        return "image", value
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if isinstance(value, Tensor) and value.ndim == 3 and len(value) in (1, 3):
        return "image", value
    if isinstance(value, Tensor) and value.ndim == 1 and not value.is_floating_point():
        return "tokens", value.long()
    return None, value


def join_examples(
    name: str, train: Any, evaluation: Any, others: Mapping[str, Any], config: TableConfig, fraction: float
) -> Data:
    """Data from map-style datasets; without one to evaluate on, a fraction of the training examples is taken."""
    first = _read(train, 0) if len(train) else {}
    label, columns, kind = _columns(first, config, name)
    names: tuple[str, ...] | None = None
    classes = None
    trained = ExampleDataset(train, name, kind, columns)
    if label is not None:
        values = _label_values(trained, label)
        if config.label_kind == "class":
            names, classes = read_classes(values, _class_names(train, values))
        trained = replace(trained, labels=read_labels(values, classes, trained.locate, label))

    def dataset(part: Any, split: str) -> ExampleDataset:
        found = ExampleDataset(part, f"{name}, split {split!r}", kind, columns)
        if label is None or (split not in ("evaluation", "train") and len(part) and label not in _read(part, 0)):
            return found
        return replace(found, labels=read_labels(_label_values(found, label), classes, found.locate, label))

    if evaluation is None:
        trained, evaluated = draw_fraction(trained, fraction, name)
    else:
        evaluated = dataset(evaluation, "evaluation")
    splits: dict[str, Any] = {
        "train": draw_subset(trained, config.limit_train),
        "evaluation": draw_subset(evaluated, config.limit_evaluation),
        **{split: dataset(part, split) for split, part in others.items()},
    }
    size = None
    if kind == "tokens":
        splits = {split: _stack_tokens(part) for split, part in splits.items()}
        size = 1 + max(int(part.inputs.max()) for part in splits.values())
    trained, evaluated = splits.pop("train"), splits.pop("evaluation")
    return Data(name, kind, trained, evaluated, names, f"{name} from Python", splits, size)


def _columns(first: Mapping[Any, Any], config: TableConfig, name: str) -> tuple[Any, tuple[Any, ...], Any]:
    """Of an example: the key of the label, if there is one, the keys of the input, and its kind."""
    is_tuple = 0 in first
    label: Any = config.label
    if label == "auto":
        usual = (1,) if is_tuple and len(first) == 2 else ("label", "labels")
        label = next((key for key in usual if key in first), None)
    usable = [key for key, value in first.items() if key != label and _input(value)[0] is not None]
    columns = usable if config.input == "auto" else [config.input] if isinstance(config.input, str) else config.input
    kinds = {_input(first.get(column))[0] for column in columns}
    if len(kinds) == 1 and kinds <= {"image", "text", "tokens"} and (kinds == {"text"} or len(columns) == 1):
        if config.input != "auto" or len(columns) == 1:
            return label, tuple(columns), kinds.pop()
    raise DataError(
        f"{name}: which part of an example is the input is not clear.",
        expected=f"(input, label), or a mapping in which 'input' and 'label' name them; the input is {KINDS}",
        found=listed(f"{key}: {_shown(value)}" for key, value in first.items()),
    )


def _shown(value: Any) -> str:
    shape = f" {tuple(value.shape)}" if isinstance(value, (Tensor, np.ndarray)) else ""
    return f"{type(value).__name__}{shape}"


def _label_values(dataset: ExampleDataset, label: Any) -> list[Any]:
    """Labels of all examples: what the dataset lists as targets, if the examples agree, or else read one by one."""
    data, count = dataset.data, len(dataset.data)
    known = _targets(data)
    few = range(0, count, max(1, count // 16))
    if known is not None and all(_plain(_read(data, row).get(label)) == known[row] for row in few):
        return known
    values = []
    for row in range(count):
        values.append(_plain(_read(data, row).get(label)))
        if (row + 1) % max(1, count // 100) == 0:
            report_progress(f"reading labels of {dataset.name}", row + 1, count)
    return values


def _targets(data: Any) -> list[Any] | None:
    """What a dataset of torchvision, or a part of one, has as `targets` or `labels`."""
    if type(data).__module__ == "torch.utils.data.dataset" and hasattr(data, "indices"):
        inner = _targets(data.dataset)
        return None if inner is None else [inner[index] for index in data.indices]
    for field in ("targets", "labels", "_labels"):
        values = getattr(data, field, None)
        if isinstance(values, (list, tuple, Tensor, np.ndarray)) and len(values) == len(data):
            return [_plain(value) for value in values]
    return None


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, (Tensor, np.generic)) and value.ndim == 0 else value


def _class_names(data: Any, values: list[Any]) -> list[str] | None:
    """The names in `classes`, as torchvision has them, if all labels are numbers of them."""
    while hasattr(data, "dataset") and not hasattr(data, "classes"):
        data = data.dataset
    names = getattr(data, "classes", None)
    numbers = all(isinstance(value, int) and 0 <= value < len(names or ()) for value in values)
    return list(map(str, names)) if names and numbers else None


def _stack_tokens(part: ExampleDataset) -> TensorDataset:
    """All tokens in one tensor, shorter examples filled up with -1."""
    rows = [part[index]["tokens"] for index in range(len(part))]
    return TensorDataset(
        "tokens", torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1), part.labels
    )
