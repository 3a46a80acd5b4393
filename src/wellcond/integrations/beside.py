"""What callbacks run beside the optimiser: the monitor, its alarms, and the clip."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from wellcond.arguments import check_flag, check_number
from wellcond.errors import OptionError
from wellcond.training.alarms import Alarms
from wellcond.training.clip import QKClip
from wellcond.training.monitor import AttentionMonitor
from wellcond.training.series import Series, logged_name

FILE = "monitor.jsonl"
LOGGED = ("max_logit", "entropy", "first_share", "self_share", "attention_share", "sec_qk", "sec_ov", "kappa_q")
"""Columns that go to loggers; the file has all of them."""


class Beside:
    """The monitor, alarms and clip of a callback, all off by default.

    Args:
        monitor: True, or options of `AttentionMonitor` such as ``{"every": 10}``.
        clip: `tau` of `QKClip`, or its options such as ``{"tau": 100, "log_only": True}``; None for no clip.
        alarms: True for alarms in the log, or what `Alarms` sends them to: ``trackio``, ``wandb``, a function, a list.

    Raises: TypeError, ValueError, UnknownChoiceError: options that make no sense.
    """

    def __init__(
        self,
        monitor: bool | Mapping[str, Any] = False,
        clip: float | Mapping[str, Any] | None = None,
        alarms: Any = False,
    ) -> None:
        """Check the options; nothing happens before `begin`."""
        if not isinstance(monitor, Mapping):
            check_flag("monitor", monitor)
        if clip is not None and not isinstance(clip, Mapping):
            check_number("clip", clip, at_least=0.0)
        if alarms and not monitor:
            raise OptionError("alarms: they look at what a monitor reads; give monitor=True, too")
        self._alarms = Alarms(to="log" if alarms is True else alarms) if alarms else None
        self._options = None if monitor is False else dict(monitor) if isinstance(monitor, Mapping) else {}
        self._clip_options = {"tau": clip} if isinstance(clip, (int, float)) else clip
        self.monitor: AttentionMonitor | None = None
        self.clip: QKClip | None = None
        self._logged = 0

    def begin(self, model: nn.Module, optimizer: Any, folder: Path | None, first_step: int) -> None:
        """Make what was asked for, when model and optimiser are there.

        Args:
            model: what trains, with its wrappers.
            optimizer: one of torch, possibly wrapped by Accelerate.
            folder: of ``monitor.jsonl``; None on all processes but the first.
            first_step: steps trained before.
        """
        self.end()
        if self._options is not None:
            file = None if folder is None else folder / FILE
            self.monitor = AttentionMonitor(
                model, **({"file": file, "alarms": self._alarms, "first_step": first_step} | self._options)
            )
            self._logged = 0
        if self._clip_options is not None:
            shared = self.monitor if self.monitor is not None and self.monitor.every == 1 else None
            plain = getattr(optimizer, "optimizer", optimizer)  # inside Accelerate's wrapper
            options: dict[str, Any] = {"monitor": shared, **self._clip_options}
            self.clip = QKClip(model, plain, **options)

    def step(self) -> None:
        """Call after every step of the optimiser."""
        if self.monitor is not None:
            self.monitor.step()

    def end(self) -> None:
        """Read what is on its way, and remove the hooks."""
        if self.monitor is not None:
            self.monitor.close()
        if self.clip is not None:
            self.clip.remove()
            self.clip = None

    def new_numbers(self) -> list[tuple[int, dict[str, float]]]:
        """Step and numbers, under names that group by layer and head, of readings that were not given before."""
        if self.monitor is None:
            return []
        series = self.monitor.series
        new = range(self._logged, len(series.steps))
        found = [(series.steps[at], name_numbers(series, at)) for at in new]
        self._logged = len(series.steps)
        return [one for one in found if one[1]]


def name_numbers(series: Series, at: int) -> dict[str, float]:
    """The finite numbers of one reading, by the names that they have in loggers (`logged_name`)."""
    [table] = series.readings(at, at + 1)
    return {
        logged_name(layer, head, column): float(value)
        for column in LOGGED
        if column in series.columns
        for (layer, head), value in zip(series.heads, table[:, series.columns.index(column)], strict=True)
        if math.isfinite(value)
    }
