"""Entries of stored weights by head, on the device and without waiting for it, for all that acts after every step.

`HeadView` reads and writes the heads of a whole tensor. `RowFactors` multiplies the entries of each head by a number,
also in a shard that holds parts of heads: it knows the head of every entry from a table that is made once, by writing
the numbers of the heads into a tensor as a slot writes weights. Axes along which the table does not change are dropped,
so that it is a vector in most layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.arguments import check_number, describe
from wellcond.attention.checks import Chosen, choose_sites
from wellcond.attention.sharding import is_distributed, local_shard, reshard_, to_local, unwrap
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot
from wellcond.errors import OptionError

NO_HEAD = -1


@dataclass(frozen=True, eq=False)
class HeadView:
    """The heads of one projection in a tensor stored like its weight, `joined` of them to a matrix."""

    slot: Slot
    joined: int = 1
    placed: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def take(self, stored: Tensor) -> Tensor:
        """(heads, out, in); the storage itself, where the heads follow each other and stand alone."""
        heads = self._read(stored)
        if self.joined == 1:
            return heads
        groups = heads.unflatten(0, (-1, self.joined))
        return groups.transpose(1, 2).flatten(2) if self.slot.heads_on_input else groups.flatten(1, 2)

    def put_(self, stored: Tensor, heads: Tensor) -> None:
        """Write what `take` returned."""
        if self.joined > 1 and self.slot.heads_on_input:
            heads = heads.unflatten(2, (self.joined, -1)).transpose(1, 2).flatten(0, 1)
        elif self.joined > 1:
            heads = heads.unflatten(1, (self.joined, -1)).flatten(0, 1)
        if self._is_view:
            self._read(stored).copy_(heads)
        elif self.slot.heads_on_input:
            self.slot.as_matrix(stored)[:, self._rows(stored.device)] = heads.transpose(0, 1)
        else:
            self.slot.as_matrix(stored)[self._rows(stored.device)] = heads

    @cached_property
    def _is_view(self) -> bool:
        return self.slot.by_head or self.slot.span is not None

    def _read(self, stored: Tensor) -> Tensor:
        slot = self.slot
        if slot.by_head:
            return slot.take_heads(stored)
        rows: Any = slot.span if self._is_view else self._rows(stored.device).flatten()
        sizes = tuple(slot.rows.shape)
        if slot.heads_on_input:
            return slot.as_matrix(stored)[:, rows].unflatten(1, sizes).transpose(0, 1)
        return slot.as_matrix(stored)[rows].unflatten(0, sizes)

    def _rows(self, device: torch.device) -> Tensor:
        """The rows on the device, sent there once: the host waits for every copy."""
        if device not in self.placed:
            self.placed[device] = self.slot.rows.to(device)
        return self.placed[device]


def heads_of_weight(slot: Slot) -> Tensor:
    """The head of every entry of a slot's stored weight, -1 for entries of no head; broadcastable to the weight.

    Example:
        >>> from torch import nn
        >>> from wellcond import find_attention
        >>> heads_of_weight(find_attention(nn.MultiheadAttention(4, 2))[0].k).flatten().tolist()
        [-1, -1, -1, -1, 0, 0, 1, 1, -1, -1, -1, -1]
    """
    heads = _blank(tuple(slot.parameter.shape))
    numbers = torch.arange(slot.num_heads, dtype=heads.dtype)
    slot.put_heads_(heads, numbers.view(-1, 1, 1).expand(slot.heads_shape))
    return _without_repeated_axes(heads)


def heads_of_bias(slot: Slot, bias: Tensor) -> Tensor:
    """The head of every entry of a slot's stored bias, -1 for entries of no head."""
    heads = _blank(tuple(bias.shape))
    rows = slot.rows if slot.bias_rows is None else slot.bias_rows
    heads.view(-1)[rows] = torch.arange(slot.num_heads, dtype=heads.dtype)[:, None].expand(rows.shape)
    return heads


def _blank(shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, NO_HEAD, dtype=torch.int16, device="cpu")


def _without_repeated_axes(heads: Tensor) -> Tensor:
    for axis in range(heads.dim()):
        first = heads.narrow(axis, 0, 1)
        if bool((heads == first).all()):
            heads = first
    return heads.contiguous()


def local_part(table: Tensor, stored: Tensor) -> Tensor:
    """The part of a table of `heads_of_weight` that belongs to what this process stores."""
    if not is_distributed(stored):
        return table
    shard = local_shard(stored)
    for axis, (offset, size) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
        if table.shape[axis] > 1:
            table = table.narrow(axis, min(offset, table.shape[axis]), size)
    return table


class RowFactors:
    """Multiplies entries of stored tensors by chosen entries of a vector of factors.

    Several projections in one tensor are multiplied at once. Nothing is read by the host, and no process waits for
    another: of a sharded tensor each multiplies its own shard.
    """

    def __init__(self) -> None:
        self._tables: dict[Tensor, Tensor] = {}
        self._placed: dict[Tensor, Tensor] = {}

    def add(self, stored: Tensor, heads: Tensor, numbers: Tensor) -> None:
        """Let the entries of head h of a stored tensor be multiplied by factor ``numbers[h]``; all others by the last.

        Args:
            stored: a parameter or buffer.
            heads: from `heads_of_weight` or `heads_of_bias`.
            numbers: (heads), positions in the vector that `multiply_` is given.
        """
        table = torch.where(heads == NO_HEAD, NO_HEAD, numbers[heads.long()])
        if stored in self._tables:
            table = torch.where(table == NO_HEAD, self._tables[stored], table)
        self._tables[stored] = table
        self._placed = {}

    @torch.no_grad()
    def multiply_(self, factors: Tensor) -> None:
        """Multiply in place by factors (count), the last of which is 1 and belongs to entries of no head."""
        for stored, table in self._tables.items():
            part = to_local(stored)
            if stored not in self._placed:
                self._placed[stored] = local_part(table, stored).to(part.device)
            part.mul_(factors[self._placed[stored]].to(part.device))


# Beside an optimiser


def check_from_zero(verb: str, **numbers: Any) -> None:
    """Raise OptionError unless these are finite numbers of at least 0, or None."""
    for name, value in numbers.items():
        try:
            if value is not None:
                check_number(name, value, at_least=0.0)
        except (TypeError, ValueError) as error:
            raise OptionError(f"{verb}: {error}") from error


def find_inside(model: nn.Module, sites: Chosen | None) -> tuple[nn.Module, list[AttentionSite]]:
    """The model inside its wrappers, with its weights as they are stored, and the attention layers that are chosen."""
    inner = unwrap(model)
    reshard_(inner)
    return inner, choose_sites(inner, sites)


class AfterStep:
    """What acts on the weights of attention layers after every step of an optimiser, by a hook of that.

    Args:
        verb: its name, for errors.
        model: the model, wrapped (DDP, fully_shard) if it is going to be.
        optimizer: made after the model was wrapped; or a list of several, in the order of their steps.
        sites: only these layers; all by default.

    Raises: TypeError for anything else than an optimiser.
    """

    def __init__(self, verb: str, model: nn.Module, optimizer: Any, sites: Chosen | None) -> None:
        given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        if not given or not all(isinstance(one, torch.optim.Optimizer) for one in given):
            raise TypeError(
                f"{verb}: expected a torch.optim.Optimizer, or a list of them in the order of their steps, got "
                f"{describe(optimizer)}; of a wrapper (Accelerate, DeepSpeed) give the optimiser inside"
            )
        self._verb, self._optimizers = verb, given
        self._inner, self._sites = find_inside(model, sites)
        self._handles: list[Any] = []

    def _check_held(self, named: Iterable[tuple[str, Tensor]], advice: str = "") -> None:
        """Raise OptionError unless the optimisers hold these weights: another copy would undo what is done here."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        held = {id(one) for group in groups for one in group["params"]}
        for name, stored in named:
            if id(stored) not in held:
                raise OptionError(
                    f"{self._verb}: expected an optimiser that holds the weights of this model, found none that holds "
                    f"{name}. Make the optimiser after the model is wrapped (DDP, fully_shard) and moved, or leave the "
                    f"layer out with sites=...{advice}"
                )

    def _start(self, act: Callable[[], None]) -> None:
        """Call a function after every step of the last of the optimisers, until `remove`."""
        self._handles.append(self._optimizers[-1].register_step_post_hook(lambda *_: act()))

    def remove(self) -> None:
        """End it; the weights stay as they are."""
        for handle in self._handles:
            handle.remove()
