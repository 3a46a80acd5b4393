"""`measure(model, batch)`: weights, Jacobian, bounds and attention of every head, in one record."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from wellcond.attention.checks import choose_sites
from wellcond.attention.find import find_attention
from wellcond.attention.site import AttentionSite, Slot
from wellcond.conditioning.apply import conditioning_of
from wellcond.errors import WellcondError, check_choice
from wellcond.files import json_ready
from wellcond.jacobian.capture import capture_sites
from wellcond.jacobian.capture_record import CapturedAttention
from wellcond.jacobian.captured_forms import CapturedForm, captured_form
from wellcond.jacobian.diagnosis import AttentionStatistics, Diagnosis, attention_statistics, diagnose, is_collapsed
from wellcond.jacobian.forms import StackForm, WideForm
from wellcond.jacobian.head import SoftmaxHead
from wellcond.jacobian.output_projection import PlainHead, ProjectedHeads, union_condition_number
from wellcond.jacobian.records import Convention, JacobianSpectrum
from wellcond.jacobian.spectrum import form_spectrum
from wellcond.linalg.spectrum import spectra
from wellcond.records import Spectrum
from wellcond.theory.bounds import kappa_bound
from wellcond.theory.head import Head, key_block_norms, queries
from wellcond.theory.surrogate import papers_bound

SCHEMA = 1
Kappa = Literal["strict", "pseudo"]
Combine = Literal["mean", "stack"]
# What a measurement may end in when numbers are NaN, infinite or too large to be squared.
NUMERICAL = (WellcondError, ArithmeticError, torch.linalg.LinAlgError)


@dataclass(frozen=True, kw_only=True)
class HeadReport:
    """One key/value head with its query heads; without a Jacobian, weights and attention map only."""

    index: int
    query_heads: tuple[int, ...]
    weights: dict[str, Spectrum]
    """Worst query head of ``q``; ``k``; ``v``; of the effective weights."""
    raw_weights: dict[str, Spectrum]
    """The same of the stored weights, without corrections: equal to `weights` in a plain model."""
    how: str
    jacobian: JacobianSpectrum | None = None
    """Of the first sample, or of all samples stacked; None if it was not asked for."""
    samples: tuple[float, ...] = ()
    """The condition number asked for, sample by sample."""
    both_samples: dict[Kappa, tuple[float, ...]] = field(default_factory=lambda: {"strict": (), "pseudo": ()})
    """Both condition numbers, sample by sample."""
    attention: AttentionStatistics | None = None
    """Of the first sample, or of all samples stacked; None where the attention is not plain softmax."""
    diagnosis: Diagnosis | None = None
    """Likewise; None also without a Jacobian."""
    dead: bool = False
    """Attention has collapsed; without a Jacobian, only where the attention map alone proves it."""
    papers_bound_log10: float | None = None
    """The papers' surrogate, which is not a bound; None where it is not defined."""
    bound_log10: float | None = None
    """A bound on the Jacobian's condition number, strict for wide, pseudo for stack; None where none is known."""

    def mean_kappa(self, kind: Kappa | None = None) -> float:
        """Geometric mean over samples; infinite if any is, NaN if one is not known. Of the kind asked for if None."""
        samples = self.samples if kind is None else self.both_samples[kind]
        if not samples or any(math.isnan(s) for s in samples):
            return math.nan
        if math.inf in samples:
            return math.inf
        if len(samples) == 1:
            return samples[0]
        return math.exp(sum(math.log(s) for s in samples) / len(samples))

    def spread(self) -> float:
        """Geometric standard deviation over samples; 1 for one sample, NaN if one is not finite or there is none."""
        if not self.samples or not all(math.isfinite(s) for s in self.samples):
            return math.nan
        logs = [math.log(s) for s in self.samples]
        if len(logs) < 2:
            return 1.0
        mean = sum(logs) / len(logs)
        return math.exp(math.sqrt(sum((x - mean) ** 2 for x in logs) / (len(logs) - 1)))

    @property
    def verdict(self) -> str:
        """What dominates; ``unknown`` where the attention is not plain softmax or the Jacobian was not measured."""
        return "unknown" if self.diagnosis is None else self.diagnosis.verdict

    @property
    def status(self) -> str:
        """How the Jacobian is known; ``not measured`` without one."""
        return "not measured" if self.jacobian is None else self.jacobian.status


@dataclass(frozen=True)
class LayerReport:
    """One attention."""

    name: str
    kind: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int
    heads: tuple[HeadReport, ...]
    problem: str = ""
    """Why no head could be measured; empty otherwise."""
    with_output: JacobianSpectrum | None = None
    """Of the layer's output through W_O, if asked for (`output=True`) and every head is plain."""

    def kappa(self, kind: Kappa = "strict") -> float:
        """Condition number of the whole layer without W_O: heads have parameters of their own, so spectra unite.

        NaN if the Jacobian of some head was not measured.
        """
        known = [head.jacobian for head in self.heads if head.jacobian is not None]
        return union_condition_number(known, kind) if len(known) == len(self.heads) else math.nan


@dataclass(frozen=True)
class MeasurementReport:
    """What `measure` found. Effective weights throughout: corrections of `condition_` are included."""

    layers: tuple[LayerReport, ...]
    convention: Convention
    kappa: Kappa
    combine: Combine
    conditioning: dict[str, Any] | None
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Plain data, both condition numbers of every head included."""
        data = dataclasses.asdict(self)
        for layer, plain in zip(self.layers, data["layers"], strict=True):
            for head, row in zip(layer.heads, plain["heads"], strict=True):
                row["jacobian"] = None if head.jacobian is None else head.jacobian.to_dict()
                row["weights"] = {role: s.to_dict() for role, s in head.weights.items()}
                row["raw_weights"] = {role: s.to_dict() for role, s in head.raw_weights.items()}
                row["mean_kappa"], row["spread"] = head.mean_kappa(), head.spread()
                row["verdict"] = head.verdict
        return data

    def to_json(self, *, indent: int | None = 2) -> str:
        """`to_dict` as JSON; infinities and NaN as text, since JSON has none."""
        return json.dumps(json_ready(self.to_dict()), indent=indent)

    def to_table(self) -> str:
        """One line per head, in plain text."""
        lines = [f"{'layer':28} head {'kappa(J)':>10} {'status':>12} {'|J_Q|':>9} {'|J_K|':>9} {'|J_V|':>9} "
                 f"{'entropy':>8} {'diagonal':>8}  verdict"]  # fmt: skip
        for layer in self.layers:
            if layer.problem:
                lines.append(f"{layer.name:28} not measured: {layer.problem}")
            for head in layer.heads:
                d, seen = head.diagnosis, head.attention
                norms = " ".join(f"{x:9.3g}" for x in ((d.norm_q, d.norm_k, d.norm_v) if d else (math.nan,) * 3))
                mass = " ".join(f"{x:8.4f}" for x in ((seen.entropy, seen.diagonal_mass) if seen else (math.nan,) * 2))
                lines.append(
                    f"{layer.name:28} {head.index:4} {head.mean_kappa():10.4g} {head.status:>12} {norms} "
                    f"{mass}  {head.verdict}"
                )
        return "\n".join(lines)


def measure(
    model: nn.Module,
    batch: Any,
    *,
    sites: Sequence[AttentionSite] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    convention: Convention = "wide",
    kappa: Kappa = "strict",
    samples: int = 1,
    combine: Combine = "mean",
    jacobian: bool = True,
    method: str = "auto",
    biases: bool = False,
    output: bool = False,
    memory_limit: int | None = None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> MeasurementReport:
    """Condition numbers of the weights and of the parameter Jacobian of every attention head, on real inputs.

    The model's own forward pass runs once on `batch` and is left as it was; tokens, masks and position biases are the
    ones it used. Everything else is float64.

    Args:
        model: any model that `find_attention` understands, conditioned or not.
        batch: a tensor, a mapping of keyword arguments, or a tuple of arguments.
        sites: only these attentions.
        layers: only the attentions with these numbers, in the order of `find_attention`.
        heads: only these key/value heads.
        convention: ``wide``, the Jacobian, or ``stack``, the papers' matrix.
        kappa: which condition number `samples` and means are about.
        samples: how many samples (or windows) of the batch to measure.
        combine: ``mean`` measures them one by one; ``stack`` as one Jacobian, since they share the weights.
        jacobian: False measures weights and attention maps only, which takes milliseconds.
        method: of `jacobian_spectrum`.
        biases: biases count as parameters.
        output: also measure each layer's output through W_O, with respect to all its Q, K, V together.
        memory_limit: bytes that may be used.
        progress: wraps the list of (layer, head) pairs, to show how far it is.

    Returns: a frozen `MeasurementReport` with `to_dict`, `to_json`, `to_table`.

    Raises:
        AttentionNotFoundError: nothing was recognised.
        WeightError: NaN or infinite activations or weights, with the layer's name.
        UnknownChoiceError, ValueError: options that do not exist.
    """
    check_choice("convention", convention, get_args(Convention))
    check_choice("kappa", kappa, get_args(Kappa))
    check_choice("combine", combine, get_args(Combine))
    if samples < 1:
        raise ValueError(f"samples: expected at least 1, got {samples}")
    if output and not jacobian:
        raise ValueError("output=True is about the Jacobian, and jacobian=False leaves it out")
    chosen = choose_sites(model, sites) if sites is not None else find_attention(model, strict=False)
    if layers is not None:
        outside = [layer for layer in layers if not 0 <= layer < len(chosen)]
        if outside:
            raise ValueError(f"layers: expected numbers below {len(chosen)}, got {outside[0]}")
        chosen = [chosen[layer] for layer in layers]
    asked = sites is not None or layers is not None
    captured = capture_sites(model, batch, chosen, max_samples=samples, required=asked)
    for head in heads or ():
        if not any(0 <= head < c.site.num_kv_heads for c in captured):
            raise ValueError(f"heads: no attention that is measured has a key/value head {head}")
    task = _Task(convention, kappa, combine, jacobian, method, biases, memory_limit)
    weighed = [_Layer(c, _chosen_heads(c, heads)) for c in captured]
    plan = [(number, head) for number, layer in enumerate(weighed) if layer.captured.call for head in layer.heads]
    found: dict[int, list[HeadReport]] = {number: [] for number in range(len(captured))}
    problems = {number: c.why_not_plain for number, c in enumerate(captured) if c.call is None}
    for number, index in progress(plan):
        if number in problems:
            continue
        try:
            report = _measure_head(weighed[number], index, task)
        except NUMERICAL as error:
            if len(captured) == 1 and len(plan) == 1:
                raise
            problems[number] = str(error).splitlines()[0]
            continue
        found[number].append(report)
    rows = tuple(
        LayerReport(
            c.site.name, c.site.kind, c.site.num_heads, c.site.num_kv_heads, c.site.head_dim,
            0 if c.x is None else c.x.shape[1], tuple(found[number]), problems.get(number, ""),
            _through_output(c, task) if output else None,
        )
        for number, c in enumerate(captured)
    )  # fmt: skip
    return MeasurementReport(rows, convention, kappa, combine, conditioning_of(model))


def _chosen_heads(captured: CapturedAttention, heads: Sequence[int] | None) -> list[int]:
    available = range(captured.site.num_kv_heads)
    return list(available) if heads is None else [head for head in heads if head in available]


@dataclass(frozen=True)
class _Task:
    """What was asked for."""

    convention: Convention
    kappa: Kappa
    combine: Combine
    jacobian: bool
    method: str
    biases: bool
    memory_limit: int | None

    def spectrum(self, chosen: CapturedForm) -> JacobianSpectrum:
        """Spectrum of one form."""
        form = chosen.form
        if self.convention == "stack":
            if chosen.head is None:
                raise WellcondError("the stacked convention is defined for plain softmax attention only")
            form = StackForm(chosen.head)
        return form_spectrum(form, convention=self.convention, method=self.method, memory_limit=self.memory_limit)


@dataclass(frozen=True, eq=False)
class _Layer:
    """One attention; spectra of the weights of all heads asked for are computed together, when first needed."""

    captured: CapturedAttention
    heads: list[int]

    @cached_property
    def weights(self) -> dict[str, dict[int, Spectrum]]:
        """Effective weights, by role and key/value head."""
        return {role: self._worst(self.captured.site.slots[role].read()) for role in "qkv"}

    @cached_property
    def raw_weights(self) -> dict[str, dict[int, Spectrum]]:
        """Stored weights likewise."""
        slots = self.captured.site.slots
        return {role: self._worst(slots[role].read_raw()) if _corrected(slots[role]) else self.weights[role]
                for role in "qkv"}  # fmt: skip

    @torch.no_grad()
    def _worst(self, rows: Tensor) -> dict[int, Spectrum]:
        """Of each key/value head, the worst of its (query) heads."""
        grouped = rows.unflatten(0, (self.captured.site.num_kv_heads, -1))[self.heads]
        found, size = spectra(grouped.flatten(0, 1)), grouped.shape[1]
        groups = (found[at : at + size] for at in range(0, len(found), size))
        worst = (max(group, key=lambda s: s.condition_number) for group in groups)
        return dict(zip(self.heads, worst, strict=True))


def _corrected(slot: Slot) -> bool:
    return getattr(slot.owner, slot.weight_name) is not slot.parameter


def _measure_head(layer: _Layer, index: int, task: _Task) -> HeadReport:
    group = layer.captured.query_heads(index)
    measured = _jacobian_of if task.jacobian else _attention_of
    return HeadReport(
        index=index,
        query_heads=tuple(range(group.start, group.stop)),
        weights={role: by_head[index] for role, by_head in layer.weights.items()},
        raw_weights={role: by_head[index] for role, by_head in layer.raw_weights.items()},
        **measured(layer.captured, index, task),
    )


def _attention_of(captured: CapturedAttention, index: int, task: _Task) -> dict[str, Any]:
    """Fields of a `HeadReport` without a Jacobian."""
    fields: dict[str, Any] = {"how": "weights and attention map only"}
    if captured.is_plain:
        head = _plain_head(captured, index, task.combine)
        statistics = attention_statistics(head)
        fields |= {"attention": statistics, "dead": is_collapsed(head, statistics)}
    return fields


def _jacobian_of(captured: CapturedAttention, index: int, task: _Task) -> dict[str, Any]:
    """Fields of a `HeadReport` that are about the Jacobian and what explains it."""
    forms = _forms(captured, index, task)
    found = [task.spectrum(form) for form in forms]
    both = {kind: tuple(s.kappa(kind) for s in found) for kind in get_args(Kappa)}
    fields: dict[str, Any] = {"jacobian": found[0], "samples": both[task.kappa], "both_samples": both}
    fields["how"], form, head = forms[0].how, forms[0].form, forms[0].head
    if head is None:
        return fields
    diagnosis = diagnose(head, form.blocks if isinstance(form, WideForm) and not form.biases else None)
    fields |= {"diagnosis": diagnosis, "attention": diagnosis.attention, "dead": diagnosis.dead}
    if head.num_query_heads == 1 and head.y is None:
        plain = _without_biases(head)
        fields["papers_bound_log10"] = papers_bound(plain, strict=False).log10
        fields["bound_log10"] = None if task.biases else _bound_log10(head, plain, task.convention)
    return fields


def _bound_log10(head: SoftmaxHead, plain: Head, convention: Convention) -> float | None:
    r"""log10 of `kappa_bound`, sqrt(U1 / L), for a head whose biases are no parameters.

    M_i and B_i do not see biases of keys and values, since Lambda_i 1 = 0. J_K reads the queries with their bias, which
    `plain` does not have: only |Q| in (U1) = |X|^2 max |M_i|^2 + |Q|^2 max |B_i|^2 + |PX|^2 is another.
    """
    bound = kappa_bound(plain, convention=convention, strict=False)
    if bound.value is None:
        return None
    upper, lower = bound.parts["U1"], bound.parts["L"]
    if head.b_q is not None:
        true, without = (float(torch.linalg.matrix_norm(q, 2)) for q in (head.queries()[0], queries(plain)))
        upper += (true**2 - without**2) * float(key_block_norms(plain).max()) ** 2
    return (math.log10(upper) - math.log10(lower)) / 2


def _without_biases(head: SoftmaxHead) -> Head:
    """The same attention map for the theory's head, which has no biases: what they add to the logits joins the mask."""
    plain = Head(head.x, head.w_q[0], head.w_k, head.w_v, head.scale)
    added = head.scale * (head.queries()[0] @ head.keys().T - (head.x @ plain.w_q.T) @ (head.x @ plain.w_k.T).T)
    mask = added if head.logit_bias is None else added + head.logit_bias.reshape(added.shape)
    return dataclasses.replace(plain, mask=mask)


def _through_output(captured: CapturedAttention, task: _Task) -> JacobianSpectrum | None:
    site = captured.site
    if captured.call is None or not captured.is_plain or site.o is None or task.convention != "wide":
        return None
    heads = [PlainHead(captured.head(index), task.biases) for index in range(site.num_kv_heads)]
    w_o = site.o.read().detach().double().cpu()  # (heads, out, dv)
    form = ProjectedHeads(tuple(heads), w_o.transpose(0, 1).flatten(1))
    return form_spectrum(form, method=task.method, memory_limit=task.memory_limit)


def _plain_head(captured: CapturedAttention, index: int, combine: Combine) -> SoftmaxHead:
    return captured.stacked_head(index) if combine == "stack" else captured.head(index)


def _forms(captured: CapturedAttention, index: int, task: _Task) -> list[CapturedForm]:
    if not captured.is_plain:
        return [captured_form(captured, index, biases=task.biases)]  # a generic form covers the whole call
    if task.combine == "stack":
        head = _plain_head(captured, index, task.combine)
        return [CapturedForm(WideForm(head, task.biases), head, "structured: plain softmax, samples stacked")]
    return [captured_form(captured, index, sample=s, biases=task.biases) for s in range(captured.num_samples)]
