"""Conditioning during a run, at steps fixed in advance: the record does not depend on the speed of the machine.

Only the end of a run with a time budget is not known before.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from statistics import fmean, geometric_mean
from typing import Any

from torch import nn

from wellcond.attention.distributed import unwrap
from wellcond.attention.find import find_attention
from wellcond.lab.recipe import TrackingSettings
from wellcond.lab.settings import RecipeError
from wellcond.lab.tasks.base import AbstractTask
from wellcond.lab.train.checkpoint import model_tensors
from wellcond.tracking import ConditionTracker

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


def tracked_steps(settings: TrackingSettings, num_steps: int, steps_per_epoch: int) -> tuple[frozenset, frozenset]:
    """Steps at which the Jacobian, and at which only weights and attention maps, are measured."""
    weights: frozenset[int] = frozenset()
    if settings.weights_every is not None:
        every = settings.weights_every.in_steps(steps_per_epoch)
        if num_steps // every > MOST_POINTS:
            raise RecipeError(
                f"tracking.weights_every: expected at most {MOST_POINTS} measurements, found one every {every} of "
                f"{num_steps} steps; give a longer interval"
            )
        weights = frozenset({*range(0, num_steps + 1, every), num_steps})
    jacobian = jacobian_steps(settings.jacobian_points, num_steps)
    return jacobian, weights - jacobian


class ConditioningLog:
    """A `ConditionTracker` on rank 0; on every rank if weights are sharded, which gathers one attention at a time.

    Where Accelerate made the forward pass round to half precision, a plain copy on rank 0 is brought up to date and
    measured instead. Under FSDP2 only the inputs of an attention are rounded; its weights are read as they are stored.
    """

    def __init__(
        self,
        settings: TrackingSettings,
        task: AbstractTask,
        plain: nn.Module,
        accelerator: Any,
        num_steps: int,
        steps_per_epoch: int,
    ) -> None:
        """Make it before Accelerate prepares the model: only then can it be copied."""
        self.settings, self.task, self.accelerator = settings, task, accelerator
        self.jacobian, self.weights = tracked_steps(settings, num_steps, steps_per_epoch)
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
            device = self.accelerator.device
            is_dict = isinstance(probe, dict)
            probe = {name: value.to(device) for name, value in probe.items()} if is_dict else probe.to(device)
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


FOR_TRACKERS = {
    "kappa_J": ("pseudo_condition_number", geometric_mean),
    **{f"kappa_W_{role.upper()}": (f"kappa_{role}", geometric_mean) for role in "qkv"},
    "entropy": ("normalised_entropy", fmean),
}
"""What trackers get of every layer: the field of a row, and its mean over heads."""


def layer_numbers(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Rows of one step as numbers for a tracker, grouped by layer; loggers want finite ones, so others are left out.

    Example:
        >>> row = {"layer": "blocks.3", "pseudo_condition_number": 10.0, "normalised_entropy": 0.5, "dead": False}
        >>> numbers = layer_numbers([row, row | {"pseudo_condition_number": 1000.0, "dead": True}])
        >>> round(numbers["conditioning/blocks.3/kappa_J"]), numbers["conditioning/blocks.3/dead_heads"]
        (100, 1.0)
    """
    numbers: dict[str, float] = {}
    for layer in dict.fromkeys(row["layer"] for row in rows):
        heads = [row for row in rows if row["layer"] == layer]
        for name, (key, mean) in FOR_TRACKERS.items():
            values = [float(head[key]) for head in heads if head.get(key) is not None]
            if finite := [value for value in values if math.isfinite(value)]:
                numbers[f"conditioning/{layer}/{name}"] = mean(finite)
        numbers[f"conditioning/{layer}/dead_heads"] = float(sum(bool(head["dead"]) for head in heads))
    return numbers
