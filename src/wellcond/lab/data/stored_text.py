"""Documents in one flat file of UTF-8, mapped into memory: a split that may be larger than memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wellcond.lab.data.base import check_index
from wellcond.lab.data.errors import DataError

TEXT, ENDS = "text.bin", "text_ends.bin"


@dataclass(frozen=True, eq=False)
class StoredText:
    """The documents from `first` to before `stop` of a folder; handed to another process, only its path travels."""

    folder: Path
    first: int
    stop: int
    labels: None = None

    def __len__(self) -> int:
        """Number of documents."""
        return self.stop - self.first

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The text."""
        return {"text": self.content(index).decode("utf-8", "surrogatepass")}

    def content(self, index: int) -> bytes:
        """The text in UTF-8."""
        number = self.first + check_index(index, len(self))
        start = 0 if number == 0 else int(self._ends[number - 1])
        return self._text[start : int(self._ends[number])].tobytes()

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return map_file(self.folder / ENDS, np.dtype("<i8"))

    @cached_property
    def _text(self) -> NDArray[np.uint8]:
        return map_file(self.folder / TEXT, np.dtype("u1"))

    def __getstate__(self) -> dict[str, Any]:
        """Without the maps, which would be copied."""
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}


def map_file(path: Path, dtype: np.dtype[Any], count: int | None = None) -> Any:
    """A file of the cache as a vector, read from disk as it is asked for.

    Raises: DataError if it is missing, empty, or not of `count` numbers.
    """
    try:
        found = path.stat().st_size
        if found and (count is None or found == count * dtype.itemsize):
            return np.memmap(path, dtype, mode="r", shape=(found // dtype.itemsize,))
        problem = f"{found} bytes"
    except OSError as error:
        problem = error.strerror or str(error)
    raise DataError(
        f"{path}: this file of the cache has changed since it was opened.",
        expected="content" if count is None else f"{count * dtype.itemsize} bytes",
        found=problem,
        todo="Start again: what is damaged or missing is then made anew.",
    )
