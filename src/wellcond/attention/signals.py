"""What goes through a model's blocks on a batch: the spread of the logits, and what each block adds to its stream.

A block is the nearest module around an attention that also holds matrices of another kind, those of its MLP. What it
receives is the stream; the attention adds what W_O puts out, the MLP what its last matrix puts out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention.record import JOINED, SiteCall, first_tensor, watch_sites
from wellcond.attention.sharding import is_distributed, reshard_
from wellcond.attention.site import AttentionSite
from wellcond.errors import WeightError

MASKED = 50.0
"""Logits that far below the largest of their row are masked: libraries add -100, -1e4 or -inf."""
COMPARED_KINDS = ("softmax", "channel")
"""Attentions whose first softmax is of logits that grow with Q and K."""
HOW_TO_SEE = (
    "run it with scaled_dot_product_attention or plain matrix products, in Hugging Face models "
    'model.set_attn_implementation("sdpa")'
)
"""What to do where no softmax is visible; training may use any kernel."""


@dataclass(eq=False)
class BlockSignals:
    """Root mean squares of what a block received and of what its parts added; None where that was not seen."""

    name: str
    module: nn.Module
    sites: list[AttentionSite]
    stream: float | None = None
    attention: dict[str, float] = field(default_factory=dict)
    """By the name of the site."""
    mlp: nn.Module | None = None
    """The last matrix of the MLP."""
    mlp_added: float | None = None

    @property
    def scales_itself(self) -> bool:
        """Whether learned scales stand between the parts and the stream (LayerScale, XCiT's and CaiT's gamma)."""
        inside = self.module.modules()
        scales = any(type(module).__name__ == "LayerScale" or "layer_scale" in module._parameters for module in inside)
        return scales or any(name.startswith("gamma") for name in self.module._parameters)


@dataclass(frozen=True, eq=False)
class Signals:
    """What one forward pass showed."""

    spreads: dict[str, Tensor]
    """By the name of the attention: standard deviation of every head's logits over the keys that a token may see."""
    blocks: list[BlockSignals]
    """In the order of their attentions."""
    outputs: dict[str, Tensor]
    """What the modules asked for put out, by name."""
    not_seen: dict[str, str]
    """By the name of the attention layer: why its logits were not seen; no entry where they were, or where there are
    none that grow with Q and K."""
    not_called: tuple[str, ...] = ()
    """Attention layers that this batch does not reach."""


def read_signals(
    model: nn.Module,
    batch: Any,
    sites: Sequence[AttentionSite],
    *,
    outputs: Sequence[str] = (),
    observe: Callable[[AttentionSite, SiteCall], None] | None = None,
) -> Signals:
    """Run the model once, in evaluation mode and without gradients; nothing of it is left changed.

    Args:
        model: any model.
        batch: a tensor, a mapping of keyword arguments, a tuple of arguments, or a function that calls the model.
        sites: its attentions.
        outputs: names of modules whose outputs to keep.
        observe: called with every site and its first call, as soon as that has returned.
    """
    blocks = find_blocks(model, sites)
    spreads: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    not_seen: dict[str, str] = {}

    def finish(site: AttentionSite, call: SiteCall) -> None:
        if site.kind in COMPARED_KINDS and not call.softmaxes:
            not_seen[site.name] = _why_not_seen(call)
        elif site.kind in COMPARED_KINDS:
            logits = call.softmaxes[0][0]
            if is_distributed(site.q.parameter) and logits.dim() == 4 and logits.shape[1] != site.num_heads:
                raise WeightError(
                    f"{site.name}: its heads are spread over processes (tensor parallelism), so that none sees the "
                    "logits of all; do this before the model is parallelised"
                )
            spreads[site.name] = logit_spread(logits, site.num_heads)
        if site.o is None or any(site.o.owner is module for module in site.module.modules()):
            _note_attention(blocks, site, call.output)
        if observe is not None:
            observe(site, call)

    with contextlib.ExitStack() as stack:
        stack.callback(reshard_, model)  # a forward pass leaves whole weights of FSDP2 in place
        for block in blocks:
            for handle in _watch_block(block):
                stack.callback(handle.remove)
        for name in outputs:
            keep = _keeper(kept, name)
            stack.callback(model.get_submodule(name).register_forward_hook(keep).remove)
        counts = watch_sites(model, batch, sites, finish)
    for site, count in zip(sites, counts, strict=True):
        if site.stream and count and site.name not in spreads:
            not_seen[site.name] = JOINED
    not_called = tuple(site.name for site, count in zip(sites, counts, strict=True) if not count)
    return Signals(spreads, blocks, kept, not_seen, not_called)


def _why_not_seen(call: SiteCall) -> str:
    names = ", ".join(dict.fromkeys(call.kernels))
    inside = f"it is computed inside {names}" if names else "its kernel is none of torch's operators"
    return f"no softmax was visible: {inside}"


def find_blocks(model: nn.Module, sites: Sequence[AttentionSite]) -> list[BlockSignals]:
    """The blocks around attentions; none for an attention that stands alone."""
    inside = tuple(f"{site.name}." for site in sites)
    outputs = {id(site.o.owner) for site in sites if site.o is not None}
    others = [
        name
        for name, module in model.named_modules()
        if is_matrix(module) and id(module) not in outputs and not f"{name}.".startswith(inside)
    ]
    found: dict[str, BlockSignals] = {}
    for site in sites:
        parts = site.name.split(".")
        for name in (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)):
            module = model.get_submodule(name)
            called = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
            if called and any(other.startswith(f"{name}.") for other in others):
                found.setdefault(name, BlockSignals(name, module, [])).sites.append(site)
                break
    return list(found.values())


def is_matrix(module: nn.Module) -> bool:
    """Whether a module multiplies tokens by a matrix: a linear layer of any library, or a 1 x 1 convolution."""
    weight = module._parameters.get("weight")
    if weight is None or isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or weight.dim() < 2:
        return False
    return all(size == 1 for size in weight.shape[2:])


def logit_spread(logits: Tensor, num_heads: int) -> Tensor:
    """Standard deviation over keys, in the mean over tokens and samples: (heads), all alike if they cannot be told."""
    logits = logits.detach().float()
    if logits.dim() == 3 and logits.shape[0] % num_heads == 0:
        logits = logits.view(-1, num_heads, *logits.shape[1:])
    by_head = logits.dim() == 4 and logits.shape[1] == num_heads
    visible = logits > logits.amax(-1, keepdim=True) - MASKED
    count = visible.sum(-1)
    kept = torch.where(visible, logits, 0.0)
    mean = kept.sum(-1) / count.clamp_min(1)
    square = torch.where(visible, (logits - mean[..., None]).square(), 0.0).sum(-1) / count.clamp_min(1)
    several = count > 1
    axes = (0, 2) if by_head else tuple(range(square.dim()))
    spread = (square.sqrt() * several).sum(axes) / several.sum(axes).clamp_min(1)
    return spread if by_head else spread.expand(num_heads)


def root_mean_square(tensor: Tensor) -> float:
    """Over all entries."""
    return float(tensor.detach().float().square().mean().sqrt())


def _watch_block(block: BlockSignals) -> Iterator[torch.utils.hooks.RemovableHandle]:
    inside = tuple(f"{site.name.removeprefix(block.name + '.')}." for site in block.sites)
    outputs = {id(site.o.owner): site for site in block.sites if site.o is not None}
    last: list[tuple[nn.Module, Tensor]] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        received = first_tensor((*args, *kwargs.values()))
        if block.stream is None and received is not None:
            block.stream = root_mean_square(received)
            last.append((block.module, received))

    def after(*_: Any) -> None:
        if len(last) > 1 and block.mlp is None and last[-1][1].numel() == last[0][1].numel():
            block.mlp, block.mlp_added = last[-1][0], root_mean_square(last[-1][1])
        last.clear()

    def put_out(module: nn.Module, _: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if not last or tensor is None:
            return
        if id(module) in outputs:
            block.attention.setdefault(outputs[id(module)].name, root_mean_square(tensor))
        else:
            last[1:] = [(module, tensor)]

    yield block.module.register_forward_pre_hook(before, with_kwargs=True)
    yield block.module.register_forward_hook(after)
    for name, module in block.module.named_modules():
        of_attention = id(module) in outputs and module is not outputs[id(module)].module
        if of_attention or (is_matrix(module) and not f"{name}.".startswith(inside)):
            yield module.register_forward_hook(put_out)


def _note_attention(blocks: list[BlockSignals], site: AttentionSite, output: Any) -> None:
    """Where W_O is a weight that the attention uses without calling its module (`nn.MultiheadAttention`)."""
    tensor = first_tensor(output)
    for block in blocks:
        if site in block.sites and tensor is not None:
            block.attention.setdefault(site.name, root_mean_square(tensor))


def _keeper(kept: dict[str, Tensor], name: str) -> Any:
    def keep(_: nn.Module, __: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            kept.setdefault(name, tensor.detach())

    return keep
