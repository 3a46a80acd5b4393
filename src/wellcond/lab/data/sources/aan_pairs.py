"""Source `aan_pairs`: the files of the Long Range Arena's retrieval task, pairs of papers of the ACL Anthology."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from wellcond.lab.data.base import Data, check_index, describe_sizes, draw_subset
from wellcond.lab.data.errors import DataError
from wellcond.lab.data.progress import tell
from wellcond.lab.data.reading import find_folder, require_file
from wellcond.lab.data.registry import SourceConfig, register_source

CLASS_NAMES = ("unrelated", "related")
COLUMNS = ("label", "first id", "second id", "first text", "second text")
LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}


class AanPairsConfig(SourceConfig):
    """Settings of `aan_pairs`."""

    source: Literal["aan_pairs"] = "aan_pairs"
    path: str
    """Folder of new_aan_pairs.train.tsv, .eval.tsv and .test.tsv; from the recipe's folder, or a name in a mirror."""
    max_bytes: PositiveInt = 4100
    """How much of each text to read, without half a character at the end; at least task.length."""
    limit_train: int | None = Field(None, ge=1)
    limit_evaluation: int | None = Field(None, ge=1)
    limit_test: int | None = Field(None, ge=1)
    """Largest number of examples, drawn with a fixed seed."""


@dataclass(frozen=True, eq=False)
class AanSplit:
    """Rows of one file, read when asked for.

    Texts are as they stand in the file, as in the published pipeline: with the b and the quotes of the Python
    literals they were written as.
    """

    file: Path
    places: Tensor
    """(n, 4): where the two texts of a row begin and how many bytes of them are read: start, count, start, count."""
    labels: Tensor
    max_bytes: int

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Two texts and whether one paper cites the other."""
        index = check_index(index, len(self))
        # ignore: the last character may have been cut; the rest was checked when the file was read.
        text, text_pair = (part.decode("utf-8", "ignore") for part in self._parts(index))
        return {"text": text, "text_pair": text_pair, "label": int(self.labels[index])}

    def content(self, index: int) -> bytes:
        """The bytes that are read of both texts."""
        return b"\0".join(self._parts(check_index(index, len(self))))

    def _parts(self, index: int) -> list[bytes]:
        first, first_count, second, second_count = self.places[index].tolist()
        try:
            with self.file.open("rb") as stream:
                return [
                    _read_at(stream, start, count) for start, count in ((first, first_count), (second, second_count))
                ]
        except OSError as error:
            raise DataError(
                f"{self.file}: the file cannot be read.",
                expected="the file that was there when the data were loaded",
                found=f"{type(error).__name__}: {error}",
                todo="Restore the file, or start again.",
            ) from error


@register_source(AanPairsConfig)
def load(config: AanPairsConfig, base: Path) -> Data:
    """Check every row of the three files once; `eval` is evaluated on, and `test` is the test split."""
    folder = find_folder(config.path, base)
    limits = {"train": config.limit_train, "eval": config.limit_evaluation, "test": config.limit_test}
    files = {name: require_file(folder / f"new_aan_pairs.{name}.tsv") for name in limits}
    made = {name: _read_split(file, config.max_bytes, limits[name]) for name, file in files.items()}
    sizes = describe_sizes(made["train"], made["eval"], CLASS_NAMES)
    description = (
        f"paper pairs of the Long Range Arena, the first {config.max_bytes} bytes of each text: {sizes}; "
        f"{len(made['test'])} test examples"
    )
    rest = {"test": made["test"]}
    return Data("aan_pairs", "text", made["train"], made["eval"], CLASS_NAMES, description, rest)


def _read_split(file: Path, max_bytes: int, limit: int | None) -> AanSplit:
    places, labels, start, size = [], [], 0, file.stat().st_size
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            label, first, second = _check_row(line, file, number)
            second_start = start + len(line.rstrip(b"\r\n")) - second
            places.append((second_start - 1 - first, min(first, max_bytes), second_start, min(second, max_bytes)))
            labels.append(label)
            start += len(line)
            if number % 1000 == 0:
                tell(f"reading {file.name}", start, size)
    if not places:
        raise DataError(f"{file}: there are no rows.", expected="rows", found="an empty file", todo="Check the file.")
    all_places, all_labels = torch.from_numpy(np.array(places, dtype=np.int64)), torch.tensor(labels)
    rows = draw_subset(len(all_places), limit)
    if rows is not None:
        all_places, all_labels = all_places[rows], all_labels[rows]
    return AanSplit(file, all_places, all_labels, max_bytes)


def _check_row(line: bytes, file: Path, number: int) -> tuple[int, int, int]:
    """Label and lengths of the two texts in bytes."""
    # No quoting: the texts hold quotes of their own.
    values = line.rstrip(b"\r\n").split(b"\t")
    if len(values) != len(COLUMNS):
        _refuse(file, number, f"{len(COLUMNS)} values separated by tabs: {', '.join(COLUMNS)}", f"{len(values)} values")
    if values[0] not in LABELS:
        shown = values[0][:40].decode("utf-8", "replace")
        _refuse(file, number, "the label 0 or 1", repr(shown))
    for name, text in zip(COLUMNS[3:], values[3:], strict=True):
        if not text:
            _refuse(file, number, f"a {name}", "an empty one")
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(file, number, "UTF-8", f"byte 0x{line[error.start]:02x} at {error.start}: {error.reason}")
    return LABELS[values[0]], len(values[3]), len(values[4])


def _refuse(file: Path, line: int, expected: str, found: str) -> NoReturn:
    raise DataError(
        f"{file}, line {line}: the row cannot be used.",
        expected=expected,
        found=found,
        todo="Correct or remove the line, or copy the file again.",
    )


def _read_at(stream: BinaryIO, start: int, count: int) -> bytes:
    stream.seek(start)
    read = stream.read(count)
    if len(read) < count:
        raise OSError("the file has become shorter")
    return read
