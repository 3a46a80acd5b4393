"""A batch that grows during training, as in Crammed BERT, where it is full after 60 % of the time."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchRamp:
    """How many of its parts an update has; the first updates have fewer, and so there are more of them in a time."""

    share: float | None
    """Of the length, after which the batch is full; None for a full batch from the start."""
    parts: int
    """Of a full batch."""
    num_steps: int

    def parts_of(self, point: int) -> int:
        """Parts of the update at a point of the schedule.

        Example:
            >>> ramp = BatchRamp(share=0.5, parts=4, num_steps=16)
            >>> [ramp.parts_of(step) for step in range(10)]
            [1, 1, 2, 2, 3, 3, 4, 4, 4, 4]
        """
        if self.share is None:
            return self.parts
        return min(self.parts, math.ceil(self.parts * (point + 1) / (self.share * self.num_steps)))
