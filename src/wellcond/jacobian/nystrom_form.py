r"""The Jacobian of a Nystrom head without the directions that are known to change nothing, and its Gram matrices.

Queries, keys and landmarks meet in products q . k only, so that the gauge W_Q E, -W_K E^T is null as it is for the
softmax (`wellcond.jacobian.structure`, Note [Gauge]). With biases b_q, b_k that are no parameters q . k changes by

    x W_Q E b_k^T - b_q E W_K^T y^T

The first term is the same for all keys, which a softmax ignores, unless masks scale b_k differently in different
landmarks. The second asks for b_q E = 0. What remains of the gauge is E = N_q M N_k^T.

On the other side, dF Y lies in (all tokens) (x) (differences of rows of Y), since rows of dF sum to zero, and all the
rest in (range of [T, F]) (x) (all channels): beyond it only m - 1 channels can move, which counts where m <= dv.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wellcond.jacobian.nystrom import NystromHead
from wellcond.jacobian.structure import Structure
from wellcond.linalg.spectrum import resolve_rank


@dataclass(frozen=True, eq=False)
class NystromForm:
    """One head on one sample; columns are orthonormal coordinates of the weights, without the null directions."""

    head: NystromHead
    token_rtol: float | None = None
    """Singular values of the tokens up to this share of the largest count as zero; by default, rounding of float64."""

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
    def gauge(self) -> Gauge:
        """Of this head."""
        head = self.head
        b_k = head.b_k if head.visible is not None and not bool(head.visible.all()) else None
        return Gauge(self.span.T @ head.w_q.T, self.span.T @ head.w_k.T, head.b_q, b_k)

    @cached_property
    def reach(self) -> Reach | None:
        """Coordinates of the outputs, where landmarks cannot reach them all."""
        (n, dv), m, r = self.head.v.shape, self.head.num_landmarks, self.span.shape[1]
        reached = m if self.head.kernel is None else r + m
        return Reach(self.head, self.value_map) if m - 1 < dv and reached < n else None

    @property
    def gram_side(self) -> int:
        """Side of the smaller Gram matrix."""
        return min(self._num_rows, self._num_columns)

    @property
    def _num_rows(self) -> int:
        return self.num_outputs if self.reach is None else self.reach.size

    @property
    def _num_columns(self) -> int:
        r, d, dv = self.span.shape[1], self.head.w_q.shape[0], self.head.w_v.shape[0]
        return 2 * r * d - self.gauge.size + self.value_map.shape[1] * dv

    @property
    def table_entries(self) -> int:
        """J itself, and a copy of what the gauge takes out of it."""
        return 2 * self.num_outputs * self._num_columns

    def structure(self) -> Structure:
        """Sizes, and the rank that such a Jacobian has unless its numbers are special."""
        head, r = self.head, self.span.shape[1]
        per_token, width = 2 * head.w_q.shape[0] + head.w_v.shape[0], head.x.shape[1]
        names = []
        if self._num_columns < self._num_rows:
            names += [f"gauge (W_Q E, -W_K E^T): {self.gauge.size}"]
            names += [f"outside the span of the tokens: {per_token * (width - r)}"] if r < width else []
        elif self._num_rows < self.num_outputs:
            names += [f"outputs that {head.num_landmarks} landmarks cannot reach: {self.num_outputs - self._num_rows}"]
        rank = min(self._num_rows, self._num_columns - self._num_unseen)
        return Structure(self.num_outputs, per_token * width, r, r, rank, "; ".join(names))

    @property
    def _num_unseen(self) -> int:
        """Columns that few landmarks leave null.

        W_Q: no landmark moves, and the change is orthogonal to all differences of key landmarks. W_K: no difference of
        landmarks moves, and the change is orthogonal to all query landmarks.
        """
        r, d, m = self.span.shape[1], self.head.w_q.shape[0], self.head.num_landmarks
        return max(0, r - m) * max(0, d - m + 1) + max(0, r - m + 1) * max(0, d - m)

    @cached_property
    def query_key_jacobian(self) -> Tensor:
        """J_Q and J_K in the coordinates that are left, (N dv, columns)."""
        seen = self.head.seen @ self.span
        j_q, j_k = self.head.query_key_jacobian(seen @ self.gauge.turn_q, seen @ self.gauge.turn_k)
        return self.gauge.take_out(j_q.flatten(0, 1), j_k.flatten(0, 1))

    @cached_property
    def value_map(self) -> Tensor:
        """T in orthonormal coordinates of the span, with J_V = T (x) I; without a convolution, of the span of B X."""
        head, span = self.head, self.span
        if head.kernel is None and head.num_landmarks < span.shape[1]:
            span = span @ torch.linalg.qr((head.from_landmarks @ head.x @ span).T).Q
        return head.linear_in_values(head.x @ span)

    def smaller_gram(self) -> Tensor:
        """J J^T, or J^T J where that is smaller, in the coordinates that are left."""
        if self.reach is not None:
            jacobian = self.explicit_jacobian()
            return jacobian @ jacobian.T if self._num_rows <= self._num_columns else jacobian.T @ jacobian
        if self.num_outputs <= self._num_columns:
            return self.output_gram()
        moving, values = self.query_key_jacobian, self.value_map
        (n, r), dv, split = values.shape, self.head.v.shape[1], moving.shape[1]
        gram = moving.new_empty(self._num_columns, self._num_columns)
        torch.matmul(moving.T, moving, out=gram[:split, :split])
        # (T (x) I)^T J: T acts on the tokens, and the channels stay what they are.
        gram[split:, :split] = (values.T @ moving.view(n, -1)).view(r * dv, split)
        gram[:split, split:] = gram[split:, :split].T
        gram[split:, split:] = torch.kron(values.T @ values, torch.eye(dv, dtype=values.dtype))
        return gram

    def output_gram(self) -> Tensor:
        """J J^T of all outputs."""
        n, dv = self.head.v.shape
        gram = self.query_key_jacobian @ self.query_key_jacobian.T
        gram.view(n, dv, n, dv).diagonal(dim1=1, dim2=3).add_((self.value_map @ self.value_map.T)[:, :, None])
        return gram

    def explicit_jacobian(self) -> Tensor:
        """J in the coordinates that are left."""
        j_v = torch.kron(self.value_map, torch.eye(self.head.v.shape[1], dtype=torch.float64))
        jacobian = torch.cat([self.query_key_jacobian, j_v], dim=1)
        return jacobian if self.reach is None else self.reach.rows_of(jacobian)

    def product(self, flat: Tensor) -> Tensor:
        """J J^T u."""
        u = flat.view(self.head.v.shape)
        moved = self.query_key_jacobian @ (self.query_key_jacobian.T @ flat)
        return moved + (self.value_map @ (self.value_map.T @ u)).flatten()

    def output(self) -> Tensor:
        """What W_O reads of this head, (N, dv)."""
        return self.head.output()


class Gauge:
    """Null directions (W_Q E, -W_K E^T) with b_q E = 0 and E b_k^T = 0, and coordinates without them.

    The space of W_Q is turned so that W_Q lies in its first t = min(r, d) coordinates, that of W_K likewise: the gauge
    then mixes 2 t d coordinates only, and the others stay as they are.
    """

    def __init__(self, w_q: Tensor, w_k: Tensor, b_q: Tensor | None, b_k: Tensor | None) -> None:
        """From weights (r, d) in coordinates of the tokens."""
        self.turn_q, first_q = torch.linalg.qr(w_q, mode="complete")
        self.turn_k, first_k = torch.linalg.qr(w_k, mode="complete")
        self.top = t = min(w_q.shape)
        first_q, first_k = first_q[:t], first_k[:t]
        n_q, n_k = _orthogonal_to(b_q, w_q.shape[1]), _orthogonal_to(b_k, w_q.shape[1])
        # E = n_q e_a e_b^T n_k^T: first_q E and -first_k E^T, both (t, d).
        to_q = torch.einsum("ta,cb->abtc", first_q @ n_q, n_k).flatten(2)
        to_k = torch.einsum("tb,ca->abtc", first_k @ n_k, n_q).flatten(2)
        moves = torch.cat([to_q, -to_k], dim=2).flatten(0, 1)
        values, vectors = torch.linalg.eigh(moves @ moves.T)
        independent = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
        self.size = int(independent.sum())
        null = vectors[:, independent].T @ moves / values[independent, None].sqrt()
        self.rest = torch.linalg.qr(null.T, mode="complete").Q[:, self.size :]

    def take_out(self, j_q: Tensor, j_k: Tensor) -> Tensor:
        """Columns (n, a, d) of both, turned as here, as one matrix without the null directions."""
        t, n = self.top, len(j_q)
        mixed = torch.cat([j_q[:, :t].reshape(n, -1), j_k[:, :t].reshape(n, -1)], dim=1) @ self.rest
        return torch.cat([mixed, j_q[:, t:].reshape(n, -1), j_k[:, t:].reshape(n, -1)], dim=1)


class Reach:
    """Orthonormal coordinates of the outputs that can move: range([T, F]) (x) all, the rest (x) differences of Y."""

    def __init__(self, head: NystromHead, value_map: Tensor) -> None:
        """From a head and its T; there are fewer columns of [T, F] than tokens."""
        # Without a convolution T = F (Z B X) adds nothing to the range of F.
        both = head.to_landmarks if head.kernel is None else torch.cat([value_map, head.to_landmarks], dim=1)
        tokens = torch.linalg.qr(both, mode="complete").Q
        self.reached, self.beyond = tokens[:, : both.shape[1]], tokens[:, both.shape[1] :]
        y = head.inverse.z @ (head.from_landmarks @ head.v)
        self.channels = torch.linalg.qr((y[1:] - y[0]).T).Q
        self.size = self.reached.shape[1] * len(self.channels) + self.beyond.shape[1] * self.channels.shape[1]

    def rows_of(self, jacobian: Tensor) -> Tensor:
        """J (N dv, columns) in these coordinates, (size, columns)."""
        n, columns = len(self.reached), jacobian.shape[1]
        by_token = jacobian.view(n, -1)
        rest = (self.beyond.T @ by_token).view(-1, len(self.channels), columns)
        return torch.cat([(self.reached.T @ by_token).view(-1, columns), (self.channels.T @ rest).flatten(0, 1)])


def _orthogonal_to(bias: Tensor | None, size: int) -> Tensor:
    """Orthonormal columns that span what is orthogonal to a bias."""
    if bias is None or not bool(bias.any()):
        return torch.eye(size, dtype=torch.float64)
    return torch.linalg.qr(bias[:, None], mode="complete").Q[:, 1:]
