"""Figures of results/README.md, from the records beside this file. Run: python results/evidence/figures.py."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from wellcond.report.analysis import analyse
from wellcond.report.load_runs import Comparison, load_comparisons
from wellcond.report.statistics import differences_of
from wellcond.report.tuning import find_tuning

HERE = Path(__file__).parent
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e")
FARTHEST = 25.0
"""Differences beyond it are written, not drawn."""
matplotlib.rcParams |= {
    "svg.hashsalt": "wellcond",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def save(figure: plt.Figure, name: str) -> None:
    """Write a figure, the same bytes for the same records."""
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")


def words(method: str, strong: str) -> str:
    """A method as a reader would call it."""
    known = {
        "default(library=true)": "library default",
        "default": "scale-true default",
        strong: "strong default",
        "default+set(model.qk_norm=true)": "default with QK-norm",
        "default+set(optimizer.name=muon)": "default with Muon",
        "conditioned(value_scale=default)": "conditioned, V at the default's norm",
    }
    return known.get(method, method.replace(f"{strong}+", "strong default + "))


def draw_rates(comparison: Comparison, shown: list[str], name: str) -> None:
    """Score over the learning rate, for some methods."""
    tuning = find_tuning(comparison)
    assert tuning is not None
    figure, axes = plt.subplots(figsize=(6.2, 3.4))
    for colour, label in zip(COLOURS, shown, strict=False):
        [method] = [method for method in tuning.methods if method.label == label]
        points = method.profile("optimizer.lr")
        rates = [point.values["optimizer.lr"] for point in points]
        axes.plot(rates, [tuning.metric.scale * point.mean for point in points], "o-", ms=3, color=colour,
                  label=words(label, comparison.baseline))  # fmt: skip
    axes.set(xscale="log", xlabel="learning rate", ylabel=f"{tuning.metric.label}, tuning seeds")
    axes.legend(frameon=False, fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, name)


def draw_differences(comparison: Comparison, name: str) -> None:
    """Every method minus the strong default, each at its best rate, with 95 % intervals."""
    analysis = analyse(comparison)
    scale = comparison.result.scale
    found = sorted(analysis.differences.values(), key=lambda difference: difference.mean)
    figure, axes = plt.subplots(figsize=(6.2, 0.24 * len(found) + 0.8))
    for row, difference in enumerate(found):
        low, high = difference.interval or (math.nan, math.nan)
        if scale * abs(difference.mean) > FARTHEST:
            axes.text(-0.5, row, f"{scale * difference.mean:.0f}", ha="right", va="center", color=COLOURS[2])
            continue
        colour = COLOURS[0] if low <= 0 <= high else COLOURS[4] if low > 0 else COLOURS[2]
        axes.plot([scale * low, scale * high], [row, row], color=colour, lw=2)
        axes.plot(scale * difference.mean, row, "o", ms=4, color=colour)
    axes.axvline(0, color="0.6", lw=0.8)
    axes.set_yticks(range(len(found)), [words(difference.method, comparison.baseline) for difference in found])
    axes.set_xlabel(f"{comparison.result.label}: better than the strong default by (95 % interval)")
    save(figure, name)


def draw_scores(comparison: Comparison, name: str) -> None:
    """Every seed of every method."""
    figure, axes = plt.subplots(figsize=(6.2, 0.3 * len(comparison.methods) + 0.8))
    for row, method in enumerate(reversed(comparison.methods)):
        values = [comparison.result.scale * value for value in comparison.results(method).values()]
        axes.plot(values, [row] * len(values), "o", ms=4, alpha=0.7, color=COLOURS[0])
    axes.set_yticks(range(len(comparison.methods)), list(reversed(comparison.methods)))
    axes.set_xlabel(comparison.result.label)
    save(figure, name)


def print_numbers(comparison: Comparison) -> None:
    """What the pages say beside the tables: differences to the scale-true default, and what a wrong rate costs."""
    summaries = analyse(comparison).summaries
    pairs = [(method, "default") for method in comparison.methods if method != "default"]
    scale = comparison.result.scale
    for difference in differences_of(comparison, summaries, pairs):
        low, high = (scale * end for end in difference.interval or (math.nan, math.nan))
        shown = f"{scale * difference.mean:+.2f} [{low:+.2f}, {high:+.2f}], p {difference.p:.2g}"
        print(f"{difference.method} - default: {shown}")
    tuning = find_tuning(comparison)
    for method in tuning.methods if tuning is not None else ():
        worst = max(method.loss(point) for point in method.points)
        print(f"{method.label}: loses at most {tuning.metric.scale * worst:.1f} over the rates that were tried")


def main() -> None:
    """Draw what there are records for, and print what else the pages say."""
    for task in ("digits", "gpt2-tinystories"):
        if (HERE / task).is_dir():
            [comparison] = load_comparisons(HERE / task)
            strong = comparison.baseline
            shown = [
                "default(library=true)",
                "default",
                strong,
                "gaussian",
                "conditioned",
                "balanced",
                f"{strong}+conditioned",
            ]
            draw_rates(comparison, shown, f"{task}-rates")
            draw_differences(comparison, f"{task}-differences")
            print_numbers(comparison)
    if (HERE / "causal").is_dir():
        [comparison] = load_comparisons(HERE / "causal")
        draw_scores(comparison, "causal")


if __name__ == "__main__":
    main()
