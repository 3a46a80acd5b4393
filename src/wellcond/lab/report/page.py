"""`build_report`: page, markdown, figures and tables of every comparison below a folder. No network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from wellcond.files import write_atomically
from wellcond.lab.report.analysis import Analysis, analyse
from wellcond.lab.report.detections import (
    DETECTIONS_LEAD,
    SAMPLES_LEAD,
    detection_parts,
    detections_markdown,
    draw_detections,
    file_name,
    find_pictures,
    find_samples,
    sample_heading,
    samples_markdown,
)
from wellcond.lab.report.figures import build_figures
from wellcond.lab.report.findings import bottom_line, find_findings, find_remarks
from wellcond.lab.report.load_runs import Comparison, load_comparisons
from wellcond.lab.report.plots import NUM_COLOURS, Plot, plots
from wellcond.lab.report.records import RunRecordError
from wellcond.lab.report.render import plotly_source, render
from wellcond.lab.report.run_tables import data_of, provenance_table
from wellcond.lab.report.series import Figure, write_csv
from wellcond.lab.report.static_figures import draw_static
from wellcond.lab.report.table import plain_markdown, table_csv, table_markdown, without_empty_columns
from wellcond.lab.report.tables import build_tables, judged_from
from wellcond.lab.report.tuning import LEAD as TUNING_LEAD
from wellcond.lab.report.tuning import SECTION as TUNING
from wellcond.lab.report.tuning import find_tuning, tuning_figure, tuning_table
from wellcond.lab.report.values import show_seeds

MADE = {"figures": (".png", ".svg", ".csv"), "tables": (".csv",)}
TABS = {
    "Summary": "",
    TUNING: TUNING_LEAD,
    "Learning": "How the runs go, from the first step to the last.",
    "Matching": "How much earlier a method is as good as the baseline is at its end.",
    "Conditioning": "Condition numbers of weights and Jacobians over training.",
    "Layers": "The same, layer by layer.",
    "Attention": "Where attention goes; a saturated softmax does not learn.",
    "Cost": "Time and memory.",
    "Samples": SAMPLES_LEAD,
    "Detections": DETECTIONS_LEAD,
    "Runs": "Every run, and how it was made.",
}
OPTIONAL = (TUNING, "Samples", "Detections")
"""Tabs that are only there if they have something to show."""
TABLE_TABS = {
    "summary": "Summary", "required": "Summary", "matching": "Matching", "conditioning": "Conditioning",
    "other_metrics": "Summary", "cost": "Cost", "statistics": "Runs", "statistics_evaluation": "Runs", "seeds": "Runs",
}  # fmt: skip
FOLDED = {"weights_sigma": "The scale of the weights", "weights_raw": "The weights without their corrections"}
"""Figures that a reader opens when a question leads there."""
Part = dict[str, Any]


def build_report(folder: Path, *, pictures: bool = True, tolerance: float | None = None) -> list[Path]:
    """Write `report/` into the folder of every comparison found; the same records give the same files.

    Each file is replaced as a whole, so that a reader never sees half of one. Figures and tables of an older report
    that no longer exist are removed.

    Args:
        folder: any folder above `run.json` files.
        pictures: also draw figures and make the page; without, only `report.md` and the tables are written.
        tolerance: loss within which a tuned value counts as good; see `find_tuning`.

    Returns: path of every `report.html`, or `report.md` without pictures.

    Raises: RunRecordError on broken records, MissingExtraError without plotly or matplotlib; in both cases before
        anything is written for that comparison.
    """
    if pictures:
        plotly_source()
    return [_build_one(comparison, pictures, tolerance) for comparison in load_comparisons(folder)]


def _build_one(comparison: Comparison, pictures: bool, tolerance: float | None) -> Path:
    analysis, tuning = analyse(comparison), find_tuning(comparison, tolerance)
    figures = build_figures(analysis) if pictures else []
    drawn = [*([tuning_figure(comparison, tuning)] if pictures and tuning is not None else []), *figures]
    tables = [*build_tables(analysis), *([tuning_table(tuning)] if tuning else []), provenance_table(comparison)]
    files = {f"tables/{table.name}.csv": table_csv(table).encode() for table in tables}
    files["report.md"] = render_markdown(analysis, drawn, tolerance=tolerance).encode()
    for figure in drawn:
        files[f"figures/{figure.name}.csv"] = write_csv(figure.rows).encode()
        files[f"figures/{figure.name}.svg"] = draw_static(comparison, figure)["svg"]
    if pictures:
        for at, picture in enumerate(find_pictures(comparison)):
            files[f"figures/{file_name(at)}"] = draw_detections(picture).encode()
        files["report.html"] = render_page(analysis, figures, tolerance=tolerance).encode()
    home = comparison.folder / "report"
    for place in (home, *(home / part for part in MADE)):
        if not place.resolve().is_relative_to(comparison.folder.resolve()):
            said = f"is a link that leads out of {comparison.folder}, to {place.resolve()}"
            raise RunRecordError(place, said, "Remove it.")
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


def render_markdown(analysis: Analysis, figures: Sequence[Figure], *, tolerance: float | None = None) -> str:
    """Markdown of a comparison, to stand beside the folders `figures` and `tables`; without figures, to stand alone."""
    comparison, metric = analysis.comparison, analysis.comparison.result
    recipe = f"Recipe {comparison.recipe or 'not recorded'}, scale {comparison.scale or 'not recorded'}"
    judged = f"judged by {metric.name} ({metric.better}){judged_from(comparison)}"
    seeds = f"seeds {', '.join(map(str, comparison.seeds))}; baseline {comparison.baseline}."
    lines = [
        f"# {plain_markdown(comparison.title)}", "", f"**{plain_markdown(bottom_line(analysis))}**", "",
        plain_markdown(f"{recipe}; data: {data_of(comparison)}; {judged}; {seeds}"), "",
        *(("With plots to point at: [report.html](report.html).", "") if figures else ()),
        *((plain_markdown(comparison.notes), "") if comparison.notes else ()),
        "## Findings", "", *(f"- {plain_markdown(finding)}" for finding in find_findings(analysis)), "",
    ]  # fmt: skip
    tuning = find_tuning(comparison, tolerance)
    for table in [*build_tables(analysis), *([tuning_table(tuning)] if tuning is not None else [])]:
        link = [f"[CSV](tables/{table.name}.csv)", ""] if figures else []
        lines += [f"## {table.title}", "", table_markdown(table), "", *link]
    lines += samples_markdown(find_samples(comparison))
    lines += detections_markdown(find_pictures(comparison), files=bool(figures))
    lines += ["## Figures", ""] if figures else []
    for figure in figures:
        title = plain_markdown(figure.title)
        lines += [f"### {title}", "", f"![{title}](figures/{figure.name}.svg)", ""]
        lines += [f"{plain_markdown(figure.caption)} [CSV](figures/{figure.name}.csv)", ""]
    provenance = provenance_table(comparison)
    return "\n".join([*lines, f"## {provenance.title}", "", table_markdown(provenance)]) + "\n"


@dataclass
class Tab:
    """One part of the page, with an address of its own."""

    title: str
    lead: str
    parts: list[Part] = field(default_factory=list)

    @property
    def id(self) -> str:
        """What stands behind the # of its address."""
        return self.title.lower()

    def add(self, kind: str, **content: Any) -> None:
        """Add a part, of a kind that the template knows."""
        self.parts.append({"kind": kind, **content})


def render_page(analysis: Analysis, figures: Sequence[Figure] | None = None, *, tolerance: float | None = None) -> str:
    """HTML of a comparison as one self-contained file; the same records give the same bytes.

    Args:
        analysis: of the comparison.
        figures: where they are there already.
        tolerance: see `find_tuning`.

    Raises: MissingExtraError if plotly or jinja2 is not installed.
    """
    comparison = analysis.comparison
    figures = build_figures(analysis) if figures is None else figures
    tabs = {title: Tab(title, lead) for title, lead in TABS.items()}
    drawings: dict[str, Plot] = {}
    tabs["Summary"].add("bottom line", text=bottom_line(analysis))
    tabs["Runs"].add("facts", facts=_facts(comparison))
    tuning = find_tuning(comparison, tolerance)
    if tuning is not None:
        tabs[TUNING].parts.append(_figure(comparison, [tuning_figure(comparison, tuning)], drawings))
        tabs[TUNING].add("table", table=tuning_table(tuning))
    for _, group in groupby(figures, key=lambda figure: figure.name if figure.kind != "map_by_method" else ""):
        listed = list(group)
        tab, name, part = tabs[listed[0].section], listed[0].name, _figure(comparison, listed, drawings)
        if name in FOLDED:
            tab.add("folded figures", title=FOLDED[name], figures=[part])
        else:
            tab.parts.append(part)
    for table in build_tables(analysis):
        tabs[TABLE_TABS[table.name]].add("table", table=without_empty_columns(table))
    tabs["Summary"].add("folded list", title="What else the numbers say", lines=find_remarks(analysis))
    for prompt, samples in find_samples(comparison).items():
        tabs["Samples"].add("samples", title=sample_heading(prompt), samples=samples)
    tabs["Detections"].parts += detection_parts(find_pictures(comparison))
    tabs["Runs"].add("folded table", table=provenance_table(comparison))
    metric = comparison.result
    return render(
        "comparison.html",
        title=comparison.title,
        lead=f"Judged by {metric.name}, {metric.better}; {show_seeds(len(comparison.seeds))}; baseline "
        f"{comparison.baseline}; scale {comparison.scale or 'not recorded'}.",
        tabs=[tab for tab in tabs.values() if tab.parts or tab.title not in OPTIONAL],
        measured=any(analysis.heads.values()),
        num_colours=NUM_COLOURS,
        drawings=drawings,
    )


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    metric = comparison.result
    facts = [
        ("Recipe", f"{comparison.recipe or 'not recorded'}, scale {comparison.scale or 'not recorded'}"),
        ("Data", data_of(comparison)),
        ("Model", str(comparison.runs[0].part("model").get("name") or "not recorded")),
        ("Judged by", f"{metric.name}, {metric.better}{judged_from(comparison)}"),
        ("Seeds", f"{', '.join(map(str, comparison.seeds))}; baseline {comparison.baseline}"),
    ]
    return [*facts, ("Notes", comparison.notes)] if comparison.notes else facts


def _figure(comparison: Comparison, figures: Sequence[Figure], drawings: dict[str, Plot]) -> Part:
    """A figure of the page; heat maps at the end are several figures, of which two are shown side by side."""
    first, several = figures[0], len(figures) > 1
    boxes = []
    for figure in figures:
        for at, (title, plot) in enumerate(plots(comparison, figure)):
            name = f"{figure.name.replace('_', '-')}-{at}"
            drawings[name] = plot
            heading = title or (figure.title if several else "")
            label = f"{figure.title}: {title}" if title and title != figure.title else figure.title
            boxes.append({"id": name, "title": heading if heading != first.title or several else "", "label": label})
    drawn = sorted({trace["meta"] for box in boxes for trace in drawings[box["id"]]["data"] if "meta" in trace})
    wide, is_map = first.kind in ("stack", "intervals", "bars") or len(boxes) == 1, first.kind.startswith("map")
    return {
        "kind": "figure",
        "id": f"figure-{first.name.replace('_', '-')}",
        "title": "At the end, layer by method" if several else first.title,
        "caption": first.caption,
        "boxes": boxes,
        "legend": [(at, comparison.methods[at]) for at in drawn if first.kind in ("lines", "tuned")],
        "choices": is_map and len(boxes) > 2,
        "layout": "wide" if wide else "two" if is_map else "",
    }
