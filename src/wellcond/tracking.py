"""`ConditionTracker`: conditioning during training, measured within a budget and without changing the training."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from wellcond.attention.checks import choose_sites
from wellcond.attention.find import find_attention
from wellcond.attention.site import AttentionSite
from wellcond.attention.wrappers import unwrap
from wellcond.errors import WellcondError
from wellcond.jacobian.records import Convention
from wellcond.measurement import HeadReport, Kappa, measure


@dataclass(frozen=True)
class TrackPoint:
    """One head at one step."""

    step: int
    layer: str
    head: int
    condition_number: float
    pseudo_condition_number: float
    sigma_max: float
    sigma_rank: float
    rank: int
    nullity: int
    status: str
    kappa_q: float
    kappa_k: float
    kappa_v: float
    norm_q: float | None
    norm_k: float | None
    norm_v: float | None
    entropy: float | None
    diagonal_mass: float | None
    dead: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)


@dataclass
class Allowance:
    """How much time may be spent on measuring: a share of the time spent on training so far."""

    budget: float
    training: float = 0.0
    spent: float = 0.0
    costs: dict[Any, float] = field(default_factory=dict)

    def permits(self, key: Any) -> bool:
        """Whether the next measurement of `key`, at what it cost last time, stays within the budget."""
        return self.spent + self.costs.get(key, 0.0) <= self.budget * self.training

    def record(self, key: Any, seconds: float, *, charged: bool = True) -> None:
        """Note what a measurement cost. The dearest of recent ones is what is expected next."""
        self.costs[key] = max(seconds, 0.5 * self.costs.get(key, 0.0))
        if charged:
            self.spent += seconds


class ConditionTracker:
    """Records condition numbers of weights and Jacobians while a model trains.

    The training is not changed: no gradient, random number, buffer or flag is touched, and losses are the same bit for
    bit. Heads are probed in turn, and only while the time spent on it stays below `budget` of the training time.

    Args:
        model: the model that trains, plain or wrapped by torch.compile or DistributedDataParallel.
        batch: inputs for the probe, kept for the whole run so that values are comparable; or give them to `step`.
        every: probe at multiples of this many steps; ``auto`` as often as the budget allows.
        sites: only these attentions.
        heads: only these key/value heads.
        budget: largest share of the training time that measuring may cost.
        convention: of the Jacobian.
        kappa: which condition number is in the summaries.
        method: of `jacobian_spectrum`.
        clock: the clock, in seconds.

    Example:
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> tracker = ConditionTracker(model, torch.randn(1, 5, 8), every=1, budget=1.0)
        >>> for _ in range(3):
        ...     model(torch.randn(4, 5, 8)).sum().backward()
        ...     new_points = tracker.step()
        >>> tracker.points[0].step, tracker.points[0].layer
        (0, 'self_attn')
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any = None,
        *,
        every: int | Literal["auto"] = "auto",
        sites: Sequence[AttentionSite] | None = None,
        heads: Sequence[int] | None = None,
        budget: float = 0.05,
        convention: Convention = "wide",
        kappa: Kappa = "strict",
        method: str = "auto",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Measure every head once (step 0, outside the budget: it shows what a probe costs)."""
        if every != "auto" and (not isinstance(every, int) or every < 1):
            raise ValueError(f"every: expected 'auto' or a number of steps, got {every!r}")
        if not 0 < budget <= 1:
            raise ValueError(f"budget: expected a share between 0 and 1, got {budget!r}")
        self.model = unwrap(model)
        self.every, self.batch, self.clock = every, batch, clock
        self.options = {"convention": convention, "kappa": kappa, "method": method}
        chosen = find_attention(self.model, strict=False) if sites is None else choose_sites(self.model, sites)
        self._probes = [
            (site, head) for site in chosen for head in range(site.num_kv_heads) if heads is None or head in heads
        ]
        if not self._probes:
            raise ValueError("heads: none of the attentions has these heads")
        self._turns: Iterator[tuple[AttentionSite, int]] = itertools.cycle(self._probes)
        self._next = next(self._turns)
        self.allowance = Allowance(budget)
        self.points: list[TrackPoint] = []
        self.num_steps = 0
        self.active = _is_first_rank()
        if self.active and batch is not None:
            for site, head in self._probes:
                self._probe(site, head, batch, charged=False)
        self._resumed = self.clock()

    @property
    def overhead(self) -> float:
        """Time spent on measuring since training began, as a share of the time spent on training."""
        return self.allowance.spent / self.allowance.training if self.allowance.training else 0.0

    def step(self, batch: Any = None) -> list[TrackPoint]:
        """Call once after every training step; returns what was measured now, usually nothing.

        Raises: ValueError if there is no batch to probe with.
        """
        self.num_steps += 1
        now = self.clock()
        self.allowance.training += now - self._resumed
        measured: list[TrackPoint] = []
        due = self.every == "auto" or self.num_steps % self.every == 0
        if self.active and due:
            probe_batch = self.batch if batch is None else batch
            if probe_batch is None:
                raise ValueError("give a batch to ConditionTracker(model, batch) or to step(batch)")
            for _ in self._probes:  # at most one round
                site, head = self._next
                if not self.allowance.permits((site.name, head)):
                    break
                measured.append(self._probe(site, head, probe_batch, charged=True))
                self._next = next(self._turns)
        self._resumed = self.clock()
        return measured

    def _probe(self, site: AttentionSite, head: int, batch: Any, *, charged: bool) -> TrackPoint:
        start = self.clock()
        device = site.q.parameter.device.type
        with torch.autocast(device, enabled=False):  # a probe inside a mixed-precision step is not rounded
            report = measure(self.model, batch, sites=[site], heads=[head], **self.options)  # type: ignore[arg-type]
        [layer] = report.layers
        if layer.problem:
            raise WellcondError(f"{site.name}: {layer.problem}")
        seconds = self.clock() - start
        self.allowance.record((site.name, head), seconds, charged=charged)
        point = _point(self.num_steps, site.name, layer.heads[0], seconds)
        self.points.append(point)
        return point

    def series(self, quantity: str = "condition_number") -> dict[tuple[str, int], list[tuple[int, Any]]]:
        """One quantity of every head over the steps: {(layer, head): [(step, value), ...]}."""
        names = [f.name for f in dataclasses.fields(TrackPoint)]
        if quantity not in names:
            raise ValueError(f"unknown quantity {quantity!r}: expected one of {', '.join(names)}")
        result: dict[tuple[str, int], list[tuple[int, Any]]] = {}
        for point in self.points:
            result.setdefault((point.layer, point.head), []).append((point.step, getattr(point, quantity)))
        return result

    def to_json(self) -> str:
        """All points, one JSON object per line; infinities as text."""
        return "\n".join(
            json.dumps({k: str(v) if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in row.items()})
            for row in (point.to_dict() for point in self.points)
        )


def _point(step: int, layer: str, head: HeadReport, seconds: float) -> TrackPoint:
    j, d = head.jacobian, head.diagnosis
    return TrackPoint(
        step=step,
        layer=layer,
        head=head.index,
        condition_number=j.condition_number,
        pseudo_condition_number=j.pseudo_condition_number,
        sigma_max=j.sigma_max,
        sigma_rank=j.sigma_rank,
        rank=j.rank,
        nullity=j.nullity,
        status=j.status,
        kappa_q=head.weights["q"].condition_number,
        kappa_k=head.weights["k"].condition_number,
        kappa_v=head.weights["v"].condition_number,
        norm_q=None if d is None else d.norm_q,
        norm_k=None if d is None else d.norm_k,
        norm_v=None if d is None else d.norm_v,
        entropy=None if d is None else d.attention.entropy,
        diagonal_mass=None if d is None else d.attention.diagonal_mass,
        dead=head.dead,
        seconds=seconds,
    )


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0)
