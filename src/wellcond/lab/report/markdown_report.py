"""`render_markdown`: tables, findings and links to the figures, for a repository or a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from wellcond.lab.report.analysis import Analysis
from wellcond.lab.report.detection_records import find_pictures
from wellcond.lab.report.detections import detections_markdown
from wellcond.lab.report.provenance import data_of, provenance_table
from wellcond.lab.report.reading import find_findings
from wellcond.lab.report.samples import find_samples, samples_markdown
from wellcond.lab.report.series import Figure
from wellcond.lab.report.table import plain_markdown, table_markdown
from wellcond.lab.report.tables import build_tables, judged_from
from wellcond.lab.report.tuning import find_tuning, tuning_table


def render_markdown(analysis: Analysis, figures: Sequence[Figure], *, tolerance: float | None = None) -> str:
    """Markdown of a comparison, to stand beside the folders `figures` and `tables`; without figures, to stand alone."""
    comparison, metric = analysis.comparison, analysis.comparison.result
    better = "higher is better" if metric.higher_is_better else "lower is better"
    lines = [
        f"# {plain_markdown(comparison.title)}",
        "",
        plain_markdown(
            f"Recipe {comparison.recipe or 'not recorded'}, scale {comparison.scale or 'not recorded'}; data: "
            f"{data_of(comparison)}; judged by {metric.name} ({better}){judged_from(comparison)}; "
            f"seeds {', '.join(map(str, comparison.seeds))}; baseline {comparison.baseline}."
        ),
        "",
        *(("With plots to point at: [report.html](report.html).", "") if figures else ()),
    ]
    if comparison.notes:
        lines += [plain_markdown(comparison.notes), ""]
    lines += ["## Findings", "", *(f"- {plain_markdown(finding)}" for finding in find_findings(analysis)), ""]
    tuning = find_tuning(comparison, tolerance)
    for table in [*build_tables(analysis), *([tuning_table(tuning)] if tuning is not None else [])]:
        link = [f"[CSV](tables/{table.name}.csv)", ""] if figures else []
        lines += [f"## {table.title}", "", table_markdown(table), "", *link]
    lines += samples_markdown(find_samples(comparison))
    detections = detections_markdown(find_pictures(comparison))
    lines += [line for line in detections if figures or not line.startswith("![")]
    lines += ["## Figures", ""] if figures else []
    for figure in figures:
        lines += [
            f"### {plain_markdown(figure.title)}",
            "",
            f"![{plain_markdown(figure.title)}](figures/{figure.name}.svg)",
            "",
            f"{plain_markdown(figure.caption)} [CSV](figures/{figure.name}.csv)",
            "",
        ]
    provenance = provenance_table(comparison)
    lines += [f"## {provenance.title}", "", table_markdown(provenance)]
    return "\n".join(lines) + "\n"
