"""`ConditionTracker`: conditioning during training, measured within a budget and without changing the training."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from wellcond.attention.checks import choose_sites
from wellcond.attention.find import find_attention
from wellcond.attention.shards import any_distributed, reshard_
from wellcond.attention.site import AttentionSite
from wellcond.attention.wrappers import unwrap
from wellcond.errors import WellcondError
from wellcond.files import json_ready
from wellcond.jacobian.records import Convention
from wellcond.measurement import NUMERICAL, HeadReport, Kappa, MeasurementReport, check_options, measure
from wellcond.sharded_measurement import decided_by_first, measure_sharded

Steps = int | Collection[int]
Probe = tuple[AttentionSite, int]


@dataclass(frozen=True, kw_only=True)
class TrackPoint:
    """One head at one step.

    Condition numbers of the Jacobian are geometric means over samples; everything else about Jacobian, bounds and
    attention map is of the first sample. What is about the Jacobian (also norms and bounds) is None where only weights
    and attention maps were measured, and what is about the attention map where it is not plain softmax. A measurement
    that failed has the status ``failed``, its `problem`, and NaN for numbers. Of grouped queries, q is the worst.
    """

    step: int
    layer: str
    head: int
    condition_number: float | None = None
    pseudo_condition_number: float | None = None
    sigma_max: float | None = None
    sigma_rank: float | None = None
    rank: int | None = None
    nullity: int | None = None
    status: str | None = None
    norm_q: float | None = None
    norm_k: float | None = None
    norm_v: float | None = None
    kappa_q: float = math.nan
    kappa_k: float = math.nan
    kappa_v: float = math.nan
    sigma_max_q: float = math.nan
    sigma_max_k: float = math.nan
    sigma_max_v: float = math.nan
    sigma_min_q: float = math.nan
    sigma_min_k: float = math.nan
    sigma_min_v: float = math.nan
    raw_kappa_q: float = math.nan
    raw_kappa_k: float = math.nan
    raw_kappa_v: float = math.nan
    raw_sigma_max_q: float = math.nan
    raw_sigma_max_k: float = math.nan
    raw_sigma_max_v: float = math.nan
    raw_sigma_min_q: float = math.nan
    raw_sigma_min_k: float = math.nan
    raw_sigma_min_v: float = math.nan
    papers_bound_log10: float | None = None
    """Of the papers' surrogate, which is not a bound."""
    bound_log10: float | None = None
    """Of a bound that holds."""
    entropy: float | None = None
    normalised_entropy: float | None = None
    diagonal_mass: float | None = None
    max_probability: float | None = None
    dead: bool = False
    seconds: float = 0.0
    """Wall time, in equal shares where several heads were measured together; the only field that is not determined."""
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def to_json_dict(self) -> dict[str, Any]:
        """Plain data with infinities and NaN as text: `json.dumps` of it is standard JSON."""
        return json_ready(self.to_dict())


@dataclass
class Allowance:
    """How much time may be spent on measuring: a share of the time spent on training so far, or None for any."""

    budget: float | None
    training: float = 0.0
    spent: float = 0.0
    costs: dict[Any, float] = field(default_factory=dict)

    def permits(self, key: Any) -> bool:
        """Whether the next measurement of `key`, at what it cost last time, stays within the budget."""
        if self.budget is None:
            return True
        return self.spent + self.costs.get(key, 0.0) <= self.budget * self.training

    def record(self, key: Any, seconds: float, *, charged: bool = True) -> None:
        """Note what a measurement cost. The dearest of recent ones is what is expected next."""
        self.costs[key] = max(seconds, 0.5 * self.costs.get(key, 0.0))
        if charged:
            self.spent += seconds


class ConditionTracker:
    """Records condition numbers of weights and Jacobians while a model trains.

    The training is not changed: no gradient, random number, buffer or flag is touched, and losses are the same bit for
    bit. With a budget, heads are probed in turn, and only while the time spent on it stays below that share of the
    training time. Without one, all heads are measured in one forward pass at every step that is due.

    Under DistributedDataParallel the first process measures and has the points. Weights that several processes hold
    together (FSDP2, tensor parallelism) are gathered, one attention at a time: every process needs a batch and has to
    call `step`; each then has the points of the first one's batch.

    A head that cannot be measured raises. One that could be, and no longer can because the training diverged, does not:
    its point has the status ``failed``.

    Args:
        model: the model that trains: plain, wrapped by torch.compile or DistributedDataParallel, sharded by FSDP2, or
            with projections that are DTensors.
        batch: inputs for the probe, kept for the whole run so that values are comparable; or give them to `step`.
        every: probe at multiples of this many steps, or at these steps; ``auto`` as often as the budget allows.
        weights_every: at multiples of this many steps, or at these steps, measure weights and attention maps only,
            which takes milliseconds; where the Jacobian is due as well, it is the one that counts.
        sites: only these attentions.
        heads: only these key/value heads.
        budget: largest share of the training time that measuring may cost; None for no limit.
        first_step: how many steps were trained before. If there were any, nothing is measured now.
        samples: how many samples of the batch to measure.
        convention: of the Jacobian.
        kappa: which condition number is in the summaries.
        method: of `jacobian_spectrum`.
        clock: the clock, in seconds.

    Raises:
        ValueError: options that make no sense.
        WellcondError: a head that cannot be measured, if it is measured at step 0.

    Example:
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> tracker = ConditionTracker(model, torch.randn(1, 5, 8), every={0, 2}, budget=None)
        >>> for _ in range(3):
        ...     model(torch.randn(4, 5, 8)).sum().backward()
        ...     new_points = tracker.step()
        >>> [(point.step, point.head) for point in tracker.points]
        [(0, 0), (0, 1), (2, 0), (2, 1)]
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any = None,
        *,
        every: Steps | Literal["auto"] = "auto",
        weights_every: Steps | None = None,
        sites: Sequence[AttentionSite] | None = None,
        heads: Sequence[int] | None = None,
        budget: float | None = 0.05,
        first_step: int = 0,
        samples: int = 1,
        convention: Convention = "wide",
        kappa: Kappa = "strict",
        method: str = "auto",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Measure step 0 if it is due, outside the budget: it shows what a probe costs."""
        _check_steps("every", every if every != "auto" else None)
        _check_steps("weights_every", weights_every)
        if budget is not None and not 0 < budget <= 1:
            raise ValueError(f"budget: expected a share between 0 and 1, or None for no limit, got {budget!r}")
        if first_step < 0:
            raise ValueError(f"first_step: expected the number of steps trained before, got {first_step!r}")
        self.options = {"convention": convention, "kappa": kappa, "method": method, "samples": samples}
        check_options(**self.options)  # type: ignore[arg-type]
        self.model = unwrap(model)
        self.every, self.weights_every, self.batch, self.clock = every, weights_every, batch, clock
        chosen = find_attention(self.model, strict=False) if sites is None else choose_sites(self.model, sites)
        self._probes = [
            (site, head) for site in chosen for head in range(site.num_kv_heads) if heads is None or head in heads
        ]
        if not self._probes:
            raise ValueError("heads: none of the attentions has these heads")
        self._turns: Iterator[Probe] = itertools.cycle(self._probes)
        self._next = next(self._turns)
        self._proven = first_step > 0  # that the heads can be measured, as long as their numbers are finite
        self.allowance = Allowance(budget)
        self.points: list[TrackPoint] = []
        self.num_steps = first_step
        reshard_(self.model)  # FSDP2 may have left whole weights, on which nothing shows that they are sharded
        self.is_sharded = any_distributed(self.model)
        self.active = self.is_sharded or _is_first_rank()
        if self.active and batch is not None and first_step == 0:
            if _is_due(every, 0):
                for probes in [self._probes] if budget is None else [[probe] for probe in self._probes]:
                    self._measure(probes, batch, charged=False)
            elif _is_due(weights_every, 0):
                self._measure(self._probes, batch, jacobian=False, charged=False)
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
        self.allowance.training += self.clock() - self._resumed
        measured: list[TrackPoint] = []
        if self.active and _is_due(self.every, self.num_steps):
            measured = self._take_turns(batch) if self.allowance.budget is not None else self.measure_now(batch)
        elif self.active and _is_due(self.weights_every, self.num_steps) and self._permits("weights"):
            measured = self.measure_now(batch, jacobian=False)
        self._resumed = self.clock()
        return measured

    def measure_now(self, batch: Any = None, *, jacobian: bool = True) -> list[TrackPoint]:
        """Measure every head at the present step in one forward pass, due or not and whatever the budget.

        Raises: ValueError if there is no batch to probe with.
        """
        return self._measure(self._probes, self._batch(batch), jacobian=jacobian) if self.active else []

    def _take_turns(self, batch: Any) -> list[TrackPoint]:
        """One head after the other, at most one round, as far as the budget goes."""
        probe_batch, measured = self._batch(batch), list[TrackPoint]()
        for _ in self._probes:
            site, head = self._next
            if not self._permits((site.name, head)):
                break
            measured += self._measure([self._next], probe_batch)
            self._next = next(self._turns)
        return measured

    def _permits(self, key: Any) -> bool:
        permitted = self.allowance.permits(key)
        return decided_by_first(permitted) if self.is_sharded and self.allowance.budget is not None else permitted

    def _batch(self, batch: Any) -> Any:
        chosen = self.batch if batch is None else batch
        if chosen is None:
            raise ValueError("give a batch to ConditionTracker(model, batch) or to step(batch)")
        return chosen

    def _measure(
        self, probes: Sequence[Probe], batch: Any, *, jacobian: bool = True, charged: bool = True
    ) -> list[TrackPoint]:
        start = self.clock()
        found = self._find(probes, batch, jacobian)
        seconds = self.clock() - start
        key = (probes[0][0].name, probes[0][1]) if len(probes) == 1 else "all"
        self.allowance.record(key if jacobian else "weights", seconds, charged=charged)
        points = []
        for site, index in probes:
            head = found[site.name, index]
            numbers = _failed(jacobian) | {"problem": head} if isinstance(head, str) else _numbers(head)
            share = seconds / len(probes)
            points.append(TrackPoint(step=self.num_steps, layer=site.name, head=index, seconds=share, **numbers))
        self.points += points
        return points

    def _find(self, probes: Sequence[Probe], batch: Any, jacobian: bool) -> dict[tuple[str, int], HeadReport | str]:
        """The measurement of each head, or why there is none.

        Raises: WellcondError if there is none, and never was.
        """
        sites = list({id(site): site for site, _ in probes}.values())
        heads = sorted({head for _, head in probes})
        names = [(site.name, head) for site, head in probes]
        try:
            # A probe inside a mixed-precision step is not rounded.
            with torch.autocast(sites[0].q.parameter.device.type, enabled=False):
                verb = measure_sharded if self.is_sharded else measure
                report = verb(self.model, batch, sites=sites, heads=heads, jacobian=jacobian, **self.options)  # type: ignore[arg-type]
        except NUMERICAL as error:
            if not self._proven:
                raise
            return dict.fromkeys(names, str(error).splitlines()[0])
        found = _by_head(report)
        problems = {layer.name: layer.problem for layer in report.layers}
        missing = [name for name, _ in names if problems[name]]
        if missing and not self._proven:
            raise WellcondError(f"{missing[0]}: {problems[missing[0]]}")
        self._proven = True
        return {(name, head): found.get((name, head), problems[name]) for name, head in names}

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
        """All points, one JSON object per line; infinities and NaN as text."""
        return "\n".join(json.dumps(point.to_json_dict()) for point in self.points)


def _by_head(report: MeasurementReport) -> dict[tuple[str, int], HeadReport]:
    return {(layer.name, head.index): head for layer in report.layers for head in layer.heads}


def _numbers(head: HeadReport) -> dict[str, Any]:
    """Fields of a point from what was measured."""
    numbers: dict[str, Any] = {"dead": head.dead, "bound_log10": head.bound_log10,
                               "papers_bound_log10": head.papers_bound_log10}  # fmt: skip
    for prefix, weights in (("", head.weights), ("raw_", head.raw_weights)):
        for role, found in weights.items():
            numbers[f"{prefix}kappa_{role}"] = found.condition_number
            numbers[f"{prefix}sigma_max_{role}"] = found.sigma_max
            numbers[f"{prefix}sigma_min_{role}"] = found.sigma_min
    if head.jacobian is not None:
        numbers |= {name: getattr(head.jacobian, name) for name in JACOBIAN_FIELDS}
        numbers["condition_number"] = head.mean_kappa("strict")
        numbers["pseudo_condition_number"] = head.mean_kappa("pseudo")
    if head.diagnosis is not None:
        numbers |= {f"norm_{role}": getattr(head.diagnosis, f"norm_{role}") for role in "qkv"}
    if head.attention is not None:
        numbers |= dataclasses.asdict(head.attention)
    return numbers


JACOBIAN_FIELDS = ("sigma_max", "sigma_rank", "rank", "nullity", "status")
ATTENTION_FIELDS = ("entropy", "normalised_entropy", "diagonal_mass", "max_probability")
JACOBIAN_NUMBERS = ("condition_number", "pseudo_condition_number", "sigma_max", "sigma_rank", "norm_q", "norm_k",
                    "norm_v", "papers_bound_log10", "bound_log10")  # fmt: skip


def _failed(jacobian: bool) -> dict[str, Any]:
    """Fields of a point where the measurement failed; an integer has no NaN and stays None."""
    names = ATTENTION_FIELDS + (JACOBIAN_NUMBERS if jacobian else ())
    return {"status": "failed"} | dict.fromkeys(names, math.nan)


def _check_steps(name: str, steps: Any) -> None:
    if steps is None or (isinstance(steps, int) and steps >= 1):
        return
    if isinstance(steps, str) or not isinstance(steps, Collection) or not all(isinstance(s, int) for s in steps):
        raise ValueError(f"{name}: expected a number of steps or a collection of step numbers, got {steps!r}")


def _is_due(steps: Steps | str | None, step: int) -> bool:
    if isinstance(steps, int):
        return step % steps == 0
    return steps is not None and (steps == "auto" or step in steps)  # type: ignore[operator]


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0)
