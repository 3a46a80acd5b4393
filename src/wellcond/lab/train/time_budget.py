"""Training for a given time instead of a given number of updates, as in Crammed BERT's 24 hours on one GPU."""

from __future__ import annotations

from typing import Any

import torch

from wellcond.lab.train.clock import RunClock
from wellcond.lab.train.schedule import Curve


class TimeBudget:
    """Time that may be spent on training; evaluating, measuring and saving do not count.

    Such a run is not reproducible to the bit: how far the schedule is depends on the speed of the machine.
    """

    def __init__(self, hours: float | None, clock: RunClock, accelerator: Any) -> None:
        """Of a run whose clock goes on where an earlier session stopped; None for no limit."""
        self.hours, self.clock, self.accelerator = hours, clock, accelerator
        self.used = 0.0
        """Share of the time, when it was last looked at; 1 is all of it."""

    def look(self) -> None:
        """Read the clock of the first process; every process must call it, and all see the same."""
        if self.hours is None:
            return
        used = min(1.0, self.clock.now()["training"] / (3600 * self.hours))
        if self.accelerator.num_processes > 1:
            from accelerate.utils import broadcast

            used = float(broadcast(torch.tensor(used, device=self.accelerator.device)))
        self.used = used

    @property
    def is_used(self) -> bool:
        """Whether training must end."""
        return self.used >= 1

    def steps_expected(self, step: int, num_steps: int) -> int:
        """How many updates there will be if they go on at their present pace, at most `num_steps`."""
        return num_steps if self.used * num_steps <= step else max(step, round(step / self.used))

    def point(self, step: int, num_steps: int) -> int:
        """Where a schedule of `num_steps` updates is: as far as the time, or as the updates if they are done sooner."""
        return max(step, min(num_steps - 1, int(self.used * num_steps)))

    def squeezed(self, curve: Curve, num_steps: int) -> Curve:
        """A schedule of `num_steps` updates within the time."""
        return lambda step: curve(self.point(step, num_steps))
