"""The `datasets` library, called so that nothing global changes and no remote code runs."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wellcond.errors import MissingExtraError
from wellcond.lab.data.errors import DataError

PROGRESS_VARIABLE = "HF_DATASETS_DISABLE_PROGRESS_BARS"


def import_datasets() -> Any:
    """The module `datasets`.

    Raises:
        MissingExtraError: it is not installed.
        DataError: it is older than version 4, the first that cannot run a data set's own script.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "train") from error
    if int(datasets.__version__.split(".")[0]) < 4:
        raise DataError(
            "the datasets library is too old: it may run code that comes with a data set.",
            expected="datasets>=4.0",
            found=f"datasets {datasets.__version__}",
            todo="Run: pip install 'datasets>=4.0'",
        )
    return datasets


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


def require_cache() -> None:
    """Raise `DataError` unless the folder that `datasets` writes to exists or can be made, and can be written to."""
    folder = Path(os.environ.get("HF_DATASETS_CACHE") or import_datasets().config.HF_DATASETS_CACHE)
    problem = "no permission to write"
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


def call_load_dataset(path: str, **arguments: Any) -> Any:
    """`datasets.load_dataset`, quiet, with the cache in HF_DATASETS_CACHE as it is now."""
    datasets = import_datasets()
    with quiet_progress():
        return datasets.load_dataset(path, cache_dir=os.environ.get("HF_DATASETS_CACHE") or None, **arguments)


def reading_errors() -> tuple[type[Exception], ...]:
    """What `load_dataset` raises for files that are missing, broken, or of another schema than expected."""
    import pyarrow

    return (
        OSError,
        csv.Error,
        ValueError,
        TypeError,
        RuntimeError,
        pyarrow.ArrowException,
        import_datasets().exceptions.DatasetsError,
    )


def root_cause(error: BaseException) -> str:
    """The error that the others were raised from, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
