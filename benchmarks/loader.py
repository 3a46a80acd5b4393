"""Images per second that the loader makes over those that the model trains on, for the CPU recipe of the ViT.

Both are timed alone, in turns, the median of some rounds. The goal is a ratio of at least 1.5 on two cores: for images
in memory, which the training process itself prepares, and for pictures that timm's transforms take one by one in one
worker process.

`--beside-timm` compares with timm's own loader instead, on JPEGs of 500 x 375 and the recipe of ViT-B: both with one
worker, the same files, the same augmentation; timm without and with its prefetcher, which normalises and erases in the
training process, as ours does. The goal is its prefetcher's speed. Beside images per second, which other programs on
the machine change, it prints the CPU time that an image costs.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

from wellcond.lab.data import Data, TensorDataset
from wellcond.lab.data.base import load_data
from wellcond.lab.data.images import ImageFolderConfig
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe, load_recipe
from wellcond.lab.tasks.base import AbstractTask, AugmentationSettings, Batch, TaskContext
from wellcond.lab.tasks.image_classification import ImageClassification, fix_posterize_
from wellcond.lab.train.batches import UpdatePlan, fetch_batches
from wellcond.lab.train.prepare import prepare_model

GOAL = 1.5
BATCH = 64
PREFETCHER = "timm, prefetcher"
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


def write_photos(folder: Path, count: int) -> None:
    """JPEGs of 500 x 375 whose files are about as large as those of ImageNet."""
    source = np.random.default_rng(0)
    for number in range(count):
        small = source.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        pixels = np.asarray(Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC)).astype(float)
        pixels += source.normal(0, 12, pixels.shape)
        place = folder / "train" / f"class{number % 4}" / f"{number}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place, quality=90)


@dataclass
class Speed:
    """Of one round: images per second, and milliseconds of CPU time an image costs its worker and the trainer."""

    rate: float
    worker: float
    trainer: float


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """CPU time of processes so far."""
    times = [process.cpu_times() for process in processes]
    return sum(time.user + time.system for time in times)


def measured(batches: Iterator[Any], steps: int, size: int) -> Speed:
    """Time `steps` batches after the first two: a worker starts once in a run."""
    for _ in range(2):
        next(batches)
    workers = psutil.Process().children()
    start, own, theirs = time.perf_counter(), time.process_time(), cpu_seconds(workers)
    for _ in range(steps):
        next(batches)
    count = steps * size
    seconds, own, theirs = time.perf_counter() - start, time.process_time() - own, cpu_seconds(workers) - theirs
    return Speed(count / seconds, 1000 * theirs / count, 1000 * own / count)


def measure_ours(recipe: Recipe, data: Data, repeats: int, steps: int) -> Speed:
    """Our batches, of images that are each shown `repeats` times."""
    augmentation = recipe.augmentation.model_copy(update={"repeats": repeats})
    task = ImageClassification(recipe.task, TaskContext(data, 0, augmentation))  # type: ignore[arg-type]
    plan = UpdatePlan(len(task.train), BATCH, 1, 0, repeats)
    # More than are timed, or the worker would be done before the time is.
    batches = fetch_batches(task.train, plan.parts(0, steps + 8), workers=1, device=torch.device("cpu"))
    return measured(batches, steps, BATCH)


def measure_timm(recipe: Recipe, folder: str, prefetcher: bool, steps: int) -> Speed:
    """Batches of timm's loader, which go on from epoch to epoch."""
    from timm.data import create_dataset, create_loader

    loader = create_loader(
        create_dataset("", f"{folder}/train"),
        (3, 224, 224),
        BATCH,
        is_training=True,
        use_prefetcher=prefetcher,
        re_prob=recipe.augmentation.random_erasing,
        re_mode="pixel",
        scale=recipe.augmentation.resized_crop,
        color_jitter=recipe.augmentation.color_jitter,
        auto_augment=recipe.augmentation.rand_augment,
        interpolation="bicubic",
        num_workers=1,
        persistent_workers=True,
        device=torch.device("cpu"),
    )
    fix_posterize_(loader.dataset.transform)
    return measured(itertools.chain.from_iterable(itertools.repeat(loader)), steps, BATCH)


def beside_timm(rounds: int, steps: int) -> None:
    """Print the speeds of ours and of timm's loader in turns, and their ratios."""
    recipe = load_recipe("vit", scale="paper")[0]
    with tempfile.TemporaryDirectory() as name:
        write_photos(Path(name), 1024)
        data = load_data(ImageFolderConfig(path=name, evaluation_fraction=0.25))
        sides: dict[str, Callable[[], Speed]] = {
            "timm": lambda: measure_timm(recipe, name, False, steps),
            PREFETCHER: lambda: measure_timm(recipe, name, True, steps),
            "ours": lambda: measure_ours(recipe, data, 1, steps),
            "ours, each image 3 times": lambda: measure_ours(recipe, data, 3, steps),
        }
        found: dict[str, list[Speed]] = {which: [] for which in sides}
        for _ in range(rounds):
            for which, measure in sides.items():
                found[which].append(measure())
                gc.collect()  # ends the worker, which would go on into the next side's time
    goal = statistics.median(speed.rate for speed in found[PREFETCHER])
    for which, speeds in found.items():
        rates = [speed.rate for speed in speeds]
        of_worker, of_trainer = (
            statistics.median(getattr(speed, name) for speed in speeds) for name in ("worker", "trainer")
        )
        rate = statistics.median(rates)
        print(
            f"{which}: {rate:.0f} images/s ({min(rates):.0f} to {max(rates):.0f}), {rate / goal:.2f} of the goal; "
            f"CPU time an image: {of_worker:.2f} ms in the worker, {of_trainer:.2f} ms in the training process"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside-timm", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.beside_timm:
        beside_timm(arguments.rounds, arguments.steps)
        return
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
