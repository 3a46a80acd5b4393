"""Labels of a table as class numbers, or as the numbers of a regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellcond.lab.data.errors import DataError, listed
from wellcond.lab.data.tables import Table

NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"


@dataclass(frozen=True)
class Classes:
    """Names of the classes, and whether the labels are these names or their numbers."""

    names: tuple[str, ...]
    by_name: bool


def read_classes(table: Table, column: str, declared: tuple[str, ...] | None) -> Classes:
    """Classes of a training split: names that the file or the recipe declares, else those of the labels, sorted.

    Raises:
        DataError: a label is missing or of a wrong type, or numbers leave a gap between 0 and the largest.
    """
    values = _label_values(table, column)
    known = declared or _stored_names(table, column)
    if isinstance(values, np.ndarray):
        if known is None:
            known = _count_classes(table, column, values)
        return Classes(known, by_name=False)
    return Classes(known or tuple(sorted(values.unique().to_pylist())), by_name=True)


def encode_labels(table: Table, column: str, classes: Classes) -> Tensor:
    """Class number of every row, int64.

    Raises:
        DataError: a label is missing, of another type than in training, out of range, or an unknown name.
    """
    values = _label_values(table, column)
    stored = _stored_names(table, column)
    if isinstance(values, np.ndarray) == classes.by_name or (stored and len(stored) != len(classes.names)):
        raise DataError(
            f"{table.name}: the labels in column {column!r} are not of the training split's kind.",
            expected=f"{'names' if classes.by_name else 'numbers'} of the {len(classes.names)} classes "
            f"{listed(classes.names)}",
            found=f"names {listed(stored)}" if stored else "numbers" if classes.by_name else "texts",
            todo="Write the labels of all splits in the same way.",
        )
    if isinstance(values, np.ndarray):
        wrong = (values < 0) | (values >= len(classes.names))
        if wrong.any():
            row = int(wrong.argmax())
            raise DataError(
                f"{table.locate(row)}: the label is out of range.",
                expected=f"an integer from 0 to {len(classes.names) - 1} in column {column!r}",
                found=str(values[row]),
                todo="Correct the label; classes are counted from 0, and all of them occur in the training split.",
            )
        return torch.from_numpy(values.astype(np.int64))
    import pyarrow as pa
    import pyarrow.compute as compute

    codes = compute.index_in(values, value_set=pa.array(classes.names, type=values.type))
    if codes.null_count:
        row = compute.index(compute.is_null(codes), True).as_py()
        raise DataError(
            f"{table.locate(row)}: the label is not a class of the training split.",
            expected=f"one of {listed(classes.names)} in column {column!r}",
            found=repr(values[row].as_py()),
            todo="Correct the label, or add examples of this class to the training split.",
        )
    return torch.from_numpy(codes.to_numpy().astype(np.int64))


def read_numbers(table: Table, column: str) -> Tensor:
    """Label of every row as a number, float64.

    Raises:
        DataError: a label is missing, not a number, or not finite.
    """
    import pyarrow as pa
    import pyarrow.compute as compute

    values = table.data.data.column(column)
    if table.text_labels and (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        numbers = compute.match_substring_regex(values, NUMBER)
        row = compute.index(compute.fill_null(numbers, False), False).as_py()
        if row >= 0:
            _raise_no_number(table, column, row)
        values = compute.utf8_trim_whitespace(values)
    elif not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        _raise_no_number(table, column, 0)
    found = values.cast(pa.float64()).to_numpy()  # what is missing becomes NaN
    wrong = ~np.isfinite(found)
    if wrong.any():
        _raise_no_number(table, column, int(wrong.argmax()))
    return torch.tensor(found)


def _raise_no_number(table: Table, column: str, row: int) -> None:
    raise DataError(
        f"{table.locate(row)}: the label is not a number.",
        expected=f"finite numbers throughout column {column!r}, since label_kind is number",
        found=f"{table.data[row][column]!r} ({table.data.features[column]})",
        todo="Correct or remove the row; labels that name classes need 'label_kind: class'.",
    )


def labels_are_hidden(table: Table, column: str) -> bool:
    """Whether every label is -1, by which the hub marks splits whose labels are not published."""
    values = table.data.data.column(column)
    numbers = str(values.type).startswith(("int", "uint", "float", "double"))
    return numbers and not values.null_count and bool((values.to_numpy() == -1).all())


def _stored_names(table: Table, column: str) -> tuple[str, ...] | None:
    names = getattr(table.data.features[column], "names", None)
    return None if names is None else tuple(names)


def _label_values(table: Table, column: str) -> Any:
    """The labels as an array of integers (numpy) or of texts (pyarrow), checked for missing ones."""
    import pyarrow as pa
    import pyarrow.compute as compute

    values = table.data.data.column(column)
    missing = compute.is_null(values, nan_is_null=True)
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        missing = compute.or_kleene(missing, compute.equal(compute.binary_length(values), 0))
    row = compute.index(missing, True).as_py()
    if row >= 0:
        raise DataError(
            f"{table.locate(row)}: the label is missing.",
            expected=f"a class number or a class name in column {column!r}",
            found=repr(values[row].as_py()),
            todo="Fill in or remove the row.",
        )
    if type(table.data.features[column]).__name__ == "Json":
        _raise_wrong_type(table, column, _first_odd_row(table, column))
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    if pa.types.is_integer(values.type):
        return values.to_numpy()
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return _recognise_numbers(table, column, values) if table.text_labels else values
    return _raise_wrong_type(table, column, 0)


def _recognise_numbers(table: Table, column: str, values: Any) -> Any:
    """Texts of a CSV file: integers if all of them are, class names if none of them is a number."""
    import pyarrow.compute as compute

    integers = compute.match_substring_regex(values, r"^\s*[+-]?\d+\s*$")
    count = compute.sum(integers).as_py()
    if count == len(values):
        return np.array([int(text) for text in values.to_pylist()], dtype=np.int64)
    numbers = compute.match_substring_regex(values, NUMBER)
    if count or compute.all(numbers).as_py():
        _raise_wrong_type(table, column, compute.index(integers, False).as_py())
    return values


def _first_odd_row(table: Table, column: str) -> int:
    """First row whose label is of another type than that of row 0; row 0 if it is no label itself."""
    kinds = [type(value) for value in table.data[column]]
    if kinds[0] not in (int, str):
        return 0
    return next((row for row, kind in enumerate(kinds) if kind is not kinds[0]), 0)


def _raise_wrong_type(table: Table, column: str, row: int) -> Any:
    raise DataError(
        f"{table.locate(row)}: the label is not an integer.",
        expected=f"class numbers or class names throughout column {column!r}",
        found=f"{table.data[row][column]!r} ({table.data.features[column]})",
        todo="Write all labels as integers from 0, or all as names; with 'label: null' the data are unlabelled.",
    )


def _count_classes(table: Table, column: str, values: np.ndarray) -> tuple[str, ...]:
    present = np.unique(values)
    if present[0] < 0:
        row = int((values < 0).argmax())
        raise DataError(
            f"{table.locate(row)}: the label is negative.",
            expected=f"integers from 0 in column {column!r}",
            found=str(values[row]),
            todo="Correct the label, or remove rows without one.",
        )
    if present[-1] != len(present) - 1:
        gap = int(np.argmax(present != np.arange(len(present))))
        raise DataError(
            f"{table.name}: no row has the label {gap}, though larger ones occur.",
            expected=f"every integer from 0 to the largest in column {column!r}",
            found=f"labels {listed(present.tolist())}",
            todo="Count the classes from 0, or name all of them in the field 'class_names'.",
        )
    return tuple(str(number) for number in range(len(present)))
