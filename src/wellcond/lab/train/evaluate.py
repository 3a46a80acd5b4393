"""What is looked at during a run, at steps fixed in advance: scores of the weights or their EMA, and conditioning."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, geometric_mean
from typing import Any, Literal

import torch
from torch import Tensor, nn

import wellcond.lab.nystrom  # noqa: F401  (its heads have an operator of their own)
from wellcond.attention.find import find_attention
from wellcond.attention.sharding import is_sharded, reshard_, unwrap
from wellcond.errors import RecipeError, WellcondError
from wellcond.integrations.common import Summaries, summarise
from wellcond.jacobian.problem import show_seconds
from wellcond.lab.recipe import Recipe
from wellcond.lab.tasks.base import AbstractTask, Samples, evaluating
from wellcond.lab.train.batches import evaluation_parts, fetch_batches
from wellcond.measurement.records import JACOBIAN_NUMBERS
from wellcond.measurement.tracker import ConditionTracker, TrackPoint
from wellcond.private import without_mixed_precision


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
    """A `ConditionTracker` on every rank, on the device that it trains on; rank 0 gets the points of all of them.

    Ranks measure different layers at the same time, so that none waits long for another. If weights are sharded they
    measure the same ones together, which gathers one attention at a time. A forward pass that Accelerate rounds to half
    precision is measured as the model has it, without rounding. Jacobians that the recipe's budget does not allow are
    left out, of all layers alike, and `notify` is called with a line that says so.
    """

    def __init__(
        self, recipe: Recipe, task: AbstractTask, accelerator: Any, steps_per_epoch: int, notify: Callable[[str], None]
    ) -> None:
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
        self._tracker: ConditionTracker | None = None
        self._sharded = False
        self._model: nn.Module = nn.Identity()
        self._layers: dict[str, int] = {}
        """Names of all layers that are measured, in the order of the model."""

    def begin(self, model: nn.Module, step: int) -> None:
        """Start with `model` as Accelerate prepared it, after `step` updates."""
        if not (self.jacobian or self.weights_every):
            return
        self._model = unwrap(model)
        sites, settings = find_attention(self._model, strict=False), self.settings
        most = max(site.num_kv_heads for site in sites)
        if settings.stacked and (other := next((s for s in sites if s.kind != "softmax" or s.cross), None)):
            raise RecipeError(
                f"tracking.stacked: expected self-attention with a softmax, found {other.name} ({other.kind} "
                "attention), for which the papers' matrix is not defined; set tracking.stacked=false"
            )
        if isinstance(settings.heads, tuple) and min(settings.heads) >= most:
            raise RecipeError(f"tracking.heads: expected numbers from 0 to {most - 1}, found {settings.heads}")
        self._layers = {site.name: number for number, site in enumerate(sites)}
        self._sharded = is_sharded(self._model)
        if not self._sharded:
            sites = sites[self.accelerator.process_index :: self.accelerator.num_processes]
        wanted = settings.heads or (0,)
        if not any(wanted == "all" or min(wanted) < site.num_kv_heads for site in sites):
            return  # more ranks than layers
        from accelerate.utils import send_to_device

        self._tracker = ConditionTracker(
            self._model,
            send_to_device(self.task.probe(settings.samples), self.accelerator.device),
            every=(),
            budget=None,
            sites=sites,
            first_step=step,
            heads=settings.heads,
            samples=settings.samples,
            convention="stack" if settings.stacked else "wide",
            on_slow=self._say_slow,
        )
        self._tracker.active = True

    def _say_slow(self, seconds: float) -> None:
        self._notify(f"measuring is expected to take up to {show_seconds(seconds)} at this step; {HOW_TO_CHANGE}")

    def due(self, step: int, *, last: bool) -> Literal["jacobian", "weights"] | None:
        """What is measured after this step; with a Jacobian also weights."""
        if step in self.jacobian or (last and self.jacobian):
            return "jacobian"
        return "weights" if self.weights_every is not None and (last or step % self.weights_every == 0) else None

    def measure(self, step: int, *, jacobian: bool, seconds: Mapping[str, float]) -> list[TrackPoint]:
        """Measure what is due at a step, given the seconds of the run so far by activity; every rank must call it."""
        budget, within = self.settings.budget, None
        if budget is not None:
            within = max(FREE_SECONDS, budget * seconds["training"]) - seconds["measuring"]
        points, refused = self._of_all_ranks(lambda: self._measure_mine(step, jacobian, within))
        if refused is not None and not self._notified:
            self._notified = True
            self._notify(
                f"kappa(J) was not measured at step {step}: it may take {show_seconds(refused)}, and tracking.budget="
                f"{budget:g} leaves {show_seconds(max(0.0, within or 0.0))}; {HOW_TO_CHANGE}"
            )
        return points

    def _measure_mine(self, step: int, jacobian: bool, within: float | None) -> tuple[list[TrackPoint], float | None]:
        """Points of this rank's layers, and how many seconds Jacobians that were refused may take."""
        if self._tracker is None:
            return [], None
        self._tracker.num_steps = step
        with contextlib.nullcontext() if self._sharded else without_mixed_precision(self._model):
            points = self._tracker.measure_now(jacobian=jacobian, within=within)
        return points, self._tracker.refused_seconds

    def _of_all_ranks(
        self, measure: Callable[[], tuple[list[TrackPoint], float | None]]
    ) -> tuple[list[TrackPoint], float | None]:
        """What the ranks measure together; where one refuses Jacobians, no point has any."""
        if self.accelerator.num_processes == 1 or self._sharded:
            return measure()
        from accelerate.utils import gather_object

        try:
            mine = *measure(), ""
        except WellcondError as error:  # raised once every rank knows, or the others would wait for this one
            mine = [], None, str(error)
        found = gather_object([mine])
        if problems := [problem for _, _, problem in found if problem]:
            raise WellcondError(problems[0])
        points = sorted((point for those, _, _ in found for point in those), key=lambda p: self._layers[p.layer])
        refused = max((seconds for _, seconds, _ in found if seconds is not None), default=None)
        if refused is not None:
            points = [replace(point, **dict.fromkeys(JACOBIAN_NUMBERS)) for point in points]
        return points, refused


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
