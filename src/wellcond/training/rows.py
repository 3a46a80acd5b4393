"""Entries of stored weights by head, on the device and without waiting for it, for all that acts after every step.

`HeadView` reads and writes the heads of a whole tensor. `RowFactors` multiplies the entries of each head by a number,
also in a shard that holds parts of heads: it knows the head of every entry from a table that is made once, by writing
the numbers of the heads into a tensor as a slot writes weights. Axes along which the table does not change are dropped,
so that it is a vector in most layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wellcond.arguments import describe
from wellcond.attention.sharding import is_distributed, local_shard, to_local
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
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        self._placed: list[tuple[Tensor, Tensor]] = []

    def add(self, stored: Tensor, heads: Tensor, numbers: Tensor) -> None:
        """Let the entries of head h of a stored tensor be multiplied by factor ``numbers[h]``; all others by the last.

        Args:
            stored: a parameter or buffer.
            heads: from `heads_of_weight` or `heads_of_bias`.
            numbers: (heads), positions in the vector that `multiply_` is given.
        """
        table = torch.where(heads == NO_HEAD, NO_HEAD, numbers[heads.long()])
        if id(stored) in self._tables:
            known = self._tables[id(stored)][1]
            table = torch.where(table == NO_HEAD, known, table)
        self._tables[id(stored)] = stored, table
        self._placed = []

    @property
    def tensors(self) -> list[Tensor]:
        """The stored tensors that are multiplied."""
        return [stored for stored, _ in self._tables.values()]

    @torch.no_grad()
    def multiply_(self, factors: Tensor) -> None:
        """Multiply in place by factors (count), the last of which is 1 and belongs to entries of no head."""
        for part, table in self._local():
            part.mul_(factors[table].to(part.device))

    def _local(self) -> list[tuple[Tensor, Tensor]]:
        if not self._placed:
            for stored, table in self._tables.values():
                part = local_part(table, stored)
                self._placed.append((stored, part.to(to_local(stored).device)))
        return [(to_local(stored), table) for stored, table in self._placed]


# Optimisers


def as_optimizers(optimizer: Any, verb: str) -> list[torch.optim.Optimizer]:
    """One optimiser or several as a list.

    Raises: TypeError for anything else.
    """
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not given or not all(isinstance(one, torch.optim.Optimizer) for one in given):
        raise TypeError(
            f"{verb}: expected a torch.optim.Optimizer, or a list of them in the order of their steps, got "
            f"{describe(optimizer)}; of a wrapper (Accelerate, DeepSpeed) give the optimiser inside"
        )
    return given


def check_held(
    optimizers: Sequence[torch.optim.Optimizer], named: Iterable[tuple[str, Tensor]], verb: str, advice: str = ""
) -> None:
    """Raise OptionError unless the optimisers hold these weights: another copy of them would undo what is done here."""
    held = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    for name, stored in named:
        if id(stored) not in held:
            raise OptionError(
                f"{verb}: expected an optimiser that holds the weights of this model, found none that holds {name}. "
                "Make the optimiser after the model is wrapped (DDP, fully_shard) and moved, or leave the layer out "
                f"with sites=...{advice}"
            )


def after_step(optimizers: Sequence[torch.optim.Optimizer], act: Callable[[], None]) -> Any:
    """Call a function after every step of the last of these optimisers; returns the handle that ends this."""

    def hook(*_: Any) -> None:
        act()

    return optimizers[-1].register_step_post_hook(hook)
