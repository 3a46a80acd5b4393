"""What every data source returns and uses: datasets with random access, its error, progress, and the registry."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar

import torch
from torch import Tensor

from wellcond.errors import TRUST_NEEDED, DataError, RecipeError
from wellcond.lab.settings import Settings, choose_by_name


def listed(names: Iterable[object], *, most: int = 12) -> str:
    """Names joined by commas, cut after `most` of them."""
    items = [str(name) for name in names]
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more if items else "none"


class Dataset(Protocol):
    """Random access to examples; picklable, so that `DataLoader` workers can hold it.

    An example is a dict: `image` (a PIL image, or a tensor (C, H, W)), `text` (and `text_pair`), or `tokens` (int64,
    ids from 0, all of one length, shorter ones filled up with -1), and `label` (int) unless the dataset is unlabelled;
    for detection see `CocoDataset`.
    """

    @property
    def labels(self) -> Tensor | None:
        """Class of every example, int64 of shape (n,), or its number, float64; None when unlabelled."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def take(self, rows: Tensor) -> Self:
        """Some of the examples."""

    def content(self, index: int) -> bytes:
        """Bytes that identify the input at `index` on every machine: as stored, not as a decoder renders them."""


Part = TypeVar("Part", bound=Dataset)


@dataclass(frozen=True, eq=False)
class TensorDataset:
    """Examples held as one tensor, `inputs` of shape (n, ...); tokens may be held in fewer bits than 64."""

    key: Literal["image", "tokens"]
    inputs: Tensor
    labels: Tensor | None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
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

    def take(self, rows: Tensor | slice) -> TensorDataset:
        """Some of the examples."""
        return replace(self, inputs=self.inputs[rows], labels=None if self.labels is None else self.labels[rows])


@dataclass(frozen=True, eq=False)
class RowDataset:
    """Examples of something with rows by number, all or those in `rows`."""

    data: Any
    name: str
    """What errors call it: its file, or data set and split."""
    kind: Literal["image", "text", "tokens"] = "text"
    columns: tuple[Any, ...] = ()
    """Of the inputs in a row, by name or place; none before they are known."""
    labels: Tensor | None = None
    """One for each example."""
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.data) if self.rows is None else len(self.rows)

    def row_of(self, index: int) -> int:
        """The row of an example."""
        return range(len(self))[index] if self.rows is None else int(self.rows[index])

    def take(self, rows: Tensor) -> Self:
        """Some of the examples."""
        labels = None if self.labels is None else self.labels[rows]
        return replace(self, labels=labels, rows=rows if self.rows is None else self.rows[rows])

    def locate(self, row: int) -> str:
        """The place of a row, as an error names it."""
        return f"{self.name}, row {row} (the first is 0)"


@dataclass(frozen=True, eq=False)
class Data:
    """A training split, an evaluation split, and what they are about."""

    name: str
    kind: Literal["image", "text", "tokens", "detection"]
    train: Dataset
    evaluation: Dataset
    class_names: tuple[str, ...] | None
    """In the order of the labels; None when unlabelled, or when labels are numbers."""
    origin: str
    """In words, without a path of this machine."""
    others: Mapping[str, Dataset] = field(default_factory=dict)
    """Further splits of the source by name, such as test."""
    vocabulary_size: int | None = None
    """Number of token ids; only for tokens."""
    notes: Sequence[str] = ()
    """What a reader of the record should know, such as images that were left out."""

    @property
    def description(self) -> str:
        """Origin, sizes and notes in words."""
        labels = "unlabelled" if self.train.labels is None else "labelled with numbers"
        classes = labels if self.class_names is None else f"{len(self.class_names)} classes"
        sizes = f"{len(self.train)} training and {len(self.evaluation)} evaluation examples, {classes}"
        test = f", {len(self.others['test'])} test examples" if "test" in self.others else ""
        return "; ".join([f"{self.origin}: {sizes}{test}", *self.notes])


def draw_subset(dataset: Part, limit: int | None) -> Part:
    """At most `limit` examples, drawn with a fixed seed, in their original order."""
    if limit is None or limit >= len(dataset):
        return dataset
    drawn = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:limit]
    return dataset.take(drawn.sort().values)


def draw_fraction(dataset: Part, fraction: float, what: str) -> tuple[Part, Part]:
    """Examples to train and to evaluate on, drawn with a fixed seed; of every class the same share, not all."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    groups, labels = [order], dataset.labels
    if labels is not None and not labels.is_floating_point():
        counts = labels.bincount()
        groups = list(order[labels[order].argsort(stable=True)].split(counts[counts > 0].tolist()))
    sizes = [min(int(fraction * len(group) + 0.5), len(group) - 1) for group in groups]
    if sum(sizes) == 0:
        raise DataError(
            f"{what}: too few examples to set {fraction} of every class aside for evaluation.",
            expected="a larger part, or something else to evaluate on",
            found=f"{len(dataset)} examples in {len(groups)} classes",
        )
    pairs = list(zip(groups, sizes, strict=True))
    train = torch.cat([group[size:] for group, size in pairs]).sort().values
    evaluation = torch.cat([group[:size] for group, size in pairs]).sort().values
    return dataset.take(train), dataset.take(evaluation)


def fingerprint(data: Data) -> dict[str, Any]:
    """What a run record says about its data: size and digest of each split, as plain JSON, the same on every machine.

    The digest of a dataset covers its size, every label, and 16 inputs spread evenly from the first to the last, each
    as stored. It does not cover the inputs between those, so that sets of any size take milliseconds.
    """
    found = {}
    for name, split in {"train": data.train, "evaluation": data.evaluation, **data.others}.items():
        digest = hashlib.sha256(str(len(split)).encode())
        if split.labels is not None:
            labels = split.labels.numpy()
            digest.update(labels.astype("<f8" if labels.dtype.kind == "f" else "<i8").tobytes())
        last = len(split) - 1
        for index in sorted(set(torch.linspace(0, last, 16, dtype=torch.float64).long().tolist()) | {0, last}):
            content = split.content(index)
            digest.update(len(content).to_bytes(8, "little") + content)
        found[name] = {"size": len(split), "sha256": digest.hexdigest()}
    return found


# Progress

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and how much there is."""

_LISTENER: ContextVar[Progress | None] = ContextVar("listener", default=None)


@contextmanager
def progress_to(progress: Progress | None) -> Iterator[None]:
    """Within the block `report_progress` calls `progress`; None keeps the callback of an outer block."""
    token = _LISTENER.set(progress or _LISTENER.get())
    try:
        yield
    finally:
        _LISTENER.reset(token)


def report_progress(what: str, done: int, total: int) -> None:
    """Report how far something is to the callback of `progress_to`, if there is one."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(what, done, total)


# Sources by name; a new source is one decorated function anywhere.


class SourceConfig(Settings):
    """Base of the settings of every source; a subclass fixes `source` to its own name."""

    source: str

    @property
    def local_code(self) -> str:
        """Which file's code loading these data runs, in words; empty if it runs none."""
        return ""


Load = Callable[[Any, Path], Data]
SOURCES: dict[type[SourceConfig], Load] = {}
"""The function that loads each source, by its settings."""


def register_source(config_class: type[SourceConfig]) -> Callable[[Load], Load]:
    """Decorate the loader of a source with its settings, whose field `source` has the name as its default."""

    def register(load: Load) -> Load:
        SOURCES[config_class] = load
        return load

    return register


def resolve_config(raw: object) -> SourceConfig:
    """The settings of the source that `raw["source"]` names."""
    return choose_by_name("data source", *SOURCES, field="source")(raw)


def load_data(config: SourceConfig, *, base: Path | None = None, local_code: bool = False) -> Data:
    """Load the data that `config` describes; relative paths start at `base`, the current folder by default.

    Rows and labels are checked here; an image is first decoded when it is asked for. DataError if there is nothing to
    train or to evaluate on; RecipeError if a file's code would be run and `local_code` is not trusted.
    """
    if config.local_code and not local_code:
        raise RecipeError(TRUST_NEEDED.format(config.local_code))
    data = SOURCES[type(config)](config, Path.cwd() if base is None else Path(base))
    for purpose, split in (("train", data.train), ("evaluate", data.evaluation)):
        if not len(split):
            raise DataError(
                f"{data.name}: nothing is left to {purpose} on.",
                expected="at least one example",
                found=f"{len(data.train)} to train on and {len(data.evaluation)} to evaluate on",
                todo="Correct the share to evaluate on (data.held_out, data.evaluation_fraction), or give more data.",
            )
    return data
