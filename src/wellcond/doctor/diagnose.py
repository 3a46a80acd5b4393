"""The verb `diagnose`: what one forward pass shows of every attention layer, and where numbers are not finite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.arguments import check_batch, check_flag
from wellcond.attention.checks import Chosen, choose_sites
from wellcond.attention.evaluation import run_facts
from wellcond.attention.find import check_readable, find_attention, scan_attention
from wellcond.attention.kernels import ADDED_FLOOR, is_masked, map_statistics
from wellcond.attention.record import (
    Field,
    ForwardRecord,
    SiteRecord,
    by_head,
    kappa_of_tokens,
    record,
    root_mean_square,
)
from wellcond.attention.sharding import full_tensor, to_local, unwrap
from wellcond.attention.site import AttentionSite, Block
from wellcond.attention.slot import conditioning_of
from wellcond.conditioning.methods import own_logit_gap, per_projection
from wellcond.doctor.records import MOST_TOKENS, THRESHOLDS, Diagnosis, LayerFacts, NotFinite, TokenFacts, defined
from wellcond.doctor.rules import judge
from wellcond.doctor.weights import NO_BATCH, spectral_facts
from wellcond.errors import DiagnosisError
from wellcond.init.tokens import embedding_layers, embedding_spread, position_tables
from wellcond.linalg.circuits import head_cosines
from wellcond.measurement.measure import measure

FIELDS: tuple[Field, ...] = ("tokens", "logits", "probabilities", "spread", "output", "stream")
MOST_SAMPLES = 2
"""Of which the condition number of the tokens is computed; it costs the cube of their number."""


def diagnose(
    model: nn.Module,
    batch: Any = None,
    *,
    sites: Chosen | None = None,
    trained: bool | None = None,
    jacobian: bool = False,
) -> Diagnosis:
    """What is wrong with a model's attention, the line of code that fixes it, and what our records say about that line.

    For an untrained model that line is the recommended initialisation, `init_(model, "calibrated", batch=batch)`.

    The model runs once on the batch, in evaluation mode and without gradients, and is left as it was. This takes
    seconds. Without a batch the diagnosis is of the weights alone: spectra, effective rank, SEC index, scales, dead and
    duplicate heads.

    Args:
        model: any model that `find_attention` understands, before training, in training or after it.
        batch: what the model is called with: a tensor, a mapping of keyword arguments, a tuple of arguments, or a
            function that calls the model; None for the weights alone. A few samples of the training set suffice; noise
            hides what blank patches and repeated words show.
        sites: only these, from `find_attention(model)`, or a pattern of paths such as ``"blocks.*"``; all by default.
        trained: whether the model is trained, so that rules for untrained models do not apply, nor advice that
            overwrites weights. By default its norms show it; where they cannot (norms without parameters), the
            diagnosis says so and is that of a trained model.
        jacobian: also measure the condition number of every head's parameter Jacobian (`measure`): minutes.

    Returns: findings in order of weight, none where there is nothing to fix, and the numbers of every layer. What the
        forward pass did not show (a kernel that computes its softmax inside, a layer that the batch does not reach) is
        a finding of its own.

    Raises:
        AttentionNotFoundError, UnsupportedLayoutError: no attention of the model is understood.
        DiagnosisError: a model on the meta device.

    Example:
        >>> import torch
        >>> layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        >>> diagnose(layer, torch.randn(2, 8, 32))
        Diagnosis(1 attention layer, nothing to fix)
    """
    inner = unwrap(model)
    if batch is not None:
        check_batch(batch)
    check_flag("jacobian", jacobian)
    if jacobian and batch is None:
        raise ValueError("jacobian: expected a batch, of which the Jacobians are; give batch=...")
    if trained is not None:
        check_flag("trained", trained)
    if any(parameter.is_meta for parameter in inner.parameters()):
        raise DiagnosisError("expected a model with values, found one on the meta device; materialise it first")
    refusals: tuple[str, ...] = ()
    if sites is None:
        scan = scan_attention(inner)
        # find_attention raises what is wrong with the others
        chosen: list[AttentionSite] = scan.sites or find_attention(inner, strict=False)
        refusals = tuple(str(refusal) for refusal in scan.refusals)
    else:
        chosen = choose_sites(inner, sites)
    check_readable(chosen)
    if batch is None:
        layers, tokens, not_finite = examine_weights(inner, chosen)
    else:
        layers, tokens, not_finite = examine(inner, batch, chosen)
    if jacobian:
        report = measure(inner, batch, sites=chosen, kappa="pseudo")
        worst = {one.name: max((head.mean_kappa() for head in one.heads), default=math.nan) for one in report.layers}
        layers = tuple(dataclasses.replace(layer, kappa_jacobian=worst.get(layer.name)) for layer in layers)
    found = Diagnosis(
        findings=(),
        layers=layers,
        tokens=tokens,
        fresh=is_fresh(inner) if trained is None else not trained,
        not_finite=not_finite,
        conditioning=conditioning_of(inner),
        not_understood=refusals,
        run=run_facts(inner, batch),
    )
    return dataclasses.replace(found, findings=judge(found, whole=sites is None))


def examine(
    model: nn.Module, batch: Any, sites: Sequence[AttentionSite]
) -> tuple[tuple[LayerFacts, ...], TokenFacts, NotFinite | None]:
    """Run the model once, in evaluation mode and without gradients; describe every attention layer and the tokens."""
    seen: dict[str, dict[str, Any]] = {}

    def keep(one: SiteRecord) -> None:
        spread = None if one.spread is None else defined(float(one.spread.mean()))
        seen[one.site.name] = {"logit_spread": spread} | _of_tokens(one) | _of_map(one)

    layers, watch = embedding_layers(model), FiniteWatch()
    names = [name for name, _ in layers]
    found = record(model, batch, sites, FIELDS, each=keep, outputs=names, modules=watch)
    correction = conditioning_of(model)
    facts = []
    for one in found.sites:
        site = one.site
        fields = _of_weights(site) | seen.get(site.name, {}) | _shares(site, one.block)
        if len(fields.get("collapsed_heads", ())) == site.num_heads:
            fields["logit_spread"] = None  # all keys but one look as if they were masked
        fields |= _not_seen(one, seen.get(site.name))
        fields["saturation"] = _saturation(site, correction, fields.get("num_tokens"))
        facts.append(_facts(site, fields))
    return tuple(facts), _of_embeddings(model, layers, found, sites), _find_not_finite(model, watch)


def examine_weights(
    model: nn.Module, sites: Sequence[AttentionSite]
) -> tuple[tuple[LayerFacts, ...], TokenFacts, NotFinite | None]:
    """Describe every attention layer by its weights alone; nothing runs."""
    weights = _in_weights(model)
    facts = [_facts(site, {"not_seen": (NO_BATCH,)} | _of_weights(site) | spectral_facts(site)) for site in sites]
    return tuple(facts), TokenFacts(), NotFinite(weights=weights) if weights else None


def _facts(site: AttentionSite, fields: Mapping[str, Any]) -> LayerFacts:
    return LayerFacts(
        name=site.name,
        kind=site.kind,
        num_heads=site.num_heads,
        num_kv_heads=site.num_kv_heads,
        head_dim=site.head_dim,
        width=site.in_features,
        qk_norm=site.qk_norm is not None or site.kind == "cross_covariance",
        **fields,
    )


def is_fresh(model: nn.Module) -> bool | None:
    """Whether no norm was trained: all entries of its gain are equal, and those of its bias.

    None where norms do not show it: none has parameters (OLMo 1, nanochat), or they could not have changed, because
    they are frozen, or gains of 16 bits, near which small updates round to nothing.
    """
    known = None
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            for parameter in module.parameters(recurse=False):
                values = full_tensor(parameter).detach().flatten()
                if values.numel() < 2:
                    continue
                if not bool((values == values[0]).all()):
                    return False
                coarse = values.dtype in (torch.float16, torch.bfloat16) and float(values[0]) != 0.0
                if parameter.requires_grad and not coarse:
                    known = True
    return known


def _not_seen(one: SiteRecord, seen: dict[str, Any] | None) -> dict[str, Any]:
    """What the pass did not show of a layer, and why."""
    if not one.called:
        return {"called": False, "not_seen": ("not called on this batch",)}
    if one.why_logits_hidden:
        return {"not_seen": (f"logits and attention map: {one.why_logits_hidden}",), "logits_hidden": True}
    if seen is None:
        return {"not_seen": (f"logits and attention map: {one.not_seen['logits']}",)}
    if one.site.kind == "softmax" and "collapsed_heads" not in seen:
        return {"not_seen": ("dead heads: the heads of its attention map could not be separated",)}
    return {}


# Tokens


def _of_tokens(one: SiteRecord) -> dict[str, Any]:
    tokens = one.inputs.get("query", one.argument)
    if tokens is None:
        return {}
    finite = bool(torch.isfinite(tokens).all()) and (one.output is None or bool(torch.isfinite(one.output).all()))
    rows = one.samples()
    if rows is None:
        return {"finite": finite}
    kappas = [kappa_of_tokens(sample) for sample in rows[:MOST_SAMPLES, :MOST_TOKENS]] if finite else []
    known = [math.log(kappa) for kappa in kappas if math.isfinite(kappa)]
    kappa = math.exp(sum(known) / len(known)) if known else None
    return {"finite": finite, "num_tokens": rows.shape[1], "kappa_tokens": kappa}


def _of_embeddings(
    model: nn.Module, layers: list[tuple[str, nn.Module]], found: ForwardRecord, sites: Sequence[AttentionSite]
) -> TokenFacts:
    spreads = [embedding_spread(found.outputs[name], layer) for name, layer in layers if name in found.outputs]
    if not spreads:
        return TokenFacts()
    spread = math.sqrt(math.fsum(one * one for one in spreads))
    tables = dict(position_tables(model, sites))
    size = math.sqrt(math.fsum(root_mean_square(full_tensor(table)) ** 2 for table in tables.values()))
    first = layers[0][1]
    return TokenFacts(
        kind="words" if isinstance(first, nn.Embedding) else "patches",
        embeddings=tuple(name for name, _ in layers),
        spread=spread,
        length=spread * math.sqrt(first.embedding_dim) if isinstance(first, nn.Embedding) else None,
        positions=tuple(tables),
        position_ratio=size / spread if tables and spread > 0 else None,
    )


# Attention maps


def _of_map(one: SiteRecord) -> dict[str, Any]:
    """Of the first softmax, where that is one over tokens."""
    site, seen, probabilities = one.site, one.logits, one.probabilities
    if site.kind != "softmax" or seen is None or probabilities is None:
        return {}
    logits, p = by_head(seen.float(), site.num_heads), by_head(probabilities.float(), site.num_heads)
    hidden = is_masked(seen, one.mask, depth=math.inf, floor=ADDED_FLOOR)
    visible = by_head(~hidden, site.num_heads)
    if logits is None or p is None or visible is None:
        return {}
    count = visible.sum(-1)
    several = count > 1
    square = p.shape[-1] == p.shape[-2] and not site.cross
    own = p.diagonal(dim1=-2, dim2=-1) if square else None
    statistics = map_statistics(p, count.to(p), own)
    largest = torch.where(count > 0, logits.amax(-1), 0.0).abs().amax()
    above = p.triu(1).amax() if square and p.shape[-1] > 1 else torch.tensor(math.nan)
    return {
        "largest_logit": float(largest),
        "entropy": defined(statistics.normalised_entropy),
        "diagonal_mass": defined(statistics.diagonal_mass),
        "causal": bool(above == 0) if square and p.shape[-1] > 1 else None,
        "collapsed_heads": _collapsed(p, several),
    }


def _collapsed(p: Tensor, several: Tensor) -> tuple[int, ...]:
    counted = several.sum((0, 2))
    mass = (p.amax(-1) * several).sum((0, 2)) / counted.clamp_min(1)
    return tuple(((mass >= THRESHOLDS["dead-heads"]) & (counted > 0)).nonzero().flatten().tolist())


# Weights


def _of_weights(site: AttentionSite) -> dict[str, Any]:
    with torch.no_grad():
        heads = {role: slot.read().detach().float().cpu() for role, slot in site.slots.items()}
    q, k, v = (heads[site.roles[role]] for role in ("query", "key", "value"))
    fields: dict[str, Any] = {}
    for role, weights in heads.items():
        slot = site.slots[role]
        fan_in = slot.rows.numel() if slot.heads_on_input else slot.in_features
        fields[f"scale_{role}"] = root_mean_square(weights) * math.sqrt(fan_in)
    return fields | {
        "causal": site.causal,
        "zero_heads": _zero(q, k, v, heads.get("o")),
        "duplicate_heads": _duplicates(q, k, v),
        "shared_values": _share_values(v),
    }


def _zero(q: Tensor, k: Tensor, v: Tensor, o: Tensor | None) -> tuple[int, ...]:
    """Query heads of which both factors of a product are zero."""
    group_k, group_v = q.shape[0] // k.shape[0], q.shape[0] // v.shape[0]
    no_q, no_k, no_v = (~heads.flatten(1).any(1) for heads in (q, k, v))
    zero = no_q & no_k.repeat_interleave(group_k)
    if o is not None and o.shape[0] == q.shape[0]:
        zero |= no_v.repeat_interleave(group_v) & ~o.flatten(1).any(1)
    return tuple(zero.nonzero().flatten().tolist())


def _duplicates(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[int, int], ...]:
    """Pairs with the same W_Q^T W_K, whatever its factors, and the same W_V: compared on random vectors."""
    cosines = head_cosines(q, k, v)
    alike = torch.zeros(len(q), len(q)) if cosines is None else cosines.triu(1)
    first, second = (alike > THRESHOLDS["duplicate-heads"]).nonzero(as_tuple=True)
    return tuple(zip(first.tolist(), second.tolist(), strict=True))


def _share_values(v: Tensor) -> bool:
    """Whether the rows of all heads lie in the span of those of the first."""
    heads, rows, columns = v.shape
    if heads < 2 or rows >= columns or not bool(v.flatten(1).any(1).all()):
        return False
    basis = torch.linalg.qr(v[0].mT).Q  # (columns, rows)
    outside = (v - (v @ basis) @ basis.mT).flatten(1).norm(dim=1) / v.flatten(1).norm(dim=1)
    return float(outside.max()) <= THRESHOLDS["shared-values"]


# Blocks and corrections


def _shares(site: AttentionSite, block: Block | None) -> dict[str, Any]:
    if block is None:
        return {}
    fields: dict[str, Any] = {"scales_itself": block.scales_itself}
    if block.stream is not None and bool(block.stream):
        stream, added = float(block.stream), block.attention.get(site.name)
        fields["attention_share"] = None if added is None else defined(float(added) / stream)
        fields["mlp_share"] = None if block.mlp_added is None else defined(float(block.mlp_added) / stream)
    return fields


def _saturation(site: AttentionSite, correction: dict[str, Any] | None, num_tokens: int | None) -> float | None:
    """How far lam I on Q and K raises a token's own logit, relative to ln N + 5."""
    if correction is None or correction.get("method") != "identity" or num_tokens is None:
        return None
    if not (site.q.is_corrected and site.k.is_corrected):
        return None
    gap = own_logit_gap(site, per_projection(correction["lam"]))
    return None if gap is None else defined(gap / (math.log(num_tokens) + 5))


# Numbers that are not finite


class FiniteWatch:
    """The first places of a forward pass where numbers are not finite; empty text where all are.

    It is the `modules` of `wellcond.attention.record.record`.
    Minus infinity does not count: masks hold it, and where it is no mask, NaN follows.
    """

    batch = ""
    activations = ""

    def entered(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Look at what a module is called with."""
        if self.activations:
            return
        found = _first_bad({"argument": args, **kwargs})
        if name:
            self.activations = found and f"what reaches {name} ({type(module).__name__}) has {found}"
        else:
            self.batch = self.batch or found

    def left(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        """Look at what a module puts out."""
        if not self.activations:
            found = _first_bad({"output": output})
            self.activations = found and f"{name or 'the model'} ({type(module).__name__}) puts out {found}"


def _find_not_finite(model: nn.Module, watch: FiniteWatch) -> NotFinite | None:
    """What is not finite, by cause; None if nothing is, or nothing but arguments that the model makes no use of."""
    found = NotFinite(batch=watch.batch, weights=_in_weights(model), activations=watch.activations)
    return found if found.weights or found.activations else None


def _in_weights(model: nn.Module) -> str:
    """The first parameter with NaN or infinity, or buffer with NaN: buffers may be masks."""
    parameters = ((name, parameter, True) for name, parameter in model.named_parameters())
    buffers = ((name, buffer, False) for name, buffer in model.named_buffers())
    for name, tensor, is_parameter in (*parameters, *buffers):
        values = to_local(tensor.detach())
        bad = ~values.isfinite() if is_parameter else values.isnan()
        if values.is_floating_point() and bool(bad.any()):
            return _describe(values, bad, name)
    return ""


def _first_bad(values: Any) -> str:
    for path, tensor in _tensors_in(values):
        bad = tensor.isnan() | tensor.isposinf()
        if bool(bad.any()):
            return _describe(tensor, bad, path)
    return ""


def _describe(tensor: Tensor, bad: Tensor, path: str) -> str:
    at = bad.nonzero()[0].tolist()
    value = "NaN" if bool(tensor[tuple(at)].isnan()) else "infinity"
    rest = f"the first of {int(bad.sum()):,} such entries of {tensor.numel():,}"
    return f"{value} at {path}{at if at else ''}, {rest}"


def _tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of floating-point numbers in nested tuples, lists and mappings, with the way to each."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and not value.is_meta:
            yield path, to_local(value.detach())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors_in(part, f"{path}[{key!r}]" if path else str(key))
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from _tensors_in(part, f"{path}[{index}]" if path != "argument" else f"argument {index}")
