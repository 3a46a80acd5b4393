"""`ConditionTracker`: conditioning during training, measured within a budget and without changing the training."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from wellcond.attention.checks import Chosen, choose_sites
from wellcond.attention.evaluation import run_facts
from wellcond.attention.find import find_attention
from wellcond.attention.sharding import any_distributed, process_number, reshard_, unwrap
from wellcond.errors import WellcondError
from wellcond.files import json_ready, to_json
from wellcond.jacobian.problem import Convention, show_seconds
from wellcond.linalg.spectrum import show_kappas
from wellcond.measurement.budget import (
    Allowance,
    Heads,
    Steps,
    Together,
    TrackingOptions,
    Turns,
    is_due,
    is_regular,
    log_slow,
)
from wellcond.measurement.measure import Admit, measure
from wellcond.measurement.plot import plot_points
from wellcond.measurement.records import (
    ATTENTION_NUMBERS,
    JACOBIAN_NUMBERS,
    NUMERICAL,
    HeadReport,
    Kappa,
    make_frame,
)
from wellcond.measurement.sharded import decided_by_first


@dataclass(frozen=True, kw_only=True)
class TrackPoint:
    """One head at one step of a training: `HeadReport.numbers` with step, layer and head.

    Condition numbers of the Jacobian are geometric means over samples; everything else about Jacobian, bounds and
    attention map is of the first sample. What is about the Jacobian (also norms and bounds) is None where only weights
    and attention maps were measured, and what is about the attention map where that is not known. A measurement
    that failed has the status ``failed``, its `problem`, and NaN for numbers. Under grouped queries, q is that of the
    worst one.
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
    """The papers' surrogate, which is not a bound."""
    bound_log10: float | None = None
    """A bound on the condition number that holds."""
    entropy: float | None = None
    normalised_entropy: float | None = None
    diagonal_mass: float | None = None
    max_probability: float | None = None
    logit_std: float | None = None
    dead: bool = False
    seconds: float = 0.0
    """Wall time, in equal parts where several heads were measured together; the only field that differs between equal
    runs."""
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def to_json_dict(self) -> dict[str, Any]:
        """Plain data with infinities and NaN as text: `json.dumps` of it is standard JSON."""
        return json_ready(self.to_dict())

    def __repr__(self) -> str:
        where = f"step {self.step}, {self.layer!r} head {self.head}"
        if self.status == "failed":
            return f"TrackPoint({where}, failed: {self.problem})"
        if self.condition_number is None or self.pseudo_condition_number is None:
            weights = ", ".join(f"{getattr(self, f'kappa_{role}'):.4g}" for role in "qkv")
            return f"TrackPoint({where}, kappa of q, k, v: {weights})"
        return f"TrackPoint({where}, {show_kappas(self.condition_number, self.pseudo_condition_number)}, {self.status})"

    def to_line(self, run: Mapping[str, str]) -> str:
        """One line of JSON, with what was measured: model, input and version."""
        return to_json(self.to_dict() | dict(run))


class ConditionTracker:
    """Records condition numbers of weights and Jacobians while a model trains, within a budget.

    The training is not changed: no gradient, random number, buffer or flag is touched, and losses are the same bit for
    bit. A point has weights (condition numbers, scales) and attention map (entropy, spread of the logits) of every head
    that is measured, by default the first of each layer. Jacobians cost more: they are measured one head after the
    other, at points where the budget allows, and are None in all others.

    The budget is of everything: what the tracker sets up, forward passes, the first and the last step. These two are
    measured in any case, without Jacobians unless the time for these was saved by then, and later points wait until
    the training has earned it. How long a Jacobian takes is known from its size and from earlier ones; one that does
    not fit is not begun, and one of more than ten seconds is announced in the log of ``wellcond`` before it begins.
    Without a budget everything that is due is measured, all heads in one forward pass.

    If steps are listed, only these are measured. That a step was the last one is known when the tracker is closed: by
    `close`, or at the end of ``with tracker:``. It then logs `summary`, one line, to the logger ``wellcond``: as a
    warning if Jacobians that were asked for were never measured, else as information.

    Under DistributedDataParallel rank 0 measures and has the points. Sharded weights (FSDP2, tensor parallelism) are
    gathered, one attention layer at a time: every rank needs a batch and has to call `step`; each then has the points
    of rank 0's batch.

    If the first point cannot be measured, that raises. If a later one cannot, or a Jacobian, training goes on: the
    point has the status ``failed``.

    Args:
        model: the model that trains: plain, wrapped by torch.compile or DistributedDataParallel, sharded by FSDP2, or
            with projections that are DTensors.
        batch: inputs for the probe, kept for the whole run so that values are comparable; or give them to `step`.
        every: probe at multiples of this many steps and at the last one, or at these steps; ``auto`` as often as the
            budget allows.
        weights_every: at such multiples, or at these steps, measure weights and attention maps only;
            where the Jacobian is due as well, it is the one that counts.
        sites: only these, from `find_attention(model)`, or a pattern of paths such as ``"blocks.*"``.
        heads: these key/value heads of each layer, or ``"all"``; the first one if None.
        budget: largest share of the training time that measuring may cost; None for no limit.
        first_step: how many steps were trained before. If there were any, nothing is measured now.
        samples: how many samples of the batch to measure.
        convention: of the Jacobian.
        kappa: which condition number is in the summaries.
        method: of `jacobian_spectrum`.
        clock: the clock, in seconds.
        on_slow: called once with the seconds expected, before Jacobians that may take more than ten; logs by default.

    Raises:
        ValueError: options that make no sense.
        WellcondError: a head that cannot be measured, if it is measured at step 0.

    Example:
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> with ConditionTracker(model, torch.randn(1, 5, 8), every=2, heads="all", budget=None) as tracker:
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
        heads: Heads | None = None,
        budget: float | None = 0.05,
        first_step: int = 0,
        samples: int = 1,
        convention: Convention = "wide",
        kappa: Kappa = "strict",
        method: str = "auto",
        clock: Callable[[], float] = time.perf_counter,
        on_slow: Callable[[float], None] = log_slow,
    ) -> None:
        """Measure weights and attention maps of step 0, which shows what that costs."""
        asked = TrackingOptions(
            every=every,
            weights_every=weights_every,
            sites=sites,
            heads=heads,
            budget=budget,
            samples=samples,
            convention=convention,
            kappa=kappa,
            method=method,
        )
        if isinstance(first_step, bool) or not isinstance(first_step, int) or first_step < 0:
            raise ValueError(f"first_step: expected the number of steps trained before, got {first_step!r}")
        begun = clock()
        self.options = asked.of_measure()
        self.model = unwrap(model)
        self.every, self.weights_every, self.batch, self.clock = every, weights_every, batch, clock
        chosen = find_attention(self.model, strict=False) if sites is None else choose_sites(self.model, sites)
        self._probes = [(site, head) for site in chosen for head in range(site.num_kv_heads) if asked.has_head(head)]
        if not self._probes:
            raise ValueError(f"heads: none of the attention layers has the heads {heads!r}")
        self._proven = first_step > 0  # that the heads can be measured, as long as their numbers are finite
        self.allowance = Allowance(budget)
        self._on_slow, self._announced = on_slow, False
        self.turns = Turns([(site.name, head) for site, head in self._probes], clock, self._say_slow)
        self.last_seconds: float | None = None
        """What the Jacobians of all heads took, if they were measured together."""
        self.refused_seconds: float | None = None
        """What they were expected to take when `measure_now` was given less."""
        self.points: list[TrackPoint] = []
        self.num_steps = self._first_step = first_step
        self.run = run_facts(self.model, batch) | ({"input": "given to step()"} if batch is None else {})
        self._given: Any = None  # to `step`
        self._closed = False
        self._due_steps = 0
        reshard_(self.model)  # FSDP2 may have left whole weights, on which nothing shows that they are sharded
        self.is_sharded = any_distributed(self.model)
        self.active = self.is_sharded or process_number() == 0
        self.allowance.spent = clock() - begun
        if self.active and batch is not None and first_step == 0 and (is_due(every, 0) or is_due(weights_every, 0)):
            self._due_steps += 1
            self._measure_point(batch, jacobian=is_due(every, 0))
        self._resumed = self.clock()

    @property
    def overhead(self) -> float:
        """Time spent on measuring, first and last step included, as a share of that spent on training; NaN before."""
        return self.allowance.spent / self.allowance.training if self.allowance.training else math.nan

    def step(self, batch: Any = None) -> list[TrackPoint]:
        """Call once after every training step; returns what was measured now, usually nothing.

        Raises: ValueError if there is no batch to probe with.
        """
        self.num_steps += 1
        self.allowance.training += self.clock() - self._resumed
        first = self._given is None and batch is not None and self.batch is None and self._first_step == 0
        self._given = batch if batch is not None else self._given
        measured = self._measure_due(batch, first=first) if self.active else []
        self._resumed = self.clock()
        return measured

    def _measure_due(self, batch: Any, *, first: bool) -> list[TrackPoint]:
        first = first and (is_regular(self.every) or is_regular(self.weights_every))
        jacobian = is_due(self.every, self.num_steps) or (first and is_regular(self.every))
        if not (first or jacobian or is_due(self.weights_every, self.num_steps)):
            return []
        self._due_steps += 1
        if not first and not self._shared(self.allowance.permits_point):
            return []
        return self._measure_point(self._batch(batch), jacobian=jacobian)

    def close(self, batch: Any = None) -> list[TrackPoint]:
        """Call once after the last training step, on every process: measures it, and logs `summary`.

        Args:
            batch: to measure with; by default what the tracker, or else the latest `step`, was given.

        Returns: what was measured now.
        """
        if self._closed:
            return []
        self._closed = True
        batch = next((given for given in (batch, self.batch, self._given) if given is not None), None)
        regular = is_regular(self.every) or is_regular(self.weights_every)
        measured: list[TrackPoint] = []
        if self.active and regular and batch is not None and self.num_steps > self._first_step:
            now = [point for point in self.points if point.step == self.num_steps]
            incomplete = self.allowance.budget is None and is_regular(self.every) and any(p.status is None for p in now)
            if not now or incomplete:
                due = is_due(self.every, self.num_steps) or is_due(self.weights_every, self.num_steps)
                self._due_steps += not due
                self.allowance.reserve = 0.0
                measured = self._measure_point(batch, jacobian=is_regular(self.every))
        if self.active and process_number() == 0:
            level = logging.WARNING if self._never_measured() else logging.INFO
            logging.getLogger("wellcond").log(level, "%s", self.summary())
        return measured

    def __enter__(self) -> ConditionTracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close, unless training ended in an error."""
        if kind is None:
            self.close()

    def summary(self) -> str:
        """What was measured and which share of the training time that took, in one line, and how to change that."""
        budget, names = self.allowance.budget, self.turns.names
        with_jacobian = [(p.layer, p.head) for p in self.points if p.status not in (None, "failed")]
        steps = len({point.step for point in self.points})
        trained = self.num_steps - self._first_step
        took = f"{self.overhead:.1%} of the training time" if trained else f"{self.allowance.spent:.2g} s"
        text = (
            f"wellcond: measured at {steps} of {self._due_steps} steps that were due ({trained} trained), kappa(J) "
            f"{len(with_jacobian)} times ({len(set(with_jacobian))} of {len(names)} heads), which took {took}"
        )
        if budget is None:
            return f"{text}; budget=0.05 would limit that to 5 %"
        text += f" with budget={budget:g}"
        missing = self._never_measured()
        if not missing:
            return f"{text}; a larger budget measures more, budget=None all that is due"
        costs = [self.turns.expected[name] for name in missing if name in self.turns.expected]
        expected = f" (up to {show_seconds(max(costs))} each)" if costs else ""
        return (
            f"{text}; kappa(J) of {len(missing)} heads was not measured{expected}: give a larger budget, fewer tokens, "
            "or budget=None for all that is due"
        )

    def _never_measured(self) -> list[tuple[str, int]]:
        """Heads whose Jacobian the budget did not allow, though it was asked for."""
        if self.allowance.budget is None or not self.active or (not is_regular(self.every) and not self.every):
            return []
        known = {(point.layer, point.head) for point in self.points if point.status not in (None, "failed")}
        return [name for name in self.turns.names if name not in known]

    def __repr__(self) -> str:
        counts = f"{len(self._probes)} heads, {len(self.points)} points"
        return (
            f"ConditionTracker(step {self.num_steps}, {counts}, every={self.every!r}, budget={self.allowance.budget})"
        )

    def measure_now(self, batch: Any = None, *, jacobian: bool = True, within: float | None = None) -> list[TrackPoint]:
        """Measure every head at the present step in one forward pass, due or not and whatever the budget.

        Args:
            batch: to measure with; by default the tracker's own.
            jacobian: False measures weights and attention maps only.
            within: seconds that this may take. If the Jacobians are expected to take longer, none is in the points;
                if weights and attention maps alone are, nothing is measured.

        Raises: ValueError if there is no batch to probe with.
        """
        if not self.active or (within is not None and not self._shared(jacobian or self.allowance.point <= within)):
            return []
        together = None
        if jacobian and within is not None:
            together = Together(len(self._probes), within, self.clock, self.last_seconds, self._say_slow)
        return self._measure_point(self._batch(batch), jacobian=jacobian, whole=True, together=together)

    def charge(self, seconds: float) -> None:
        """Count time that a caller spent for the tracker's sake, such as on its batch, as spent on measuring."""
        self.allowance.spent += seconds

    def _shared(self, value: bool) -> bool:
        """What the first process decides, whose clock counts."""
        return decided_by_first(value) if self.is_sharded else value

    def _batch(self, batch: Any) -> Any:
        chosen = self.batch if batch is None else batch
        if chosen is None:
            raise ValueError("give a batch to ConditionTracker(model, batch) or to step(batch)")
        return chosen

    def _measure_point(
        self, batch: Any, *, jacobian: bool, whole: bool = False, together: Together | None = None
    ) -> list[TrackPoint]:
        """All heads at the present step: `whole`, or without a budget, with all Jacobians; else with some of them."""
        begun, turns = self.clock(), self.turns
        limited = jacobian and not whole and self.allowance.budget is not None
        if limited:
            jacobian = self._shared(turns.begin(self.allowance.left - self.allowance.point, self.allowance.point))
        else:
            turns.seconds = {}
        admit = turns.admit if limited else None if together is None else together.admit
        found = self._find(batch, jacobian, admit)
        turns.end()
        seconds = self.clock() - begun
        on_jacobians = sum(turns.seconds.values())
        self.allowance.record(seconds, seconds if jacobian and not limited else on_jacobians)
        refused = together is not None and self._shared(together.refused)
        self.refused_seconds = together.expected if together is not None and refused else None
        if together is not None and not refused:
            self.last_seconds = seconds
        if is_regular(self.every) or is_regular(self.weights_every):
            self.allowance.reserve = self.allowance.point
        share, points = (seconds - on_jacobians) / len(self._probes), []
        for (layer, index), head in found.items():
            if isinstance(head, str):
                fields = _failed_numbers(jacobian) | {"problem": head}
            else:
                fields = head.numbers() | (dict.fromkeys(JACOBIAN_NUMBERS) if refused else {})
            took = share + turns.seconds.get((layer, index), 0.0)
            points.append(TrackPoint(step=self.num_steps, layer=layer, head=index, seconds=took, **fields))
        self.points += points
        return points

    def _find(self, batch: Any, jacobian: bool, admit: Admit | None) -> dict[tuple[str, int], HeadReport | str]:
        """The measurement of each head, or why there is none.

        Raises: WellcondError if there is none, and never was.
        """
        sites = list({id(site): site for site, _ in self._probes}.values())
        names = [(site.name, head) for site, head in self._probes]
        try:
            # A probe inside a mixed-precision step is not rounded.
            with torch.autocast(sites[0].q.parameter.device.type, enabled=False):
                report = measure(
                    self.model,
                    batch,
                    sites=sites,
                    heads=sorted({head for _, head in names}),
                    jacobian=jacobian,
                    admit=admit,
                    on_slow=self._say_slow,
                    **self.options,
                )
        except NUMERICAL as error:
            if not self._proven:
                raise
            return dict.fromkeys(names, str(error).splitlines()[0])
        layers = {layer.name: layer for layer in report.layers}
        for name in layers:
            if layers[name].problem and not self._proven:
                raise WellcondError(f"{name}: {layers[name].problem}")
        self._proven = True
        known = {(layer.name, head.index): head for layer in report.layers for head in layer.heads}
        return {(name, head): known.get((name, head), layers[name].why_not_measured(head)) for name, head in names}

    def _say_slow(self, seconds: float) -> None:
        if not self._announced:
            self._announced = True
            self._on_slow(seconds)

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
        name = kappa if quantity == "kappa" else quantity
        numbers = [f.name for f in dataclasses.fields(TrackPoint) if f.type not in ("str", "str | None", "bool")]
        if name not in numbers:
            raise ValueError(f"unknown quantity {quantity!r}: expected kappa or one of {', '.join(numbers)}")
        if all(getattr(point, name) is None for point in self.points):
            raise ValueError(f"{quantity} was not measured at any step")
        return plot_points(self.points, name, title=self.run["model"], ax=ax)

    def to_json(self) -> str:
        """All points, one JSON object per line, each with model, input and version; infinities and NaN as text."""
        return "\n".join(point.to_line(self.run) for point in self.points)


def _failed_numbers(jacobian: bool) -> dict[str, Any]:
    """Fields of a point where the measurement failed; an integer has no NaN and stays None."""
    names = [*ATTENTION_NUMBERS, *(JACOBIAN_NUMBERS if jacobian else ())]
    return dict.fromkeys(set(names) - {"rank", "nullity"}, math.nan) | {"status": "failed"}
