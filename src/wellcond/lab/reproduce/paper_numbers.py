"""The numbers that the papers print."""

from __future__ import annotations

import functools
from importlib import resources

from pydantic import ValidationError, model_validator

from wellcond.lab.settings import Settings, explain, read_yaml


class PaperMetric(Settings):
    """What a table is in."""

    name: str
    unit: str = ""
    higher_is_better: bool


class PaperPart(Settings):
    """Numbers in one metric: a row for each method, a column for each model or task."""

    metric: PaperMetric
    columns: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]
    stds: dict[str, tuple[float | None, ...]] = {}
    printed: dict[str, tuple[str, ...]] = {}
    """The same as the paper writes it, where that is something else."""

    @model_validator(mode="after")
    def _is_a_table(self) -> PaperPart:
        for part in (self.rows, self.stds, self.printed):
            for name, values in part.items():
                if name not in self.rows or len(values) != len(self.columns):
                    raise ValueError(f"row {name!r}: expected {len(self.columns)} values of a known row")
        return self

    def value(self, row: str, column: str) -> float | None:
        """A number; None where the paper has none."""
        return self._at(self.rows, row, column)

    def gain(self, row: str, baseline: str, column: str) -> float | None:
        """Row minus baseline, positive is better; None where a number is missing."""
        value, base = self.value(row, column), self.value(baseline, column)
        if value is None or base is None or row == baseline:
            return None
        return round(value - base if self.metric.higher_is_better else base - value, 6)

    def show(self, row: str, column: str) -> str:
        """A number as it stands in the paper, its standard deviation in brackets; empty where there is none."""
        value, std = self.value(row, column), self._at(self.stds, row, column)
        if value is None:
            return ""
        printed = self.printed.get(row)
        behind = "" if std is None else f" ({std:.2f})"
        behind += "" if printed is None else f" ({printed[self.columns.index(column)]})"
        return f"{value:g}{behind}"

    def _at(self, rows: dict[str, tuple[float | None, ...]], row: str, column: str) -> float | None:
        return rows[row][self.columns.index(column)] if row in rows and column in self.columns else None


class PaperFormulas(Settings):
    """A table of formulas."""

    columns: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]


class PaperTable(Settings):
    """What the paper prints under one id."""

    id: str
    title: str
    note: str = ""
    parts: tuple[PaperPart, ...] = ()
    formulas: PaperFormulas | None = None


@functools.cache
def paper_tables() -> dict[str, PaperTable]:
    """All that have numbers, by id.

    Example:
        >>> paper_tables()["C-T1"].parts[0].gain("conditioned", "default", "ViT-B")
        1.2
    """
    folder = resources.files("wellcond.lab.reproduce") / "papers"
    found = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            data = read_yaml(file.read_text(encoding="utf-8"), file.name)
            try:
                table = PaperTable.model_validate(data)
            except ValidationError as error:
                raise explain(error, file.name, data) from error
            found[table.id] = table
    return found
