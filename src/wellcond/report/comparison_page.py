"""`render_comparison`: one self-contained page about one comparison, with plots to point at. No network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from wellcond.errors import MissingExtraError
from wellcond.report.analysis import Analysis, analyse
from wellcond.report.detection_records import find_pictures
from wellcond.report.detections import LEAD as DETECTIONS_LEAD
from wellcond.report.detections import STYLE as DETECTIONS_STYLE
from wellcond.report.detections import detections_html
from wellcond.report.figures import build_figures
from wellcond.report.load_runs import Comparison
from wellcond.report.markup import Markup, tag
from wellcond.report.page_script import EXTRA_STYLE, SCRIPT
from wellcond.report.plotly_figures import plots
from wellcond.report.provenance import data_of, provenance_table
from wellcond.report.reading import find_findings
from wellcond.report.samples import LEAD, find_samples, samples_html
from wellcond.report.samples import STYLE as SAMPLE_STYLE
from wellcond.report.series import Figure
from wellcond.report.shapes import NUM_COLOURS
from wellcond.report.style import STYLE
from wellcond.report.table import Table, table_html
from wellcond.report.tables import build_tables, judged_from
from wellcond.report.tuning import LEAD as TUNING_LEAD
from wellcond.report.tuning import SECTION as TUNING
from wellcond.report.tuning import find_tuning, tuning_figure, tuning_table

TABS = {
    "Summary": "What the numbers say, and the numbers.",
    "Learning": "How the runs go, from the first step to the last.",
    "Matching": "How much earlier a method is as good as the baseline is at its end.",
    "Conditioning": "Condition numbers of weights and Jacobians over training.",
    "Layers": "The same, layer by layer.",
    "Attention": "Where attention goes; a saturated softmax does not learn.",
    "Cost": "Time and memory.",
    "Runs": "Every run, and how it was made.",
}
TABLE_TABS = {
    "summary": "Summary", "required": "Summary", "matching": "Matching", "conditioning": "Conditioning",
    "other_metrics": "Summary", "cost": "Cost", "statistics": "Runs", "statistics_evaluation": "Runs", "seeds": "Runs",
}  # fmt: skip


def render_comparison(comparison: Comparison) -> str:
    """HTML of a comparison; the same records give the same bytes.

    Raises: MissingExtraError if plotly is not installed.
    """
    return render_page(analyse(comparison))


def render_page(analysis: Analysis, figures: Sequence[Figure] | None = None, *, tolerance: float | None = None) -> str:
    """Like `render_comparison`, for an analysis and figures that are there already; see `find_tuning`."""
    comparison = analysis.comparison
    figures = build_figures(analysis) if figures is None else figures
    tuning = find_tuning(comparison, tolerance)
    drawings: dict[str, dict[str, Any]] = {}
    samples, pictures = find_samples(comparison), find_pictures(comparison)
    bodies = {name: [tag("p", lead, class_="lead")] for name, lead in TABS.items()}
    for table in build_tables(analysis):
        bodies[TABLE_TABS[table.name]].append(_table_section(table))
    bodies["Summary"].insert(2, _findings(analysis))
    if tuning is not None:
        table, figure = tuning_table(tuning), tuning_figure(comparison, tuning)
        parts = [_figure_section(comparison, figure, drawings), _table_section(table)]
        bodies = _after_summary(bodies, TUNING, [tag("p", TUNING_LEAD, class_="lead"), *parts])
    for figure in figures:
        bodies[figure.section].append(_figure_section(comparison, figure, drawings))
    settings = provenance_table(comparison)
    bodies["Runs"].append(tag("details", tag("summary", settings.title), table_html(settings)))
    if samples:
        bodies = _before_runs(bodies, "Samples", [tag("p", LEAD, class_="lead"), *samples_html(samples)])
    if pictures:
        lead = tag("p", DETECTIONS_LEAD, class_="lead")
        bodies = _before_runs(bodies, "Detections", [lead, *detections_html(pictures)])
    for parts in bodies.values():
        if len(parts) == 1:
            parts.append(tag("p", _nothing(analysis)))
    links = [tag("a", name, href=f"#{name.lower()}") for name in bodies]
    sections = [
        tag("section", tag("h2", name), *parts, id=name.lower(), class_="tab") for name, parts in bodies.items()
    ]
    scriptless = tag(
        "noscript",
        tag("p", "The plots of this page need JavaScript; the same figures are image files in the folder figures."),
    )
    body = [
        _header(comparison), _methods(comparison), scriptless, tag("nav", *links, class_="tabs", aria_label="Parts"),
        *sections, tag("footer", "Made by wellcond from stored run records. This page is one file and loads nothing."),
    ]  # fmt: skip
    styles = [STYLE, EXTRA_STYLE]
    styles += [SAMPLE_STYLE] if samples else []
    styles += [DETECTIONS_STYLE] if pictures else []
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", comparison.title),
        tag("style", Markup("\n".join(styles))),
    )
    scripts = [
        tag("script", script_json(drawings), type="application/json", id="plot-data"),
        tag("script", Markup(plotly_source())),
        tag("script", Markup(SCRIPT)),
    ]
    page = tag("html", head, tag("body", tag("main", *body), *scripts), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _before_runs(bodies: dict[str, list[Markup]], name: str, body: list[Markup]) -> dict[str, list[Markup]]:
    """Tabs with one more before the last."""
    *others, last = bodies.items()
    return dict([*others, (name, body), last])


def _after_summary(bodies: dict[str, list[Markup]], name: str, body: list[Markup]) -> dict[str, list[Markup]]:
    """Tabs with one more after the first."""
    first, *others = bodies.items()
    return dict([first, (name, body), *others])


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


def script_json(data: Any) -> Markup:
    r"""JSON that may stand inside a script element: nothing in it can end the element.

    Example:
        >>> script_json({"a": "</script>"})
        '{"a":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026"))


def _header(comparison: Comparison) -> Markup:
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
    if comparison.notes:
        facts.append(("Notes", comparison.notes))
    rows = [part for name, text in facts for part in (tag("dt", name), tag("dd", text))]
    return tag("header", tag("h1", comparison.title), tag("dl", *rows))


def _methods(comparison: Comparison) -> Markup:
    """Legend of all plots, whose entries show and hide their method."""
    items = []
    for at, method in enumerate(comparison.methods):
        chip = tag("span", class_=f"chip b{at % NUM_COLOURS} d{at // NUM_COLOURS % 4}", aria_hidden="true")
        button = tag("button", chip, method, type="button", data_method=at, aria_pressed="true")
        items.append(tag("li", button))
    return tag("ul", *items, class_="methods", aria_label="Methods; press to hide or show in the plots")


def _findings(analysis: Analysis) -> Markup:
    items = [tag("li", finding) for finding in find_findings(analysis)]
    return tag("section", tag("h3", "Findings"), tag("ul", *items, class_="notes"))


def _table_section(table: Table) -> Markup:
    return tag("section", tag("h3", table.title), table_html(table))


def _figure_section(comparison: Comparison, figure: Figure, drawings: dict[str, dict[str, Any]]) -> Markup:
    boxes = []
    for at, (title, plot) in enumerate(plots(comparison, figure)):
        name = f"{figure.name.replace('_', '-')}-{at}"
        drawings[name] = plot
        heading = tag("h4", title) if title and title != figure.title else Markup("")
        label = f"{figure.title}: {title}" if heading else figure.title
        boxes.append(tag("div", heading, tag("div", id=name, class_="plot", role="img", aria_label=label)))
    wide = " wide" if figure.kind in ("stack", "map_by_method", "intervals") or len(boxes) == 1 else ""
    wide = wide or (" two" if figure.kind == "bars" else "")
    caption = tag("p", figure.caption, class_="lead")
    return tag(
        "section", tag("h3", figure.title), caption, tag("div", *boxes, class_=f"plots{wide}"),
        class_="half" if figure.kind == "map_by_method" else None,
    )  # fmt: skip


def _nothing(analysis: Analysis) -> str:
    if not any(analysis.heads.values()):
        return "Nothing to show: these runs have no conditioning rows (conditioning.jsonl), so nothing was measured."
    return "Nothing to show: what was recorded holds no such numbers."
