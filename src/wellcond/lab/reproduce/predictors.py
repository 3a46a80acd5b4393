"""What predicts the outcome: rank correlations of numbers at step 0 with the score, over the methods of a task.

The numbers are measured by results/method/predictors.py and stored in predictors.json beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from wellcond.lab.records import Comparison
from wellcond.lab.report.draw import BETTER, COLOURS, GREY, subplots
from wellcond.lab.report.tuning import find_tuning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Measured = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Numbers by task, method and predictor."""
ByTask = dict[str, dict[str, float]]
"""Correlations by predictor and task."""
PREDICTORS = {
    "kappa_X": "κ(X) of the tokens",
    "kappa_J": "κ(J) over its non-zero spectrum",
    "kappa_W": "κ(W), mean of Q, K, V",
    "entropy": "entropy of the maps",
    "spread": "logits: distance of their spread from 1",
    "rho": "what the attention adds to the stream (ρ)",
    "rho_mlp": "what the MLP adds to the stream",
}
FEWEST = 6
"""Starts that a rank correlation needs."""


def outcomes(comparison: Comparison, methods: Iterable[str]) -> dict[str, dict[str, float]]:
    """Scores by method, higher is better: `best` is the test at the best rate; the others are rates of the search."""
    sign = 1.0 if comparison.result.higher_is_better else -1.0
    found = {"best": {method: sign * fmean(comparison.results(method).values()) for method in methods}}
    tuning = find_tuning(comparison)
    for row in tuning.methods if tuning is not None else ():
        for point in row.profile("optimizer.lr"):
            if row.label in found["best"] and math.isfinite(point.mean):
                found.setdefault(f"{point.values['optimizer.lr']:g}", {})[row.label] = sign * point.mean
    return found


def correlation(values: Mapping[str, Mapping[str, float]], scores: Mapping[str, float], predictor: str) -> float:
    """Spearman's, over the starts that have both; NaN of too few or of constants."""
    from scipy.stats import spearmanr

    both = [method for method in scores if predictor in values.get(method, {})]
    numbers = [values[method][predictor] for method in both]
    if len(both) < FEWEST or len(set(numbers)) < 2:
        return math.nan
    return float(spearmanr(numbers, [scores[method] for method in both]).statistic)


def interval(correlations: list[float]) -> tuple[float, float, float]:
    """Mean over tasks with its 95 % interval, on Fisher's scale."""
    from scipy.special import stdtrit

    z = np.arctanh(np.clip(correlations, -0.999, 0.999))
    half = float(stdtrit(len(z) - 1, 0.975)) * z.std(ddof=1) / math.sqrt(len(z))
    return tuple(math.tanh(value) for value in (z.mean(), z.mean() - half, z.mean() + half))  # type: ignore[return-value]


def correlations(comparisons: Mapping[str, Comparison], stored: Measured) -> tuple[ByTask, ByTask]:
    """Rank correlations with the test score at the best rate, and with the mean score over the rates of the search."""
    best: ByTask = {}
    rates: ByTask = {}
    for task, values in stored.items():
        comparison = comparisons[task]
        scores = outcomes(comparison, [method for method in comparison.methods if method in values])
        for predictor in PREDICTORS:
            best.setdefault(predictor, {})[task] = correlation(values, scores["best"], predictor)
            by_rate = [correlation(values, some, predictor) for rate, some in scores.items() if rate != "best"]
            known = [value for value in by_rate if math.isfinite(value)]
            rates.setdefault(predictor, {})[task] = fmean(known) if known else math.nan
    return best, rates


def markdown(best: ByTask, rates: ByTask) -> str:
    """predictors.md."""
    lines = [
        "# What predicts the outcome",
        "",
        "Made by `wellcond claims results`. Spearman's rank correlation, over the initialisations of a task, of a "
        "number at step 0 (mean over layers and two seeds) with the score; the mean over tasks has a 95 % interval "
        "over them. Methods that differ in their optimiser only are left out.",
        "",
        *_table("With the test score at each method's best rate", best),
        *_table("With the validation score at one rate for all, mean over the rates of the search", rates),
    ]
    return "\n".join(lines)


def _table(title: str, found: ByTask) -> list[str]:
    """A row for each predictor, a column for each task, the mean first."""
    tasks = list(next(iter(found.values())))
    lines = [f"## {title}", "", f"| | mean [95 %] | {' | '.join(tasks)} |", "|---" * (len(tasks) + 2) + "|"]
    for predictor, row in found.items():
        known = [value for value in row.values() if math.isfinite(value)]
        mean = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*interval(known)) if len(known) > 1 else "–"
        cells = [f"{value:+.2f}" if math.isfinite(value) else "–" for value in row.values()]
        lines.append(f"| {PREDICTORS[predictor]} | {mean} | {' | '.join(cells)} |")
    return [*lines, ""]


def draw(best: ByTask) -> Figure:
    """Every task as a dot, the mean with its interval as a bar."""
    figure, [[axes]] = subplots(1, 1, 6.6, 0.36 * len(best) + 0.9)
    for row, found in enumerate(best.values()):
        known = [value for value in found.values() if math.isfinite(value)]
        mean, low, high = interval(known)
        certain = low > 0 or high < 0
        axes.plot(known, [row] * len(known), "o", ms=4, color=COLOURS[6])
        axes.plot([low, high], [row, row], lw=2.5, color=BETTER if certain else GREY)
        axes.plot(mean, row, "D", ms=5, color=BETTER if certain else GREY)
    axes.axvline(0, color="0.6", lw=0.8)
    axes.set_yticks(range(len(best)), [PREDICTORS[name] for name in best])
    axes.set(xlim=(-1, 1), ylim=(len(best) - 0.5, -0.5), xlabel="rank correlation with the score")
    return figure
