"""`build_report`: page, markdown, figures and tables of every comparison below a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from wellcond.files import write_atomically
from wellcond.lab.report.analysis import Analysis, analyse
from wellcond.lab.report.comparison_page import plotly_source, render_page
from wellcond.lab.report.detection_records import find_pictures
from wellcond.lab.report.detections import file_name
from wellcond.lab.report.detections_static import draw_detections
from wellcond.lab.report.figures import build_figures
from wellcond.lab.report.load_runs import Comparison, load_comparisons
from wellcond.lab.report.markdown_report import render_markdown
from wellcond.lab.report.provenance import provenance_table
from wellcond.lab.report.run_record import RunRecordError
from wellcond.lab.report.series import Figure, write_csv
from wellcond.lab.report.static_figures import draw_static
from wellcond.lab.report.table import table_csv
from wellcond.lab.report.tables import build_tables
from wellcond.lab.report.tuning import find_tuning, tuning_figure, tuning_table

MADE = {"figures": (".png", ".svg", ".csv"), "tables": (".csv",)}


def build_report(
    folder: Path,
    *,
    pictures: bool = True,
    progress: Callable[[str], None] | None = None,
    tolerance: float | None = None,
) -> list[Path]:
    """Write `report/` into the folder of every comparison found; the same records give the same files.

    Each file is replaced as a whole, so that a reader never sees half of one. Figures and tables of an older report
    that no longer exist are removed.

    Args:
        folder: any folder above `run.json` files.
        pictures: also draw figures and make the page; without, only `report.md` and the tables are written.
        progress: called with a line of text before each part.
        tolerance: loss within which a tuned value counts as good; see `find_tuning`.

    Returns: path of every `report.html`, or `report.md` without pictures.

    Raises: RunRecordError on broken records, MissingExtraError without plotly or matplotlib; in both cases before
        anything is written for that comparison.
    """
    if pictures:
        plotly_source()
    tell = progress or (lambda _: None)
    return [_build_one(comparison, pictures, tell, tolerance) for comparison in load_comparisons(folder)]


def _build_one(comparison: Comparison, pictures: bool, tell: Callable[[str], None], tolerance: float | None) -> Path:
    tell(f"{comparison.name}: reading {len(comparison.runs)} runs")
    analysis = analyse(comparison)
    tuning = find_tuning(comparison, tolerance)
    figures = build_figures(analysis) if pictures else []
    searched = [tuning_figure(comparison, tuning)] if pictures and tuning is not None else []
    tables = [
        *build_tables(analysis),
        *([] if tuning is None else [tuning_table(tuning)]),
        provenance_table(comparison),
    ]
    files = {f"tables/{table.name}.csv": table_csv(table).encode() for table in tables}
    files["report.md"] = render_markdown(analysis, [*searched, *figures], tolerance=tolerance).encode()
    if pictures:
        files |= dict(_pictures(analysis, [*searched, *figures], tell))
        tell(f"{comparison.name}: page")
        files["report.html"] = render_page(analysis, figures, tolerance=tolerance).encode()
    home = comparison.folder / "report"
    _check_inside(comparison.folder, home)
    try:
        for name, content in files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(home / name, content)
        for part, endings in MADE.items():
            for path in sorted((home / part).glob("*")) if pictures else ():
                if path.suffix in endings and f"{part}/{path.name}" not in files:
                    path.unlink()
    except OSError as error:
        raise RunRecordError(
            Path(error.filename or home),
            f"cannot be written: {error.strerror}",
            "Give yourself the right to write there, make room, or copy the runs elsewhere and report those.",
        ) from error
    return home / ("report.html" if pictures else "report.md")


def _check_inside(folder: Path, home: Path) -> None:
    """Raise RunRecordError if the report would be written, and old files removed, somewhere else through a link."""
    for place in (home, *(home / part for part in MADE)):
        if not place.resolve().is_relative_to(folder.resolve()):
            raise RunRecordError(place, f"is a link that leads out of {folder}, to {place.resolve()}", "Remove it.")


def _pictures(analysis: Analysis, figures: list[Figure], tell: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
    comparison = analysis.comparison
    for at, picture in enumerate(find_pictures(comparison)):
        tell(f"{comparison.name}: detections in image {picture.image_id}")
        yield f"figures/{file_name(at)}.png", draw_detections(picture)
    for figure in figures:
        tell(f"{comparison.name}: figure {figure.name}")
        yield f"figures/{figure.name}.csv", write_csv(figure.rows).encode()
        for kind, content in draw_static(comparison, figure).items():
            yield f"figures/{figure.name}.{kind}", content
