"""Source `files`: the user's own Parquet, JSON lines, CSV or text files, given by path and column names."""

from __future__ import annotations

import csv
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from wellcond.lab.data.base import Data
from wellcond.lab.data.columns import InputColumns
from wellcond.lab.data.errors import DataError, files_or_folders, listed
from wellcond.lab.data.reading import (
    call_load_dataset,
    import_datasets,
    reading_errors,
    require_cache,
    root_cause,
)
from wellcond.lab.data.registry import SourceConfig, register_source
from wellcond.lab.data.table_bundle import LabelKind, Wanted, bundle_tables
from wellcond.lab.data.tables import Part, Table

BUILDERS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
}


class FilesConfig(SourceConfig):
    """Settings of `files`; either `evaluation` or `evaluation_fraction` says what to evaluate on."""

    source: Literal["files"] = "files"
    train: str | list[str]
    """Path or glob pattern, or a list of them."""
    evaluation: str | list[str] | None = None
    evaluation_fraction: float | None = Field(None, gt=0, lt=1)
    """Part of the training rows to set aside, of every class alike."""
    seed: int = 0
    """Of the rows that `evaluation_fraction` draws."""
    input: InputColumns = "auto"
    label: str | None = "auto"
    """Column of the labels; null for none, "auto" for `label` or `labels` if there is one."""
    label_kind: LabelKind = "class"
    kind: Literal["image", "text"] | None = None
    """By default told by the column's type; texts that end like image files are image paths."""
    image_root: str | None = None
    """Folder that image paths start from; by default that of the data file. They may not lead out of it."""
    class_names: tuple[str, ...] | None = None
    unit: Literal["line", "file"] = "line"
    """What is one document of a text file."""
    limit_train: int | None = Field(None, ge=1)
    limit_evaluation: int | None = Field(None, ge=1)
    """Largest number of examples, drawn with a fixed seed."""

    @model_validator(mode="after")
    def _check_evaluation(self) -> FilesConfig:
        if (self.evaluation is None) == (self.evaluation_fraction is None):
            found = "neither" if self.evaluation is None else "both"
            raise ValueError(
                f"expected either 'evaluation' (a path) or 'evaluation_fraction' (such as 0.1), got {found}."
            )
        return self


@register_source(FilesConfig)
def load(config: FilesConfig, base: Path) -> Data:
    """Read the files into the cache of `datasets` (HF_DATASETS_CACHE), from which they are memory-mapped."""
    require_cache()
    train_files = _find_files(config.train, base, "train")
    tables = {"train": _read_files(train_files, config, base)}
    evaluation = "train"
    if config.evaluation is not None:
        evaluation = "evaluation"
        tables[evaluation] = _read_files(_find_files(config.evaluation, base, evaluation), config, base)
    wanted = Wanted(
        config.input,
        config.label,
        config.kind,
        config.class_names,
        config.limit_train,
        config.limit_evaluation,
        evaluation_fraction=config.evaluation_fraction,
        seed=config.seed,
        label_kind=config.label_kind,
    )
    name = train_files[0].name if len(train_files) == 1 else f"{train_files[0].name} and {len(train_files) - 1} more"
    return bundle_tables(name, tables, "train", evaluation, wanted, origin="local files")


def find_files(patterns: str | list[str], base: Path, field: str) -> list[Path]:
    """Files of paths and patterns, in order; those of one pattern are sorted.

    Raises: DataError if there are none.
    """
    files: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = (base / Path(os.path.expanduser(pattern))).absolute()
        found = [path] if path.is_file() else sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        found = [file for file in found if file.is_file()]
        if not found:
            parent = path.parent
            there = files_or_folders(parent.iterdir()) if parent.is_dir() else "nothing: that folder is missing too"
            raise DataError(
                f"{path}: no such file.",
                expected=f"the file, or files matching the pattern, that '{field}' names",
                found=f"in {parent}: {there}",
                todo=f"Correct '{field}'; relative paths start at the recipe's folder.",
            )
        files += found
    return files


def _find_files(patterns: str | list[str], base: Path, field: str) -> list[Path]:
    """Files of one known format."""
    files = find_files(patterns, base, field)
    for file in files:
        _require_format(file, files[0])
    return files


def _require_format(file: Path, first: Path) -> None:
    if file.suffix.lower() not in BUILDERS:
        raise DataError(
            f"{file}: the format is not known.",
            expected=f"a name that ends in one of {listed(BUILDERS)}",
            found=repr(file.suffix),
            todo="Convert the file, or rename it if only its ending is wrong.",
        )
    if BUILDERS[file.suffix.lower()] != BUILDERS[first.suffix.lower()]:
        raise DataError(
            f"{file}: the files of a split have several formats.",
            expected=f"the format of {first.name}",
            found=repr(file.suffix),
            todo="Use files of one format.",
        )


def _read_files(files: list[Path], config: FilesConfig, base: Path) -> Table:
    """One table of all files, each read by itself so that errors can name the file and the row."""
    root = None if config.image_root is None else (base / Path(os.path.expanduser(config.image_root))).absolute()
    builder = BUILDERS[files[0].suffix.lower()]
    if builder == "text" and config.unit == "file":
        # One row per file; read together, since there may be thousands.
        tables = [_read_together(files)]
        parts = [Part(str(file), 1, root or file.parent) for file in files]
    else:
        tables = [_read_file(file, builder) for file in files]
        parts = [Part(str(f), len(table), root or f.parent) for f, table in zip(files, tables, strict=True)]
    for file, table in zip(files, tables, strict=False):
        if table.features != tables[0].features:
            raise DataError(
                f"{file}: the columns are not those of {files[0]}.",
                expected=str(dict(tables[0].features)),
                found=str(dict(table.features)),
                todo="Give all files of a split the same columns and types.",
            )
    data = tables[0] if len(tables) == 1 else import_datasets().concatenate_datasets(tables)
    return Table(data, parts, text_labels=builder == "csv")


def _read_file(file: Path, builder: str) -> Any:
    options: dict[str, Any] = {}
    with _named_errors(file, builder):
        empty = file.stat().st_size == 0
        if builder == "parquet" and not empty:
            import pyarrow.parquet

            empty = pyarrow.parquet.read_metadata(file).num_rows == 0
    if builder == "csv" and not empty:
        separator = "\t" if file.suffix.lower() == ".tsv" else ","
        header, first = _read_head(file, separator)
        empty = first is None
        # All values as they are written: texts such as "NA" or "007" must survive. Labels are recognised later.
        options = {"sep": separator, "converters": dict.fromkeys(header, str), "keep_default_na": False}
    if empty:
        raise DataError(f"{file}: there are no rows.", expected="rows", found="none", todo="Check the file.")
    with _named_errors(file, builder):
        return _load(builder, [file], options)


def _read_head(file: Path, separator: str) -> tuple[list[str], list[str] | None]:
    """Column names and first row of a CSV file; pandas would take a surplus first value for the name of the row."""
    with _named_errors(file, "csv"), file.open(newline="", encoding="utf-8-sig") as stream:
        rows = (row for row in csv.reader(stream, delimiter=separator) if row)
        header, first = next(rows, []), next(rows, None)
    if first is not None and len(first) != len(header):
        raise DataError(
            f"{file}, row 0 (the first is 0): the values do not fit the columns.",
            expected=f"{len(header)} values for the columns {listed(header)}",
            found=f"{len(first)} values",
            todo="Begin the file with a line of column names; quote values that hold the separator.",
        )
    return header, first


def _read_together(files: list[Path]) -> Any:
    for file in files:
        with _named_errors(file, "text"):
            file.read_text(encoding="utf-8")
    with _named_errors(files[0].parent, "text"):
        return _load("text", files, {"sample_by": "document"})


def _load(builder: str, files: list[Path], options: dict[str, Any]) -> Any:
    # Escaped: the library takes every name for a pattern.
    names = [glob.escape(str(path)) for path in files]
    return call_load_dataset(builder, data_files=names, split="train", **options)


@contextmanager
def _named_errors(file: Path, builder: str) -> Iterator[None]:
    try:
        yield
    except reading_errors() as error:
        raise DataError(
            f"{file}: the file cannot be read as {builder}.",
            expected=f"a whole {builder} file" + ("" if builder == "parquet" else " in UTF-8"),
            found=root_cause(error),
            todo="Check that the file is complete and that its name ends in its format.",
        ) from error
