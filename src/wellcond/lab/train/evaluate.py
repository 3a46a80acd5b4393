"""What is looked at during a run: the score of the weights, or of their EMA, the best weights, and the conditioning.

Conditioning is measured at steps fixed in advance, so that the record does not depend on the speed of the machine; only
the end of a run with a time budget is not known before.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from statistics import fmean, geometric_mean
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.distributed import reshard_, unwrap
from wellcond.attention.find import find_attention
from wellcond.lab.recipe import Recipe
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.base import AbstractTask, Samples, evaluating
from wellcond.lab.train.batches import Share, evaluation_parts, fetch_batches
from wellcond.lab.train.checkpoint import model_tensors
from wellcond.tracking import ConditionTracker


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

    def load_(self, state: dict[str, Tensor]) -> None:
        """Take the values of a checkpoint."""
        for name, value in self.state.items():
            value.copy_(state[name])


def find_test_set(recipe: Recipe, task: AbstractTask) -> Samples | None:
    """What `evaluation.test` asks to score at the end; None if it asks for nothing, RecipeError if there is none."""
    wanted = recipe.evaluation.test
    if wanted is None:
        return None
    if task.test is None or not len(task.test):
        raise RecipeError(
            f"evaluation.test: {wanted} needs a labelled split named test, which {task.data.name} does not have here. "
            "Give other data, or evaluation.test=null: results are then those on the evaluation set"
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
        average: WeightAverage | None = None,
    ) -> None:
        """`average` is what is evaluated instead of the weights, where there is one."""
        self.task, self.model, self.accelerator, self.average = task, model, accelerator, average
        self.share = Share(accelerator.process_index, accelerator.num_processes)
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

    def score(self, samples: Samples, num_samples: int) -> dict[str, float]:
        """Score the weights that the model has on the first samples of a set; every rank must call it."""
        parts = evaluation_parts(num_samples, self.batch_size, self.share)
        batches = fetch_batches(samples, parts, workers=self.workers, device=self.accelerator.device)
        totals: dict[str, Tensor] = {}
        records: list[tuple[int, Any]] = []
        with evaluating(self.model):
            for batch in batches:
                sums_of_batch = self.task.score(self.model, batch)
                records += sums_of_batch.pop("records", [])
                for name, value in sums_of_batch.items():
                    totals[name] = totals[name] + value if name in totals else value
        if self.share.processes > 1:
            from accelerate.utils import gather_object

            totals = self.accelerator.reduce(totals, reduction="sum")
            records = gather_object(records)
        # Most sums are numbers; a confusion matrix or the predictions of a whole set are not.
        sums: dict[str, Any] = {name: value.tolist() if value.dim() else float(value) for name, value in totals.items()}
        sums["records"] = [record for _, record in sorted(records, key=lambda numbered: numbered[0])]
        return self.task.metrics(sums, samples)

    def evaluated_weights(self) -> contextlib.AbstractContextManager[None]:
        """The model has the average for a while, if that is what is evaluated."""
        return self.average.in_place() if self.average is not None else contextlib.nullcontext()


# Conditioning


MOST_POINTS = 100_000


def jacobian_steps(num_points: int, num_steps: int) -> frozenset[int]:
    """Step 0, the last step, and logarithmically spaced ones between.

    Example:
        >>> sorted(jacobian_steps(5, 1000))
        [0, 1, 10, 100, 1000]
    """
    if num_points < 2:
        return frozenset({num_steps} if num_points else ())
    between = num_points - 2
    return frozenset({0, num_steps} | {round(math.exp(math.log(num_steps) * k / between)) for k in range(between)})


class ConditioningLog:
    """A `ConditionTracker` on rank 0; on every rank if weights are sharded, which gathers one attention at a time.

    Where Accelerate made the forward pass round to half precision, a plain copy on rank 0 is brought up to date and
    measured instead. Under FSDP2 only the inputs of an attention are rounded; its weights are read as they are stored.
    """

    def __init__(
        self, recipe: Recipe, task: AbstractTask, plain: nn.Module, accelerator: Any, steps_per_epoch: int
    ) -> None:
        """Make it before Accelerate prepares the model: only then can it be copied."""
        settings, num_steps = recipe.tracking, recipe.training.length.in_steps(steps_per_epoch)
        self.settings, self.task, self.accelerator = settings, task, accelerator
        self.jacobian = jacobian_steps(settings.jacobian_points, num_steps)
        self.weights: frozenset[int] = frozenset()
        """Steps at which the Jacobian, and at which only weights and attention maps, are measured."""
        if settings.weights_every is not None:
            every = settings.weights_every.in_steps(steps_per_epoch)
            if num_steps // every > MOST_POINTS:
                raise RecipeError(
                    f"tracking.weights_every: expected at most {MOST_POINTS} measurements, found one every {every} of "
                    f"{num_steps} steps; give a longer interval"
                )
            self.weights = frozenset({*range(0, num_steps + 1, every), num_steps}) - self.jacobian
        self.steps = self.jacobian | self.weights
        self._measures = bool(self.steps) and (accelerator.is_main_process or accelerator.is_fsdp2)
        rounded = accelerator.mixed_precision != "no" and not accelerator.is_fsdp2
        self._copy = copy.deepcopy(plain) if self._measures and rounded else None
        self._tracker: ConditionTracker | None = None
        self._model: nn.Module = plain

    def begin(self, model: nn.Module, step: int) -> list[dict[str, Any]]:
        """Start with `model` as Accelerate prepared it, after `step` updates; returns the rows of step 0, if due."""
        self._model = model
        if not self._measures:
            return []
        measured = unwrap(model) if self._copy is None else self._copy
        most = max(site.num_kv_heads for site in find_attention(unwrap(measured), strict=False))
        if self.settings.heads is not None and min(self.settings.heads) >= most:
            raise RecipeError(f"tracking.heads: expected numbers from 0 to {most - 1}, found {self.settings.heads}")
        probe: Any = self.task.probe(self.settings.samples)
        if self._copy is None:
            from accelerate.utils import send_to_device

            probe = send_to_device(probe, self.accelerator.device)
        self._tracker = ConditionTracker(
            measured,
            probe,
            every=self.jacobian,
            weights_every=self.weights,
            budget=None,
            first_step=step,
            samples=self.settings.samples,
            heads=self.settings.heads,
        )
        return [point.to_json_dict() for point in self._tracker.points]

    def end_at(self, step: int) -> None:
        """Measure after this step what the end of a run is measured by."""
        if self.settings.jacobian_points > 0:
            self.jacobian |= {step}
        elif self.settings.weights_every is not None:
            self.weights |= {step}
        self.steps = self.jacobian | self.weights
        if self._tracker is not None:
            self._tracker.every, self._tracker.weights_every = self.jacobian, self.weights

    def after(self, step: int) -> list[dict[str, Any]]:
        """Rows of this step, usually none; every rank must call it after every update."""
        if self._copy is not None and step in self.steps:
            self._copy.load_state_dict(model_tensors(self._model))
        return [] if self._tracker is None else [point.to_json_dict() for point in self._tracker.step()]


FOR_TRACKERS = {"kappa_J": "pseudo_condition_number", "kappa_W_Q": "kappa_q", "kappa_W_K": "kappa_k",
                "kappa_W_V": "kappa_v", "entropy": "normalised_entropy"}  # fmt: skip
"""What trackers get of every layer, and the field of a row whose mean over heads it is."""


def layer_numbers(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Rows of one step as numbers for a tracker, grouped by layer; loggers want finite ones, so others are left out."""
    numbers: dict[str, float] = {}
    for layer in dict.fromkeys(row["layer"] for row in rows):
        heads = [row for row in rows if row["layer"] == layer]
        for name, key in FOR_TRACKERS.items():
            values = [float("nan" if head.get(key) is None else head[key]) for head in heads]
            if finite := [value for value in values if math.isfinite(value)]:
                mean = fmean if name == "entropy" else geometric_mean
                numbers[f"conditioning/{layer}/{name}"] = mean(finite)
        numbers[f"conditioning/{layer}/dead_heads"] = float(sum(bool(head["dead"]) for head in heads))
    return numbers
