r"""What an attention kernel got and computed, for every kernel that torch can name.

    eager            matrix products and a softmax
    SDPA             `scaled_dot_product_attention`: the same in the plain backend, else the arguments of a fused one
    flex_attention   a higher-order operator: q, k, v, score_mod and the mask of its arguments
    others           operators of flash-attn, xformers and anybody's own, by arguments named q, k, v or query, key and
                     value, else by their first three tensors

Of a fused kernel the logits are computed again from its arguments; except for those of torch, this is believed only if
softmax(s q k^T) v is what the kernel put out, and for no second reading of its arguments.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wellcond.private import LightDispatchMode, higher_order_name, operator_arguments

TORCH_OPERATORS = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "symm_mem")
NAMES = (("query", "q"), ("key", "k"), ("value", "v"))
SCALES = ("scale", "softmax_scale", "sm_scale")
CAUSAL = ("is_causal", "causal")
MASKS = ("attn_mask", "attn_bias", "mask", "bias")
SEQUENCES = (("cu_seqlens_q", "cu_seq_q"), ("cu_seqlens_k", "cu_seq_k"))
"""Where each of the sequences begins that follow each other in one."""

GONE = 745.2
"""exp(-745.2) is the smallest positive number of float64: a key that far below the largest one has no probability."""
ADDED = 50.0
"""What is that far below the largest logit of an untrained model is masked: libraries add -100, -1e4 or -inf."""
FLOOR = -1e8
"""No product of tokens is so negative: it is a mask that was added, on a row where it may hide everything."""
ADDED_FLOOR = -9e3
"""Where keys of no probability count as visible (a dead head sees them), lower logits are masks: -1e4 and below."""


def is_masked(logits: Tensor, visible: Tensor | None = None, *, depth: float = GONE, floor: float = FLOOR) -> Tensor:
    """Which keys are hidden from which queries: the one answer for the whole package.

    A boolean mask that the kernel itself got decides, and minus infinity (`visible`, True where a query may see a key:
    `KernelCall.mask`). Where numbers were added, a logit is masked if it is below `floor` (below half the least number
    of a 16-bit type), or more than `depth` below the largest logit of its row; NaN counts as masked. A row that is
    masked as a whole is a query that may attend to nothing.

    Depths: `GONE` where derivatives are taken; `ADDED` for the spread of logits; none, with `ADDED_FLOOR`, for the
    entropy of a map.
    """
    if visible is not None:
        return (logits == -torch.inf) | ~visible
    floor = max(floor, torch.finfo(logits.dtype).min / 2)  # the most negative number of float16 is -65504
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return ~((logits >= floor) & (logits - logits.amax(-1, keepdim=True).clamp_min(floor) >= -depth))


@dataclass(frozen=True)
class AttentionStatistics:
    """Means over query tokens (and over the query heads of a group)."""

    entropy: float
    """In nats."""
    normalised_entropy: float
    """Divided by the logarithm of the number of keys a token may see; 1 is uniform, NaN if it sees only one."""
    diagonal_mass: float
    """Mean probability of a token for itself; NaN under cross attention."""
    max_probability: float
    logit_std: float = math.nan
    """Standard deviation of a token's logits over the keys it attends to, those with a probability above zero."""


def map_statistics(p: Tensor, visible: Tensor, own: Tensor | None) -> AttentionStatistics:
    """Statistics of one attention map with probabilities p (..., keys), all its rows taken together.

    `visible` says how many keys each row may see, `own` the probability of its own token (None under cross attention).
    """
    own = None if own is None else own.flatten()[None]
    return statistics_of_maps(p.flatten(0, -2)[None], visible.flatten()[None], own)[0]


def statistics_of_maps(p: Tensor, visible: Tensor, own: Tensor | None) -> list[AttentionStatistics]:
    """`map_statistics` of several maps (maps, rows, keys), computed together."""
    entropy, several = -torch.xlogy(p, p).sum(-1), visible > 1
    normalised = torch.where(several, entropy / visible.clamp_min(2).log(), 0.0).sum(-1) / several.sum(-1)
    diagonal = torch.full_like(normalised, math.nan) if own is None else own.mean(-1)
    numbers = torch.stack([entropy.mean(-1), normalised, diagonal, p.amax(-1).mean(-1), _logit_std(p)], dim=-1)
    return [AttentionStatistics(*row) for row in numbers.tolist()]


def _logit_std(p: Tensor) -> Tensor:
    """Of each map: log P differs from the logits by a constant per row, which a standard deviation does not see."""
    seen = p > 0
    count = seen.sum(-1)
    logits = torch.where(seen, p, 1.0).log()
    centred = torch.where(seen, logits - (logits.sum(-1) / count)[..., None], 0.0)
    return (centred.square().sum(-1) / count).sqrt().mean(-1)


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One call of an attention kernel: q (..., H, N, d), k (..., K, M, d) and v (..., K, M, e) as it got them.

    The logits are ``scale q k^T``, after `score_mod` where there is one, plus `bias`; -inf where `visible` is False.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None = None
    visible: Tensor | None = None
    """The boolean mask, causality included: True where a query may see a key, broadcastable to the logits."""
    bias: Tensor | None = None
    """What is added to the logits; it may hold -inf."""
    score_mod: Callable[..., Tensor] | None = None
    why_no_logits: str = ""
    """Why the logits cannot be computed from the arguments; empty if they can."""

    def logits(self) -> Tensor:
        """Computed again from the arguments, in float32 or better, (..., H, N, M)."""
        assert self.scale is not None and not self.why_no_logits
        q, k = (_at_least_single(part) for part in (self.q, _repeated(self.k, self.q)))
        logits = self.scale * (q @ k.mT)
        if self.score_mod is not None:
            logits = self.score_mod(logits, *_positions(logits))
        if self.bias is not None:
            logits = logits + self.bias
        return logits if self.visible is None else logits.masked_fill(~self.visible, -torch.inf)

    def mask(self) -> Tensor | None:
        """True where a query may see a key, broadcastable to the logits; None where added numbers may hide it."""
        if self.why_no_logits or self.bias is not None:
            return None
        return torch.ones((), dtype=torch.bool, device=self.q.device) if self.visible is None else self.visible

    def output(self, logits: Tensor) -> Tensor:
        """What softmax attention with these logits puts out."""
        return probabilities_of(logits) @ _at_least_single(_repeated(self.v, self.q))


def probabilities_of(logits: Tensor) -> Tensor:
    """Softmax of the rows; a row that is masked as a whole has none."""
    return logits.softmax(-1).masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0.0)


def _at_least_single(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _repeated(part: Tensor, q: Tensor) -> Tensor:
    """Keys or values of a group of query heads, once for each of them."""
    if part.dim() < 3 or part.shape[-3] == q.shape[-3]:
        return part
    return part.repeat_interleave(q.shape[-3] // part.shape[-3], dim=-3)


def _positions(logits: Tensor) -> list[Tensor]:
    """Numbers of batch, head, query and key, each of a shape that broadcasts to the logits."""
    shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
    sizes = zip(logits.shape, shapes, strict=True)
    return [torch.arange(size, device=logits.device, dtype=torch.int32).view(shape) for size, shape in sizes]


# Reading the arguments of a kernel


def read_call(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, scale: float | None = None
) -> KernelCall | None:
    """What an operator got, if it is an attention kernel; None if nothing says so.

    `scale` is that of the attention layer, where the operator is given none.
    """
    name = higher_order_name(operator)
    if name is not None:
        return _flex_call(operator_arguments(operator, args, kwargs), result) if name == "flex_attention" else None
    if operator.namespace in TORCH_OPERATORS and not _is_fused_attention(operator):
        return None
    given = operator_arguments(operator, args, kwargs)
    found = [part for names in NAMES if (part := first_named(given, names)) is not None]
    named = len(found) == 3
    if not named:
        found = [value for value in given.values() if isinstance(value, Tensor) and value.is_floating_point()][:3]
    if len(found) < 3 or not _fit(*found):
        return None
    q, k, v = found
    returned = result if isinstance(result, (tuple, list)) else (result,)
    call = KernelCall(str(operator.overloadpacket), q, k, v, **_options(given))
    if q.is_nested:
        return replace(call, why_no_logits="its tensors are nested")
    if operator.namespace == "aten" and operator.overloadpacket.__name__.startswith("_scaled_dot_product"):
        scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
        return replace(_masked_causally(call, given, from_end=False), scale=scale)
    proven = _proven(call, given, returned, scale)
    return proven if named or not proven.why_no_logits else None


def _is_fused_attention(operator: Any) -> bool:
    """Whether this is one of torch's fused kernels; `_native_multi_head_attention` reads tokens, and no heads."""
    name = operator.overloadpacket.__name__
    return operator.namespace == "aten" and "attention" in name and not name.startswith("_native")


def _flex_call(given: dict[str, Any], result: Any) -> KernelCall:
    q, k, v = given["query"], given["key"], given["value"]
    mask_mod, buffers = given["block_mask"][-1], given.get("score_mod_other_buffers", ())

    def score_mod(logits: Tensor, *positions: Tensor) -> Tensor:
        return given["score_mod"](logits, *positions, *buffers).expand_as(logits)

    call = KernelCall("flex_attention", q, k, v, given["scale"], score_mod=score_mod)
    why = "its score_mod or mask cannot be evaluated for all positions at once"
    try:
        numbers = _positions(q.new_empty(q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
        visible = mask_mod(*numbers, *given.get("mask_mod_other_buffers", ()))
        call = replace(call, visible=visible)
        right = _agrees(call.output(call.logits()), result[0])
    except Exception as error:  # functions of the user, which flex_attention calls for one position at a time
        return replace(call, visible=None, why_no_logits=f"{why} ({type(error).__name__})")
    return call if right else replace(call, visible=None, why_no_logits=why)


def first_named(given: dict[str, Any], names: Sequence[str]) -> Tensor | None:
    """The first tensor among arguments of these names."""
    return next((given[name] for name in names if isinstance(given.get(name), Tensor)), None)


def given_scale(given: dict[str, Any]) -> float | None:
    """The scale of the logits among arguments."""
    return next((float(given[name]) for name in SCALES if isinstance(given.get(name), numbers.Real)), None)


def is_causal(given: dict[str, Any]) -> bool:
    """Whether arguments ask for a causal mask."""
    return any(given.get(name) is True for name in CAUSAL)


def _fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether these may be queries, keys and values."""
    return q.dim() == k.dim() == v.dim() >= 2 and q.shape[-1] == k.shape[-1] and k.shape[:-1] == v.shape[:-1]


def _options(given: dict[str, Any]) -> dict[str, Any]:
    mask = first_named(given, MASKS)
    found: dict[str, Any] = {"scale": given_scale(given)}
    if mask is not None:
        found["visible" if mask.dtype == torch.bool else "bias"] = mask
    return found


def _masked_causally(call: KernelCall, given: dict[str, Any], *, from_end: bool) -> KernelCall:
    """The call with its causal mask, and each of several sequences in one sees itself only.

    Of fewer queries than keys these are the last where `from_end`, else the first.
    """
    causal, numbers = is_causal(given), []
    for part, names in zip((call.q, call.k), SEQUENCES, strict=True):
        at = torch.arange(part.shape[-2], device=part.device)
        begins = first_named(given, names)
        sequence = torch.zeros_like(at) if begins is None else torch.bucketize(at, begins[1:-1], right=True)
        end = 0 if not from_end else len(at) if begins is None else begins[1:].to(at)[sequence]
        numbers.append((at - end, sequence, begins is not None))
    (query, of_query, several), (key, of_key, _) = numbers
    if not causal and not several:
        return call
    visible = of_query[:, None] == of_key
    if causal:
        visible = visible & (query[:, None] >= key)
    return replace(call, visible=visible if call.visible is None else call.visible & visible)


def _proven(call: KernelCall, given: dict[str, Any], returned: Any, scale: float | None) -> KernelCall:
    """The reading of an unknown kernel's arguments under which softmax attention puts out what it put out."""
    out = next((one for one in returned if isinstance(one, Tensor)), None)
    found: list[tuple[KernelCall, Tensor]] = []
    readings = _readings(call, given, scale) if out is not None else ()
    for reading in readings:
        assert out is not None
        with contextlib.suppress(RuntimeError):  # shapes that do not fit: another reading may
            logits = reading.logits()
            mine = reading.output(logits)
            known = any(logits.shape == other.shape and torch.equal(logits, other) for _, other in found)
            if not known and any(_agrees(mine, one) for one in _as_heads(out, mine)):  # known: causal on one token
                found.append((reading, logits))
    if len(found) == 1:
        return found[0][0]
    what = "several readings of its arguments give" if found else "softmax(s q k^T) v of its arguments is not"
    return replace(call, scale=None, visible=None, bias=None, why_no_logits=f"{what} what it puts out")


def _as_heads(out: Tensor, like: Tensor) -> Iterator[Tensor]:
    """What a kernel puts out with heads before tokens, whether it has them so, after them, or side by side."""
    yield out
    if out.dim() == like.dim() > 2:
        yield out.transpose(-3, -2)
    elif out.dim() == like.dim() - 1 > 1 and out.numel() == like.numel():
        yield out.unflatten(-1, (like.shape[-3], -1)).transpose(-3, -2)


def _readings(call: KernelCall, given: dict[str, Any], scale: float | None) -> Iterator[KernelCall]:
    """The same with heads before tokens and after them, with the scales and masks that it may use."""
    usual = call.q.shape[-1] ** -0.5
    others = [one for one in (scale, 1.0) if one is not None and not math.isclose(one, usual, rel_tol=1e-5)]
    scales = [usual, *dict.fromkeys(others)] if call.scale is None else [call.scale]
    says_causal = any(name in given for name in CAUSAL)
    causal = [given] if says_causal or call.visible is not None else [given, {**given, "causal": True}]
    orders = (False, True) if call.q.dim() > 2 else (False,)
    for swapped, one, options in itertools.product(orders, scales, causal):
        q, k, v = (part.transpose(-3, -2) if swapped else part for part in (call.q, call.k, call.v))
        if q.dim() == 2 or q.shape[-3] % k.shape[-3] == 0:
            yield _masked_causally(replace(call, q=q, k=k, v=v, scale=one), options, from_end=True)


def _agrees(mine: Tensor, theirs: Tensor) -> bool:
    if mine.shape != theirs.shape:
        return False
    rtol = max(1e-4, 4 * torch.finfo(theirs.dtype).eps)
    theirs = theirs.to(mine.dtype)
    return bool((mine - theirs).norm() <= rtol * theirs.norm())


# Watching a forward pass


def as_batch(matrix: Tensor) -> Tensor:
    """A copy of an operand as (batch, rows, columns)."""
    return matrix.detach().clone().reshape(-1, *matrix.shape[-2:])


@dataclass(eq=False)
class KernelTrace:
    """What was seen of the kernels of one attention layer; products and softmaxes are None where nobody asked."""

    products: list[tuple[Tensor, Tensor]] | None = None
    softmaxes: list[tuple[Tensor, Tensor]] | None = None
    """Logits and probabilities; those of fused kernels are computed again."""
    masks: list[Tensor | None] = field(default_factory=list)
    """Of fused kernels, see `KernelCall.mask`."""
    scale: float | None = None
    """Of the attention layer."""
    operators: tuple[str, ...] = ()
    """Operators outside torch's own set, and higher-order ones, of which no logits are known."""

    def see(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note one operator."""
        hidden = higher_order_name(operator)
        if hidden is None and operator.namespace not in TORCH_OPERATORS:
            hidden = str(operator.overloadpacket)
        call = read_call(operator, args, kwargs, result, self.scale)
        if call is not None:
            self._add(call)
        elif hidden is None:
            self._multiply(operator.overloadpacket.__name__, args, result)
        if hidden is not None and (call is None or call.why_no_logits):
            why = "" if call is None else f" ({call.why_no_logits})"
            self.operators = (*self.operators, hidden + why)

    def _multiply(self, name: str, args: Any, result: Any) -> None:
        # Every product, however it was written (`@`, einsum, SDPA's plain backend), is one of these in the dispatcher.
        if self.products is not None and name in ("bmm", "mm"):
            self.products.append((as_batch(args[0]), as_batch(args[1])))
        elif self.products is not None and name in ("baddbmm", "addmm"):
            self.products.append((as_batch(args[1]), as_batch(args[2])))
        elif self.softmaxes is not None and name in ("_softmax", "_safe_softmax"):
            self.softmaxes.append((args[0].detach().clone(), result.detach().clone()))

    def _add(self, call: KernelCall) -> None:
        self.masks.append(call.mask())
        if self.softmaxes is None or call.why_no_logits:
            return
        logits = call.logits().detach()
        p = probabilities_of(logits)
        self.softmaxes.append((logits, p))
        if self.products is not None:
            k, v = (_at_least_single(_repeated(part, call.q)) for part in (call.k, call.v))
            self.products.append((as_batch(_at_least_single(call.q)), as_batch(k.mT)))
            self.products.append((as_batch(p), as_batch(v)))


class KernelWatch(LightDispatchMode):
    """Shows every operator to the trace of the attention layer that is running."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions that are called meanwhile run as they would without it."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.trace: KernelTrace | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.trace is not None:
            self.trace.see(func, args, kwargs or {}, result)
        return result
