"""Source `one_text`: one long text, of which the first part is trained on and all the rest is evaluated on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from wellcond.errors import DataError
from wellcond.files import read_regular
from wellcond.lab.data.base import Data, register_source
from wellcond.lab.data.disk import find_files
from wellcond.lab.data.examples import ExampleDataset
from wellcond.lab.data.tables import find_splits, name_of, opened, read_table, suffix_of
from wellcond.lab.data.text import TextConfig

ORDER = ("train", "validation", "test")
"""Splits of a set that was cut from one text, in the order of the text."""


class OneTextConfig(TextConfig):
    """Settings of `one_text`; files, or splits in the order train, validation, test, are joined."""

    source: Literal["one_text"] = "one_text"
    revision: str | None = Field(None, pattern=r"^[\w./-]+$")
    """Branch, tag or commit of the hub, where the main one has no data files."""
    held_out: float = Field(0.1, gt=0, lt=1)
    """Share of the characters at the end that is evaluated on."""


@register_source(OneTextConfig)
def load_one_text(config: OneTextConfig, base: Path) -> Data:
    """Two splits of one document each."""
    if config.files is not None:
        files = find_files(config.files, base, "files")
        name, text = name_of(files), "".join(map(_read, files))
    else:
        name, text = str(config.id), _from_id(config)
    end = int(len(text) * (1 - config.held_out))
    parts = {"train": text[:end], "evaluation": text[end:]}
    if not all(part.strip() for part in parts.values()):
        raise DataError(f"{name}: the text is too short to be cut in two.", expected="words", found=repr(text[:60]))
    train, evaluation = (
        ExampleDataset([{"text": part}], f"{name}, {split}", "text", ("text",)) for split, part in parts.items()
    )
    origin = f"{name}, one text: the first {end} characters to train, the last {len(text) - end} to evaluate"
    return Data(name, "text", train, evaluation, None, origin)


def _read(file: Path) -> str:
    """A file as it is: line ends are characters too."""
    try:
        return read_regular(file).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: this cannot be read.", expected="text in UTF-8", found=str(error)) from error


def _from_id(config: OneTextConfig) -> str:
    splits = find_splits(str(config.id), None)
    if splits is None:
        options = {} if config.revision is None else {"revision": config.revision}
        with opened(str(config.id), **options) as found:
            return "".join(text for split in _ordered(found) for text in _column(found[split], config))
    parts: list[str] = []
    for split in _ordered(splits):
        plain = all(suffix_of(file) == ".txt" and file.suffix == ".txt" for file in splits[split])
        parts += map(_read, splits[split]) if plain else _column(read_table(splits[split]).data, config)
    return "".join(parts)


def _ordered(splits: object) -> list[str]:
    names = [str(name) for name in splits]  # type: ignore[attr-defined]
    return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def _column(table: object, config: OneTextConfig) -> list[str]:
    columns = table.column_names  # type: ignore[attr-defined]
    texts = table[config.text][:] if config.text in columns else [None]  # type: ignore[index]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{config.id}: there is no text in column {config.text!r}.",
            expected="the column that the field 'text' names",
            found=f"columns {columns}",
        )
    return list(texts)
