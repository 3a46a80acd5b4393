"""What a monitor keeps: a number per step, head and column, as a table, a file of JSON lines, and a frame."""

from __future__ import annotations

import json
import math
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wellcond.arguments import describe
from wellcond.errors import MonitorError
from wellcond.files import lines_until, read_regular, write_atomically
from wellcond.measurement.records import make_frame
from wellcond.version import __version__

KIND = "wellcond monitor"
SCHEMA = 1
BYTES_IN_MEMORY = 64 * 2**20


class Series:
    """Numbers of every head over the steps of a training, NaN where one was not seen.

    They are float32, as in a file. Up to 64 MB are in memory; more of them are in a temporary file, where Python's
    `tempfile` puts such files (``TMPDIR``), which ends with the process.

    Args:
        layers: names of the attention layers, and how many heads each has.
        columns: names of the numbers of a head.
    """

    def __init__(self, layers: Sequence[tuple[str, int]], columns: Sequence[str]) -> None:
        self.layers, self.columns = list(layers), list(columns)
        self.steps: list[int] = []
        self.path: Path | None = None
        self._stored = tempfile.SpooledTemporaryFile(BYTES_IN_MEMORY)
        weakref.finalize(self, self._stored.close)

    @property
    def num_heads(self) -> int:
        """Heads of all layers."""
        return sum(count for _, count in self.layers)

    @property
    def heads(self) -> list[tuple[str, int]]:
        """Layer and number of every head, in the order of the values."""
        return [(name, head) for name, count in self.layers for head in range(count)]

    @property
    def parts(self) -> list[tuple[str, slice]]:
        """Every layer, and where its heads are among all."""
        ends = np.cumsum([count for _, count in self.layers]).tolist()
        return [(name, slice(end - count, end)) for (name, count), end in zip(self.layers, ends, strict=True)]

    @property
    def values(self) -> np.ndarray:
        """All readings, (readings, heads, columns)."""
        return self.readings(0).copy()

    def readings(self, first: int, until: int | None = None) -> np.ndarray:
        """Readings from one on, up to another, (readings, heads, columns), not to be written."""
        count = max(0, (len(self.steps) if until is None else until) - first)
        size = self.num_heads * len(self.columns) * np.dtype(np.float32).itemsize
        self._stored.seek(first * size)
        found = np.frombuffer(self._stored.read(count * size), np.float32)
        return found.reshape(count, self.num_heads, len(self.columns))

    def column(self, name: str) -> np.ndarray:
        """One column of all readings, (readings, heads); NaN if there is no such column."""
        return column_of(self, self.values, name)

    def add(self, step: int, table: np.ndarray) -> None:
        """Add the reading of a step, and write it if there is a file."""
        table = table.astype(np.float32)
        self.steps.append(step)
        self._stored.seek(0, os.SEEK_END)
        self._stored.write(table.tobytes())
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as out:
                out.writelines(line + "\n" for line in self._lines(step, table))

    # Files

    def _header(self) -> dict[str, Any]:
        """The first line of a file: what its numbers are of."""
        layers = [[name, count] for name, count in self.layers]
        return {"kind": KIND, "schema": SCHEMA, "version": __version__, "layers": layers, "columns": self.columns}

    def _lines(self, step: int, table: np.ndarray) -> Iterator[str]:
        for name, part in self.parts:
            numbers = {
                column: list(map(_plain, table[part, at]))
                for at, column in enumerate(self.columns)
                if not np.isnan(table[part, at]).all()
            }
            yield json.dumps({"step": step, "site": name, **numbers}, ensure_ascii=False, allow_nan=False)

    def write_to(self, file: str | os.PathLike[str], *, keep_until: int = 0) -> None:
        """Write further readings to a file; what an interrupted run left in it after a step is removed.

        Raises: MonitorError if it cannot be written, or holds what another model left.
        """
        path, header = Path(file), self._header()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = list(lines_until(path, keep_until)) if keep_until and path.exists() else []
            if kept and kept[0][0].get("layers") != header["layers"]:
                raise MonitorError(f"{path} is of another model; give another file")
            lines = [json.dumps(header, ensure_ascii=False) + "\n", *(line for _, line in kept[1:])]
            write_atomically(path, "".join(lines))
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
            found = cls._begin(json.loads(lines[0]) if lines else None)
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
        places = dict(self.parts)
        tables: dict[int, np.ndarray] = {}
        seen: dict[int, set[str]] = {}
        for number, line in enumerate(lines, 2):
            try:
                entry = json.loads(line)
            except ValueError:
                if number == len(lines) + 1:
                    break  # it is being written
                raise ValueError(f"line {number} is no JSON") from None
            step, name = int(entry["step"]), entry["site"]
            if name not in places:
                raise ValueError(f"line {number} is of {name!r}, which its first line does not name")
            table = tables.setdefault(step, np.full((self.num_heads, len(self.columns)), math.nan, dtype=np.float32))
            seen.setdefault(step, set()).add(name)
            for at, column in enumerate(self.columns):
                if column in entry:
                    table[places[name], at] = [math.nan if v is None else float(v) for v in entry[column]]
        for step, names in seen.items():
            if len(names) == len(self.layers):
                self.add(step, tables[step])

    def to_frame(self) -> Any:
        """A row per step, layer and head.

        Raises: MissingExtraError if pandas is not installed.
        """
        rows = [
            {"step": step, "site": name, "head": head, **dict(zip(self.columns, map(float, numbers), strict=True))}
            for step, table in zip(self.steps, self.values, strict=True)
            for (name, head), numbers in zip(self.heads, table, strict=True)
        ]
        return make_frame(rows, {"version": __version__})


def column_of(series: Series, readings: np.ndarray, name: str) -> np.ndarray:
    """One column of some readings of a series, (readings, heads); NaN if it has no such column."""
    if name not in series.columns:
        return np.full(readings.shape[:2], math.nan)
    return readings[..., series.columns.index(name)]


def logged_name(layer: str, head: int, column: str) -> str:
    """What a number of a head is called in loggers, which make a group of what stands before the slash.

    Example:
        >>> logged_name("blocks.3.attn", 5, "max_logit")
        'wellcond.blocks.3.attn/head05.max_logit'
    """
    return f"wellcond.{layer or 'attention'}/head{head:02d}.{column}"


def _plain(value: np.float32) -> float | str | None:
    """The shortest digits that give the same number again; JSON has no infinity and no NaN."""
    if np.isnan(value):
        return None
    return float(str(value)) if np.isfinite(value) else str(value)
