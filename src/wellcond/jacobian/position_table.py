r"""A relative position table as one more parameter (Swin, BEiT, T5): logits += t[index].

Legend (on top of the legend of `wellcond.head`):

    t  (T) or (g, T)          the table, one per query head
    R_r  M x T                onehot(index[i, :]): which entry each key of row r = (head, i) reads
    W_r = V^T Lambda_r        (dv x M)

    J_t[r] = W_r R_r          column e: sum of W_r[:, j] over the keys j with index[i, j] = e

Tables of different heads do not meet. The table is not multiplied by the scale of the logits; its values matter through
P only. A head and its table are the `SumForm` of the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wellcond.head import Head, softmax_weights, through_softmax
from wellcond.jacobian.form import AbstractForm, Structure, SumForm
from wellcond.jacobian.normalised import NormalisedHead
from wellcond.jacobian.plain import WideForm
from wellcond.linalg.spectrum import to_float64


def with_position_table(head: Head, table: Tensor, index: Tensor) -> Head:
    """A head with t[index] added to its logits, beside the mask it may have.

    Args:
        head: tokens and weights.
        table: (T), or (g, T) for g query heads.
        index: integers (N, M).
    """
    bias = to_float64(table)[..., index]
    return replace(head, mask=bias if head.mask is None else bias + head.mask)


@dataclass(frozen=True, eq=False)
class PositionTable(AbstractForm):
    """The Jacobian of a head's output with respect to its relative position table alone.

    Attributes:
        base: the form of a head whose logits contain the table already (see `with_position_table`).
        index: integers (N, M) in [0, table_size).
        table_size: entries T of the table of one query head.
    """

    base: WideForm | NormalisedHead
    index: Tensor
    table_size: int

    def __post_init__(self) -> None:
        """Check the index."""
        expected = (self.base.head.num_tokens, self.base.head.memory.shape[0])
        if tuple(self.index.shape) != expected or self.index.is_floating_point():
            raise ValueError(f"index: expected integers of shape {expected}, got {tuple(self.index.shape)}")
        if int(self.index.min()) < 0 or int(self.index.max()) >= self.table_size:
            raise ValueError(f"index: expected entries in [0, {self.table_size})")

    @property
    def num_outputs(self) -> int:
        """Rows of the wide Jacobian, R dv."""
        return self.base.num_outputs

    def output(self) -> Tensor:
        """P V, (g, N, dv)."""
        return self.base.output()

    def structure(self) -> Structure:
        """Sizes and an upper bound on the rank.

        The softmax ignores a constant added to the whole table, and entries that no visible pair of tokens reads do
        nothing: a table adds at most (entries read) - 1. A row of one visible key adds nothing at all.
        """
        head, g = self.base.head, self.base.num_query_heads
        visible = torch.ones_like(self.index, dtype=torch.bool)[None].expand(g, -1, -1)
        if head.mask is not None:
            visible = (head.mask > -torch.inf).expand(g, -1, -1)
        several = visible & (visible.sum(-1, keepdim=True) > 1)
        rank = sum(max(0, len(self.index[some].unique()) - 1) for some in several)
        unread = f"constant and unread table entries: {g * self.table_size - rank}"
        # A table reads no tokens: it adds nothing to their ranks.
        return Structure(self.num_outputs, g * self.table_size, 0, 0, min(rank, self.num_outputs), unread)

    def explicit_jacobian(self) -> Tensor:
        """J_t of every query head, block-diagonal."""
        return torch.block_diag(*self._by_head())

    def output_gram(self) -> Tensor:
        """J_t J_t^T of every query head, block-diagonal."""
        return torch.block_diag(*[table @ table.T for table in self._by_head()])

    def product(self, flat: Tensor) -> Tensor:
        """J J^T times a vector: pulled back to the logits, summed per table entry, spread again, pushed forward."""
        p, v, g = self.base.p, self.base.v, self.base.num_query_heads
        index = self.index.flatten().long()
        pulled = through_softmax(p, flat.view(len(p), -1) @ v.T).view(g, -1)
        entries = pulled.new_zeros(g, self.table_size).index_add_(1, index, pulled)
        return (through_softmax(p, entries[:, index].view_as(p)) @ v).flatten()

    def _by_head(self) -> list[Tensor]:
        """J_t of each query head, (N dv, T)."""
        weights = softmax_weights(self.base.p, self.base.v)  # (R, dv, M)
        rows, dv, keys = weights.shape
        g = self.base.num_query_heads
        index = self.index.long().repeat(g, 1)[:, None, :].expand(rows, dv, keys)
        table = weights.new_zeros(rows, dv, self.table_size).scatter_add_(2, index, weights)
        return list(table.view(g, rows // g * dv, self.table_size))


def swin_head(head: Head, table: Tensor, index: Tensor, *, biases: bool = False) -> SumForm:
    """Window attention of Swin: a plain head and its table; `head.mask` is the mask of shifted windows, if any.

    Example:
        >>> one = torch.ones(1, 1)
        >>> head = Head(torch.tensor([[1.0], [2.0]]), one, one, one, scale=1.0)
        >>> form = swin_head(head, torch.zeros(3), torch.tensor([[1, 0], [2, 1]]))
        >>> form.structure().num_parameters
        6
    """
    base = WideForm(with_position_table(head, table, index), biases)
    return SumForm((base, PositionTable(base, index, table.shape[-1])))
