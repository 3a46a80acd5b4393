"""What came out of an id: tables beside the paper's numbers and figures, as data and as files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from wellcond.files import write_atomically
from wellcond.lab.report.series import write_csv
from wellcond.lab.report.static_figures import draw_static
from wellcond.lab.report.table import Table, table_csv, table_markdown
from wellcond.lab.reproduce.beside_paper import build_cells, cells_table
from wellcond.lab.reproduce.catalogue import Entry
from wellcond.lab.reproduce.correction_cost import static_tables
from wellcond.lab.reproduce.figures import build_figures, figure_table
from wellcond.lab.reproduce.stored import Collection, differences_from_paper
from wellcond.lab.train.run_folder import writing

GAINS = "Gains are over the first row, paired by seed, positive is better; p by the paired t test, Holm over the table."


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
    """Write ID.md, a CSV for each table, and CSV, PNG and SVG of each figure; returns the tables.

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
        files |= {f"{name}.{kind}": drawn for kind, drawn in draw_static(series, figure, ("png", "svg")).items()}
        text += [f"![{figure.title}]({name}.png)", ""]
    files[f"{id}.md"] = "\n".join(text)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    return tables
