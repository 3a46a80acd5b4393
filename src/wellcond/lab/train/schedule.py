"""Learning rates as pure functions of the step: nothing to save, nothing to restore.

Every schedule gives a `Point` for update number t = 0, 1, ..., T-1: the learning rate as a share of the peak and, for
one_cycle with momentum, the first beta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from wellcond.lab.settings import Interval, Settings

Share = Annotated[float, Field(ge=0, le=1)]
"""Of the peak."""


@dataclass(frozen=True)
class Point:
    """What the optimiser is set to for one update."""

    factor: float
    beta1: float | None = None


Curve = Callable[[int], Point]


def _steps(interval: Interval | None, steps_per_epoch: int) -> int:
    return 0 if interval is None else interval.in_steps(steps_per_epoch)


class _WarmUp(Settings):
    warmup: Interval | None = None
    start: Share = 0.0
    """Share of the peak from which the warm-up rises."""

    def curve(self, num_steps: int, steps_per_epoch: int) -> Curve:
        """Learning rate of every update; the peak is reached with update number `warmup`."""
        warmup = _steps(self.warmup, steps_per_epoch)
        after = self.after_warmup(num_steps, steps_per_epoch, warmup)
        return lambda t: Point(self.start + (1 - self.start) * t / warmup if t < warmup else after(t))

    def after_warmup(self, num_steps: int, steps_per_epoch: int, warmup: int) -> Callable[[int], float]:
        """Share of the peak after the warm-up."""
        return lambda t: 1.0


class Constant(_WarmUp):
    """The peak throughout, after the warm-up."""

    name: Literal["constant"] = "constant"


class Linear(_WarmUp):
    """Straight down to `end`."""

    name: Literal["linear"] = "linear"
    end: Share = 0.0

    def after_warmup(self, num_steps: int, steps_per_epoch: int, warmup: int) -> Callable[[int], float]:
        """Share of the peak after the warm-up."""
        length = max(1, num_steps - warmup)
        return lambda t: self.end + (1 - self.end) * (1 - (t - warmup) / length)


class Cosine(_WarmUp):
    """Half a cosine down to `end`, then `cooldown` at `end`."""

    name: Literal["cosine"] = "cosine"
    end: Share = 0.0
    cooldown: Interval | None = None

    def after_warmup(self, num_steps: int, steps_per_epoch: int, warmup: int) -> Callable[[int], float]:
        """Share of the peak after the warm-up."""
        length = max(1, num_steps - warmup - _steps(self.cooldown, steps_per_epoch))

        def at(t: int) -> float:
            progress = min(1.0, (t - warmup) / length)
            return self.end + (1 - self.end) * 0.5 * (1 + math.cos(math.pi * progress))

        return at


class Steps(_WarmUp):
    """Multiplied by `factor` at each milestone, during the warm-up too."""

    name: Literal["steps"] = "steps"
    milestones: tuple[Interval, ...]
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1

    def curve(self, num_steps: int, steps_per_epoch: int) -> Curve:
        """Learning rate of every update."""
        risen = super().curve(num_steps, steps_per_epoch)
        marks = [_steps(milestone, steps_per_epoch) for milestone in self.milestones]
        return lambda t: Point(self.factor ** sum(t >= mark for mark in marks) * risen(t).factor)


class OneCycle(Settings):
    """torch's OneCycleLR: up from peak/25 for `rise` of the steps, down to peak/250,000; beta 1 the other way."""

    name: Literal["one_cycle"] = "one_cycle"
    rise: Annotated[float, Field(gt=0, lt=1)] = 0.3
    anneal: Literal["cos", "linear"] = "cos"
    cycle_momentum: bool = True
    start: Share = 1 / 25
    end: Share = 1 / 25e4

    def curve(self, num_steps: int, steps_per_epoch: int) -> Curve:
        """Learning rate and first beta of every update."""
        top = self.rise * num_steps - 1

        def between(start: float, end: float, share: float) -> float:
            if self.anneal == "linear":
                return (end - start) * share + start
            return end + (start - end) / 2 * (1 + math.cos(math.pi * share))

        def at(t: int) -> Point:
            if t <= top:
                share = t / top if top > 0 else 1.0
                factor, beta = between(self.start, 1.0, share), between(0.95, 0.85, share)
            else:
                share = (t - top) / max(1e-12, num_steps - 1 - top)
                factor, beta = between(1.0, self.end, share), between(0.85, 0.95, share)
            return Point(factor, beta if self.cycle_momentum else None)

        return at


class Triangular(Settings):
    """Straight up from `begin` to the peak at share `peak` of the budget, straight down to zero."""

    name: Literal["triangular"] = "triangular"
    peak: Annotated[float, Field(gt=0, lt=1)] = 0.5
    begin: Share = 0.0

    def curve(self, num_steps: int, steps_per_epoch: int) -> Curve:
        """Learning rate of every update."""
        top = self.peak * num_steps
        # min with 1: in a run of few steps the peak lies before the first or after the last update
        return lambda t: Point(
            min(1.0, self.begin + (1 - self.begin) * (t + 1) / top, (num_steps - t) / (num_steps - top))
        )


ScheduleSettings = Annotated[Constant | Linear | Cosine | OneCycle | Triangular | Steps, Field(discriminator="name")]
