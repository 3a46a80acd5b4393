"""What a user's adapter declares, proven against the module's own forward pass.

A copy of the module with random weights is run once. Every column of the queries, keys and values that it multiplies is
one row of what its projections return, up to a factor; which row that is can be read off. So the pass itself says where
each head is stored, and a declaration is proven, or refuted with the layout that is there. Where the pass does not show
it (a kernel that is no product and softmax, arguments that cannot be invented, values that are changed before they are
multiplied) nothing is proven and the reason is given.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellcond.attention.builders import QKVLayout
from wellcond.attention.effective import effective_weight
from wellcond.attention.probe import (
    MAX_PARAMETERS,
    NUM_TOKENS,
    ProductRecorder,
    logit_facts,
    match,
    random_replica,
    required_arguments,
)
from wellcond.attention.site import AttentionSite, Slot
from wellcond.attention.watch import copy_argument, first_tensor, run

Example = Callable[[nn.Module], Any]

SAME = 1 - 1e-8
"""Cosine from which two columns over random tokens count as the same one."""
SIMPLE = (int, float, str, bool, type(None))
LETTERS = {"q": "query", "k": "key", "v": "value"}


@dataclass(frozen=True)
class Proof:
    """Whether a declared layout is the one that the forward pass reads; `holds` is None where that was not seen."""

    holds: bool | None
    reason: str
    facts: dict[str, Any] = field(default_factory=dict)


_PROVEN: weakref.WeakKeyDictionary[type, dict[Any, Proof]] = weakref.WeakKeyDictionary()


def prove_layout(site: AttentionSite, example: Example | None = None) -> Proof:
    """Compare a declared site with a trial run of its module; once for each class, configuration and declaration.

    Args:
        site: what an adapter declares.
        example: from the module to what it is called with (a tensor, a tuple of arguments, a mapping); random tokens
            for every required argument if None.
    """
    known = _PROVEN.setdefault(type(site.module), {})
    key = (example, _configuration(site.module), _declaration(site))
    if key not in known:
        known[key] = _prove(site, example)
    return known[key]


def _configuration(module: nn.Module) -> tuple[Any, ...]:
    """What tells two modules of one class apart: shapes, and plain values among their attributes."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    plain = tuple((name, value) for name, value in sorted(vars(module).items()) if isinstance(value, SIMPLE))
    return shapes, plain, id(vars(module).get("forward"))


def _declaration(site: AttentionSite) -> tuple[Any, ...]:
    names = {id(part): name for name, part in site.module.named_modules()}
    slots = tuple(
        (role, names.get(id(slot.owner)), slot.weight_name, slot.transposed, slot.bias_name, str(slot.rows.tolist()))
        for role, slot in site.slots.items()
    )
    stated = (site.kind, site.scale, site.causal, site.rotary, site.qk_norm, site.modifiers, site.talking_heads)
    return slots, stated, tuple(sorted(site.roles.items()))


@dataclass(eq=False)
class _Trial:
    """What happened in the trial run: what each projection read and returned, and every product and softmax."""

    recorder: ProductRecorder
    read: dict[nn.Module, Tensor] = field(default_factory=dict)
    returned: dict[nn.Module, Tensor] = field(default_factory=dict)


class _NotSeenError(Exception):
    """The trial run does not show what has to be proven."""


class _RefutedError(Exception):
    """The trial run shows another layout."""


@torch.no_grad()
def _prove(site: AttentionSite, example: Example | None) -> Proof:
    try:
        if site.kind != "softmax" or site.talking_heads:
            kind = site.kind if site.kind != "softmax" else "softmax with talking heads"
            raise _NotSeenError(f"its kind is {kind}, which a trial run does not take apart")
        trial, copied = _run_copy(site, example)
        for role, slot in copied.slots.items():
            _check_matrix(role, slot, trial)
        return Proof(True, "its own forward pass multiplies these heads", _check_heads(copied, trial))
    except _NotSeenError as reason:
        return Proof(None, str(reason))
    except _RefutedError as reason:
        return Proof(False, str(reason))


def _run_copy(site: AttentionSite, example: Example | None) -> tuple[_Trial, AttentionSite]:
    """Run a copy of the module with random float64 weights; the trial, and the site in the copy."""
    module = site.module
    if sum(p.numel() for p in module.parameters()) > MAX_PARAMETERS:
        raise _NotSeenError(f"it has more than {MAX_PARAMETERS:,} parameters, which are not run for a trial")
    trial = _Trial(ProductRecorder())
    try:
        replica = random_replica(module)
        counterparts = dict(zip(module.modules(), replica.modules(), strict=True))
        copied = _moved(site, counterparts, replica)
        arguments = _random_tokens(site, replica) if example is None else example(module)
        arguments = copy_argument(arguments, {}, _as_float64)
        owners = {slot.owner for slot in copied.slots.values()} - {replica}
        for owner in owners:
            owner.register_forward_hook(_keep(trial), with_kwargs=True)
        with (
            warnings.catch_warnings(),
            sdpa_kernel(SDPBackend.MATH),
            torch.random.fork_rng(devices=[]),
            trial.recorder,
        ):
            warnings.simplefilter("ignore")  # about arguments that were invented
            run(replica, arguments)
    except _NotSeenError:
        raise
    except Exception as error:  # an arbitrary module may raise anything when copied or run; the reason is passed on
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        raise _NotSeenError(f"its forward pass could not be tried ({found})") from error
    return trial, copied


def _moved(site: AttentionSite, counterparts: dict[nn.Module, nn.Module], replica: nn.Module) -> AttentionSite:
    def moved(slot: Slot) -> Slot:
        bias_owner = None if slot.bias_owner is None else counterparts.get(slot.bias_owner)
        return replace(slot, owner=counterparts[slot.owner], bias_owner=bias_owner)

    if any(site.slots[letter].owner not in counterparts for letter in "qkv"):
        raise _NotSeenError("its projections are no part of the module")
    output = moved(site.o) if site.o is not None and site.o.owner in counterparts else None
    return replace(site, module=replica, q=moved(site.q), k=moved(site.k), v=moved(site.v), o=output)


def _random_tokens(site: AttentionSite, replica: nn.Module) -> tuple[Tensor, ...]:
    """Tokens for every argument that the forward pass requires; those after the first may be the memory."""
    generator = torch.Generator().manual_seed(1)
    names = required_arguments(replica)
    widths = [site.in_features] + [site.by_role("key").in_features if site.cross else site.in_features] * len(names)
    tokens = [torch.randn(1, NUM_TOKENS, w, generator=generator, dtype=torch.float64) for w in widths]
    return tuple(tokens[: max(1, len(names))])


def _as_float64(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _keep(trial: _Trial) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        read, returned = first_tensor((*args, *kwargs.values())), first_tensor(output)
        if read is not None and returned is not None and module not in trial.read:
            trial.read[module], trial.returned[module] = _by_token(module, read), _by_token(module, returned)

    return hook


def _by_token(module: nn.Module, tensor: Tensor) -> Tensor:
    """What a projection read or returned as (batch, tokens, channels)."""
    tensor = tensor.detach().clone()
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        tensor = tensor.flatten(2).mT
    return tensor.reshape(-1, *tensor.shape[-2:]) if tensor.dim() > 1 else tensor[None, None]


def _check_matrix(role: str, slot: Slot, trial: _Trial) -> None:
    """A projection is the matrix that its slot says, not the transposed one, and has the bias that it says."""
    if slot.owner not in trial.read:
        raise _NotSeenError(f"its projection of {role} ({type(slot.owner).__name__}) is not called as a module")
    read, returned = trial.read[slot.owner], trial.returned[slot.owner]
    stored, bias = effective_weight(slot.owner, slot.weight_name), slot.stored_bias()
    for transposed in (slot.transposed, not slot.transposed):
        matrix = replace(slot, transposed=transposed).as_matrix(stored)
        if matrix.shape[1] != read.shape[-1] or matrix.shape[0] != returned.shape[-1]:
            continue
        rest = returned - read @ matrix.T
        if bias is not None and bias.shape == rest.shape[-1:]:
            rest = rest - bias
        if float((rest - rest.flatten(0, -2).mean(0)).norm()) > 1e-6 * float(returned.norm()):
            continue  # not even up to a constant
        if transposed != slot.transposed:
            raise _RefutedError(f"{role} is declared transposed={slot.transposed}, and is the other way round")
        if float(rest.norm()) > 1e-6 * float(returned.norm()):
            raise _RefutedError(f"{role} is declared {'without' if bias is None else 'with'} a bias, which is not so")
        return
    raise _NotSeenError(f"its projection of {role} returns something else than weight times tokens plus bias")


def _check_heads(site: AttentionSite, trial: _Trial) -> dict[str, Any]:
    """Facts that the pass shows of the declared heads; raises the first thing that speaks against every softmax."""
    doubts: list[Exception] = []
    for logits, p, (left, right), values in _attentions(trial.recorder):
        try:
            for letter, operand in (("v", values), ("q", left), ("k", right.mT)):
                _check_rows(site, trial, letter, operand, {"q": left, "k": right.mT, "v": values})
            _check_output(site, trial, p.reshape(len(values), -1, values.shape[1]) @ values)
            return _shown_facts(site, trial, logits, p, left, right)
        except (_NotSeenError, _RefutedError) as doubt:
            doubts.append(doubt)
    refuted = [doubt for doubt in doubts if isinstance(doubt, _RefutedError)]
    nothing = _NotSeenError("its forward pass shows no softmax between two products (a kernel of its own?)")
    raise (refuted or doubts or [nothing])[0]


def _attentions(recorder: ProductRecorder) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]]:
    """Every softmax with the product that may be its logits' and the values that its probabilities multiply."""
    for logits, p in recorder.softmaxes:
        for weights, values in recorder.products:
            if weights.numel() != p.numel() or not torch.equal(p.reshape_as(weights), weights):
                continue
            for left, right in recorder.products:
                sizes = (len(left), left.shape[1], right.shape[2])
                if sizes == tuple(weights.shape) and left.shape[2] == right.shape[1] and right is not values:
                    yield logits.reshape_as(weights), weights, (left, right), values


def _check_rows(site: AttentionSite, trial: _Trial, letter: str, operand: Tensor, operands: dict[str, Tensor]) -> None:
    """The rows that one operand is made of are the declared ones."""
    slot = site.by_role(LETTERS[letter])
    declared = slot.rows.repeat_interleave(site.num_heads // slot.num_heads, dim=0)
    found = rows_of(operand, trial.returned[slot.owner])
    if found is not None and (len(found) == len(slot.rows) != len(declared)):
        declared = slot.rows  # grouped queries that are multiplied without repeating the keys
    if found is not None and found.shape == declared.shape and torch.equal(found, declared):
        return
    read_from = {other: _source(site, trial, operands[other]) for other in "qkv"}
    if read_from[letter] is not None:
        raise _RefutedError(_describe_difference(site, read_from))
    heads = trial.returned[slot.owner][..., declared].movedim(-2, 1).flatten(0, 1)
    if letter != "v" and (site.qk_norm is not None or match(operand, heads) is not None):
        return  # rotated, as a rotary embedding does, or normalised, as the site says
    changed = "" if letter == "v" else " (say qk_norm=... if they are normalised)"
    raise _NotSeenError(f"what it multiplies as {letter} is changed after the projection{changed}")


def rows_of(operand: Tensor, returned: Tensor) -> Tensor | None:
    """For every column of an operand (batch x heads, tokens, d), which channel of `returned` (batch, tokens, R) it is.

    Returns: channel numbers (heads, d), or None unless each column is exactly one channel up to a factor.
    """
    batch, tokens, _ = returned.shape
    if operand.shape[1] != tokens or len(operand) % batch:
        return None
    heads = len(operand) // batch
    columns = operand.unflatten(0, (batch, heads)).permute(1, 3, 0, 2).flatten(2).flatten(0, 1)
    channels = returned.permute(2, 0, 1).flatten(1)
    alike = (nn.functional.normalize(columns, dim=1) @ nn.functional.normalize(channels, dim=1).T).abs() > SAME
    if not bool((alike.sum(1) == 1).all()):
        return None
    return alike.int().argmax(1).view(heads, -1)


def _source(site: AttentionSite, trial: _Trial, operand: Tensor) -> tuple[Slot, Tensor] | None:
    """The projection, and its rows, that an operand is made of; None where that cannot be read off."""
    for slot in (site.q, site.k, site.v):
        found = rows_of(operand, trial.returned[slot.owner])
        if found is not None:
            return slot, found
    return None


def _describe_difference(site: AttentionSite, read_from: dict[str, tuple[Slot, Tensor] | None]) -> str:
    names = {part: name for name, part in site.module.named_modules()}
    lines = []
    for letter, source in read_from.items():
        slot = site.by_role(LETTERS[letter])
        shown = "not visible" if source is None else _show(names[source[0].owner], source[1])
        declared = slot.rows.repeat_interleave(site.num_heads // slot.num_heads, dim=0)
        lines.append(f"    {letter}: declared {_show(names[slot.owner], declared)}; forward pass {shown}")
    reading = _name_reading(site, read_from)
    confirmed = f"\n  Its forward pass confirms {reading}." if reading else ""
    return "its forward pass reads other heads than the adapter declares.\n" + "\n".join(lines) + confirmed


def _show(name: str, rows: Tensor) -> str:
    first = rows[0].tolist()
    span = f"{first[0]}..{first[-1]}" if first == list(range(first[0], first[-1] + 1)) else str(first)
    return f"{len(rows)} heads of {name or 'the module'}, head 0 in rows {span}"


def _name_reading(site: AttentionSite, read_from: dict[str, tuple[Slot, Tensor] | None]) -> str:
    """What was read as arguments of a builder; empty where no builder expresses it."""
    known = {letter: source for letter, source in read_from.items() if source is not None}
    if len(known) < 3:
        return ""
    owners = {letter: slot.owner for letter, (slot, _) in known.items()}
    tables = {letter: rows for letter, (_, rows) in known.items()}
    num_heads, num_kv = len(tables["q"]), len(tables["v"].unique(dim=0))
    counts = f"num_heads={num_heads}" + (f", num_kv_heads={num_kv}" if num_kv != num_heads else "")
    if len(set(owners.values())) == 3:
        names = {part: name for name, part in site.module.named_modules()}
        return "separate_site(" + ", ".join(f"{letter}={names[owners[letter]]}" for letter in "qkv") + f", {counts})"
    if len(set(owners.values())) == 2 or num_heads % num_kv:
        return ""
    for arrangement, order in itertools.product(("blocks", "groups"), itertools.permutations("qkv")):
        layout = QKVLayout(num_heads, tables["q"].shape[1], num_kv, tables["v"].shape[1], arrangement, "".join(order))  # type: ignore[arg-type]
        if all(_same_heads(tables[letter], layout.rows(letter)) for letter in "qkv"):
            return f'fused_site({counts}, arrangement="{arrangement}", order="{layout.order}")'
    return ""


def _same_heads(found: Tensor, rows: Tensor) -> bool:
    return torch.equal(found, rows.repeat_interleave(len(found) // len(rows), dim=0))


def _check_output(site: AttentionSite, trial: _Trial, heads: Tensor) -> None:
    """W_O reads the heads where its slot says."""
    if site.o is None:
        return
    found = rows_of(heads, trial.read[site.o.owner])
    if found is None and not site.modifiers:
        raise _NotSeenError("what its output projection reads is not the heads themselves (a gate or a norm?)")
    if found is not None and not torch.equal(found, site.o.rows):
        raise _RefutedError(
            "its output projection reads other columns than the adapter declares: head 0 is declared in columns "
            f"{site.o.rows[0].tolist()}, and read from {found[0].tolist()}"
        )


def _shown_facts(
    site: AttentionSite, trial: _Trial, logits: Tensor, p: Tensor, left: Tensor, right: Tensor
) -> dict[str, Any]:
    """Causality, rotation, position biases and scale, where the pass shows them.

    Raises: _RefutedError if the scale declared is another one than that of the pass, and nothing learned decides it.
    """
    shown, facts = logit_facts(logits, p, left @ right), dict[str, Any]()
    matched = []
    for letter, operand in (("q", left), ("k", right.mT)):
        slot = site.by_role(LETTERS[letter])
        rows = slot.rows.repeat_interleave(site.num_heads // slot.num_heads, dim=0)
        matched.append(match(operand, trial.returned[slot.owner][..., rows].movedim(-2, 1).flatten(0, 1)))
    if site.causal is False and shown["causal"]:
        facts["causal"] = True
    if any(found is not None and found[1] for found in matched) and site.qk_norm is None:
        facts["rotary"] = True
    if shown["relative_position_bias"] and not site.modifiers and site.causal is not None:
        facts["relative_position_bias"] = True
    owned = {id(s.parameter) for s in site.slots.values()} | {id(s.stored_bias()) for s in site.slots.values()}
    learned = any(id(parameter) not in owned for parameter in site.module.parameters())
    if shown["scale"] is None or learned or matched[0] is None or matched[1] is None or site.modifiers:
        return facts
    scale = float(f"{shown['scale'] * matched[0][0] * matched[1][0]:.7g}")
    if site.scale is not None and abs(scale - site.scale) > 1e-4 * abs(scale):
        raise _RefutedError(f"scale is declared as {site.scale:.7g}, and its logits are {scale:.7g} q.k")
    return facts if site.scale is not None else facts | {"scale": scale}
