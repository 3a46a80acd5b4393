"""What a monitor keeps: a number per step, head and column, as a table, a file of JSON lines, and a frame."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from wellcond.arguments import describe
from wellcond.errors import MonitorError
from wellcond.files import read_regular, write_atomically
from wellcond.measurement.records import make_frame
from wellcond.version import __version__

KIND = "wellcond monitor"
SCHEMA = 1
BYTES_IN_MEMORY = 64 * 2**20
FEWEST_IN_MEMORY = 256
"""Readings, more than any rule of an alarm looks back."""


class Tables:
    """Tables of one shape, in the order in which they were added: the last ones in memory, older ones in a file.

    The file is temporary, where Python's `tempfile` puts such files (``TMPDIR``), and ends with the process.
    """

    def __init__(self) -> None:
        self._recent: list[np.ndarray] = []
        self._file: IO[bytes] | None = None
        self._in_file = 0

    def append(self, table: np.ndarray) -> None:
        """Add one; of float32, as all are."""
        self._recent.append(table)
        if len(self._recent) > 2 * FEWEST_IN_MEMORY and len(self._recent) * table.nbytes > BYTES_IN_MEMORY:
            self._move_to_file(len(self._recent) // 2)

    def _move_to_file(self, count: int) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile()
            weakref.finalize(self, self._file.close)
        self._file.seek(0, os.SEEK_END)
        self._file.write(b"".join(table.tobytes() for table in self._recent[:count]))
        self._recent, self._in_file = self._recent[count:], self._in_file + count

    def last(self, count: int) -> list[np.ndarray]:
        """The last ones, fewer if there are no more."""
        return [self[at] for at in range(max(0, len(self) - count), len(self))]

    def __len__(self) -> int:
        return self._in_file + len(self._recent)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[at] for at in range(len(self)))

    def __getitem__(self, at: int) -> np.ndarray:
        if not 0 <= at < len(self):
            raise IndexError(at)
        if at >= self._in_file:
            return self._recent[at - self._in_file]
        assert self._file is not None
        like = self._recent[0]
        self._file.seek(at * like.nbytes)
        return np.frombuffer(self._file.read(like.nbytes), like.dtype).reshape(like.shape)


@dataclasses.dataclass(eq=False)
class Series:
    """Numbers of every head over the steps of a training, NaN where one was not seen.

    `values` has the shape (readings, heads of all layers, columns); heads are in the order of the layers.
    """

    layers: list[tuple[str, int]]
    """Names of the attention layers, and how many heads each has."""
    columns: list[str]
    steps: list[int] = dataclasses.field(default_factory=list)
    tables: Tables = dataclasses.field(default_factory=Tables, repr=False)
    path: Path | None = None

    @property
    def values(self) -> np.ndarray:
        """All readings, (readings, heads, columns)."""
        if not len(self.tables):
            return np.empty((0, self.num_heads, len(self.columns)))
        return np.stack(list(self.tables))

    @property
    def num_heads(self) -> int:
        """Heads of all layers."""
        return sum(count for _, count in self.layers)

    @property
    def heads(self) -> list[tuple[str, int]]:
        """Layer and number of every head, in the order of the values."""
        return [(name, head) for name, count in self.layers for head in range(count)]

    def column(self, name: str, last: int | None = None) -> np.ndarray:
        """One column of all readings, or of the last ones: (readings, heads); NaN if there is no such column."""
        tables = self.tables if last is None else self.tables.last(last)
        if name not in self.columns or not len(tables):
            return np.full((len(tables), self.num_heads), math.nan)
        at = self.columns.index(name)
        return np.stack([table[:, at].copy() for table in tables])

    def add(self, step: int, table: np.ndarray) -> None:
        """Add the reading of a step, and write it if there is a file; both keep float32, so that they are the same."""
        table = table.astype(np.float32)
        self.steps.append(step)
        self.tables.append(table)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as out:
                out.writelines(line + "\n" for line in self._lines(step, table))

    def replay(self, first: int = 0) -> Iterator[Series]:
        """One series that grows by a reading at a time, shown after each of them but the first ones."""
        grown = Series(self.layers, self.columns)
        for number, (step, table) in enumerate(zip(self.steps, self.tables, strict=True)):
            grown.steps.append(step)
            grown.tables.append(table)
            if number >= first:
                yield grown

    # Files

    def header(self) -> dict[str, Any]:
        """The first line of a file: what its numbers are of."""
        layers = [[name, count] for name, count in self.layers]
        return {"kind": KIND, "schema": SCHEMA, "version": __version__, "layers": layers, "columns": self.columns}

    def _lines(self, step: int, table: np.ndarray) -> Iterator[str]:
        first = 0
        for name, count in self.layers:
            part = table[first : first + count]
            numbers = {
                column: list(map(_plain, part[:, at]))
                for at, column in enumerate(self.columns)
                if not np.isnan(part[:, at]).all()
            }
            yield json.dumps({"step": step, "site": name, **numbers}, ensure_ascii=False, allow_nan=False)
            first += count

    def write_to(self, file: str | os.PathLike[str], *, keep_until: int = 0) -> None:
        """Write further readings to a file; what an interrupted run left in it after a step is removed.

        Raises: MonitorError if it cannot be written, or holds what another model left.
        """
        path = Path(file)
        text = json.dumps(self.header(), ensure_ascii=False) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if keep_until and path.exists():
                text = "".join(_lines_until(path, keep_until, self.header()))
            write_atomically(path, text)
        except OSError as error:
            raise MonitorError(f"{path} cannot be written ({error.strerror}); give another file") from error
        self.path = path

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> Series:
        """The series that a monitor wrote; a last step that is not complete yet is left out.

        Raises: MonitorError for anything else.
        """
        path = Path(file)
        try:
            lines = read_regular(path).decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise MonitorError(f"{path} cannot be read ({error}); give the monitor.jsonl of a run") from error
        try:
            header = json.loads(lines[0]) if lines else None
            found = cls._begin(header)
            found._read_lines(lines[1:])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise MonitorError(f"{path} is not what a monitor of wellcond writes: {error}") from error
        return found

    @classmethod
    def _begin(cls, header: Any) -> Series:
        if not isinstance(header, dict) or header.get("kind") != KIND or header.get("schema") != SCHEMA:
            raise ValueError(f"expected a first line of kind {KIND!r}, schema {SCHEMA}, found {describe(header)}")
        layers = [(str(name), int(count)) for name, count in header["layers"]]
        if any(count < 1 or count > 100_000 for _, count in layers):
            raise ValueError("expected layers with at least one head")
        return cls(layers, [str(name) for name in header["columns"]])

    def _read_lines(self, lines: Sequence[str]) -> None:
        tables: dict[int, np.ndarray] = {}
        seen: dict[int, set[str]] = {}
        firsts, first = {}, 0
        for name, count in self.layers:
            firsts[name] = (first, count)
            first += count
        for number, line in enumerate(lines, 2):
            try:
                entry = json.loads(line)
            except ValueError:
                if number == len(lines) + 1:
                    break  # it is being written
                raise ValueError(f"line {number} is no JSON") from None
            step, name = int(entry["step"]), entry["site"]
            if name not in firsts:
                raise ValueError(f"line {number} is of {name!r}, which its first line does not name")
            begin, count = firsts[name]
            table = tables.setdefault(step, np.full((self.num_heads, len(self.columns)), math.nan, dtype=np.float32))
            seen.setdefault(step, set()).add(name)
            for at, column in enumerate(self.columns):
                if column in entry:
                    table[begin : begin + count, at] = [math.nan if v is None else float(v) for v in entry[column]]
        for step, names in seen.items():
            if len(names) == len(self.layers):
                self.steps.append(step)
                self.tables.append(tables[step])

    # Frames

    def to_frame(self) -> Any:
        """A row per step, layer and head.

        Raises: MissingExtraError if pandas is not installed.
        """
        rows = [
            {"step": step, "site": name, "head": head, **dict(zip(self.columns, map(float, numbers), strict=True))}
            for step, table in zip(self.steps, self.tables, strict=True)
            for (name, head), numbers in zip(self.heads, table, strict=True)
        ]
        return make_frame(rows, {"version": __version__})


def _plain(value: np.float32) -> float | str | None:
    """The shortest digits that give the same number again; JSON has no infinity and no NaN."""
    if np.isnan(value):
        return None
    return float(str(value)) if np.isfinite(value) else str(value)


def is_first_process() -> bool:
    """Whether this process writes and logs; where nothing is distributed, it is the only one."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _lines_until(path: Path, step: int, header: dict[str, Any]) -> Iterator[str]:
    lines = read_regular(path).decode("utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut off while it was written
        if number == 0 and entry.get("layers") != header["layers"]:
            raise MonitorError(f"{path} is of another model; give another file")
        if number == 0:
            yield json.dumps(header, ensure_ascii=False) + "\n"
        elif entry["step"] <= step:
            yield line + "\n"
