"""What is evaluated, and how: the weights or their EMA on a set of samples, every rank its share; the best weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.distributed import reshard_, unwrap
from wellcond.lab.recipe import Recipe
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.base import AbstractTask, Record, Samples
from wellcond.lab.train.batches import Share, evaluation_parts, fetch_batches
from wellcond.lab.train.checkpoint import load_model_, model_tensors, read_tensors


class WeightAverage:
    """EMA of the parameters, a <- decay a + (1 - decay) w after every update; buffers are the model's own."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """The average starts as the weights, plain or sharded."""
        self.decay, self._model = decay, model
        self._weights = dict(model.named_parameters())
        self.state = self._copied()

    def _copied(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        current = [weight.detach() for weight in self._weights.values()]
        torch._foreach_lerp_(list(self.state.values()), current, 1 - self.decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the average for a while."""
        kept = self._copied()
        self._copy_(self.state)
        try:
            yield
        finally:
            self._copy_(kept)

    @torch.no_grad()
    def _copy_(self, values: dict[str, Tensor]) -> None:
        reshard_(self._model)  # after a forward pass without a backward, FSDP2 would use gathered weights once more
        for name, weight in self._weights.items():
            weight.copy_(values[name])

    @torch.no_grad()
    def load_(self, state: dict[str, Tensor]) -> None:
        """Take the values of a checkpoint."""
        for name, value in self.state.items():
            value.copy_(state[name])


class BestWeights:
    """Weights of the best evaluation so far: in memory until a checkpoint holds them, then only on disk."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.kept: dict[str, Tensor] | Path | None = None
        """Tensors that no checkpoint holds yet, or the checkpoint that holds them."""

    def take(self, model: nn.Module) -> None:
        """Keep a copy of the weights and buffers that the model has now, of every rank its shards."""
        self.kept = {name: value.detach().to("cpu", copy=True) for name, value in model_tensors(model).items()}

    def put_into_(self, model: nn.Module) -> None:
        """Give the model these weights.

        Raises: RunError if their file is missing or damaged.
        """
        assert self.kept is not None
        reshard_(model)
        if isinstance(self.kept, Path):
            load_model_(model, read_tensors(self.kept, "best", model_tensors(model).get))
        else:
            load_model_(model, self.kept)


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
        """Score the weights that the model has on the first samples of a set; every rank must call it."""
        parts = evaluation_parts(num_samples, self.batch_size, self.share)
        batches = fetch_batches(samples, parts, workers=self.workers, device=self.accelerator.device)
        totals: dict[str, Tensor] = {}
        records: list[Record] = []
        was_training = self.model.training
        self.model.eval()
        try:
            for batch in batches:
                sums_of_batch, found = self.task.collect(self.model, batch)
                for name, value in sums_of_batch.items():
                    totals[name] = totals[name] + value if name in totals else value
                records += found
        finally:
            self.model.train(was_training)
        if self.share.processes > 1:
            from accelerate.utils import gather_object

            totals = self.accelerator.reduce(totals, reduction="sum")
            records = gather_object(records)
        # Most sums are numbers; a confusion matrix or the predictions of a whole set are not.
        sums: dict[str, Any] = {name: value.tolist() if value.dim() else float(value) for name, value in totals.items()}
        in_order = [record for _, record in sorted(records, key=lambda numbered: numbered[0])]
        return self.task.summarise(samples, sums, in_order)

    def write_samples(self) -> list[dict[str, Any]]:
        """Outputs on samples of the weights that are to be evaluated, the same on every rank; each must call it."""
        with self.evaluated_weights():
            return self.task.write_samples(unwrap(self.model))

    def evaluated_weights(self) -> contextlib.AbstractContextManager[None]:
        """The model has the average for a while, if that is what is evaluated."""
        return self.average.in_place() if self.average is not None else contextlib.nullcontext()
