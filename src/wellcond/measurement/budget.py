"""What a `ConditionTracker` is asked to do, checked, and how much of it the budget allows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from wellcond.arguments import describe
from wellcond.attention.site import AttentionSite
from wellcond.jacobian.problem import SLOW_SECONDS, show_seconds
from wellcond.measurement.records import MeasureSettings

Steps = int | Collection[int]
Heads = Sequence[int] | Literal["all"]
Name = tuple[str, int]
"""Layer and head."""
SHARE_OF_POINTS = 0.5
"""Part of the budget for weights and attention maps; the rest is saved for Jacobians, which cost more."""


@dataclass(frozen=True, kw_only=True)
class TrackingOptions:
    """Options of `ConditionTracker` that can be checked before there is a model; see there.

    Raises: UnknownChoiceError, ValueError: options that make no sense.
    """

    every: Steps | Literal["auto"] = "auto"
    weights_every: Steps | None = None
    sites: Any = None
    heads: Heads | None = None
    budget: float | None = 0.05
    samples: int = 1
    convention: Any = "wide"
    kappa: Any = "strict"
    method: str = "auto"

    def __post_init__(self) -> None:
        _check_steps("every", None if isinstance(self.every, str) and self.every == "auto" else self.every)
        _check_steps("weights_every", self.weights_every)
        budget = self.budget
        is_number = isinstance(budget, Real) and not isinstance(budget, bool)
        if budget is not None and not (is_number and 0 < budget <= 1):
            raise ValueError(f"budget: expected a share between 0 and 1, or None for no limit, got {budget!r}")
        heads = self.heads
        listed = isinstance(heads, (Sequence, set, frozenset)) and not isinstance(heads, str) and len(heads) > 0
        named = heads is None or (isinstance(heads, str) and heads == "all")
        if not named and not (listed and all(_is_count(head, least=0) for head in heads or ())):
            raise ValueError(
                f"heads: expected numbers of key/value heads such as [0, 1], 'all', or None for the first of each "
                f"layer, got {heads!r}"
            )
        if self.sites is not None and not isinstance(self.sites, (str, Sequence, AttentionSite)):
            raise TypeError(
                f"sites: expected sites of find_attention(model) or a pattern of paths, got {describe(self.sites)}"
            )
        MeasureSettings(**self.of_measure())

    def of_measure(self) -> dict[str, Any]:
        """The options that `measure` takes as well."""
        return {name: getattr(self, name) for name in ("convention", "kappa", "method", "samples")}

    def has_head(self, head: int) -> bool:
        """Whether a key/value head is measured: the first of each layer unless others are asked for."""
        if self.heads is None:
            return head == 0
        return isinstance(self.heads, str) or head in self.heads


@dataclass
class Allowance:
    """Time that measuring may take: a share of the time spent on training so far, or None for any."""

    budget: float | None
    training: float = 0.0
    spent: float = 0.0
    """Seconds spent on everything: setting up, first and last step included."""
    on_points: float = 0.0
    """The part of `spent` that was not for Jacobians."""
    point: float = 0.0
    """Seconds that weights and attention maps of all heads are expected to cost."""
    reserve: float = 0.0
    """Kept for the last step, which is measured in any case."""

    @property
    def left(self) -> float:
        """Seconds that may be spent now."""
        return math.inf if self.budget is None else self.budget * self.training - self.spent - self.reserve

    @property
    def permits_point(self) -> bool:
        """Whether weights and attention maps may be measured now."""
        if self.budget is None:
            return True
        share = SHARE_OF_POINTS * self.budget * self.training
        return self.point <= self.left and self.on_points + self.point <= share

    def record(self, seconds: float, on_jacobians: float) -> None:
        """Note what the heads of one step cost, and predict the next cost as a decaying maximum."""
        self.spent += seconds
        self.on_points += seconds - on_jacobians
        self.point = max(seconds - on_jacobians, 0.5 * self.point)


@dataclass
class Turns:
    """Which heads' Jacobians are measured next: those that had the fewest turns first, as far as time allows."""

    names: Sequence[Name]
    clock: Callable[[], float]
    on_slow: Callable[[float], None]
    turns: dict[Name, int] = field(default_factory=dict)
    expected: dict[Name, float] = field(default_factory=dict)
    """Seconds: what a head took last, or was expected to take when it was refused."""
    experience: dict[Name, float] = field(default_factory=dict)
    """Seconds that a head took where its size was all that was known before."""
    seconds: dict[Name, float] = field(default_factory=dict)
    """What the Jacobians of the present step took."""
    _chosen: list[Name] = field(default_factory=list)
    _until: float = 0.0
    _running: Name | None = None
    _sized: bool = False
    _since: float = 0.0

    def begin(self, left: float, attempt: float) -> bool:
        """Choose heads for one step, with so many seconds left; whether there are any.

        A head about which nothing is known is begun if twice `attempt` is left, which is what it may cost to find out,
        one a step. Heads that do not fit are waited for: none gets two turns more than they had.
        """
        self.seconds, self._chosen, self._until = {}, [], self.clock() + left
        fewest_refused, unknown = math.inf, False
        for name in sorted(self.names, key=lambda name: self.turns.get(name, 0)):
            cost = self.expected.get(name)
            fits = (2 * attempt <= left and not unknown) if cost is None else cost <= left
            if not fits or self.turns.get(name, 0) > fewest_refused:
                fewest_refused = min(fewest_refused, self.turns.get(name, 0))
                continue
            unknown = unknown or cost is None
            left -= 2 * attempt if cost is None else cost
            self._chosen.append(name)
        return bool(self._chosen)

    def admit(self, layer: str, head: int, seconds: float | None) -> bool:
        """Whether a Jacobian may be measured; see `wellcond.measurement.measure.Admit`."""
        name, now = (layer, head), self.clock()
        if seconds is None:
            self._finish(now)
            if name not in self._chosen:
                return False
            self._chosen.remove(name)
            # Those that had fewer turns and are still to come are not to wait once more.
            first = [other for other in self._chosen if self.turns.get(other, 0) < self.turns.get(name, 0)]
            if now + sum(self.expected.get(one, 0.0) for one in (name, *first)) > self._until:
                return False
            self._running, self._sized, self._since = name, False, now
            return True
        self._sized = seconds > 0
        needed = min(seconds, self.experience.get(name, math.inf))
        if now + needed > self._until:
            self.seconds[name] = now - self._since
            self._running, self.expected[name] = None, self.seconds[name] + needed
            return False
        if needed > SLOW_SECONDS:
            self.on_slow(needed)
        return True

    def end(self) -> None:
        """The heads of this step are measured."""
        self._finish(self.clock())

    def _finish(self, now: float) -> None:
        name, self._running = self._running, None
        if name is None:
            return
        took = self.seconds[name] = now - self._since
        self.turns[name] = self.turns.get(name, 0) + 1
        self.expected[name] = max(took, 0.5 * self.expected.get(name, 0.0))
        if self._sized:
            self.experience[name] = max(took, 0.5 * self.experience.get(name, 0.0))


@dataclass
class Together:
    """The Jacobians of all heads of one step within so many seconds, or of none, so that steps stay comparable."""

    count: int
    seconds: float
    clock: Callable[[], float]
    last: float | None = None
    """Seconds that all of them took before."""
    on_slow: Callable[[float], None] = lambda seconds: None
    expected: float = 0.0
    """Seconds that all of them may take."""
    refused: bool = False
    _done: int = -1
    _begun: float = 0.0

    def __post_init__(self) -> None:
        self._begun = self.clock()

    def admit(self, layer: str, head: int, seconds: float | None) -> bool:
        """Whether a Jacobian may be measured; see `wellcond.measurement.measure.Admit`."""
        if seconds is None:
            self._done += 1
            return not self.refused
        left = self.count - self._done
        needed = seconds * left
        if self.last is not None:
            needed = min(needed, self.last * left / self.count)
        self.expected = max(self.expected, self.clock() - self._begun + needed)
        self.refused = self.clock() - self._begun + needed > self.seconds
        if not self.refused and needed > SLOW_SECONDS:
            self.on_slow(needed)
        return not self.refused


def log_slow(seconds: float) -> None:
    """Log to ``wellcond`` that training waits for a measurement, and which options change that."""
    logging.getLogger("wellcond").warning(
        "training waits for a measurement of kappa(J) that is expected to take up to %s; fewer heads=, samples= or "
        "tokens in the batch make that less, a smaller budget= or every=() leaves it out",
        show_seconds(seconds),
    )


def is_regular(steps: Steps | str | None) -> bool:
    """Whether steps are not listed, so that the first and the last belong to them."""
    return isinstance(steps, (str, Integral))


def is_due(steps: Steps | str | None, step: int) -> bool:
    """Whether a step is one of these."""
    if isinstance(steps, Integral):
        return step % int(steps) == 0
    return steps is not None and (isinstance(steps, str) or step in steps)  # type: ignore[operator]


def _check_steps(name: str, steps: Any) -> None:
    if steps is None or _is_count(steps, least=1):
        return
    listed = isinstance(steps, Collection) and not isinstance(steps, (str, bytes))
    if not listed or not all(_is_count(step, least=0) for step in steps):
        raise ValueError(
            f"{name}: expected a number of steps, at least 1, or a collection of step numbers, none below 0, got "
            f"{steps!r}"
        )


def _is_count(value: Any, *, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
