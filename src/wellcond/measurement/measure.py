"""`measure(model, batch)`: weights, Jacobian, bounds and attention of every head, in one record."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args

import torch
from torch import Tensor, nn

from wellcond.arguments import check_batch, check_flag, check_int, check_ints, describe
from wellcond.attention.checks import Chosen, check_readable, choose_sites
from wellcond.attention.effective import conditioning_of
from wellcond.attention.find import find_attention
from wellcond.attention.sharding import is_sharded
from wellcond.attention.site import AttentionSite
from wellcond.errors import check_choice
from wellcond.jacobian.bounds import SurrogateFactors, log10_kappa_bound, softmax_spectra
from wellcond.jacobian.capture import capture_sites
from wellcond.jacobian.capture.attention import CapturedAttention
from wellcond.jacobian.diagnosis import (
    COLLAPSED_MASS,
    AttentionStatistics,
    HeadDiagnosis,
    all_attention_statistics,
    diagnose_head,
    is_collapsed,
    map_statistics,
)
from wellcond.jacobian.head import Head, JacobianFactors, build_all_factors
from wellcond.jacobian.problem import METHODS, SLOW_SECONDS, TooLongError, show_seconds
from wellcond.jacobian.records import Convention, JacobianSpectrum
from wellcond.jacobian.select import (
    Part,
    SelectedOperator,
    approximated_map,
    output_operator,
    parts_of,
    samples_of,
    select_operator,
)
from wellcond.jacobian.softmax import SoftmaxJacobian, softmax_jacobians, stack_size, stacked_jacobian
from wellcond.jacobian.spectrum import operator_spectra
from wellcond.linalg.records import Spectrum
from wellcond.linalg.spectrum import SoftmaxSpectrum, spectra, to_float64
from wellcond.measurement.facts import run_facts
from wellcond.measurement.log import MeasurementLog
from wellcond.measurement.records import (
    NUMERICAL,
    Combine,
    FailedHead,
    Grouped,
    HeadReport,
    Kappa,
    LayerReport,
    MeasurementReport,
    ReportError,
)
from wellcond.measurement.sharded import measure_sharded

__all__ = [
    "NUMERICAL",
    "Admit",
    "Combine",
    "HeadReport",
    "Kappa",
    "LayerReport",
    "MeasureSettings",
    "MeasurementReport",
    "measure",
]

Admit = Callable[[str, int, float | None], bool]
"""Whether the Jacobian of a head, given by layer and index, may be measured. Asked before anything of it is computed,
with None, and again when the seconds that it may take are known."""
GROUP_BYTES = 256 * 2**20  # of the Jacobians of small heads that are decomposed together


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """What `measure` computes of every head; each field is also a keyword of `measure`.

    Attributes:
        convention: ``wide``, the Jacobian, or ``stack``, the papers' matrix.
        kappa: which condition number `samples` and means are about.
        samples: how many samples (or windows) of the batch to measure.
        combine: ``mean`` measures them one by one; ``stack`` as one Jacobian, since they share the weights.
        grouped: query heads that share keys and values: ``joint``, one Jacobian of all of them, or ``each`` by itself,
            which is smaller.
        jacobian: False measures weights and attention maps only, which takes milliseconds.
        method: of `jacobian_spectrum`.
        biases: biases count as parameters.
        output: also measure each layer's output through W_O, with respect to all its Q, K, V together.
        memory_limit: bytes that may be used.

    Raises: UnknownChoiceError, TypeError, ValueError: values that do not exist or exclude each other.

    Example:
        >>> MeasureSettings(samples=4, kappa="pseudo").combine
        'mean'
    """

    convention: Convention = "wide"
    kappa: Kappa = "strict"
    samples: int = 1
    combine: Combine = "mean"
    grouped: Grouped = "joint"
    jacobian: bool = True
    method: str = "auto"
    biases: bool = False
    output: bool = False
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be measured before anything runs."""
        check_choice("convention", self.convention, get_args(Convention))
        check_choice("kappa", self.kappa, get_args(Kappa))
        check_choice("combine", self.combine, get_args(Combine))
        check_choice("grouped", self.grouped, get_args(Grouped))
        check_choice("Jacobian method", self.method, ("auto", *METHODS))
        check_int("samples", self.samples, at_least=1)
        for name in ("jacobian", "biases", "output"):
            check_flag(name, getattr(self, name))
        if self.memory_limit is not None:
            check_int("memory_limit", self.memory_limit, at_least=1)
        if self.convention == "stack" and self.biases:
            raise ValueError(
                "biases=True: the stacked convention is defined without biases; leave them out, or use "
                "convention='wide'"
            )
        if self.output and not self.jacobian:
            raise ValueError("output=True is about the Jacobian, and jacobian=False leaves it out")

    def spectra(
        self, chosen: Sequence[SelectedOperator], admit: Callable[[float], bool] | None = None
    ) -> list[JacobianSpectrum]:
        """Spectra of operators of one class and shape; TooLongError if `admit`, asked with the seconds, says no."""
        operators = [one.operator for one in chosen]
        if self.convention == "stack":
            operators = [stacked_jacobian(operator) for operator in operators]
        limits = {"method": self.method, "memory_limit": self.memory_limit, "admit": admit}
        return operator_spectra(operators, convention=self.convention, **limits)  # type: ignore[arg-type]


class MeasureOptions(TypedDict, total=False):
    """The fields of `MeasureSettings` as keywords."""

    convention: Convention
    kappa: Kappa
    samples: int
    combine: Combine
    grouped: Grouped
    jacobian: bool
    method: str
    biases: bool
    output: bool
    memory_limit: int | None


def log_slow(seconds: float) -> None:
    """Say in the log of ``wellcond`` that a measurement will take long, and which options make it shorter."""
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
        layers: only the attentions with these numbers, in the order of `find_attention`.
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
    if is_sharded(model):
        if resume is not None:
            raise ValueError("resume: a model that is sharded over ranks is measured in one go; leave resume out")

        def measure_whole(site: AttentionSite, call: Any) -> LayerReport:
            count = site.num_heads if task.grouped == "each" else site.num_kv_heads
            own = None if heads is None else [head for head in heads if head < count]
            asked = None if admit is None else lambda _, head, seconds: admit(site.name, head, seconds)
            report = measure(site.module, call, sites=[site], heads=own, settings=task, admit=asked, on_slow=on_slow)
            return report.layers[0]

        rows = tuple(measure_sharded(model, batch, chosen, measure_whole))
    else:
        asked = sites is not None or layers is not None
        captured = capture_sites(model, batch, chosen, max_samples=task.samples, required=asked)
        log = None if resume is None else MeasurementLog.open(resume, model, batch, task)
        rows = _measure_captured(captured, heads, task, progress, log, _Pace(admit, on_slow))
    return MeasurementReport(rows, task.convention, task.kappa, task.combine, conditioning, run=facts)


def _measure_captured(
    captured: Sequence[CapturedAttention],
    heads: Sequence[int] | None,
    task: MeasureSettings,
    progress: Callable[[Sequence[Any]], Iterable[Any]],
    log: MeasurementLog | None,
    pace: _Pace,
) -> tuple[LayerReport, ...]:
    """Each head by itself: one that fails is recorded with the reason, and the others are measured.

    Raises: what the first head raised, if no head could be measured.
    """
    parts = [parts_of(c, task.grouped) for c in captured]
    for head in heads or ():
        if not any(head < len(of_layer) and head >= 0 for of_layer in parts):
            kind = "query" if task.grouped == "each" else "key/value"
            raise ValueError(f"heads: no attention that is measured has a {kind} head {head}")
    wanted = [p if heads is None else [p[head] for head in heads if 0 <= head < len(p)] for p in parts]
    plan = [(number, part) for number, c in enumerate(captured) if c.call for part in wanted[number]]
    layer_of = lru_cache(maxsize=1)(lambda number: _Layer(captured[number], wanted[number], task, pace))  # one is kept
    found: dict[int, list[HeadReport]] = {number: [] for number in range(len(captured))}
    failed: dict[int, list[FailedHead]] = {number: [] for number in range(len(captured))}
    first_error: Exception | None = None
    for done, (number, part) in enumerate(progress(plan)):
        pace.left = len(plan) - done
        try:
            found[number].append(_measure_head(layer_of(number), part, log))
        except ReportError:
            raise
        except NUMERICAL as error:
            first_error = first_error or error
            failed[number].append(FailedHead(part.index, str(error).splitlines()[0]))
    layer_of.cache_clear()
    if first_error is not None and not any(found.values()):
        first_error.add_note(f"none of the {len(plan)} heads that were asked for could be measured")
        raise first_error
    return tuple(
        _layer_report(c, found[number], failed[number], _through_output(c, task, pace))
        for number, c in enumerate(captured)
    )


def _layer_report(
    captured: CapturedAttention, found: list[HeadReport], failed: list[FailedHead], through_output: dict[str, Any]
) -> LayerReport:
    site, problem = captured.site, "" if captured.call is not None else captured.why_not_plain
    if failed and not found:
        problem = failed[0].problem
    num_tokens = 0 if captured.x is None else captured.x.shape[1]
    return LayerReport(
        site.name, site.kind, site.num_heads, site.num_kv_heads, site.head_dim, num_tokens, tuple(found), problem,
        failed=tuple(failed), **through_output,
    )  # fmt: skip


@dataclass(eq=False)
class _Pace:
    """What is asked, and announced, before a Jacobian begins."""

    admit: Admit | None = None
    on_slow: Callable[[float], None] = log_slow
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


@dataclass(frozen=True, eq=False)
class _Layer:
    """One attention; what is small is computed for all heads asked for together, when first needed."""

    captured: CapturedAttention
    parts: list[Part]
    task: MeasureSettings
    pace: _Pace = dataclasses.field(default_factory=_Pace)

    @cached_property
    def weights(self) -> dict[str, dict[Part, Spectrum]]:
        """Effective weights, by role and head."""
        return {role: self._worst(self.captured.site.slots[role].read()) for role in "qkv"}

    @cached_property
    def raw_weights(self) -> dict[str, dict[Part, Spectrum]]:
        """Stored weights likewise."""
        slots = self.captured.site.slots
        return {role: self._worst(slots[role].read_raw()) if slots[role].is_corrected else self.weights[role]
                for role in "qkv"}  # fmt: skip

    @cached_property
    def samples(self) -> list[list[int]]:
        """Samples that make one Jacobian, for each that is asked for."""
        return samples_of(self.captured, self.task.samples, self.task.combine)

    @cached_property
    def heads(self) -> list[dict[Part, Head]]:
        """The heads of a plain attention, for each of the samples."""
        if not self.captured.is_plain:
            return []
        wanted = [(part.kv_head, part.query_head) for part in self.parts]
        used = self.samples if self.task.jacobian else self.samples[:1]
        found = (self.captured.stacked_heads(wanted, samples) for samples in used)
        return [dict(zip(self.parts, heads, strict=True)) for heads in found]

    @cached_property
    def heads_at_once(self) -> int:
        """How many are measured together: one, where each may be refused by itself."""
        if self.pace.admit is not None:
            return 1
        room = GROUP_BYTES if self.task.memory_limit is None else min(GROUP_BYTES, self.task.memory_limit)
        return min((stack_size(list(of_sample.values()), room) for of_sample in self.heads), default=1)

    def place_of(self, part: Part) -> tuple[_Group, int]:
        """The group of a head, and its place there."""
        group, at = divmod(self.parts.index(part), self.heads_at_once)
        return self._group(group), at

    @cached_property
    def _group(self) -> Callable[[int], _Group]:
        step = self.heads_at_once
        return lru_cache(maxsize=1)(lambda number: _Group(self, self.parts[number * step : (number + 1) * step]))

    @torch.no_grad()
    def _worst(self, rows: Tensor) -> dict[Part, Spectrum]:
        """Of each head, the worst of its (query) heads."""
        of_queries = len(rows) != self.captured.site.num_kv_heads
        at = [range(len(rows))[self.captured.query_heads(part.kv_head, part.query_head)] if of_queries else
              [part.kv_head] for part in self.parts]  # fmt: skip
        found = iter(spectra(rows[[head for heads in at for head in heads]]))
        return {
            part: max((next(found) for _ in heads), key=lambda s: s.condition_number)
            for part, heads in zip(self.parts, at, strict=True)
        }


@dataclass(frozen=True, eq=False)
class _Group:
    """Heads of a layer that are measured together; what is computed is computed for all of them, when first needed."""

    layer: _Layer
    parts: list[Part]

    @cached_property
    def heads(self) -> list[Head]:
        """Of a plain attention, on the first samples."""
        return [self.layer.heads[0][part] for part in self.parts] if self.layer.heads else []

    @cached_property
    def lambdas(self) -> list[SoftmaxSpectrum]:
        """Spectra of the derivatives of their softmax."""
        return softmax_spectra(self.heads)

    @cached_property
    def statistics(self) -> list[AttentionStatistics]:
        """Of their attention maps."""
        return all_attention_statistics(self.heads)

    @cached_property
    def operators(self) -> list[SelectedOperator]:
        """Jacobians on the first samples."""
        return self._operators(0)

    @cached_property
    def factors(self) -> list[JacobianFactors]:
        """Of plain heads, with respect to their weights alone."""
        if self.layer.task.biases:
            return build_all_factors(self.heads)
        plain = [one.operator for one in self.operators]
        return [operator.factors for operator in plain if isinstance(operator, SoftmaxJacobian)]

    @cached_property
    def spectra(self) -> list[list[JacobianSpectrum]]:
        """For each of the samples."""
        task, count = self.layer.task, len(self.layer.samples)
        name, index, heads = self.layer.captured.site.name, self.parts[0].index, len(self.parts)
        # All samples are asked for with the first: a head is measured whole or not at all.
        pace = self.layer.pace
        first = task.spectra(self.operators, lambda seconds: pace.allows(name, index, count * seconds, heads))
        return [first, *(task.spectra(self._operators(number)) for number in range(1, count))]

    def _operators(self, number: int) -> list[SelectedOperator]:
        layer, plain = self.layer, list[SoftmaxJacobian | None]([None] * len(self.parts))
        if layer.heads:
            plain = list(softmax_jacobians([layer.heads[number][part] for part in self.parts], layer.task.biases))
        return [select_operator(layer.captured, part.kv_head, samples=layer.samples[number], biases=layer.task.biases,
                              query_head=part.query_head, plain=operator)
                for part, operator in zip(self.parts, plain, strict=True)]  # fmt: skip


def _measure_head(layer: _Layer, part: Part, log: MeasurementLog | None) -> HeadReport:
    if log is not None:
        return log.head(f"{layer.captured.site.name} head {part.index}", lambda: _measure_head(layer, part, None))
    queries = layer.captured.query_heads(part.kv_head, part.query_head)
    wanted = layer.task.jacobian and layer.pace.allows(layer.captured.site.name, part.index, None)
    measured = _jacobian_of if wanted else _attention_of
    group, at = layer.place_of(part)
    try:
        fields = measured(group, at)
    except TooLongError as error:
        fields = _attention_of(group, at) | {"how": str(error)}
    except NUMERICAL:
        if len(group.parts) == 1:
            raise
        fields = measured(_Group(layer, [part]), 0)  # another head of the group may be the one that fails
    return HeadReport(
        index=part.index,
        query_heads=tuple(range(queries.start, queries.stop)),
        weights={role: by_head[part] for role, by_head in layer.weights.items()},
        raw_weights={role: by_head[part] for role, by_head in layer.raw_weights.items()},
        **fields,
    )


def _attention_of(group: _Group, at: int) -> dict[str, Any]:
    """Fields of a `HeadReport` without a Jacobian."""
    fields: dict[str, Any] = {"how": "weights and attention map only"}
    if group.heads:
        fields |= {"attention": group.statistics[at], "dead": is_collapsed(group.heads[at], group.statistics[at])}
    else:
        fields |= _seen_attention(group.layer.captured, group.parts[at])
    return fields | _approximated(group.layer.captured, group.parts[at].kv_head)


def _seen_attention(captured: CapturedAttention, part: Part) -> dict[str, Any]:
    """Fields of a `HeadReport` about the softmax of an attention that is not plain, on the first sample, if seen."""
    p = captured.probabilities
    if captured.site.kind != "softmax" or p is None or p.dim() != 4 or p.shape[1] != captured.site.num_heads:
        return {}
    p = to_float64(p[0, captured.query_heads(part.kv_head, part.query_head)])
    square = captured.memory is None and p.shape[-2] == p.shape[-1]
    own = p.diagonal(dim1=-2, dim2=-1) if square else None
    statistics = map_statistics(p, (p > 0).sum(-1).to(p), own)
    return {"attention": statistics, "dead": p.shape[-1] > 1 and statistics.max_probability >= COLLAPSED_MASS}


def _approximated(captured: CapturedAttention, index: int) -> dict[str, Any]:
    """Fields of a `HeadReport` about the softmax that an attention approximates."""
    seen = approximated_map(captured, index)
    return {} if seen is None else {"attention": seen.statistics, "approximation_error": seen.error}


def _jacobian_of(group: _Group, at: int) -> dict[str, Any]:
    """Fields of a `HeadReport` that are about the Jacobian and what explains it."""
    captured, task, part = group.layer.captured, group.layer.task, group.parts[at]
    found, first = [of_samples[at] for of_samples in group.spectra], group.operators[at]
    both = _both(found)
    fields: dict[str, Any] = {"jacobian": found[0], "samples": both[task.kappa], "both_samples": both}
    fields["how"] = first.how
    if not group.heads:
        explained = _approximated(captured, part.kv_head) if first.diagnose is None else _diagnosed(first.diagnose())
        return fields | explained
    head, factors = group.heads[at], group.factors[at]
    diagnosis = diagnose_head(head, factors, group.statistics[at])
    fields |= _diagnosed(diagnosis)
    if head.is_single:
        kappa = {"X": diagnosis.kappa_x}
        for role in ("query", "key", "value"):
            kappa[role] = group.layer.weights[captured.site.roles[role]][part].pseudo_condition_number
        fields["papers_bound_log10"] = SurrogateFactors(kappa, diagnosis.kappa_p, group.lambdas[at]).log10
        bound = None if task.biases else log10_kappa_bound(head, factors, convention=task.convention)
        fields["bound_log10"] = bound
    return fields


def _diagnosed(diagnosis: HeadDiagnosis) -> dict[str, Any]:
    return {"diagnosis": diagnosis, "attention": diagnosis.attention, "dead": diagnosis.dead}


def _through_output(captured: CapturedAttention, task: MeasureSettings, pace: _Pace) -> dict[str, Any]:
    """Fields of a `LayerReport` about the output through W_O; none where that is not asked for or not defined."""
    site, nothing = captured.site, {"output_samples": _both([])}
    if not task.output or captured.call is None or not captured.is_plain or site.o is None or task.convention != "wide":
        return nothing
    try:
        chosen = samples_of(captured, task.samples, task.combine)
        found = [
            operator_spectra(
                [output_operator(captured, some, task.biases)], method=task.method, memory_limit=task.memory_limit,
                admit=lambda seconds: pace.allows(site.name, 0, len(chosen) * seconds),
            )[0]
            for some in chosen
        ]  # fmt: skip
    except NUMERICAL as error:
        return nothing | {"output_problem": str(error).splitlines()[0]}
    return {"with_output": found[0], "output_samples": _both(found)}


def _both(found: Sequence[JacobianSpectrum]) -> dict[Kappa, tuple[float, ...]]:
    return {kind: tuple(s.kappa(kind) for s in found) for kind in get_args(Kappa)}
