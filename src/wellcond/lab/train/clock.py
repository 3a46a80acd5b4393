"""Wall time of a run, split by what it was spent on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch

Activity = Literal["setup", "training", "evaluation", "measuring", "checkpointing"]


def synchronizer(device: torch.device) -> Callable[[], None]:
    """What waits for the work that is queued on a device; a CPU has none."""
    if device.type in ("cuda", "mps", "xpu"):
        return lambda: torch.get_device_module(device).synchronize()
    return lambda: None


class RunClock:
    """Time counts as training unless something else is going on.

    A device works through a queue, so that the time of an update passes when somebody waits for it: before another
    activity begins, the clock waits, and the time counts for the one that asked for the work.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        """Time counts as setting up at first; `synchronize` waits for the device."""
        self.synchronize = synchronize
        self.seconds: dict[str, float] = dict.fromkeys(get_args(Activity), 0.0)
        self._since = time.perf_counter()
        self._activity: Activity = "setup"

    def switch(self, activity: Activity) -> Activity:
        """From now on time counts for another activity; returns the former one."""
        if activity != self._activity:
            self.synchronize()
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
        """Seconds so far. It does not wait for the device: what is queued counts once it has been waited for."""
        self.switch(self._activity)
        return {name: round(value, 6) for name, value in self.seconds.items()}
