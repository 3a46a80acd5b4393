"""Where the rows of each head sit inside a stored projection weight.

A wrong arrangement is silent: the shapes are equal, the rows are someone else's. This file is the only code that
knows arrangements. It answers every question with a table of row numbers of shape (heads, head_dim), which describes
any storage at all: contiguous, interleaved, sharded.

Legend: H query heads, K key/value heads, g = H / K, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from wellcond.errors import check_choice

Arrangement = Literal["blocks", "groups"]
Role = Literal["q", "k", "v"]


def head_rows(num_heads: int, head_dim: int, *, start: int = 0, stride: int | None = None) -> Tensor:
    """Row numbers of heads that follow each other, `stride` rows apart.

    Returns: int64 tensor (num_heads, head_dim).

    Example:
        >>> head_rows(2, 3, start=1).tolist()
        [[1, 2, 3], [4, 5, 6]]
    """
    stride = head_dim if stride is None else stride
    return start + stride * torch.arange(num_heads)[:, None] + torch.arange(head_dim)


@dataclass(frozen=True)
class QKVLayout:
    """Arrangement of a fused projection along its output rows.

    - ``blocks``: all query heads, then all key heads, then all value heads (in the order of `order`);
    - ``groups``: for each key/value head, its g query heads, its key, its value (in the order of `order`).

    `order` lists the roles that are stored: ``"qkv"`` (default), ``"kv"`` where the query has a weight of its own, or
    another permutation. `shards` repeats the whole arrangement for consecutive shares of the heads (CodeGen: 4).

    Example:
        >>> QKVLayout(num_heads=2, head_dim=1, arrangement="groups").rows("v").tolist()
        [[2], [5]]
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    value_head_dim: int | None = None
    arrangement: Arrangement = "blocks"
    order: str = "qkv"
    shards: int = 1

    def __post_init__(self) -> None:
        """Refuse counts that cannot be."""
        check_choice("arrangement", self.arrangement, get_args(Arrangement))
        if self.num_heads % self.kv_heads or self.kv_heads % self.shards:
            raise ValueError(
                f"expected query heads to be a multiple of key/value heads and those of shards, "
                f"got {self.num_heads}, {self.kv_heads}, {self.shards}"
            )

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def width(self, role: str) -> int:
        """Rows of one head in this role."""
        return self.head_dim if role != "v" or self.value_head_dim is None else self.value_head_dim

    def count(self, role: str) -> int:
        """Number of heads in this role."""
        return self.num_heads if role == "q" else self.kv_heads

    @property
    def num_rows(self) -> int:
        """Rows of the whole fused weight."""
        return sum(self.count(role) * self.width(role) for role in self.order)

    def rows(self, role: str) -> Tensor:
        """Row numbers (heads, head width) of one role, in the order of the heads."""
        check_choice("role", role, tuple(self.order))
        # One unit is what repeats: a key/value group, or a shard of whole blocks.
        num_units = self.kv_heads if self.arrangement == "groups" else self.shards
        before = self.order[: self.order.index(role)]
        start = sum(self.count(other) * self.width(other) for other in before) // num_units
        stride = self.num_rows // num_units
        heads_per_unit = self.count(role) // num_units
        within = head_rows(heads_per_unit, self.width(role), start=start)
        units = stride * torch.arange(num_units)[:, None, None]
        return (units + within).reshape(-1, self.width(role))

    def split(self, weight: Tensor) -> dict[str, Tensor]:
        """Heads of each role, (count, head width, in_features), from a fused (rows, in_features) weight."""
        if weight.shape[0] != self.num_rows:
            raise ValueError(f"expected {self.num_rows} rows for {self}, got {weight.shape[0]}")
        return {role: weight[self.rows(role)] for role in self.order}

    def merge(self, heads: dict[str, Tensor]) -> Tensor:
        """Inverse of `split`."""
        first = heads[self.order[0]]
        fused = first.new_empty((self.num_rows, *first.shape[2:]))
        for role in self.order:
            fused[self.rows(role)] = heads[role]
        return fused
