"""`measure(model, batch)`: weights, Jacobian, bounds and attention of every head, in one record."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, get_args

import torch
from torch import Tensor, nn

from wellcond.arguments import check_batch, check_ints, describe
from wellcond.attention.checks import Chosen, choose_sites
from wellcond.attention.evaluation import run_facts
from wellcond.attention.find import check_readable, find_attention
from wellcond.attention.kernels import AttentionStatistics, map_statistics
from wellcond.attention.sharding import is_sharded
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import conditioning_of
from wellcond.errors import TooLongError
from wellcond.jacobian.capture import CapturedAttention, capture_attention
from wellcond.jacobian.diagnosis import (
    COLLAPSED_MASS,
    HeadDiagnosis,
    SurrogateFactors,
    all_attention_statistics,
    diagnose_head,
    is_collapsed,
    log10_kappa_bound,
    softmax_spectra,
)
from wellcond.jacobian.factors import JacobianFactors, build_all_factors
from wellcond.jacobian.head import Head
from wellcond.jacobian.module import batch_axis
from wellcond.jacobian.problem import SLOW_SECONDS, JacobianSpectrum, show_seconds
from wellcond.jacobian.select import (
    PLAIN,
    PLAIN_STACKED,
    SelectedOperator,
    approximated_map,
    output_operator,
    select_operator,
)
from wellcond.jacobian.softmax import SoftmaxJacobian, softmax_jacobians, stack_size, stacked_jacobian
from wellcond.jacobian.solve import operator_spectra
from wellcond.linalg.spectrum import SoftmaxSpectrum, Spectrum, spectra, to_float64
from wellcond.measurement.records import (
    NUMERICAL,
    FailedHead,
    HeadReport,
    Kappa,
    LayerReport,
    MeasurementReport,
    MeasureOptions,
    MeasureSettings,
)
from wellcond.measurement.resume import MeasurementLog
from wellcond.measurement.sharded import measure_sharded

Admit = Callable[[str, int, float | None], bool]
"""Whether the Jacobian of a head, given by layer and index, may be measured. Called with None before anything of it is
computed, and again with the seconds that it may take when these are known."""
GROUP_BYTES = 256 * 2**20
"""Memory for the Jacobians of small heads that are decomposed together."""


def log_slow(seconds: float) -> None:
    """Log to ``wellcond`` that a measurement will take long, and which options make it shorter."""
    logging.getLogger("wellcond").warning(
        "wellcond.measure is expected to take up to %s; layers=, heads= or fewer tokens make that less, jacobian=False "
        "leaves kappa(J) out, resume= keeps what is measured if you interrupt it",
        show_seconds(seconds),
    )


def measure(
    model: nn.Module,
    batch: Any,
    *,
    sites: Chosen | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    settings: MeasureSettings | None = None,
    resume: str | Path | None = None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    admit: Admit | None = None,
    on_slow: Callable[[float], None] = log_slow,
    **options: Unpack[MeasureOptions],
) -> MeasurementReport:
    """Condition numbers of the weights and of the parameter Jacobian of every attention head, on real inputs.

    The model's own forward pass runs once on `batch` and is left as it was; tokens, masks and position biases are the
    ones it used. Everything else is float64. A head that can not be measured is reported with the reason
    (`LayerReport.failed`), and the others are measured.

    Where the weights are sharded over ranks (FSDP2, tensor parallelism) every rank must call this; one attention layer
    after the other is gathered, the first rank measures it, and every rank gets its report.

    Args:
        model: any model that `find_attention` understands, conditioned or not.
        batch: a tensor, a mapping of keyword arguments, or a tuple of arguments.
        sites: only these, from `find_attention(model)`, or a pattern of paths such as ``"blocks.*"``.
        layers: only the attention layers with these numbers, in the order of `find_attention`.
        heads: only these key/value heads; query heads where each is measured by itself.
        settings: what to compute; the defaults of `MeasureSettings` if None.
        resume: a file in which every head is noted when it is measured; the same call then resumes there. Large
            models take hours.
        progress: wraps the list of all heads, to show how far it is.
        admit: asked for every head whether its Jacobian may be measured; what is refused has `jacobian` None, and
            weights and attention map nevertheless.
        on_slow: called with the seconds expected, if these are more than 10, before the first Jacobian begins; by
            default that is logged as a warning.
        **options: fields of `MeasureSettings`, which replace those of `settings`: ``measure(model, batch, samples=4)``.

    Returns: a frozen `MeasurementReport` with `to_dict`, `to_json`, `to_table`, `to_frame`, `plot`.

    Raises:
        AttentionNotFoundError: nothing was recognised.
        WeightError: NaN or infinite activations or weights, with the layer's name.
        UnknownChoiceError, TypeError, ValueError: options that do not exist.
        ReportError: `resume` is the file of another measurement.
        WellcondError: not one head could be measured; the reason of the first.
    """
    if settings is not None and not isinstance(settings, MeasureSettings):
        raise TypeError(f"settings: expected MeasureSettings(...), got {describe(settings)}")
    task = dataclasses.replace(settings or MeasureSettings(), **options)
    heads = None if heads is None else check_ints("heads", heads)
    layers = None if layers is None else check_ints("layers", layers)
    if resume is not None and not isinstance(resume, (str, Path)):
        raise TypeError(f"resume: expected the path of a file, got {describe(resume)}")
    if not callable(progress):
        raise TypeError(f"progress: expected a function that wraps a list, got {describe(progress)}")
    check_batch(batch)
    chosen = choose_sites(model, sites) if sites is not None else find_attention(model, strict=False)
    if layers is not None:
        outside = [layer for layer in layers if not 0 <= layer < len(chosen)]
        if outside:
            raise ValueError(f"layers: expected numbers below {len(chosen)}, got {outside[0]}")
        chosen = [chosen[layer] for layer in layers]
    check_readable(chosen)
    facts, conditioning = run_facts(model, batch), conditioning_of(model)
    pace = _Pace(admit, on_slow)
    if is_sharded(model):
        if resume is not None:
            raise ValueError("resume: a model that is sharded over ranks is measured in one go; leave resume out")

        def measure_layer(site: AttentionSite, call: Any) -> LayerReport:
            count = site.num_heads if task.grouped == "each" else site.num_kv_heads
            known = None if heads is None else [head for head in heads if head < count]
            captured = capture_attention(site.module, call, [site], max_samples=task.samples)
            return _measure_captured(captured, known, task, iter, None, pace)[0]

        rows = tuple(measure_sharded(model, batch, chosen, measure_layer))
    else:
        asked = sites is not None or layers is not None
        captured = capture_attention(model, batch, chosen, max_samples=task.samples, required=asked)
        log = None if resume is None else MeasurementLog.open(resume, model, batch, task)
        rows = _measure_captured(captured, heads, task, progress, log, pace)
    return MeasurementReport(rows, task.convention, task.kappa, task.combine, conditioning, run=facts)


@dataclass(frozen=True)
class Part:
    """What one row of a report is about: a key/value head, with all its query heads or one of them."""

    index: int
    kv_head: int
    query_head: int | None = None


def parts_of(captured: CapturedAttention, grouped: str) -> list[Part]:
    """Rows of an attention whose grouped query heads are measured ``joint`` or ``each`` by itself."""
    site = captured.site
    if grouped == "joint" or site.num_heads == site.num_kv_heads:
        return [Part(head, head) for head in range(site.num_kv_heads)]
    group = site.num_heads // site.num_kv_heads
    return [Part(head, head // group, head) for head in range(site.num_heads)]


def samples_of(captured: CapturedAttention, asked: int, combine: str) -> list[list[int]]:
    """Samples that make one Jacobian: all of them (``stack``), or each (``mean``)."""
    count = captured.num_samples if captured.is_plain else min(asked, batch_axis(captured).count)
    return [list(range(count))] if combine == "stack" else [[sample] for sample in range(count)]


def _measure_captured(
    captured: Sequence[CapturedAttention],
    heads: Sequence[int] | None,
    task: MeasureSettings,
    progress: Callable[[Sequence[Any]], Iterable[Any]],
    log: MeasurementLog | None,
    pace: _Pace,
) -> tuple[LayerReport, ...]:
    """Measure each head by itself: one that fails is recorded with the reason, and the others are measured.

    Raises: what the first head raised, if no head could be measured.
    """
    parts = [parts_of(c, task.grouped) for c in captured]
    for head in heads or ():
        if not any(0 <= head < len(of_layer) for of_layer in parts):
            kind = "query" if task.grouped == "each" else "key/value"
            raise ValueError(f"heads: no attention layer that is measured has a {kind} head {head}")
    wanted = [p if heads is None else [p[head] for head in heads if 0 <= head < len(p)] for p in parts]
    plan = [(number, part) for number, c in enumerate(captured) if c.call for part in wanted[number]]
    found: list[list[HeadReport]] = [[] for _ in captured]
    failed: list[list[FailedHead]] = [[] for _ in captured]
    first_error: Exception | None = None
    at_layer, groups = -1, list[_Group]()
    for done, (number, part) in enumerate(progress(plan)):
        pace.left = len(plan) - done
        name = f"{captured[number].site.name} head {part.index}"
        known = None if log is None else log.found.get(name)
        if known is not None:
            found[number].append(known)
            continue
        try:
            if at_layer != number:
                groups = []  # those of the layer before are freed first
                groups, at_layer = _group_heads(captured[number], wanted[number], task, pace), number
            while part not in groups[0].parts:
                del groups[0]
            report = _measure_head(groups[0], part)
        except NUMERICAL as error:
            first_error = first_error or error
            failed[number].append(FailedHead(part.index, str(error).splitlines()[0]))
            continue
        if log is not None:
            log.add(name, report)
        found[number].append(report)
    groups.clear()
    if first_error is not None and not any(found):
        first_error.add_note(f"none of the {len(plan)} heads that were asked for could be measured")
        raise first_error
    return tuple(
        LayerReport(
            name=c.site.name,
            kind=c.site.kind,
            num_heads=c.site.num_heads,
            num_kv_heads=c.site.num_kv_heads,
            head_dim=c.site.head_dim,
            num_tokens=0 if c.x is None else c.x.shape[1],
            heads=tuple(heads),
            problem=problems[0].problem if problems and not heads else "" if c.call else c.why_not_plain,
            failed=tuple(problems),
            **_through_output(c, task, pace),
        )
        for c, heads, problems in zip(captured, found, failed, strict=True)
    )


@dataclass(eq=False)
class _Pace:
    """What is asked, and announced, before a Jacobian begins."""

    admit: Admit | None
    on_slow: Callable[[float], None]
    left: int = 1
    """Heads that are still to be measured."""
    announced: bool = False

    def allows(self, layer: str, head: int, seconds: float | None, heads: int = 1) -> bool:
        """Whether the Jacobians of so many heads, this one among them, may be measured."""
        if self.admit is not None:
            return self.admit(layer, head, seconds)
        expected = 0.0 if seconds is None else seconds / heads * self.left
        if expected > SLOW_SECONDS and not self.announced:
            self.announced = True
            self.on_slow(expected)
        return True


def _group_heads(captured: CapturedAttention, parts: list[Part], task: MeasureSettings, pace: _Pace) -> list[_Group]:
    """Groups of heads of one attention layer, as large as memory and `admit` allow; those of plain attention only."""
    samples = samples_of(captured, task.samples, task.combine)
    plain: list[list[Head]] = []
    if captured.is_plain:
        wanted = [(part.kv_head, part.query_head) for part in parts]
        used = samples if task.jacobian else samples[:1]
        plain = [list(captured.heads(wanted, some)) for some in used]
    room = GROUP_BYTES if task.memory_limit is None else min(GROUP_BYTES, task.memory_limit)
    size = min((stack_size(heads, room) for heads in plain), default=1)
    if pace.admit is not None:
        size = 1  # each head may be refused by itself
    slots = captured.site.slots
    weights = {role: _worst(captured, parts, slots[role].read()) for role in "qkv"}
    raw_weights = {
        role: _worst(captured, parts, slots[role].read_raw()) if slots[role].is_corrected else weights[role]
        for role in "qkv"
    }
    return [
        _Group(
            captured,
            task,
            pace,
            weights,
            raw_weights,
            samples,
            parts[begin : begin + size],
            [heads[begin : begin + size] for heads in plain],
        )
        for begin in range(0, len(parts), size)
    ]


@torch.no_grad()
def _worst(captured: CapturedAttention, parts: list[Part], rows: Tensor) -> dict[Part, Spectrum]:
    """Spectrum of each head's weight; of grouped queries, the one with the largest condition number."""
    of_queries = len(rows) != captured.site.num_kv_heads
    numbers = {}
    for part in parts:
        queries = captured.query_heads(part.kv_head, part.query_head)
        numbers[part] = list(range(len(rows))[queries]) if of_queries else [part.kv_head]
    found = iter(spectra(rows[[head for heads in numbers.values() for head in heads]]))
    return {
        part: max((next(found) for _ in heads), key=lambda s: s.condition_number) for part, heads in numbers.items()
    }


@dataclass(frozen=True, eq=False)
class _Group:
    """Heads of a layer that are measured together: each property is computed once, for all of them, when needed."""

    captured: CapturedAttention
    task: MeasureSettings
    pace: _Pace
    weights: dict[str, dict[Part, Spectrum]]
    raw_weights: dict[str, dict[Part, Spectrum]]
    samples: list[list[int]]
    """Samples that make one Jacobian, for each Jacobian of a head."""
    parts: list[Part]
    plain: list[list[Head]]
    """The heads of a plain attention layer for each of `samples`; empty if it is not plain."""

    def alone(self, part: Part) -> _Group:
        at = self.parts.index(part)
        return dataclasses.replace(self, parts=[part], plain=[[heads[at]] for heads in self.plain])

    @property
    def heads(self) -> list[Head]:
        """The heads of a plain attention layer on the first samples; empty if it is not plain."""
        return self.plain[0] if self.plain else []

    @cached_property
    def lambdas(self) -> list[SoftmaxSpectrum]:
        return softmax_spectra(self.heads)

    @cached_property
    def statistics(self) -> list[AttentionStatistics]:
        return all_attention_statistics(self.heads)

    @cached_property
    def operators(self) -> list[SelectedOperator]:
        return self._operators(0)

    @cached_property
    def factors(self) -> list[JacobianFactors]:
        """Factors of the Jacobians of plain heads with respect to their weights alone."""
        if self.task.biases:
            return build_all_factors(self.heads)
        plain = [one.operator for one in self.operators]
        return [operator.factors for operator in plain if isinstance(operator, SoftmaxJacobian)]

    @cached_property
    def spectra(self) -> list[list[JacobianSpectrum]]:
        """Spectra of the Jacobians of all heads, for each of the samples.

        Raises: TooLongError if they may not be measured.
        """
        name, index, count = self.captured.site.name, self.parts[0].index, len(self.samples)

        def admit(seconds: float) -> bool:
            return self.pace.allows(name, index, count * seconds, len(self.parts))  # all samples or none

        first = self._spectra(self.operators, admit)
        return [first, *(self._spectra(self._operators(number)) for number in range(1, count))]

    def _operators(self, number: int) -> list[SelectedOperator]:
        samples, biases = self.samples[number], self.task.biases
        if self.plain:
            how = PLAIN_STACKED if len(samples) > 1 else PLAIN
            return [SelectedOperator(operator, how) for operator in softmax_jacobians(self.plain[number], biases)]
        return [
            select_operator(self.captured, part.kv_head, samples=samples, biases=biases, query_head=part.query_head)
            for part in self.parts
        ]

    def _spectra(
        self, chosen: Sequence[SelectedOperator], admit: Callable[[float], bool] | None = None
    ) -> list[JacobianSpectrum]:
        task, operators = self.task, [one.operator for one in chosen]
        if task.convention == "stack":
            operators = [stacked_jacobian(operator) for operator in operators]
        return operator_spectra(
            operators,
            convention=task.convention,
            method=task.method,
            memory_limit=task.memory_limit,
            admit=admit,
        )


def _measure_head(group: _Group, part: Part) -> HeadReport:
    captured = group.captured
    wanted = group.task.jacobian and group.pace.allows(captured.site.name, part.index, None)
    measured = _jacobian_fields if wanted else _attention_fields
    try:
        fields = measured(group, part)
    except TooLongError as error:
        fields = _attention_fields(group, part) | {"how": str(error)}
    except NUMERICAL:
        if len(group.parts) == 1:
            raise
        fields = measured(group.alone(part), part)  # another head of the group may be the one that fails
    queries = captured.query_heads(part.kv_head, part.query_head)
    return HeadReport(
        index=part.index,
        query_heads=tuple(range(queries.start, queries.stop)),
        weights={role: by_head[part] for role, by_head in group.weights.items()},
        raw_weights={role: by_head[part] for role, by_head in group.raw_weights.items()},
        **fields,
    )


def _attention_fields(group: _Group, part: Part) -> dict[str, Any]:
    captured, at = group.captured, group.parts.index(part)
    how = {"how": "weights and attention map only"}
    if group.heads:
        statistics = group.statistics[at]
        return how | {"attention": statistics, "dead": is_collapsed(group.heads[at], statistics)}
    return how | _seen_attention(captured, part) | _approximated(captured, part.kv_head)


def _seen_attention(captured: CapturedAttention, part: Part) -> dict[str, Any]:
    """Fields of a `HeadReport` about the softmax of a layer that is not plain, on the first sample, if it was seen."""
    p = captured.probabilities
    if captured.site.kind != "softmax" or p is None or p.dim() != 4 or p.shape[1] != captured.site.num_heads:
        return {}
    p = to_float64(p[0, captured.query_heads(part.kv_head, part.query_head)])
    square = captured.memory is None and p.shape[-2] == p.shape[-1]
    own = p.diagonal(dim1=-2, dim2=-1) if square else None
    statistics = map_statistics(p, (p > 0).sum(-1).to(p), own)
    return {"attention": statistics, "dead": p.shape[-1] > 1 and statistics.max_probability >= COLLAPSED_MASS}


def _approximated(captured: CapturedAttention, index: int) -> dict[str, Any]:
    seen = approximated_map(captured, index)
    return {} if seen is None else {"attention": seen.statistics, "approximation_error": seen.error}


def _jacobian_fields(group: _Group, part: Part) -> dict[str, Any]:
    """Fields of a `HeadReport` that are about the Jacobian and what explains it."""
    captured, task, at = group.captured, group.task, group.parts.index(part)
    found = [of_samples[at] for of_samples in group.spectra]
    chosen, both = group.operators[at], _both(found)
    fields: dict[str, Any] = {
        "jacobian": found[0],
        "samples": both[task.kappa],
        "both_samples": both,
        "how": chosen.how,
    }
    if not group.heads:
        explained = _approximated(captured, part.kv_head) if chosen.diagnose is None else _diagnosed(chosen.diagnose())
        return fields | explained
    head, factors = group.heads[at], group.factors[at]
    diagnosis = diagnose_head(head, factors, group.statistics[at])
    fields |= _diagnosed(diagnosis)
    if head.is_single:
        kappa = {"X": diagnosis.kappa_x}
        for role in ("query", "key", "value"):
            kappa[role] = group.weights[captured.site.roles[role]][part].pseudo_condition_number
        fields["papers_bound_log10"] = SurrogateFactors(kappa, diagnosis.kappa_p, group.lambdas[at]).log10
        bound = None if task.biases else log10_kappa_bound(head, factors, convention=task.convention)
        fields["bound_log10"] = bound
    return fields


def _diagnosed(diagnosis: HeadDiagnosis) -> dict[str, Any]:
    return {"diagnosis": diagnosis, "attention": diagnosis.attention, "dead": diagnosis.dead}


def _through_output(captured: CapturedAttention, task: MeasureSettings, pace: _Pace) -> dict[str, Any]:
    """Fields of a `LayerReport` about the output through W_O; none where that is not asked for or not defined."""
    site = captured.site
    if not task.output or captured.call is None or not captured.is_plain or site.o is None or task.convention != "wide":
        return {}
    chosen = samples_of(captured, task.samples, task.combine)

    def admit(seconds: float) -> bool:
        return pace.allows(site.name, 0, len(chosen) * seconds)

    found: list[JacobianSpectrum] = []
    try:
        for samples in chosen:
            operator = output_operator(captured, samples, task.biases)
            found += operator_spectra([operator], method=task.method, memory_limit=task.memory_limit, admit=admit)
    except NUMERICAL as error:
        return {"output_problem": str(error).splitlines()[0]}
    return {"with_output": found[0], "output_samples": _both(found)}


def _both(found: Sequence[JacobianSpectrum]) -> dict[Kappa, tuple[float, ...]]:
    return {kind: tuple(s.kappa(kind) for s in found) for kind in get_args(Kappa)}
