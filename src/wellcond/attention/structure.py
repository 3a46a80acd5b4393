"""Which reading of an attention layer's weights the module's own output proves (`wellcond.attention.proof`).

For a class that nobody named, several readings may be left (`wellcond.attention.readings`); the one that is proven is
believed. A single one is also taken (as evidence by structure) where the module cannot be run. What a user's adapter
declares is one reading, judged in the same way.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention import layout, trial
from wellcond.attention.kernels import FLOOR
from wellcond.attention.proof import Proof, prove
from wellcond.attention.readings import ORDERS, Reading, build_reading
from wellcond.attention.record import SiteRecord, record
from wellcond.attention.site import AttentionSite, ModuleContext
from wellcond.attention.trial import Example, Trial

RELATIVE_TOLERANCE = 1e-5  # some modules compute in float32 inside, whatever they are given

_PROOFS: dict[object, Proof] = {}
"""By class, sizes and settings of a module and by its readings: equal layers of a model are proven once."""


def _once(
    place: ModuleContext, readings: Sequence[Reading], example: Example | None, judge: Callable[[], Proof]
) -> Proof:
    key = (_signature(place.module), example, tuple(reading.text for reading in readings))
    if key not in _PROOFS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as those of kernels that are slow on a CPU
            _PROOFS[key] = judge()
    return _PROOFS[key]


def _signature(module: nn.Module) -> object:
    """What decides which reading of a module is right: classes, shapes and plain settings of all its parts."""
    parts = []
    for name, part in module.named_modules():
        shapes = tuple((key, tuple(value.shape)) for key, value in part.named_parameters(recurse=False))
        plain = (bool, int, float, str, type(None))
        settings = tuple((key, repr(value)) for key, value in vars(part).items() if isinstance(value, plain))
        parts.append((name, type(part), getattr(type(part), "forward", None), shapes, settings))
    return tuple(parts)


# A class that nobody named


def choose_reading(place: ModuleContext, readings: list[Reading]) -> list[AttentionSite]:
    """The sites of a module (one per stream) by the reading that is proven.

    Raises: UnsupportedLayoutError if none is.
    """
    proof = _once(place, readings, None, lambda: _judge_readings(place, readings))
    if proof.holds:
        return [replace(site, evidence="forward", **proof.facts) for site in readings[proof.chosen].streams]
    if len(readings) == 1 and proof.holds is None:
        return [replace(site, evidence="structure") for site in readings[0].streams]
    place.refuse(proof.reason, readings[0].adapter_to_paste(place))


def _judge_readings(place: ModuleContext, readings: list[Reading]) -> Proof:
    tried = _try_readings(place, readings, None)
    if isinstance(tried, str):
        return Proof(None, f"no reading of its weights could be proven: {tried}.")
    attempt, proofs = tried
    if proofs[-1].holds:
        proven = len(proofs) - 1
        facts = {"scale": None, **_seen_facts(attempt, readings[proven]), **proofs[-1].facts}
        if any("mask" in name for name in trial.required_names(place.module)):
            facts["causal"] = None  # the caller's mask decides
        return replace(proofs[-1], facts=facts, chosen=proven)
    # Products that the kernel shows are evidence as well, where something else breaks the symmetries: a weight that is
    # tied or used twice.
    multiplied = {number: _seen_facts(attempt, reading) for number, reading in enumerate(readings)}
    found = [number for number, facts in multiplied.items() if facts]
    if len(found) == 1:
        return Proof(True, "its forward pass multiplies these heads", facts=multiplied[found[0]], chosen=found[0])
    why = "; ".join(f"{one.text}: {proof.reason}" for one, proof in zip(readings[:3], proofs, strict=False))
    return Proof(False, f"its output contradicts every reading of its weights ({why}).")


# Trial runs


def _try_readings(
    place: ModuleContext, readings: Sequence[Reading], example: Example | None
) -> tuple[Trial, list[Proof]] | str:
    """A trial and the proofs of readings in it, of which the last holds; else those of the first trial that ran.

    Returns: a text that says why, where none ran.
    """
    why = trial.why_not(place.module)
    if why is not None:
        return why
    first: tuple[Trial, list[Proof]] | None = None
    failure: Exception | None = None
    widths = [site.in_features for site in readings[0].streams]
    for attempt in trial.trials(place, widths, example):
        if isinstance(attempt, Exception):
            failure = failure or attempt
            continue
        proofs: list[Proof] = []
        for reading in readings:
            proofs.append(_prove(attempt, reading))
            if proofs[-1].holds:
                return attempt, proofs
        first = first or (attempt, proofs)
    if first is not None:
        return first
    reason = "no arguments could be made" if failure is None else f"{type(failure).__name__}: {failure}"
    required = ", ".join(trial.required_names(place.module))
    return f"its forward pass could not be tried: it needs the arguments {required} ({reason})"


def _prove(attempt: Trial, reading: Reading) -> Proof:
    try:
        with trial.healthy([site.on(attempt.module) for site in reading.streams]) as streams:
            return prove(streams, attempt.run, local=attempt.local)
    except Exception as error:  # a module may raise anything with other weights
        return Proof(False, f"it could not be run ({type(error).__name__}: {error})")


# What the kernel's products and softmax show, where they can be seen


@torch.no_grad()
def _seen_facts(attempt: Trial, reading: Reading) -> dict[str, Any]:
    """Scale, causality, position bias and rotation, if the products are softmax attention on the reading's heads."""
    with contextlib.suppress(Exception), trial.healthy([one.on(attempt.module) for one in reading.streams]) as streams:
        site = streams[0]
        [seen] = record(attempt.module, lambda _: attempt.run(), [site], ("tokens", "products", "logits")).sites
        tokens = seen.inputs.get("query", attempt.tokens)
        return _compare_products(seen, *(_expected_heads(site, role, tokens.flatten(0, -2)) for role in "qkv"))
    return {}


def _expected_heads(site: AttentionSite, role: str, x_ND: Tensor) -> Tensor:
    """Every head by the site's own account, (heads, tokens, head_dim); of keys and values repeated per group."""
    slot = site.slots[role]
    heads = torch.einsum("nc,hdc->hnd", x_ND, slot.read())
    bias = slot.read_bias()
    if bias is not None:
        heads = heads + bias[:, None, :]
    return heads.repeat_interleave(site.num_heads // slot.num_heads, dim=0)


def _compare_products(seen: SiteRecord, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    for left, right in seen.products:
        found_q, found_k = _match(left, q), _match(right.mT, k)
        if found_q is None or found_k is None:
            continue
        for weights, values in seen.products:
            if proportional(values, v) is None:
                continue
            for logits, p in seen.softmaxes:
                if p.numel() == weights.numel() and torch.equal(p.reshape_as(weights), weights):
                    facts = _logit_facts(logits.reshape_as(weights), weights, left @ right)
                    if facts["scale"] is not None:
                        facts["scale"] = float(f"{facts['scale'] * found_q[0] * found_k[0]:.7g}")
                    facts["rotary"] = found_q[1] or found_k[1]
                    return facts
    return {}


def _match(found: Tensor, expected: Tensor) -> tuple[float, bool] | None:
    """(factor, rotated) if `found` is the expected heads, exactly or up to a rotation of each token (rotary)."""
    factor = proportional(found, expected)
    if factor is not None or found.shape != expected.shape:
        return None if factor is None else (factor, False)
    # A rotary embedding keeps the length of every token of every head.
    factor = proportional(found.norm(dim=-1), expected.norm(dim=-1))
    return None if factor is None else (factor, True)


def proportional(found: Tensor, expected: Tensor) -> float | None:
    """The factor c with found = c * expected, or None."""
    if found.shape != expected.shape:
        return None
    factor = float((found * expected).sum() / (expected * expected).sum())
    off = float((found - factor * expected).norm())
    return factor if factor != 0 and off <= RELATIVE_TOLERANCE * float(found.norm()) else None


def _logit_facts(logits: Tensor, p: Tensor, products: Tensor) -> dict[str, Any]:
    """Causality, scale and position bias of a softmax's logits, beside the products that they are made of."""
    above = torch.ones_like(p[0]).triu(1).bool()
    causal = bool((p[:, above] < 1e-12).all())
    seen = (p > 0) & torch.isfinite(logits) & (logits > FLOOR)
    factor = proportional(logits[seen], products[seen])
    # A bias on the logits leaves no common factor: the scale is then not measurable this way.
    return {"causal": causal, "scale": factor, "relative_position_bias": factor is None}


# What a user's adapter declares


def judge_declared(place: ModuleContext, site: AttentionSite, example: Example | None = None) -> Proof:
    """Ask a module whether what an adapter declares of it is right; once for each class, configuration, declaration."""
    declared = Reading([site], _declaration(site))
    return _once(place, [declared], example, lambda: _judge_declared(place, declared, example))


def _declaration(site: AttentionSite) -> str:
    paths = {id(part): name for name, part in site.module.named_modules()}
    slots = []
    for role, slot in site.slots.items():
        stored = (slot.weight_name, slot.transposed, slot.index, slot.by_head, slot.view, slot.bias_name)
        slots.append((role, paths.get(id(slot.owner)), stored, slot.rows.tolist()))
    stated = (site.kind, site.scale, site.causal, site.rotary, site.qk_norm, site.modifiers, site.talking_heads)
    return repr((slots, stated, sorted(site.roles.items())))


def _judge_declared(place: ModuleContext, declared: Reading, example: Example | None) -> Proof:
    [site] = declared.streams
    if site.kind != "softmax":
        return Proof(None, f"its kind is {site.kind}, whose symmetries are others")
    if not {site.q.owner, site.k.owner, site.v.owner} <= set(site.module.modules()):
        return Proof(None, "its projections are no part of the module")
    tried = _try_readings(place, [declared], example)
    if isinstance(tried, str):
        return Proof(None, tried)
    attempt, [proof] = tried
    if proof.holds:
        return _compare_facts(site, proof, _seen_facts(attempt, declared))
    text = f"its own output contradicts what the adapter declares: {proof.reason}."
    for other in _alternatives(place, site):
        if _prove(attempt, other).holds:
            return Proof(False, f"{text}\n  Its forward pass confirms {other.text}.")
    return Proof(False, text)


def _compare_facts(site: AttentionSite, proof: Proof, seen: dict[str, Any]) -> Proof:
    """Facts that the trial shows and the adapter left open; a scale that it shows to be another one refutes it."""
    owned = {id(tensor) for slot in site.slots.values() for tensor in (slot.parameter, slot.stored_bias())}
    learned = any(id(parameter) not in owned for parameter in site.module.parameters())
    scale = None if learned or site.modifiers else seen.get("scale")
    if scale is not None and site.scale is not None and abs(scale - site.scale) > 1e-4 * abs(scale):
        return Proof(False, f"scale is declared as {site.scale:.7g}, and its logits are {scale:.7g} q.k")
    facts = {"scale": scale} if site.scale is None and scale is not None else {}
    if site.causal is False and proof.facts.get("causal"):
        facts["causal"] = True
    if site.qk_norm is None and proof.facts.get("rotary"):
        facts["rotary"] = True
    if seen.get("relative_position_bias") and not site.modifiers and site.causal is not None:
        facts["relative_position_bias"] = True
    return replace(proof, facts=facts)


def _alternatives(place: ModuleContext, site: AttentionSite) -> Iterator[Reading]:
    """Other readings of the projections that were declared."""
    for letter, slot in site.slots.items():
        if slot.in_features == slot.out_features and not slot.by_head:
            turned: dict[str, Any] = {letter: replace(slot, transposed=not slot.transposed)}
            yield Reading([replace(site, **turned)], f"transposed={not slot.transposed} for {letter}")
    paths = {id(part): name for name, part in site.module.named_modules()}
    owners = list(dict.fromkeys(paths[id(slot.owner)] for slot in (site.q, site.k, site.v)))
    if not all(layout.is_projection(site.module.get_submodule(path)) for path in owners):
        return
    output = None if site.o is None else paths.get(id(site.o.owner))
    rows = layout.out_features(site.module.get_submodule(owners[0])) // (3 if len(owners) == 1 else 1)
    counts = [{"num_heads": site.num_heads, "num_kv_heads": site.num_kv_heads}]
    counts += [{"num_heads": number} for number in range(1, rows) if rows % number == 0]
    for order in itertools.permutations(owners):
        for count, (letters, arrangement) in itertools.product(counts, ORDERS[len(owners)]):
            with contextlib.suppress(ValueError, TypeError):  # rows that these heads do not divide
                yield build_reading(place, dict(zip(letters, order, strict=True)), count, arrangement, output)
