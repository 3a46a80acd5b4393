"""A recipe's lengths and intervals in updates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wellcond.lab.recipe import Recipe
from wellcond.lab.train.batches import UpdatePlan


@dataclass(frozen=True)
class Lengths:
    """Everything about a run's length, in updates."""

    num_steps: int
    steps_per_epoch: int
    evaluate_every: int
    save_every: int

    @classmethod
    def of(cls, recipe: Recipe, plan: UpdatePlan) -> Lengths:
        """From a recipe's intervals."""
        per_epoch = plan.steps_per_epoch
        return cls(
            recipe.training.length.in_steps(per_epoch),
            per_epoch,
            recipe.evaluation.every.in_steps(per_epoch),
            recipe.checkpoint.every.in_steps(per_epoch),
        )

    def ending_at(self, step: int) -> Lengths:
        """Of a run that ends earlier."""
        return replace(self, num_steps=step)

    def epoch(self, step: float) -> float:
        """Epochs done after so many updates with full batches."""
        return round(step / self.steps_per_epoch, 6)
