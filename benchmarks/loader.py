"""Images per second that the loader makes over those that the model trains on, for the CPU recipe of the ViT.

Both are timed alone, in turns, the median of some rounds. The goal is a ratio of at least 1.5 on two cores: for images
in memory, which the training process itself prepares, and for pictures that timm's transforms take one by one in one
worker process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch

from wellcond.lab.data import Data, TensorDataset
from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe
from wellcond.lab.tasks.base import AbstractTask, AugmentationSettings, Batch, TaskContext
from wellcond.lab.tasks.image_classification import ImageClassification
from wellcond.lab.train.batches import UpdatePlan, fetch_batches
from wellcond.lab.train.prepare import prepare_model

GOAL = 1.5
PICTURES = AugmentationSettings(
    flip=0.5, resized_crop=(0.08, 1.0), rand_augment="rand-m9-mstd0.5-inc1", random_erasing=0.25
)


def make_task(recipe: Recipe, augmentation: AugmentationSettings) -> ImageClassification:
    """Random images of the size and number of classes of CIFAR-10."""
    source = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (10000, 3, 32, 32), generator=source, dtype=torch.uint8)
    split = TensorDataset("image", images, torch.arange(10000) % 10)
    data = Data("random", "image", split, split, tuple(map(str, range(10))), "")
    return ImageClassification(recipe.task, TaskContext(data, 0, augmentation))  # type: ignore[arg-type]


def batches(recipe: Recipe, task: AbstractTask, *, steps: int, workers: int) -> Iterator[Batch]:
    """As the engine fetches them."""
    training = recipe.training
    plan = UpdatePlan(len(task.train), training.batch_size, training.accumulate, 0, recipe.augmentation.repeats)
    parts = plan.parts(0, steps)
    return fetch_batches(task.train, parts, workers=workers, device=torch.device("cpu"))


def loader_seconds(recipe: Recipe, task: AbstractTask, *, steps: int, workers: int) -> float:
    """For one batch, after the first ones: a worker starts once in a run."""
    source = batches(recipe, task, steps=steps + 2, workers=workers)
    ready = [next(source), next(source)]
    start = time.perf_counter()
    ready.extend(source)
    return (time.perf_counter() - start) / (len(ready) - 2)


def model_seconds(recipe: Recipe, task: ImageClassification, model: torch.nn.Module, steps: int) -> float:
    """For one update: forwards, backwards and the optimiser, on batches that are there."""
    optimizer = recipe.optimizer.build(model)
    ready = list(batches(recipe, task, steps=steps, workers=0))
    start = time.perf_counter()
    for step, batch in enumerate(ready):
        loss = task.loss(model, task.training_batch(batch, step)) / len(batch["image"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe, _ = load_recipe("vit", scale="tiny")
    memory = make_task(recipe, recipe.augmentation)
    pictures = make_task(recipe, PICTURES)
    model = prepare_model(recipe, MethodSettings(init="default"), memory, seed=0, base=None)
    times: dict[str, list[float]] = {"model": [], "in memory": [], "one by one, 1 worker": []}
    for _ in range(arguments.rounds + 1):
        times["model"].append(model_seconds(recipe, memory, model, arguments.steps))
        times["in memory"].append(loader_seconds(recipe, memory, steps=10 * arguments.steps, workers=0))
        # More batches than a worker keeps ready, or the time would be that of emptying its queue.
        times["one by one, 1 worker"].append(loader_seconds(recipe, pictures, steps=2 * arguments.steps, workers=1))
    size = recipe.training.batch_size
    speeds = {name: size / statistics.median(rows[1:]) for name, rows in times.items()}  # the first round warms up
    print(f"tiny/vit, batch {size}, one thread: the model trains on {speeds['model']:.0f} images/s")
    for name in ("in memory", "one by one, 1 worker"):
        ratio = speeds[name] / speeds["model"]
        verdict = "meets" if ratio >= GOAL else "MISSES"
        print(f"{name}: {speeds[name]:.0f} images/s, ratio {ratio:.1f} ({verdict} {GOAL})")


if __name__ == "__main__":
    main()
