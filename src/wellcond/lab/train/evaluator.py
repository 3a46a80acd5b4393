"""Scoring a model on a set of samples, every process its share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from wellcond.attention.distributed import unwrap
from wellcond.lab.recipe import Recipe
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.base import AbstractTask, Record, Samples
from wellcond.lab.train.averaging import WeightAverage
from wellcond.lab.train.batches import Share, evaluation_parts, fetch_batches


def find_test_set(recipe: Recipe, task: AbstractTask) -> Samples | None:
    """What `evaluation.test` asks to score at the end; None if it asks for nothing.

    Raises: RecipeError if there is no such set.
    """
    wanted = recipe.evaluation.test
    if wanted is None:
        return None
    if task.test is None or not len(task.test):
        raise RecipeError(
            f"evaluation.test: {wanted} needs a labelled split named test; {recipe.task.model_dump()['name']} has none "
            f"of {task.data.name}. Give data that have one, or leave evaluation.test out: results are then those on "
            "the evaluation set"
        )
    return task.test


def gather_records(mine: list[Record]) -> list[Record]:
    """The records of all processes."""
    from accelerate.utils import gather_object

    return gather_object(mine)


class Evaluator:
    """Scores the model as Accelerate prepared it."""

    def __init__(
        self,
        recipe: Recipe,
        task: AbstractTask,
        model: nn.Module,
        accelerator: Any,
        *,
        share: Share,
        average: WeightAverage | None,
    ) -> None:
        """`average` is what is evaluated instead of the weights, where there is one."""
        self.task, self.model, self.accelerator, self.share = task, model, accelerator, share
        self.average = average
        self.batch_size, self.workers = recipe.evaluation.batch_size, recipe.training.workers

    def evaluate(self, samples: Samples, at_most: int | None = None) -> dict[str, float]:
        """Score the weights that are to be evaluated on a set, or on its first samples."""
        with self.evaluated_weights():
            return self.score(samples, len(samples) if at_most is None else min(at_most, len(samples)))

    def evaluate_all(self, at_most: int | None) -> dict[str, float]:
        """Score the evaluation set, or its first samples, and the task's further sets."""
        values = self.evaluate(self.task.evaluation, at_most)
        for prefix, samples in self.task.further.items():
            values |= {f"{prefix}_{name}": value for name, value in self.evaluate(samples).items()}
        return values

    @torch.no_grad()
    def score(self, samples: Samples, num_samples: int) -> dict[str, float]:
        """Score the weights that the model has on the first samples of a set; every process must call it."""
        parts = evaluation_parts(num_samples, self.batch_size, self.share)
        batches = fetch_batches(samples, parts, workers=self.workers, device=self.accelerator.device)
        totals: dict[str, torch.Tensor] = {}
        records: list[Record] = []
        with self._not_training():
            for batch in batches:
                sums_of_batch, found = self.task.collect(self.model, batch)
                for name, value in sums_of_batch.items():
                    totals[name] = totals[name] + value if name in totals else value
                records += found
        if self.share.processes > 1:
            totals = self.accelerator.reduce(totals, reduction="sum")
            records = gather_records(records)
        # Most sums are numbers; a confusion matrix or the predictions of a whole set are not.
        sums: dict[str, Any] = {name: value.tolist() if value.dim() else float(value) for name, value in totals.items()}
        in_order = [record for _, record in sorted(records, key=lambda numbered: numbered[0])]
        return self.task.summarise(samples, sums, in_order)

    def write_samples(self) -> list[dict[str, Any]]:
        """What the weights that are to be evaluated make of samples, the same on every process; each must call it."""
        with self.evaluated_weights():
            return self.task.write_samples(unwrap(self.model))

    @contextlib.contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """The model has the average for a while, if that is what is evaluated."""
        with self.average.in_place() if self.average is not None else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _not_training(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)
