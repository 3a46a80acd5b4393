"""Alarms: what the rules say of a reading that they did not say before, and where it is sent."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from wellcond.arguments import check_number
from wellcond.attention.sharding import process_number
from wellcond.errors import OptionError, UnknownChoiceError
from wellcond.training.alarm_rules import EXPLAINS, RULES, Found, History, Rule, Severity
from wellcond.training.series import Series

QUIET = 10
"""Readings without it after which the same alarm may be raised again."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One condition of one attention layer, with the worst of its heads and the line that answers it."""

    kind: str
    severity: Severity
    step: int
    """When it was raised."""
    began: int
    """The step of the first reading that shows it."""
    site: str
    head: int
    """The worst head."""
    heads: tuple[int, ...]
    """All heads of the layer that show it."""
    value: float
    limit: float
    verdict: str
    remedy: str
    """The line to type."""
    evidence: str

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.severity}: {self.verdict}\n  do:      {self.remedy}\n  source:  {self.evidence}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)


Sink = Callable[[Alarm], Any]


class Alarms:
    """Asks every rule after every reading of a monitor, and sends what is new to its sinks.

    An alarm is raised once for a layer, for the worst of its heads, and again only after it was gone for ten readings.
    Rules depend on the readings alone: `replay` of a run's file gives the same alarms.

    Args:
        to: where alarms go: ``log`` (the logger ``wellcond``), ``trackio``, ``wandb`` (their open runs; the log, where
            none is open), or functions of an `Alarm`. A function may act: switch a clip on, lower a rate, raise an
            error to stop. Functions are called on every process, at the same step; the others on the first one.
        only: kinds to look for; all by default.
        limits: other limits than those of the rules, by kind.

    Raises:
        UnknownChoiceError: a sink or a kind that does not exist.
        OptionError: trackio or wandb is asked for and not installed.
        TypeError, ValueError: a limit that is no number.

    Example:
        >>> seen = []
        >>> alarms = Alarms(to=[seen.append], limits={"logits": 50.0})
        >>> series = Series([("attn", 2)], ["max_logit"])
        >>> for step, largest in enumerate([5.0, 20.0, 70.0, 200.0], 1):
        ...     series.add(step, np.array([[1.0], [largest]]))
        ...     _ = alarms.look(series)
        >>> [(alarm.kind, alarm.site, alarm.head, alarm.step, alarm.began) for alarm in seen]
        [('logits', 'attn', 1, 3, 3)]
    """

    def __init__(
        self,
        to: str | Sink | Sequence[str | Sink] = "log",
        *,
        only: Sequence[str] | None = None,
        limits: Mapping[str, float] | None = None,
    ) -> None:
        """Check the options."""
        given: Sequence[str | Sink] = [to] if isinstance(to, str) or callable(to) else to
        for one in given:
            if not callable(one) and one not in SINKS:
                raise UnknownChoiceError("sink of alarms", one, [*SINKS, "a function"])
        for kind in [*(only or ()), *(limits or {})]:
            if kind not in RULES:
                raise UnknownChoiceError("alarm", kind, list(RULES))
        given_limits = {kind: check_number(kind, value) for kind, value in (limits or {}).items()}
        self.rules = [
            dataclasses.replace(RULES[kind], limit=given_limits.get(kind, RULES[kind].limit))
            for kind in (RULES if only is None else only)
        ]
        for name in SERVICES:
            if name in given:
                _import_service(name)
        self._named = [SINKS[one] for one in given if isinstance(one, str)]
        self._functions = [one for one in given if callable(one)]
        self.raised: list[Alarm] = []
        self._last: dict[tuple[str, str], int] = {}
        self._readings = 0

    def look(self, series: Series, until: int | None = None) -> list[Alarm]:
        """Ask the rules about the last reading of a series, or that of an earlier length; returns what is new."""
        self._readings += 1
        with np.errstate(all="ignore"):
            new = self._find(History(series, len(series.steps) if until is None else until))
        self.raised += new
        for alarm in new:
            for send in [*(() if process_number() else self._named), *self._functions]:
                send(alarm)
        return new

    def _find(self, history: History) -> list[Alarm]:
        found = {rule.kind: rule.find(history, rule.limit) for rule in self.rules}
        for kind, others in EXPLAINS.items():
            for other in others:
                if kind in found and other in found:
                    one = found[other]
                    found[other] = dataclasses.replace(one, heads=one.heads & ~found[kind].heads)
        new = []
        for rule in self.rules:
            for name, part in history.series.parts:
                heads = np.flatnonzero(found[rule.kind].heads[part])
                if len(heads) and self._was_quiet(rule.kind, name):
                    new.append(_alarm(rule, found[rule.kind], name, heads, part.start, history))
        return new

    def _was_quiet(self, kind: str, layer: str) -> bool:
        """Whether an alarm that is due now was not due in any of the readings before."""
        last = self._last.get((kind, layer))
        self._last[kind, layer] = self._readings
        return last is None or self._readings - last > QUIET

    @classmethod
    def replay(cls, series: Series, **options: Any) -> list[Alarm]:
        """The alarms of a whole series, in their order.

        Args:
            series: as `Series.read` returns it.
            **options: of `Alarms`; nothing is sent by default.
        """
        alarms = cls(**({"to": []} | options))
        for until in range(1, len(series.steps) + 1):
            alarms.look(series, until)
        return alarms.raised


def _alarm(rule: Rule, found: Found, site: str, heads: np.ndarray, first: int, history: History) -> Alarm:
    """The alarm of some heads of a layer, whose first head is number `first` of all."""
    places = heads + first
    badness = np.nan_to_num(np.abs(found.value[places] - rule.limit), nan=math.inf)
    worst = int(np.argmax(badness))
    began, value = history.steps[int(found.began[places].min())], float(found.value[places[worst]])
    rest = f" (and {len(heads) - 1} more)" if len(heads) > 1 else ""
    where = f"{site or 'the attention layer'}, head {heads[worst]}{rest}"
    return Alarm(
        kind=rule.kind,
        severity=rule.severity,
        step=history.steps[-1],
        began=began,
        site=site,
        head=int(heads[worst]),
        heads=tuple(map(int, heads)),
        value=value,
        limit=rule.limit,
        verdict=rule.verdict.format(where=where, value=f"{value:.3g}", began=began),
        remedy=rule.remedy,
        evidence=rule.evidence,
    )


# Sinks


def _log(alarm: Alarm) -> None:
    logging.getLogger("wellcond").warning("%s", alarm)


def _import_service(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OptionError(
            f"to: {name} is asked for, and cannot be imported ({error}). Run: pip install {name}",
            field="to",
            found=name,
        ) from error


def _send_to_service(name: str, alarm: Alarm) -> None:
    """To the run that is open; the log gets what the service does not take, which is no reason to stop a training."""
    service = _import_service(name)
    level = service.AlertLevel[LEVELS[alarm.severity]]
    try:
        service.alert(title=f"{alarm.kind}: {alarm.site}, head {alarm.head}", text=str(alarm), level=level)
    except Exception as error:
        logging.getLogger("wellcond").warning("%s did not take this alarm (%s):", name, error)
        _log(alarm)


LEVELS = {"fault": "ERROR", "warning": "WARN", "note": "INFO"}
"""Names of a service for severities."""
SERVICES = ("trackio", "wandb")
SINKS: dict[str, Sink] = {"log": _log, **{name: partial(_send_to_service, name) for name in SERVICES}}
