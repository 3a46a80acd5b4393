"""What came out of an id: tables beside the paper's numbers and figures, as data and as files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from wellcond.files import write_atomically
from wellcond.lab.report.series import write_csv
from wellcond.lab.report.static_figures import draw_static
from wellcond.lab.report.table import Table, table_csv, table_markdown
from wellcond.lab.reproduce.beside_paper import build_cells, cells_table
from wellcond.lab.reproduce.catalogue_files import Entry
from wellcond.lab.reproduce.collect import Collection
from wellcond.lab.reproduce.correction_cost import static_tables
from wellcond.lab.reproduce.figures import build_figures, figure_table
from wellcond.lab.reproduce.paper_numbers import paper_tables
from wellcond.lab.reproduce.what_differs import differences_from_paper
from wellcond.lab.train.run_folder import writing

GAINS = "Gains are over the first row, paired by seed, positive is better; p by the paired t test, Holm over the table."


def outcome_tables(id: str, entry: Entry, scale: str, records: Collection | None) -> list[Table]:
    """The tables of an id.

    Args:
        id: as in the specification.
        entry: of the id.
        scale: of what is computed without runs.
        records: where the runs are; not needed for what is computed.
    """
    if entry.kind == "static":
        return list(static_tables(entry.static, scale))
    assert records is not None
    notes = list(_notes(id, entry, records))
    if entry.kind == "figure":
        return [figure_table(id, entry, records, notes)]
    parts = build_cells(id, entry, records)
    return [
        cells_table(id if at == 0 else f"{id}-{at + 1}", entry.title, cells, [GAINS, *notes] if at == 0 else [])
        for at, cells in enumerate(parts)
    ]


def _notes(id: str, entry: Entry, records: Collection) -> Iterator[str]:
    paper = paper_tables().get(id)
    if paper is None:
        yield f"No reference: no paper {'prints numbers for this' if entry.kind == 'figure' else 'has this table'}."
    elif paper.note:
        yield f"Paper: {paper.note}"
    if entry.note:
        yield f"Here: {entry.note}."
    yield from differences_from_paper(entry, records) or ["There are no runs of this here."]


def write_outcome(id: str, entry: Entry, scale: str, records: Collection | None, folder: Path) -> list[Path]:
    """Write ID.md, a CSV for each table, and CSV, PNG and SVG of each figure; returns what was written.

    Raises: MissingExtraError without matplotlib, RunError if the folder cannot be written.
    """
    tables = outcome_tables(id, entry, scale, records)
    files: dict[str, str | bytes] = {f"{table.name}.csv": table_csv(table) for table in tables}
    figures = [] if records is None else build_figures(id, entry, records)
    for made in figures:
        files[f"{made.figure.name.lower()}-points.csv"] = write_csv(made.figure.rows)
        files |= {
            f"{made.figure.name.lower()}.{kind}": drawn
            for kind, drawn in draw_static(made.series, made.figure, ("png", "svg")).items()
        }
    text = [f"# {id}: {entry.title}", ""]
    for table in tables:
        text += [f"## {table.title}", "", table_markdown(table), ""]
    for made in figures:
        text += [f"![{made.figure.title}]({made.figure.name.lower()}.png)", ""]
    files[f"{id}.md"] = "\n".join(text)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    return [folder / name for name in files]
