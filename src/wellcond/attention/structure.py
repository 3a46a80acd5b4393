"""Which reading of an attention layer's weights the module's own output proves (`wellcond.attention.proof`).

For a class that nobody named, a fused weight, a stack of matrices or projections without a head count leave several
readings (`wellcond.attention.readings`); the one that is proven is believed. Separate projections and a head count
leave a single one, which is also taken (as evidence by structure) where the module cannot be run.

What a user's adapter declares is one reading, judged in the same way. A declaration that the output contradicts is
refuted, with the call of a builder that the output confirms where there is one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellcond.attention import layout, trial
from wellcond.attention.products import ProductRecorder, expected_heads, facts_of
from wellcond.attention.proof import Proof, prove
from wellcond.attention.readings import BUILDERS, Reading, build_reading, list_readings
from wellcond.attention.site import AttentionSite, ModuleContext
from wellcond.attention.trial import Example, Trial
from wellcond.errors import UnsupportedLayoutError


@dataclass(frozen=True)
class Verdict:
    """What trial runs of a module showed about readings of its weights."""

    holds: bool | None
    """None where the module could not be run."""
    reason: str
    facts: dict[str, Any] = field(default_factory=dict)
    chosen: int = 0
    """Number of the reading that is proven."""


_VERDICTS: dict[object, Verdict] = {}
"""By class, sizes and settings of a module and by its readings: equal layers of a model are proven once."""


def _once(
    place: ModuleContext, readings: Sequence[Reading], example: Example | None, judge: Callable[[], Verdict]
) -> Verdict:
    key = (_signature(place.module), example, tuple(reading.text for reading in readings))
    if key not in _VERDICTS:
        with trial.quiet():
            _VERDICTS[key] = judge()
    return _VERDICTS[key]


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


def describe_by_structure(place: ModuleContext) -> list[AttentionSite]:
    """The sites of a module (one per stream) of which one reading is proven; none if it is no attention.

    Raises: UnsupportedLayoutError if it looks like an attention and no reading is proven.
    """
    readings = list_readings(place)
    if not readings:
        return []
    verdict = _once(place, readings, None, lambda: _judge_readings(place, readings))
    if verdict.holds:
        return [replace(site, evidence="forward", **verdict.facts) for site in readings[verdict.chosen].streams]
    if len(readings) == 1 and verdict.holds is None:
        return [replace(site, evidence="structure") for site in readings[0].streams]
    advice = readings[0].adapter_to_paste(place)
    raise UnsupportedLayoutError(place.name, verdict.reason, class_name=place.class_name, advice=advice)


def _judge_readings(place: ModuleContext, readings: list[Reading]) -> Verdict:
    tried = trial.why_not(place.module) or _try_readings(place, readings, None)
    if isinstance(tried, str):
        return Verdict(None, f"no reading of its weights could be proven: {tried}.")
    if tried.proven is not None:
        facts = {"scale": None, **_seen_facts(tried.trial, readings[tried.proven]), **tried.proofs[-1].facts}
        if any("mask" in name for name in trial.required_names(place.module)):
            facts["causal"] = None  # the caller's mask decides
        return Verdict(True, tried.proofs[-1].reason, facts, tried.proven)
    # Products that the kernel shows are evidence as well, where something else breaks the symmetries: a weight that is
    # tied or used twice.
    multiplied = {number: _seen_facts(tried.trial, reading) for number, reading in enumerate(readings)}
    found = [number for number, facts in multiplied.items() if facts]
    if len(found) == 1:
        return Verdict(True, "its forward pass multiplies these heads", multiplied[found[0]], found[0])
    why = "; ".join(f"{one.text}: {proof.reason}" for one, proof in zip(readings[:3], tried.proofs, strict=False))
    return Verdict(False, f"its output contradicts every reading of its weights ({why}).")


# Trial runs


@dataclass(frozen=True)
class _Tried:
    """A trial and the proofs of readings in it, up to the first that holds."""

    trial: Trial
    proofs: list[Proof]

    @property
    def proven(self) -> int | None:
        """Number of the reading that is proven."""
        return len(self.proofs) - 1 if self.proofs[-1].holds else None


def _try_readings(place: ModuleContext, readings: Sequence[Reading], example: Example | None) -> _Tried | str:
    """The trial in which a reading is proven, else the first that ran; a text that says why, where none did."""
    first: _Tried | None = None
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
                return _Tried(attempt, proofs)
        first = first or _Tried(attempt, proofs)
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


def _seen_facts(attempt: Trial, reading: Reading) -> dict[str, Any]:
    """Scale, position bias and rotary positions, where the kernel's products and softmax can be seen."""
    with contextlib.suppress(Exception), trial.healthy([one.on(attempt.module) for one in reading.streams]) as streams:
        site = streams[0]
        read = [attempt.tokens]

        def keep(_: nn.Module, args: Any) -> None:
            read[0] = args[0].detach().reshape(-1, args[0].shape[-1])

        owner = site.q.owner
        handle = None if owner is site.module else owner.register_forward_pre_hook(keep)
        recorder = ProductRecorder()
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), contextlib.suppress(Exception), recorder:
            attempt.run()
        if handle is not None:
            handle.remove()
        if read[0].shape[-1] == site.in_features:
            with torch.no_grad():
                return facts_of(recorder, expected_heads(site, read[0]))
    return {}


# What a user's adapter declares


def judge_declared(place: ModuleContext, site: AttentionSite, example: Example | None = None) -> Verdict:
    """Ask a module whether what an adapter declares of it is right; once for each class, configuration, declaration.

    Args:
        place: the module and where it stands in its model.
        site: what the adapter declares.
        example: from the module to what it is called with (a tensor, a tuple of arguments, a mapping of keyword
            arguments); random tokens, and guesses of other arguments, if None.
    """
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


def _judge_declared(place: ModuleContext, declared: Reading, example: Example | None) -> Verdict:
    [site] = declared.streams
    if site.kind != "softmax":
        return Verdict(None, f"its kind is {site.kind}, whose symmetries are others")
    if not {site.q.owner, site.k.owner, site.v.owner} <= set(site.module.modules()):
        return Verdict(None, "its projections are no part of the module")
    tried = trial.why_not(site.module) or _try_readings(place, [declared], example)
    if isinstance(tried, str):
        return Verdict(None, tried)
    if tried.proven is not None:
        return _compare_facts(site, tried.proofs[0], _seen_facts(tried.trial, declared))
    text = f"its own output contradicts what the adapter declares: {tried.proofs[0].reason}."
    for other in _alternatives(place, site):
        if _prove(tried.trial, other).holds:
            return Verdict(False, f"{text}\n  Its forward pass confirms {other.text}.")
    return Verdict(False, text)


def _compare_facts(site: AttentionSite, proof: Proof, seen: dict[str, Any]) -> Verdict:
    """Facts that the trial shows and the adapter left open; a scale that it shows to be another one refutes it."""
    owned = {id(tensor) for slot in site.slots.values() for tensor in (slot.parameter, slot.stored_bias())}
    learned = any(id(parameter) not in owned for parameter in site.module.parameters())
    scale = None if learned or site.modifiers else seen.get("scale")
    if scale is not None and site.scale is not None and abs(scale - site.scale) > 1e-4 * abs(scale):
        return Verdict(False, f"scale is declared as {site.scale:.7g}, and its logits are {scale:.7g} q.k")
    facts = {"scale": scale} if site.scale is None and scale is not None else {}
    if site.causal is False and proof.facts.get("causal"):
        facts["causal"] = True
    if site.qk_norm is None and proof.facts.get("rotary"):
        facts["rotary"] = True
    if seen.get("relative_position_bias") and not site.modifiers and site.causal is not None:
        facts["relative_position_bias"] = True
    return Verdict(True, proof.reason, facts)


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
        for count, options in itertools.product(counts, BUILDERS[len(owners)][1]):
            with contextlib.suppress(ValueError, TypeError):  # rows that these heads do not divide
                yield build_reading(place, order, count, options, output)
