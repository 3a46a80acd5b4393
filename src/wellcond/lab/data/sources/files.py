"""Source `files`: the user's own Parquet, JSON lines, CSV or text files, given by path and column names."""

from __future__ import annotations

import csv
import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from wellcond.lab.data.base import Data, DataError, listed, register_source
from wellcond.lab.data.disk import (
    call_load_dataset,
    find_files,
    import_datasets,
    reading_errors,
    require_cache,
    resolve_path,
    root_cause,
)
from wellcond.lab.data.tables import Part, Table, TableConfig, load_tables

BUILDERS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
}


class FilesConfig(TableConfig):
    """Settings of `files`; either `evaluation` or `evaluation_fraction` says what to evaluate on."""

    source: Literal["files"] = "files"
    train: str | list[str]
    """Path or glob pattern, or a list of them."""
    evaluation: str | list[str] | None = None
    evaluation_fraction: float | None = Field(None, gt=0, lt=1)
    """Part of the training rows to set aside, of every class alike."""
    seed: int = 0
    """Of the rows that `evaluation_fraction` draws."""
    kind: Literal["image", "text"] | None = None
    """By default told by the column's type; texts that end like image files are image paths."""
    image_root: str | None = None
    """Folder that image paths start from; by default that of the data file. They may not lead out of it."""

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
    files = find_files(config.train, base, "train")
    tables = {"train": _read_files(files, config, base)}
    if config.evaluation is not None:
        tables["evaluation"] = _read_files(find_files(config.evaluation, base, "evaluation"), config, base)
    return load_tables(
        files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more",
        tables,
        "train",
        "train" if config.evaluation is None else "evaluation",
        config,
        origin="local files",
        kind=config.kind,
        fraction=config.evaluation_fraction,
        seed=config.seed,
    )


def _read_files(files: list[Path], config: FilesConfig, base: Path) -> Table:
    """One table of all files, each read by itself so that errors can name the file and the row."""
    root = None if config.image_root is None else resolve_path(config.image_root, base)
    [builder, *others] = dict.fromkeys(BUILDERS.get(file.suffix.lower(), file.suffix) for file in files)
    unknown = [name for name in (builder, *others) if name not in BUILDERS.values()]
    if unknown or others:
        raise DataError(
            f"{files[0]}: the format is not known." if unknown else f"{files[0]}: the files have several formats.",
            expected=f"files of one format, whose names end in one of {listed(BUILDERS)}",
            found=listed(unknown or [builder, *others]),
            todo="Convert the files, or rename them if only their ending is wrong.",
        )
    tables = [_read_file(file, builder) for file in files]
    parts = [Part(str(file), len(table), root or file.parent) for file, table in zip(files, tables, strict=True)]
    for file, table in zip(files, tables, strict=True):
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
        # Escaped: the library takes every name for a pattern.
        return call_load_dataset(builder, data_files=glob.escape(str(file)), split="train", **options)


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
