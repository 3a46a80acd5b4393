"""What predicts the outcome: numbers of every start at step 0, and their rank correlation with its score.

Run: python results/method/predictors.py measure [TASK...] builds every start of results/evidence again (WELLCOND_DATA
names a mirror of the hub) and writes predictors.json; without `measure` it only makes predictors.md and predictors.svg.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.stats import spearmanr, t

import wellcond as wc
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe
from wellcond.lab.records import Comparison, load_comparisons
from wellcond.lab.report.tuning import find_tuning
from wellcond.lab.train.prepare import prepare_model, prepare_task

HERE = Path(__file__).parent
EVIDENCE = HERE.parent / "evidence"
TASKS = ("digits", "vit", "xcit", "swin", "listops", "text", "crammed-bert", "gpt2-tinystories", "gpt2-wikitext2")
SEEDS = (0, 1)
OTHER_OPTIMISER = "optimizer.name"
"""In the label of methods that start as another does and differ in their optimiser only."""
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


def measured(comparison: Comparison, method: str) -> dict[str, float]:
    """Means over layers and seeds; of logarithms, but for the entropy."""
    found: dict[str, list[float]] = {}
    for seed in SEEDS:
        config = dict(comparison.finished(method)[seed].record["config"])
        chosen = MethodSettings.model_validate(config.pop("method"))
        config.pop("seed")
        recipe = Recipe.model_validate(config)
        task = prepare_task(recipe, seed=seed, base=None)
        model = prepare_model(recipe, chosen, task, seed=seed, base=None).eval()
        for layer in wc.diagnose(model, task.probe(4), trained=False).layers:
            spread = layer.logit_spread
            note(found, "kappa_X", log10(layer.kappa_tokens))
            note(found, "entropy", layer.entropy)
            note(found, "spread", abs(math.log10(spread)) if spread else None)
            note(found, "rho", log10(layer.attention_share))
            note(found, "rho_mlp", log10(layer.mlp_share))
        for layer in wc.measure(model, task.probe(1), heads=[0], samples=1, kappa="pseudo").layers:
            for head in layer.heads:
                note(found, "kappa_J", log10(head.mean_kappa()))
                for spectrum in head.weights.values():
                    note(found, "kappa_W", log10(spectrum.condition_number))
    return {name: round(fmean(values), 6) for name, values in found.items()}


def note(found: dict[str, list[float]], name: str, value: float | None) -> None:
    """Add a number that is one."""
    if value is not None and math.isfinite(value):
        found.setdefault(name, []).append(value)


def log10(value: float | None) -> float | None:
    """None of what has no logarithm."""
    return math.log10(value) if value else None


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


def correlation(values: dict[str, dict[str, float]], scores: dict[str, float], predictor: str) -> float:
    """Spearman's, over the starts that have both; NaN of too few or of constants."""
    both = [method for method in scores if predictor in values.get(method, {})]
    numbers = [values[method][predictor] for method in both]
    if len(both) < FEWEST or len(set(numbers)) < 2:
        return math.nan
    return float(spearmanr(numbers, [scores[method] for method in both]).statistic)


def interval(correlations: list[float]) -> tuple[float, float, float]:
    """Mean over tasks with its 95 % interval, on Fisher's scale."""
    z = np.arctanh(np.clip(correlations, -0.999, 0.999))
    half = float(t.ppf(0.975, len(z) - 1)) * z.std(ddof=1) / math.sqrt(len(z))
    return tuple(math.tanh(value) for value in (z.mean(), z.mean() - half, z.mean() + half))  # type: ignore[return-value]


def measure(tasks: Iterable[str]) -> None:
    """Measure what is missing, task by task."""
    path = HERE / "predictors.json"
    stored: dict[str, dict[str, dict[str, float]]] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    torch.set_num_threads(1)
    for task in tasks:
        [comparison] = load_comparisons(EVIDENCE / task)
        rows = stored.setdefault(task, {})
        for method in comparison.methods:
            if method not in rows and OTHER_OPTIMISER not in method:
                rows[method] = measured(comparison, method)
                path.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
                print(task, method, rows[method], flush=True)


def tables(stored: dict[str, Any]) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Correlations by predictor and task: with the test at the best rate, and the mean over the rates of the search."""
    best: dict[str, dict[str, float]] = {}
    rates: dict[str, dict[str, float]] = {}
    for task, values in stored.items():
        [comparison] = load_comparisons(EVIDENCE / task)
        scores = outcomes(comparison, [method for method in comparison.methods if method in values])
        for predictor in PREDICTORS:
            best.setdefault(predictor, {})[task] = correlation(values, scores["best"], predictor)
            by_rate = [correlation(values, some, predictor) for rate, some in scores.items() if rate != "best"]
            known = [value for value in by_rate if math.isfinite(value)]
            rates.setdefault(predictor, {})[task] = fmean(known) if known else math.nan
    return best, rates


def markdown(title: str, found: dict[str, dict[str, float]]) -> list[str]:
    """A row for each predictor, a column for each task, the mean first."""
    tasks = list(next(iter(found.values())))
    lines = [f"## {title}", "", f"| | mean [95 %] | {' | '.join(tasks)} |", "|---" * (len(tasks) + 2) + "|"]
    for predictor, row in found.items():
        known = [value for value in row.values() if math.isfinite(value)]
        mean = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*interval(known)) if len(known) > 1 else "–"
        cells = [f"{value:+.2f}" if math.isfinite(value) else "–" for value in row.values()]
        lines.append(f"| {PREDICTORS[predictor]} | {mean} | {' | '.join(cells)} |")
    return [*lines, ""]


def draw(best: dict[str, dict[str, float]]) -> None:
    """Every task as a dot, the mean with its interval as a bar."""
    matplotlib.rcParams |= {"svg.hashsalt": "wellcond", "svg.fonttype": "none", "font.size": 9}
    figure, axes = plt.subplots(figsize=(6.6, 0.36 * len(best) + 0.9), layout="constrained")
    for row, found in enumerate(best.values()):
        known = [value for value in found.values() if math.isfinite(value)]
        mean, low, high = interval(known)
        certain = low > 0 or high < 0
        axes.plot(known, [row] * len(known), "o", ms=4, color="#97bbf5")
        axes.plot([low, high], [row, row], lw=2.5, color="#3ca951" if certain else "0.45")
        axes.plot(mean, row, "D", ms=5, color="#3ca951" if certain else "0.45")
    axes.axvline(0, color="0.6", lw=0.8)
    axes.set_yticks(range(len(best)), [PREDICTORS[name] for name in best])
    axes.set(xlim=(-1, 1), ylim=(len(best) - 0.5, -0.5), xlabel="rank correlation with the score")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(HERE / "predictors.svg", metadata={"Date": None}, bbox_inches="tight")


def main() -> None:
    """Measure if asked to; write table and figure."""
    if sys.argv[1:2] == ["measure"]:
        measure(sys.argv[2:] or [task for task in TASKS if (EVIDENCE / task).is_dir()])
    stored = json.loads((HERE / "predictors.json").read_text("utf-8"))
    best, rates = tables(stored)
    head = [
        "# What predicts the outcome",
        "",
        "Made by `python results/method/predictors.py`. Spearman's rank correlation, over the starts of a task, of a "
        "number at step 0 (mean over layers and two seeds) with the score; the mean over tasks has a 95 % interval "
        "over them. Starts that differ in their optimiser only are left out.",
        "",
    ]
    lines = [
        *head,
        *markdown("With the test score at each start's best rate", best),
        *markdown("With the validation score at one rate for all, mean over the rates of the search", rates),
    ]
    (HERE / "predictors.md").write_text("\n".join(lines), encoding="utf-8")
    draw(best)


if __name__ == "__main__":
    main()
