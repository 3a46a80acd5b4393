"""Gains of normalised queries and keys: where W_Q and W_K cannot reach the size of the logits, these can."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellcond.attention.names import QK_GAINS, QK_NORM
from wellcond.attention.sharding import full_tensor, is_distributed
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot


@dataclass(frozen=True, eq=False)
class Gain:
    """What multiplies normalised queries or keys of one layer."""

    name: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    offset: float
    """Queries are multiplied by weight + offset: 0, or 1 where the weight starts at zero (Gemma)."""
    num_heads: int
    """Heads that have entries of their own; 1 for a gain that all heads share."""

    def scaled(self, factors: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The parameters and their new values, for factors of each head (of each that has entries of its own)."""
        weight = full_tensor(self.weight.detach())
        entries = factors.to(weight).repeat_interleave(weight.numel() // len(factors)).view(weight.shape)
        yield self.weight, (weight + self.offset) * entries - self.offset
        if self.bias is not None:
            yield self.bias, full_tensor(self.bias.detach()) * entries


def find_gains(site: AttentionSite) -> tuple[dict[str, Gain], str]:
    """The gains of queries and keys of a layer that normalises them; none, with the reason, if one was not found."""
    if site.qk_norm is None or site.kind == "cross_covariance":
        return {}, "it does not normalise its queries and keys one by one"
    found: dict[str, Gain] = {}
    for role in ("query", "key"):
        gain = _find_gain(site, role)
        if isinstance(gain, str):
            return {}, gain
        found[role] = gain
    if found["query"].weight is found["key"].weight:
        return {}, "its queries and keys share a gain"
    return found, ""


def _find_gain(site: AttentionSite, role: str) -> Gain | str:
    slot = site.by_role(role)
    own = slot.owner._parameters.get(QK_GAINS[role])
    if own is not None:
        return Gain(QK_GAINS[role], own, None, 0.0, 1)
    children = dict(site.module.named_children())
    for query_name in QK_NORM:
        key_name = query_name.replace("query", "key") if "query" in query_name else query_name.replace("q", "k", 1)
        if query_name in children and key_name in children and query_name != key_name:
            name = query_name if role == "query" else key_name
            return _gain_of_norm(name, children[name], slot)
    return "its QK-norm has no gain that could be found"


def _gain_of_norm(name: str, norm: nn.Module, slot: Slot) -> Gain | str:
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
    sizes = {slot.head_dim: 1, slot.num_heads * slot.head_dim: slot.num_heads}
    if weight is None:
        return f"its QK-norm {name} has no gain"
    if weight.numel() not in sizes:
        return f"the gain of its QK-norm, {name}.weight of {weight.numel()} entries, is not by head"
    if is_distributed(weight):
        return f"the gain of its QK-norm, {name}.weight, is sharded"
    if bias is None or bias.shape == weight.shape:
        for offset in (0.0, 1.0):
            gain = Gain(f"{name}.weight", weight, bias, offset, sizes[weight.numel()])
            if _multiplies(norm, gain):
                return gain
    return f"its QK-norm {name} ({type(norm).__name__}) does not multiply by its gain"


@torch.no_grad()
def _multiplies(norm: nn.Module, gain: Gain) -> bool:
    """Whether the norm puts out twice as much when its gain is doubled."""
    twice = copy.deepcopy(norm)
    names = {id(parameter): name for name, parameter in norm.named_parameters()}
    for parameter, values in gain.scaled(gain.weight.new_full((1,), 2.0)):
        twice.get_parameter(names[id(parameter)]).copy_(values)
    width = gain.weight.numel()
    x = torch.linspace(-1, 2, 2 * width, device=gain.weight.device, dtype=gain.weight.dtype).view(1, 2, width)
    return torch.allclose(twice(x), 2 * norm(x), rtol=1e-2)
