"""Wall time of a run, split by what it was spent on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Literal, get_args

Activity = Literal["setup", "training", "evaluation", "measuring", "checkpointing"]


class RunClock:
    """Time counts as training unless something else is going on."""

    def __init__(self) -> None:
        """Time counts as setting up at first."""
        self.seconds: dict[str, float] = dict.fromkeys(get_args(Activity), 0.0)
        self._since = time.perf_counter()
        self._activity: Activity = "setup"

    def switch(self, activity: Activity) -> Activity:
        """From now on time counts for another activity; returns the former one."""
        now = time.perf_counter()
        self.seconds[self._activity] += now - self._since
        self._since, former, self._activity = now, self._activity, activity
        return former

    @contextlib.contextmanager
    def spent_on(self, activity: Activity) -> Iterator[None]:
        """Time inside counts for one activity."""
        former = self.switch(activity)
        try:
            yield
        finally:
            self.switch(former)

    def add(self, seconds: dict[str, float]) -> None:
        """Take over the times of earlier sessions."""
        for activity, value in seconds.items():
            self.seconds[activity] += value

    def now(self) -> dict[str, float]:
        """Seconds so far."""
        self.switch(self._activity)
        return {name: round(value, 6) for name, value in self.seconds.items()}
