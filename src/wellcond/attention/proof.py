"""Is a reading of an attention layer's weights right? The module's own output answers, whatever kernel it uses.

Attention has symmetries that only the right reading has. For every head, an invertible matrix M may go into the
queries and its inverse into the keys, ``W_Q -> M W_Q, W_K -> M^-T W_K``, and another one into the values and out of the
output projection, ``W_V -> M W_V, W_O -> W_O M^-1``: the output stays as it is, to rounding. Rotary positions and gains
leave a positive number per head in place of M. And heads are separate: where ``W_O`` drops what a head puts out, the
output does not depend on the head's queries.

A test that cannot fail proves nothing, so every statement has a control that must be noticed: pairs of heads that are
mixed, halves of a head that are taken apart, queries that act on one token only where keys act on many. Two streams
that attend to each other (text and images in Flux and SD3) have one set of heads: the same M goes into both.

Legend: H query heads, K key/value heads, G = H / K, d head width, D token width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot

Symmetry = Literal["matrix", "diagonal", "number", "none"]
SYMMETRIES: tuple[Symmetry, ...] = ("matrix", "diagonal", "number")
SAME = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Relative change of the output that counts as none: some modules compute in float32 inside, whatever they get."""
CHANGED = 1e-3
"""Relative change that a control must make at least."""


@dataclass(frozen=True)
class Proof:
    """What the output of a module showed about readings of its weights."""

    holds: bool | None
    """None where the module could not be run."""
    reason: str
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts of the site that follow: causal, rotary, qk_norm, talking_heads."""
    chosen: int = 0
    """Number of the reading that is proven."""


class _Refuted(Exception):
    """A statement that must hold for a right reading does not."""


class Change(NamedTuple):
    """New heads and biases of a slot; None leaves them as they are."""

    slot: Slot
    heads: Tensor | None = None
    bias: Tensor | None = None


Transform = Callable[[AttentionSite, Tensor], list[Change]]
"""What a site becomes under a matrix per key/value head (K, d, d)."""


class _Experiment:
    """A module that is run with changed weights, one change at a time."""

    def __init__(self, streams: Sequence[AttentionSite], run: Callable[[], Tensor]) -> None:
        self.streams, self.run = streams, run
        self.site = streams[0]
        self.generator = torch.Generator().manual_seed(2)
        slots = [slot for site in streams for slot in site.slots.values()]
        stored = [tensor for slot in slots for tensor in (slot.parameter, slot.stored_bias()) if tensor is not None]
        self.originals = {id(tensor): (tensor, tensor.detach().clone()) for tensor in stored}
        self.reference = run()
        self.same = SAME.get(self.reference.dtype, 3e-2)

    def output(self, *changes: Change) -> Tensor:
        """The output with these changes, which are taken back afterwards."""
        try:
            for slot, heads, bias in changes:
                if heads is not None:
                    slot.write_(heads)
                if bias is not None:
                    slot.write_bias_(bias)
            return self.run()
        finally:
            for tensor, original in self.originals.values():
                tensor.data.copy_(original)

    def difference(self, found: Tensor, expected: Tensor | None = None) -> float:
        expected = self.reference if expected is None else expected
        return float((found - expected).norm() / self.reference.norm())

    def keeps(self, *changes: Change) -> bool:
        return self.difference(self.output(*changes)) <= self.same

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.reference)

    def matrices(self, symmetry: Symmetry, heads: int, width: int) -> Tensor:
        """Random invertible matrices (heads, width, width) with singular values between 1/2 and 2."""
        if symmetry == "number":
            sizes = torch.linspace(-1, 1, heads + 1)[1:, None].expand(heads, width)
        else:
            sizes = self.random(heads, width).tanh()
        matrices = torch.diag_embed(2.0 ** sizes.to(self.reference))
        if symmetry == "matrix":
            left, right = (torch.linalg.qr(self.random(heads, width, width))[0] for _ in range(2))
            matrices = left @ matrices @ right
        return matrices

    def rotated(self, slot: Slot, heads: Tensor, rows: int | None = None) -> Change:
        """Some heads of a slot (a mask), or the first rows of each, under another random rotation.

        A rotation keeps the length of what a projection makes, so that a norm over all heads does not notice it.
        """
        width = slot.head_dim if rows is None else rows
        rotations = torch.eye(slot.head_dim).to(self.reference).repeat(slot.num_heads, 1, 1)
        random = torch.linalg.qr(self.random(slot.num_heads, width, width))[0]
        rotations[heads, :width, :width] = random[heads] if width > 1 else -torch.ones_like(random[heads])
        return _times(slot, rotations)


def prove(
    streams: Sequence[AttentionSite], run: Callable[[], Tensor], *, local: tuple[int, int, int] | None = None
) -> Proof:
    """Ask a module whether a reading of its weights is right.

    Args:
        streams: the reading, of a private copy of the module whose weights may be overwritten: one site, or one per
            stream where several attend to each other. Weights are random, of a size at which logits spread by about 1.
        run: the copy's output on a fixed input.
        local: number of an input feature that is zero in all tokens but one, so that a change of its column reaches
            that token alone; the number of that token; how many tokens there are. None where the input has no such
            feature: queries and keys are then not told apart.

    Returns: a proof; where it does not hold, `reason` says what the output contradicts.
    """
    try:
        return _prove(_Experiment(streams, run), local)
    except _Refuted as refuted:
        return Proof(False, str(refuted))


def _prove(experiment: _Experiment, local: tuple[int, int, int] | None) -> Proof:
    reference = experiment.reference
    if not bool(torch.isfinite(reference).all()) or float(reference.norm()) == 0:
        raise _Refuted("its output on random tokens is zero or not finite")
    if not experiment.keeps():
        raise _Refuted("it gives another output for the same input")
    facts: dict[str, Any] = {}
    for name, slot in ((name, slot) for site in experiment.streams for name, slot in site.slots.items()):
        heads = slot.read_raw()
        if experiment.keeps(Change(slot, experiment.random(*heads.shape) * heads.std())):
            raise _Refuted(f"its output does not depend on what this reading takes for W_{name.upper()}")
    value_output = _symmetry(experiment, _value_output, experiment.site.v)
    query_key = _symmetry(experiment, _query_key, experiment.site.k)
    normalised = _keeps_scaled(experiment, "query") and _keeps_scaled(experiment, "key")
    if value_output == "none" and not _keys_are_compared(experiment):
        raise _Refuted("what this reading takes for values and outputs do not belong together, head by head")
    if not _heads_are_separate(experiment):
        _check_mixing(experiment, query_key, value_output)
        facts["talking_heads"] = True
    if local is not None:
        causal = _check_roles(experiment, *local)
        facts |= {} if causal is None else {"causal": causal}
    if normalised:
        facts["qk_norm"] = "other"
    if query_key == "number" and not normalised:
        facts["rotary"] = True
    if experiment.site.o is not None and value_output != "matrix":
        facts["modifiers"] = ("output norm" if value_output == "none" else "gated output",)
    return Proof(True, "its output confirms this reading", facts)


# Symmetries


def _symmetry(experiment: _Experiment, transform: Transform, slot: Slot) -> Symmetry:
    """The largest of three groups per head under which the output stays as it is."""
    for symmetry in SYMMETRIES:
        matrices = experiment.matrices(symmetry, slot.num_heads, slot.head_dim)
        if experiment.keeps(*(change for site in experiment.streams for change in transform(site, matrices))):
            return symmetry
    return "none"


def _query_key(site: AttentionSite, matrices: Tensor) -> list[Change]:
    per_query = matrices.repeat_interleave(site.num_heads // site.num_kv_heads, dim=0)
    return [_times(site.q, per_query), _times(site.k, torch.linalg.inv(matrices).mT)]


def _value_output(site: AttentionSite, matrices: Tensor) -> list[Change]:
    changes = [_times(site.v, matrices)]
    if site.o is None:
        return changes
    per_query = torch.linalg.inv(matrices).repeat_interleave(site.o.num_heads // site.v.num_heads, dim=0)
    return [*changes, Change(site.o, site.o.read_raw() @ per_query.to(site.o.parameter))]


def _times(slot: Slot, matrices: Tensor) -> Change:
    heads, bias = slot.read_raw(), slot.read_bias()
    if bias is not None:
        bias = torch.einsum("hij,hj->hi", matrices.to(bias), bias)
    return Change(slot, matrices.to(heads) @ heads, bias)


def _keeps_scaled(experiment: _Experiment, role: str) -> bool:
    """Whether a projection's size does not matter: it is normalised afterwards, in each head or over all of them."""
    changes = []
    for site in experiment.streams:
        slot = site.by_role(role)
        changes.append(_times(slot, 2 * torch.eye(slot.head_dim).expand(slot.num_heads, -1, -1)))
    return experiment.keeps(*changes)


def _keys_are_compared(experiment: _Experiment) -> bool:
    """Whether queries do nothing where all keys are zero, and values still do: a softmax over equal logits is even."""

    def rotated(slots: list[Slot]) -> Tensor:
        changes = [experiment.rotated(slot, torch.ones(slot.num_heads, dtype=torch.bool)) for slot in slots]
        return experiment.output(*no_keys, *changes)

    no_keys: list[Change] = []
    for site in experiment.streams:
        bias = site.k.read_bias()
        no_bias = None if bias is None else torch.zeros_like(bias)
        no_keys.append(Change(site.k, torch.zeros_like(site.k.read_raw()), no_bias))
    even = experiment.output(*no_keys)
    queries = rotated([site.q for site in experiment.streams])
    values = rotated([site.v for site in experiment.streams])
    return experiment.difference(queries, even) <= experiment.same and experiment.difference(values, even) > CHANGED


def _check_mixing(experiment: _Experiment, query_key: Symmetry, value_output: Symmetry) -> None:
    """Heads that talk to each other are still heads: any matrix in each, and none across two of them."""
    if query_key != "matrix" or value_output != "matrix":
        raise _Refuted("what a head puts out depends on the queries of other heads")
    site = experiment.site
    if site.num_kv_heads % 2:
        return
    transforms: tuple[tuple[Transform, Slot], ...] = ((_query_key, site.k), (_value_output, site.v))
    for transform, slot in transforms:
        across_pairs = experiment.matrices("matrix", slot.num_heads // 2, 2 * slot.head_dim)
        changes = [each for one in experiment.streams for each in transform(_merge_pairs(one), across_pairs)]
        if experiment.keeps(*changes):
            raise _Refuted("pairs of what this reading takes for heads are one head")


def _merge_pairs(site: AttentionSite) -> AttentionSite:
    """The reading with every two key/value heads taken for one, and their queries with them."""

    def merged(slot: Slot) -> Slot:
        group = slot.num_heads // site.num_kv_heads
        order = torch.arange(slot.num_heads).view(site.num_kv_heads // 2, 2, group).transpose(1, 2).reshape(-1, 2)
        return slot.regrouped(order)

    return replace(site, q=merged(site.q), k=merged(site.k), v=merged(site.v), o=site.o and merged(site.o))


# Heads are separate


def _heads_are_separate(experiment: _Experiment) -> bool:
    """Whether the output depends on a head's queries, keys and values through that head's part of W_O alone.

    Raises: _Refuted where halves of what the reading takes for a head are separate as well.
    """
    site = experiment.site
    if not all(_is_silent(experiment, chosen) for chosen in _subsets(site.num_heads)):
        return False
    # Without a W_O the first value head alone is known to be that of the first query head, if they are several.
    heads = torch.arange(site.num_heads) < (1 if site.o is None else site.num_heads)
    for part in _parts(site.head_dim, site.v.head_dim):
        if _is_silent(experiment, heads, part):
            raise _Refuted("what this reading takes for a head is several")
    return True


def _subsets(heads: int) -> Iterator[Tensor]:
    """Masks over heads such that for any two heads one mask holds the first and not the second."""
    numbers = torch.arange(heads)
    for bit in range(max((heads - 1).bit_length(), 0)):
        for value in (0, 1):
            mask = (numbers >> bit) & 1 == value
            if bool(mask.any()):
                yield mask


def _parts(width: int, value_width: int) -> Iterator[tuple[int, int]]:
    """First parts of a head, in rows of Q and of V, at which it could be several heads."""
    for prime in range(2, width + 1):
        is_prime = all(prime % other for other in range(2, int(prime**0.5) + 1))
        if is_prime and width % prime == 0 and value_width % prime == 0:
            yield width // prime, value_width // prime


def _is_silent(experiment: _Experiment, heads: Tensor, part: tuple[int, int] | None = None) -> bool:
    """Whether some heads (or the first rows of them) do nothing once W_O drops what they put out."""
    group = experiment.site.num_heads // experiment.site.num_kv_heads
    groups = heads.view(-1, group).all(1)
    if experiment.site.o is None and part is None and not torch.equal(groups.repeat_interleave(group), heads):
        return True  # values are shared by the group: there is no way to drop one head of it
    rows, columns = (None, None) if part is None else part
    dropped: list[Change] = []
    changes: list[Change] = []
    for site in experiment.streams:
        dropped.append(_without_heads(site, heads, groups, columns))
        changes.append(experiment.rotated(site.q, heads, rows))
        if part is None:
            changes.append(experiment.rotated(site.k, groups))
            changes += [experiment.rotated(site.v, groups)] if site.o is not None else []
    found = experiment.output(*dropped, *changes)
    return experiment.difference(found, experiment.output(*dropped)) <= experiment.same


def _without_heads(site: AttentionSite, heads: Tensor, groups: Tensor, columns: int | None) -> Change:
    """W_O without some heads (or the first columns of them); without a W_O, values without their rows."""
    if site.o is not None:
        weights = site.o.read_raw().clone()
        weights[heads.to(weights.device), :, :columns] = 0
        return Change(site.o, weights)
    values, bias = site.v.read_raw().clone(), site.v.read_bias()
    dropped = groups if columns is None else torch.ones_like(groups)
    values[dropped, :columns] = 0
    if bias is not None:
        bias = bias.clone()
        bias[dropped, :columns] = 0
    return Change(site.v, values, bias)


# Roles


def _check_roles(experiment: _Experiment, feature: int, token: int, count: int) -> bool | None:
    """That a query reaches its own token's output alone, and keys and values those of others.

    Returns: whether a token reaches later ones only (causal); None where that cannot be seen.
    """
    reached, *_ = [_reach(experiment, site, feature) for site in experiment.streams]
    axis = None if reached is None else next((axis for axis, size in enumerate(reached.shape) if size == count), None)
    if reached is None or axis is None:
        return None
    by_token = reached.movedim(axis, 0).flatten(1).any(1)
    return not bool(by_token[:token].any()) and bool(by_token[token + 1 :].any())


def _reach(experiment: _Experiment, site: AttentionSite, feature: int) -> Tensor | None:
    """Which outputs one token's key reaches; None where one token alone asks, such as a class token.

    Raises: _Refuted where a token's query reaches as many.
    """
    reached = {}
    for role in ("query", "key", "value"):
        slot = site.by_role(role)
        heads = slot.read_raw().clone()
        heads[:, :, feature] += experiment.random(*heads.shape[:2]).to(heads)
        change = (experiment.output(Change(slot, heads)) - experiment.reference).abs()
        reached[role] = change > experiment.same * experiment.reference.abs().max()
    sizes = {role: int(mask.sum()) for role, mask in reached.items()}
    if 0 in sizes.values() or sizes["query"] == sizes["key"] == sizes["value"]:
        return None
    if sizes["query"] >= min(sizes["key"], sizes["value"]):
        raise _Refuted("what this reading takes for queries reaches other tokens, as keys do")
    return reached["key"]
