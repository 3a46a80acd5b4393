"""The rules of alarms: what a head's last readings show, each with its evidence or source.

A rule says which heads it holds for, since when, and how bad it is. It depends on the readings alone, so a file
replayed gives the alarms of the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from wellcond.training.series import Series, column_of

Severity = Literal["fault", "warning", "note"]
WINDOW = 200
"""Readings that rules look at."""


class History:
    """The last readings of a series, as rules ask for them."""

    def __init__(self, series: Series, until: int) -> None:
        first = max(0, until - WINDOW)
        self.series, self.steps = series, series.steps[first:until]
        self._readings = series.readings(first, until)

    def column(self, name: str) -> np.ndarray:
        """(readings, heads); NaN where it was not seen."""
        return column_of(self.series, self._readings, name).astype(np.float64)

    def known(self, name: str) -> np.ndarray:
        """The same with the last known number in the place of NaN, for columns that are read more rarely."""
        found = self.column(name)
        for at in range(1, len(found)):
            found[at] = np.where(np.isnan(found[at]), found[at - 1], found[at])
        return found


@dataclass(frozen=True)
class Found:
    """What a rule says: which heads, from which reading of the window on, and how bad."""

    heads: np.ndarray
    began: np.ndarray
    value: np.ndarray

    @classmethod
    def where(cls, holds: np.ndarray, value: np.ndarray, *, least: int = 1, also: np.ndarray | bool = True) -> Found:
        """Heads for which something holds in the last readings, since when without a break.

        Args:
            holds: (readings, heads).
            value: how bad it is now, (heads).
            least: readings in which it must hold.
            also: what must hold now, too.

        Example:
            >>> found = Found.where(np.array([[True, False], [False, True], [True, True]]), np.zeros(2), least=2)
            >>> found.heads, found.began
            (array([False,  True]), array([2, 1]))
        """
        backwards = np.cumprod(holds[::-1], axis=0).sum(0)
        return cls((backwards >= least) & also, len(holds) - backwards, value)


Find = Callable[[History, float], Found]


@dataclass(frozen=True)
class Rule:
    """A condition of heads, and what is said about it."""

    kind: str
    severity: Severity
    limit: float
    find: Find
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
    kind: str, severity: Severity, limit: float, *, verdict: str, remedy: str, evidence: str
) -> Callable[[Find], Find]:
    """Decorate a rule of `Alarms`: a function of a `History` and of a limit to what it `Found`.

    Args:
        kind: its name.
        severity: ``fault``, ``warning`` or ``note``.
        limit: from where on a number is an alarm; docs/training/monitor.md says of what it is, and why there.
        verdict: a sentence, with ``{where}``, ``{value}`` and ``{began}`` in it.
        remedy: the line to type.
        evidence: what is known about it, or its source.
    """

    def decorate(find: Find) -> Find:
        RULES[kind] = Rule(kind, severity, limit, find, verdict, remedy, evidence)
        return find

    return decorate


def above(column: str, *, least: int = 1, times_first: float | None = None, known: bool = False) -> Find:
    """The rule that a column is above the limit.

    Args:
        column: its name.
        least: readings in which it must be.
        times_first: how many times its first number it must be now, too.
        known: take the last known number in the place of NaN.
    """

    def find(history: History, limit: float) -> Found:
        numbers = history.known(column) if known else history.column(column)
        also: np.ndarray | bool = True
        if times_first is not None:
            first = numbers[np.argmax(~np.isnan(numbers), axis=0), np.arange(numbers.shape[1])]
            also = numbers[-1] > times_first * first
        return Found.where(numbers > limit, numbers[-1], least=least, also=also)

    return find


def below(column: str, *, least: int) -> Find:
    """The rule that a column is below the limit in that many readings."""

    def find(history: History, limit: float) -> Found:
        numbers = history.column(column)
        return Found.where(numbers < limit, numbers[-1], least=least)

    return find


CLIP = "wc.QKClip(model, optimizer, tau=100.0)  # or a lower rate for Q and K: wc.parameter_groups(model, qk_lr=0.3)"


@register_alarm(
    "not-finite",
    "fault",
    math.inf,
    verdict="Numbers of {where} are not finite since step {began}: the run has diverged.",
    remedy="model.load_state_dict(checkpoint)  # of a step before, and a lower learning rate",
    evidence="Non-finite logits make every gradient NaN.",
)
def _not_finite(history: History, limit: float) -> Found:
    largest, norms = history.column("max_logit"), history.column("q_norm")
    gone = np.isnan(norms[-1]) & ~np.isnan(norms).all(0) & np.isnan(largest[-1])
    found = Found.where(np.isinf(largest), np.where(np.isinf(largest[-1]), math.inf, 0.0))
    began = np.where(gone, len(norms) - 1, found.began)
    return Found(found.heads | gone, began, np.where(gone, math.nan, found.value))


@register_alarm(
    "logits",
    "fault",
    100.0,
    verdict="The largest logit of {where} is {value} and grows, since step {began}: the softmax becomes a choice of "
    "one key.",
    remedy=CLIP,
    evidence="100 is the limit of QK-Clip (Kimi K2, arXiv 2507.20534), above which its authors saw spikes of the loss.",
)
def _logits(history: History, limit: float) -> Found:
    largest = _finite(history.column("max_logit"))
    grows = largest[-1] > 1.1 * largest[-min(len(largest), 6)]
    return Found.where(largest > limit, largest[-1], also=grows)


@register_alarm(
    "bfloat16",
    "warning",
    128.0,
    verdict="The largest logit of {where} is {value} since step {began}, where numbers of bfloat16 are 1 apart "
    "or more.",
    remedy=CLIP,
    evidence="bfloat16 has 8 significant bits, so that from 128 on neighbours differ by 1 and exp of them by e.",
)
def _bfloat16(history: History, limit: float) -> Found:
    largest = _finite(history.column("max_logit_low"))
    return Found.where(largest > limit, largest[-1], least=2)


def _finite(column: np.ndarray) -> np.ndarray:
    return np.where(np.isinf(column), np.nan, column)


def _fallen(history: History, limit: float, also: np.ndarray) -> Found:
    """Heads whose entropy fell below a share of its largest value."""
    entropy = history.column("entropy")
    highest = np.fmax.accumulate(entropy, axis=0)
    fallen = (entropy < limit * highest) & (highest > 0.5)
    return Found.where(fallen, entropy[-1] / highest[-1], least=3, also=also)


def _risen(column: np.ndarray, by: float) -> np.ndarray:
    return column[-1] - np.fmin.reduce(column, axis=0) > by


@register_alarm(
    "malignant-entropy",
    "warning",
    0.5,
    verdict="The entropy of {where} fell to {value} of what it was, since step {began}, while W_Q^T W_K concentrates "
    "on few directions (SEC rises).",
    remedy=CLIP,
    evidence="Malignant collapse: sparse attention of a low-rank circuit (arXiv 2505.21910).",
)
def _malignant(history: History, limit: float) -> Found:
    return _fallen(history, limit, also=_risen(history.known("sec_qk"), 0.2))


@register_alarm(
    "benign-entropy",
    "note",
    0.5,
    verdict="The entropy of {where} fell to {value} of what it was, since step {began}, while tokens attend to "
    "themselves: nothing is lost yet.",
    remedy="monitor.plot('self_share')  # and go on",
    evidence="Benign collapse: the map becomes the identity (arXiv 2505.21910).",
)
def _benign(history: History, limit: float) -> Found:
    return _fallen(history, limit, also=_risen(history.column("self_share"), 0.4))


@register_alarm(
    "own-token",
    "warning",
    0.75,
    verdict="Tokens of {where} see hardly more than themselves ({value} of their attention), since step {began}: W_Q "
    "and W_K hardly learn.",
    remedy='wc.fold_(model); wc.condition_(model, "balanced")  # or a smaller lam of the identity correction',
    evidence="docs/doctor.md, rule lambda: a correction lam I on Q and K adds s lam_q lam_k d to a token's own logit.",
)
def _own_token(history: History, limit: float) -> Found:
    alone = np.where(history.column("entropy") < 0.1, history.column("self_share"), 0.0)
    return Found.where(alone > limit, alone[-1], least=3)


register_alarm(
    "one-key",
    "fault",
    0.005,
    verdict="Every token of {where} attends to one key (entropy {value}), since step {began}: W_Q and W_K get no "
    "gradient.",
    remedy=CLIP,
    evidence="The softmax has no derivative where one probability is 1.",
)(below("entropy", least=3))


@register_alarm(
    "frozen",
    "warning",
    1e-7,
    verdict="Weights of {where} do not change any more (by {value} between two readings), since step {began}, and "
    "those of others do.",
    remedy="print(next(p.grad.norm() for n, p in model.named_parameters() if n.startswith(NAME)))  # is it None or 0?",
    evidence="A head without gradient learns nothing; weight decay alone would change it by more.",
)
def _frozen(history: History, limit: float) -> Found:
    change = history.known("weight_change")
    unknown = np.isnan(change).all(1, keepdims=True)
    others = np.nanmedian(np.where(unknown, 0.0, change), axis=1, keepdims=True)
    return Found.where((change < limit) & (others > 1e-4), change[-1], least=2)


register_alarm(
    "duplicate",
    "warning",
    0.99,
    verdict="{where} compares and reads as another head of its layer does (cosine {value}), since step {began}: one of "
    "them is wasted.",
    remedy='wc.init_(model, "default", sites=[NAME])  # draws the layer again; or prune one of the pair',
    evidence="Equal heads get equal gradients and stay equal.",
)(above("duplicate", known=True))


register_alarm(
    "sink",
    "note",
    0.95,
    verdict="The first key swallows {value} of the attention of {where}, since step {began}.",
    remedy="monitor.plot('first_share')  # a learned sink or a gate on the output gives heads another way to rest",
    evidence="Attention sinks (arXiv 2309.17453): usual in language models, a waste where whole layers rest on them.",
)(above("first_share", least=3))


register_alarm(
    "rank-collapse",
    "fault",
    0.03,
    verdict="The tokens of {where} are nearly all the same (values differ by {value} of their length), since step "
    "{began}: there is nothing to attend to.",
    remedy="# put the skip connection back, or scale W_O up: x = x + attention(norm(x))",
    evidence="Without skips, attention alone loses rank doubly exponentially with depth (arXiv 2103.03404).",
)(below("v_spread", least=2))


register_alarm(
    "tokens",
    "warning",
    1e4,
    verdict="kappa(X) of {where} is {value} and ten times what it was, since step {began}: the tokens lose rank.",
    remedy='wc.init_(model, "calibrated", batch=batch)  # for the next run; see docs/methods.md',
    evidence="kappa(J) grows with kappa(X) (docs/theory.md).",
)(above("kappa_x", known=True, times_first=10))


register_alarm(
    "drowning",
    "warning",
    4.0,
    verdict="What {where} adds is {value} times the stream that enters its block, since step {began}: little is left "
    "of the tokens.",
    remedy="# scale W_O down, or a lower rate: for group in optimizer.param_groups: group['lr'] *= 0.3",
    evidence="docs/doctor.md, rule stream: from 4 on our records show a cost; here it also doubled.",
)(above("attention_share", least=2, times_first=2))
