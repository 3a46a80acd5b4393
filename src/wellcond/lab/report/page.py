"""`build_report`: page, markdown, figures and tables of every comparison below a folder. No network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellcond.files import write_atomically
from wellcond.lab.report.analysis import Analysis, analyse
from wellcond.lab.report.figures import Figure, build_figures, write_csv
from wellcond.lab.report.findings import bottom_line, find_findings
from wellcond.lab.report.load_runs import Comparison, load_comparisons
from wellcond.lab.report.plots import NUM_COLOURS, Plot, plots
from wellcond.lab.report.provenance import data_of, provenance_table
from wellcond.lab.report.records import RunRecordError
from wellcond.lab.report.render import plotly_source, render
from wellcond.lab.report.samples import (
    Picture,
    Sample,
    detection_parts,
    detections_markdown,
    find_pictures,
    find_samples,
    sample_heading,
    samples_markdown,
)
from wellcond.lab.report.static_figures import draw_static
from wellcond.lab.report.table import Table, plain_markdown, table_csv, table_markdown, without_empty_columns
from wellcond.lab.report.tables import build_tables
from wellcond.lab.report.tuning import find_tuning, tuning_figure, tuning_table
from wellcond.lab.report.values import show_seeds

MADE = {"figures": (".png", ".svg", ".csv"), "tables": (".csv",)}
TABS = {
    "Summary": "",
    "Tuning": "How the score depends on what was tuned, for each method, and what was chosen before the test.",
    "Learning": "",
    "Matching": "",
    "Conditioning": "",
    "Layers": "",
    "Attention": "",
    "Cost": "",
    "Samples": "What the models write after training, from the same random numbers. Words in bold were given.",
    "Detections": "What the models find in the first evaluation images after training, beside the truth. A colour is a "
    "category, the same in all pictures of an image; of the predictions the best are drawn, as many as there are "
    "objects but at least five, each with its score. Point at a box to read its label.",
    "Runs": "",
}
"""What stands above the parts of each."""
OPTIONAL = ("Tuning", "Samples", "Detections")
"""Tabs that are only there if they have something to show."""
TABLE_TABS = {
    "summary": "Summary", "required": "Summary", "other_metrics": "Summary", "tuning": "Tuning",
    "matching": "Matching", "conditioning": "Conditioning", "cost": "Cost",
}  # fmt: skip
"""All other tables are among the runs."""
FOLDED = {"weights_raw": "The weights without their corrections"}
"""Figures that a reader opens when a question leads there."""
Part = dict[str, Any]


@dataclass(frozen=True)
class Content:
    """All that is shown of a comparison: as a page, as markdown, and as files."""

    analysis: Analysis
    tables: list[Table]
    provenance: Table
    figures: list[Figure] | None
    """None: there is no page, and `report.md` stands alone."""
    samples: dict[str, list[Sample]]
    pictures: list[Picture]

    @property
    def comparison(self) -> Comparison:
        """The runs."""
        return self.analysis.comparison


def gather(analysis: Analysis, *, figures: bool = True) -> Content:
    """Tables, figures and samples of a comparison, computed once.

    Raises: RunRecordError on broken records.
    """
    comparison, tuning = analysis.comparison, find_tuning(analysis.comparison)
    return Content(
        analysis,
        [*build_tables(analysis), *([tuning_table(tuning)] if tuning else [])],
        provenance_table(comparison),
        [*([tuning_figure(comparison, tuning).drawable()] if tuning else []), *build_figures(analysis)]
        if figures
        else None,
        find_samples(comparison),
        find_pictures(comparison),
    )


def build_report(folder: Path, *, pictures: bool = True) -> list[Path]:
    """Write `report/` into the folder of every comparison found; the same records give the same files.

    Args:
        folder: any folder above `run.json` files.
        pictures: also draw figures and make the page; without, only `report.md` and the tables are written.

    Returns: path of every `report.html`, or `report.md` without pictures.

    Raises: as `write_report`.
    """
    found = load_comparisons(folder)
    return [write_report(gather(analyse(comparison), figures=pictures)) for comparison in found]


def write_report(content: Content) -> Path:
    """Write the report of a comparison; without figures, no page.

    Each file is replaced as a whole, so that a reader never sees half of one. Figures and tables of an older report
    that no longer exist are removed.

    Raises: RunRecordError on broken records, MissingExtraError without plotly or matplotlib; in both cases before
        anything is written.
    """
    comparison, figures = content.comparison, content.figures
    files = {f"tables/{table.name}.csv": table_csv(table) for table in (*content.tables, content.provenance)}
    files["report.md"] = render_markdown(content)
    images: dict[str, bytes] = {}
    if figures is not None:
        files["report.html"] = render_page(content)
    for figure in figures or ():
        files[f"figures/{figure.name}.csv"] = write_csv(figure)
        images[f"figures/{figure.name}.svg"] = draw_static(figure)
    home = comparison.folder / "report"
    for place in (home, *(home / part for part in MADE)):
        if not place.resolve().is_relative_to(comparison.folder.resolve()):
            said = f"is a link that leads out of {comparison.folder}, to {place.resolve()}"
            raise RunRecordError(place, said, "Remove it.")
    try:
        for name, made in (files | images).items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(home / name, made)
        for part, endings in MADE.items():
            for path in sorted((home / part).glob("*")) if figures is not None else ():
                if path.suffix in endings and f"{part}/{path.name}" not in files | images:
                    path.unlink()
    except OSError as error:
        raise RunRecordError(
            Path(error.filename or home),
            f"cannot be written: {error.strerror}",
            "Give yourself the right to write there, make room, or copy the runs elsewhere and report those.",
        ) from error
    return home / ("report.md" if figures is None else "report.html")


def _judged_from(comparison: Comparison) -> str:
    """What the name of the result leaves open, to stand behind it."""
    if not comparison.tested:
        return ""
    return f", {comparison.tested_weights}; curves and matching are of the evaluation set"


def _facts(comparison: Comparison) -> dict[str, str]:
    metric = comparison.result
    facts = {
        "Recipe": f"{comparison.recipe or 'not recorded'}, scale {comparison.scale or 'not recorded'}",
        "Data": data_of(comparison),
        "Model": str(comparison.runs[0].part("model").get("name") or "not recorded"),
        "Judged by": f"{metric.name}, {metric.better}{_judged_from(comparison)}",
        "Seeds": f"{', '.join(map(str, comparison.seeds))}; baseline {comparison.baseline}",
    }
    return facts | ({"Notes": comparison.notes} if comparison.notes else {})


def render_markdown(content: Content) -> str:
    """Markdown of a comparison, to stand beside the folders `figures` and `tables`; without figures, to stand alone."""
    analysis, comparison, metric = content.analysis, content.comparison, content.comparison.result
    recipe = f"Recipe {comparison.recipe or 'not recorded'}, scale {comparison.scale or 'not recorded'}"
    judged = f"judged by {metric.name} ({metric.better}){_judged_from(comparison)}"
    seeds = f"seeds {', '.join(map(str, comparison.seeds))}; baseline {comparison.baseline}."
    findings = find_findings(analysis)
    lines = [
        f"# {plain_markdown(comparison.title)}", "", f"**{plain_markdown(bottom_line(analysis))}**", "",
        plain_markdown(f"{recipe}; data: {data_of(comparison)}; {judged}; {seeds}"), "",
        *(("With plots to point at: [report.html](report.html).", "") if content.figures else ()),
        *((plain_markdown(comparison.notes), "") if comparison.notes else ()),
        *(("## Findings", "", *(f"- {plain_markdown(finding)}" for finding in findings), "") if findings else ()),
    ]  # fmt: skip
    for table in content.tables:
        link = [f"[CSV](tables/{table.name}.csv)", ""] if content.figures else []
        lines += [f"## {table.title}", "", table_markdown(table), "", *link]
    lines += samples_markdown(content.samples)
    lines += detections_markdown(content.pictures)
    lines += ["## Figures", ""] if content.figures else []
    for figure in content.figures or ():
        title = plain_markdown(figure.title)
        lines += [f"### {title}", "", f"![{title}](figures/{figure.name}.svg)", ""]
        lines += [f"{plain_markdown(figure.caption)} [CSV](figures/{figure.name}.csv)", ""]
    lines += [f"## {content.provenance.title}", "", table_markdown(content.provenance)]
    return "\n".join(lines) + "\n"


def render_page(content: Content) -> str:
    """HTML of a comparison as one self-contained file; the same records give the same bytes.

    Raises: MissingExtraError if plotly or jinja2 is not installed.
    """
    plotly_source()
    comparison, metric = content.comparison, content.comparison.result
    tabs: dict[str, list[Part]] = {title: [] for title in TABS}
    drawings: dict[str, Plot] = {}
    tabs["Summary"].append({"kind": "bottom line", "text": bottom_line(content.analysis)})
    tabs["Runs"].append({"kind": "facts", "facts": _facts(comparison)})
    for figure in content.figures or ():
        tabs[figure.section].append(figure_part(figure, drawings))
    for table in content.tables:
        shown = without_empty_columns(table)
        tabs[TABLE_TABS.get(table.name, "Runs")].append({"kind": "table", "table": shown, "title": table.title})
    if findings := find_findings(content.analysis):
        tabs["Summary"].append({"kind": "list", "fold": "What else the numbers say", "lines": findings})
    for prompt, samples in content.samples.items():
        tabs["Samples"].append({"kind": "samples", "title": sample_heading(prompt), "samples": samples})
    tabs["Detections"] += detection_parts(content.pictures)
    tabs["Runs"].append({"kind": "table", "fold": content.provenance.title, "table": content.provenance})
    return render(
        "comparison.html",
        title=comparison.title,
        lead=f"Judged by {metric.name}, {metric.better}; {show_seeds(len(comparison.seeds))}; baseline "
        f"{comparison.baseline}; scale {comparison.scale or 'not recorded'}.",
        tabs=[(title, TABS[title], parts) for title, parts in tabs.items() if parts or title not in OPTIONAL],
        measured=any(content.analysis.heads.values()),
        num_colours=NUM_COLOURS,
        drawings=drawings,
    )


def figure_part(figure: Figure, drawings: dict[str, Plot]) -> Part:
    """A figure of the page; its plots are added to the drawings."""
    name, boxes = figure.name.replace("_", "-"), []
    for at, (title, plot) in enumerate(plots(figure)):
        drawings[f"{name}-{at}"] = plot
        label = f"{figure.title}: {title}" if title else figure.title
        boxes.append({"id": f"{name}-{at}", "title": title, "label": label})
    drawn = sorted({trace["meta"] for box in boxes for trace in drawings[box["id"]]["data"] if "meta" in trace})
    return {
        "kind": "figure",
        "id": f"figure-{name}",
        "title": figure.title,
        "fold": FOLDED.get(figure.name, ""),
        "caption": figure.caption,
        "boxes": boxes,
        "legend": [(at, figure.methods[at]) for at in drawn if figure.kind == "lines"],
        "layout": "wide" if len(boxes) == 1 else "two" if figure.kind == "maps" else "",
    }
