"""What a run carries from step to step besides weights: small, and exact in JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class TrainState:
    """Training state of a checkpoint, from which the logs of a resumed run are identical."""

    step: int = 0
    parts_spared: int = 0
    """Parts that updates did without while the batch was growing."""
    window: list[float] = field(default_factory=list)
    """Losses since the last row of steps.jsonl."""
    sum_since_evaluation: float = 0.0
    count_since_evaluation: int = 0
    first_loss: float | None = None
    """Loss of the first update, which divergence is judged against."""
    final: dict[str, Any] | None = None
    best: dict[str, Any] | None = None

    def take(self, losses: list[float]) -> None:
        """Note the losses of further updates, in their order."""
        if self.first_loss is None and losses:
            self.first_loss = losses[0]
        self.window += losses
        for loss in losses:
            self.sum_since_evaluation += loss
        self.count_since_evaluation += len(losses)

    def close_window(self) -> float:
        """Mean loss since the last row; begins the next."""
        mean = math.fsum(self.window) / len(self.window)
        self.window = []
        return mean

    def close_evaluation(self) -> float | None:
        """Mean training loss since the last evaluation; None if there was no update."""
        mean = self.sum_since_evaluation / self.count_since_evaluation if self.count_since_evaluation else None
        self.sum_since_evaluation, self.count_since_evaluation = 0.0, 0
        return mean

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def newest_loss(state: TrainState, losses: list[Tensor]) -> float | None:
    """The newest loss that is known without waiting for the device, given those that the state has not taken yet."""
    if losses and losses[-1].device.type == "cpu":
        return float(losses[-1])
    return state.window[-1] if state.window else None


class Diverged(Exception):
    """The loss is not finite, or far above where it began."""


def check_loss(loss: float, first: float | None, factor: float | None, step: int) -> None:
    """Raise Diverged, with the reason."""
    if not math.isfinite(loss):
        raise Diverged(f"the loss is {loss} at step {step}")
    if factor is not None and first is not None and loss > factor * max(first, 1e-6):
        raise Diverged(f"the loss at step {step} is {loss:.4g}, more than {factor:g} times the first, {first:.4g}")
