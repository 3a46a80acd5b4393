"""What a user's adapter declares, proven against the module's own output (`wellcond.attention.proof`).

A declaration that the output contradicts is refuted, with the reading that it confirms where one of the builders
expresses it. Where the module cannot be run, nothing is proven and the reason is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from wellcond.attention import layout, trial
from wellcond.attention.proof import Proof, prove
from wellcond.attention.site import AttentionSite, Place, Slot
from wellcond.attention.structure import seen_facts, signature

Example = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Judgement:
    """Whether a declared layout is right; `holds` is None where that could not be tried."""

    holds: bool | None
    reason: str
    facts: dict[str, Any] = field(default_factory=dict)


_JUDGED: dict[object, Judgement] = {}
"""By class, sizes, settings and declaration: equal layers are proven once."""


def prove_declared(place: Place, site: AttentionSite, example: Example | None = None) -> Judgement:
    """Ask a module whether what an adapter declares of it is right; once for each class, configuration, declaration.

    Args:
        place: the module and where it stands in its model.
        site: what the adapter declares.
        example: from the module to what it is called with (a tensor, a tuple of arguments, a mapping of keyword
            arguments); random tokens, and guesses of other arguments, if None.
    """
    key = (example, signature(site.module), _declaration(site))
    if key not in _JUDGED:
        with trial.quiet():
            _JUDGED[key] = _judge(place, site, example)
    return _JUDGED[key]


def _declaration(site: AttentionSite) -> tuple[Any, ...]:
    names = {id(part): name for name, part in site.module.named_modules()}
    slots = tuple(
        (role, names.get(id(slot.owner)), slot.weight_name, slot.transposed, slot.bias_name, str(slot.rows.tolist()))
        for role, slot in site.slots.items()
    )
    stated = (site.kind, site.scale, site.causal, site.rotary, site.qk_norm, site.modifiers, site.talking_heads)
    return slots, stated, tuple(sorted(site.roles.items()))


def _judge(place: Place, site: AttentionSite, example: Example | None) -> Judgement:
    untried = trial.why_not(site.module)
    if site.kind != "softmax":
        untried = f"its kind is {site.kind}, whose symmetries are others"
    if untried is not None:
        return Judgement(None, untried)
    refuted: tuple[trial.Trial, Proof] | None = None
    failure: Exception | None = None
    attempts = trial.trials(place, [site.in_features]) if example is None else trial.example_trials(place, example)
    for attempt in attempts:
        if isinstance(attempt, Exception):
            failure = failure or attempt
            continue
        moved = _moved(site, attempt.module)
        if moved is None:
            return Judgement(None, "its projections are no part of the module")
        proof = _prove(attempt, moved)
        if proof.holds:
            return _with_facts(site, attempt, moved, proof)
        refuted = refuted or (attempt, proof)
    if refuted is None:
        return Judgement(None, f"its forward pass could not be tried ({type(failure).__name__}: {failure})")
    return Judgement(False, _say(site, *refuted))


def _prove(attempt: trial.Trial, site: AttentionSite) -> Proof:
    with trial.healthy([site]) as streams:
        return prove(streams, attempt.run, local=attempt.local)


def _moved(site: AttentionSite, copied: nn.Module) -> AttentionSite | None:
    """The same declaration of a copy of the module."""
    counterparts = dict(zip(site.module.modules(), copied.modules(), strict=True))

    def moved(slot: Slot) -> Slot:
        bias_owner = None if slot.bias_owner is None else counterparts.get(slot.bias_owner)
        return replace(slot, owner=counterparts[slot.owner], bias_owner=bias_owner)

    if any(site.slots[letter].owner not in counterparts for letter in "qkv"):
        return None
    output = moved(site.o) if site.o is not None and site.o.owner in counterparts else None
    return replace(site, module=copied, q=moved(site.q), k=moved(site.k), v=moved(site.v), o=output)


def _with_facts(site: AttentionSite, attempt: trial.Trial, moved: AttentionSite, proof: Proof) -> Judgement:
    """Facts that the trial shows and the adapter left open; a scale that it shows to be another one refutes it."""
    seen = seen_facts(attempt, [moved])
    owned = {id(slot.parameter) for slot in site.slots.values()}
    owned |= {id(slot.stored_bias()) for slot in site.slots.values()}
    learned = any(id(parameter) not in owned for parameter in site.module.parameters())
    scale = None if learned or site.modifiers else seen.get("scale")
    if scale is not None and site.scale is not None and abs(scale - site.scale) > 1e-4 * abs(scale):
        return Judgement(False, f"scale is declared as {site.scale:.7g}, and its logits are {scale:.7g} q.k")
    facts = {"scale": scale} if site.scale is None and scale is not None else {}
    if site.causal is False and proof.facts.get("causal"):
        facts["causal"] = True
    if site.qk_norm is None and proof.facts.get("rotary"):
        facts["rotary"] = True
    if seen.get("relative_position_bias") and not site.modifiers and site.causal is not None:
        facts["relative_position_bias"] = True
    return Judgement(True, proof.reason, facts)


def _say(site: AttentionSite, attempt: trial.Trial, proof: Proof) -> str:
    text = f"its own output contradicts what the adapter declares: {proof.reason}."
    for words, other in _alternatives(site, attempt.module):
        if _prove(attempt, other).holds:
            return f"{text}\n  Its forward pass confirms {words}."
    return text


def _alternatives(site: AttentionSite, copied: nn.Module) -> Iterator[tuple[str, AttentionSite]]:
    """Other readings of the projections that were declared, as arguments of a builder."""
    moved = _moved(site, copied)
    assert moved is not None
    yield from _turned(moved)
    names = {id(part): name for name, part in copied.named_modules()}
    place = Place("", copied, copied)
    owners = [moved.q.owner, moved.k.owner, moved.v.owner]
    output = None if moved.o is None else moved.o.owner
    distinct = list({id(owner): owner for owner in owners}.values())
    if len(distinct) == 3:
        for parts in itertools.permutations(owners):
            for heads in dict.fromkeys([site.num_heads, *_head_counts(layout.out_features(parts[0]))]):
                words = ", ".join(f"{letter}={names[id(part)]}" for letter, part in zip("qkv", parts, strict=True))
                other = _built(layout.separate_site, place, *parts, num_heads=heads, output=output)
                if other is not None:
                    yield f"separate_site({words}, num_heads={heads})", other
    elif len(distinct) == 1:
        rows = layout.out_features(distinct[0])
        for heads, kv_heads in _grouped_counts(site, rows):
            for arrangement, order in itertools.product(("blocks", "groups"), itertools.permutations("qkv")):
                options = {"num_kv_heads": kv_heads} if kv_heads != heads else {}
                options |= {"arrangement": arrangement, "order": "".join(order)}
                other = _built(layout.fused_site, place, distinct[0], num_heads=heads, output=output, **options)
                if other is not None:
                    words = ", ".join(f"{key}={value!r}".replace("'", '"') for key, value in options.items())
                    yield f"fused_site(num_heads={heads}, {words})", other


def _turned(site: AttentionSite) -> Iterator[tuple[str, AttentionSite]]:
    """One projection at a time the other way round."""
    for letter, slot in site.slots.items():
        if slot.in_features == slot.out_features and not slot.by_head:
            other = replace(slot, transposed=not slot.transposed)
            yield f"transposed={other.transposed} for {letter}", replace(site, **{letter: other})


def _built(
    build: Callable[..., AttentionSite], place: Place, *parts: nn.Module, **options: Any
) -> AttentionSite | None:
    try:
        return build(place, *parts, **options)
    except (ValueError, TypeError):
        return None  # rows that these heads do not divide


def _head_counts(rows: int) -> list[int]:
    return [count for count in range(1, rows + 1) if rows % count == 0 and rows // count > 1]


def _grouped_counts(site: AttentionSite, rows: int) -> Iterator[tuple[int, int]]:
    """Numbers of query and of key/value heads that so many fused rows allow, those declared first."""
    declared = (site.num_heads, site.num_kv_heads)
    counts = [declared, *((count, count) for count in _head_counts(rows // 3) if rows % 3 == 0)]
    yield from dict.fromkeys(counts)
