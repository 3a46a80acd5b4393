r"""Softmax heads whose queries, keys and values pass a map of their own: QK-norm, rotary, sinks, soft-caps.

Legend (theory.md, section 5.1 and section 5.4, on top of the legend of `wellcond.jacobian.head`):

    qhat_r, khat_j, N_r^q (d' x d), N_j^k      mapped rows, and the Jacobians of the maps, one per row
    W_r = V^T Lambda_r  (dv x M)               columns p_rj (v_j - o_r), times the slopes of the logits
    M_r = W_r Khat N_r^q  (dv x d)             t_rj = N_j^{kT} qhat_r  (d)

    J_Q[r]: (a, c) -> x_r[a] M_r[:, c]      J_K[r]: (a, c) -> sum_j W_r[:, j] y_j[a] t_rj[c]
    J_V[r]: (a, o) -> (P Y)_r[a] e_o

A bias of the keys, which the plain softmax ignores, has a Jacobian that is not zero: a constant column of Y.

# Note [Pairs of rows]
J_K[r] is no Kronecker product with q_r, and one channel c of the keys at a time J_K J_K^T takes n^2 d E steps. A pair
of rows (r, r') needs T_rr'[j, j'] = t_rj . t_r'j' of the keys that they see only, d + dv steps for each pair of keys:
s^2 (d + dv) in all, s being the number of (row, key) that the mask leaves: 30 times less for N = 256, d = 64 and a
causal mask. Long sequences of narrow tokens take the channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from wellcond.attention.kernels import AttentionStatistics, map_statistics
from wellcond.errors import WeightError
from wellcond.jacobian.diagnosis import HeadDiagnosis, judge_head
from wellcond.jacobian.factors import JacobianFactors, RowFactors, output_gram
from wellcond.jacobian.head import Head, compressed, softmax_weights
from wellcond.jacobian.operator import GramOperator, Hints, RankBound, Side
from wellcond.jacobian.rowwise_rank import rowwise_rank_bound
from wellcond.jacobian.softmax import HeadJacobian, Parts, RowSoftmax, TokenMap
from wellcond.linalg.lanczos import largest_eigenvalues
from wellcond.linalg.spectrum import default_rtol, singular_values, spectrum

ROWS = 8
"""Rows whose keys are taken together: their products with one row stay in the cache."""
COLUMNS = 256
"""Columns of J_K that are multiplied at once where it is formed by channels."""
MIRRORED = 1024
"""Rows of a lower triangle that are copied above the diagonal at a time."""


@dataclass(frozen=True, eq=False)
class RowwiseHead(HeadJacobian):
    """A `Head` whose queries, keys and values pass maps; parameters are those of the head, the maps are fixed.

    Attributes:
        head: tokens and weights; its own `probabilities()` are not those of this operator.
        query: the map of `head.queries()`, values (g, N, d') or (R, d').
        key: the map of `head.keys()`, values (M, d').
        softmax: what follows.
        biases: the biases of the head count as parameters.
    """

    head: Head
    query: TokenMap
    key: TokenMap
    softmax: RowSoftmax
    biases: bool = False

    def __post_init__(self) -> None:
        d, rows, keys = self.head.head_dim, self.head.num_rows, self.head.memory.shape[0]
        for name, mapped, count in (("query", self.query, rows), ("key", self.key, keys)):
            value, jacobian = mapped.value.detach().double(), mapped.jacobians.detach().double()
            width = value.shape[-1]
            if value.numel() != count * width or jacobian.numel() != count * width * d:
                raise ValueError(
                    f"{name} map: expected {count} rows and Jacobians (d', {d}), got {tuple(value.shape)} and "
                    f"{tuple(jacobian.shape)}"
                )
            if not bool(torch.isfinite(value).all() and torch.isfinite(jacobian).all()):
                raise WeightError(f"{name} map has NaN or infinite entries: the Jacobian is not defined")
            object.__setattr__(self, name, TokenMap(value.reshape(count, width), jacobian.reshape(count, width, d)))
        if self.query.value.shape[-1] != self.key.value.shape[-1]:
            raise ValueError("mapped queries and keys differ in width")
        of_values, eye = self.softmax.value.jacobian, torch.eye(self.v.shape[1], dtype=self.v.dtype)
        if of_values is not None and bool((of_values == eye).all()):
            object.__setattr__(self, "softmax", replace(self.softmax, value=TokenMap(self.v)))

    @property
    def values_are_mapped(self) -> bool:
        """Whether the values pass a map."""
        return self.softmax.value.jacobian is not None

    @property
    def num_keys_of_tokens(self) -> int:
        """Keys that a token makes; the others follow them."""
        return len(self.head.memory) - self.softmax.tokenless

    def rank_bound(self) -> RankBound:
        """An upper bound; see Note [Symmetry] of `rowwise_rank`."""
        return rowwise_rank_bound(self)

    def _gram_product(self, u: Tensor) -> Tensor:
        return self.push(self.pull(u, self._compressed), self._compressed)

    @cached_property
    def _compressed(self) -> Parts:
        """What the query, key and value parameters multiply, with Gram matrices as `inputs` and fewer columns."""
        x, y, vy = self.inputs()
        return compressed(x), compressed(y), compressed(vy)

    # --- matrices -----------------------------------------------------------------------------------------------------

    def parameter_blocks(self) -> dict[str, Tensor]:
        """J_Q, J_K, J_V (n, parameters), tokens compressed, columns (a, c); a query head owns its own columns."""
        n, vy = self.head.num_outputs, self._compressed[2]
        j_q = torch.einsum("ra,roc->roac", self.factors.x, self.factors.m).reshape(n, -1)
        j_k = self.factors.key_channels(slice(None)).reshape(n, -1)
        if not self.values_are_mapped:
            eye = torch.eye(self.v.shape[1], dtype=self.v.dtype)
            j_v = torch.einsum("ra,ok->roak", self.p @ vy, eye).reshape(n, -1)
        else:
            j_v = torch.stack([self._value_column(vy, c) for c in range(self.head.value_dim)], dim=2).reshape(n, -1)
        return {"q": j_q, "k": j_k, "v": j_v}

    def as_matrix(self) -> Tensor:
        """J with compressed tokens: the same singular values."""
        return torch.cat(list(self.parameter_blocks().values()), dim=1)

    def gram(self, side: Side = "outputs") -> GramOperator:
        """J J^T on either side: J^T J has no basis of its null space."""
        head, by_query = self.head, self.softmax.by_query
        # W_r and t_rj of every row and key, and what they are made of.
        scratch = 2 * head.num_rows * len(head.memory) * (head.head_dim + head.value_dim)
        scratch += 0 if by_query is None else by_query.numel()
        # Not known for iterations where the values pass a map.
        steps = None if self.values_are_mapped else lambda: self.factors
        return GramOperator(head.num_outputs, self._gram_product, self._output_gram, scratch=scratch, steps=steps)

    def _output_gram(self) -> Tensor:
        gram = mirrored_(self.factors.lower_gram())
        if self.values_are_mapped:
            vy = self._compressed[2]
            for c in range(self.head.value_dim):
                column = self._value_column(vy, c)
                gram.addmm_(column, column.T)
        return gram

    @cached_property
    def factors(self) -> RowwiseFactors:
        """The factors of queries and keys, and of values that pass no map."""
        (x, y, vy), softmax, keys = self._compressed, self.softmax, len(self.v)
        # A sink is a key without a value.
        values = torch.cat([self.v, self.v.new_zeros(softmax.p.shape[1] - keys, self.v.shape[1])])
        weights = softmax_weights(softmax.p, values)[..., :keys]
        sloped = weights * softmax.slope[:, None, :]
        if softmax.by_query is None:
            m = (sloped @ self.key.value) @ self.query.jacobians
        else:
            m = weights @ softmax.by_query
        py = self.p @ vy
        return RowwiseFactors(
            x=torch.block_diag(*[x] * self.head.num_query_heads),  # a query head of a group owns its own columns
            m=m,
            py=py if not self.values_are_mapped else py[:, :0],
            w=sloped,
            t=torch.einsum("re,jec->rjc", self.query.value, self.key.jacobians),
            y=y,
        )

    def _value_column(self, vy: Tensor, c: int) -> Tensor:
        """sum_j p_rj N_j^v[:, c] y_j, (n, columns of Y)."""
        return (self.p[:, None, :] * self.softmax.value.jacobians[:, :, c].T).flatten(0, 1) @ vy

    @property
    def hints(self) -> Hints:
        """A lower bound on sigma_min."""
        return Hints(bounds=self.bounds)

    def bounds(self) -> tuple[float, float]:
        """sigma_min(PY), that of J_V alone; nothing is known of sigma_max."""
        py = self.p @ self._compressed[2]
        if self.values_are_mapped or py.shape[0] > py.shape[1]:
            return 0.0, math.inf
        sigma = singular_values(py).tolist()
        return max(0.0, sigma[-1] - default_rtol(py.shape) * sigma[0]), math.inf

    # --- why its condition number is what it is -----------------------------------------------------------------------

    def attention(self) -> AttentionStatistics:
        """Statistics of P, sinks included; a key that a row gives nothing counts as masked."""
        p, n = self.softmax.p, self.head.num_tokens
        own = None
        if self.head.y is None and self.num_keys_of_tokens == n:
            own = p[:, :n].view(-1, n, n).diagonal(dim1=-2, dim2=-1)
        return map_statistics(p, (p > 0).sum(-1).to(p), own)

    def diagnose(self) -> HeadDiagnosis:
        """As `diagnose_head` of a plain head."""
        py = self.p @ self._compressed[2] if not self.values_are_mapped else self.parameter_blocks()["v"]
        norms = (*self.factors.norms(), float(singular_values(py)[0]))
        kappa_p = spectrum(self.p).pseudo_condition_number
        kappa_x = spectrum(self.head.memory[: self.num_keys_of_tokens]).pseudo_condition_number
        return judge_head(norms, kappa_p, kappa_x, self.attention(), several_keys=self.softmax.p.shape[1] > 1)


@dataclass(frozen=True, eq=False)
class RowwiseFactors(RowFactors):
    """What J J^T and its products are made of.

    Attributes:
        x, m, py: as in `RowFactors`.
        w: W_r with the slopes, (R, dv, M).
        t: t_rj, (R, M, d).
        y: inputs of the key parameters, (M, columns).
    """

    x: Tensor
    m: Tensor
    py: Tensor
    w: Tensor
    t: Tensor
    y: Tensor

    @property
    def key_inputs(self) -> int:
        """Columns of Y."""
        return self.y.shape[1]

    def in_float32(self, largest: float) -> RowwiseFactors:
        """Factors of J / `largest`."""
        m_size, w_size, y_size = (float(part.abs().max()) or 1.0 for part in (self.m, self.w, self.y))
        return RowwiseFactors(
            x=(self.x * (m_size / largest)).float(),
            m=(self.m / m_size).float(),
            py=(self.py / largest).float(),
            w=(self.w / w_size).float(),
            t=(self.t * (w_size * y_size / largest)).float(),
            y=(self.y / y_size).float(),
        )

    def lower_gram(self) -> Tensor:
        """The lower triangle of J J^T."""
        none = self.w[:, :, :0]
        plain = JacobianFactors(x=self.x, q=self.x[:, :0], py=self.py, m=self.m, b=none, p=none, k=none, v=none)
        gram = output_gram(plain, lower=True)
        seen, (rows, dv, d) = int((self.w != 0).any(1).sum()), self.m.shape
        if seen**2 * (d + dv) <= (rows * dv) ** 2 * d * self.y.shape[1]:
            _add_by_pairs(gram, self.w, self.t, self.y @ self.y.T)
        else:
            _add_by_channels(gram, self)
        return gram

    def key_channels(self, channels: slice) -> Tensor:
        """Columns (a, c) of J_K for some channels c, (R dv, columns of y, channels)."""
        t = self.t[:, :, channels].permute(2, 0, 1)[:, :, None, :]
        return ((self.w * t).flatten(1, 2) @ self.y).permute(1, 2, 0)

    def pull_keys(self, by_row: Tensor) -> Tensor:
        """J_K^T u."""
        logits = (self.w.mT @ by_row).transpose(0, 1)  # (j, r, k)
        return (self.y.T @ (self.t.permute(1, 2, 0) @ logits).flatten(1)).unflatten(1, (-1, by_row.shape[2]))

    def push_keys(self, of_keys: Tensor) -> Tensor:
        """J_K w."""
        d, k = self.t.shape[2], of_keys.shape[1]
        keys = (self.y @ of_keys.reshape(-1, d * k)).unflatten(1, (d, k))  # (j, c, k)
        return self.w @ (self.t.transpose(0, 1) @ keys).transpose(0, 1)  # (r, j, k)

    def norms(self) -> tuple[float, float]:
        """Spectral norms of J_Q and J_K, by one run of Lanczos."""
        # Scaled to one, so that the squares of a nearly dead head do not underflow.
        m_size, w_size = (float(part.abs().max()) or 1.0 for part in (self.m, self.w))
        m, w, x_gram, y_gram = self.m / m_size, self.w / w_size, self.x @ self.x.T, self.y @ self.y.T

        def product(flat: Tensor) -> Tensor:
            of_q, of_k = flat.view(2, len(m), -1, 1)
            by_q = m @ (x_gram @ (m.mT @ of_q)[..., 0])[..., None]
            moved = y_gram @ (self.t * (w.mT @ of_k)).sum(0)  # (j, c)
            by_k = w @ (self.t * moved).sum(-1, keepdim=True)
            return torch.stack([by_q, by_k]).flatten(1)

        # Ritz values that agree to 1e-6 three times in a row are right to about 1e-10.
        of_q, of_k = largest_eigenvalues(product, 2, m.shape[0] * m.shape[1], tolerance=1e-6)
        return m_size * max(of_q.value, 0.0) ** 0.5, w_size * max(of_k.value, 0.0) ** 0.5


def mirrored_(lower: Tensor) -> Tensor:
    """The symmetric matrix whose lower triangle is given, in its place."""
    for at in range(0, len(lower), MIRRORED):
        end = min(at + MIRRORED, len(lower))
        corner = lower[at:end, at:end]
        lower[:at, at:end] = lower[at:end, :at].T
        corner.copy_(corner.tril() + corner.tril(-1).T)
    return lower


def _add_by_pairs(gram: Tensor, w: Tensor, t: Tensor, y_gram: Tensor) -> None:
    """Add J_K J_K^T to the lower triangle; see Note [Pairs of rows]."""
    rows, dv, _ = w.shape
    entries = gram.view(rows, dv, rows, dv)
    parts = []
    for at in range(0, rows, ROWS):
        some = slice(at, min(at + ROWS, rows))
        keys = (w[some] != 0).any(0).any(0).nonzero()[:, 0]
        if len(keys):  # the first token of a causal head sees itself only, and has no derivative by its keys
            parts.append((some, keys, w[some][:, :, keys].contiguous(), t[some][:, keys].contiguous()))
    for number, (some, keys, weights, turned) in enumerate(parts):
        for other, other_keys, other_weights, other_turned in parts[: number + 1]:
            products, width = y_gram[keys][:, None, other_keys], other_turned.flatten(0, 1).T
            for row in range(some.stop - some.start):
                pairs = (turned[row] @ width).unflatten(1, (-1, len(other_keys))).mul_(products)  # (j, r', j')
                left = (weights[row] @ pairs.flatten(1)).unflatten(1, (-1, len(other_keys)))  # (o, r', j')
                entries[some.start + row, :, other].add_((left.transpose(0, 1) @ other_weights.mT).transpose(0, 1))


def _add_by_channels(gram: Tensor, factors: RowwiseFactors) -> None:
    """The same by J_K itself, some channels of the keys at a time."""
    n, step = len(gram), max(1, COLUMNS // factors.y.shape[1])
    for first in range(0, factors.t.shape[2], step):
        columns = factors.key_channels(slice(first, first + step)).flatten(1)
        for at in range(0, n, MIRRORED):
            end = min(at + MIRRORED, n)
            gram[at:end, :end].addmm_(columns[at:end], columns[:end].T)
