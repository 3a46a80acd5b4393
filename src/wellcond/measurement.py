"""`measure(model, batch)`: weights, Jacobian, bounds and attention of every head, in one record."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from wellcond.attention.checks import choose_sites
from wellcond.attention.find import find_attention
from wellcond.attention.site import AttentionSite
from wellcond.conditioning.apply import conditioning_of
from wellcond.errors import WellcondError, check_choice
from wellcond.jacobian.capture import capture_attention
from wellcond.jacobian.capture_record import CapturedAttention
from wellcond.jacobian.captured_forms import CapturedForm, captured_form
from wellcond.jacobian.diagnosis import Diagnosis, diagnose
from wellcond.jacobian.forms import StackForm, WideForm
from wellcond.jacobian.head import SoftmaxHead
from wellcond.jacobian.output_projection import PlainHead, ProjectedHeads, union_condition_number
from wellcond.jacobian.records import Convention, JacobianSpectrum
from wellcond.jacobian.spectrum import form_spectrum
from wellcond.linalg.spectrum import spectra
from wellcond.records import Spectrum
from wellcond.theory.head import Head
from wellcond.theory.surrogate import papers_bound

SCHEMA = 1
Kappa = Literal["strict", "pseudo"]
Combine = Literal["mean", "stack"]


@dataclass(frozen=True)
class HeadReport:
    """One key/value head with its query heads."""

    index: int
    query_heads: tuple[int, ...]
    weights: dict[str, Spectrum]
    """Worst query head of ``q``; ``k``; ``v``; of the effective weights."""
    jacobian: JacobianSpectrum
    """Of the first sample, or of all samples stacked."""
    samples: tuple[float, ...]
    """The condition number asked for, sample by sample."""
    how: str
    diagnosis: Diagnosis | None
    papers_bound_log10: float | None
    """The papers' surrogate, which is not a bound; None where it is not defined."""

    def mean_kappa(self) -> float:
        """Geometric mean over samples; infinite if any is, NaN if one is not known."""
        if any(math.isnan(s) for s in self.samples):
            return math.nan
        if math.inf in self.samples:
            return math.inf
        return math.exp(sum(math.log(s) for s in self.samples) / len(self.samples))

    def spread(self) -> float:
        """Geometric standard deviation over samples; 1 for one sample, NaN if one is not finite."""
        if not all(math.isfinite(s) for s in self.samples):
            return math.nan
        logs = [math.log(s) for s in self.samples]
        if len(logs) < 2:
            return 1.0
        mean = sum(logs) / len(logs)
        return math.exp(math.sqrt(sum((x - mean) ** 2 for x in logs) / (len(logs) - 1)))

    @property
    def verdict(self) -> str:
        """What dominates; ``unknown`` where the attention is not plain softmax."""
        return "unknown" if self.diagnosis is None else self.diagnosis.verdict

    @property
    def dead(self) -> bool:
        """Attention has collapsed."""
        return self.diagnosis is not None and self.diagnosis.dead


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
        """Condition number of the whole layer without W_O: heads have parameters of their own, so spectra unite."""
        return union_condition_number([head.jacobian for head in self.heads], kind)


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
                row["jacobian"] = head.jacobian.to_dict()
                row["weights"] = {role: s.to_dict() for role, s in head.weights.items()}
                row["mean_kappa"], row["spread"] = head.mean_kappa(), head.spread()
                row["verdict"], row["dead"] = head.verdict, head.dead
        return data

    def to_json(self, *, indent: int | None = 2) -> str:
        """`to_dict` as JSON; infinities and NaN as text, since JSON has none."""
        return json.dumps(_json_ready(self.to_dict()), indent=indent)

    def to_table(self) -> str:
        """One line per head, in plain text."""
        lines = [f"{'layer':28} head {'kappa(J)':>10} {'status':>9} {'|J_Q|':>9} {'|J_K|':>9} {'|J_V|':>9} "
                 f"{'entropy':>8} {'diagonal':>8}  verdict"]  # fmt: skip
        for layer in self.layers:
            if layer.problem:
                lines.append(f"{layer.name:28} not measured: {layer.problem}")
            for head in layer.heads:
                d = head.diagnosis
                norms = " ".join(f"{x:9.3g}" for x in ((d.norm_q, d.norm_k, d.norm_v) if d else (math.nan,) * 3))
                mass = " ".join(
                    f"{x:8.4f}" for x in ((d.attention.entropy, d.attention.diagonal_mass) if d else (math.nan,) * 2)
                )
                lines.append(
                    f"{layer.name:28} {head.index:4} {head.mean_kappa():10.4g} {head.jacobian.status:>9} {norms} "
                    f"{mass}  {head.verdict}"
                )
        return "\n".join(lines)


def _json_ready(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_ready(item) for item in value]
    return value


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
    chosen = choose_sites(model, sites) if sites is not None else find_attention(model, strict=False)
    if layers is not None:
        outside = [layer for layer in layers if not 0 <= layer < len(chosen)]
        if outside:
            raise ValueError(f"layers: expected numbers below {len(chosen)}, got {outside[0]}")
        chosen = [chosen[layer] for layer in layers]
    asked = sites is not None or layers is not None
    captured = capture_attention(model, batch, sites=chosen if asked else None, max_samples=samples)
    for head in heads or ():
        if not any(0 <= head < c.site.num_kv_heads for c in captured):
            raise ValueError(f"heads: no attention that is measured has a key/value head {head}")
    options = {"convention": convention, "method": method, "memory_limit": memory_limit}
    plan = [(number, head) for number, c in enumerate(captured) if c.call for head in _chosen_heads(c, heads)]
    found: dict[int, list[HeadReport]] = {number: [] for number in range(len(captured))}
    problems = {number: c.why_not_plain for number, c in enumerate(captured) if c.call is None}
    for number, index in progress(plan):
        if number in problems:
            continue
        try:
            report = _measure_head(captured[number], index, kappa, combine, biases, options)
        except WellcondError as error:
            if len(captured) == 1 and len(plan) == 1:
                raise
            problems[number] = str(error).splitlines()[0]
            continue
        found[number].append(report)
    rows = tuple(
        LayerReport(
            c.site.name, c.site.kind, c.site.num_heads, c.site.num_kv_heads, c.site.head_dim,
            0 if c.x is None else c.x.shape[1], tuple(found[number]), problems.get(number, ""),
            _through_output(c, biases, options) if output else None,
        )
        for number, c in enumerate(captured)
    )  # fmt: skip
    return MeasurementReport(rows, convention, kappa, combine, conditioning_of(model))


def _chosen_heads(captured: CapturedAttention, heads: Sequence[int] | None) -> list[int]:
    available = range(captured.site.num_kv_heads)
    return list(available) if heads is None else [head for head in heads if head in available]


def _measure_head(
    captured: CapturedAttention, index: int, kappa: Kappa, combine: Combine, biases: bool, options: dict[str, Any]
) -> HeadReport:
    forms = _forms(captured, index, combine, biases)
    spectra_found = [_spectrum(form, options) for form in forms]
    head = forms[0].head
    weights = {}
    with torch.no_grad():
        for role in "qkv":
            rows = captured.site.slots[role].read()
            group = captured.query_heads(index) if rows.shape[0] == captured.site.num_heads else slice(index, index + 1)
            weights[role] = max(spectra(rows[group]), key=lambda s: s.condition_number)
    diagnosis = bound = None
    if head is not None:
        diagnosis = diagnose(head)
        if head.num_query_heads == 1 and head.y is None:
            bound = papers_bound(_without_biases(head), strict=False).log10
    group = captured.query_heads(index)
    return HeadReport(
        index, tuple(range(group.start, group.stop)), weights, spectra_found[0],
        tuple(s.kappa(kappa) for s in spectra_found), forms[0].how, diagnosis, bound,
    )  # fmt: skip


def _without_biases(head: SoftmaxHead) -> Head:
    """The same attention map for the theory's head, which has no biases: what they add to the logits joins the mask."""
    plain = Head(head.x, head.w_q[0], head.w_k, head.w_v, head.scale)
    added = head.scale * (head.queries()[0] @ head.keys().T - (head.x @ plain.w_q.T) @ (head.x @ plain.w_k.T).T)
    mask = added if head.logit_bias is None else added + head.logit_bias.reshape(added.shape)
    return dataclasses.replace(plain, mask=mask)


def _through_output(captured: CapturedAttention, biases: bool, options: dict[str, Any]) -> JacobianSpectrum | None:
    site = captured.site
    if captured.call is None or not captured.is_plain or site.o is None or options["convention"] != "wide":
        return None
    heads = [PlainHead(captured.head(index), biases) for index in range(site.num_kv_heads)]
    w_o = site.o.read().detach().double().cpu()  # (heads, out, dv)
    form = ProjectedHeads(tuple(heads), w_o.transpose(0, 1).flatten(1))
    return form_spectrum(form, method=options["method"], memory_limit=options["memory_limit"])


def _forms(captured: CapturedAttention, index: int, combine: Combine, biases: bool) -> list[CapturedForm]:
    if not captured.is_plain:
        return [captured_form(captured, index, biases=biases)]  # a generic form covers the whole call
    if combine == "stack":
        head = captured.stacked_head(index)
        return [CapturedForm(WideForm(head, biases), head, "structured: plain softmax, samples stacked")]
    return [captured_form(captured, index, sample=s, biases=biases) for s in range(captured.num_samples)]


def _spectrum(chosen: CapturedForm, options: dict[str, Any]) -> JacobianSpectrum:
    if options["convention"] == "stack":
        if chosen.head is None:
            raise WellcondError("the stacked convention is defined for plain softmax attention only")
        return form_spectrum(StackForm(chosen.head), **options)
    return form_spectrum(chosen.form, **options)
