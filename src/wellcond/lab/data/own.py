"""Sources `object` and `factory`: data that a user has in Python, as Hugging Face or torch datasets.

`source_of` makes settings of whatever a user gives as data: a folder, a file, an id of the hub, ``file.py:function``,
or a dataset. A dataset is held by this process under its name and a digest of its content, by which recipes and records
name it; `held_data` is what another process needs to be sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from wellcond.errors import DataError
from wellcond.lab.data.base import (
    Data,
    SourceConfig,
    TensorDataset,
    draw_fraction,
    draw_subset,
    fingerprint,
    listed,
    register_source,
    report_progress,
    resolve_config,
)
from wellcond.lab.data.disk import canonical_json, find_in_mirror
from wellcond.lab.data.images import has_classes, image_of_array
from wellcond.lab.data.tables import (
    BUILDERS,
    EVALUATION_SPLITS,
    HUB_ID,
    TableConfig,
    TableDataset,
    join_tables,
    read_classes,
    read_labels,
    split_of,
    suffix_of,
)
from wellcond.lab.seeding import derive

SHARE = 0.1
"""Of the training examples, to evaluate on where no split is given for it."""


class OwnConfig(TableConfig):
    """What may be set of data that are given in Python; `input` and `label` are keys of an example, or columns."""

    evaluation_fraction: float | None = Field(None, gt=0, lt=1)
    """Part of the training examples to evaluate on, of every class alike; 0.1 if there is no split for it."""


class FactoryConfig(OwnConfig):
    """Settings of `factory`."""

    source: Literal["factory"] = "factory"
    factory: str = Field(pattern=r".+\.py:[^\W\d]\w*$")
    """path/to/file.py:function, from the recipe's folder; what it returns may be anything that `wrap` takes."""
    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    def local_code(self) -> str:
        """The file whose code is run."""
        return self.factory


class ObjectConfig(SourceConfig):
    """Settings of `object`, which `hold_data` makes."""

    source: Literal["object"] = "object"
    name: str
    sha256: str = Field(pattern="^[0-9a-f]{16}$")
    """Of the sizes, the labels and some of the inputs."""


# What a user gives


def source_of(data: Any, *, name: str | None = None, **options: Any) -> SourceConfig:
    """Settings of the source for what a user gives as data.

    Args:
        data: a folder (of images by class, or of files), a file of a table, an id of the hub, ``file.py:function``, the
            settings of a source as a mapping, or an object that `wrap` takes.
        name: of an object, in records and folders; by default what the object calls itself.
        options: further settings of the source, such as `input`, `label` and `evaluation_fraction`.

    Raises:
        DataError: it is none of these.
    """
    if isinstance(data, SourceConfig):
        return data
    if isinstance(data, Mapping) and "source" in data:
        return resolve_config({**data, **options})
    if not isinstance(data, (str, Path)):
        return hold_data(data, name=name, **options)
    text, path = str(data), Path(data).expanduser()
    if path.is_dir():
        return resolve_config({**_folder_source(path.resolve()), **options})
    if path.is_file():
        return resolve_config({"source": "files", "train": str(path.resolve()), **options})
    if ".py:" in text:
        file, _, function = text.rpartition(":")
        return resolve_config({"source": "factory", "factory": f"{Path(file).resolve()}:{function}", **options})
    if HUB_ID.fullmatch(text) and (suffix_of(path) not in BUILDERS or find_in_mirror(text)):
        return resolve_config({"source": "hub", "id": text, **options})
    raise DataError(
        f"no such file or folder: {text}",
        expected="a folder, a file, file.py:function, an id of the Hugging Face hub such as uoft-cs/cifar10, or a "
        "Dataset of torch or of `datasets`",
        found=f"{type(data).__name__} {text!r}",
    )


def _folder_source(folder: Path) -> dict[str, Any]:
    """Settings for a folder: of images by class, or else of table files, one or more for each split."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and suffix_of(path) in BUILDERS)
    if has_classes(folder) or not files:
        return {"source": "image_folder", "path": str(folder)}
    splits: dict[str, list[str]] = {}
    for path in files:
        splits.setdefault(split_of(path.name), []).append(str(path))
    usual = next((split for split in EVALUATION_SPLITS if split in splits), None)
    if "train" not in splits or usual is None:
        return {"source": "files", "train": [str(path) for path in files]}
    return {"source": "files", "train": splits["train"], "evaluation": splits[usual]}


# Objects


_HELD: dict[tuple[str, str], Data] = {}


def hold_data(data: Any, *, name: str | None = None, **options: Any) -> ObjectConfig:
    """Keep data that are given as an object, and return the settings by which a recipe names them.

    Args:
        data: what `wrap` takes.
        name: in records and folders; by default what the object calls itself.
        options: fields of `OwnConfig`.
    """
    wrapped = wrap(data, OwnConfig(source="object", **options), name)
    digest = hashlib.sha256(canonical_json(fingerprint(wrapped)).encode()).hexdigest()[:16]
    _HELD[wrapped.name, digest] = wrapped
    return ObjectConfig(name=wrapped.name, sha256=digest)


def held_data(config: ObjectConfig) -> Data:
    """The data that `hold_data` kept; DataError if another process holds them."""
    try:
        return _HELD[config.name, config.sha256]
    except KeyError:
        raise DataError(
            f"{config.name}: these data are an object of another Python process.",
            expected=f"data whose digest is {config.sha256}, given to this process",
            found=f"{listed(' '.join(key) for key in _HELD)}",
            todo="Give the same data again, or give a function that makes them: file.py:function.",
        ) from None


def hold_again(config: ObjectConfig, data: Data) -> None:
    """Keep in this process what `held_data` returned in another one."""
    _HELD[config.name, config.sha256] = data


@register_source(ObjectConfig)
def load_object(config: ObjectConfig, base: Path) -> Data:
    """What this process holds."""
    return held_data(config)


@register_source(FactoryConfig)
def load_factory(config: FactoryConfig, base: Path) -> Data:
    """Run the function, which `load_data` allows only if local code is trusted."""
    file, _, function = config.factory.rpartition(":")
    path = (base / Path(file).expanduser()).absolute()
    try:
        spec = importlib.util.spec_from_file_location(f"wellcond_user_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module  # where classes are looked up that a worker process unpickles
        spec.loader.exec_module(module)
        made = getattr(module, function)(**config.arguments)
    except Exception as error:  # the user's code
        raise DataError(
            f"{path}: {function} cannot be called with {config.arguments or 'no arguments'}.",
            expected="a function that returns a Dataset of torch or of `datasets`, or several by split",
            found=f"{type(error).__name__}: {error}",
        ) from error
    return wrap(made, config, f"{path.stem}-{function}")


def wrap(given: Any, config: OwnConfig, name: str | None = None) -> Data:
    """Data from datasets that a user made.

    Args:
        given: a map-style torch dataset, a `datasets.Dataset`, `Data`, or several datasets: a mapping by split, of
            which train is trained on, or a tuple (train, evaluation) or (train, evaluation, test). An example is
            (input, label), or a mapping with these; the input is an image (PIL, array (height, width, channels), or
            tensor (channels, height, width)), a text, or token ids of shape (length,).
        config: columns, limits, and the part to evaluate on if no split is given for it.
        name: by default the one of the set or its class.
    """
    if isinstance(given, Data):
        return given
    parts = _parts(given)
    train = parts.pop("train")
    name = name or _name_of(train)
    usual = next((split for split in EVALUATION_SPLITS if split in parts), None)
    fraction = config.evaluation_fraction or (0.0 if usual else SHARE)
    evaluation = None if fraction or usual is None else parts.pop(usual)
    if all(_is_table(part) for part in (train, evaluation, *parts.values()) if part is not None):
        tables = {split: TableDataset(part, f"{name}, split {split!r}", paths=True) for split, part in parts.items()}
        trained = TableDataset(train, name, paths=True)
        evaluated = None if evaluation is None else TableDataset(evaluation, f"{name}, evaluation", paths=True)
        return join_tables(name, "Python", trained, evaluated, tables, config, fraction)
    return _join_examples(name, train, evaluation, parts, config, fraction)


def _parts(given: Any) -> dict[str, Any]:
    """Datasets by split, with one named train; DataError if a part has no examples by number."""
    if isinstance(given, (tuple, list)) and 2 <= len(given) <= 3 and all(_has_examples(part) for part in given):
        parts = dict(zip(("train", "validation", "test"), given, strict=False))
    else:
        parts = dict(given) if isinstance(given, Mapping) else {"train": given}
    wrong = {split: part for split, part in parts.items() if not _has_examples(part)}
    if wrong or "train" not in parts:
        found = {split: type(part).__name__ for split, part in (wrong or parts).items()}
        raise DataError(
            "These data cannot be used.",
            expected="a torch Dataset with __len__ and __getitem__ (an iterable one has no examples by number, so no "
            "run could be resumed), a `datasets.Dataset`, or a mapping of these by split with one named train",
            found=", ".join(
                f"{split}: {part if isinstance(part, str) else type(part).__name__}" for split, part in found.items()
            ),
        )
    return parts


def _has_examples(part: Any) -> bool:
    kind = type(part)
    return hasattr(kind, "__len__") and hasattr(kind, "__getitem__") and not isinstance(part, (Mapping, str, Tensor))


def _is_table(part: Any) -> bool:
    """Whether it is a `datasets.Dataset` that is read as stored; one with a transform is read through that."""
    return type(part).__module__.partition(".")[0] == "datasets" and part.format["type"] != "custom"


def _name_of(part: Any) -> str:
    while hasattr(part, "dataset") and _has_examples(part.dataset):  # as torch's Subset
        part = part.dataset
    named = getattr(getattr(part, "info", None), "dataset_name", None)
    return str(named or type(part).__name__)


# Datasets of torch: an example by number, whatever it is made of


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
class ExampleDataset:
    """Examples of a map-style dataset.

    Reading one is seeded by its number: a transform that draws random numbers gives the same example in every epoch and
    after resuming. Augmentation that differs by epoch is the recipe's.
    """

    data: Any
    name: str
    kind: Literal["image", "text", "tokens"]
    columns: tuple[Any, ...]
    """Keys of the inputs in an example, or their places."""
    labels: Tensor | None = None
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.data) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = range(len(self))[index] if self.rows is None else int(self.rows[index])
        found = _read(self.data, row)
        values = [_input(found.get(column)) for column in self.columns]
        if any(kind != self.kind for kind, _ in values):
            raise DataError(
                f"{self.locate(row)}: the input is not {self.kind}, as the first example is.",
                expected=KINDS,
                found=listed(type(found.get(column)).__name__ for column in self.columns),
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

    def take(self, rows: Tensor) -> ExampleDataset:
        """Some of the examples."""
        labels = None if self.labels is None else self.labels[rows]
        return replace(self, labels=labels, rows=rows if self.rows is None else self.rows[rows])

    def locate(self, row: int) -> str:
        """The place of a row, as an error names it."""
        return f"{self.name}, example {row} (the first is 0)"


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


def _join_examples(
    name: str, train: Any, evaluation: Any, others: Mapping[str, Any], config: OwnConfig, fraction: float
) -> Data:
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


def _columns(first: Mapping[Any, Any], config: OwnConfig, name: str) -> tuple[Any, tuple[Any, ...], Any]:
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
