"""Rows of files as a split: memory-mapped by `datasets`, one row read when it is asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor

from wellcond.files import read_regular
from wellcond.lab.data.base import Kind, check_index
from wellcond.lab.data.errors import DataError
from wellcond.lab.data.images import decode_image


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a table that came from one place."""

    name: str
    """File, or data set and split, as an error names it."""
    num_rows: int
    folder: Path | None = None
    """Where image paths in these rows start, and may not lead out of; None trusts the paths."""


@dataclass(frozen=True, eq=False)
class Table:
    """A `datasets.Dataset` and where its rows came from."""

    data: Any
    parts: Sequence[Part]
    text_labels: bool = False
    """Every value was read as text, so that integers must still be recognised (CSV)."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.data)

    def part_of(self, row: int) -> tuple[Part, int]:
        """The part that a row came from, and its number there."""
        index = bisect_right(self._ends, row)
        return self.parts[index], row - (self._ends[index] - self.parts[index].num_rows)

    def locate(self, row: int) -> str:
        """The place of a row, as an error names it."""
        part, number = self.part_of(row)
        return f"{part.name}, row {number} (the first is 0)"

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(part.num_rows for part in self.parts))

    @property
    def name(self) -> str:
        """The place of the whole table, as an error names it."""
        more = f" and {len(self.parts) - 1} more files" if len(self.parts) > 1 else ""
        return f"{self.parts[0].name}{more}"


@dataclass(frozen=True, eq=False)
class TableSplit:
    """Rows of a table, all or those in `rows`; `labels` has one entry per row of the split."""

    table: Table
    kind: Kind
    columns: tuple[str, ...]
    labels: Tensor | None
    rows: Tensor | None = None

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.table) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The example at `index`: `image`, or `text` and perhaps `text_pair`; and `label`."""
        index = check_index(index, len(self))
        row = self._row(index)
        example: dict[str, Any]
        if self.kind == "image":
            example = {"image": decode_image(self.content(index), self.table.locate(row))}
        else:
            values = self.table.data[row]
            example = dict(zip(("text", "text_pair"), (values[name] for name in self.columns), strict=False))
        if self.labels is not None:
            example["label"] = self.labels[index].item()
        return example

    def content(self, index: int) -> bytes:
        """The encoded image, or the texts in UTF-8."""
        row = self._row(check_index(index, len(self)))
        values = self.table.data[row]
        if self.kind == "image":
            return self._encoded_image(values[self.columns[0]], row)
        return b"\0".join(values[name].encode() for name in self.columns)

    def _row(self, index: int) -> int:
        return index if self.rows is None else int(self.rows[index])

    def _encoded_image(self, value: Any, row: int) -> bytes:
        if isinstance(value, dict):
            value = value["bytes"] if value.get("bytes") is not None else value.get("path")
        if isinstance(value, bytes):
            return value
        if isinstance(value, str) and value:
            return read_image_file(value, self.table, row)
        raise DataError(
            f"{self.table.locate(row)}: there is no image.",
            expected="encoded bytes or a path",
            found=repr(value),
            todo="Fill in or remove the row.",
        )


def read_image_file(path: str, table: Table, row: int) -> bytes:
    """Bytes of an image file that a row names.

    Raises:
        DataError: the path leads out of the folder that images of this table lie in, or cannot be read.
    """
    part, _ = table.part_of(row)
    file = Path(path) if part.folder is None else part.folder / path
    if part.folder is not None and not file.resolve().is_relative_to(part.folder.resolve()):
        raise DataError(
            f"{table.locate(row)}: the path of the image leads out of its folder.",
            expected=f"a path within {part.folder}",
            found=repr(path),
            todo="Move the images there, or set 'image_root' to the folder that holds them.",
        )
    try:
        return read_regular(file)
    except OSError as error:
        raise DataError(
            f"{table.locate(row)}: the image cannot be opened.",
            expected=f"an image file at {file}",
            found=f"{type(error).__name__}: {error.strerror}",
            todo="Restore the file or correct the path; paths start at the data file's folder, or at 'image_root'.",
        ) from error
