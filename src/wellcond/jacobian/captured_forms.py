"""Which form of the Jacobian fits a captured attention: structured where its mathematics is known, else generic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.site import AttentionSite
from wellcond.jacobian.capture_record import CapturedAttention
from wellcond.jacobian.channel import ChannelHead
from wellcond.jacobian.forms import Form, WideForm
from wellcond.jacobian.generic import GenericHead
from wellcond.jacobian.generic_form import GenericForm
from wellcond.jacobian.head import SoftmaxHead
from wellcond.jacobian.normalised import NormalisedHead, mapped_head
from wellcond.jacobian.nystrom_capture import nystrom_form
from wellcond.jacobian.token_maps import MapRows, layer_norm, rms_norm


@dataclass(frozen=True)
class CapturedForm:
    """A form of one head on one sample, the plain head behind it if there is one, and how it was chosen."""

    form: Form
    head: SoftmaxHead | None
    how: str


def captured_form(captured: CapturedAttention, kv_head: int, *, sample: int = 0, biases: bool = False) -> CapturedForm:
    """The form of one key/value head of a captured attention on one sample.

    A structured form that is not plain (channel attention, QK-norm) is believed only if it reproduces what the module's
    own copy puts out; otherwise, and for everything else, the derivatives go through the module itself. A generic form
    covers all samples of the captured call at once; only Nystrom attention is run on each sample by itself.
    """
    if captured.is_plain:
        head = captured.head(kv_head, sample)
        return CapturedForm(WideForm(head, biases), head, "structured: plain softmax")
    if captured.site.kind == "nystrom":
        return _nystrom(captured, kv_head, sample, biases)
    generic = GenericHead(captured, kv_head)
    structured = _channel(captured, kv_head, biases) or _normalised(captured, kv_head, biases)
    if structured is not None and _agree(structured.form, generic):
        return structured
    return CapturedForm(GenericForm(generic), None, f"generic derivatives: {captured.why_not_plain}")


def _nystrom(captured: CapturedAttention, kv_head: int, sample: int, biases: bool) -> CapturedForm:
    alone = captured.num_samples > 1
    generic = GenericHead(captured, kv_head, sample=sample if alone else None)
    form = None if biases else nystrom_form(captured, kv_head, sample, generic)
    if form is not None:
        return CapturedForm(form, None, "structured: Nystrom attention")
    return CapturedForm(GenericForm(generic), None, f"generic derivatives: {captured.why_not_plain}")


def _agree(form: Any, generic: GenericHead) -> bool:
    mine, theirs = form.output().flatten(), generic.output().flatten()
    return mine.shape == theirs.shape and bool((mine - theirs).norm() <= 1e-9 * theirs.norm())


def _weights(site: AttentionSite, kv_head: int) -> dict[str, Any]:
    """Weights and biases by role, in float64 on the CPU."""
    found: dict[str, Any] = {}
    for role, letter in (("query", "q"), ("key", "k"), ("value", "v")):
        slot = site.by_role(role)
        bias = slot.read_bias()
        found[f"w_{letter}"] = slot.read()[kv_head].detach().double().cpu()
        found[f"b_{letter}"] = None if bias is None else bias[kv_head].detach().double().cpu()
    return found


def _channel(captured: CapturedAttention, kv_head: int, biases: bool) -> CapturedForm | None:
    site, x = captured.site, captured.x
    if site.kind not in ("cross_covariance", "channel") or x is None or len(x) != 1:
        return None
    module: Any = site.module
    temperature = getattr(module, "temperature", None)
    scale = site.scale
    if isinstance(temperature, Tensor):
        scale = float(temperature.detach().flatten()[kv_head])
    elif scale is None:  # DaViT's second version scales by the number of tokens
        scale = x.shape[1] ** -0.5
    form = ChannelHead(
        x[0].double().cpu(), scale=scale, normalise=site.kind == "cross_covariance", biases=biases,
        names=(site.roles["query"], site.roles["key"], site.roles["value"]), **_weights(site, kv_head),
    )  # fmt: skip
    return CapturedForm(form, None, f"structured: {site.kind.replace('_', '-')} attention")


def _normalised(captured: CapturedAttention, kv_head: int, biases: bool) -> CapturedForm | None:
    site, x, p = captured.site, captured.x, captured.probabilities
    if site.qk_norm not in ("layer", "rms") or site.rotary or site.scale is None or x is None or len(x) != 1:
        return None
    if site.modifiers or site.talking_heads or site.kind != "softmax" or p is None or captured.memory is not None:
        return None
    maps = [_norm_map(getattr(site.module, name, None)) for name in ("q_norm", "k_norm")]
    if maps[0] is None or maps[1] is None:
        return None
    group, w = captured.query_heads(kv_head), _weights(site, kv_head)
    queries, bias = site.by_role("query"), site.by_role("query").read_bias()
    w |= {
        "w_q": queries.read()[group].detach().double().cpu(),
        "b_q": None if bias is None else bias[group].detach().double().cpu(),
    }
    head = SoftmaxHead(x[0].double().cpu(), scale=site.scale, **w)
    if site.causal:
        n = head.num_tokens
        hidden = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)
        head = replace(head, logit_bias=hidden)
    form: NormalisedHead = mapped_head(head, maps[0], maps[1], biases=biases)
    return CapturedForm(form, None, f"structured: {site.qk_norm} norm on queries and keys")


def _norm_map(norm: Any) -> MapRows | None:
    if not isinstance(norm, nn.Module):
        return None
    weight, bias = (getattr(norm, name, None) for name in ("weight", "bias"))
    weight, bias = (None if t is None else t.detach().double().cpu() for t in (weight, bias))
    eps = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    if eps is None:
        return None
    if isinstance(norm, nn.LayerNorm):
        return lambda rows: layer_norm(rows, weight=weight, bias=bias, eps=eps)
    return lambda rows: rms_norm(rows, weight=weight, eps=eps)
