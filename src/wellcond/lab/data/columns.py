"""Which columns of a table are the input and the label, and what kind of input it is."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field

from wellcond.lab.data.base import Kind
from wellcond.lab.data.errors import DataError, listed
from wellcond.lab.data.tables import Table

INPUT_NAMES = ("image", "img", "text", "sentence")
LABEL_NAMES = ("label", "labels")
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}

InputColumns = str | Annotated[list[str], Field(min_length=2, max_length=2)]
"""One column, or two for pairs of texts; "auto" takes the usual name if nothing else could be meant."""


def choose_input(table: Table, wanted: InputColumns, label: str | None) -> tuple[str, ...]:
    """Names of the input columns.

    Raises:
        DataError: a column does not exist, or "auto" could mean several; lists the columns.
    """
    if wanted != "auto":
        names = (wanted,) if isinstance(wanted, str) else tuple(wanted)
        for name in names:
            require_column(table, name, "input")
        return names
    usable = [name for name in table.data.column_names if name != label and column_kind(table, name) is not None]
    if len(usable) == 1 and usable[0] in INPUT_NAMES:
        return (usable[0],)
    types = [
        f"{name} ({getattr(feature, 'dtype', type(feature).__name__)})" for name, feature in table.data.features.items()
    ]
    raise DataError(
        f"{table.name}: which column is the input is not clear.",
        expected=f"exactly one column of images or texts, named one of {listed(INPUT_NAMES)}",
        found=f"columns {listed(types)}; of images or texts: {listed(usable)}",
        todo="Name the column in the field 'input' (two columns in a list for pairs of texts).",
    )


def choose_label(table: Table, wanted: str | None) -> str | None:
    """Name of the label column; None when there is none.

    Raises:
        DataError: the column does not exist; lists the columns.
    """
    if wanted != "auto":
        if wanted is not None:
            require_column(table, wanted, "label")
        return wanted
    found = [name for name in LABEL_NAMES if name in table.data.column_names]
    return found[0] if found else None


def require_column(table: Table, name: str, field: str) -> None:
    """Raise `DataError` with the columns there are unless `name` is one of them."""
    if name not in table.data.column_names:
        raise DataError(
            f"{table.name}: there is no column {name!r}.",
            expected=f"the column that the field '{field}' names",
            found=f"columns {listed(table.data.column_names)}",
            todo=f"Set '{field}' to one of these columns.",
        )


def column_kind(table: Table, name: str) -> Literal["image", "text"] | None:
    """What a column holds by its type alone: encoded images or texts; None for anything else."""
    feature: Any = table.data.features[name]
    if type(feature).__name__ == "Image":
        return "image"
    if isinstance(feature, dict):
        return "image" if "bytes" in feature or "path" in feature else None
    dtype = getattr(feature, "dtype", None)
    if dtype in ("binary", "large_binary"):
        return "image"
    return "text" if dtype in ("string", "large_string") else None


def choose_kind(table: Table, columns: tuple[str, ...], wanted: Kind | None) -> Kind:
    """Kind of the input; a column of text is one of image paths if its first values end like image files.

    Raises:
        DataError: the column holds neither images nor texts, or not the kind wanted, or a pair is not of texts.
    """
    kinds = [column_kind(table, name) for name in columns]
    for name, kind in zip(columns, kinds, strict=True):
        if kind is None or (wanted == "text" and kind == "image") or (len(columns) == 2 and kind == "image"):
            raise DataError(
                f"{table.name}: column {name!r} cannot be the input.",
                expected="texts" if wanted == "text" or len(columns) == 2 else "images or texts",
                found=f"values of type {table.data.features[name]}",
                todo=f"Set 'input' to another column; there are {listed(table.data.column_names)}.",
            )
    if kinds[0] == "image" or wanted == "image":
        return "image"
    first = table.data[: min(16, len(table))][columns[0]]
    looks_like_paths = all(value and PurePath(value).suffix.lower() in IMAGE_SUFFIXES for value in first)
    return "image" if wanted is None and len(columns) == 1 and looks_like_paths else "text"


def count_empty_texts(table: Table, columns: tuple[str, ...]) -> int:
    """Number of rows in which a text is empty.

    Raises:
        DataError: a text is missing (null).
    """
    import pyarrow.compute as compute

    empty = 0
    for name in columns:
        values = table.data.data.column(name)
        if values.null_count:
            row = compute.index(compute.is_null(values), True).as_py()
            raise DataError(
                f"{table.locate(row)}: column {name!r} has no value.",
                expected="a text, which may be empty",
                found="null",
                todo="Fill in or remove the row.",
            )
        empty += compute.sum(compute.equal(compute.binary_length(values), 0)).as_py() or 0
    return empty
