"""Rows of the published Pathfinder sets: which image has which label, and where that is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wellcond.lab.data.errors import DataError, files_or_folders

NUMPY_MAGIC = b"\x93NUMPY"
LABELS = {"0": 0, "1": 1}
COLUMNS = 4
"""Folder, file, number and label; what follows describes how the image was made."""


@dataclass(frozen=True)
class MetadataRow:
    """One image: its path from the folder of its difficulty, its label, and its place in the metadata."""

    image: str
    label: int
    where: str


def read_metadata(root: Path) -> list[MetadataRow]:
    """The rows of all files in `metadata`, in the order of their numbers; every image is there.

    Raises:
        DataError: a file or a row is not as published; names both.
    """
    folder = root / "metadata"
    files = sorted(folder.glob("*.npy"), key=lambda file: (len(file.stem), file.stem))
    if not files:
        raise DataError(
            f"{folder}: there are no metadata.",
            expected="files 0.npy, 1.npy and so on, each beside the folder imgs/0, imgs/1 and so on",
            found=f"in {root}: {files_or_folders(root.iterdir())}",
            todo="Correct 'path' or 'difficulty', or copy the whole data set.",
        )
    present: dict[str, set[str]] = {}
    rows = [_check_row(values, where, root, present) for file in files for values, where in _read_file(file)]
    if not rows:
        raise DataError(
            f"{folder}: no file has any rows.",
            expected="one row per image",
            found=f"{len(files)} empty files",
            todo="Copy the metadata again.",
        )
    return rows


def _read_file(file: Path) -> Iterator[tuple[list[str], str]]:
    """Values of every row and their place; the published files hold lines of text in spite of their name."""
    content = file.read_bytes()
    rows = _array_rows(file) if content.startswith(NUMPY_MAGIC) else _text_rows(file, content)
    for number, values in enumerate(rows):
        yield values, f"{file}, row {number} (the first is 0)"


def _text_rows(file: Path, content: bytes) -> list[list[str]]:
    try:
        return [line.split() for line in content.decode("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: these are neither lines of text nor an array.",
            expected="UTF-8, or a .npy file of strings",
            found=f"byte 0x{content[error.start]:02x} at {error.start}",
            todo="Copy the file again.",
        ) from error


def _array_rows(file: Path) -> list[list[str]]:
    try:
        array = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(
            f"{file}: the array cannot be read.",
            expected="an array of strings; arrays of objects are refused, since reading one may run any code",
            found=f"{type(error).__name__}: {error}",
            todo="If you trust the file, rewrite it: np.save(file, np.load(file, allow_pickle=True).astype(str))",
        ) from error
    if array.ndim != 2 or array.dtype.kind not in "US":
        raise DataError(
            f"{file}: this is not an array of metadata.",
            expected=f"strings of shape (rows, at least {COLUMNS})",
            found=f"{array.dtype} of shape {array.shape}",
            todo="Copy the file again.",
        )
    return np.char.decode(array, "utf-8").tolist() if array.dtype.kind == "S" else array.tolist()


def _check_row(values: list[str], where: str, root: Path, present: dict[str, set[str]]) -> MetadataRow:
    if len(values) < COLUMNS:
        raise DataError(
            f"{where}: too few values.",
            expected="folder, file, number, label, ...",
            found=" ".join(values) or "an empty row",
            todo="Copy the file again.",
        )
    folder, name, _, label = values[:COLUMNS]
    if label not in LABELS:
        raise DataError(f"{where}: the label is wrong.", expected="0 or 1", found=repr(label), todo="Correct the row.")
    if folder not in present:
        present[folder] = _list_folder(folder, where, root)
    if name not in present[folder]:
        raise DataError(
            f"{where}: the image is missing.",
            expected=f"the file {name} in {root / folder}",
            found=f"{len(present[folder])} other files there",
            todo="Copy the image again, or remove the row.",
        )
    return MetadataRow(f"{folder}/{name}", LABELS[label], where)


def _list_folder(folder: str, where: str, root: Path) -> set[str]:
    path = root / folder
    if not path.resolve().is_relative_to(root.resolve()):
        raise DataError(
            f"{where}: the path of the image leads out of its data set.",
            expected=f"a folder within {root}",
            found=repr(folder),
            todo="Correct the row.",
        )
    if not path.is_dir():
        raise DataError(
            f"{where}: the folder of the image is missing.",
            expected=f"the folder {path}",
            found=f"in {root}: {files_or_folders(root.iterdir())}",
            todo="Copy the whole data set.",
        )
    return set(os.listdir(path))
