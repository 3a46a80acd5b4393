"""Local copies of data sets: the folders that WELLCOND_DATA names."""

from __future__ import annotations

import os
from pathlib import Path

from wellcond.lab.data.errors import DataError, files_or_folders, listed

MIRROR_VARIABLE = "WELLCOND_DATA"


def mirror_roots() -> list[Path]:
    """The folders of the variable."""
    return [
        Path(os.path.expanduser(root)).absolute()
        for root in os.environ.get(MIRROR_VARIABLE, "").split(os.pathsep)
        if root
    ]


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


def find_folder(path: str, base: Path) -> Path:
    """The folder that the field 'path' of a source names: from the recipe's folder, or else by name in a mirror.

    Raises:
        DataError: it is in neither.
    """
    folder = (base / Path(os.path.expanduser(path))).absolute()
    if folder.is_dir():
        return folder
    # A name may not lead out of the mirror.
    within = not Path(path).is_absolute() and not {"..", "~"} & set(Path(path).parts)
    found = find_in_mirror(path) if within else None
    if found is not None:
        return found
    parent = folder.parent
    there = files_or_folders(parent.iterdir()) if parent.is_dir() else "nothing: that folder is missing too"
    roots = mirror_roots()
    mirrors = f"not in the mirror {listed(roots)}" if roots else f"{MIRROR_VARIABLE} is not set"
    raise DataError(
        f"{folder}: no such folder.",
        expected=f"the folder that 'path' names, or one of that name in a mirror that {MIRROR_VARIABLE} names",
        found=f"in {parent}: {there}; {mirrors}",
        todo="Correct 'path'; relative paths start at the recipe's folder.",
    )


def require_file(path: Path, field: str | None = None) -> Path:
    """The path of a file, if it is there.

    Raises:
        DataError: it is not; lists its folder.
    """
    if not path.is_file():
        raise DataError(
            f"{path}: no such file.",
            expected=f"the file that '{field}' names" if field else "this file of the data set",
            found=f"in {path.parent}: {files_or_folders(path.parent.iterdir())}",
            todo=f"Correct '{field}' or 'path'." if field else "Correct 'path', or copy the whole data set.",
        )
    return path
