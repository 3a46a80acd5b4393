"""Which form of the Jacobian fits a captured attention: structured where its mathematics is known, else generic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wellcond.attention.site import AttentionSite
from wellcond.errors import WellcondError
from wellcond.jacobian.capture.attention import CapturedAttention
from wellcond.jacobian.capture.graph import NotTracedError
from wellcond.jacobian.capture.trace import trace_form
from wellcond.jacobian.channel import ChannelHead
from wellcond.jacobian.form import AbstractForm
from wellcond.jacobian.generic.head import GenericHead, num_samples
from wellcond.jacobian.layer import ProjectedHeads
from wellcond.jacobian.plain import WideForm
from wellcond.jacobian.select import AGREEMENT_OF_OUTPUT, AGREEMENT_OF_PRODUCT
from wellcond.lab.nystrom.form import nystrom_form


@dataclass(frozen=True)
class CapturedForm:
    """A form of one head on one sample, and how it was chosen."""

    form: AbstractForm
    how: str


@dataclass(frozen=True)
class Part:
    """What one row of a report is about: a key/value head, with all its query heads or one of them."""

    index: int
    kv_head: int
    query_head: int | None = None


def parts_of(captured: CapturedAttention, grouped: str) -> list[Part]:
    """Of an attention whose grouped query heads are measured ``joint`` or ``each`` by itself."""
    site = captured.site
    if grouped == "joint" or site.num_heads == site.num_kv_heads:
        return [Part(head, head) for head in range(site.num_kv_heads)]
    group = site.num_heads // site.num_kv_heads
    return [Part(head, head // group, head) for head in range(site.num_heads)]


def samples_of(captured: CapturedAttention, asked: int, combine: str) -> list[list[int]]:
    """Samples that make one Jacobian: all of them (``stack``), or each (``mean``)."""
    count = captured.num_samples if captured.is_plain else min(asked, num_samples(captured))
    return [list(range(count))] if combine == "stack" else [[sample] for sample in range(count)]


def captured_form(
    captured: CapturedAttention,
    kv_head: int,
    *,
    samples: Sequence[int] = (0,),
    biases: bool = False,
    query_head: int | None = None,
    plain: WideForm | None = None,
) -> CapturedForm:
    """The form of one key/value head of a captured attention on one sample, or on several as one Jacobian.

    Of grouped queries it is of all query heads of the group, or of `query_head` alone. `plain` is the form of a plain
    attention whose caller has it already.

    A structured form that is not plain (channel attention, rotary positions, QK-norm, Nystrom) is believed only if it
    has the output and the derivative of the module's own copy; otherwise derivatives go through the module.
    """
    if captured.is_plain:
        plain = plain or WideForm(captured.stacked_head(kv_head, samples, query_head=query_head), biases)
        stacked = ", samples stacked" if len(samples) > 1 else ""
        return CapturedForm(plain, f"structured: plain softmax{stacked}")
    if captured.site.kind == "nystrom" and len(samples) == 1:
        return _nystrom(captured, kv_head, samples[0], biases)
    generic = GenericHead(captured, kv_head, samples=samples, query_head=query_head)
    builds = (partial(_channel, captured, kv_head, samples), partial(_row_wise, captured, generic))
    for build in builds:
        structured = build(False)
        if structured is not None and _agree(structured.form, generic):
            return (build(True) or structured) if biases else structured
    return _generic(captured, generic, biases)


def output_form(captured: CapturedAttention, samples: Sequence[int], biases: bool) -> ProjectedHeads:
    """Of the output of a plain attention through W_O, with respect to the weights of all its heads."""
    site = captured.site
    assert site.o is not None
    w_o = site.o.read().detach().cpu().double().transpose(0, 1).flatten(1)  # (out, heads dv) from (heads, out, dv)
    heads = captured.stacked_heads([(head, None) for head in range(site.num_kv_heads)], samples)
    return ProjectedHeads(tuple(WideForm(head.cpu(), biases) for head in heads), w_o)


def _generic(captured: CapturedAttention, generic: GenericHead, biases: bool) -> CapturedForm:
    left_out = "; biases are not counted" if biases else ""
    return CapturedForm(generic, f"generic derivatives: {captured.why_not_plain}{left_out}")


def _nystrom(captured: CapturedAttention, kv_head: int, sample: int, biases: bool) -> CapturedForm:
    generic = GenericHead(captured, kv_head, samples=[sample], alone=True)
    form = None if biases else nystrom_form(captured, kv_head, sample)
    if form is not None and _agree(form, generic):
        return CapturedForm(form, "structured: Nystrom attention")
    return _generic(captured, generic, biases)


def _agree(form: AbstractForm, generic: GenericHead) -> bool:
    """Whether a form has the output of the module and, for a vector drawn at random, its product with J J^T."""
    mine, theirs = form.output().flatten(), generic.output().flatten()
    if mine.shape != theirs.shape or not _close(mine, theirs, AGREEMENT_OF_OUTPUT):
        return False
    u = torch.randn(generic.num_outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return _close(form.product(u), generic.product(u), AGREEMENT_OF_PRODUCT)


def _close(mine: Tensor, theirs: Tensor, rtol: float) -> bool:
    return bool((mine - theirs).norm() <= rtol * theirs.norm())


def _weights(site: AttentionSite, kv_head: int) -> dict[str, Any]:
    """Weights and biases by role, in float64 on the CPU."""
    found: dict[str, Any] = {}
    for role, letter in (("query", "q"), ("key", "k"), ("value", "v")):
        slot = site.by_role(role)
        bias = slot.read_bias()
        found[f"w_{letter}"] = slot.read()[kv_head].detach().cpu().double()
        found[f"b_{letter}"] = None if bias is None else bias[kv_head].detach().cpu().double()
    return found


def _channel(captured: CapturedAttention, kv_head: int, samples: Sequence[int], biases: bool) -> CapturedForm | None:
    site, x = captured.site, captured.x
    if site.kind not in ("cross_covariance", "channel") or x is None or len(samples) > 1 or samples[0] >= len(x):
        return None
    module: Any = site.module
    temperature = getattr(module, "temperature", None)
    scale = site.scale
    if isinstance(temperature, Tensor):
        scale = float(temperature.detach().flatten()[kv_head])
    elif scale is None:  # DaViT's second version scales by the number of tokens
        scale = x.shape[1] ** -0.5
    form = ChannelHead(
        x[samples[0]].cpu().double(), scale=scale, normalise=site.kind == "cross_covariance", biases=biases,
        names=(site.roles["query"], site.roles["key"], site.roles["value"]), **_weights(site, kv_head),
    )  # fmt: skip
    return CapturedForm(form, f"structured: {site.kind.replace('_', '-')} attention")


def _row_wise(captured: CapturedAttention, generic: GenericHead, biases: bool) -> CapturedForm | None:
    site = captured.site
    if site.kind != "softmax":
        return None
    try:
        form = trace_form(generic, biases=biases)
    except (NotTracedError, WellcondError, RuntimeError, ValueError, IndexError):  # the graph may be of any shape
        return None
    said = ["rotary"] if site.rotary else []
    said += [f"{site.qk_norm} norm on queries and keys"] if site.qk_norm else []
    said += site.modifiers
    return CapturedForm(form, f"structured: {', '.join(said) or 'row-wise softmax'}")
