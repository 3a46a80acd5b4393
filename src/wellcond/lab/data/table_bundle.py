"""From tables of several splits to a bundle: the steps that `hub` and `files` share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wellcond.lab.data.base import Data, Kind, describe_sizes, draw_subset
from wellcond.lab.data.columns import (
    InputColumns,
    choose_input,
    choose_kind,
    choose_label,
    count_empty_texts,
    require_column,
)
from wellcond.lab.data.errors import DataError
from wellcond.lab.data.labels import Classes, encode_labels, labels_are_hidden, read_classes, read_numbers
from wellcond.lab.data.reading import import_datasets
from wellcond.lab.data.tables import Table, TableSplit

LabelKind = Literal["class", "number"]
"""Whether labels are classes, or numbers to be predicted."""


@dataclass(frozen=True)
class Wanted:
    """Columns, classes and sizes as the recipe asks for them."""

    input: InputColumns
    label: str | None
    kind: Kind | None = None
    class_names: tuple[str, ...] | None = None
    limit_train: int | None = None
    limit_evaluation: int | None = None
    limit_test: int | None = None
    evaluation_fraction: float | None = None
    seed: int = 0
    label_kind: LabelKind = "class"


def bundle_tables(
    name: str, tables: Mapping[str, Table], train: str, evaluation: str, wanted: Wanted, *, origin: str
) -> Data:
    """Check columns and labels of every table and wrap them; with `evaluation_fraction` both splits share a table.

    Raises:
        DataError: a column, a label or a text is not as expected, or a table has no rows.
    """
    for table in tables.values():
        require_rows(table)
    label = choose_label(tables[train], wanted.label)
    columns = choose_input(tables[train], wanted.input, label)
    kind = choose_kind(tables[train], columns, wanted.kind)
    classes = None
    if label is not None and wanted.label_kind == "class":
        classes = read_classes(tables[train], label, wanted.class_names)

    splits, notes = {}, []
    for split, table in tables.items():
        checked = _check_columns(table, columns, kind)
        used = label
        if split not in (train, evaluation) and label is not None:
            hidden = label not in table.data.column_names or labels_are_hidden(table, label)
            used = None if hidden else label
        labels = None if used is None else _labels(table, used, classes)
        if kind == "text":
            empty = count_empty_texts(table, columns)
            notes += [f"{empty} empty texts in {split!r}"] if empty else []
        splits[split] = TableSplit(checked, kind, columns, labels)

    train_split, evaluation_split = splits[train], splits[evaluation]
    if wanted.evaluation_fraction is not None:
        train_rows, evaluation_rows = draw_fraction(train_split, wanted.evaluation_fraction, seed=wanted.seed)
        train_split, evaluation_split = _take(train_split, train_rows), _take(evaluation_split, evaluation_rows)
    train_split = limit_split(train_split, wanted.limit_train)
    evaluation_split = limit_split(evaluation_split, wanted.limit_evaluation)
    names = None if classes is None else classes.names
    description = "; ".join([f"{name} from {origin}: {describe_sizes(train_split, evaluation_split, names)}", *notes])
    if "test" in splits:
        splits["test"] = limit_split(splits["test"], wanted.limit_test)
    others = {split: made for split, made in splits.items() if split not in (train, evaluation)}
    return Data(name, kind, train_split, evaluation_split, names, description, others)


def require_rows(table: Table) -> None:
    """Raise `DataError` if a table is empty."""
    if len(table) == 0:
        raise DataError(
            f"{table.name}: there are no rows.", expected="at least one row", found="0 rows", todo="Check the file."
        )


def draw_fraction(split: TableSplit, fraction: float, *, seed: int) -> tuple[Tensor, Tensor]:
    """Rows to train on and to evaluate on, drawn with a seed; of every class the same fraction, at most all but one.

    Raises:
        DataError: there are too few rows to evaluate on any.
    """
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))
    groups = [order]
    if split.labels is not None and not split.labels.is_floating_point():
        by_class = split.labels[order].argsort(stable=True)
        counts = split.labels.bincount()
        groups = list(order[by_class].split(counts[counts > 0].tolist()))
    sizes = [min(int(fraction * len(group) + 0.5), len(group) - 1) for group in groups]
    if sum(sizes) == 0:
        raise DataError(
            f"{split.table.name}: too few rows to set some aside for evaluation.",
            expected="at least one row, and not the only one of its class",
            found=f"{len(split)} rows in {len(groups)} classes, evaluation_fraction {fraction}",
            todo="Raise 'evaluation_fraction', or give a file in 'evaluation'.",
        )
    pairs = list(zip(groups, sizes, strict=True))
    evaluation = torch.cat([group[:size] for group, size in pairs]).sort().values
    return torch.cat([group[size:] for group, size in pairs]).sort().values, evaluation


def _check_columns(table: Table, columns: tuple[str, ...], kind: Kind) -> Table:
    """The table with only its input columns, images left encoded."""
    for name in columns:
        require_column(table, name, "input")
    choose_kind(table, columns, kind)
    data = table.data.select_columns(list(columns))
    if type(data.features[columns[0]]).__name__ == "Image":
        data = data.cast_column(columns[0], import_datasets().Image(decode=False))
    return Table(data, table.parts, table.text_labels)


def _labels(table: Table, label: str, classes: Classes | None) -> Tensor:
    require_column(table, label, "label")
    return read_numbers(table, label) if classes is None else encode_labels(table, label, classes)


def _take(split: TableSplit, rows: Tensor) -> TableSplit:
    labels = None if split.labels is None else split.labels[rows]
    return TableSplit(split.table, split.kind, split.columns, labels, rows if split.rows is None else split.rows[rows])


def limit_split(split: TableSplit, limit: int | None) -> TableSplit:
    """At most `limit` rows, drawn with a fixed seed."""
    rows = draw_subset(len(split), limit)
    return split if rows is None else _take(split, rows)
