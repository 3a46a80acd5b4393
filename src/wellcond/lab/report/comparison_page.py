"""`render_comparison`: one self-contained page about one comparison, with plots to point at. No network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from wellcond.errors import MissingExtraError
from wellcond.lab.report.analysis import Analysis, analyse
from wellcond.lab.report.bottom_line import bottom_line
from wellcond.lab.report.detection_records import find_pictures
from wellcond.lab.report.detections import LEAD as DETECTIONS_LEAD
from wellcond.lab.report.detections import detection_parts
from wellcond.lab.report.figures import build_figures
from wellcond.lab.report.load_runs import Comparison
from wellcond.lab.report.markup import Markup
from wellcond.lab.report.plotly_figures import Plot, plots
from wellcond.lab.report.provenance import data_of, provenance_table
from wellcond.lab.report.reading import find_remarks
from wellcond.lab.report.render import render
from wellcond.lab.report.samples import LEAD as SAMPLES_LEAD
from wellcond.lab.report.samples import find_samples, sample_parts
from wellcond.lab.report.series import Figure
from wellcond.lab.report.shapes import NUM_COLOURS
from wellcond.lab.report.table import without_empty_columns
from wellcond.lab.report.tables import build_tables, judged_from
from wellcond.lab.report.tuning import LEAD as TUNING_LEAD
from wellcond.lab.report.tuning import SECTION as TUNING
from wellcond.lab.report.tuning import find_tuning, tuning_figure, tuning_table
from wellcond.lab.report.values import show_seeds

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


def render_comparison(comparison: Comparison) -> str:
    """HTML of a comparison; the same records give the same bytes.

    Raises: MissingExtraError if plotly or jinja2 is not installed.
    """
    return render_page(analyse(comparison))


def render_page(analysis: Analysis, figures: Sequence[Figure] | None = None, *, tolerance: float | None = None) -> str:
    """Like `render_comparison`, for an analysis and figures that are there already; see `find_tuning`."""
    comparison = analysis.comparison
    figures = build_figures(analysis) if figures is None else figures
    tuning = find_tuning(comparison, tolerance)
    tabs = {title: Tab(title, lead) for title, lead in TABS.items()}
    drawings: dict[str, Plot] = {}
    tabs["Summary"].parts.append({"kind": "bottom line", "text": bottom_line(analysis)})
    tabs["Runs"].parts.append({"kind": "facts", "facts": _facts(comparison)})
    if tuning is not None:
        tabs[TUNING].parts = [_figure(comparison, [tuning_figure(comparison, tuning)], drawings)]
        tabs[TUNING].parts.append({"kind": "table", "table": tuning_table(tuning)})
    for _, group in groupby(figures, key=lambda figure: figure.name if figure.kind != "map_by_method" else ""):
        listed = list(group)
        part = _figure(comparison, listed, drawings)
        name = listed[0].name
        if name in FOLDED:
            part = {"kind": "folded figures", "title": FOLDED[name], "figures": [part]}
        tabs[listed[0].section].parts.append(part)
    for table in build_tables(analysis):
        tabs[TABLE_TABS[table.name]].parts.append({"kind": "table", "table": without_empty_columns(table)})
    remarks = find_remarks(analysis)
    tabs["Summary"].parts.append({"kind": "folded list", "title": "What else the numbers say", "lines": remarks})
    tabs["Samples"].parts += sample_parts(find_samples(comparison))
    tabs["Detections"].parts += detection_parts(find_pictures(comparison))
    tabs["Runs"].parts.append({"kind": "folded table", "table": provenance_table(comparison)})
    return render(
        "comparison.html",
        title=comparison.title,
        lead=_lead(comparison),
        tabs=[tab for tab in tabs.values() if tab.parts or tab.title not in OPTIONAL],
        nothing=_nothing(analysis),
        num_colours=NUM_COLOURS,
        drawings=drawings,
        plotly=Markup(plotly_source()),
    )


def plotly_source() -> str:
    """The plotting library, to be part of the page.

    Raises: MissingExtraError if it is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtraError("plotly", "report") from error
    source: str = get_plotlyjs()
    assert "</script" not in source.lower(), "plotly's own text would end the script element"
    return source


def _lead(comparison: Comparison) -> str:
    """What a reader must know before the numbers, in one line."""
    metric = comparison.result
    better = "higher is better" if metric.higher_is_better else "lower is better"
    return (
        f"Judged by {metric.name}, {better}; {show_seeds(len(comparison.seeds))}; baseline {comparison.baseline}; "
        f"scale {comparison.scale or 'not recorded'}."
    )


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    model = comparison.runs[0].record.get("model") or {}
    metric = comparison.result
    better = "higher is better" if metric.higher_is_better else "lower is better"
    facts = [
        ("Recipe", f"{comparison.recipe or 'not recorded'}, scale {comparison.scale or 'not recorded'}"),
        ("Data", data_of(comparison)),
        ("Model", str(model.get("name") or "not recorded")),
        ("Judged by", f"{metric.name}, {better}{judged_from(comparison)}"),
        ("Seeds", f"{', '.join(map(str, comparison.seeds))}; baseline {comparison.baseline}"),
    ]
    return [*facts, ("Notes", comparison.notes)] if comparison.notes else facts


def _figure(comparison: Comparison, figures: Sequence[Figure], drawings: dict[str, Plot]) -> Part:
    """A figure of the page; heat maps at the end are several figures, of which two are shown side by side."""
    first = figures[0]
    boxes = []
    for figure in figures:
        for at, (title, plot) in enumerate(plots(comparison, figure)):
            name = f"{figure.name.replace('_', '-')}-{at}"
            drawings[name] = plot
            heading = title or (figure.title if len(figures) > 1 else "")
            label = f"{figure.title}: {title}" if title and title != figure.title else figure.title
            boxes.append({"id": name, "title": heading if heading != first.title or len(figures) > 1 else "",
                          "label": label})  # fmt: skip
    drawn = sorted({trace["meta"] for box in boxes for trace in drawings[box["id"]]["data"] if "meta" in trace})
    with_legend = first.kind in ("lines", "tuned")
    wide = first.kind in ("stack", "intervals", "bars") or len(boxes) == 1
    return {
        "kind": "figure",
        "id": f"figure-{first.name.replace('_', '-')}",
        "title": first.title if len(figures) == 1 else "At the end, layer by method",
        "caption": first.caption,
        "boxes": boxes,
        "legend": [{"place": at, "name": comparison.methods[at]} for at in drawn] if with_legend else [],
        "choices": first.kind.startswith("map") and len(boxes) > 2,
        "layout": "wide" if wide else "two" if first.kind.startswith("map") else "",
    }


def _nothing(analysis: Analysis) -> str:
    if not any(analysis.heads.values()):
        return "Nothing to show: these runs have no conditioning rows (conditioning.jsonl), so nothing was measured."
    return "Nothing to show: what was recorded holds no such numbers."
