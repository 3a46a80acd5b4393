"""Files that a recipe names, mirrors of the hub, and a cache of what can be made again.

The root of the cache is WELLCOND_CACHE, else wellcond in XDG_CACHE_HOME, else ~/.cache/wellcond; any folder in it may
be deleted while nothing runs. Reading needs neither a lock nor write access.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wellcond.errors import DataError, needs_extra
from wellcond.lab.data.base import listed, report_progress

MIRROR_VARIABLE = "WELLCOND_DATA"


NAMED = re.compile(r"([\w.-]+(?:/[\w.-]+)?)=(.+)", re.DOTALL)
"""A part of the variable that says where one data set is: imagenet-1k=/data/imagenet."""
SHORT_NAMES = {"coco2017": "coco", "tsv_data": "aan"}
"""Of data sets whose last part of the id, or of the path, is no name that one would guess."""


def mirror_roots() -> list[Path]:
    """Folders with local copies of data sets, from the variable."""
    roots = os.environ.get(MIRROR_VARIABLE, "").split(os.pathsep)
    return [Path(os.path.expanduser(root)).absolute() for root in roots if root and not NAMED.fullmatch(root)]


def short_name(id: str) -> str:
    """The name by which a user says where a data set is: of ILSVRC/imagenet-1k it is imagenet-1k."""
    last = id.rpartition("/")[2]
    return SHORT_NAMES.get(last, last).lower()


def find_named(id: str) -> Path | None:
    """Where the variable says that one data set is, by its id or its short name; None if it says nothing of it."""
    for part in os.environ.get(MIRROR_VARIABLE, "").split(os.pathsep):
        found = NAMED.fullmatch(part)
        if found and found[1].lower() in (id.lower(), short_name(id)):
            return require(Path(os.path.expanduser(found[2])).absolute(), "file or folder", f"the data set {found[1]}")
    return None


def name_place(name: str, path: Path) -> None:
    """Let this process, and those that it starts, find a data set at a place, before any other."""
    former = os.environ.get(MIRROR_VARIABLE)
    os.environ[MIRROR_VARIABLE] = os.pathsep.join([f"{name}={path.absolute()}", *([former] if former else [])])


def in_a_mirror() -> str:
    """Where a data set was looked for, as errors say it."""
    roots = [str(root) if root.is_dir() else f"{root} (no such folder)" for root in mirror_roots()]
    searched = f"not in the mirror {listed(roots)}" if roots else f"{MIRROR_VARIABLE} is not set"
    return f"in a mirror that {MIRROR_VARIABLE} names ({searched})"


def find_in_mirror(name: str) -> Path | None:
    """The place that is named for a data set, or else the first of its name in a mirror; None if there is none.

    A name may not lead out of a mirror.
    """
    if (named := find_named(name)) is not None:
        return named
    leads_out = Path(name).is_absolute() or {"..", "~"} & set(Path(name).parts)
    return next((root / name for root in mirror_roots() if not leads_out and (root / name).exists()), None)


def find_path(path: str, base: Path, field: str = "path") -> Path:
    """The file or folder that a field of a recipe names: from the recipe's folder, or else by name in a mirror."""
    local = find_named(path) or (base / os.path.expanduser(path)).absolute()
    found = local if local.exists() else find_in_mirror(path)
    return found or require(local, "file or folder", f"what '{field}' names, here or {in_a_mirror()}")


def find_files(patterns: str | list[str], base: Path, field: str) -> list[Path]:
    """Files of paths and patterns, in order, those of one pattern sorted; DataError if there are none."""
    files: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = (base / os.path.expanduser(pattern)).absolute()
        found = [path] if path.is_file() else sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        files += [file for file in found if file.is_file()] or [require(path, expected=f"what '{field}' names")]
    return files


def require(path: Path, kind: str = "file", expected: str = "this part of the data set") -> Path:
    """The path if there is a file, or a folder, or either; DataError if not."""
    exists = {"file": path.is_file, "folder": path.is_dir}.get(kind, path.exists)
    if not exists():
        raise DataError(f"{path}: no such {kind}.", expected=expected, found=contents(path.parent), path=path)
    return path


def contents(folder: Path) -> str:
    """What a folder holds but for hidden files, as an error says it."""
    if not folder.is_dir():
        return f"in {folder}: nothing: that folder is missing too"
    return f"in {folder}: {listed(sorted(path.name for path in folder.iterdir() if path.name[0] != '.'))}"


def import_datasets() -> Any:
    """The module `datasets`, from 4.0 on, the first that runs no script of a data set."""
    with needs_extra("datasets>=4.0", "train", "datasets"):
        import datasets

        if int(datasets.__version__.split(".")[0]) < 4:
            raise ImportError(f"found {datasets.__version__}")
    return datasets


# The cache


def cache_root() -> Path:
    """Folder of all entries; it need not exist."""
    shared = os.environ.get("XDG_CACHE_HOME", "")
    usual = Path(shared if os.path.isabs(shared) else "~/.cache") / "wellcond"  # relative ones are to be ignored
    return Path(os.environ.get("WELLCOND_CACHE") or usual).expanduser().absolute()


def canonical_json(value: Any) -> str:
    """One text for equal values: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def cached_folder(
    kind: str, made_from: Mapping[str, Any], make: Callable[[Path], None], what: str, *, resumes: bool = False
) -> Path:
    """A folder of files that follow from `made_from` alone: plain data, with the version of the code that uses them.

    What is missing, one process makes while others wait, and are told `what`. `make` fills a folder that is renamed in
    the end, so that it is whole or missing, also after a kill, which releases the lock as well. What a killed process
    leaves is removed, unless `make` says that it `resumes`: then it finds the folder as it was left.
    """
    folder = cache_root() / kind / hashlib.sha256(canonical_json(made_from).encode()).hexdigest()[:32]
    if folder.is_dir():
        return folder
    import filelock  # of torch

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        report_progress(f"{what}, here or in another process", 0, 1)
        with filelock.FileLock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                partial = folder.with_suffix(".partial")
                if not resumes:
                    shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(exist_ok=resumes)
                make(partial)
                for path in partial.iterdir():
                    with open(path, "rb") as file:
                        os.fsync(file.fileno())
                partial.rename(folder)
    except OSError as error:
        raise DataError(
            f"{folder}: the cache cannot be written.",
            expected="room and access there; or set WELLCOND_CACHE to another folder",
            found=error.strerror or str(error),
        ) from error
    return folder
