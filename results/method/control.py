"""Control of kappa(J) during training: every k steps one small step on the scales that govern it, on digits.

Of each head J is formed and decomposed (float64, the first sample of the training batch). With u and v the singular
vectors of sigma, d sigma = u^T dJ v, and J v is the derivative of the head's output along v: the exact gradients of
log sigma_max - log sigma_min with respect to all scales are one derivative by torch.func, where finite differences
would need another spectrum for each scale. The scales, all logarithmic:

- tokens: gain and bias of the norm in front of the attention, one number a layer (mean gradient of its heads);
- logits: W_Q and W_K of a head, half of it each, with biases;
- values: W_V of a head, with its bias; in the setting ``kept`` this alone, and W_O the other way round, which leaves
  the function as it is.

A step is -strength times the gradient, limited to [-1, 1]. The recipe is that of digits at 8 of its 15 epochs. Tuning
seeds 1000 and 1001 at every rate on the evaluation split; then fresh seeds at the best rate, scored once on the test
split. ``kept`` does not change the function and takes the rate of ``off``.

Run: python results/method/control.py --check (gradients against differences of wc.measure), without options all runs,
which appends to control.jsonl what is missing there; --report prints the tables of control.md.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import wellcond as wc
from wellcond.lab.methods import MethodSettings
from wellcond.lab.optimizers import set_point
from wellcond.lab.recipe import load_recipe
from wellcond.lab.report.statistics import compare_paired
from wellcond.lab.settings import Interval
from wellcond.lab.tasks.base import EVALUATION, AbstractTask, Samples, evaluating
from wellcond.lab.train.batches import UpdatePlan
from wellcond.lab.train.prepare import prepare_model, prepare_task

FILE = Path(__file__).with_suffix(".jsonl")
METHOD = "default"
RATES = (0.003, 0.0055, 0.01)
TUNING, FRESH = (1000, 1001), (0, 1, 2, 3, 4)
SETTINGS: dict[str, dict[str, Any]] = {
    "off": {},
    "firm": {"every": 16, "strength": 0.2},
    "kept": {"every": 16, "strength": 0.2, "kept": True},
}
POINTS = 2
"""Equal parts of the training at whose ends kappa(J) is measured."""
EPOCHS = 8
"""As the widths of this folder."""
SINGULAR = 1e-12
"""Ratio of singular values below which a head is left alone: its smallest one is rounding."""


def head_output(weights: Tensor, biases: Tensor, tokens: Tensor, scales: Tensor, along: Tensor | None = None) -> Tensor:
    """Output (tokens, d) of a head with (W_Q, W_K, W_V) of shape (3, d, D), at other logarithmic scales."""
    on_tokens, on_logits, on_values = scales.exp()
    factors = torch.stack([on_logits.sqrt(), on_logits.sqrt(), on_values])
    weights = weights * factors[:, None, None] + (0.0 if along is None else along)
    parts = tokens * on_tokens @ weights.mT + (biases * factors[:, None]).unsqueeze(1)
    q, k, v = parts
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def gradient(weights: Tensor, biases: Tensor, tokens: Tensor) -> Tensor | None:
    """Of log sigma_max - log sigma_min of J with respect to the three scales; None where J is singular."""
    none = torch.zeros(3, dtype=weights.dtype)
    # Weights act, and J has columns, within the span of the tokens alone: its coordinates are exact and fewer.
    basis, triangle = torch.linalg.qr(tokens.mT)
    weights, tokens = weights @ basis, triangle.mT

    def output(along: Tensor, scales: Tensor = none) -> Tensor:
        return head_output(weights, biases, tokens, scales, along).flatten()

    zero = torch.zeros_like(weights)
    jacobian = torch.func.jacrev(output)(zero).flatten(1)
    u, sigma, _ = torch.linalg.svd(torch.linalg.qr(jacobian.mT, mode="r").R.mT)
    if sigma[-1] <= SINGULAR * sigma[0]:
        return None

    def log_kappa(scales: Tensor) -> Tensor:
        value = torch.zeros((), dtype=weights.dtype)
        for at, sign in ((0, 1.0), (-1, -1.0)):
            direction = (jacobian.mT @ u[:, at] / sigma[at]).view_as(weights)
            _, moved = torch.func.jvp(lambda along: output(along, scales), (zero,), (direction,))
            value = value + sign * (u[:, at] @ moved) / sigma[at]
        return value

    return torch.func.grad(log_kappa)(none)


class Control:
    """Steps on the scales of every head of a ViT of timm."""

    def __init__(self, model: nn.Module, every: int, strength: float, kept: bool = False) -> None:
        self.model, self.every, self.strength, self.kept = model, every, strength, kept
        self.sites = wc.find_attention(model)
        self.norms = [model.get_submodule(site.name.removesuffix("attn") + "norm1") for site in self.sites]
        self.tokens: dict[int, Tensor] = {}
        self.seconds, self.moved, self.left_alone = 0.0, 0.0, 0
        for number, site in enumerate(self.sites):
            site.module.register_forward_pre_hook(self._keep(number))

    def _keep(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self.tokens[number] = args[0][0].detach()  # of the first sample

        return hook

    def gradients(self, number: int) -> list[Tensor | None]:
        """Of every head of a layer."""
        site = self.sites[number]
        weights = torch.stack([slot.read().detach().double() for slot in (site.q, site.k, site.v)], 1)
        biases = torch.stack([slot.read_bias().detach().double() for slot in (site.q, site.k, site.v)], 1)
        return [gradient(w, b, self.tokens[number].double()) for w, b in zip(weights, biases, strict=True)]

    def after_step(self, step: int) -> None:
        """Act after every k-th step."""
        if step % self.every:
            return
        begun = time.process_time()
        for number in range(len(self.sites)):
            found = self.gradients(number)
            self.left_alone += sum(one is None for one in found)
            slopes = torch.stack([torch.zeros(3, dtype=torch.float64) if one is None else one for one in found])
            steps = -self.strength * slopes.clamp(-1, 1)
            steps[:, 0] = steps[:, 0].mean()
            self.move(number, steps)
            self.moved += float(steps.abs().mean()) / len(self.sites)
        self.seconds += time.process_time() - begun

    @torch.no_grad()
    def move(self, number: int, steps: Tensor) -> None:
        """Change the logarithmic scales of the heads of a layer, (heads, 3), by so much."""
        site, norm = self.sites[number], self.norms[number]
        factors = steps.exp().to(site.q.parameter.dtype)
        if self.kept:
            site.o.write_(site.o.read() / factors[:, 2, None, None])
            chosen = [(site.v, factors[:, 2])]
        else:
            norm.weight.mul_(factors[0, 0])
            norm.bias.mul_(factors[0, 0])
            chosen = [(site.q, factors[:, 1].sqrt()), (site.k, factors[:, 1].sqrt()), (site.v, factors[:, 2])]
        for slot, factor in chosen:
            slot.write_(slot.read() * factor[:, None, None])
            slot.write_bias_(slot.read_bias() * factor[:, None])


def kappas(model: nn.Module, task: AbstractTask) -> dict[str, Any]:
    """Mean log10 of kappa(J) over heads, and how many have none, on the first evaluation sample, by `wc.measure`."""
    layers = wc.measure(model, task.probe(1)).layers
    found = [head.jacobian for layer in layers for head in layer.heads]
    values = [one.condition_number for one in found if math.isfinite(one.condition_number)]
    known = sum(map(math.log10, values)) / len(values) if values else None
    return {"log10_kappa": known, "heads": len(found), "not_finite": len(found) - len(values)}


def accuracy(model: nn.Module, task: AbstractTask, samples: Samples) -> float:
    """Share of correct answers of a split."""
    with evaluating(model):
        sums = task.score(model, samples.fetch([(index, EVALUATION) for index in range(len(samples))]))
    return float(task.metrics(sums, samples)["accuracy"])


def train(setting: str, rate: float, seed: int, method: str, *, fresh: bool) -> dict[str, Any]:
    """One run of the recipe, with control or without."""
    recipe, _ = load_recipe("digits", scale="tiny")
    optimizer_settings = recipe.optimizer.model_copy(update={"lr": rate})
    training = recipe.training.model_copy(update={"length": Interval(epochs=EPOCHS)})
    recipe = recipe.model_copy(update={"optimizer": optimizer_settings, "training": training})
    task = prepare_task(recipe, seed=seed, base=None)
    model = prepare_model(recipe, MethodSettings.model_validate(method), task, seed=seed, base=None).train()
    optimizer = recipe.optimizer.build(model)
    options = SETTINGS[setting]
    control = Control(model, **options) if options else None
    plan = UpdatePlan(len(task.train), recipe.training.batch_size, 1, seed)
    num_steps = recipe.training.length.in_steps(plan.steps_per_epoch)
    points = {round(num_steps * part / POINTS) for part in range(POINTS + 1)} if fresh else set()
    found = {0: kappas(model, task)} if fresh else {}
    seconds = 0.0
    for step, keys in enumerate(plan.parts(0, num_steps), 1):
        begun = time.process_time()
        batch = task.train.fetch(keys)
        set_point(optimizer, recipe.schedule.point(step - 1, num_steps, plan.steps_per_epoch), rate)
        (task.loss(model, batch) / task.num_terms(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if control is not None and step < num_steps:
            control.after_step(step)
        seconds += time.process_time() - begun
        if step in points:
            found[step] = kappas(model, task)
    spent = 0.0 if control is None else control.seconds
    return {
        "method": method, "setting": setting, "options": options, "rate": rate, "seed": seed,
        "split": "test" if fresh else "evaluation",
        "accuracy": accuracy(model, task, task.test if fresh else task.evaluation),
        "kappa": found,
        "cost": seconds / (seconds - spent),
        "seconds": round(seconds, 3),
        "moved": 0.0 if control is None else round(control.moved, 5),
        "left_alone": 0 if control is None else control.left_alone,
    }  # fmt: skip


def read() -> list[dict[str, Any]]:
    """The runs so far."""
    return [json.loads(line) for line in FILE.read_text("utf-8").splitlines()] if FILE.exists() else []


def run_all(method: str, settings: list[str]) -> None:
    """Every run that is missing: all rates on the tuning seeds, then the best one on the fresh seeds."""
    torch.set_num_threads(1)
    gradient(torch.randn(3, 4, 8), torch.randn(3, 4), torch.randn(5, 8))  # the first use of torch.func takes seconds

    def need(setting: str, rate: float, seed: int, fresh: bool) -> None:
        key = (method, setting, rate, seed, "test" if fresh else "evaluation")
        if key not in {tuple(run[name] for name in ("method", "setting", "rate", "seed", "split")) for run in read()}:
            run = train(setting, rate, seed, method, fresh=fresh)
            with FILE.open("a", encoding="utf-8") as out:
                out.write(json.dumps(run) + "\n")
            print(f"{method} {setting} {rate:g} seed {seed}: {run['accuracy']:.4f}, {run['seconds']} s", flush=True)

    for setting in settings:
        tuned = "off" if SETTINGS[setting].get("kept") else setting
        for rate, seed in itertools.product(RATES, TUNING):
            need(tuned, rate, seed, False)
        for seed in FRESH:
            need(setting, best_rate(method, tuned), seed, True)


def best_rate(method: str, setting: str) -> float:
    """That of the highest mean accuracy over the tuning seeds; the lower one where two are equal."""
    runs = [run for run in read() if (run["method"], run["setting"], run["split"]) == (method, setting, "evaluation")]
    return max(RATES, key=lambda rate: (fmean(run["accuracy"] for run in runs if run["rate"] == rate), -rate))


def difference(ours: Mapping[int, float], base: Mapping[int, float], scale: float) -> str:
    """Mean paired difference with its 95 % interval."""
    found = compare_paired("", ours, "", base, higher_is_better=True)
    low, high = found.interval or (math.nan, math.nan)
    return f"{scale * found.mean:+.2f} [{scale * low:+.2f}, {scale * high:+.2f}]"


def numbers(found: Mapping[int, dict[str, Any]], last: str) -> tuple[dict[int, float], dict[int, float]]:
    """Accuracy, and log10 of kappa(J) at the end, by seed."""
    scores = {seed: run["accuracy"] for seed, run in found.items()}
    return scores, {seed: run["kappa"][last]["log10_kappa"] for seed, run in found.items()}


def report() -> None:
    """Print the tables: of every setting its cost, kappa(J) and accuracy, with paired differences to ``off``."""
    runs = read()
    for method in dict.fromkeys(run["method"] for run in runs):
        tested = [run for run in runs if run["method"] == method and run["split"] == "test"]
        by_setting: dict[str, dict[int, dict[str, Any]]] = {}
        for run in tested:
            by_setting.setdefault(run["setting"], {})[run["seed"]] = run
        steps = list(tested[0]["kappa"])
        columns = [
            "setting",
            "rate",
            "cost",
            "accuracy, %",
            "against off",
            *(f"step {s}" for s in steps),
            "against off",
        ]
        print(f"\n{method}\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
        for setting, found in by_setting.items():
            ours, base = numbers(found, steps[-1]), numbers(by_setting["off"], steps[-1])
            cells = [
                setting,
                f"{next(iter(found.values()))['rate']:g}",
                f"{fmean(run['cost'] for run in found.values()):.2f}",
                f"{100 * fmean(ours[0].values()):.1f}",
                "" if setting == "off" else difference(ours[0], base[0], 100),
                *(f"{fmean(run['kappa'][step]['log10_kappa'] for run in found.values()):.2f}" for step in steps),
                "" if setting == "off" else difference(ours[1], base[1], 1),
            ]
            print("|", " | ".join(cells), "|")
        for setting, found in by_setting.items():
            ends = [run["kappa"][steps[-1]] for run in found.values()]
            lost, heads = sum(end["not_finite"] for end in ends), sum(end["heads"] for end in ends)
            print(f"{setting}: {lost} of {heads} heads numerically singular at the end, left out of the means")


def check() -> None:
    """Compare the gradients with centred differences of what `wc.measure` says of a model with other scales."""
    torch.set_num_threads(1)
    recipe, _ = load_recipe("digits", scale="tiny")
    task = prepare_task(recipe, seed=0, base=None)
    model = prepare_model(recipe, MethodSettings.model_validate(METHOD), task, seed=0, base=None).eval().double()
    control, image = Control(model, 1, 1.0), task.probe(1).double()
    with torch.no_grad():
        model(image)
    exact = [control.gradients(layer)[0] for layer in range(2)]
    worst = 0.0
    for layer, scale in itertools.product(range(2), range(3)):
        ends = []
        for sign in (1, -1):
            moved = copy.deepcopy(model)
            steps = torch.zeros(control.sites[layer].num_heads, 3, dtype=torch.float64)
            steps[:, scale] = sign * 1e-4
            Control(moved, 1, 1.0).move(layer, steps)
            head = wc.measure(moved, image, layers=[layer], heads=[0]).layers[0].heads[0]
            ends.append(math.log(head.jacobian.condition_number))
        ours, by_differences = float(exact[layer][scale]), (ends[0] - ends[1]) / 2e-4
        worst = max(worst, abs(ours - by_differences))
        print(f"layer {layer}, scale {scale}: {ours:+.6f}, by differences {by_differences:+.6f}")
    print(f"largest difference {worst:.1e}")


def main() -> None:
    """Do what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--method", default=METHOD)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    options = parser.parse_args()
    if options.check:
        check()
    elif options.report:
        report()
    else:
        run_all(options.method, options.settings)


if __name__ == "__main__":
    main()
