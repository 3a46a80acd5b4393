"""Labels of a table as class numbers, or as the numbers of a regression."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor

from wellcond.lab.data.base import DataError, listed

if TYPE_CHECKING:
    from wellcond.lab.data.tables import Table

LabelKind = Literal["class", "number"]
"""Whether labels are classes, or numbers to be predicted."""
INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*")
NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")


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
    values = set(_read(table, column))
    by_name = isinstance(next(iter(values)), str)
    names = declared or _stored_names(table, column)
    if names is None and by_name:
        names = tuple(sorted(values))
    if names is None:
        counted = sorted(number for number in values if number >= 0)
        names = tuple(str(number) for number in range(len(counted)))
        if counted != list(range(len(counted))) or not counted:
            gap = next((row for row, number in enumerate(counted) if row != number), 0)
            raise DataError(
                f"{table.name}: no row has the label {gap}, though others occur.",
                expected=f"every integer from 0 to the largest in column {column!r}",
                found=f"labels {listed(sorted(values))}",
                todo="Count the classes from 0, or name all of them in the field 'class_names'.",
            )
    return Classes(names, by_name)


def encode_labels(table: Table, column: str, classes: Classes) -> Tensor:
    """Class number of every row, int64.

    Raises:
        DataError: a label is missing, of another type than in training, out of range, or an unknown name.
    """
    values, stored = _read(table, column), _stored_names(table, column)
    if isinstance(values[0], str) != classes.by_name or (stored and len(stored) != len(classes.names)):
        raise DataError(
            f"{table.name}: the labels in column {column!r} are not of the training split's kind.",
            expected=f"{'names' if classes.by_name else 'numbers'} of the {len(classes.names)} classes "
            f"{listed(classes.names)}",
            found=f"names {listed(stored)}" if stored else "numbers" if classes.by_name else "texts",
            todo="Write the labels of all splits in the same way.",
        )
    known: dict[Any, int] = {name if classes.by_name else row: row for row, name in enumerate(classes.names)}
    for row, value in enumerate(values):
        if value not in known:
            raise DataError(
                f"{table.locate(row)}: the label is not a class of the training split.",
                expected=f"one of {listed(classes.names)} in column {column!r}"
                if classes.by_name
                else f"an integer from 0 to {len(classes.names) - 1} in column {column!r}",
                found=repr(value),
                todo="Correct the label, or add examples of this class to the training split.",
            )
    return torch.tensor([known[value] for value in values])


def read_numbers(table: Table, column: str) -> Tensor:
    """Label of every row as a number, float64.

    Raises:
        DataError: a label is missing, not a number, or not finite.
    """
    numbers = []
    for row, value in enumerate(table.data[column][:]):
        number = float(value) if table.text_labels and NUMBER.fullmatch(value) else value
        if type(number) not in (int, float) or not math.isfinite(number):
            _refuse(
                table,
                column,
                row,
                "the label is not a number.",
                expected=f"finite numbers throughout column {column!r}, since label_kind is number",
                todo="Correct or remove the row; labels that name classes need 'label_kind: class'.",
            )
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.float64)


def labels_are_hidden(table: Table, column: str) -> bool:
    """Whether every label is -1, by which the hub marks splits whose labels are not published."""
    return all(value == -1 for value in table.data[column][:])


def _stored_names(table: Table, column: str) -> tuple[str, ...] | None:
    names = getattr(table.data.features[column], "names", None)
    return None if names is None else tuple(names)


def _read(table: Table, column: str) -> list[Any]:
    """The labels, all of them integers or all of them texts."""
    values = table.data[column][:]
    for row, value in enumerate(values):
        if value is None or value == "" or value != value:
            _refuse(
                table,
                column,
                row,
                "the label is missing.",
                expected=f"a class number or a class name in column {column!r}",
                todo="Fill in or remove the row.",
            )
    integers = [
        isinstance(value, int) or (table.text_labels and INTEGER.fullmatch(value) is not None) for value in values
    ]
    if all(integers):
        return [int(value) for value in values]
    names = [isinstance(value, str) for value in values]
    decimals = table.text_labels and all(NUMBER.fullmatch(value) for value in values)
    if any(integers) or not all(names) or decimals:
        mixed = integers if integers[0] else names
        _refuse(
            table,
            column,
            0 if all(mixed) else mixed.index(False),
            "the label is not an integer.",
            expected=f"class numbers or class names throughout column {column!r}",
            todo="Write all labels as integers from 0, or all as names; with 'label: null' the data are unlabelled.",
        )
    return values


def _refuse(table: Table, column: str, row: int, problem: str, *, expected: str, todo: str) -> NoReturn:
    found = f"{table.data[row][column]!r} ({table.data.features[column]})"
    raise DataError(f"{table.locate(row)}: {problem}", expected=expected, found=found, todo=todo)
