"""The four scales of `calibrated`, set by minimising the measured condition number of the Jacobian itself.

Run: python results/method/minimise.py digits gpt2-tinystories (WELLCOND_DATA names a mirror of the hub) prints the best
scales; `results/method/run.sh minimised` trains from them. The two tasks are those on which the method was made.
"""

from __future__ import annotations

import math
import sys
from statistics import fmean

import numpy as np
import torch
from scipy.optimize import minimize

import wellcond as wc
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import load_recipe
from wellcond.lab.train.prepare import prepare_model, prepare_task

SEEDS = (1000, 1001)
START = {"logits": 1.0, "share": 0.15, "positions": 0.5, "words": 0.55}
EVALUATIONS = 80
LARGEST = 100.0
"""Factor beyond which a scale is not followed: where the optimum is at infinity, this says so."""


def kappa(task: str, scales: dict[str, float]) -> float:
    """Log10 of the condition number of J over its non-zero spectrum, mean over layers and two seeds."""
    recipe, _ = load_recipe(task, scale="tiny")
    text = ", ".join(f"{name}={value:.6g}" for name, value in scales.items())
    found = []
    for seed in SEEDS:
        data = prepare_task(recipe, seed=seed, base=None)
        method = MethodSettings.model_validate(f"calibrated({text})")
        model = prepare_model(recipe, method, data, seed=seed, base=None).eval()
        for layer in wc.measure(model, data.probe(1), heads=[0], kappa="pseudo").layers:
            found += [math.log10(head.mean_kappa()) for head in layer.heads]
    return fmean(found)


def main() -> None:
    """Nelder-Mead on the logarithms of the scales, from those of the method."""
    torch.set_num_threads(1)
    for task in sys.argv[1:]:
        start = {name: value for name, value in START.items() if name != "words" or task != "digits"}

        def objective(logs: np.ndarray, task: str = task, start: dict[str, float] = start) -> float:
            bounded = np.clip(logs, -math.log(LARGEST), math.log(LARGEST))
            scales = {name: value * math.exp(step) for (name, value), step in zip(start.items(), bounded, strict=True)}
            value = kappa(task, scales) + float(np.abs(logs - bounded).sum())
            print(f"{task} {value:.4f}", {name: float(f"{s:.4g}") for name, s in scales.items()}, flush=True)
            return value

        simplex = np.vstack([np.zeros(len(start)), np.eye(len(start))])  # each scale times e
        found = minimize(
            objective, np.zeros(len(start)), method="Nelder-Mead",
            options={"maxfev": EVALUATIONS, "initial_simplex": simplex},
        )  # fmt: skip
        best = {
            name: float(f"{v * math.exp(step):.3g}") for (name, v), step in zip(start.items(), found.x, strict=True)
        }
        print(f"{task}: log10 kappa(J) {kappa(task, start):.3f} at the start, {found.fun:.3f} at {best}", flush=True)


if __name__ == "__main__":
    main()
