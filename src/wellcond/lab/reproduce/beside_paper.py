"""What came out of an id, as data and as files: our numbers beside the paper's, and whether the gains agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from wellcond.files import write_atomically
from wellcond.lab.report.glue import AVERAGE
from wellcond.lab.report.records import Metric
from wellcond.lab.report.series import write_csv
from wellcond.lab.report.static_figures import draw_static
from wellcond.lab.report.statistics import PairedDifference, Summary, compare_paired, holm
from wellcond.lab.report.table import (
    Table,
    Values,
    difference_values,
    show_interval,
    show_mean,
    show_p,
    summary_values,
    table_csv,
    table_markdown,
)
from wellcond.lab.report.values import MISSING
from wellcond.lab.reproduce.catalogue import Entry, Part
from wellcond.lab.reproduce.correction_cost import static_tables
from wellcond.lab.reproduce.figures import build_figures, figure_table
from wellcond.lab.reproduce.stored import Collection, StoredStudy, differences_from_paper, may_be_paired
from wellcond.lab.train.run_folder import writing

GLUE_AVERAGE = f"glue:{AVERAGE}"
GAINS = (
    "Gains are over the first row, paired by seed, positive is better; p by the paired t test, Holm over the table; "
    "they agree if our interval contains the paper's, both as shares of the baseline's error."
)
HEADER = (
    "column", "method", "paper", "ours", "n", "paper's gain", "our gain [95 % interval]", "p",
    "p (Holm)", "agreement",
)  # fmt: skip


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
    paper_error: float | None = None
    """What the paper's baseline gets wrong, by which its gain is a share."""
    error: float | None = None
    """What our baseline gets wrong, likewise."""

    @property
    def agreement(self) -> str:
        """Whether the interval of our gain contains the paper's: within, below, above, or why that is not known.

        Both as shares of the baseline's error, since points of other data mean something else.
        """
        if self.paper_gain is None or not self.paper_error:
            return "no reference"
        if self.difference is None or self.difference.interval is None or not self.error:
            return "no runs" if not self.summary.count else "too few seeds"
        paper = self.paper_gain / self.paper_error
        low, high = (end * self.metric.scale / self.error for end in self.difference.interval)
        return "above" if low > paper else "below" if high < paper else "within"


def build_cells(entry: Entry, part: Part, records: Collection) -> list[Cell]:
    """Every number of one metric, with Holm's correction over all of them."""
    cells = list(_cells(entry, part, records))
    corrected = holm([cell.difference.p if cell.difference else None for cell in cells])
    return [
        cell if cell.difference is None else replace(cell, difference=replace(cell.difference, p_holm=p))
        for cell, p in zip(cells, corrected, strict=True)
    ]


def _cells(entry: Entry, part: Part, records: Collection) -> Iterator[Cell]:
    base_row = entry.rows[entry.baseline]
    for name, column in entry.columns.items():
        metric = part.metric or column.metric
        base_study = records.study(column, base_row.variant)
        base = {} if base_study is None else base_study.values(base_row, metric)
        for row_name, row in entry.all_rows.items():
            if not row.is_in(name):
                continue
            study = records.study(column, row.variant)
            values = {} if study is None else study.values(row, metric)
            shown = study.metric(metric) if study else Metric(metric, True, False)
            paired = base if may_be_paired(study, base_study, (row.variant, base_row.variant)) else {}
            difference = compare_paired(
                row_name, values, entry.baseline, paired, higher_is_better=shown.higher_is_better
            )
            paper, tasks = part.show(row_name, name), [name]
            if column.metric == GLUE_AVERAGE and (some := averaged_columns(entry, study)):
                tasks = list(some)
                value = part.mean(row_name, tasks)
                paper = "" if value is None else f"{value:.1f} (of {', '.join(tasks)})"
            yield Cell(
                column=name,
                row=row_name,
                paper=paper,
                paper_value=part.mean(row_name, tasks),
                paper_gain=part.gain(row_name, entry.baseline, *tasks),
                summary=Summary(values),
                lost=study.lost(row) if study else 0,
                metric=shown,
                difference=difference if row_name != entry.baseline and difference.count else None,
                paper_error=_error(part.mean(entry.baseline, tasks), higher_is_better=not part.lower_is_better),
                error=_error(Summary(paired).mean * shown.scale, higher_is_better=shown.higher_is_better),
            )


def _error(value: float | None, *, higher_is_better: bool) -> float | None:
    """What a score lacks of 100, or a perplexity, a time or an amount itself."""
    return None if value is None else 100 - value if higher_is_better else value


def averaged_columns(entry: Entry, study: StoredStudy | None) -> tuple[str, ...]:
    """Columns whose tasks of GLUE were run, over which the paper's average must be too; empty if all were, or none."""
    tasks = [] if study is None or study.glue is None else [f"glue:{task}" for task in study.glue.tasks]
    columns = {name: column.metric for name, column in entry.columns.items() if column.metric != GLUE_AVERAGE}
    run = tuple(name for name, metric in columns.items() if metric in tasks)
    return () if len(run) == len(columns) else run


def cells_table(id: str, title: str, cells: list[Cell], notes: Iterable[str]) -> Table:
    """A row for each number."""
    known = {cell.metric.label for cell in cells if cell.summary.count}
    name = f" ({known.pop()})" if len(known) == 1 else ""
    rows, values = tuple(map(_shown, cells)), tuple(map(_numbers, cells))
    return Table(id.lower(), f"{id}: {title}{name}", HEADER, rows, tuple(notes), frozenset({0, 1, 9}), values)


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
        MISSING if cell.paper_gain is None else f"{cell.paper_gain:+g}",
        gain,
        show_p(difference.p if difference else None),
        show_p(difference.p_holm if difference else None),
        cell.agreement if difference is not None or cell.paper_gain is not None else MISSING,
    )


def outcome_tables(id: str, entry: Entry, scale: str, records: Collection | None) -> list[Table]:
    """The tables of an id.

    Args:
        id: of the entry.
        entry: what to show.
        scale: of what is computed without runs.
        records: where the runs are; not needed for what is computed.
    """
    if entry.kind == "static":
        return list(static_tables(entry.static, scale))
    assert records is not None
    notes = list(_notes(entry, records))
    if entry.kind == "figure":
        return [figure_table(id, entry, records, notes)]
    names = (id, *(f"{id}-{number}" for number in range(2, len(entry.parts) + 1)))
    return [
        cells_table(name, entry.title, build_cells(entry, part, records), [GAINS, *notes] if name == id else [])
        for name, part in zip(names, entry.parts, strict=True)
    ]


def _notes(entry: Entry, records: Collection) -> Iterator[str]:
    if not entry.has_numbers:
        yield f"No reference: no paper {'prints numbers for this' if entry.kind == 'figure' else 'has this table'}."
    elif entry.paper_note:
        yield f"Paper: {entry.paper_note}"
    if entry.note:
        yield f"Here: {entry.note}."
    yield from list(differences_from_paper(entry, records)) or ["There are no runs of this here."]


def write_outcome(id: str, entry: Entry, scale: str, records: Collection | None, folder: Path) -> list[Table]:
    """Write ID.md, a CSV for each table, and CSV and SVG of each figure; returns the tables.

    Raises: MissingExtraError without matplotlib, RunError if the folder cannot be written.
    """
    tables = outcome_tables(id, entry, scale, records)
    files: dict[str, str | bytes] = {f"{table.name}.csv": table_csv(table) for table in tables}
    text = [f"# {id}: {entry.title}", ""]
    for table in tables:
        text += [f"## {table.title}", "", table_markdown(table), ""]
    for figure, series in [] if records is None else build_figures(id, entry, records):
        name = figure.name.lower()
        files[f"{name}-points.csv"] = write_csv(figure.rows)
        files[f"{name}.svg"] = draw_static(series, figure)
        text += [f"![{figure.title}]({name}.svg)", ""]
    files[f"{id}.md"] = "\n".join(text)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    return tables
