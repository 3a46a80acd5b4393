"""Numbers of every initialisation at step 0, which `wellcond claims results` correlates with its scores.

Run: python results/method/predictors.py [TASK...] builds every model again (WELLCOND_DATA names a mirror of the hub)
and writes predictors.json.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("svg")
import torch

import wellcond as wc
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe
from wellcond.lab.records import Comparison, load_comparisons
from wellcond.lab.train.prepare import prepare_model, prepare_task

HERE = Path(__file__).parent
EVIDENCE = HERE.parent / "evidence"
TASKS = ("digits", "vit", "xcit", "swin", "listops", "text", "crammed-bert", "gpt2-tinystories", "gpt2-wikitext2")
SEEDS = (0, 1)
OTHER_OPTIMISER = "optimizer.name"
"""In the label of methods that start as another does and differ in their optimiser only."""


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


if __name__ == "__main__":
    measure(sys.argv[1:] or TASKS)
