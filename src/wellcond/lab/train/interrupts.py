"""Ctrl-C and SIGTERM set a stop flag: the run finishes its step, writes a checkpoint and stops."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch


class StopFlag:
    """Set once the run is asked to stop."""

    def __init__(self) -> None:
        """Not set."""
        self.requested = False

    def any_rank(self, accelerator: Any) -> bool:
        """True if any rank has been asked to stop; every rank must call it."""
        if accelerator.num_processes == 1:
            return self.requested
        flag = torch.tensor(float(self.requested), device=accelerator.device)
        return bool(accelerator.reduce(flag, reduction="sum") > 0)

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopFlag]:
        """Set the flag at the first signal; a second Ctrl-C raises KeyboardInterrupt."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        former: dict[signal.Signals, Any] = {}

        def handle(number: int, frame: FrameType | None) -> None:
            if self.requested and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.requested = True

        for number in (signal.SIGINT, signal.SIGTERM):
            former[number] = signal.signal(number, handle)
        try:
            yield self
        finally:
            for number, handler in former.items():
                # None: the handler was not set from Python and cannot be restored.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
