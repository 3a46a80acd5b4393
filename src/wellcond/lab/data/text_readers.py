"""Documents of local files one after the other, without loading a file whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wellcond.errors import MissingExtraError
from wellcond.lab.data.errors import DataError, listed
from wellcond.lab.data.reading import root_cause

COMPRESSED = (".gz", ".bz2", ".zst")
LINES = (".txt",)
JSON_LINES = (".jsonl", ".ndjson")
FORMATS = (*LINES, *JSON_LINES, ".parquet")


def format_of(path: Path) -> str:
    """The ending of a file that says its format, that of its compression left out.

    Raises: DataError if it is not known.

    Example:
        >>> format_of(Path("00.jsonl.zst"))
        '.jsonl'
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    found = suffixes[-1] if suffixes else ""
    if found not in FORMATS or (found == ".parquet" and path.suffix.lower() != found):
        raise DataError(
            f"{path}: the format is not known.",
            expected=f"a name that ends in one of {listed(FORMATS)}; texts may be compressed: {listed(COMPRESSED)}",
            found=repr(path.name),
            todo="Convert the file, or rename it if only its ending is wrong.",
        )
    return found


def read_texts(files: Sequence[Path], column: str) -> Iterator[str]:
    """Every document: a line of a text, or the value of a column."""
    for path in files:
        kind = format_of(path)
        try:
            if kind == ".parquet":
                yield from _parquet(path, column)
            elif kind in JSON_LINES:
                yield from _json_lines(path, column)
            else:
                yield from (line.decode("utf-8") for line in _lines(path))
        except DataError:
            raise
        except (OSError, ValueError, _import_pyarrow().ArrowException) as error:
            raise DataError(
                f"{path}: the file cannot be read.",
                expected=f"a whole {kind} file" + ("" if kind == ".parquet" else " in UTF-8"),
                found=root_cause(error),
                todo="Check that the file is complete and that its name ends in its format.",
            ) from error


def text_of(row: Any, column: str, where: str) -> str:
    """The value of a column.

    Raises: DataError if there is no such column, or no text in it.
    """
    value = row.get(column) if isinstance(row, dict) else None
    if isinstance(value, str):
        return value
    columns = f"columns {listed(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
    raise DataError(
        f"{where}: there is no text.",
        expected=f"a text in the column {column!r}",
        found=f"{type(value).__name__} there" if isinstance(row, dict) and column in row else columns,
        todo="Set 'text' to the column of the texts, or remove the row.",
    )


def _import_pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "train") from error
    return pyarrow


def _lines(path: Path) -> Iterator[bytes]:
    # pyarrow knows the compression by the name, and zstd without a further package.
    compressed = path.suffix.lower() in COMPRESSED
    with _import_pyarrow().input_stream(
        str(path), compression="detect" if compressed else None, buffer_size=2**20
    ) as stream:
        rest = b""
        while block := stream.read(2**20):
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
        if rest:
            yield rest


def _json_lines(path: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: this is no JSON.", expected="one object a line", found=str(error), todo="Correct the line."
            ) from error
        yield text_of(row, column, where)


def _parquet(path: Path, column: str) -> Iterator[str]:
    with _import_pyarrow().parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise DataError(
                f"{path}: there is no column {column!r}.",
                expected="the column that the field 'text' names",
                found=f"columns {listed(names)}",
                todo="Set 'text' to one of these columns.",
            )
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield text_of({column: value}, column, f"{path}, row {row} (the first is 0)")
                row += 1
