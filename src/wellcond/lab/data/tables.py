"""Tables of `datasets` as data: which column is what, labels, rows as a dataset."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from wellcond.lab.data.base import Data, DataError, Kind, SourceConfig, draw_fraction, draw_subset, listed
from wellcond.lab.data.disk import import_datasets
from wellcond.lab.data.images import decode_image, read_image

INPUT_NAMES = ("image", "img", "text", "sentence")
LABEL_NAMES = ("label", "labels")
INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")
NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}


class TableConfig(SourceConfig):
    """Which columns of a table are used, and how many rows."""

    input: str | Annotated[list[str], Field(min_length=2, max_length=2)] = "auto"
    """One column, or two for pairs of texts; "auto" takes the usual name if nothing else could be meant."""
    label: str | None = "auto"
    """Column of the labels; null for none, "auto" for `label` or `labels` if there is one."""
    label_kind: Literal["class", "number"] = "class"
    """Whether labels are classes, or numbers to be predicted."""
    class_names: tuple[str, ...] | None = None
    limit_train: int | None = Field(None, ge=1)
    limit_evaluation: int | None = Field(None, ge=1)
    """Largest number of examples, drawn with a fixed seed."""


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a table that came from one place."""

    name: str
    """File, or data set and split, as an error names it."""
    num_rows: int
    folder: Path | None = None
    """Where image paths in these rows start, and may not lead out of; None trusts the paths."""


@dataclass(frozen=True, eq=False)
class Table:
    """A `datasets.Dataset` and where its rows came from."""

    data: Any
    parts: Sequence[Part]
    text_labels: bool = False
    """Every value was read as text, so that integers must still be recognised (CSV)."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.data)

    def part_of(self, row: int) -> tuple[Part, int]:
        """The part that a row came from, and its number there."""
        for part in self.parts:
            if row < part.num_rows:
                return part, row
            row -= part.num_rows
        raise IndexError(row)

    def locate(self, row: int) -> str:
        """The place of a row, as an error names it."""
        part, number = self.part_of(row)
        return f"{part.name}, row {number} (the first is 0)"

    @property
    def name(self) -> str:
        """The place of the whole table, as an error names it."""
        more = f" and {len(self.parts) - 1} more files" if len(self.parts) > 1 else ""
        return f"{self.parts[0].name}{more}"


@dataclass(frozen=True, eq=False)
class TableDataset:
    """Rows of a table, all or those in `rows`, memory-mapped; `labels` has one entry per row of the dataset."""

    table: Table
    kind: Kind
    columns: tuple[str, ...]
    labels: Tensor | None
    rows: Tensor | None = None

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.table) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The example at `index`: `image`, or `text` and perhaps `text_pair`; and `label`."""
        row = self._row(index)
        example: dict[str, Any]
        if self.kind == "image":
            example = {"image": decode_image(self._encoded_image(row), self.table.locate(row))}
        else:
            values = self.table.data[row]
            example = dict(zip(("text", "text_pair"), (values[name] for name in self.columns), strict=False))
        if self.labels is not None:
            example["label"] = self.labels[index].item()
        return example

    def content(self, index: int) -> bytes:
        """The encoded image, or the texts in UTF-8."""
        row = self._row(index)
        if self.kind == "image":
            return self._encoded_image(row)
        values = self.table.data[row]
        return b"\0".join(values[name].encode() for name in self.columns)

    def take(self, rows: Tensor | None) -> TableDataset:
        """Some of the examples; all for None."""
        if rows is None:
            return self
        labels = None if self.labels is None else self.labels[rows]
        return TableDataset(self.table, self.kind, self.columns, labels, rows if self.rows is None else self.rows[rows])

    def limit(self, count: int | None) -> TableDataset:
        """At most `count` examples, drawn with a fixed seed."""
        return self.take(draw_subset(len(self), count))

    def _row(self, index: int) -> int:
        return range(len(self))[index] if self.rows is None else int(self.rows[index])

    def _encoded_image(self, row: int) -> bytes:
        value, where = self.table.data[row][self.columns[0]], self.table.locate(row)
        if isinstance(value, dict):
            value = value["bytes"] if value.get("bytes") is not None else value.get("path")
        if isinstance(value, bytes):
            return value
        if isinstance(value, str) and value:
            folder = self.table.part_of(row)[0].folder
            return read_image(Path(value) if folder is None else folder / value, where, within=folder)
        raise DataError(
            f"{where}: there is no image.",
            expected="encoded bytes or a path",
            found=repr(value),
            todo="Fill in or remove the row.",
        )


def load_tables(
    name: str,
    train: Table,
    evaluation: Table | None,
    others: Mapping[str, Table],
    config: TableConfig,
    *,
    origin: str,
    kind: Kind | None = None,
    fraction: float | None = None,
    seed: int = 0,
    limit_test: int | None = None,
) -> Data:
    """Check columns and labels of every table; without an evaluation table, a fraction of the training table is taken.

    Raises: DataError if a column, a label or a text is not as expected, or a table has no rows.
    """
    tables = {"train": train, **({} if evaluation is None else {"evaluation": evaluation})}
    for table in (*tables.values(), *others.values()):
        if len(table) == 0:
            raise DataError(f"{table.name}: there are no rows.", expected="rows", found="none", todo="Check the file.")
    label = config.label
    if label == "auto":
        label = next((name for name in LABEL_NAMES if name in train.data.column_names), None)
    columns = _input_columns(train, config.input, label)
    kind = _kind(train, columns, kind)
    names, classes = None, None
    if label is not None and config.label_kind == "class":
        names, classes = _read_classes(train, label, config.class_names)
    notes: list[str] = []

    def dataset(split: str, table: Table, *, needed: bool) -> TableDataset:
        labels = None
        for column in columns:
            _require_column(table, column, "input")
        _kind(table, columns, kind)
        data = table.data.select_columns(list(columns))
        if type(data.features[columns[0]]).__name__ == "Image":
            data = data.cast_column(columns[0], import_datasets().Image(decode=False))
        # The hub marks labels that are not published by -1.
        published = label in table.data.column_names and any(value != -1 for value in table.data[label][:])
        if label is not None and (needed or published):
            _require_column(table, label, "label")
            labels = _number_labels(table, label) if classes is None else _class_labels(table, label, classes)
        empty = _count_empty_texts(table, columns) if kind == "text" else 0
        notes.extend([f"{empty} empty texts in {split!r}"] if empty else [])
        return TableDataset(Table(data, table.parts), kind, columns, labels)

    made = {split: dataset(split, table, needed=True) for split, table in tables.items()}
    further = {split: dataset(split, table, needed=False) for split, table in others.items()}
    trained = made["train"]
    if fraction is not None:
        rows, aside = draw_fraction(trained, fraction, seed=seed, what=train.name)
        trained, made["evaluation"] = trained.take(rows), trained.take(aside)
    trained, evaluated = trained.limit(config.limit_train), made["evaluation"].limit(config.limit_evaluation)
    if "test" in further:
        further["test"] = further["test"].limit(limit_test)
    return Data(name, kind, trained, evaluated, names, f"{name} from {origin}", further, notes=notes)


def _input_columns(table: Table, wanted: str | list[str], label: str | None) -> tuple[str, ...]:
    if wanted != "auto":
        names = (wanted,) if isinstance(wanted, str) else tuple(wanted)
        for name in names:
            _require_column(table, name, "input")
        return names
    usable = [name for name in table.data.column_names if name != label and _column_kind(table, name) is not None]
    if len(usable) == 1 and usable[0] in INPUT_NAMES:
        return (usable[0],)
    features = table.data.features.items()
    types = [f"{name} ({getattr(feature, 'dtype', type(feature).__name__)})" for name, feature in features]
    raise DataError(
        f"{table.name}: which column is the input is not clear.",
        expected=f"exactly one column of images or texts, named one of {listed(INPUT_NAMES)}",
        found=f"columns {listed(types)}; of images or texts: {listed(usable)}",
        todo="Name the column in the field 'input' (two columns in a list for pairs of texts).",
    )


def _require_column(table: Table, name: str, field: str) -> None:
    if name not in table.data.column_names:
        raise DataError(
            f"{table.name}: there is no column {name!r}.",
            expected=f"the column that the field '{field}' names",
            found=f"columns {listed(table.data.column_names)}",
            todo=f"Set '{field}' to one of these columns.",
        )


def _column_kind(table: Table, name: str) -> Literal["image", "text"] | None:
    """What a column holds by its type alone; None for neither images nor texts."""
    feature: Any = table.data.features[name]
    dtype = getattr(feature, "dtype", None)
    if type(feature).__name__ == "Image" or dtype in ("binary", "large_binary"):
        return "image"
    if isinstance(feature, dict):
        return "image" if "bytes" in feature or "path" in feature else None
    return "text" if dtype in ("string", "large_string") else None


def _kind(table: Table, columns: tuple[str, ...], wanted: Kind | None) -> Kind:
    """Kind of the input; a column of text is one of image paths if its first values end like image files."""
    kinds = [_column_kind(table, name) for name in columns]
    only_texts = wanted == "text" or len(columns) == 2
    for name, kind in zip(columns, kinds, strict=True):
        if kind is None or (only_texts and kind == "image"):
            raise DataError(
                f"{table.name}: column {name!r} cannot be the input.",
                expected="texts" if only_texts else "images or texts",
                found=f"values of type {table.data.features[name]}",
                todo=f"Set 'input' to another column; there are {listed(table.data.column_names)}.",
            )
    if kinds[0] == "image" or wanted == "image":
        return "image"
    first = table.data[: min(16, len(table))][columns[0]]
    looks_like_paths = all(value and PurePath(value).suffix.lower() in IMAGE_SUFFIXES for value in first)
    return "image" if not only_texts and looks_like_paths else "text"


def _count_empty_texts(table: Table, columns: tuple[str, ...]) -> int:
    """Number of empty texts; DataError if one is missing (null)."""
    import pyarrow.compute as compute

    empty = 0
    for name in columns:
        values = table.data.data.column(name)
        if values.null_count:
            raise DataError(
                f"{table.locate(compute.index(compute.is_null(values), True).as_py())}: column {name!r} has no value.",
                expected="a text, which may be empty",
                found="null",
                todo="Fill in or remove the row.",
            )
        empty += compute.sum(compute.equal(compute.binary_length(values), 0)).as_py() or 0
    return empty


# Labels: class numbers, or the numbers of a regression


def _read_classes(
    table: Table, column: str, declared: tuple[str, ...] | None
) -> tuple[tuple[str, ...], dict[Any, int]]:
    """Names of the classes of a training split, and the number of each by how labels are written, names or numbers.

    Names are those that the file or the recipe declares, else the labels themselves, sorted.

    Raises: DataError if a label is missing or of a wrong type, or numbers leave a gap between 0 and the largest.
    """
    _require_column(table, column, "label")
    values = set(_read_labels(table, column))
    by_name = isinstance(next(iter(values)), str)
    names = declared or getattr(table.data.features[column], "names", None) or (sorted(values) if by_name else None)
    if names is None:
        counted = sorted(number for number in values if number >= 0)
        names = [str(number) for number in range(len(counted))]
        if counted != list(range(len(counted))) or not counted:
            gap = next((row for row, number in enumerate(counted) if row != number), 0)
            raise DataError(
                f"{table.name}: no row has the label {gap}, though others occur.",
                expected=f"every integer from 0 to the largest in column {column!r}",
                found=f"labels {listed(sorted(values))}",
                todo="Count the classes from 0, or name all of them in the field 'class_names'.",
            )
    return tuple(names), {name if by_name else number: number for number, name in enumerate(names)}


def _class_labels(table: Table, column: str, classes: dict[Any, int]) -> Tensor:
    """Class number of every row, int64; DataError if a label is missing, or not one of the classes."""
    values = _read_labels(table, column)
    for row, value in enumerate(values):
        if value not in classes:
            among = f"the integers from 0 to {len(classes) - 1}" if 0 in classes else listed(classes)
            raise DataError(
                f"{table.locate(row)}: the label is not a class of the training split.",
                expected=f"one of {among} in column {column!r}",
                found=repr(value),
                todo="Correct the label, or add examples of this class to training; write labels alike in all splits.",
            )
    return torch.tensor([classes[value] for value in values])


def _number_labels(table: Table, column: str) -> Tensor:
    """Label of every row as a number, float64; DataError if one is missing, no number, or not finite."""
    values = table.data[column][:]
    numbers = [float(value) if table.text_labels and NUMBER.fullmatch(value) else value for value in values]
    for row, number in enumerate(numbers):
        if type(number) not in (int, float) or not math.isfinite(number):
            expected = f"finite numbers throughout column {column!r}, since label_kind is number"
            todo = "Correct or remove the row; labels that name classes need 'label_kind: class'."
            raise _bad_label(table, column, row, "is not a number", expected, todo)
    return torch.tensor(numbers, dtype=torch.float64)


def _read_labels(table: Table, column: str) -> list[Any]:
    """The labels, all of them integers or all of them texts."""
    values = table.data[column][:]
    for row, value in enumerate(values):
        if value is None or value == "" or value != value:
            expected = f"a class number or a class name in column {column!r}"
            raise _bad_label(table, column, row, "is missing", expected, "Fill in or remove the row.")
    text = table.text_labels
    integers = [isinstance(value, int) or (text and INTEGER.fullmatch(value) is not None) for value in values]
    if all(integers):
        return [int(value) for value in values]
    names = [isinstance(value, str) for value in values]
    if any(integers) or not all(names) or (text and all(NUMBER.fullmatch(value) for value in values)):
        mixed = integers if integers[0] else names
        expected = f"class numbers or class names throughout column {column!r}"
        todo = "Write all labels as integers from 0, or all as names; with 'label: null' the data are unlabelled."
        raise _bad_label(table, column, 0 if all(mixed) else mixed.index(False), "is not an integer", expected, todo)
    return values


def _bad_label(table: Table, column: str, row: int, problem: str, expected: str, todo: str) -> DataError:
    found = f"{table.data[row][column]!r} ({table.data.features[column]})"
    return DataError(f"{table.locate(row)}: the label {problem}.", expected=expected, found=found, todo=todo)
