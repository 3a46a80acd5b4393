r"""Softmax heads whose queries, keys and values pass a map of their own: QK-norm, rotary, sinks, soft-caps.

Legend (theory.md, section 5.1, on top of the legend of `wellcond.jacobian.head`):

    qhat_r = f_r(q_r),  khat_j = f_j(k_j)      the mapped rows; P = softmax of h(Qhat Khat^T)
    N_r^q = df_r/dq (d' x d),  N_j^k           the Jacobians of the maps, one per row
    W_r = V^T Lambda_r  (dv x M)               columns p_rj (v_j - o_r)
    M_r = s W_r Khat N_r^q  (dv x d)           t_rj = N_j^{kT} qhat_r  (d)

Rows of the Jacobian:

    J_Q[r]: (a, c) -> x_r[a] M_r[:, c]      J_K[r]: (a, c) -> s sum_j W_r[:, j] y_j[a] t_rj[c]
    J_V[r]: (a, o) -> (P Y)_r[a] e_o

J_K[r] is not a Kronecker product with q_r, because N_j^k differs from key to key (Note [Pairs of rows]). For the same
reason a bias of the keys, which the plain softmax ignores, has a Jacobian that is not zero: a constant column of Y.

With the slopes of the logits in W_r,

    G_rr' = (x_r . x_r') M_r M_r'^T + W_r (T_rr' * Y Y^T) W_r'^T + (PY_r . PY_r') I,      T_rr'[j, j'] = t_rj . t_r'j'

# Note [Pairs of rows]
J_K[r] is no Kronecker product with q_r, and one channel c of the keys at a time J_K J_K^T takes n^2 d E steps. A pair
of rows (r, r') needs T_rr' of the keys that they see only, d + dv steps for each pair of keys (j, j'): s^2 (d + dv) in
all, s being the number of (row, key) that the mask leaves. For N = 256, d = 64 and a causal mask that is 30 times less.
Long sequences of narrow tokens take the channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wellcond.attention.kernels import AttentionStatistics, map_statistics
from wellcond.errors import WeightError
from wellcond.jacobian.diagnosis import HeadDiagnosis, judge_head
from wellcond.jacobian.head import Head, JacobianFactors, compressed, softmax_weights, through_softmax, with_constant
from wellcond.jacobian.operator import GramOperator, GramSteps, Hints, JacobianOperator, Side
from wellcond.jacobian.ranks import RankBound, counted_biases, wide_shape
from wellcond.jacobian.rowwise_rank import rowwise_rank_bound
from wellcond.jacobian.softmax import output_gram
from wellcond.linalg.lanczos import largest_eigenvalues
from wellcond.linalg.spectrum import default_rtol, singular_values, spectrum

ROWS = 8
"""Rows whose keys are taken together: their products with one row stay in the cache."""
COLUMNS = 256
"""Columns of J_K that are multiplied at once where it is formed by channels."""
MIRRORED = 1024
"""Rows of a lower triangle that are copied above the diagonal at a time."""
Parts = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class TokenMap:
    """A map of rows, evaluated: its values (..., T, d') and one Jacobian per row (..., T, d', d)."""

    value: Tensor
    jacobian: Tensor

    def push(self, rows: Tensor) -> Tensor:
        """The Jacobian of each row times a row of directions."""
        return (self.jacobian @ rows[:, :, None])[..., 0]

    def pull(self, rows: Tensor) -> Tensor:
        """The transposed Jacobian of each row times a row of cotangents."""
        return (rows[:, None, :] @ self.jacobian)[:, 0]


@dataclass(frozen=True, eq=False)
class RowSoftmax:
    """What stands between the products qhat . khat and the output.

    Attributes:
        p: probabilities (R, M), or (R, M + sinks), the last columns being those of sinks, which have no values.
        slope: dS_rj / d(qhat_r . khat_j), (R, M): the scale, times the derivative of a soft-cap.
        value: the map of the values, (M, dv').
        tokenless: how many of the last keys no token makes; their tokens are zero.
        tokens: what the value parameters multiply, (M, E), if it is not what the key parameters do.
        by_query: D_rj = dS_rj / dq_r, (R, M, d), where more than the product depends on the query: positions that
            multiply it (decomposed relative positions, relative keys). It counts up to what is the same for all keys.
    """

    p: Tensor
    slope: Tensor
    value: TokenMap
    tokenless: int = 0
    tokens: Tensor | None = None
    by_query: Tensor | None = None


@dataclass(frozen=True, eq=False)
class RowwiseHead(JacobianOperator):
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
            value, jacobian = mapped.value.detach().double(), mapped.jacobian.detach().double()
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

    @property
    def shape(self) -> tuple[int, int]:
        """R dv outputs, and the weights of the group."""
        return wide_shape(self.head, biases=self.biases)

    @property
    def p(self) -> Tensor:
        """P without the columns of sinks, (R, M)."""
        return self.softmax.p[:, : self.head.memory.shape[0]]

    @property
    def v(self) -> Tensor:
        """V, (M, dv)."""
        return self.softmax.value.value

    @cached_property
    def value_map(self) -> TokenMap | None:
        """The map of the values; None if it is the identity."""
        eye = torch.eye(self.v.shape[1], dtype=self.v.dtype)
        return None if bool((self.softmax.value.jacobian == eye).all()) else self.softmax.value

    @property
    def num_keys_of_tokens(self) -> int:
        """Keys that a token makes; the others follow them."""
        return len(self.head.memory) - self.softmax.tokenless

    def output(self) -> Tensor:
        """P V, (g, N, dv)."""
        return (self.p @ self.v).view(self.head.num_query_heads, self.head.num_tokens, -1)

    def rank_bound(self) -> RankBound:
        """An upper bound; see Note [Symmetry] of `rowwise_rank`."""
        return rowwise_rank_bound(self)

    # --- products: a few of size R x M x d, whatever the tokens -------------------------------------------------------

    def matvec(self, v: Tensor) -> Tensor:
        """J v."""
        g, d, dv, inputs = self.head.num_query_heads, self.head.head_dim, self.head.value_dim, self.inputs()
        x, y, vy = (part.shape[1] for part in inputs)
        of_q, of_k, of_v = v.split((g * x * d, y * d, vy * dv))
        return self._push((of_q.view(g, x, d), of_k.view(y, d), of_v.view(vy, dv)), inputs)

    def rmatvec(self, u: Tensor) -> Tensor:
        """J^T u."""
        return torch.cat([part.flatten() for part in self._pull(u, self.inputs())])

    def _gram_product(self, u: Tensor) -> Tensor:
        return self._push(self._pull(u, self._compressed), self._compressed)

    def _pull(self, u: Tensor, inputs: Parts) -> Parts:
        """J^T u as (g, inputs, d), (inputs, d) and (inputs, dv)."""
        rows, (x, y, vy), softmax = u.view(self.head.num_rows, -1), inputs, self.softmax
        of_logits = through_softmax(self.p, rows @ self.v.T)
        pulled = softmax.slope * of_logits
        if softmax.by_query is None:
            to_q = self.query.pull(pulled @ self.key.value)
        else:
            to_q = (of_logits[:, None, :] @ softmax.by_query)[:, 0]
        to_k = self.key.pull(pulled.T @ self.query.value)
        to_v = self.p.T @ rows
        if self.value_map is not None:
            to_v = self.value_map.pull(to_v)
        return x.T @ to_q.unflatten(0, (self.head.num_query_heads, -1)), y.T @ to_k, vy.T @ to_v

    def _push(self, parts: Parts, inputs: Parts) -> Tensor:
        """J times what `_pull` returns."""
        (of_q, of_k, of_v), (x, y, vy), softmax = parts, inputs, self.softmax
        dq, dk, values = (x @ of_q).flatten(0, 1), self.key.push(y @ of_k), vy @ of_v
        if softmax.by_query is None:
            logits = softmax.slope * (self.query.push(dq) @ self.key.value.T)
        else:
            logits = (softmax.by_query @ dq[:, :, None])[..., 0]
        logits = logits + softmax.slope * (self.query.value @ dk.T)
        if self.value_map is not None:
            values = self.value_map.push(values)
        return (through_softmax(self.p, logits) @ self.v + self.p @ values).flatten()

    @cached_property
    def _compressed(self) -> Parts:
        """What the query, key and value parameters multiply, with Gram matrices as `inputs` and fewer columns."""
        x, y, vy = self.inputs()
        return compressed(x), compressed(y), compressed(vy)

    def inputs(self) -> Parts:
        """What the query, key and value parameters multiply: (N, .), (M, .), (M, .).

        A key that no token makes has no bias either.
        """
        with_q, with_k, with_v = counted_biases(self.head, self.biases)
        real = self.num_keys_of_tokens
        y = self.head.memory
        z = y if self.softmax.tokens is None else self.softmax.tokens
        k, v = (
            torch.nn.functional.pad(with_constant(tokens[:real], constant), (0, 0, 0, len(y) - real))
            for tokens, constant in ((y, with_k), (z, with_v))
        )
        return with_constant(self.head.x, with_q), k, v

    # --- matrices -----------------------------------------------------------------------------------------------------

    def parameter_blocks(self) -> dict[str, Tensor]:
        """J_Q, J_K, J_V (n, parameters), tokens compressed, columns (a, c); a query head owns its own columns."""
        n, vy = self.head.num_outputs, self._compressed[2]
        j_q = torch.einsum("ra,roc->roac", self.factors.x, self.factors.m).reshape(n, -1)
        j_k = self.factors.key_channels(slice(None)).reshape(n, -1)
        if self.value_map is None:
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
        steps = None if self.value_map is not None else lambda: self.factors
        return GramOperator(head.num_outputs, self._gram_product, self._output_gram, scratch=scratch, steps=steps)

    def _output_gram(self) -> Tensor:
        gram = mirrored_(self.factors.lower_gram())
        if self.value_map is not None:
            vy = self._compressed[2]
            for c in range(self.head.value_dim):
                column = self._value_column(vy, c)
                gram.addmm_(column, column.T)
        return gram

    @cached_property
    def factors(self) -> RowwiseFactors:
        """Of the queries and keys, and of values that pass no map."""
        (x, y, vy), softmax, keys = self._compressed, self.softmax, len(self.v)
        # A sink is a key without a value.
        values = torch.cat([self.v, self.v.new_zeros(softmax.p.shape[1] - keys, self.v.shape[1])])
        weights = softmax_weights(softmax.p, values)[..., :keys]
        sloped = weights * softmax.slope[:, None, :]
        if softmax.by_query is None:
            m = (sloped @ self.key.value) @ self.query.jacobian
        else:
            m = weights @ softmax.by_query
        py = self.p @ vy
        return RowwiseFactors(
            x=torch.block_diag(*[x] * self.head.num_query_heads),  # a query head of a group owns its own columns
            m=m,
            py=py if self.value_map is None else py[:, :0],
            w=sloped,
            t=torch.einsum("re,jec->rjc", self.query.value, self.key.jacobian),
            y=y,
        )

    def _value_column(self, vy: Tensor, c: int) -> Tensor:
        """sum_j p_rj N_j^v[:, c] y_j, (n, columns of Y)."""
        assert self.value_map is not None
        return (self.p[:, None, :] * self.value_map.jacobian[:, :, c].T).flatten(0, 1) @ vy

    @property
    def hints(self) -> Hints:
        """A lower bound on sigma_min."""
        return Hints(bounds=self.bounds)

    def bounds(self) -> tuple[float, float]:
        """sigma_min(PY), that of J_V alone; nothing is known of sigma_max."""
        py = self.p @ self._compressed[2]
        if self.value_map is not None or py.shape[0] > py.shape[1]:
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
        py = self.p @ self._compressed[2] if self.value_map is None else self.parameter_blocks()["v"]
        norms = (*self.factors.norms(), float(singular_values(py)[0]))
        kappa_p = spectrum(self.p).pseudo_condition_number
        kappa_x = spectrum(self.head.memory[: self.num_keys_of_tokens]).pseudo_condition_number
        return judge_head(norms, kappa_p, kappa_x, self.attention(), several_keys=self.softmax.p.shape[1] > 1)


@dataclass(frozen=True, eq=False)
class RowwiseFactors(GramSteps):
    """What J J^T and its products are made of; J J^T for iterations.

    Attributes:
        x: inputs of the query parameters as each row sees them, (R, columns).
        m: M_r, (R, dv, d).
        py: inputs of the value parameters times P, (R, columns).
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
    def size(self) -> int:
        """R dv."""
        return self.m.shape[0] * self.m.shape[1]

    def lower_float32(self, largest: float) -> Tensor:
        """The lower triangle of J J^T / largest^2, from factors of moderate size: squares must stay within float32."""
        m_size, w_size, y_size = (float(part.abs().max()) or 1.0 for part in (self.m, self.w, self.y))
        scaled = RowwiseFactors(
            x=(self.x * (m_size / largest)).float(),
            m=(self.m / m_size).float(),
            py=(self.py / largest).float(),
            w=(self.w / w_size).float(),
            t=(self.t * (w_size * y_size / largest)).float(),
            y=(self.y / y_size).float(),
        )
        return scaled.lower_gram()

    def shifted(self, largest: float, bound: float) -> Tensor:
        """The lower triangle of J J^T - bound I; nothing needs `largest` here."""
        gram = self.lower_gram()
        gram.diagonal().sub_(bound)
        return gram

    def lower_gram(self) -> Tensor:
        """The lower triangle of J J^T; what is above the diagonal is not defined."""
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

    def forward(self, u: Tensor) -> Tensor:
        """J^T u for rows u (k, R dv): (k, parameters)."""
        by_row = u.view(len(u), len(self.m), -1).permute(1, 2, 0)  # (r, o, k)
        to_q = (self.x.T @ (self.m.mT @ by_row).flatten(1)).unflatten(1, (-1, len(u)))  # (a, c, k)
        logits = (self.w.mT @ by_row).transpose(0, 1)  # (j, r, k)
        to_k = (self.y.T @ (self.t.permute(1, 2, 0) @ logits).flatten(1)).unflatten(1, (-1, len(u)))
        to_v = (self.py.T @ by_row.flatten(1)).unflatten(1, (-1, len(u)))  # (a, o, k)
        return torch.cat([part.flatten(0, 1) for part in (to_q, to_k, to_v)]).T

    def backward(self, w: Tensor) -> Tensor:
        """J w for rows w (k, parameters): (k, R dv)."""
        (_, dv, d), k = self.m.shape, len(w)
        widths = (self.x.shape[1] * d, self.y.shape[1] * d, self.py.shape[1] * dv)
        of_q, of_k, of_v = (part.T for part in w.split(widths, dim=1))
        seen = (self.x @ of_q.reshape(-1, d * k)).unflatten(1, (d, k))  # (r, c, k)
        keys = (self.y @ of_k.reshape(-1, d * k)).unflatten(1, (d, k))  # (j, c, k)
        logits = (self.t.transpose(0, 1) @ keys).transpose(0, 1)  # (r, j, k)
        read = (self.py @ of_v.reshape(-1, dv * k)).unflatten(1, (dv, k))  # (r, o, k)
        return (self.m @ seen + self.w @ logits + read).flatten(0, 1).T

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
