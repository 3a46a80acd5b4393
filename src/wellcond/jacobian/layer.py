r"""Operators made of operators: heads behind a gate or a norm, and heads mixed by the output projection W_O.

Legend (everything float64):

    o_i^h  (dv)                 output of head h on token i;  c_i = (o_i^1 .. o_i^H) the concatenation
    W_h  (dv x Do)              rows of W_O that read head h;  torch stores W_O^T = [W_1^T .. W_H^T] (Do, H dv)
    y_i = W_O^T c_i             output of the layer, rows (i, o), n = N Do

    G_ij = sum over operators of  sum_hh' W_h^T G_(h,i),(h',j) W_h'    h, h' of one operator

Query heads that share keys and values share parameters, so they are one operator and h != h' occurs.

Without W_O different operators share neither outputs nor parameters: J of the layer is block-diagonal, its singular
values are the union of theirs, and kappa(layer) = max sigma_max / min sigma_min.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from wellcond.jacobian.operator import GramOperator, JacobianOperator, Side
from wellcond.jacobian.ranks import RankBound
from wellcond.jacobian.records import JacobianSpectrum
from wellcond.linalg.spectrum import cast_to_float64, move_to, numerical_rank


@dataclass(frozen=True, eq=False)
class MappedRows(JacobianOperator):
    """G J of another operator's J; G has one block for each token, the Jacobian of what its outputs pass before W_O.

    A gate acts on each query head by itself; a norm over all heads mixes those of a group (theory.md, section 5.4).

    Attributes:
        inner: the heads before the map, rows (g, N, dv).
        maps: (g, g, N, dv', dv), from the second head to the first.
        value: the heads behind the map, (g, N, dv').
    """

    inner: JacobianOperator
    maps: Tensor
    value: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """R dv' outputs, and the parameters of the heads."""
        return self.value.numel(), self.inner.shape[1]

    def output(self) -> Tensor:
        """What leaves the map."""
        return self.value

    def rank_bound(self) -> RankBound:
        """That of the heads; a map that is not injective can only lower it."""
        inner = self.inner.rank_bound()
        by_token = self.maps.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)
        rank = min(inner.rank, int(torch.linalg.matrix_rank(by_token).sum()))
        return RankBound(rank, inner.null_space, inner.memory_rank)

    def _push(self, rows: Tensor) -> Tensor:
        """G applied to outputs of the heads, (R dv, columns) -> (R dv', columns)."""
        g, _, n, _, dv = self.maps.shape
        return torch.einsum("hknop,knpc->hnoc", self.maps, rows.reshape(g, n, dv, -1)).reshape(self.shape[0], -1)

    def _pull(self, u: Tensor) -> Tensor:
        """G^T u."""
        return torch.einsum("hknop,hno->knp", self.maps, u.view_as(self.value)).flatten()

    def matvec(self, v: Tensor) -> Tensor:
        """G (J v)."""
        return self._push(self.inner.matvec(v))[:, 0]

    def rmatvec(self, u: Tensor) -> Tensor:
        """J^T (G^T u)."""
        return self.inner.rmatvec(self._pull(u))

    def as_matrix(self) -> Tensor:
        """G J."""
        return self._push(self.inner.as_matrix())

    def gram(self, side: Side = "outputs") -> GramOperator:
        """G (J J^T) G^T, on either side."""
        inner = self.inner.gram()
        return GramOperator(
            self.shape[0],
            lambda u: self._push(inner.matvec(self._pull(u)))[:, 0],
            lambda: self._push(self._push(inner.matrix()).T),
        )


def union_condition_number(spectra: Sequence[JacobianSpectrum], kind: Literal["strict", "pseudo"] = "strict") -> float:
    """Condition number of a layer without W_O from the spectra of its heads (or groups of heads).

    Strict: infinite as soon as one head has a deficient rank, or if some heads have more outputs than parameters and
    others fewer: then the layer has min(shape) above the number of singular values of its heads.
    """
    if not spectra:
        raise ValueError("expected the spectrum of at least one head")
    largest = max(one.sigma_max for one in spectra)
    if largest == 0:
        return math.nan
    if kind == "pseudo":
        last = [one.sigma_rank for one in spectra if one.rank]
        if any(math.isnan(sigma) for sigma in last):
            return math.nan
        return largest / min(last) if min(last) > 0 else math.inf
    rows, columns = (sum(one.shape[axis] for one in spectra) for axis in (0, 1))
    complete = min(rows, columns) == sum(min(one.shape) for one in spectra)
    last = [one.sigma_min for one in spectra]
    if not complete or 0 in last or any(one.nullity for one in spectra):
        return math.inf
    return math.nan if any(math.isnan(sigma) for sigma in last) else largest / min(last)


@dataclass(frozen=True, eq=False)
class ProjectedHeads(JacobianOperator):
    """Heads behind the output projection, which is fixed.

    Attributes:
        heads: operators of heads, or of groups of heads, in the order in which W_O reads them.
        outputs: for each of them the heads, tokens and channels of its rows: (H, N, dv).
        w_o: (Do, H dv), as torch stores it.
    """

    heads: tuple[JacobianOperator, ...]
    outputs: tuple[tuple[int, int, int], ...]
    w_o: Tensor

    def __post_init__(self) -> None:
        """Cast to float64 and check shapes and values."""
        cast_to_float64(self, ("w_o",))
        move_to(torch.device("cpu"), self, ("w_o",))
        width = sum(count * dv for count, _, dv in self.outputs)
        if self.w_o.dim() != 2 or self.w_o.shape[1] != width:
            raise ValueError(f"w_o: expected {width} columns, got shape {tuple(self.w_o.shape)}")

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.outputs[0][1]

    @property
    def shape(self) -> tuple[int, int]:
        """N Do outputs, and the parameters of all heads."""
        return self.num_tokens * self.w_o.shape[0], sum(head.shape[1] for head in self.heads)

    def rank_bound(self) -> RankBound:
        """At most N rank(W_O), and no more than the heads have together: their parameters differ, so ranks add."""
        parts = [head.rank_bound() for head in self.heads]
        outputs = self.shape[0]
        rank = min(outputs, sum(part.rank for part in parts), self.num_tokens * numerical_rank(self.w_o))
        listed = " | ".join(dict.fromkeys(part.null_space for part in parts if part.null_space))
        names = [listed] if listed else []
        if rank < outputs:
            names = ["upper bound on the rank", f"outputs that W_O does not reach: {outputs - rank}", *names]
        return RankBound(rank, "; ".join(names), max(part.memory_rank for part in parts))

    @cached_property
    def _slices(self) -> list[tuple[JacobianOperator, Tensor]]:
        """Each operator with the columns of w_o that read it, (Do, heads, dv)."""
        widths = [count * dv for count, _, dv in self.outputs]
        parts = zip(self.heads, self.w_o.split(widths, dim=1), self.outputs, strict=True)
        return [(head, weight.reshape(len(weight), count, dv)) for head, weight, (count, _, dv) in parts]

    def _push(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Outputs (heads N dv, columns) of one operator through W_O, (N Do, columns)."""
        _, count, dv = weight.shape
        by_head = rows.reshape(count, self.num_tokens, dv, -1)
        return torch.einsum("ohv,hivp->iop", weight, by_head).flatten(0, 1)

    def _pull(self, weight: Tensor, u: Tensor) -> Tensor:
        """W_O^T u for one operator, in the order of its rows."""
        return torch.einsum("ohv,io->hiv", weight, u.view(self.num_tokens, -1)).flatten()

    def matvec(self, v: Tensor) -> Tensor:
        """W_O^T times what the directions move the heads by."""
        parts = v.split([head.shape[1] for head in self.heads])
        each = zip(self._slices, parts, strict=True)
        moved = [self._push(weight, head.matvec(part)) for (head, weight), part in each]
        return torch.stack(moved).sum(0)[:, 0]

    def rmatvec(self, u: Tensor) -> Tensor:
        """J_h^T W_h u of every operator, one after the other."""
        return torch.cat([head.rmatvec(self._pull(weight, u)) for head, weight in self._slices])

    def as_matrix(self) -> Tensor:
        """J with compressed tokens: the same singular values."""
        return torch.cat([self._push(weight, head.as_matrix()) for head, weight in self._slices], dim=1)

    def gram(self, side: Side = "outputs") -> GramOperator:
        """J J^T on either side; its products form nothing of size n x n if no head forms it."""
        return GramOperator(self.shape[0], self._gram_product, self._output_gram)

    def _gram_product(self, u: Tensor) -> Tensor:
        found = [self._push(weight, head.gram().matvec(self._pull(weight, u))) for head, weight in self._slices]
        return torch.stack(found).sum(0)[:, 0]

    def _output_gram(self) -> Tensor:
        n, out = self.num_tokens, self.w_o.shape[0]
        gram = self.w_o.new_zeros(n, out, n, out)
        for head, weight in self._slices:
            _, count, dv = weight.shape
            part = head.gram().matrix().view(count, n, dv, count, n, dv)
            half = torch.einsum("ohv,hivkjw->iokjw", weight, part)
            gram += torch.einsum("iokjw,pkw->iojp", half, weight)
        return gram.reshape(n * out, n * out)
