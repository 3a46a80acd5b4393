"""`build_report`: page, markdown, figures and tables of every comparison below a folder. No network.

Pages come from the jinja2 templates of this package, which escape every text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellcond import pages
from wellcond.files import write_atomically
from wellcond.lab.records import Comparison, check_stays_inside, leaves_of, load_comparisons
from wellcond.lab.report.analysis import Analysis, analyse, bottom_line, find_findings
from wellcond.lab.report.draw import NUM_COLOURS, draw_panels, draw_static
from wellcond.lab.report.figures import Figure, build_figures, write_csv
from wellcond.lab.report.heads import FILE, MonitoredRun, find_heads
from wellcond.lab.report.names import readable, rename
from wellcond.lab.report.samples import detections_markdown, find_pictures, find_samples, samples_markdown
from wellcond.lab.report.table import (
    Table,
    in_order,
    plain_markdown,
    plain_setting,
    show_range,
    table_csv,
    table_markdown,
    visible,
    without_empty_columns,
)
from wellcond.lab.report.tables import build_tables
from wellcond.lab.report.tuning import find_tuning, tuning_figure, tuning_table
from wellcond.training.heads_map import STYLE

TABS = {
    "Summary": ("summary", "required", "other_metrics"),
    "Tuning": ("tuning",),
    "Learning": (),
    "Matching": ("matching",),
    "Conditioning": ("conditioning",),
    "Attention": (),
    "Heads": (),
    "Cost": ("cost",),
    "Samples": (),
    "Detections": (),
    "Runs": ("labels", "statistics", "seeds"),
}
"""Tabs of the page, each with its tables; figures name theirs."""
MOST_SHOWN = 4
"""Values of a setting that differs between runs."""


@dataclass(frozen=True)
class Content:
    """All that is shown of a comparison: as a page, as markdown, and as files."""

    analysis: Analysis
    tables: list[Table]
    provenance: Table
    figures: list[Figure] | None
    """None: there is no page, and `report.md` stands alone."""
    samples: dict[str, list[dict[str, str]]]
    pictures: list[dict[str, Any]]
    heads: list[MonitoredRun]

    @property
    def shown_tables(self) -> list[Table]:
        """For people: methods from the best to the worst, as in the figure of differences."""
        return [in_order(table, self.analysis.best_first) for table in self.tables]


def gather(analysis: Analysis, *, figures: bool = True) -> Content:
    """Tables, figures and samples of a comparison, computed once."""
    comparison, tables, drawn = analysis.comparison, build_tables(analysis), build_figures(analysis) if figures else []
    if tuning := find_tuning(comparison):
        tables, figure = [*tables, tuning_table(tuning)], tuning_figure(comparison, tuning).drawable()
        drawn = [figure, *drawn] if figure.panels else drawn  # nothing to draw where every run of the search diverged
    samples, pictures = find_samples(comparison), find_pictures(comparison)
    is_monitored = any((run.folder / FILE).is_file() for run in comparison.runs)
    heads = find_heads(comparison) if figures and is_monitored else []
    return Content(analysis, tables, provenance_table(comparison), drawn if figures else None, samples, pictures, heads)


def build_report(folder: Path, *, pictures: bool = True) -> list[Path]:
    """Write `report/` into the folder of every comparison found; without pictures only `report.md` and the tables.

    Returns: path of every `report.html`, or `report.md`. The same records give the same files.
    """
    return [write_report(gather(analyse(found), figures=pictures)) for found in load_comparisons(folder)]


def write_report(content: Content) -> Path:
    """Write the report of a comparison; without figures, no page. Nothing is written if a record is broken."""
    folder, figures = content.analysis.comparison.folder, content.figures
    files: dict[str, str | bytes] = {"report.md": render_markdown(content)}
    files |= {f"tables/{table.name}.csv": table_csv(table) for table in (*content.tables, content.provenance)}
    if figures is not None:
        files["report.html"] = render_page(content)
    for figure in figures or ():
        files[f"figures/{figure.name}.csv"] = write_csv(figure)
        files[f"figures/{figure.name}.svg"] = draw_static(figure)
    home = folder / "report"
    check_stays_inside(folder, (home, home / "figures", home / "tables"))
    for name, made in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(home / name, made)
    for path in [*home.glob("figures/*"), *home.glob("tables/*")] if figures is not None else ():
        if path.suffix in (".csv", ".svg", ".png") and path.relative_to(home).as_posix() not in files:
            path.unlink()  # of an older report
    return home / ("report.md" if figures is None else "report.html")


def _facts(comparison: Comparison) -> dict[str, str]:
    """What ran, and what it is judged by."""
    metric, data = comparison.result, next((run.part("data") for run in comparison.runs if run.part("data")), {})
    tested = f", {comparison.tested_weights}; curves and matching are of the evaluation set"
    facts = {
        "Recipe": f"{comparison.recipe or 'not recorded'}, scale {comparison.scale or 'not recorded'}",
        "Data": str(data.get("description") or data.get("name") or "not recorded"),
        "Model": str(comparison.runs[0].part("model").get("name") or "not recorded"),
        "Judged by": f"{metric.name} ({metric.better}){tested if comparison.tested else ''}",
        "Seeds": f"{show_range(comparison.seeds)}; baseline {comparison.baseline}",
    }
    return facts | ({"Notes": comparison.notes} if comparison.notes else {})


def provenance_table(comparison: Comparison) -> Table:
    """With which versions, on what, and with which settings the runs were made: what they share, where they differ."""
    runs = comparison.runs
    known = [(part, key, value) for part in ("data", "model") for key, value in sorted(runs[0].part(part).items())]
    rows = [(f"{part}: {key}", plain_setting(value)) for part, key, value in known]
    sessions = _shared([session for run in runs for session in run.sessions])
    rows += [(f"session: {key}", text) for key, text in sessions if key not in ("started", "resumed_at_step")]
    if resumed := sum(len(run.sessions) > 1 for run in runs):
        rows.append(("resumed runs", str(resumed)))
    rows += [(f"recipe: {key}", text) for key, text in _shared([run.part("config") for run in runs])]
    return Table("provenance", "Versions, machine and settings", ("item", "value"), tuple(rows), (), frozenset({0, 1}))


def _shared(mappings: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Settings of several runs with dotted names, and which of their values differ."""
    flat = [{".".join(path): plain_setting(value) for path, value in leaves_of(mapping)} for mapping in mappings]
    found = []
    for key in sorted({key for settings in flat for key in settings}):
        values = list(dict.fromkeys(settings.get(key, "not set") for settings in flat))
        more = f" and {len(values) - MOST_SHOWN} more" if len(values) > MOST_SHOWN else ""
        differing = f"differs between runs: {'; '.join(values[:MOST_SHOWN])}{more}"
        found.append((key, values[0] if len(values) == 1 else differing))
    return found


def render_markdown(content: Content) -> str:
    """Markdown of a comparison, to stand beside the folders `figures` and `tables`; without figures, to stand alone."""
    comparison, facts = content.analysis.comparison, _facts(content.analysis.comparison)
    lines = [
        f"# {plain_markdown(comparison.title)}",
        "",
        f"**{plain_markdown(bottom_line(content.analysis))}**",
        "",
        plain_markdown(
            f"Recipe {facts['Recipe']}; data: {facts['Data']}; judged by {facts['Judged by']}; seeds {facts['Seeds']}."
        ),
        "",
        *(("With plots to point at: [report.html](report.html).", "") if content.figures else ()),
        *((plain_markdown(comparison.notes), "") if comparison.notes else ()),
    ]
    if findings := find_findings(content.analysis):
        lines += ["## Findings", "", *(f"- {plain_markdown(finding)}" for finding in findings), ""]
    for table in content.shown_tables:
        link = [f"[CSV](tables/{table.name}.csv)", ""] if content.figures else []
        lines += [f"## {table.title}", "", table_markdown(table), "", *link]
    lines += [*samples_markdown(content.samples), *detections_markdown(content.pictures)]
    lines += ["## Figures", ""] if content.figures else []
    for figure in content.figures or ():
        title = plain_markdown(figure.title)
        lines += [f"### {title}", "", f"![{title}](figures/{figure.name}.svg)", ""]
        lines += [f"{plain_markdown(figure.caption)} [CSV](figures/{figure.name}.csv)", ""]
    lines += [f"## {content.provenance.title}", "", table_markdown(content.provenance)]
    return "\n".join(lines) + "\n"


def _labels_table(methods: Sequence[str]) -> Table:
    """What to type for the methods that the page names otherwise; without rows if it names none."""
    rows = [
        {"name here": readable(label), "as --methods takes it": label} for label in methods if readable(label) != label
    ]
    return Table.of("labels", "Names of methods", rows, (), (0, 1))


def render_page(content: Content) -> str:
    """HTML of a comparison as one self-contained file; the same records give the same bytes."""
    methods = content.analysis.comparison.methods
    shown = [without_empty_columns(table) for table in content.shown_tables]
    tables = {table.name: table.change_texts(lambda text: rename(text, methods)) for table in shown}
    tables |= {"labels": _labels_table(methods)}
    environment = pages.environment("wellcond.lab.report")
    drawn = [(figure, draw_panels(figure)) for figure in content.figures or ()]
    tabs = {
        title: ([one for one in drawn if one[0].section == title], [tables[name] for name in names if name in tables])
        for title, names in TABS.items()
    }
    has_more = {"Samples": bool(content.samples), "Detections": bool(content.pictures), "Heads": bool(content.heads)}
    environment.filters |= {
        "named": lambda text: rename(text, methods),
        "visible": visible,
        "px": lambda value: f"{value:.6g}",
    }
    return environment.get_template("comparison.html").render(
        comparison=content.analysis.comparison,
        facts=_facts(content.analysis.comparison),
        bottom_line=bottom_line(content.analysis),
        findings=find_findings(content.analysis),
        content=content,
        tabs={title: shown for title, shown in tabs.items() if any(shown) or has_more.get(title)},
        num_colours=NUM_COLOURS,
        style_of_maps=STYLE,
    )
