"""Data on this machine: files and mirrors, the `datasets` library, called so that no remote code runs, and a cache.

The cache has files that can be made again, in folders named by what they are made from. Its root is WELLCOND_CACHE,
else wellcond in XDG_CACHE_HOME, else ~/.cache/wellcond; any part of it may be deleted while nothing runs. A file is
written beside its place and renamed, so that it is whole or missing, also after a kill. Reading needs neither a lock
nor write access.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from wellcond.errors import MissingExtraError, WellcondError
from wellcond.files import opened_atomically
from wellcond.lab.data.base import DataError, files_or_folders, listed, report_progress

MIRROR_VARIABLE = "WELLCOND_DATA"
PROGRESS_VARIABLE = "HF_DATASETS_DISABLE_PROGRESS_BARS"
POLL_SECONDS = 0.2
T = TypeVar("T")


def mirror_roots() -> list[Path]:
    """Folders with local copies of data sets, from the variable."""
    roots = os.environ.get(MIRROR_VARIABLE, "").split(os.pathsep)
    return [Path(os.path.expanduser(root)).absolute() for root in roots if root]


def find_in_mirror(name: str) -> Path | None:
    """The first folder of this name in a mirror; None if there is none.

    Raises:
        DataError: the variable names a folder that does not exist.
    """
    roots = mirror_roots()
    for root in roots:
        if not root.is_dir():
            raise DataError(
                f"{root}: this folder of the variable {MIRROR_VARIABLE} is missing.",
                expected=f"folders of data sets, separated by {os.pathsep!r}",
                found="no such folder",
                todo=f"Correct or unset {MIRROR_VARIABLE}.",
            )
    return next((root / name for root in roots if (root / name).is_dir()), None)


def searched_mirrors() -> str:
    """Where a data set was looked for, as an error says it."""
    roots = mirror_roots()
    return f"not in the mirror {listed(roots)}" if roots else f"{MIRROR_VARIABLE} is not set"


def resolve_path(path: str, base: Path) -> Path:
    """A path of a recipe, whose relative paths start at its folder."""
    return (base / Path(os.path.expanduser(path))).absolute()


def find_folder(path: str, base: Path) -> Path:
    """The folder that the field 'path' of a source names: from the recipe's folder, or else by name in a mirror.

    Raises:
        DataError: it is in neither.
    """
    folder = resolve_path(path, base)
    if folder.is_dir():
        return folder
    # A name may not lead out of the mirror.
    within = not Path(path).is_absolute() and not {"..", "~"} & set(Path(path).parts)
    found = find_in_mirror(path) if within else None
    if found is not None:
        return found
    raise DataError(
        f"{folder}: no such folder.",
        expected=f"the folder that 'path' names, or one of that name in a mirror that {MIRROR_VARIABLE} names",
        found=f"{contents(folder.parent)}; {searched_mirrors()}",
        todo="Correct 'path'; relative paths start at the recipe's folder.",
    )


def contents(folder: Path) -> str:
    """What a folder holds, as an error says it."""
    there = files_or_folders(folder.iterdir()) if folder.is_dir() else "nothing: that folder is missing too"
    return f"in {folder}: {there}"


def require_file(path: Path, field: str | None = None) -> Path:
    """The path of a file, if it is there; `field` of the recipe names it.

    Raises:
        DataError: it is not; lists its folder.
    """
    return path if path.is_file() else _missing(path, "file", field)


def require_folder(path: Path, field: str | None = None) -> Path:
    """As `require_file`, of a folder."""
    return path if path.is_dir() else _missing(path, "folder", field)


def _missing(path: Path, kind: str, field: str | None) -> Path:
    raise DataError(
        f"{path}: no such {kind}.",
        expected=f"the {kind} that '{field}' names" if field else f"this {kind} of the data set",
        found=contents(path.parent),
        todo=f"Correct '{field}' or 'path'." if field else "Correct 'path', or copy the whole data set.",
    )


def find_files(patterns: str | list[str], base: Path, field: str) -> list[Path]:
    """Files of paths and patterns, in order; those of one pattern are sorted.

    Raises: DataError if there are none.
    """
    files: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = resolve_path(pattern, base)
        found = [path] if path.is_file() else sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        found = [file for file in found if file.is_file()]
        if not found:
            raise DataError(
                f"{path}: no such file.",
                expected=f"the file, or files matching the pattern, that '{field}' names",
                found=contents(path.parent),
                todo=f"Correct '{field}'; relative paths start at the recipe's folder.",
            )
        files += found
    return files


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

    library = import_datasets().exceptions.DatasetsError
    return (OSError, csv.Error, ValueError, TypeError, RuntimeError, pyarrow.ArrowException, library)


def root_cause(error: BaseException) -> str:
    """The error that the others were raised from, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


# The cache


class CacheError(WellcondError, OSError):
    """The cache cannot be written; callers decide whether to continue without it."""


def cache_root() -> Path:
    """Folder of all entries; it need not exist."""
    named = os.environ.get("WELLCOND_CACHE")
    if named:
        return Path(os.path.expanduser(named)).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):  # relative ones are to be ignored, says the standard
        return Path(shared) / "wellcond"
    return Path(os.path.expanduser("~/.cache/wellcond")).absolute()


def canonical_json(value: Any) -> str:
    """One text for equal values: sorted keys, no spaces, ASCII.

    Example:
        >>> canonical_json({"b": 1.5, "a": ["x"]})
        '{"a":["x"],"b":1.5}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


class CacheEntry:
    """A folder of files that follow from `made_from` alone: plain data, with the version of the code that uses them."""

    def __init__(self, kind: str, made_from: Mapping[str, Any], *, root: Path | None = None) -> None:
        """`kind` is a folder of the root, `cache_root()` by default; nothing is written yet."""
        self.made_from = canonical_json(made_from)
        key = hashlib.sha256(self.made_from.encode()).hexdigest()
        self.folder = (cache_root() if root is None else root) / kind / key[:32]

    def find(self, name: str) -> Path | None:
        """Path of a file; None if it is missing."""
        path = self.folder / name
        return path if path.is_file() else None

    def read(self, name: str) -> bytes | None:
        """Content of a file; None if it is missing."""
        try:
            return (self.folder / name).read_bytes()
        except OSError:
            return None

    def count(self) -> int:
        """Number of files that are complete: how far another process is."""
        return sum(path.name not in ("lock", "made_from.json") for path in self.folder.glob("[!.]*"))

    def write(self, name: str, content: bytes) -> None:
        """Add or replace a file.

        Raises: CacheError; a file of that name is then as it was.
        """
        with self.adding(name) as file:
            file.write(content)

    @contextmanager
    def adding(self, name: str) -> Iterator[BinaryIO]:
        """A file to write piece by piece; it is there when the block ends without an error.

        Raises: CacheError; a file of that name is then as it was.
        """
        with self._named_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            with opened_atomically(self.folder / name) as file:
                yield file

    @contextmanager
    def locked(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the entry, so that only one process makes what is missing; the system releases it after a kill.

        Look again for what was missing when the block begins; `waiting` is called while another process holds it.

        Raises: CacheError
        """
        import filelock  # of torch

        lock = filelock.FileLock(self.folder / "lock")
        with self._named_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            while not lock.is_locked:
                try:
                    lock.acquire(timeout=POLL_SECONDS)
                except filelock.Timeout:
                    waiting()
        try:
            for left_by_a_kill in self.folder.glob(".*.partial"):
                left_by_a_kill.unlink(missing_ok=True)
            self.write("made_from.json", self.made_from.encode())
            yield
        finally:
            lock.release()

    def find_or_make(self, find: Callable[[], T | None], make: Callable[[], T], what: str) -> T:
        """What `find` gives or else what `make` gives, which one process calls while the others wait.

        Raises: CacheError
        """
        found = find()
        if found is not None:
            return found
        with self.locked(lambda: report_progress(f"waiting for another process: {what}", 0, 1)):
            found = find()
            return make() if found is None else found

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CacheError(
                f"{self.folder}: the cache cannot be written: {error.strerror or error}. Make room or give access "
                f"there, or set WELLCOND_CACHE to another folder."
            ) from error
