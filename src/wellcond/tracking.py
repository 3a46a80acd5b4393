"""`ConditionTracker`: conditioning during training, measured within a budget and without changing the training."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from wellcond.attention.checks import Chosen, choose_sites
from wellcond.attention.distributed import any_distributed, reshard_, unwrap
from wellcond.attention.find import find_attention
from wellcond.attention.site import AttentionSite
from wellcond.errors import WellcondError
from wellcond.frames import make_frame
from wellcond.measurement import NUMERICAL, HeadReport, Kappa, MeasurementReport, MeasureSettings, measure
from wellcond.plots import curves_of, plot_curves
from wellcond.records import Convention
from wellcond.run_facts import run_facts
from wellcond.sharded_measurement import decided_by_first
from wellcond.track_points import TrackPoint, failed_numbers, numbers_of

Steps = int | Collection[int]
Probe = tuple[AttentionSite, int]


@dataclass
class Allowance:
    """How much time may be spent on measuring: a share of the time spent on training so far, or None for any."""

    budget: float | None
    training: float = 0.0
    spent: float = 0.0
    due: int = 0
    """Measurements of heads that were due since training began, those outside the budget left out."""
    made: int = 0
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

    The first and the last step are always measured, outside the budget, unless steps are listed: then these are. That
    a step was the last one is known when the tracker is closed: by `close`, or at the end of ``with tracker:``. It then
    writes one line to standard error, with how many of the measurements that were due the budget allowed.

    Under DistributedDataParallel rank 0 measures and has the points. Sharded weights (FSDP2, tensor parallelism) are
    gathered, one attention at a time: every rank needs a batch and has to call `step`; each then has the points of
    rank 0's batch.

    A head that cannot be measured raises. One that could be, and no longer can because the training diverged, does not:
    its point has the status ``failed``.

    Args:
        model: the model that trains: plain, wrapped by torch.compile or DistributedDataParallel, sharded by FSDP2, or
            with projections that are DTensors.
        batch: inputs for the probe, kept for the whole run so that values are comparable; or give them to `step`.
        every: probe at multiples of this many steps and at the last one, or at these steps; ``auto`` as often as the
            budget allows.
        weights_every: at such multiples, or at these steps, measure weights and attention maps only,
            which takes milliseconds; where the Jacobian is due as well, it is the one that counts.
        sites: only these, from `find_attention(model)`, or a pattern of paths such as ``"blocks.*"``.
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
        >>> with ConditionTracker(model, torch.randn(1, 5, 8), every=2, budget=None) as tracker:
        ...     for _ in range(3):
        ...         model(torch.randn(4, 5, 8)).sum().backward()
        ...         new_points = tracker.step()
        >>> [(point.step, point.head) for point in tracker.points]
        [(0, 0), (0, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any = None,
        *,
        every: Steps | Literal["auto"] = "auto",
        weights_every: Steps | None = None,
        sites: Chosen | None = None,
        heads: Sequence[int] | None = None,
        budget: float | None = 0.05,
        first_step: int = 0,
        samples: int = 1,
        convention: Convention = "wide",
        kappa: Kappa = "strict",
        method: str = "auto",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Measure step 0, outside the budget: it shows what a probe costs."""
        _check_steps("every", every if every != "auto" else None)
        _check_steps("weights_every", weights_every)
        if budget is not None and not 0 < budget <= 1:
            raise ValueError(f"budget: expected a share between 0 and 1, or None for no limit, got {budget!r}")
        if first_step < 0:
            raise ValueError(f"first_step: expected the number of steps trained before, got {first_step!r}")
        self.options = {"convention": convention, "kappa": kappa, "method": method, "samples": samples}
        MeasureSettings(**self.options)  # type: ignore[arg-type]
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
        self.num_steps = self._first_step = first_step
        self.run = run_facts(self.model, batch) | ({"input": "given to step()"} if batch is None else {})
        self._given: Any = None  # to `step`
        self._closed = False
        reshard_(self.model)  # FSDP2 may have left whole weights, on which nothing shows that they are sharded
        self.is_sharded = any_distributed(self.model)
        self.active = self.is_sharded or _is_first_rank()
        if self.active and batch is not None and first_step == 0:
            if _is_due(every, 0):
                self._measure_outside(self._probes, batch)
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
        first = self._given is None and batch is not None and self.batch is None and self._first_step == 0
        self._given = batch if batch is not None else self._given
        measured = self._measure_end(batch) if first else self._measure_due(batch) if self.active else []
        self._resumed = self.clock()
        return measured

    def _measure_due(self, batch: Any) -> list[TrackPoint]:
        measured: list[TrackPoint] = []
        if _is_due(self.every, self.num_steps):
            measured = self._take_turns(batch) if self.allowance.budget is not None else self.measure_now(batch)
        elif not _is_due(self.weights_every, self.num_steps):
            return []
        elif self._permits("weights"):
            measured = self.measure_now(batch, jacobian=False)
        self.allowance.due += len(self._probes)
        self.allowance.made += len(measured)
        return measured

    def _measure_end(self, batch: Any) -> list[TrackPoint]:
        """The heads that were not measured at the present step, which is the first or the last, outside the budget."""
        jacobian = _is_regular(self.every)
        if not self.active or not (jacobian or _is_regular(self.weights_every)):
            return []
        now = [point for point in self.points if point.step == self.num_steps]
        known = {(point.layer, point.head) for point in now if point.status is not None or not jacobian}
        missing = [(site, head) for site, head in self._probes if (site.name, head) not in known]
        if not missing:
            return []
        if jacobian:
            return self._measure_outside(missing, self._batch(batch))
        return self._measure(missing, self._batch(batch), jacobian=False, charged=False)

    def _measure_outside(self, probes: Sequence[Probe], batch: Any) -> list[TrackPoint]:
        """Outside the budget: together if there is none, else one by one, which shows what each costs."""
        together = [probes] if self.allowance.budget is None else [[probe] for probe in probes]
        return [point for some in together for point in self._measure(some, batch, charged=False)]

    def close(self, batch: Any = None) -> list[TrackPoint]:
        """Call once after the last training step, on every process: measures it, and writes `summary` to stderr.

        Args:
            batch: to measure with; by default what the tracker, or else the latest `step`, was given.

        Returns: what was measured now.
        """
        if self._closed:
            return []
        self._closed = True
        batch = next((given for given in (batch, self.batch, self._given) if given is not None), None)
        trained = self.num_steps > self._first_step and batch is not None
        measured = self._measure_end(batch) if trained else []
        if _is_due(self.every, self.num_steps) or _is_due(self.weights_every, self.num_steps):
            self.allowance.due = max(self.allowance.made, self.allowance.due - len(measured))
        if self.active and _is_first_rank():
            print(self.summary(), file=sys.stderr)
        return measured

    def __enter__(self) -> ConditionTracker:
        """The tracker itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close, unless training ended in an error."""
        if kind is None:
            self.close()

    def summary(self) -> str:
        """How many of the measurements that were due were made, in one line, and how to change that."""
        budget, due, made = self.allowance.budget, self.allowance.due, self.allowance.made
        share = f"{self.overhead:.1%} of the training time"
        counts = f"wellcond: {made} of {due} due measurements ({len(self._probes)} heads, {self.num_steps} steps)"
        if budget is None:
            return f"{counts} were made, which took {share}; budget=0.05 would limit that to 5 %"
        if self.every == "auto":
            counts = f"wellcond: {made} measurements ({len(self._probes)} heads, {self.num_steps} steps)"
        ends = "first and last step are measured besides" if _is_regular(self.every) else "steps are those listed"
        return (
            f"{counts} were made within budget={budget:g} ({share}); {ends}. For more give a larger budget, or "
            "budget=None for all that is due"
        )

    def __repr__(self) -> str:
        """One line."""
        counts = f"{len(self._probes)} heads, {len(self.points)} points"
        return (
            f"ConditionTracker(step {self.num_steps}, {counts}, every={self.every!r}, budget={self.allowance.budget})"
        )

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
            numbers = failed_numbers(jacobian) | {"problem": head} if isinstance(head, str) else numbers_of(head)
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
                report = measure(self.model, batch, sites=sites, heads=heads, jacobian=jacobian, **self.options)  # type: ignore[arg-type]
        except NUMERICAL as error:
            if not self._proven:
                raise
            return dict.fromkeys(names, str(error).splitlines()[0])
        found = _by_head(report)
        layers = {layer.name: layer for layer in report.layers}
        problems = {(name, head): layers[name].why_not_measured(head) for name, head in names}
        missing = [name for name, _ in names if layers[name].problem]
        if missing and not self._proven:
            raise WellcondError(f"{missing[0]}: {layers[missing[0]].problem}")
        self._proven = True
        return {key: found.get(key, problems[key]) for key in names}

    def series(self, quantity: str = "condition_number") -> dict[tuple[str, int], list[tuple[int, Any]]]:
        """One quantity of every head over the steps: {(layer, head): [(step, value), ...]}."""
        names = [f.name for f in dataclasses.fields(TrackPoint)]
        if quantity not in names:
            raise ValueError(f"unknown quantity {quantity!r}: expected one of {', '.join(names)}")
        result: dict[tuple[str, int], list[tuple[int, Any]]] = {}
        for point in self.points:
            result.setdefault((point.layer, point.head), []).append((point.step, getattr(point, quantity)))
        return result

    def to_frame(self) -> Any:
        """One row per point as a `pandas.DataFrame`; raises MissingExtraError if pandas is not installed."""
        return make_frame([point.to_dict() for point in self.points], self.run)

    def plot(self, quantity: str = "kappa", ax: Any = None) -> Any:
        """One quantity of every head over the steps; returns the matplotlib `Axes`.

        Where the strict condition number is infinite, the one over the non-zero spectrum is drawn, as a ring.

        Args:
            quantity: ``kappa``, the condition number of the Jacobian, or a number of `TrackPoint`, such as ``kappa_q``.
            ax: where to draw; a new figure by default.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ValueError: a quantity that does not exist or was not measured.
        """
        kappa = "condition_number" if self.options["kappa"] == "strict" else "pseudo_condition_number"
        field = kappa if quantity == "kappa" else quantity
        numbers = [f.name for f in dataclasses.fields(TrackPoint) if f.type not in ("str", "str | None", "bool")]
        if field not in numbers:
            raise ValueError(f"unknown quantity {quantity!r}: expected kappa or one of {', '.join(numbers)}")
        curves = curves_of([point.to_dict() for point in self.points], field)
        if not curves:
            raise ValueError(f"{quantity} was not measured at any step")
        return plot_curves(curves, quantity=field, title=self.run["model"], ax=ax)

    def to_json(self) -> str:
        """All points, one JSON object per line, each with model, input and version; infinities and NaN as text."""
        return "\n".join(point.to_line(self.run) for point in self.points)


def _by_head(report: MeasurementReport) -> dict[tuple[str, int], HeadReport]:
    return {(layer.name, head.index): head for layer in report.layers for head in layer.heads}


def _is_regular(steps: Steps | str | None) -> bool:
    """Whether steps are not listed, so that the first and the last belong to them."""
    return steps == "auto" or isinstance(steps, int)


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
