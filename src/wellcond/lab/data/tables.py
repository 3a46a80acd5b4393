"""Sources `files` and `hub`: tables of texts or images, of the user, of a mirror of the hub, or of the hub itself.

The `datasets` library reads them, called so that no code of a data set runs. A mirror is a folder of data files:
neither the card nor a script of a data set is read there.
"""

from __future__ import annotations

import csv
import glob
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from wellcond.errors import DataError, WellcondError
from wellcond.lab.data.base import Data, RowDataset, SourceConfig, draw_fraction, draw_subset, listed, register_source
from wellcond.lab.data.disk import contents, find_files, find_in_mirror, import_datasets, in_a_mirror
from wellcond.lab.data.images import decode_image, folder_splits, has_classes, joined, read_image

BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text"}
COMPRESSED = (".gz", ".bz2", ".zst")
EVALUATION_SPLITS = ("validation", "val", "dev", "test", "validation_matched")
NAME = r"[A-Za-z0-9_][\w.-]*"
HUB_ID = re.compile(rf"{NAME}(/{NAME})?")
SPLIT = re.compile(r"(?<![a-z])(train|validation|valid|val|dev|test)((?:_[a-z]+)?)(?![a-z])")


class TableConfig(SourceConfig):
    """Which columns of a table are used, and how many rows."""

    input: str | Annotated[list[str], Field(min_length=2, max_length=2)] = "auto"
    """One column, or two for pairs of texts; "auto" takes the only column of images or texts but for the label."""
    label: str | None = "auto"
    """Column of the labels; null for none, "auto" for `label` or `labels` if there is one."""
    label_kind: Literal["class", "number"] = "class"
    """Whether labels are classes, or numbers to be predicted."""
    limit_train: int | None = Field(None, ge=1)
    limit_evaluation: int | None = Field(None, ge=1)
    """Largest number of examples, drawn with a fixed seed."""


class FilesConfig(TableConfig):
    """Settings of `files`."""

    source: Literal["files"] = "files"
    train: str | list[str]
    """Path or glob pattern, or a list of them."""
    evaluation: str | list[str] | None = None
    evaluation_fraction: float = Field(0.1, gt=0, lt=1)
    """Part of the training rows to evaluate on, of every class alike, if `evaluation` names no file."""

    @field_validator("train", "evaluation")
    @classmethod
    def _names_something(cls, paths: str | list[str] | None) -> str | list[str] | None:
        listed = [paths] if isinstance(paths, str) else paths
        if listed is not None and (not listed or "" in listed):
            raise ValueError("expected a path or pattern, or a list of at least one")
        return paths


class HubConfig(TableConfig):
    """Settings of `hub`."""

    source: Literal["hub"] = "hub"
    id: str = Field(pattern=rf"^{NAME}(/{NAME})?$")
    config: str | None = Field(None, pattern=rf"^{NAME}$")
    train_split: str = "train"
    """One split, or several joined: train+validation."""
    evaluation_split: str | None = None
    """By default the first that exists of validation, val, dev, test, validation_matched."""
    test_split: str | None = None
    """By default the one named test that is neither trained on nor evaluated on; the evaluation split may be named
    again, where a benchmark chooses weights by its test set."""
    held_out: float | None = Field(None, gt=0, lt=1)
    """Share of the training split to evaluate on, of every class alike; what would have been the evaluation split is
    then the test split, and limits count what is left."""
    limit_test: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_test_split(self) -> HubConfig:
        if self.test_split is not None and self.held_out is not None:
            raise ValueError("test_split: with held_out the evaluation split is the test split; give one of the two")
        return self


@dataclass(frozen=True, eq=False)
class TableDataset(RowDataset):
    """Rows of a memory-mapped table, a `datasets.Dataset`."""

    paths: bool = False
    """Whether an image may be a path instead of bytes: a file could name any, an object in Python is trusted."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, values = self._read(index)
        example: dict[str, Any] = dict(zip(("text", "text_pair"), values, strict=False))
        if self.kind == "image":
            example = {"image": decode_image(values[0], self.locate(row))}
        return example if self.labels is None else example | {"label": self.labels[index].item()}

    def content(self, index: int) -> bytes:
        """The encoded image, or the texts in UTF-8."""
        _, values = self._read(index)
        return values[0] if self.kind == "image" else b"\0".join(value.encode() for value in values)

    def _read(self, index: int) -> tuple[int, list[Any]]:
        row = self.row_of(index)
        example = self.data[row]
        values = [example[name] for name in self.columns]
        if isinstance(values[0], dict):
            encoded, path = values[0]["bytes"], values[0].get("path")
            values = [read_image(path) if encoded is None and path and self.paths else encoded]
        if values[0] is None:
            raise _no_value(self, row, self.columns[0])
        return row, values


@register_source(FilesConfig)
def load_files(config: FilesConfig, base: Path) -> Data:
    """Read the files into the cache of `datasets` (HF_DATASETS_CACHE), from which they are memory-mapped."""
    files, fraction = find_files(config.train, base, "train"), config.evaluation_fraction
    train, evaluation = read_table(files), None
    if config.evaluation is not None:
        evaluation = read_table(find_files(config.evaluation, base, "evaluation"))
    return join_tables(name_of(files), "local files", train, evaluation, {}, config, fraction)


@register_source(HubConfig)
def load_hub(config: HubConfig, base: Path) -> Data:
    """All splits of the set; those beside training and evaluation are in `others`."""
    name = config.id if config.config is None else f"{config.id} ({config.config})"
    mirror = find_in_mirror(config.id)
    if mirror is not None and mirror.is_dir() and holds_images(mirror):
        return _load_folders(config, mirror)
    place, files = "a local mirror", find_splits(config.id, config.config)
    if files is not None:
        splits = {split: read_table(paths) for split, paths in files.items()}
    else:
        place = "the Hugging Face hub"
        with opened(config.id, name=config.config) as found:
            splits = {split: TableDataset(data, f"{name}, split {split!r}") for split, data in found.items()}
    joined = [require_split(split, splits, name, "train_split") for split in config.train_split.split("+")]
    usual = next((split for split in EVALUATION_SPLITS if split in splits and split != joined[-1]), None)
    others = {split: table for split, table in splits.items() if split not in joined}
    left = splits if config.held_out is None else others
    evaluated = require_split(config.evaluation_split or usual, left, name, "evaluation_split")
    train = splits[joined[0]]
    if len(joined) > 1:
        whole = import_datasets().concatenate_datasets([splits[split].data for split in joined])
        train = TableDataset(whole, f"{name}, split {config.train_split!r}")
    if config.held_out is not None:
        return join_tables(name, place, train, None, {"test": splits[evaluated]}, config, config.held_out)
    others.pop(evaluated, None)
    if config.test_split is not None:
        others["test"] = splits[require_split(config.test_split, splits, name, "test_split")]
    return join_tables(name, place, train, splits[evaluated], others, config)


def holds_images(folder: Path) -> bool:
    """Whether a folder has images by class in its train, rather than tables."""
    train = folder / "train"
    if not train.is_dir() or not has_classes(train):
        return False
    first = min(path for path in train.iterdir() if path.is_dir())  # the others may hold a million files
    return not any(suffix_of(path) in BUILDERS for path in (*train.iterdir(), *first.iterdir()))


def _load_folders(config: HubConfig, root: Path) -> Data:
    """A set of the hub from folders of images, a folder for each class, as many people have it on a disk."""
    splits, classes = folder_splits(root)
    name = config.id
    names = [require_split(split, splits, name, "train_split") for split in config.train_split.split("+")]
    train = joined([splits[split] for split in names])
    others = {split: files for split, files in splits.items() if split not in names}
    usual = next((split for split in EVALUATION_SPLITS if split in others), None)
    evaluated = require_split(config.evaluation_split or usual, others, name, "evaluation_split")
    evaluation, rest = others[evaluated], {split: files for split, files in others.items() if split != evaluated}
    if config.held_out is not None:
        rest = {"test": evaluation}
        train, evaluation = draw_fraction(train, config.held_out, name)
    elif config.test_split is not None:
        rest["test"] = splits[require_split(config.test_split, splits, name, "test_split")]
    if "test" in rest:
        rest["test"] = draw_subset(rest["test"], config.limit_test)
    train, evaluation = draw_subset(train, config.limit_train), draw_subset(evaluation, config.limit_evaluation)
    return Data(name, "image", train, evaluation, classes, f"{name} in folders of images", rest)


def require_split(split: str | None, splits: Any, name: str, field: str) -> str:
    """The name of a split; DataError with those there are if it is none of them."""
    if split is None or split not in splits:
        raise DataError(
            f"{name}: there is no split {'to evaluate on' if split is None else repr(split)}.",
            expected=f"one of {listed(EVALUATION_SPLITS)}, or what '{field}' names; with 'held_out' none to train on",
            found=f"splits {listed(splits)}",
        )
    return split


def find_splits(id: str, config: str | None) -> dict[str, list[Path]] | None:
    """Data files of a mirrored set by split, which their paths name as on the hub; train if they name none.

    A configuration is a folder; a set with several asks for one. None if the set is in no mirror.
    """
    mirror = find_in_mirror(id)
    if mirror is None:
        return None
    paths = sorted(path.relative_to(mirror) for path in mirror.rglob("*") if path.is_file())
    files = [path for path in paths if suffix_of(path) in BUILDERS and not path.name.startswith(".")]
    folders = {path.parts[0] for path in files if len(path.parts) > 1 and not SPLIT.search(path.parts[0])}
    if not files or (len(folders) > 1 if config is None else config not in folders):
        raise DataError(
            f"{mirror}: there are no data files, or those of other or several configurations.",
            expected=f"files such as train-00000-of-00001.parquet ({listed(BUILDERS)}), in the folder of 'config'",
            found=f"{contents(mirror)}; configurations {listed(sorted(folders))}",
        )
    splits: dict[str, list[Path]] = {}
    for path in files:
        if config is None or path.parts[0] == config:
            splits.setdefault(split_of("/".join(path.parts[config is not None :])), []).append(mirror / path)
    return dict(sorted(splits.items(), key=lambda item: (item[0] != "train", item[0])))


def split_of(path: str) -> str:
    """The split that a path names, as on the hub; train if it names none."""
    named = SPLIT.search(path)
    kind, rest = named.groups() if named else ("train", "")
    return ("validation" if kind in ("valid", "val", "dev") else kind) + rest


# Reading


def name_of(files: list[Path]) -> str:
    """What a split of several files is called."""
    return files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"


def suffix_of(path: Path) -> str:
    """The ending that says the format of a file, that of a compression left out."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:-1] if suffixes and suffixes[-1] in COMPRESSED else suffixes[-1:])


def read_table(files: list[Path]) -> TableDataset:
    """One table of all files, which have the format and the columns of the first."""
    with opened(files) as data:
        return TableDataset(data, str(files[0].with_name(name_of(files))))


def _read_header(file: Path, separator: str) -> list[str]:
    """Column names of a CSV file; pandas would take a surplus first value for the name of the row."""
    import fsspec  # of `datasets`

    with fsspec.open(str(file), "rt", compression="infer", newline="", encoding="utf-8-sig") as stream:
        rows = (row for row in csv.reader(stream, delimiter=separator) if row)
        header, first = next(rows, []), next(rows, [])
    if len(first) != len(header):
        raise ValueError(f"{len(first)} values in the first row for the columns {listed(header)}; quote the separator")
    return header


@contextmanager
def opened(place: str | list[Path], **options: Any) -> Iterator[Any]:
    """What `datasets` loads of the hub or of files, with the cache in HF_DATASETS_CACHE as it is now.

    DataError if reading fails, in the block too. There are no bars of `datasets` unless a person watches.
    """
    datasets = import_datasets()
    shown = sys.stderr.isatty() or datasets.are_progress_bars_disabled()
    if not shown:
        datasets.disable_progress_bars()
    try:
        builder = place
        if isinstance(place, list):
            builder, more = _file_options(place)
            options |= more
        yield datasets.load_dataset(builder, cache_dir=os.environ.get("HF_DATASETS_CACHE"), **options)
    except WellcondError:
        raise
    except Exception as error:  # the library has many classes
        if isinstance(place, str):
            name, hub = place, "access to the hub (no HF_HUB_OFFLINE) and a correct id, config and split"
            expected = f"a folder {place} {in_a_mirror()}, or {hub}"
        else:
            name = str(place[0].with_name(name_of(place)))
            expected = "whole files of one format, not empty, with the same columns; UTF-8; .zst needs zstandard"
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        found = f"{type(first).__name__}: {str(first).strip().partition(chr(10))[0][:300]}"
        raise DataError(f"{name}: this cannot be read.", expected=expected, found=found) from error
    finally:
        if not shown:
            datasets.enable_progress_bars()


def _file_options(files: list[Path]) -> tuple[str, dict[str, Any]]:
    """The builder of `datasets` for files of a format, and its options."""
    suffix = suffix_of(files[0])
    if suffix not in BUILDERS:
        raise DataError(
            f"{files[0]}: the format is not known.",
            expected=f"a name that ends in one of {listed(BUILDERS)}, perhaps compressed: {listed(COMPRESSED)}",
            found=files[0].name,
        )
    # Escaped: the library takes every name for a pattern.
    options: dict[str, Any] = {"data_files": [glob.escape(str(file)) for file in files], "split": "train"}
    if BUILDERS[suffix] == "csv":
        separator = "\t" if suffix == ".tsv" else ","
        # All values as they are written: texts such as "NA" or "007" must survive. Labels are recognised later.
        converters = dict.fromkeys((column for file in files for column in _read_header(file, separator)), str)
        options |= {"sep": separator, "converters": converters, "keep_default_na": False}
    return BUILDERS[suffix], options


# Columns


def join_tables(
    name: str,
    place: str,
    train: TableDataset,
    evaluation: TableDataset | None,
    others: Mapping[str, TableDataset],
    config: TableConfig,
    fraction: float = 0.0,
) -> Data:
    """Check columns and labels of every table; without one to evaluate on, a fraction of the training rows is taken."""
    label = config.label
    if label == "auto":
        label = next((column for column in ("label", "labels") if column in train.data.column_names), None)
    columns = _input_columns(train, config.input, label)
    names, classes = None, None
    if label is not None and config.label_kind == "class":
        names, classes = read_classes(_label_values(train, label), train.data.features[label])

    def dataset(table: TableDataset, *, labelled: bool) -> TableDataset:
        kind = _input_kind(table, columns)
        data, labels = table.data.select_columns(list(columns)), None
        if type(data.features[columns[0]]).__name__ == "Image":
            data = data.cast_column(columns[0], import_datasets().Image(decode=False))
        # The hub marks labels that are not published by -1.
        published = label in table.data.column_names and any(value != -1 for value in table.data[label][:])
        if label is not None and (labelled or published):
            labels = read_labels(_label_values(table, label), classes, table.locate, label)
        return replace(table, data=data, kind=kind, columns=columns, labels=labels)

    trained = dataset(train, labelled=True)
    if evaluation is not None:
        evaluated = dataset(evaluation, labelled=True)
    else:
        trained, evaluated = draw_fraction(trained, fraction, train.name)
    further = {split: dataset(table, labelled=False) for split, table in others.items()}
    if "test" in further:
        further["test"] = draw_subset(further["test"], getattr(config, "limit_test", None))
    trained, evaluated = draw_subset(trained, config.limit_train), draw_subset(evaluated, config.limit_evaluation)
    return Data(name, trained.kind, trained, evaluated, names, f"{name} from {place}", further)


def _input_columns(table: TableDataset, wanted: str | list[str], label: str | None) -> tuple[str, ...]:
    if wanted != "auto":
        return (wanted,) if isinstance(wanted, str) else tuple(wanted)
    usable = [name for name in table.data.column_names if name != label and _column_kind(table, name) is not None]
    if len(usable) == 1:
        return (usable[0],)
    raise DataError(
        f"{table.name}: which column is the input is not clear.",
        expected="exactly one column of images or texts, but for the label",
        found=f"columns {listed(table.data.column_names)}; of images or texts: {listed(usable)}",
        todo="Name the column in the field 'input' (two columns in a list for pairs of texts).",
    )


def _input_kind(table: TableDataset, columns: tuple[str, ...]) -> Literal["image", "text"]:
    """Kind of the input; DataError unless its columns are there, hold images or texts, and no text is missing."""
    for name in columns:
        kind = _column_kind(table, name)
        if kind is None or (kind == "image" and len(columns) == 2):
            raise DataError(
                f"{table.name}: column {name!r} cannot be the input.",
                expected="a column of encoded images or of texts; two columns are of texts",
                found=f"{table.data.features.get(name, 'no such column')}; columns {listed(table.data.column_names)}",
            )
        values = table.data.with_format("arrow")[name][:] if table.paths else table.data.data.column(name)
        if values.null_count:
            import pyarrow.compute as compute

            raise _no_value(table, compute.index(compute.is_null(values), True).as_py(), name)
    assert kind is not None
    return kind


def _no_value(table: TableDataset, row: int, column: str) -> DataError:
    return DataError(
        f"{table.locate(row)}: column {column!r} has no value.",
        expected="a text, an image or a label",
        found="none",
        row=row,
    )


def _column_kind(table: TableDataset, name: str) -> Literal["image", "text"] | None:
    """What a column holds by its type; None for neither encoded images nor texts, and if there is none."""
    feature: Any = table.data.features.get(name)
    dtype = getattr(feature, "dtype", None)
    if type(feature).__name__ == "Image" or dtype in ("binary", "large_binary"):
        return "image"
    if isinstance(feature, dict):
        return "image" if "bytes" in feature else None
    return "text" if dtype in ("string", "large_string") else None


# Labels: classes, or the numbers of a regression


def _label_values(table: TableDataset, column: str) -> list[Any]:
    if column not in table.data.column_names:
        raise DataError(
            f"{table.name}: there is no column {column!r}.",
            expected="the column that the field 'label' names",
            found=f"columns {listed(table.data.column_names)}",
        )
    return table.data[column][:]


def read_classes(values: Sequence[Any], declared: Any = None) -> tuple[tuple[str, ...], dict[str | None, int]]:
    """Names of the classes of a training split, and the number of each by how labels are written.

    They are those that the data declare, else the labels that occur, sorted, as numbers if all of them are integers.
    """
    names = getattr(declared, "names", declared if isinstance(declared, list) else None)
    if names:
        return tuple(names), {str(number): number for number in range(len(names))}
    texts = [text for text in set(map(_class_text, values)) if text is not None]
    try:
        texts.sort(key=int)
    except ValueError:
        texts.sort()
    return tuple(texts), {text: number for number, text in enumerate(texts)}


def read_labels(
    values: Sequence[Any], classes: dict[str | None, int] | None, locate: Callable[[int], str], column: str
) -> Tensor:
    """Numbers of the classes, or the numbers themselves; DataError for the first label that is none of these."""
    labels = []
    for row, value in enumerate(values):
        try:
            label = float(value) if classes is None else classes[_class_text(value)]
            if not math.isfinite(label):
                raise ValueError
        except (TypeError, ValueError, KeyError) as error:
            what, expected = "a number", "finite numbers (label_kind is number)"
            if classes is not None:
                what, expected = "a class of the training split", f"one of {listed(classes)}, integers or texts,"
            raise DataError(
                f"{locate(row)}: the label is not {what}.",
                expected=f"{expected} in column {column!r}",
                found=repr(value),
                row=row,
            ) from error
        labels.append(label)
    return torch.tensor(labels, dtype=torch.float64 if classes is None else torch.int64)


def _class_text(value: Any) -> str | None:
    """A label as text, since everything is in CSV; of an integer there is one spelling. None for what is no label."""
    if not isinstance(value, (int, str)) or value == "":
        return None
    try:
        return str(int(value))
    except ValueError:
        return str(value)
