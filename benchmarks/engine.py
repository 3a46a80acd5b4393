"""A training step through the engine against the same step hand-written in plain PyTorch.

Rounds alternate and count processor time on one thread, which other processes disturb least. The goal is a ratio of at
most 1.03.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import timm
import torch
from sklearn.datasets import load_digits

from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import load_recipe
from wellcond.lab.train.run import Job, run_job

BATCH = 64


def by_hand(steps: int, width: int, depth: int) -> float:
    """Seconds per step of the loop one would write without a library."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:1297, None]
    images, labels = (images - images.mean()) / images.std(), torch.tensor(digits.target)[:1297]
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, num_classes=10,
        embed_dim=width, depth=depth, num_heads=4, mlp_ratio=2.0,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    start = time.process_time()
    done = 0
    while done < steps:
        for batch in torch.randperm(len(images))[: 20 * BATCH].split(BATCH):
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            done += 1
            if done == steps:
                break
    return (time.process_time() - start) / steps


def through_engine(steps: int, width: int, depth: int) -> float:
    """Seconds per step with everything the engine does between evaluations, logging included."""
    overrides = [
        f"model.arguments.embed_dim={width}",
        f"model.arguments.depth={depth}",
        f"training.length={{steps: {steps}}}",
        f"evaluation.every={{steps: {steps}}}",
        "tracking={weights_every: null, jacobian_points: 0}",
    ]
    recipe, _ = load_recipe("digits", overrides=overrides)
    marks = []

    def observe(event: dict) -> None:
        # Training lies between the end of the first evaluation and the beginning of the last.
        if event["event"] == "evaluation" or event.get("phase") == "evaluating":
            marks.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        run_job(Job(recipe, MethodSettings(init="default"), 0, Path(folder) / "run", cpu=True), observe)
    return (marks[2] - marks[1]) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"ViT on digits, batch {BATCH}, one thread, {arguments.rounds} rounds of {arguments.steps} steps")
    for width, depth in ((64, 4), (192, 4)):
        hand, engine = [], []
        for _ in range(arguments.rounds + 1):
            hand.append(by_hand(arguments.steps, width, depth))
            engine.append(through_engine(arguments.steps, width, depth))
        hand, engine = hand[1:], engine[1:]  # the first round warms up
        ratios = [e / h for e, h in zip(engine, hand, strict=True)]
        print(
            f"width {width}, depth {depth}: by hand {1e3 * min(hand):.2f} ms, engine {1e3 * min(engine):.2f} ms; "
            f"ratio of minima {min(engine) / min(hand):.3f}, median of paired ratios {statistics.median(ratios):.3f}"
        )


if __name__ == "__main__":
    main()
