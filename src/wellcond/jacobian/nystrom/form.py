r"""The Jacobian of a Nystrom head in orthonormal coordinates, without directions that are known to change nothing.

Columns: `wellcond.jacobian.nystrom.null`. Rows: `wellcond.jacobian.nystrom.triangle`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from wellcond.jacobian.form import ExplicitGram, Structure, Triangle
from wellcond.jacobian.nystrom.head import NystromHead
from wellcond.jacobian.nystrom.null import Moving
from wellcond.jacobian.nystrom.triangle import Reach, triangle
from wellcond.linalg.spectrum import resolve_rank

TOKENS_AT_A_TIME = 64


@dataclass(frozen=True, eq=False)
class NystromForm(ExplicitGram):
    """One head on one sample."""

    head: NystromHead
    token_rtol: float | None = None
    """Singular values of the tokens up to this share of the largest count as zero; by default, rounding of float64."""
    has_triangle: ClassVar[bool] = True

    @property
    def num_outputs(self) -> int:
        """N dv."""
        return self.head.v.numel()

    @cached_property
    def span(self) -> Tensor:
        """Orthonormal basis (D, r) of what the tokens span."""
        _, sigma, right = torch.linalg.svd(self.head.x, full_matrices=False)
        return right[: int(resolve_rank(sigma, tuple(self.head.x.shape), rtol=self.token_rtol))].T

    @cached_property
    def moving(self) -> Moving:
        """Coordinates of W_Q and W_K."""
        return Moving(self.head, self.span)

    @cached_property
    def reach(self) -> Reach:
        """Coordinates of the outputs beyond the range of T."""
        left, sigma = self._values
        return Reach(self.head, left[:, len(sigma) :])

    @cached_property
    def _values(self) -> tuple[Tensor, Tensor]:
        """U (N, N) and the singular values of T that are not zero, with J_V = T (x) I."""
        t = self.head.linear_in_values(self.head.x @ self.span)
        left, sigma, _ = torch.linalg.svd(t)
        return left, sigma[: int(resolve_rank(sigma, tuple(t.shape)))]

    @property
    def gram_side(self) -> int:
        """Side of the smaller Gram matrix."""
        return self._num_values + min(self.reach.size, self.moving.size)

    @property
    def _num_values(self) -> int:
        return len(self._values[1]) * self.head.v.shape[1]

    @property
    def table_entries(self) -> int:
        """J_Q and J_K, what is left of them, and the same in the basis U."""
        return self.num_outputs * (2 * self.span.shape[1] * self.head.w_q.shape[0] + 2 * self.moving.size)

    def structure(self) -> Structure:
        """Sizes, and the rank that such a Jacobian has unless its numbers are special."""
        head, r = self.head, self.span.shape[1]
        per_token, width = 2 * head.w_q.shape[0] + head.w_v.shape[0], head.x.shape[1]
        rows, columns = self._num_values + self.reach.size, self._num_values + self.moving.size
        # Of directions that move B alone, landmarks pass on no more than (F Z beyond the range of T) (x) channels.
        idle = max(0, self.moving.num_b_only - self.reach.num_by_b)
        gauge, outside = self.moving.num_null, per_token * (width - r)
        unseen = per_token * width - outside - gauge - columns + idle
        names = []
        if columns - idle < rows:
            names += [f"gauge (W_Q E, -W_K E^T): {gauge}"]
            names += [f"outside the span of the tokens: {outside}"] if outside else []
            names += [f"weights that {head.num_landmarks} landmarks do not see: {unseen}"] if unseen else []
        elif rows < self.num_outputs:
            names += [f"outputs that {head.num_landmarks} landmarks cannot reach: {self.num_outputs - rows}"]
        return Structure(self.num_outputs, per_token * width, r, r, min(rows, columns - idle), "; ".join(names))

    @cached_property
    def query_key_jacobian(self) -> Tensor:
        """J_Q and J_K in the coordinates of `moving`, (N, dv, columns)."""
        seen, moving = self.head.seen @ self.span, self.moving
        j_q, j_k = self.head.query_key_jacobian(seen @ moving.q.tokens, seen @ moving.k.tokens)
        found = j_q.new_empty(*j_q.shape[:2], moving.size)
        for into, some_q, some_k in zip(*(part.split(TOKENS_AT_A_TIME) for part in (found, j_q, j_k)), strict=True):
            into.flatten(0, 1).copy_(moving.take(some_q.flatten(0, 1), some_k.flatten(0, 1)))
        return found

    def _split(self) -> tuple[Tensor, Tensor, Tensor]:
        """S (x) I as a vector, and M_1 and M_2 beside and below it."""
        (left, sigma), dv = self._values, self.head.v.shape[1]
        moved = self.query_key_jacobian
        above = (left[:, : len(sigma)].T @ moved.flatten(1)).view(len(sigma) * dv, moved.shape[2])
        return sigma.repeat_interleave(dv), above, self.reach.rows_of(moved)

    def triangle(self, tolerance: float) -> Triangle:
        """Upper triangular, with the singular values of J; those of W_Q and W_K below the tolerance count as zero."""
        return triangle(*self._split(), tolerance)

    def explicit_jacobian(self) -> Tensor:
        """J in the coordinates that are left, of rows and columns."""
        values, above, below = self._split()
        beside = torch.cat([torch.diag(values), below.new_zeros(len(below), len(values))])
        return torch.cat([beside, torch.cat([above, below])], dim=1)

    @property
    def _value_map(self) -> Tensor:
        left, sigma = self._values
        return left[:, : len(sigma)] * sigma

    def output_gram(self) -> Tensor:
        """J J^T of all outputs."""
        n, dv = self.head.v.shape
        moved = self.query_key_jacobian.flatten(0, 1)
        gram = moved @ moved.T
        gram.view(n, dv, n, dv).diagonal(dim1=1, dim2=3).add_((self._value_map @ self._value_map.T)[:, :, None])
        return gram

    def product(self, flat: Tensor) -> Tensor:
        """J J^T u."""
        u, moved, values = flat.view(self.head.v.shape), self.query_key_jacobian.flatten(0, 1), self._value_map
        return moved @ (moved.T @ flat) + (values @ (values.T @ u)).flatten()

    def output(self) -> Tensor:
        """What W_O reads of this head, (N, dv)."""
        return self.head.output()
