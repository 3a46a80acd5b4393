"""Kernel calls of a training step as they happen: nothing is copied, proven, computed again or waited for.

`record` answers for one forward pass of its own; this answers for the passes that a training makes. A call is shown as
soon as its attention layer returns. What cannot be read without computing the N x N logits again stays None, with the
reason in `LiveCall.why`. No hook here reads a number from the device, allocates N x N, or talks to another process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from wellcond.attention.evaluation import first_tensor
from wellcond.attention.kernels import (
    MASKS,
    NAMES,
    SEQUENCES,
    TORCH_OPERATORS,
    KernelWatch,
    first_named,
    given_scale,
    is_causal,
)
from wellcond.attention.record import HOW_TO_SEE, by_head
from wellcond.attention.sharding import unwrap, wrappers
from wellcond.attention.site import AttentionSite, find_blocks
from wellcond.private import (
    higher_order_name,
    in_backward,
    operator_arguments,
    plain_tensor,
    return_names,
    without_modes,
)

SAMPLED = 16
"""Queries of a sample of which logits are computed again."""
NOT_CALLED = "the training step did not call its module"
COMPILED = "it is compiled (torch.compile), and compiled code calls no hooks"
OTHER_SOFTMAX = "its softmax is not over tokens"
SECOND_STREAM = "it is a second stream of another attention layer"
NESTED = "it runs inside another attention layer"
OTHER_TENSORS = "its kernel gets tensors of another class than torch.Tensor"
NESTED_TENSORS = "its kernel gets nested tensors"
CHANGED = "it calls another kernel than before; the next pass shows it"
NO_KERNEL = f"no kernel was visible in it; {HOW_TO_SEE}"


@dataclass(eq=False)
class LiveCall:
    """One call of an attention kernel by a training step.

    q is (samples, heads, tokens, width), k and v may have fewer heads. Where several processes hold the heads of a
    layer (tensor parallelism), these are the heads of this one.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    scale: float | None = None
    causal: bool = False
    mask: Tensor | None = None
    """A boolean mask (True where a query may see a key) or numbers that are added to the logits."""
    lse: Tensor | None = None
    """Log-sum-exp of every row of logits, (samples, heads, tokens)."""
    logits: Tensor | None = None
    """Where the kernel computes them: (samples, heads, tokens, keys)."""
    probabilities: Tensor | None = None
    cross: bool = False
    """Whether keys come from another sequence than queries."""
    foreign: str = ""
    """Name of an operator that is not one of torch's; its log-sum-exp must be checked (`rows`)."""
    why: str = ""
    """Why neither logits nor log-sum-exp are there."""
    _rows: tuple[Tensor, Tensor | None] | None = field(default=None, repr=False)
    _squares: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Everything that it holds."""
        return self.q, self.k, self.v, self.mask, self.lse, self.logits, self.probabilities

    @property
    def adds_numbers(self) -> bool:
        """Whether numbers are added to its logits."""
        return self.mask is not None and self.mask.dtype != torch.bool

    @property
    def sees_all(self) -> bool:
        """Whether every query sees every key, as the arguments of its kernel say."""
        return self.logits is None and self.q is not None and self.mask is None and not self.causal

    def squares(self, name: str) -> Tensor | None:
        """Squared lengths of the vectors of ``q``, ``k`` or ``v``; None where these were not seen."""
        part: Tensor | None = getattr(self, name)
        if part is not None and name not in self._squares:
            exact = torch.promote_types(part.dtype, torch.float32)
            self._squares[name] = torch.linalg.vector_norm(part, dim=-1, dtype=exact).square()
        return self._squares.get(name)

    @property
    def num_keys(self) -> int:
        """Keys of a sample."""
        if self.k is not None:
            return self.k.shape[-2]
        assert self.logits is not None
        return self.logits.shape[-1]

    def sampled_rows(self) -> tuple[Tensor, Tensor | None] | None:
        """Logits of `SAMPLED` queries of every sample and head, evenly spaced, and which keys these see.

        None where they cannot be computed; the second is None where only the numbers themselves show what is hidden.
        """
        if self._rows is None:
            self._rows = self._sample()
        return self._rows

    def _sample(self) -> tuple[Tensor, Tensor | None] | None:
        if self.logits is not None:
            return self.logits.index_select(-2, self.sampled_positions()).float(), None
        if self.q is None or self.k is None or self.scale is None:
            return None
        at = self.sampled_positions()
        q, k = self.q.index_select(-2, at).float(), self.k.float()
        grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        logits = (self.scale * (grouped @ k.mT)).unflatten(2, (-1, len(at))).flatten(1, 2)
        mask = self.full_mask()
        if self.sees_all:
            return logits, torch.ones((), dtype=torch.bool, device=q.device).expand_as(logits)
        visible = self.visible_keys()[at].unsqueeze(-1) > torch.arange(self.num_keys, device=q.device)
        if mask is not None:
            mask = mask.index_select(-2, at)
            if self.adds_numbers:
                return (logits + mask).masked_fill(~visible, -torch.inf), None
            visible = visible & mask
        return logits.masked_fill(~visible, -torch.inf), visible.expand_as(logits)

    def sampled_positions(self) -> Tensor:
        """Numbers of the queries of `sampled_rows`."""
        tensor = self.q if self.q is not None else self.logits
        assert tensor is not None
        return _evenly_spaced(tensor.shape[-2], tensor.device)

    def visible_keys(self) -> Tensor:
        """How many keys every query sees by causality alone, (tokens)."""
        tensor = self.q if self.q is not None else self.logits
        assert tensor is not None
        tokens, keys = tensor.shape[-2], self.num_keys
        shift = keys - tokens if self.foreign else 0  # of fewer queries than keys, flash-attn takes the last
        return _visible_keys(tokens, keys, shift if self.causal else keys, tensor.device)

    def full_mask(self) -> Tensor | None:
        """The mask as a view of shape (..., tokens, keys); None where there is none."""
        if self.mask is None or self.q is None:
            return None
        return self.mask.expand(*self.mask.shape[:-2], self.q.shape[-2], self.num_keys)

    def weighted_keys(self) -> Tensor | None:
        """P K for every query by one more call of the kernel, with keys in the place of values."""
        if self.q is None or self.k is None or self.foreign:
            return None
        return scaled_dot_product_attention(
            self.q,
            self.k,
            self.k,
            attn_mask=self.mask,
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=self.q.shape[1] != self.k.shape[1],
        )


@lru_cache(maxsize=64)
def _evenly_spaced(size: int, device: torch.device) -> Tensor:
    count = SAMPLED
    with torch.inference_mode(False):  # kept: what inference makes cannot be used in training
        if size <= count:
            return torch.arange(size, device=device)
        return torch.arange(count, device=device) * (size - 1) // (count - 1)


@lru_cache(maxsize=64)
def _visible_keys(tokens: int, keys: int, shift: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return (torch.arange(1, tokens + 1, device=device) + shift).clamp(0, keys)


ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Of `scaled_dot_product_attention`, in its order."""


class _LiveSdpa(TorchFunctionMode):
    def __init__(self, kernels: KernelWatch) -> None:
        super().__init__()
        self.kernels = kernels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        trace = self.kernels.trace
        if func is not scaled_dot_product_attention or not isinstance(trace, _Trace) or trace.call is not None:
            return func(*args, **(kwargs or {}))
        trace.enter_sdpa(args, kwargs or {})
        try:
            with contextlib.nullcontext() if trace.every_operator else self.kernels:
                return func(*args, **(kwargs or {}))
        finally:
            trace.inside = False


class _Trace:
    """The first kernel that runs inside an attention layer."""

    def __init__(self, site: AttentionSite, *, every_operator: bool = True) -> None:
        self.site = site
        self.every_operator = every_operator
        """Whether every operator of the layer is shown to `see`, or those of `scaled_dot_product_attention` alone."""
        self.call: LiveCall | None = None
        self.inside = self.by_sdpa = False
        self.products: list[tuple[Tensor, Tensor, torch.Size]] = []
        self.hidden = ""
        self.versions: list[tuple[Tensor, int]] = []

    def keep(self, *tensors: Tensor | None) -> None:
        """Remember in which state tensors were seen: what is overwritten until the layer returns is not read."""
        self.versions += [(one, one._version) for one in tensors if one is not None]

    def enter_sdpa(self, args: Any, kwargs: Any) -> None:
        given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
        if given["query"].is_nested:
            self.call = LiveCall(why=NESTED_TENSORS)
            return
        self._begin(given)
        self.inside = self.by_sdpa = True

    def _begin(self, given: dict[str, Any]) -> None:
        q, k, v, mask = given["query"], given["key"], given["value"], first_named(given, MASKS)
        self.call = LiveCall(q, k, v, scale=_scale_of(q, given), causal=is_causal(given), mask=mask)
        self.keep(q, k, v, mask)

    def see(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note one operator."""
        hidden = higher_order_name(operator)
        if hidden is not None:
            self.hidden = self.hidden or f"its logits are computed inside {hidden}"
            return
        if any(isinstance(one, Tensor) and one.is_nested for one in (*args, result)):
            self.hidden = self.hidden or NESTED_TENSORS
            return
        name = operator.overloadpacket.__name__
        if name in ("_softmax", "_safe_softmax") and (self.call is None or self.inside):
            self._see_softmax(args[0], result)
        elif operator.namespace == "aten" and name.startswith("_scaled_dot_product"):
            self._see_fused(operator, args, kwargs, result)
        elif self.inside:
            return
        elif name in ("bmm", "baddbmm"):
            a, b = args[-2:] if name == "baddbmm" else args[:2]
            self._see_product(a, b, result.shape)
        elif operator.namespace not in TORCH_OPERATORS and self.call is None:
            self._see_foreign(operator, args, kwargs, result)

    def _see_fused(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self.call is None:  # inside a function of torch that hides `scaled_dot_product_attention`
            self._begin(operator_arguments(operator, args, kwargs))
        elif not self.inside:
            return
        assert self.call is not None and self.call.q is not None
        q, returned = self.call.q, dict(zip(return_names(operator), result, strict=False))
        lse = returned.get("logsumexp", returned.get("log_sumexp"))
        if lse is not None and lse.numel() and lse.dim() == q.dim() - 1:
            self.call.lse = lse[..., : q.shape[-2]]  # it may be padded

    def _see_softmax(self, logits: Tensor, result: Tensor) -> None:
        if self.call is None:
            self.call = LiveCall()
            same = [(a, b) for a, b, shape in self.products if shape[-2:] == logits.shape[-2:]]
            whole = [(a, b) for a, b in same if a.shape[0] * a.shape[1] * b.shape[2] == logits.numel()]
            if len(whole) == 1 and logits.dim() > 2:
                q, k = whole[0][0], whole[0][1].mT
                self.call.q, self.call.k = (part.reshape(*logits.shape[:-2], *part.shape[1:]) for part in (q, k))
        self.call.logits, self.call.probabilities = logits, result
        self.keep(logits, result)

    def _see_product(self, a: Tensor, b: Tensor, shape: torch.Size) -> None:
        if self.call is None:
            self.products.append((a, b, shape))
        elif self.call.probabilities is not None and self.call.v is None and a.dim() == 3:
            p = self.call.probabilities
            if a.shape[-2:] == p.shape[-2:] and a.numel() == p.numel():
                self.call.v = b.reshape(*p.shape[:-2], *b.shape[1:])

    def _see_foreign(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = operator_arguments(operator, args, kwargs)
        parts = [part for names in NAMES if (part := first_named(given, names)) is not None]
        title = str(operator.overloadpacket)
        if len(parts) < 3:
            self.hidden = self.hidden or f"its logits may be computed inside {title}"
            return
        call = LiveCall(foreign=title)
        if any(part.dim() != 4 for part in parts) or any(first_named(given, names) is not None for names in SEQUENCES):
            call.why = f"{title} was given several sequences in one"
        else:
            _read_foreign(call, self.site.num_heads, parts, given, result)
        self.call = call


def _read_foreign(call: LiveCall, heads: int, parts: Sequence[Tensor], given: dict[str, Any], result: Any) -> None:
    """Read the arguments of an operator; its log-sum-exp is the only output of that shape, still to be checked."""
    q, k, v = parts
    before, after = q.shape[1] == heads, q.shape[2] == heads
    if before == after:
        call.why = f"whether {call.foreign} has heads before tokens or after them cannot be seen"
        return
    call.q, call.k, call.v = (q, k, v) if before else (part.transpose(1, 2) for part in parts)
    call.scale, call.causal = _scale_of(call.q, given), is_causal(given)
    call.mask = first_named(given, MASKS)
    returned = result if isinstance(result, (tuple, list)) else (result,)
    found = [one for one in returned if isinstance(one, Tensor) and one.shape == call.q.shape[:3]]
    if len(found) == 1:
        call.lse = found[0]
    else:
        call.why = f"{call.foreign} returns no log-sum-exp"


def _scale_of(q: Tensor, given: dict[str, Any]) -> float:
    scale = given_scale(given)
    return q.shape[-1] ** -0.5 if scale is None else scale


Seen = Callable[[int, LiveCall], None]
Streamed = Callable[[int, str, Tensor], None]


class LiveHooks:
    """Hooks of attention layers, for as long as they are attached.

    Only passes in training mode count, once each: what activation checkpointing runs again in the backward pass is left
    out, and so is evaluation, by ``model.eval()`` or in inference mode.

    `seen` is called with the number of a site and its call, in no mode of torch, without gradients, outside autocast;
    `streamed` with the number of a site, ``stream`` or ``added``, and what enters its block or what attention adds.
    """

    def __init__(
        self, model: nn.Module, sites: Sequence[AttentionSite], seen: Seen, streamed: Streamed | None = None
    ) -> None:
        """Read where the blocks are; nothing is hooked yet."""
        self.model, self.sites, self.seen, self.streamed = unwrap(model), list(sites), seen, streamed
        self.compiled = is_compiled(model)
        self.kernels = KernelWatch()
        self.sdpa = _LiveSdpa(self.kernels)
        self.running: int | None = None
        self.fused: set[int] = set()
        """Layers that called `scaled_dot_product_attention`: the next time no operator outside of it is watched."""
        self.why: list[str] = [_never_seen(site) or NOT_CALLED for site in sites]
        """Of every site, why nothing was seen yet; empty where its kernel was."""
        self.blocks = [] if streamed is None else find_blocks(self.model, sites)
        self.handles: list[RemovableHandle] = []
        self.given: set[int] = set()
        """Layers whose W_O has shown what they add, in the call that is running."""

    def attach(self) -> None:
        """Put the hooks in place; what is compiled gets none, since that would have it compiled again."""
        self.detach()
        compiled = {id(site) for site in self.sites if self.compiled or is_compiled(self.model, _path(site))}
        for number, site in enumerate(self.sites):
            if id(site) in compiled:
                self.why[number] = COMPILED
            elif not _never_seen(site):
                self._hook(site.module, partial(self._enter, number), partial(self._leave, number))
        numbers = {id(site): number for number, site in enumerate(self.sites)}
        for block in self.blocks:
            inside = [numbers[id(site)] for site in block.sites if id(site) not in compiled]
            if not inside:
                continue
            self._hook(block.module, partial(self._stream, inside), None)
            for number in inside:
                site = self.sites[number]
                if site.o is not None and site.o.owner is not site.module:
                    self._hook(site.o.owner, None, partial(self._added, number))
                self._hook(site.module, None, partial(self._added_by_layer, number))

    def detach(self) -> None:
        """Remove them."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def __reduce__(self) -> Any:
        """A copy of a model, or a file of one, takes the hooks along: there they do nothing."""
        return _silent, ()

    def _hook(self, module: nn.Module, before: Any, after: Any) -> None:
        if before is not None:
            self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if after is not None:
            # In front, so that of several monitors the last one to enter a layer is the first one to leave it.
            leaves = after.func.__name__ == "_leave"
            self.handles.append(module.register_forward_hook(after, always_call=leaves, prepend=leaves))

    def _enter(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.sites or not _counts(module):
            return
        if self.running is not None:
            self.why[number] = NESTED
            return
        self.running = number
        trace = _Trace(self.sites[number], every_operator=number not in self.fused)
        self.kernels.trace = trace  # type: ignore[assignment]
        if trace.every_operator:
            self.kernels.__enter__()
        self.sdpa.__enter__()

    def _leave(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self.running != number:
            return
        trace: Any = self.kernels.trace
        self.sdpa.__exit__(None, None, None)
        if trace.every_operator:
            self.kernels.__exit__(None, None, None)
        self.kernels.trace, self.running = None, None
        if output is None:  # an error on its way
            return
        call = trace.call
        if call is None:
            self.why[number] = trace.hidden or (NO_KERNEL if trace.every_operator else CHANGED)
            self.fused.discard(number)
            return
        if trace.by_sdpa:
            self.fused.add(number)
        if any(part is not None and type(part) is not Tensor for part in call.tensors()):
            call = LiveCall(why=OTHER_TENSORS)
        elif any(tensor._version != version for tensor, version in trace.versions):
            call = LiveCall(why="the layer overwrites what its kernel got or gave")
        call = _with_heads(call, self.sites[number].num_heads)
        call.cross = self.sites[number].cross
        self.why[number] = call.why
        with without_modes():
            self.seen(number, call)

    def _stream(self, numbers: list[int], module: nn.Module, args: Any, kwargs: Any) -> None:
        tensor = first_tensor((*args, *kwargs.values())) if _counts(module) else None
        self._give(numbers, "stream", tensor)

    def _added(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        self._give([number], "added", first_tensor(output) if _counts(module) else None)
        self.given.add(number)

    def _added_by_layer(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        """Where W_O is a weight that is used without calling its module, or is none."""
        if number not in self.given:
            self._give([number], "added", first_tensor(output) if _counts(module) else None)
        self.given.discard(number)

    def _give(self, numbers: list[int], what: str, tensor: Tensor | None) -> None:
        if tensor is not None and self.streamed is not None and tensor.is_floating_point():
            plain = plain_tensor(tensor)
            if plain is None:
                return
            with without_modes():
                for number in numbers:
                    self.streamed(number, what, plain)


def _silent() -> LiveHooks:
    return LiveHooks(nn.Identity(), [], _ignore)


def _ignore(number: int, call: LiveCall) -> None:
    return


def is_compiled(model: nn.Module, name: str = "") -> bool:
    """Whether torch.compile stands around a model, or around the part of it that is called by this name."""
    if not name:
        return any(hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in wrappers(model))
    parts = name.split(".")
    holders = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1))
    return "_orig_mod" in parts or any(one._compiled_call_impl is not None for one in holders)


def _with_heads(call: LiveCall, num_heads: int) -> LiveCall:
    """The call with tensors of (samples, heads, tokens, ...)."""
    for name in ("q", "k", "v", "logits", "probabilities"):
        part = getattr(call, name)
        if part is not None and part.dim() != 4:
            found = by_head(part, num_heads)
            if found is None:
                return LiveCall(why="the heads of its attention map could not be separated")
            setattr(call, name, found)
    return call


def _counts(module: nn.Module) -> bool:
    """Whether a call belongs to a pass that is to be seen."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return module.training and not in_backward()


def _path(site: AttentionSite) -> str:
    return site.name[: -len(site.stream)].rstrip(".") if site.stream else site.name


def _never_seen(site: AttentionSite) -> str:
    if site.stream:
        return SECOND_STREAM
    return OTHER_SOFTMAX if site.kind != "softmax" else ""
