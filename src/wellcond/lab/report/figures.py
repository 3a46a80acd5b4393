"""`build_figures`: every figure of a comparison, in the order in which they are shown."""

from __future__ import annotations

import math

from wellcond.lab.report.analysis import Analysis
from wellcond.lab.report.conditioning_figures import conditioning_figures
from wellcond.lab.report.series import HIGH_END, LOW_END, MEAN, Figure, Panel, Row
from wellcond.lab.report.training_figures import training_figures


def build_figures(analysis: Analysis) -> list[Figure]:
    """Figures with at least one row."""
    first = _differences(analysis)
    return [*([first] if first.rows else []), *training_figures(analysis), *conditioning_figures(analysis)]


def _differences(analysis: Analysis) -> Figure:
    comparison, metric = analysis.comparison, analysis.comparison.result
    rows = []
    for method, difference in analysis.differences.items():
        if not difference.count:
            continue
        low, high = difference.interval or (math.nan, math.nan)
        points = {str(seed): value for seed, value in difference.values.items()}
        points |= {MEAN: difference.mean, LOW_END: low, HIGH_END: high}
        for seed, value in points.items():
            shown = value * metric.scale
            rows.append(Row("differences", "metric", method, seed, math.nan, math.nan, shown, comparison.scale))
    unit = f" ({metric.unit.strip()})" if metric.unit else ""
    panel = Panel("metric", "", f"gain in {metric.name}{unit}")
    caption = (
        f"To the right of the dotted line is better than {comparison.baseline}; a bar is the 95 % interval of the mean "
        "over seeds, small dots are seeds. A bar across the line is no evidence. A triangle at the edge is a method "
        "beyond the axis, with its mean and interval."
    )
    return Figure("differences", "Summary", "Paired differences", caption, "intervals", (panel,), tuple(rows))
