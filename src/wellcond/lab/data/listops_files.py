"""ListOps in the files of the Long Range Arena: basic_train.tsv, basic_val.tsv and basic_test.tsv."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from wellcond.files import opened_atomically
from wellcond.lab.data.base import Data, Dataset, TensorDataset
from wellcond.lab.data.errors import DataError, listed
from wellcond.lab.data.listops_language import (
    CLOSING,
    FIRST_OPENING,
    OPERATORS,
    PADDING,
    SYMBOLS,
    ListOpsError,
    is_opening,
    to_tokens,
)
from wellcond.lab.data.listops_trees import answers, from_rows
from wellcond.lab.data.progress import tell

FILES = {"train": "basic_train.tsv", "evaluation": "basic_val.tsv", "test": "basic_test.tsv"}
COLUMNS = ("Source", "Target")
ROWS_AT_ONCE = 256

# Bytes that stand for a token themselves; an opening is told by the letters behind it.
_TOKEN = np.full(256, PADDING, np.int8)
_TOKEN[[ord(digit) for digit in "0123456789"]] = np.arange(10)
_TOKEN[ord("]")] = CLOSING
_TOKEN[ord("[")] = FIRST_OPENING
_IS_LETTER = np.zeros(256, bool)
_IS_LETTER[[ord(letter) for letter in set("".join(OPERATORS))]] = True
_IS_SPACE = np.zeros(256, bool)
_IS_SPACE[[ord(" "), ord("\n")]] = True
_IS_ROUND = np.zeros(256, bool)
_IS_ROUND[[ord("("), ord(")")]] = True


def read_lra_file(path: Path, width: int, *, verify: bool) -> TensorDataset:
    """Tokens (rows, width) in 8 bits, padded with -1, and answers.

    Args:
        path: File with the columns Source and Target.
        width: Most symbols of an expression, round brackets not counted.
        verify: Whether to compute every answer and compare.

    Raises:
        DataError: the file is missing, empty, or has a row that is no expression or has a wrong answer.
    """
    rows: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            lines = (line.rstrip(b"\r\n") for line in file)
            lines = (line for line in lines if line)
            order = _read_header(path, next(lines, b""))
            while block := list(islice(lines, ROWS_AT_ONCE)):
                first = sum(map(len, labels))
                sources, targets = _columns(path, block, order, first)
                labels.append(targets)
                rows.append(_read_block(path, sources, targets, width, first, verify))
                tell(f"reading {path.name}, MB", file.tell() // 10**6, max(1, size // 10**6))
    except OSError as error:
        raise DataError(
            f"{path}: the file cannot be read.",
            expected=f"the files {listed(FILES.values())} of the Long Range Arena",
            found=error.strerror or str(error),
            todo="Correct 'path'; relative paths start at the recipe's folder.",
        ) from error
    if not rows:
        raise DataError(f"{path}: there are no rows.", expected="rows", found="none", todo="Check the file.")
    return TensorDataset("tokens", torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(labels)))


def write_lra_listops(bundle: Data, folder: Path) -> None:
    """Write splits of ListOps as the published generator does, with its round brackets."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in {"train": bundle.train, "evaluation": bundle.evaluation, **bundle.others}.items():
        with opened_atomically(folder / FILES[name]) as file:
            file.write("\t".join(COLUMNS).encode() + b"\r\n")
            for line in _lines(split):
                file.write(line)


def _lines(split: Dataset) -> Iterator[bytes]:
    assert isinstance(split, TensorDataset) and split.labels is not None
    for start in range(0, len(split), ROWS_AT_ONCE):
        rows = split.inputs[start : start + ROWS_AT_ONCE].numpy()
        levels, good = from_rows(rows)
        assert good.all()
        opening, depth = is_opening(rows), np.zeros(rows.shape, np.int16)
        depth[:, 1:] = np.cumsum(opening.astype(np.int16) - (rows == CLOSING), axis=1)[:, :-1]
        counts = np.zeros(rows.shape, np.int64)
        for number, level in enumerate(levels):
            counts[opening & (depth == number)] = level.arguments[level.operators]
        for row, count, label in zip(rows, counts, split.labels[start:].tolist(), strict=False):
            yield f"{_published_text(row, count)}\t{label}\r\n".encode()


def _published_text(row: np.ndarray, counts: np.ndarray) -> str:
    """An operator of n arguments is preceded by n + 1 round brackets; one closes after each argument and at its end."""
    length = int((row != PADDING).sum())
    if length == 1:
        return SYMBOLS[row[0]]
    parts = []
    for token, count in zip(row[:length].tolist(), counts[:length].tolist(), strict=True):
        if token == CLOSING:
            parts.append("] ) )")
        else:
            parts.append("( " * (count + 1) + SYMBOLS[token] if count else f"{token} )")
    return " ".join(parts).removesuffix(" )")  # the whole is nobody's argument


def _read_header(path: Path, line: bytes) -> tuple[int, int]:
    names = line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace").split("\t") if line else []
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise DataError(
            f"{path}: columns are missing: {listed(missing)}.",
            expected=f"a first line with the columns {listed(COLUMNS)}, separated by a tab",
            found=listed(name[:40] for name in names) if names else "an empty file",
            todo="Check that this is a file of ListOps of the Long Range Arena.",
        )
    return names.index(COLUMNS[0]), names.index(COLUMNS[1])


def _columns(path: Path, lines: Sequence[bytes], order: tuple[int, int], first: int) -> tuple[list[bytes], np.ndarray]:
    sources, targets = [], []
    for row, line in enumerate(lines, first):
        values = line.split(b"\t")
        if len(values) <= max(order):
            raise _bad_row(path, row, f"a value for each of {listed(COLUMNS)}", f"{len(values)} value(s)")
        target = values[order[1]].strip()
        if len(target) != 1 or not target.isdigit():
            raise _bad_row(path, row, "an answer from 0 to 9", repr(target.decode("utf-8", "replace")[:40]))
        sources.append(values[order[0]])
        targets.append(int(target))
    return sources, np.array(targets, np.int64)


def _read_block(
    path: Path, sources: Sequence[bytes], targets: np.ndarray, width: int, first: int, verify: bool
) -> np.ndarray:
    rows = _read_at_once(sources, width)
    levels, good = ([], np.zeros(1, bool)) if rows is None else from_rows(rows)
    if rows is None or not good.all():  # find out which row, and what is wrong with it
        rows = np.full((len(sources), width), PADDING, np.int8)
        for row, source in enumerate(sources):
            try:
                tokens = to_tokens(source.decode("utf-8", "replace"))
            except ListOpsError as error:
                raise _bad_row(path, first + row, "an expression such as [MAX 2 9 ]", str(error)) from error
            if len(tokens) > width:
                raise _bad_row(path, first + row, f"at most {width} symbols (max_length)", f"{len(tokens)}")
            rows[row, : len(tokens)] = tokens
        levels, _ = from_rows(rows)
    if verify:
        computed = answers(levels)
        wrong = np.flatnonzero(computed != targets)
        if len(wrong):
            row = int(wrong[0])
            raise _bad_row(path, first + row, f"the answer of the expression, {computed[row]}", f"{targets[row]}")
    return rows


def _read_at_once(sources: Sequence[bytes], width: int) -> np.ndarray | None:
    """Rows of tokens; None if anything but symbols between spaces, too long a row or uneven round brackets are seen."""
    text = np.frombuffer(b"\n" + b"\n".join(sources) + b"\n    ", np.uint8)
    ends = np.flatnonzero(text == ord("\n"))
    tokens = _TOKEN[text]
    openings = np.flatnonzero(text == ord("["))
    letters = operators = 0
    for number, name in enumerate(OPERATORS):
        found = openings
        for offset, letter in enumerate(name + " ", 1):
            found = found[text[found + offset] == ord(letter)]
        tokens[found] = FIRST_OPENING + number
        letters += len(name) * len(found)
        operators += len(found)
    # All openings are of known operators, and theirs are all the letters there are: an unknown one has letters over.
    names = _IS_LETTER[text]
    spaces, is_round = _IS_SPACE[text], _IS_ROUND[text]
    single = (tokens != PADDING) | is_round
    known = single | spaces | names
    apart = spaces[np.flatnonzero(single) - 1].all() and spaces[np.flatnonzero(single & (text != ord("["))) + 1].all()
    if operators != len(openings) or int(names.sum()) != letters:
        return None
    if not known.all() or not apart or not _round_brackets_match(text, is_round, ends):
        return None
    places = np.flatnonzero(tokens != PADDING)
    lengths = np.diff(np.searchsorted(places, ends))
    if lengths.max(initial=0) > width:
        return None
    rows = np.full((len(sources), width), PADDING, np.int8)
    rows[np.arange(width) < lengths[:, None]] = tokens[places]
    return rows


def _round_brackets_match(text: np.ndarray, is_round: np.ndarray, ends: np.ndarray) -> bool:
    places = np.flatnonzero(is_round)
    depth = np.cumsum(np.where(text[places] == ord("("), 1, -1))
    at_ends = np.concatenate([[0], depth])[np.searchsorted(places, ends)]
    return bool((depth >= 0).all() and (at_ends == 0).all())


def _bad_row(path: Path, row: int, expected: str, found: str) -> DataError:
    return DataError(
        f"{path}, row {row} (the first is 0): the row cannot be used.",
        expected=expected,
        found=found,
        todo="Correct or remove the row.",
    )
