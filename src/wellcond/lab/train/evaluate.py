"""What is looked at during a run, at steps fixed in advance: scores of the weights or their EMA, and conditioning."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Any, Literal

import torch
from torch import Tensor, nn

import wellcond.lab.nystrom  # noqa: F401  (its heads have an operator of their own)
from wellcond.attention.find import find_attention
from wellcond.attention.sharding import reshard_, unwrap
from wellcond.errors import RecipeError
from wellcond.integrations.common import Summaries, summarise
from wellcond.jacobian.problem import show_seconds
from wellcond.lab.recipe import Recipe
from wellcond.lab.tasks.base import AbstractTask, Samples, evaluating
from wellcond.lab.train.batches import evaluation_parts, fetch_batches
from wellcond.lab.train.checkpoint import model_tensors
from wellcond.measurement.tracker import ConditionTracker, TrackPoint


class WeightAverage:
    """EMA of the parameters, a <- decay a + (1 - decay) w after every update; buffers are the model's own."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self._model = decay, model
        self._weights = dict(model.named_parameters())
        self.state = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        current = [weight.detach() for weight in self._weights.values()]
        torch._foreach_lerp_(list(self.state.values()), current, 1 - self.decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap weights and average; swaps them back at the end."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        reshard_(self._model)  # after a forward pass without a backward, FSDP2 would use gathered weights once more
        for name, weight in self._weights.items():
            current = weight.detach().clone()
            weight.copy_(self.state[name])
            self.state[name].copy_(current)

    def load_(self, state: dict[str, Tensor]) -> None:
        """Take the values of a checkpoint."""
        for name, value in self.state.items():
            value.copy_(state[name])


def score_all(recipe: Recipe, task: AbstractTask, model: nn.Module, accelerator: Any) -> dict[str, float]:
    """Score the evaluation set, or its first samples, and the task's further sets."""
    values = score(recipe, task, model, accelerator, task.evaluation, recipe.evaluation.samples)
    for prefix, samples in task.further.items():
        found = score(recipe, task, model, accelerator, samples)
        values |= {f"{prefix}_{name}": value for name, value in found.items()}
    return values


def score(
    recipe: Recipe, task: AbstractTask, model: nn.Module, accelerator: Any, samples: Samples, most: int | None = None
) -> dict[str, float]:
    """Score a set, or its first samples, with a model as Accelerate prepared it; every rank must call it."""
    count, processes = min(len(samples), most or len(samples)), accelerator.num_processes
    parts = evaluation_parts(count, recipe.evaluation.batch_size, accelerator.process_index, processes)
    totals: dict[str, Tensor] = {}
    records: list[tuple[int, Any]] = []
    with evaluating(model):
        for batch in fetch_batches(samples, parts, workers=recipe.training.workers, device=accelerator.device):
            sums_of_batch = task.score(model, batch)
            records += sums_of_batch.pop("records", [])
            for name, value in sums_of_batch.items():
                totals[name] = totals[name] + value if name in totals else value
    if processes > 1:
        from accelerate.utils import gather_object

        totals = accelerator.reduce(totals, reduction="sum")
        records = gather_object(records)
    # Most sums are numbers; a confusion matrix or the predictions of a whole set are not.
    sums: dict[str, Any] = {name: value.tolist() if value.dim() else float(value) for name, value in totals.items()}
    sums["records"] = [record for _, record in sorted(records, key=lambda numbered: numbered[0])]
    return task.metrics(sums, samples)


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


FREE_SECONDS = 10.0
"""What measuring may take in a run however short its training is, so that small models are measured at every step."""


class ConditioningLog:
    """A `ConditionTracker` on rank 0; on every rank if weights are sharded, which gathers one attention at a time.

    Where Accelerate made the forward pass round to half precision, a plain copy on rank 0 is brought up to date and
    measured instead; under FSDP2 only the inputs of an attention are rounded. Jacobians that the recipe's budget does
    not allow are left out, and `notify` is called with a line that says so.
    """

    def __init__(
        self,
        recipe: Recipe,
        task: AbstractTask,
        plain: nn.Module,
        accelerator: Any,
        steps_per_epoch: int,
        notify: Callable[[str], None],
    ) -> None:
        """Make it before Accelerate prepares the model: only then can it be copied."""
        self._notify, self._notified = notify, False
        self.settings, self.task, self.accelerator = recipe.tracking, task, accelerator
        num_steps, every = recipe.training.length.in_steps(steps_per_epoch), recipe.tracking.weights_every
        self.jacobian = jacobian_steps(recipe.tracking.jacobian_points, num_steps)
        self.weights_every = None if every is None else every.in_steps(steps_per_epoch)
        if self.weights_every is not None and num_steps // self.weights_every > 100_000:
            raise RecipeError(
                f"tracking.weights_every: expected at most 100000 measurements, found one every {self.weights_every} "
                f"of {num_steps} steps; give a longer interval"
            )
        asked = bool(self.jacobian or self.weights_every)
        self._measures = asked and (accelerator.is_main_process or accelerator.is_fsdp2)
        rounded = accelerator.mixed_precision != "no" and not accelerator.is_fsdp2
        self._copy = copy.deepcopy(plain) if self._measures and rounded else None
        self._model: nn.Module = plain
        self._tracker: ConditionTracker | None = None

    def begin(self, model: nn.Module, step: int) -> None:
        """Start with `model` as Accelerate prepared it, after `step` updates."""
        self._model = model
        if not self._measures:
            return
        measured = unwrap(model) if self._copy is None else self._copy
        settings, sites = self.settings, find_attention(measured, strict=False)
        most = max(site.num_kv_heads for site in sites)
        if settings.stacked and (other := next((s for s in sites if s.kind != "softmax" or s.cross), None)):
            raise RecipeError(
                f"tracking.stacked: expected self-attention with a softmax, found {other.name} ({other.kind} "
                "attention), for which the papers' matrix is not defined; set tracking.stacked=false"
            )
        if isinstance(settings.heads, tuple) and min(settings.heads) >= most:
            raise RecipeError(f"tracking.heads: expected numbers from 0 to {most - 1}, found {settings.heads}")
        probe: Any = self.task.probe(settings.samples)
        if self._copy is None:
            from accelerate.utils import send_to_device

            probe = send_to_device(probe, self.accelerator.device)
        self._tracker = ConditionTracker(
            measured,
            probe,
            every=(),
            budget=None,
            first_step=step,
            heads=settings.heads,
            samples=settings.samples,
            convention="stack" if settings.stacked else "wide",
            on_slow=self._say_slow,
        )

    def _say_slow(self, seconds: float) -> None:
        self._notify(f"measuring is expected to take up to {show_seconds(seconds)} at this step; {HOW_TO_CHANGE}")

    def due(self, step: int, *, last: bool) -> Literal["jacobian", "weights"] | None:
        """What is measured after this step; with a Jacobian also weights."""
        if step in self.jacobian or (last and self.jacobian):
            return "jacobian"
        return "weights" if self.weights_every is not None and (last or step % self.weights_every == 0) else None

    def measure(self, step: int, *, jacobian: bool, seconds: Mapping[str, float]) -> list[TrackPoint]:
        """Measure what is due at a step, given the seconds of the run so far by activity; every rank must call it."""
        if self._tracker is None:
            return []
        budget, within = self.settings.budget, None
        if budget is not None:
            within = max(FREE_SECONDS, budget * seconds["training"]) - seconds["measuring"]
        if self._copy is not None:
            self._copy.load_state_dict(model_tensors(self._model))
        self._tracker.num_steps = step
        points = self._tracker.measure_now(jacobian=jacobian, within=within)
        refused = self._tracker.refused_seconds
        if refused is not None and not self._notified:
            self._notified = True
            self._notify(
                f"kappa(J) was not measured at step {step}: it may take {show_seconds(refused)}, and tracking.budget="
                f"{budget:g} leaves {show_seconds(max(0.0, within or 0.0))}; {HOW_TO_CHANGE}"
            )
        return points


HOW_TO_CHANGE = (
    "change that with --set tracking.budget (null for no limit), tracking.heads ([0]: one a layer) or "
    "tracking.jacobian_points (0: no kappa(J))"
)


FOR_TRACKERS: Summaries = [
    ("kappa_J", "pseudo_condition_number", geometric_mean),
    *((f"kappa_W_{role.upper()}", f"kappa_{role}", geometric_mean) for role in "qkv"),
    ("entropy", "normalised_entropy", fmean),
    ("dead_heads", "dead", sum),
]


def layer_numbers(points: Sequence[TrackPoint]) -> dict[str, float]:
    """Points of one step as numbers for a tracker, grouped by layer."""
    numbers: dict[str, float] = {}
    for layer in dict.fromkeys(point.layer for point in points):
        heads = [point.to_dict() for point in points if point.layer == layer]
        numbers |= summarise(f"conditioning/{layer}/", heads, FOR_TRACKERS)
    return numbers
