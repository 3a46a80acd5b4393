"""Sources `files` and `hub`: tables in files of the user, of a mirror of the hub, or of the hub itself.

The `datasets` library reads them, called so that no code of a data set runs. A mirror is a folder of data files:
neither the card nor a script of a data set is read there.
"""

from __future__ import annotations

import csv
import glob
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from wellcond.lab.data.base import Data, DataError, listed, register_source
from wellcond.lab.data.disk import (
    MIRROR_VARIABLE,
    contents,
    find_files,
    find_in_mirror,
    import_datasets,
    resolve_path,
    searched_mirrors,
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
COMPRESSED = (".gz", ".bz2", ".zst")
EVALUATION_SPLITS = ("validation", "val", "dev", "test", "validation_matched")
NAME = r"[A-Za-z0-9_][\w.-]*"
SPLIT = re.compile(r"(?<![a-z])(train|validation|valid|val|dev|test)((?:_[a-z]+)?)(?![a-z])")
PROGRESS_VARIABLE = "HF_DATASETS_DISABLE_PROGRESS_BARS"


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
def load_files(config: FilesConfig, base: Path) -> Data:
    """Read the files into the cache of `datasets` (HF_DATASETS_CACHE), from which they are memory-mapped."""
    root = None if config.image_root is None else resolve_path(config.image_root, base)
    files = find_files(config.train, base, "train")
    train, evaluation = read_table(files, root), None
    if config.evaluation is not None:
        evaluation = read_table(find_files(config.evaluation, base, "evaluation"), root)
    return load_tables(
        name_of(files),
        train,
        evaluation,
        {},
        config,
        origin="local files",
        kind=config.kind,
        fraction=config.evaluation_fraction,
        seed=config.seed,
    )


class HubConfig(TableConfig):
    """Settings of `hub`."""

    source: Literal["hub"] = "hub"
    id: str = Field(pattern=rf"^{NAME}(/{NAME})?$")
    config: str | None = Field(None, pattern=rf"^{NAME}$")
    revision: str | None = None
    """Commit or tag on the hub; a mirror is taken as it is."""
    train_split: str = "train"
    """One split, or several joined: train+validation."""
    evaluation_split: str | None = None
    """By default the first that exists of validation, val, dev, test, validation_matched."""
    held_out: float | None = Field(None, gt=0, lt=1)
    """Share of the training split to evaluate on, of every class alike; what would have been the evaluation split is
    then the test split, and limits count what is left."""
    limit_test: int | None = Field(None, ge=1)

    @field_validator("id")
    @classmethod
    def _stay_inside(cls, value: str) -> str:
        if ".." in value:
            raise ValueError(f"expected an id such as 'uoft-cs/cifar10', got {value!r}.")
        return value


@register_source(HubConfig)
def load_hub(config: HubConfig, base: Path) -> Data:
    """All splits of the set; those beside training and evaluation are in `others`."""
    name = config.id if config.config is None else f"{config.id} ({config.config})"
    mirror = find_in_mirror(config.id)
    if mirror is not None:
        splits = {split: read_table(files, mirror) for split, files in find_splits(mirror, config.config).items()}
    else:
        with reading(config.id, **not_loaded(config.id)):
            found = load_dataset(config.id, name=config.config, revision=config.revision)
        splits = {split: Table(data, [Part(f"{name}, split {split!r}", len(data))]) for split, data in found.items()}
    joined = [require_split(split, splits, name, "train_split") for split in config.train_split.split("+")]
    usual = next((split for split in EVALUATION_SPLITS if split in splits and split != joined[-1]), None)
    evaluated = require_split(config.evaluation_split or usual, splits, name, "evaluation_split")
    others = {split: table for split, table in splits.items() if split not in (*joined, evaluated)}
    evaluation: Table | None = splits[evaluated]
    if config.held_out is not None:
        if evaluated in joined:
            raise DataError(
                f"{name}: there is no split left to test on.",
                expected="an evaluation split beside the training split, since 'held_out' sets a part of that aside",
                found=f"{evaluated!r} for both",
                todo="Name another 'evaluation_split'.",
            )
        others, evaluation = {"test": splits[evaluated]}, None
    return load_tables(
        name,
        _join([splits[split] for split in joined]),
        evaluation,
        others,
        config,
        origin="the Hugging Face hub" if mirror is None else "a local mirror",
        fraction=config.held_out,
        limit_test=config.limit_test,
    )


def not_loaded(id: str) -> dict[str, str]:
    """What an error says of a set that is in no mirror and that the hub does not give."""
    return {
        "problem": f"the data set cannot be loaded; {searched_mirrors()}",
        "expected": f"a folder {id} in a mirror that {MIRROR_VARIABLE} names, or access to the hub",
        "todo": f"Set {MIRROR_VARIABLE} to a folder that holds {id}, or connect to the network (and unset "
        "HF_HUB_OFFLINE), or correct 'id', 'config', 'split' and 'revision'.",
    }


def require_split(split: str | None, splits: Any, name: str, field: str) -> str:
    """The name of a split, if there is such a one.

    Raises: DataError with those there are.
    """
    if split is None or split not in splits:
        raise DataError(
            f"{name}: there is no split {'to evaluate on' if split is None else repr(split)}.",
            expected=f"one of {listed(EVALUATION_SPLITS)}" if split is None else f"the split that '{field}' names",
            found=f"splits {listed(splits)}",
            todo=f"Set '{field}' to one of the splits.",
        )
    return split


def find_splits(mirror: Path, config: str | None) -> dict[str, list[Path]]:
    """Data files of a mirrored set by split, which their paths name as on the hub; train if they name none.

    A configuration is a folder; a set with several asks for one.
    """
    paths = sorted(path.relative_to(mirror) for path in mirror.rglob("*") if path.is_file())
    files = [path for path in paths if _suffix(path) in BUILDERS and not path.name.startswith(".")]
    folders = {path.parts[0] for path in files if len(path.parts) > 1 and not SPLIT.search(path.parts[0])}
    if (config is None and len(folders) > 1) or (config is not None and config not in folders):
        raise DataError(
            f"{mirror}: there {'are several configurations' if config is None else f'is no configuration {config!r}'}.",
            expected="the field 'config'" if config is None else "a folder of that name, with data files",
            found=f"configurations {listed(sorted(folders))}",
            todo="Set 'config' to one of these, or add the folder to the mirror.",
        )
    splits: dict[str, list[Path]] = {}
    for path in files:
        if config is None or path.parts[0] == config:
            named = SPLIT.search("/".join(path.parts[config is not None :]))
            kind, rest = named.groups() if named else ("train", "")
            kind = "validation" if kind in ("valid", "val", "dev") else kind
            splits.setdefault(kind + rest, []).append(mirror / path)
    if not splits:
        raise DataError(
            f"{mirror}: there are no data files.",
            expected=f"files such as train-00000-of-00001.parquet, whose names end in one of {listed(BUILDERS)}",
            found=contents(mirror),
            todo="Copy the files of the data set from the hub.",
        )
    return dict(sorted(splits.items(), key=lambda item: (item[0] != "train", item[0])))


# Reading


def name_of(files: list[Path]) -> str:
    """What a split of several files is called."""
    return files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"


def _suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:-1] if suffixes and suffixes[-1] in COMPRESSED else suffixes[-1:])


def builders_of(files: list[Path]) -> list[str]:
    """The reader of `datasets` for each file.

    Raises: DataError for a file of a format that is not known.

    Example:
        >>> builders_of([Path("00.jsonl.zst")])
        ['json']
    """
    unknown = [file for file in files if _suffix(file) not in BUILDERS]
    if unknown:
        raise DataError(
            f"{unknown[0]}: the format is not known.",
            expected=f"files whose names end in one of {listed(BUILDERS)}; texts may be compressed: "
            f"{listed(COMPRESSED)}",
            found=listed(file.name for file in unknown),
            todo="Convert the files, or rename them if only their ending is wrong.",
        )
    return [BUILDERS[_suffix(file)] for file in files]


def read_table(files: list[Path], root: Path | None) -> Table:
    """One table of all files, each read by itself so that errors can name the file and the row.

    Image paths start at `root`, or at their file if it is None, and may not lead out of it.
    """
    builders = builders_of(files)
    tables = [_read_file(file, builder) for file, builder in zip(files, builders, strict=True)]
    for file, table, builder in zip(files, tables, builders, strict=True):
        if table.features != tables[0].features or builder != builders[0]:
            raise DataError(
                f"{file}: the format or the columns are not those of {files[0]}.",
                expected=f"{builders[0]}: {dict(tables[0].features)}",
                found=f"{builder}: {dict(table.features)}",
                todo="Give all files of a split the same format, columns and types.",
            )
    parts = [Part(str(file), len(table), root or file.parent) for file, table in zip(files, tables, strict=True)]
    return _join([Table(table, [part], builders[0] == "csv") for table, part in zip(tables, parts, strict=True)])


def _join(tables: list[Table]) -> Table:
    if len(tables) == 1:
        return tables[0]
    data = import_datasets().concatenate_datasets([table.data for table in tables])
    return Table(data, [part for table in tables for part in table.parts], tables[0].text_labels)


def _read_file(file: Path, builder: str) -> Any:
    options: dict[str, Any] = {}
    with reading(
        str(file),
        problem=f"the file cannot be read as {builder}",
        expected=f"a whole {builder} file" + ("" if builder == "parquet" else " in UTF-8"),
        todo="Check that the file is complete and that its name ends in its format.",
    ):
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
        return load_dataset(builder, data_files=glob.escape(str(file)), split="train", **options)


def _read_head(file: Path, separator: str) -> tuple[list[str], list[str] | None]:
    """Column names and first row of a CSV file; pandas would take a surplus first value for the name of the row."""
    with file.open(newline="", encoding="utf-8-sig") as stream:
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
def reading(place: str, *, problem: str, expected: str, todo: str) -> Iterator[None]:
    """Name the place where reading fails, of which the library tells in many classes; and show no bars of it."""
    import pyarrow

    libraries = ("datasets", "httpx", "huggingface_hub")
    found = (OSError, csv.Error, ValueError, TypeError, RuntimeError, pyarrow.ArrowException)
    try:
        with quiet_progress():
            yield
    except DataError:
        raise
    except Exception as error:
        # huggingface_hub talks through httpx since version 1; through requests before, whose errors are OSErrors.
        if not isinstance(error, found) and type(error).__module__.partition(".")[0] not in libraries:
            raise
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        shown = f"{type(first).__name__}: {str(first).strip().partition(chr(10))[0][:300]}"
        raise DataError(f"{place}: {problem}.", expected=expected, found=shown, todo=todo) from error


@contextmanager
def quiet_progress() -> Iterator[None]:
    """No progress bars of `datasets` within, unless a person watches or the variable of that library decides."""
    datasets = import_datasets()
    decided = os.environ.get(PROGRESS_VARIABLE) is not None
    if decided or sys.stderr.isatty() or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def load_dataset(path: str, **arguments: Any) -> Any:
    """`datasets.load_dataset` with the cache in HF_DATASETS_CACHE as it is now.

    Raises: DataError unless that folder exists or can be made, and can be written to.
    """
    datasets, problem = import_datasets(), "no permission to write"
    folder = Path(os.environ.get("HF_DATASETS_CACHE") or datasets.config.HF_DATASETS_CACHE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{type(error).__name__}: {error.strerror}"
    if not os.access(folder, os.W_OK):
        raise DataError(
            f"{folder}: the cache of the datasets library cannot be written.",
            expected="a folder to write to, named by HF_DATASETS_CACHE",
            found=problem,
            todo="Set HF_DATASETS_CACHE to a folder of yours with room for a copy of the data.",
        )
    return datasets.load_dataset(path, cache_dir=str(folder), **arguments)
