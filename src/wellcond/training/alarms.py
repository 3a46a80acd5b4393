"""Alarms: rules over what a monitor keeps, each with its evidence or source, while a model trains or afterwards.

A rule looks at the last readings and says which heads it holds for, since when, and how bad it is. It depends on the
readings alone, so a file replayed gives the alarms of the run.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from wellcond.arguments import check_number
from wellcond.errors import OptionError, UnknownChoiceError
from wellcond.training.series import Series, is_first_process

Severity = Literal["fault", "warning", "note"]
WINDOW = 200
"""Readings that rules look at."""
QUIET = 10
"""Readings without it after which the same alarm may be raised again."""

LIMITS: dict[str, float] = {
    "not-finite": math.inf,
    "logits": 100.0,
    "bfloat16": 128.0,
    "malignant-entropy": 0.5,
    "benign-entropy": 0.5,
    "own-token": 0.75,
    "one-key": 0.005,
    "frozen": 1e-7,
    "duplicate": 0.99,
    "sink": 0.95,
    "rank-collapse": 0.03,
    "tokens": 1e4,
    "drowning": 4.0,
}
"""From where on a number is an alarm, by its kind; docs/training/monitor.md says of what each limit is."""


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


class History:
    """The last readings of a series, as rules ask for them."""

    def __init__(self, series: Series, limits: Mapping[str, float]) -> None:
        """Look at the last `WINDOW` readings."""
        self.series, self.limits = series, limits

    def column(self, name: str) -> np.ndarray:
        """(readings, heads); NaN where it was not seen."""
        return self.series.column(name, WINDOW).astype(np.float64)

    def known(self, name: str) -> np.ndarray:
        """The same with the last known number in the place of NaN, for columns that are read more rarely."""
        return _filled(self.column(name))


@dataclass(frozen=True)
class Found:
    """What a rule says: which heads, from which reading of the window on, and how bad."""

    heads: np.ndarray
    began: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class Rule:
    """A condition of heads, and what is said about it."""

    kind: str
    severity: Severity
    find: Callable[[History], Found]
    verdict: str
    """With {where}, {value} and {began}."""
    remedy: str
    evidence: str


RULES: dict[str, Rule] = {}
EXPLAINS = {
    "not-finite": ("logits", "bfloat16", "drowning", "one-key"),
    "logits": ("bfloat16",),
    "own-token": ("one-key", "benign-entropy", "malignant-entropy"),
    "one-key": ("malignant-entropy", "benign-entropy", "sink"),
    "malignant-entropy": ("benign-entropy",),
}
"""Kinds that follow from another one in the same head and are left out beside it."""


def register_alarm(
    kind: str, severity: Severity, *, verdict: str, remedy: str, evidence: str, limit: float | None = None
) -> Callable[[Callable[[History], Found]], Callable[[History], Found]]:
    """Decorate a rule of `Alarms`: a function from a `History` to what it `Found`.

    Args:
        kind: its name.
        severity: ``fault``, ``warning`` or ``note``.
        verdict: a sentence, with ``{where}``, ``{value}`` and ``{began}`` in it.
        remedy: the line to type.
        evidence: what is known about it, or its source.
        limit: from where on a number is an alarm; by default that of `LIMITS`.
    """
    if limit is not None:
        LIMITS[kind] = limit

    def decorate(find: Callable[[History], Found]) -> Callable[[History], Found]:
        RULES[kind] = Rule(kind, severity, find, verdict, remedy, evidence)
        return find

    return decorate


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
        limits: other limits than `LIMITS`, by kind.

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
        self.limits = LIMITS | {kind: check_number(kind, value) for kind, value in (limits or {}).items()}
        self.rules = [RULES[kind] for kind in (RULES if only is None else only)]
        for name in SERVICES:
            if name in given:
                _import_service(name)
        self._named = [SINKS[one] for one in given if isinstance(one, str)]
        self._functions = [one for one in given if callable(one)]
        self.raised: list[Alarm] = []
        self._last: dict[tuple[str, str], int] = {}
        self._readings = 0

    def look(self, series: Series) -> list[Alarm]:
        """Ask the rules about the last reading of a series; returns the alarms that are new."""
        self._readings += 1
        with np.errstate(all="ignore"):
            new = self._find(series)
        self.raised += new
        for alarm in new:
            for send in [*(self._named if is_first_process() else ()), *self._functions]:
                send(alarm)
        return new

    def _find(self, series: Series) -> list[Alarm]:
        history = History(series, self.limits)
        found = {rule.kind: rule.find(history) for rule in self.rules}
        for kind, others in EXPLAINS.items():
            for other in others:
                if kind in found and other in found:
                    one = found[other]
                    found[other] = dataclasses.replace(one, heads=one.heads & ~found[kind].heads)
        return [alarm for rule in self.rules for alarm in self._new(rule, found[rule.kind], series)]

    def _new(self, rule: Rule, found: Found, series: Series) -> list[Alarm]:
        new, first = [], 0
        steps = series.steps[-WINDOW:]
        for name, count in series.layers:
            part = slice(first, first + count)
            first += count
            heads = np.flatnonzero(found.heads[part])
            if not len(heads):
                continue
            last = self._last.get((rule.kind, name))
            self._last[rule.kind, name] = self._readings
            if last is not None and self._readings - last <= QUIET:
                continue
            badness = np.nan_to_num(np.abs(found.value[part][heads] - self.limits[rule.kind]), nan=math.inf)
            worst = int(heads[np.argmax(badness)])
            began = steps[int(found.began[part][heads].min())]
            value = float(found.value[part][worst])
            rest = f" (and {len(heads) - 1} more)" if len(heads) > 1 else ""
            where = f"{name or 'the attention layer'}, head {worst}{rest}"
            new.append(
                Alarm(
                    kind=rule.kind,
                    severity=rule.severity,
                    step=series.steps[-1],
                    began=began,
                    site=name,
                    head=worst,
                    heads=tuple(map(int, heads)),
                    value=value,
                    limit=self.limits[rule.kind],
                    verdict=rule.verdict.format(where=where, value=f"{value:.3g}", began=began),
                    remedy=rule.remedy,
                    evidence=rule.evidence,
                )
            )
        return new

    @classmethod
    def replay(cls, series: Series, **options: Any) -> list[Alarm]:
        """The alarms of a whole series, in their order.

        Args:
            series: as `Series.read` returns it.
            **options: of `Alarms`; nothing is sent by default.
        """
        alarms = cls(**({"to": []} | options))
        for grown in series.replay():
            alarms.look(grown)
        return alarms.raised


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


# What rules are made of


def streak(holds: np.ndarray, least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Whether something holds in the last `least` readings, and since which reading without a break.

    Example:
        >>> streak(np.array([[True, False], [False, True], [True, True]]), 2)
        (array([False,  True]), array([2, 1]))
    """
    backwards = np.cumprod(holds[::-1], axis=0).sum(0)
    return backwards >= min(least, max(1, len(holds))), len(holds) - backwards


def _filled(column: np.ndarray) -> np.ndarray:
    found = column.copy()
    for at in range(1, len(found)):
        found[at] = np.where(np.isnan(found[at]), found[at - 1], found[at])
    return found


def _above(column: np.ndarray, limit: float, least: int = 1) -> Found:
    heads, began = streak(column > limit, least)
    return Found(heads & (len(column) >= least), began, column[-1])


def _below(column: np.ndarray, limit: float, least: int = 1) -> Found:
    heads, began = streak(column < limit, least)
    return Found(heads & (len(column) >= least), began, column[-1])


def _first_known(column: np.ndarray) -> np.ndarray:
    at = np.argmax(~np.isnan(column), axis=0)
    return column[at, np.arange(column.shape[1])]


CLIP = "wc.QKClip(model, optimizer, tau=100.0)  # or a lower rate for Q and K: wc.parameter_groups(model, qk_lr=0.3)"


@register_alarm(
    "not-finite",
    "fault",
    verdict="Numbers of {where} are not finite since step {began}: the run has diverged.",
    remedy="model.load_state_dict(checkpoint)  # of a step before, and a lower learning rate",
    evidence="Non-finite logits make every gradient NaN.",
)
def _not_finite(history: History) -> Found:
    largest, norms = history.column("max_logit"), history.column("q_norm")
    gone = np.isnan(norms[-1:]) & ~np.isnan(norms).all(0) & np.isnan(largest[-1:])
    found = _above(np.where(np.isinf(largest), np.inf, 0.0), 1.0)
    at = np.where(gone[0], len(norms) - 1, found.began)
    return Found(found.heads | gone[0], at, np.where(gone[0], math.nan, found.value))


@register_alarm(
    "logits",
    "fault",
    verdict="The largest logit of {where} is {value} and grows, since step {began}: the softmax becomes a choice of "
    "one key.",
    remedy=CLIP,
    evidence="100 is the limit of QK-Clip (Kimi K2, arXiv 2507.20534), above which its authors saw spikes of the loss.",
)
def _logits(history: History) -> Found:
    largest = history.column("max_logit")
    largest = np.where(np.isinf(largest), np.nan, largest)
    found = _above(largest, history.limits["logits"])
    past = largest[-min(len(largest), 6)]
    return dataclasses.replace(found, heads=found.heads & (largest[-1] > 1.1 * past))


@register_alarm(
    "bfloat16",
    "warning",
    verdict="The largest logit of {where} is {value} since step {began}, where numbers of bfloat16 are 1 apart "
    "or more.",
    remedy=CLIP,
    evidence="bfloat16 has 8 significant bits, so that from 128 on neighbours differ by 1 and exp of them by e.",
)
def _bfloat16(history: History) -> Found:
    largest = history.column("max_logit_low")
    return _above(np.where(np.isinf(largest), np.nan, largest), history.limits["bfloat16"], 2)


def _fallen(history: History, kind: str) -> Found:
    """Heads whose entropy fell below a share of its largest value."""
    entropy = history.column("entropy")
    highest = np.fmax.accumulate(entropy, axis=0)
    fallen = (entropy < history.limits[kind] * highest) & (highest > 0.5)
    heads, began = streak(fallen, 3)
    return Found(heads & (len(entropy) >= 3), began, entropy[-1] / highest[-1])


def _risen(column: np.ndarray, by: float) -> np.ndarray:
    return column[-1] - np.fmin.reduce(column, axis=0) > by


@register_alarm(
    "malignant-entropy",
    "warning",
    verdict="The entropy of {where} fell to {value} of what it was, since step {began}, while W_Q^T W_K concentrates "
    "on few directions (SEC rises).",
    remedy=CLIP,
    evidence="Malignant collapse: sparse attention of a low-rank circuit (arXiv 2505.21910).",
)
def _malignant(history: History) -> Found:
    found = _fallen(history, "malignant-entropy")
    return dataclasses.replace(found, heads=found.heads & _risen(history.known("sec_qk"), 0.2))


@register_alarm(
    "benign-entropy",
    "note",
    verdict="The entropy of {where} fell to {value} of what it was, since step {began}, while tokens attend to "
    "themselves: nothing is lost yet.",
    remedy="monitor.plot('self_share')  # and go on",
    evidence="Benign collapse: the map becomes the identity (arXiv 2505.21910).",
)
def _benign(history: History) -> Found:
    found = _fallen(history, "benign-entropy")
    return dataclasses.replace(found, heads=found.heads & _risen(history.column("self_share"), 0.4))


@register_alarm(
    "own-token",
    "warning",
    verdict="Tokens of {where} see hardly more than themselves ({value} of their attention), since step {began}: W_Q "
    "and W_K hardly learn.",
    remedy='wc.fold_(model); wc.condition_(model, "balanced")  # or a smaller lam of the identity correction',
    evidence="docs/doctor.md, rule lambda: a correction lam I on Q and K adds s lam_q lam_k d to a token's own logit.",
)
def _own_token(history: History) -> Found:
    alone = np.where(history.column("entropy") < 0.1, history.column("self_share"), 0.0)
    return _above(alone, history.limits["own-token"], 3)


@register_alarm(
    "one-key",
    "fault",
    verdict="Every token of {where} attends to one key (entropy {value}), since step {began}: W_Q and W_K get no "
    "gradient.",
    remedy=CLIP,
    evidence="The softmax has no derivative where one probability is 1.",
)
def _one_key(history: History) -> Found:
    return _below(history.column("entropy"), history.limits["one-key"], 3)


@register_alarm(
    "frozen",
    "warning",
    verdict="Weights of {where} do not change any more (by {value} between two readings), since step {began}, and "
    "those of others do.",
    remedy="print(next(p.grad.norm() for n, p in model.named_parameters() if n.startswith(NAME)))  # is it None or 0?",
    evidence="A head without gradient learns nothing; weight decay alone would change it by more.",
)
def _frozen(history: History) -> Found:
    change = history.known("weight_change")
    unknown = np.isnan(change).all(1, keepdims=True)
    others = np.nanmedian(np.where(unknown, 0.0, change), axis=1, keepdims=True)
    heads, began = streak((change < history.limits["frozen"]) & (others > 1e-4), 2)
    return Found(heads & (len(change) >= 2), began, change[-1])


@register_alarm(
    "duplicate",
    "warning",
    verdict="{where} compares and reads as another head of its layer does (cosine {value}), since step {began}: one of "
    "them is wasted.",
    remedy='wc.init_(model, "default", sites=[NAME])  # draws the layer again; or prune one of the pair',
    evidence="Equal heads get equal gradients and stay equal.",
)
def _duplicate(history: History) -> Found:
    return _above(history.known("duplicate"), history.limits["duplicate"])


@register_alarm(
    "sink",
    "note",
    verdict="The first key swallows {value} of the attention of {where}, since step {began}.",
    remedy="monitor.plot('first_share')  # a learned sink or a gate on the output gives heads another way to rest",
    evidence="Attention sinks (arXiv 2309.17453): usual in language models, a waste where whole layers rest on them.",
)
def _sink(history: History) -> Found:
    return _above(history.column("first_share"), history.limits["sink"], 3)


@register_alarm(
    "rank-collapse",
    "fault",
    verdict="The tokens of {where} are nearly all the same (values differ by {value} of their length), since step "
    "{began}: there is nothing to attend to.",
    remedy="# put the skip connection back, or scale W_O up: x = x + attention(norm(x))",
    evidence="Without skips, attention alone loses rank doubly exponentially with depth (arXiv 2103.03404).",
)
def _rank_collapse(history: History) -> Found:
    return _below(history.column("v_spread"), history.limits["rank-collapse"], 2)


@register_alarm(
    "tokens",
    "warning",
    verdict="kappa(X) of {where} is {value} and ten times what it was, since step {began}: the tokens lose rank.",
    remedy='wc.init_(model, "calibrated", batch=batch)  # for the next run; see docs/methods.md',
    evidence="kappa(J) grows with kappa(X) (docs/theory.md).",
)
def _tokens(history: History) -> Found:
    kappa = history.known("kappa_x")
    found = _above(kappa, history.limits["tokens"])
    return dataclasses.replace(found, heads=found.heads & (kappa[-1] > 10 * _first_known(kappa)))


@register_alarm(
    "drowning",
    "warning",
    verdict="What {where} adds is {value} times the stream that enters its block, since step {began}: little is left "
    "of the tokens.",
    remedy="# scale W_O down, or a lower rate: for group in optimizer.param_groups: group['lr'] *= 0.3",
    evidence="docs/doctor.md, rule stream: from 4 on our records show a cost; here it also doubled.",
)
def _drowning(history: History) -> Found:
    share = history.column("attention_share")
    found = _above(share, history.limits["drowning"], 2)
    return dataclasses.replace(found, heads=found.heads & (share[-1] > 2 * _first_known(share)))
