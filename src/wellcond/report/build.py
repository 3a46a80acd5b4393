"""`build_report`: page, markdown, figures and tables of every comparison below a folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from wellcond.report.analysis import analyse
from wellcond.report.comparison_page import plotly_source, render_page
from wellcond.report.figures import build_figures
from wellcond.report.load_runs import Comparison, load_comparisons
from wellcond.report.markdown_report import render_markdown
from wellcond.report.provenance import provenance_table
from wellcond.report.series import write_csv
from wellcond.report.static_figures import draw_static
from wellcond.report.table import table_csv
from wellcond.report.tables import build_tables

MADE = {"figures": (".png", ".svg", ".csv"), "tables": (".csv",)}


def build_report(folder: Path, *, progress: Callable[[str], None] | None = None) -> list[Path]:
    """Write `report/` into the folder of every comparison found; the same records give the same files.

    Each file is replaced as a whole, so that a reader never sees half of one. Figures and tables of an older report
    that no longer exist are removed.

    Args:
        folder: any folder above `run.json` files.
        progress: called with a line of text before each part.

    Returns: path of every `report.html`.

    Raises: RunRecordError on broken records, MissingExtraError without plotly or matplotlib; in both cases before
        anything is written for that comparison.
    """
    plotly_source()
    return [_build_one(comparison, progress or (lambda _: None)) for comparison in load_comparisons(folder)]


def _build_one(comparison: Comparison, tell: Callable[[str], None]) -> Path:
    tell(f"{comparison.name}: reading {len(comparison.runs)} runs")
    files = dict(_contents(comparison, tell))
    home = comparison.folder / "report"
    for name, content in files.items():
        _replace(home / name, content)
    for part, endings in MADE.items():
        for path in sorted((home / part).glob("*")):
            if path.suffix in endings and f"{part}/{path.name}" not in files:
                path.unlink()
    return home / "report.html"


def _contents(comparison: Comparison, tell: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
    analysis = analyse(comparison)
    figures = build_figures(analysis)
    for figure in figures:
        tell(f"{comparison.name}: figure {figure.name}")
        yield f"figures/{figure.name}.csv", write_csv(figure.rows).encode()
        for kind, content in draw_static(comparison, figure).items():
            yield f"figures/{figure.name}.{kind}", content
    for table in [*build_tables(analysis), provenance_table(comparison)]:
        yield f"tables/{table.name}.csv", table_csv(table).encode()
    tell(f"{comparison.name}: page")
    yield "report.md", render_markdown(analysis, figures).encode()
    yield "report.html", render_page(analysis, figures).encode()


def _replace(path: Path, content: bytes) -> None:
    """Write beside the file, then take its place in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
