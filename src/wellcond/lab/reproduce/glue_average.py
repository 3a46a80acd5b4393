"""The average of GLUE is over the tasks that were run: the paper's must be over the same ones."""

from __future__ import annotations

import math

from wellcond.lab.report.glue import AVERAGE
from wellcond.lab.reproduce.catalogue_files import Entry
from wellcond.lab.reproduce.collect import StoredStudy
from wellcond.lab.reproduce.paper_numbers import PaperPart

METRIC = f"glue:{AVERAGE}"


def averaged_columns(entry: Entry, study: StoredStudy | None) -> tuple[str, ...]:
    """Names of an entry's columns whose tasks were run; empty if all were, or none."""
    tasks = [] if study is None or study.glue is None else [f"glue:{task}" for task in study.glue.tasks]
    columns = {name: column.metric for name, column in entry.columns.items() if column.metric != METRIC}
    run = tuple(name for name, metric in columns.items() if metric in tasks)
    return () if len(run) == len(columns) else run


def mean_of(part: PaperPart, row: str, columns: tuple[str, ...]) -> float | None:
    """The paper's mean of a row over some columns; None where a number is missing."""
    values = [part.value(row, column) for column in columns]
    known = [value for value in values if value is not None]
    return round(math.fsum(known) / len(known), 6) if known and len(known) == len(values) else None


def mean_gain(part: PaperPart, row: str, baseline: str, columns: tuple[str, ...]) -> float | None:
    """Row minus baseline likewise; scores of GLUE are better when they are higher."""
    value, base = mean_of(part, row, columns), mean_of(part, baseline, columns)
    return None if value is None or base is None or row == baseline else round(value - base, 6)
