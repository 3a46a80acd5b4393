"""How far a run is, when it ends, and what time and memory it takes."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import multiprocessing.resource_tracker
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor


def ramped_parts(share: float | None, parts: int, point: int, num_steps: int) -> int:
    """Parts of the update at a point of a schedule, all of them after a `share` of it; fewer parts, more updates."""
    return parts if share is None else min(parts, math.ceil(parts * (point + 1) / (share * num_steps)))


class TimeBudget:
    """Training for a given time, as in Crammed BERT's 24 hours; evaluating, measuring and saving do not count."""

    def __init__(self, hours: float | None, clock: RunClock, accelerator: Any) -> None:
        self.hours, self.clock, self.accelerator = hours, clock, accelerator
        self.used = 0.0
        """Share of the time when it was last looked at; training ends at 1."""

    def look(self) -> float:
        """Share of the time by the clock of rank 0; every rank must call it, and all see the same."""
        if self.hours is None:
            return 0.0
        self.used = min(1.0, self.clock.now()["training"] / (3600 * self.hours))
        if self.accelerator.num_processes > 1:
            shared = torch.tensor(self.used, dtype=torch.float64)
            torch.distributed.broadcast(shared, src=0, group=host_group())
            self.used = float(shared)
        return self.used

    def steps_expected(self, step: int, num_steps: int) -> int:
        """Number of updates at the present pace, at most `num_steps`."""
        return num_steps if self.used * num_steps <= step else max(step, round(step / self.used))

    def point(self, step: int, num_steps: int) -> int:
        """Where a schedule of `num_steps` updates is: as far as the time, or as the updates if they are done sooner."""
        return max(step, min(num_steps - 1, int(self.used * num_steps)))


class Diverged(Exception):
    """The loss is not finite, or far above where it began."""


def check_loss(loss: float, step: int, most: float = math.inf) -> None:
    """Raise Diverged if a loss is not finite, or above `most`."""
    if not math.isfinite(loss):
        raise Diverged(f"the loss is {loss} at step {step}")
    if loss > most:
        raise Diverged(f"the loss at step {step} is {loss:.4g}, too many times the first: more than {most:.4g}")


@dataclass
class TrainState:
    """What a run carries from step to step besides weights: small, and exact in JSON."""

    step: int = 0
    parts_spared: int = 0
    """Parts that updates did without while the batch was growing."""
    window: list[float] = field(default_factory=list)
    """Losses since the last row of steps.jsonl."""
    sum_since_evaluation: float = 0.0
    count_since_evaluation: int = 0
    first_loss: float | None = None
    final: dict[str, Any] | None = None
    best: dict[str, Any] | None = None

    def take(self, losses: list[float]) -> None:
        """Note the losses of further updates, in their order."""
        if self.first_loss is None and losses:
            self.first_loss = losses[0]
        self.window += losses
        for loss in losses:  # not with sum, whose rounding would depend on where a session ends
            self.sum_since_evaluation += loss
        self.count_since_evaluation += len(losses)

    def close_window(self) -> float:
        """Mean loss since the last row; begins the next."""
        window, self.window = self.window, []
        return math.fsum(window) / len(window)

    def close_evaluation(self) -> float | None:
        """Mean training loss since the last evaluation; None if there was no update."""
        total, count = self.sum_since_evaluation, self.count_since_evaluation
        self.sum_since_evaluation, self.count_since_evaluation = 0.0, 0
        return total / count if count else None


class RunClock:
    """Wall time of a run, split by activity; before another one begins, it waits for what was queued on the device."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.seconds = dict.fromkeys(("setup", "training", "evaluation", "measuring", "checkpointing"), 0.0)
        self._since, self._activity = time.perf_counter(), "setup"

    def synchronize(self) -> None:
        """Wait for a device that works through a queue."""
        if self.device is not None and self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def switch(self, activity: str) -> str:
        """From now on time counts for another activity; returns the former one."""
        if activity != (former := self._activity):
            self.synchronize()
        now = time.perf_counter()
        self.seconds[former] += now - self._since
        self._since, self._activity = now, activity
        return former

    @contextlib.contextmanager
    def spent_on(self, activity: str) -> Iterator[None]:
        """Time inside counts for one activity."""
        former = self.switch(activity)
        try:
            yield
        finally:
            self.switch(former)

    def now(self) -> dict[str, float]:
        """Seconds so far, without waiting for the device."""
        self.switch(self._activity)
        return {name: round(value, 6) for name, value in self.seconds.items()}


def reset_peak_memory(device: torch.device) -> None:
    """Forget earlier peaks, where the system can: several runs may share a process."""
    if device.type != "cpu":
        gc.collect()  # the model of the run before is in a cycle of references, and a GPU may not hold two
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU where there is one, of the process otherwise; 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else 0


LONGEST_WAIT = timedelta(hours=6)
"""Of ranks for each other: one may read data, measure or save meanwhile. NCCL's own limit is ten minutes."""


@functools.lru_cache(maxsize=1)
def _make_host_group(world: Any) -> Any:
    return torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)


def host_group() -> Any:
    """A group of all ranks whose messages go from host to host, beside what the devices do."""
    return _make_host_group(torch.distributed.group.WORLD)


class StopVote:
    """Lets ranks stop after the same step when one of them was asked to: a vote is answered two votes later.

    Neither a device nor its queue has to do with it, and a host waits only for another that is two steps behind.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._votes: deque[tuple[Tensor, Any]] = deque()

    def take(self, requested: bool) -> bool:
        """Once after every step, on every rank: whether to stop now."""
        if self.processes == 1:
            return requested
        mine = torch.tensor(int(requested))
        self._votes.append((mine, torch.distributed.all_reduce(mine, group=host_group(), async_op=True)))
        if len(self._votes) <= 2:
            return False
        sum_of_all, work = self._votes.popleft()
        work.wait()
        return bool(sum_of_all)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a run to stop: Ctrl-C, and what torchrun, Slurm and `kill` send, often to every process of a run."""


@contextlib.contextmanager
def starting_processes(method: str) -> Iterator[None]:
    """Hold stop signals back while child processes start, by the given start method of multiprocessing.

    Children inherit this, so that no stop signal ends one before it calls `leave_to_parent`; a signal that arrives here
    meanwhile is handled when the block ends.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    if method != "fork":  # otherwise the first child would start it, and it would let signals through again
        multiprocessing.resource_tracker.ensure_running()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process and those that it starts have these variables."""
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def leave_to_parent(*signals: signal.Signals) -> None:
    """Ignore signals in a child process, since its parent acts on them; other stop signals come through again."""
    for number in signals:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextlib.contextmanager
def keeping_stop_signals() -> Iterator[None]:
    """Around a library that puts its own handlers of stop signals in front of ours: ours act again behind it."""
    former = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in former.items():  # None if it was not set from Python
                signal.signal(number, handler or signal.SIG_DFL)


class StopFlag:
    """Set by Ctrl-C or SIGTERM: the run finishes its step, writes a checkpoint and stops."""

    requested = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopFlag]:
        """Set the flag at the first signal; a second Ctrl-C raises KeyboardInterrupt."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        def handle(number: int, frame: FrameType | None) -> None:
            if self.requested and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.requested = True

        former = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in former.items():  # None if it was not set from Python
                signal.signal(number, handler or signal.SIG_DFL)
