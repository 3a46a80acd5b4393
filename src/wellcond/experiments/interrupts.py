"""Ctrl-C and SIGTERM as a wish: the step is finished and saved, then the run stops."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch


class StopWish:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        """Nobody yet."""
        self.wanted = False

    def wanted_anywhere(self, accelerator: Any) -> bool:
        """Whether any process was asked to stop; every process must call it."""
        if accelerator.num_processes == 1:
            return self.wanted
        wish = torch.tensor(float(self.wanted), device=accelerator.device)
        return bool(accelerator.reduce(wish, reduction="sum") > 0)

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopWish]:
        """Handle the first signal as a wish; a second Ctrl-C interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        former: dict[signal.Signals, Any] = {}

        def note(number: int, frame: FrameType | None) -> None:
            if self.wanted and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.wanted = True

        for number in (signal.SIGINT, signal.SIGTERM):
            former[number] = signal.signal(number, note)
        try:
            yield self
        finally:
            for number, handler in former.items():
                # None: the handler was not set from Python and cannot be put back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
