"""One observation of a forward pass: the only code that hooks a model.

`record` runs the model once in evaluation mode; `observe` hooks a pass that somebody else runs (a training step).
Only the fields asked for are copied. What was asked for and not seen stands in `SiteRecord.not_seen` with the reason;
its value is None, which nobody may take for zero. The model is left as it was, also after an error.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wellcond.attention.evaluation import copy_argument, eval_scope, first_tensor, run
from wellcond.attention.kernels import ADDED, KernelTrace, KernelWatch, is_masked
from wellcond.attention.sharding import is_distributed, reshard_
from wellcond.attention.site import AttentionSite, Block, find_blocks, is_matrix
from wellcond.errors import WeightError
from wellcond.linalg.spectrum import spectrum

Field = Literal["arguments", "tokens", "products", "logits", "probabilities", "spread", "heads", "output", "stream"]
KERNEL_FIELDS = frozenset({"products", "logits", "probabilities"})
ROLES = ("query", "key", "value")
COMPARED_KINDS = ("softmax", "channel")
"""Attention layers whose first softmax is of logits that grow with Q and K."""
NOT_CALLED = "the forward pass on this batch does not call it"
JOINED = "it is a second stream of an attention layer, of which the first is watched"
NESTED = "it runs inside another attention layer"
HOW_TO_SEE = (
    "run it with scaled_dot_product_attention or plain matrix products, in Hugging Face models "
    'model.set_attn_implementation("sdpa")'
)
"""What to do where no softmax is visible; training may use any kernel."""
SINGLE_PRECISION = 1e-6
"""Singular values below this, relative to the largest, are rounding of float32 tokens."""


@dataclass(eq=False)
class SiteRecord:
    """The first call of an attention layer in a forward pass; everything is None, or empty, unless asked for and seen.

    The kernel's tensors (`logits`, `probabilities`, `mask`, `products`, `softmaxes`) are dropped after the caller's
    `each` has seen them.
    """

    site: AttentionSite
    fields: frozenset[str] = frozenset()
    count: int = 0
    """How often the layer was called."""
    seen: bool = False
    """Whether its first call was watched to the end."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    argument: Tensor | None = None
    """The first tensor of the call."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Tokens that the projections read, by role; none for one whose weight is used without calling its module, nor for
    one that is called several times."""
    heads: Tensor | None = None
    """What W_O read, where W_O is a module that is called inside this layer."""
    output: Any = None
    """The first tensor that it returned."""
    spread: Tensor | None = None
    """Standard deviation of every head's logits over the keys that a token may see, (heads)."""
    block: Block | None = None
    """Of the stream before and after; None for a layer that stands in no block."""
    trace: KernelTrace = field(default_factory=KernelTrace, repr=False)
    not_seen: dict[str, str] = field(default_factory=dict)
    """What was asked for and not seen, with the reason."""
    repeated: set[str] = field(default_factory=set, repr=False)

    @property
    def called(self) -> bool:
        """Whether the batch reaches it."""
        return self.count > 0

    @property
    def products(self) -> list[tuple[Tensor, Tensor]]:
        """Operands of all matrix products, (batch, rows, columns) each."""
        return self.trace.products or []

    @property
    def softmaxes(self) -> list[tuple[Tensor, Tensor]]:
        """Logits and probabilities of all softmaxes; those of fused kernels are computed again."""
        return self.trace.softmaxes or []

    @property
    def logits(self) -> Tensor | None:
        """What the first softmax read: (..., N, M), heads where the kernel has them."""
        return self.softmaxes[0][0] if self.softmaxes else None

    @property
    def probabilities(self) -> Tensor | None:
        """What the first softmax gave."""
        return self.softmaxes[0][1] if self.softmaxes else None

    @property
    def mask(self) -> Tensor | None:
        """True where a query may see a key, where a fused kernel got a boolean mask or none at all."""
        masks = self.trace.masks
        return masks[0] if masks and len(self.softmaxes) in (0, len(masks)) else None

    @property
    def why_logits_hidden(self) -> str:
        """Why its logits were not seen; empty if they were, or if it has none that grow with Q and K."""
        if not self.seen:
            return JOINED if self.called and self.site.stream else ""
        why = self.not_seen.get("logits", self.not_seen.get("spread", ""))
        return why if self.site.kind in COMPARED_KINDS else ""

    def samples(self) -> Tensor | None:
        """The tokens of its queries as (samples or windows, tokens, width); None where they are not known."""
        tokens, width = self.inputs.get("query", self.argument), self.site.in_features
        if tokens is None or tokens.dim() < 2:
            return None
        if tokens.dim() == 4 and tokens.shape[1] == width and tokens.shape[-1] != width:
            return tokens.flatten(2).mT  # channels first, before a 1 x 1 convolution
        if tokens.shape[-1] != width:
            return None
        if tokens.dim() == 3 and not getattr(self.site.module, "batch_first", True):
            return tokens.transpose(0, 1)
        return tokens.flatten(1, -2) if tokens.dim() > 2 else tokens[None]

    def conclude(self) -> None:
        """Reduce the logits to their spread, and write down what was asked for and not seen.

        Raises: WeightError if the spread is asked for and the heads are spread over processes.
        """
        if "spread" in self.fields and self.logits is not None and self.site.kind in COMPARED_KINDS:
            self.spread = _spread_of(self.site, self.logits, self.mask)
        if self.seen:
            self.not_seen = dict(_missing(self))
        else:
            why = NESTED if self.called else NOT_CALLED
            self.not_seen = dict.fromkeys(self.fields, JOINED if self.called and self.site.stream else why)


@dataclass(frozen=True, eq=False)
class ForwardRecord:
    """What one forward pass showed."""

    sites: list[SiteRecord]
    """In the order in which the sites were given."""
    blocks: list[Block]
    """Of the attention layers, in their order; empty unless the stream was asked for."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    """What the modules asked for put out in their first call, by name."""

    @property
    def not_called(self) -> tuple[str, ...]:
        """Names of attention layers that this batch does not reach."""
        return tuple(one.site.name for one in self.sites if not one.called)


def record(
    model: nn.Module,
    batch: Any,
    sites: Sequence[AttentionSite],
    fields: Collection[Field] = get_args(Field),
    **options: Any,
) -> ForwardRecord:
    """Run a model once, in evaluation mode and without gradients, and return what each attention layer did.

    Args:
        model: any model.
        batch: a tensor, a mapping of keyword arguments, a tuple of arguments, or a function that calls the model.
        sites: its attention layers.
        fields: what to keep of each: ``arguments`` of the call; ``tokens`` that the projections read; ``products``, the
            operands of all matrix products; ``logits`` with the mask; ``probabilities``; ``spread``, the standard
            deviation of the logits; ``heads``, what W_O read; the ``output``; the ``stream`` (what its block received,
            and what attention and MLP added). All by default.
        **options: `each`, `outputs`, `modules` and `copied` of `observe`.

    Example:
        >>> from wellcond import find_attention
        >>> attention = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> seen = record(attention, (x, x, x), find_attention(attention)).sites[0]
        >>> seen.logits.shape, sorted(seen.not_seen)
        (torch.Size([2, 5, 5]), ['heads', ...])
    """
    try:
        with observe(model, sites, fields, **options) as found, eval_scope(model):
            run(model, batch)
    finally:
        reshard_(model)  # without a backward pass FSDP2 may keep full weights, which the next update would leave behind
    return found


@contextlib.contextmanager
def observe(
    model: nn.Module,
    sites: Sequence[AttentionSite],
    fields: Collection[Field],
    *,
    each: Callable[[SiteRecord], None] | None = None,
    outputs: Sequence[str] = (),
    modules: Any = None,
    copied: Callable[[AttentionSite, Tensor], Tensor] | None = None,
) -> Iterator[ForwardRecord]:
    """Hook a model while somebody else runs it; nothing of the pass is changed.

    Args:
        model: any model.
        sites: its attention layers.
        fields: what to keep of each, see `record`.
        each: called with the record of every site as soon as its first call has returned. The kernel's tensors are
            dropped afterwards, so that no more than one layer's attention maps are held.
        outputs: names of modules whose outputs to keep.
        modules: an object that looks at every module: ``entered(name, module, args, kwargs)`` when it is called,
            ``left(name, module, args, output)`` when it returns.
        copied: how a tensor of the arguments is copied; `torch.clone` by default.
    """
    wanted = frozenset(fields)
    blocks = find_blocks(model, sites) if "stream" in wanted else []
    around = {id(site): block for block in blocks for site in block.sites}
    found = ForwardRecord([SiteRecord(site, wanted, block=around.get(id(site))) for site in sites], blocks)
    hooks = _Hooks(wanted, each, copied or (lambda _, tensor: tensor.clone()))
    with contextlib.ExitStack() as stack:
        handles = [_module_hooks(model, modules), *(_block_hooks(block) for block in blocks)]
        handles += [_output_hooks(model, outputs, found.outputs), *(hooks.of_site(one) for one in found.sites)]
        for some in handles:
            for handle in some:
                stack.callback(handle.remove)
        if wanted & {*KERNEL_FIELDS, "spread"}:
            hooks.kernels = stack.enter_context(KernelWatch())
        yield found
    for one in found.sites:
        if not one.seen:
            one.conclude()


@dataclass(eq=False)
class _Hooks:
    """The hooks of attention layers; of nested ones the kernels of the outermost are watched, in its first call."""

    wanted: frozenset[str]
    each: Callable[[SiteRecord], None] | None
    copied: Callable[[AttentionSite, Tensor], Tensor]
    kernels: KernelWatch | None = None
    running: list[SiteRecord] = field(default_factory=list)

    def of_site(self, one: SiteRecord) -> Iterator[RemovableHandle]:
        site = one.site
        yield site.module.register_forward_pre_hook(partial(self.enter, one), with_kwargs=True)
        yield site.module.register_forward_hook(partial(self.leave, one))
        for role in ROLES if "tokens" in self.wanted else ():
            owner = site.by_role(role).owner
            if owner is not site.module:
                yield owner.register_forward_pre_hook(partial(self.read, one, role), with_kwargs=True)
        if "heads" in self.wanted and site.o is not None and site.o.owner is not site.module:
            yield site.o.owner.register_forward_pre_hook(partial(self.read, one, "output"), with_kwargs=True)

    def enter(self, one: SiteRecord, module: nn.Module, args: Any, kwargs: Any) -> None:
        one.count += 1
        if one.count > 1 or (self.running and self.kernels is not None):
            return
        self.running.append(one)
        if "arguments" in self.wanted:
            memo: dict[int, Any] = {}
            cast = partial(self.copied, one.site)
            one.args, one.kwargs = copy_argument(args, memo, cast), copy_argument(kwargs, memo, cast)
            one.argument = first_tensor((*one.args, *one.kwargs.values()))
        elif "tokens" in self.wanted:
            one.argument = _clone(first_tensor((*args, *kwargs.values())))
        if self.kernels is not None:
            products: list[tuple[Tensor, Tensor]] | None = [] if "products" in self.wanted else None
            one.trace = self.kernels.trace = KernelTrace(products, softmaxes=[], scale=one.site.scale)

    def leave(self, one: SiteRecord, module: nn.Module, args: Any, output: Any) -> None:
        if one not in self.running:
            return
        self.running.remove(one)
        one.seen = True
        if self.kernels is not None:
            self.kernels.trace = None
        tensor = first_tensor(output)
        if "output" in self.wanted:
            one.output = _clone(tensor)
        own_output = one.site.o is None or any(one.site.o.owner is part for part in one.site.module.modules())
        if one.block is not None and own_output and tensor is not None:
            # W_O may be a weight that is used without calling its module (`nn.MultiheadAttention`).
            one.block.attention.setdefault(one.site.name, rms(tensor))
        one.conclude()
        if self.each is not None:
            self.each(one)
        if self.each is not None or not one.fields & KERNEL_FIELDS:
            one.trace = KernelTrace()

    def read(self, one: SiteRecord, role: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensor = first_tensor((*args, *kwargs.values()))
        if tensor is None or one not in self.running:
            return
        if role == "output":
            one.heads = _clone(tensor) if one.heads is None else one.heads
        elif role in one.inputs or role in one.repeated:
            one.repeated.add(role)
            one.inputs.pop(role, None)
        else:
            one.inputs[role] = tensor.detach().clone()


def _module_hooks(model: nn.Module, observer: Any) -> Iterator[RemovableHandle]:
    for name, module in model.named_modules() if observer is not None else ():
        yield module.register_forward_pre_hook(partial(observer.entered, name), with_kwargs=True)
        yield module.register_forward_hook(partial(observer.left, name))


def _output_hooks(model: nn.Module, names: Sequence[str], kept: dict[str, Tensor]) -> Iterator[RemovableHandle]:
    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            kept.setdefault(name, tensor.detach())

    for name in names:
        yield model.get_submodule(name).register_forward_hook(partial(keep, name))


def _block_hooks(block: Block) -> Iterator[RemovableHandle]:
    inside = tuple(f"{site.name.removeprefix(block.name + '.')}." for site in block.sites)
    outputs = {id(site.o.owner): site for site in block.sites if site.o is not None}
    last: list[tuple[nn.Module, Tensor]] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        received = first_tensor((*args, *kwargs.values()))
        if block.stream is None and received is not None:
            block.stream = rms(received)
            last.append((block.module, received))

    def after(*_: Any) -> None:
        if len(last) > 1 and block.mlp is None and last[-1][1].numel() == last[0][1].numel():
            block.mlp, block.mlp_added = last[-1][0], rms(last[-1][1])
        last.clear()

    def put_out(module: nn.Module, _: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if not last or tensor is None:
            return
        if id(module) in outputs:
            block.attention.setdefault(outputs[id(module)].name, rms(tensor))
        else:
            last[1:] = [(module, tensor)]

    yield block.module.register_forward_pre_hook(before, with_kwargs=True)
    yield block.module.register_forward_hook(after)
    for name, module in block.module.named_modules():
        of_attention = id(module) in outputs and module is not outputs[id(module)].module
        if of_attention or (is_matrix(module) and not f"{name}.".startswith(inside)):
            yield module.register_forward_hook(put_out)


# What was not seen


def _missing(one: SiteRecord) -> Iterator[tuple[str, str]]:
    """Fields that were asked for and not seen, with the reasons."""
    if "tokens" in one.fields:
        for role in ROLES:
            if role not in one.inputs:
                how = "is called several times" if role in one.repeated else "is used without calling its module"
                yield f"{role} tokens", f"its projection {how}"
    hidden = _why_no_logits(one) if one.trace.softmaxes is not None and not one.softmaxes else ""
    for name in ("logits", "probabilities", "spread"):
        if name in one.fields and hidden:
            yield name, hidden
    if "heads" in one.fields and one.heads is None:
        yield "heads", "it has no W_O" if one.site.o is None else "W_O is used without calling its module"
    if "output" in one.fields and one.output is None:
        yield "output", "it returns no tensor"
    if "stream" in one.fields and one.block is None:
        yield "stream", "it stands in no block with an MLP"


def _why_no_logits(one: SiteRecord) -> str:
    names = ", ".join(dict.fromkeys(one.trace.operators))
    inside = f"it is computed inside {names}" if names else "its kernel is none of torch's operators"
    return f"no softmax was visible: {inside}"


# Reading what was seen


def same_numbers(weights: Tensor, p: Tensor) -> bool:
    """Whether one operand of a product is what a softmax gave, in another shape or dtype."""
    if weights.numel() != p.numel() or weights.shape[-2:] != p.shape[-2:]:
        return False
    return torch.equal(p.reshape_as(weights).to(weights.dtype), weights)


def by_head(tensor: Tensor, num_heads: int) -> Tensor | None:
    """Logits or probabilities as (samples, heads, queries, keys); None if the heads cannot be separated."""
    if tensor.dim() == 3 and tensor.shape[0] % num_heads == 0:
        return tensor.view(-1, num_heads, *tensor.shape[1:])
    if tensor.dim() == 5 and tensor.shape[1] * tensor.shape[2] == num_heads:
        return tensor.flatten(1, 2)
    return tensor if tensor.dim() == 4 and tensor.shape[1] == num_heads else None


def _spread_of(site: AttentionSite, logits: Tensor, visible: Tensor | None) -> Tensor:
    if is_distributed(site.q.parameter) and logits.dim() == 4 and logits.shape[1] != site.num_heads:
        raise WeightError(
            f"{site.name}: its heads are spread over processes (tensor parallelism), so that none sees the logits of "
            "all; do this before the model is parallelised"
        )
    return logit_spread(logits, site.num_heads, visible)


def logit_spread(logits: Tensor, num_heads: int, visible: Tensor | None = None) -> Tensor:
    """Standard deviation over keys, in the mean over tokens and samples: (heads).

    The mean over all heads, repeated, if the heads cannot be separated.
    """
    seen = ~is_masked(logits, visible, depth=ADDED)
    logits = logits.detach().float()
    count = seen.sum(-1)
    mean = torch.where(seen, logits, 0.0).sum(-1) / count.clamp_min(1)
    square = torch.where(seen, (logits - mean[..., None]).square(), 0.0).sum(-1) / count.clamp_min(1)
    several = (count > 1)[..., None]

    def total(part: Tensor) -> Tensor:
        heads = by_head(part, num_heads)
        return part.sum() if heads is None else heads.sum((0, 2, 3))

    return (total(square.sqrt()[..., None] * several) / total(several).clamp_min(1)).expand(num_heads)


def rms(tensor: Tensor) -> Tensor:
    """Root mean square over all entries, as a tensor: nothing waits for the device."""
    return tensor.detach().float().square().mean().sqrt()


def root_mean_square(tensor: Tensor) -> float:
    """Root mean square over all entries."""
    return float(rms(tensor))


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def kappa_of_tokens(sample: Tensor) -> float:
    """Condition number of a sample (tokens, width), over distinct tokens and non-zero singular values; NaN for one.

    Without positions in them, the same word gives the same token twice.
    """
    distinct = torch.unique(sample.detach().float().cpu(), dim=0)
    return spectrum(distinct, rtol=SINGLE_PRECISION).pseudo_condition_number if len(distinct) > 1 else math.nan
