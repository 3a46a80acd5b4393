"""Our numbers beside the paper's: mean, gain over the baseline with interval and p, and whether the gains agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from wellcond.lab.report.records import Metric
from wellcond.lab.report.statistics import PairedDifference, Summary, compare_paired, holm
from wellcond.lab.report.table import Table, Values, difference_values, show_interval, show_mean, show_p, summary_values
from wellcond.lab.report.values import MISSING
from wellcond.lab.reproduce.catalogue_files import Entry, Row
from wellcond.lab.reproduce.collect import Collection, StoredStudy, may_be_paired
from wellcond.lab.reproduce.glue_average import METRIC, averaged_columns, mean_gain, mean_of
from wellcond.lab.reproduce.paper_numbers import PaperPart, paper_tables


@dataclass(frozen=True)
class Cell:
    """One number of a table."""

    column: str
    row: str
    paper: str
    """As printed; empty if the paper has none."""
    paper_value: float | None
    paper_gain: float | None
    summary: Summary
    lost: int
    """Runs that diverged or failed."""
    metric: Metric
    difference: PairedDifference | None
    """None for the baseline, or where there are no pairs."""

    @property
    def agreement(self) -> str:
        """Whether the interval of our gain contains the paper's: within, below, above, or why that is not known."""
        if self.paper_gain is None:
            return "no reference"
        if self.difference is None or self.difference.interval is None:
            return "no runs" if not self.summary.count else "too few seeds"
        low, high = (end * self.metric.scale for end in self.difference.interval)
        return "above" if low > self.paper_gain else "below" if high < self.paper_gain else "within"


def build_cells(id: str, entry: Entry, records: Collection) -> list[list[Cell]]:
    """A list for each metric of the entry; p are corrected over such a list."""
    table = paper_tables().get(id)
    parts = table.parts if table is not None else ()
    return [
        _corrected(_cells(entry, records, metric, parts[at] if at < len(parts) else None))
        for at, metric in enumerate(entry.part_metrics)
    ]


def _cells(entry: Entry, records: Collection, part_metric: str, part: PaperPart | None) -> Iterable[Cell]:
    for name, column in entry.columns.items():
        metric = part_metric or column.metric
        base_row = entry.rows[entry.baseline]
        base = _values(records, column.study, base_row, metric)
        for row_name, row in entry.all_rows.items():
            if not row.is_in(column.study):
                continue
            values = _values(records, column.study, row, metric)
            study = records.study(column.study, row.variant)
            shown = study.metric(metric) if study else Metric(metric, True, False)
            paired = base if _same_recipe(records, column.study, row, base_row) else {}
            difference = compare_paired(
                row_name, values, entry.baseline, paired, higher_is_better=shown.higher_is_better
            )
            reference = ("", None, None) if part is None else _reference(entry, part, row_name, name, study)
            yield Cell(
                column=name,
                row=row_name,
                paper=reference[0],
                paper_value=reference[1],
                paper_gain=reference[2],
                summary=Summary(values),
                lost=study.lost(row) if study else 0,
                metric=shown,
                difference=difference if row_name != entry.baseline and difference.count else None,
            )


def _reference(
    entry: Entry, part: PaperPart, row: str, name: str, study: StoredStudy | None
) -> tuple[str, float | None, float | None]:
    """What the paper has: as text, the number, and the gain over the baseline."""
    tasks = averaged_columns(entry, study) if entry.columns[name].metric == METRIC else ()
    if not tasks:
        return part.show(row, name), part.value(row, name), part.gain(row, entry.baseline, name)
    value = mean_of(part, row, tasks)
    shown = "" if value is None else f"{value:.1f} (of {', '.join(tasks)})"
    return shown, value, mean_gain(part, row, entry.baseline, tasks)


def _values(records: Collection, study: str, row: Row, metric: str) -> dict[int, float]:
    stored = records.study(study, row.variant)
    return {} if stored is None else stored.values(row, metric)


def _same_recipe(records: Collection, study: str, row: Row, other: Row) -> bool:
    one, two = (records.study(study, some.variant) for some in (row, other))
    return may_be_paired(one, two, (row.variant, other.variant))


def _corrected(cells: Iterable[Cell]) -> list[Cell]:
    listed = list(cells)
    corrected = holm([cell.difference.p if cell.difference else None for cell in listed])
    return [
        cell if cell.difference is None else replace(cell, difference=replace(cell.difference, p_holm=p))
        for cell, p in zip(listed, corrected, strict=True)
    ]


HEADER = (
    "column", "method", "paper", "ours", "n", "ours − paper", "paper's gain", "our gain [95 % interval]", "p",
    "p (Holm)", "agreement",
)  # fmt: skip


def cells_table(id: str, title: str, cells: list[Cell], notes: Iterable[str]) -> Table:
    """A row for each number."""
    rows = tuple(_shown(cell) for cell in cells)
    known = {cell.metric.label for cell in cells if cell.summary.count}
    name = f" ({known.pop()})" if len(known) == 1 else ""
    values = tuple(map(_numbers, cells))
    return Table(id.lower(), f"{id}: {title}{name}", HEADER, rows, tuple(notes), frozenset({0, 1, 10}), values)


def _numbers(cell: Cell) -> Values:
    return (
        {"column": cell.column, "row": cell.row, "paper": cell.paper_value}
        | summary_values(cell.summary, cell.metric)
        | {"lost": cell.lost, "paper_gain": cell.paper_gain}
        | difference_values(cell.difference, cell.metric)
        | {"agreement": cell.agreement}
    )


def _shown(cell: Cell) -> tuple[str, ...]:
    summary, metric, difference = cell.summary, cell.metric, cell.difference
    away = MISSING
    if summary.count and cell.paper_value is not None:
        away = f"{summary.mean * metric.scale - cell.paper_value:+.2f}"
    gain = MISSING
    if difference is not None:
        interval = "" if difference.interval is None else f" {show_interval(difference.interval, metric)}"
        gain = metric.show(difference.mean, sign=True) + interval
    return (
        cell.column,
        cell.row,
        cell.paper or MISSING,
        show_mean(summary.mean, summary.std, metric),
        f"{summary.count}" + (f" + {cell.lost} lost" if cell.lost else ""),
        away,
        MISSING if cell.paper_gain is None else f"{cell.paper_gain:+g}",
        gain,
        show_p(difference.p if difference else None),
        show_p(difference.p_holm if difference else None),
        cell.agreement if difference is not None or cell.paper_gain is not None else MISSING,
    )
