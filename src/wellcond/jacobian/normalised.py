r"""Softmax heads whose queries and keys pass a map of their own before they meet: QK-norm, cosine attention, rotary.

Legend (theory.md, section 5.1, on top of the legend of `wellcond.jacobian.head`):

    qhat_r = f_r(q_r),  khat_j = f_j(k_j)      the mapped rows; P = softmax of s Qhat Khat^T + bias
    N_r^q = df_r/dq (d' x d),  N_j^k           the Jacobians of the maps, one per row
    W_r = V^T Lambda_r  (dv x M)               columns p_rj (v_j - o_r)
    M_r = s W_r Khat N_r^q  (dv x d)           t_rj = N_j^{kT} qhat_r  (d)

Rows of the Jacobian:

    J_Q[r]: (a, c) -> x_r[a] M_r[:, c]      J_K[r]: (a, c) -> s sum_j W_r[:, j] y_j[a] t_rj[c]
    J_V[r]: (a, o) -> (P Y)_r[a] e_o

J_K[r] is not a Kronecker product with q_r, because N_j^k differs from key to key (Note [Pairs of rows]). For the same
reason a bias of the keys, which the plain softmax ignores, has a Jacobian that is not zero: a constant column of Y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wellcond.errors import WeightError
from wellcond.jacobian.diagnosis import AttentionStatistics, HeadDiagnosis, judge_head, map_statistics
from wellcond.jacobian.form import AbstractForm
from wellcond.jacobian.head import Head, compressed, softmax_weights, through_softmax, with_constant
from wellcond.jacobian.mapped_gram import MappedBlocks, MappedOutputSide, mirrored_
from wellcond.jacobian.mapped_rank import mapped_structure
from wellcond.jacobian.maps import MapRows, TokenMap, eye_like, l2_norm
from wellcond.linalg.spectrum import default_rtol, singular_values, spectrum
from wellcond.theory.ranks import Structure


@dataclass(frozen=True, eq=False)
class Softmax:
    """What stands between the products qhat . khat and the output, where it is more than a scale and a mask.

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
class NormalisedHead(AbstractForm):
    """A `Head` whose queries and keys pass maps; parameters are those of the head, the maps are fixed.

    Attributes:
        head: tokens and weights; its own `probabilities()` are not those of this form.
        query: the map of `head.queries()`, values (g, N, d') or (R, d').
        key: the map of `head.keys()`, values (M, d').
        biases: the biases of the head count as parameters.
        softmax: None for the softmax of s Qhat Khat^T + mask and values as they are.
    """

    head: Head
    query: TokenMap
    key: TokenMap
    biases: bool = False
    softmax: Softmax | None = None
    has_sides = True

    def __post_init__(self) -> None:
        """Flatten the maps to one row per query and key, and check them."""
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
            flat = TokenMap(value.reshape(count, width), jacobian.reshape(count, width, d), mapped.symmetry)
            object.__setattr__(self, name, flat)
        if self.query.value.shape[-1] != self.key.value.shape[-1]:
            raise ValueError("mapped queries and keys differ in width")

    @property
    def num_outputs(self) -> int:
        """Rows of the wide Jacobian, R dv."""
        return self.head.num_outputs

    @property
    def num_query_heads(self) -> int:
        """Query heads g of the group."""
        return self.head.num_query_heads

    @property
    def p(self) -> Tensor:
        """P, (R, M)."""
        return self.all_probabilities[:, : self.head.memory.shape[0]]

    @cached_property
    def all_probabilities(self) -> Tensor:
        """P, and behind it the columns of sinks, (R, M + sinks)."""
        if self.softmax is not None:
            return self.softmax.p
        logits = self.head.scale * self.query.value @ self.key.value.T
        bias = self.head.mask
        if bias is not None:
            logits = logits + bias.expand(self.num_query_heads, -1, -1).flatten(0, 1)
        return logits.softmax(-1)

    @cached_property
    def v(self) -> Tensor:
        """V, (M, dv)."""
        return self.head.values() if self.softmax is None else self.softmax.value.value

    @property
    def slope(self) -> Tensor | float:
        """Derivative of S by qhat . khat, for each row and key, or one number for all."""
        return self.head.scale if self.softmax is None else self.softmax.slope

    @property
    def _by_query(self) -> Tensor | None:
        return None if self.softmax is None else self.softmax.by_query

    @cached_property
    def value_map(self) -> TokenMap | None:
        """The map of the values; None if it is the identity."""
        if self.softmax is None or bool((self.softmax.value.jacobian == eye_like(self.v)).all()):
            return None
        return self.softmax.value

    def output(self) -> Tensor:
        """P V, (g, N, dv)."""
        return (self.p @ self.v).view(self.num_query_heads, self.head.num_tokens, -1)

    def structure(self) -> Structure:
        """Sizes and an upper bound on the rank; see Note [Symmetry] of `mapped_rank`."""
        return mapped_structure(self)

    def parameter_blocks(self) -> dict[str, Tensor]:
        """J_Q, J_K, J_V (n, parameters), tokens compressed, columns (a, c); a query head owns its own columns."""
        n, vy = self.num_outputs, self._inputs()[2]
        j_q = torch.einsum("ra,roc->roac", self.blocks.x, self.blocks.m).reshape(n, -1)
        j_k = self.blocks.key_channels(slice(None)).reshape(n, -1)
        if self.value_map is None:
            j_v = torch.einsum("ra,ok->roak", self.p @ vy, eye_like(self.v)).reshape(n, -1)
        else:
            j_v = torch.stack([self._value_column(vy, c) for c in range(self.head.value_dim)], dim=2).reshape(n, -1)
        return {"q": j_q, "k": j_k, "v": j_v}

    def explicit_jacobian(self) -> Tensor:
        """J with compressed tokens: the same singular values."""
        return torch.cat(list(self.parameter_blocks().values()), dim=1)

    def output_gram(self) -> Tensor:
        """J J^T, (n, n)."""
        gram = mirrored_(self.blocks.gram())
        if self.value_map is not None:
            vy = self._inputs()[2]
            for c in range(self.head.value_dim):
                column = self._value_column(vy, c)
                gram.addmm_(column, column.T)
        return gram

    @cached_property
    def blocks(self) -> MappedBlocks:
        """Of the queries and keys, and of values that pass no map."""
        (x, y, vy), weights = self._inputs(), self._weights()
        py = self.p @ vy
        return MappedBlocks(
            x=self._rows_of(x),
            m=self._m(weights),
            py=py if self.value_map is None else py[:, :0],
            w=weights * (self.slope if isinstance(self.slope, float) else self.slope[:, None, :]),
            t=torch.einsum("re,jec->rjc", self.query.value, self.key.jacobian),
            y=y,
        )

    def attention(self) -> AttentionStatistics:
        """Of P, sinks included; a key that a row gives nothing counts as masked."""
        p, n = self.all_probabilities, self.head.num_tokens
        own = None
        if self.head.y is None and self.num_keys_of_tokens == n:
            own = p[:, :n].view(-1, n, n).diagonal(dim1=-2, dim2=-1)
        return map_statistics(p, (p > 0).sum(-1).to(p), own)

    def diagnose(self) -> HeadDiagnosis:
        """As of a plain head."""
        py = self.p @ self._inputs()[2] if self.value_map is None else self.parameter_blocks()["v"]
        norms = (*self.blocks.norms(), float(singular_values(py)[0]))
        kappa_p = spectrum(self.p).pseudo_condition_number
        kappa_x = spectrum(self.head.memory[: self.num_keys_of_tokens]).pseudo_condition_number
        return judge_head(norms, kappa_p, kappa_x, self.attention(), several_keys=self.all_probabilities.shape[1] > 1)

    @property
    def table_entries(self) -> int:
        """W_r and t_rj of every row and key, and what they are made of."""
        head = self.head
        by_query = 0 if self._by_query is None else self._by_query.numel()
        return 2 * head.num_rows * len(head.memory) * (head.head_dim + head.value_dim) + by_query

    def output_side(self) -> MappedOutputSide | None:
        """J J^T for iterations; None where the values pass a map."""
        return MappedOutputSide(self.blocks) if self.value_map is None else None

    def smaller_side(self) -> MappedOutputSide | None:
        """The same: J^T J has no basis of its null space."""
        return self.output_side()

    def certified(self) -> tuple[float, float]:
        """sigma_min(PY), that of J_V alone; nothing is known of sigma_max."""
        py = self.p @ self._inputs()[2]
        if self.value_map is not None or py.shape[0] > py.shape[1]:
            return 0.0, math.inf
        sigma = singular_values(py).tolist()
        return max(0.0, sigma[-1] - default_rtol(py.shape) * sigma[0]), math.inf

    def product(self, flat: Tensor) -> Tensor:
        """J J^T times a vector of length n, at the cost of a few products R x M x d."""
        u = flat.view(self.head.num_rows, -1)
        x_gram, y_gram, value_gram = self._token_grams
        of_logits = through_softmax(self.p, u @ self.v.T)
        pulled = self.slope * of_logits
        # back through the maps, to the tokens and forward again
        if self._by_query is None:
            dq = _apply(self.query, x_gram @ _apply_transposed(self.query, pulled @ self.key.value))
            by_queries = self.slope * (dq @ self.key.value.T)
        else:
            dq = x_gram @ (of_logits[:, None, :] @ self._by_query)[:, 0]
            by_queries = (self._by_query @ dq[:, :, None])[..., 0]
        dk = _apply(self.key, y_gram @ _apply_transposed(self.key, pulled.T @ self.query.value))
        logits = by_queries + self.slope * (self.query.value @ dk.T)
        if self.value_map is None:
            by_values = self.p @ (value_gram @ (self.p.T @ u))
        else:
            by_values = self.p @ _apply(self.value_map, value_gram @ _apply_transposed(self.value_map, self.p.T @ u))
        return (through_softmax(self.p, logits) @ self.v + by_values).flatten()

    @cached_property
    def _token_grams(self) -> tuple[Tensor, Tensor, Tensor]:
        x, y, vy = self._inputs()
        x_rows = self._rows_of(x)
        return x_rows @ x_rows.T, y @ y.T, vy @ vy.T

    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the query, key and value parameters multiply, compressed: (N, .), (M, .), (M, .)."""
        return tuple(compressed(tokens) for tokens in self.read())  # type: ignore[return-value]

    @property
    def counted(self) -> tuple[bool, bool, bool]:
        """Which biases are parameters."""
        head = self.head
        return tuple(self.biases and b is not None for b in (head.b_q, head.b_k, head.b_v))  # type: ignore[return-value]

    @property
    def num_keys_of_tokens(self) -> int:
        """Keys that a token makes; the others follow them."""
        return len(self.head.memory) - (0 if self.softmax is None else self.softmax.tokenless)

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same, not compressed; a key that no token makes has no bias either."""
        with_q, with_k, with_v = self.counted
        real = self.num_keys_of_tokens
        y = z = self.head.memory
        if self.softmax is not None and self.softmax.tokens is not None:
            z = self.softmax.tokens
        k, v = (
            torch.nn.functional.pad(with_constant(tokens[:real], constant), (0, 0, 0, len(y) - real))
            for tokens, constant in ((y, with_k), (z, with_v))
        )
        return with_constant(self.head.x, with_q), k, v

    def _rows_of(self, x: Tensor) -> Tensor:
        """The tokens as each row sees them: a query head of a group owns its own columns."""
        return torch.block_diag(*[x] * self.num_query_heads)

    def _m(self, weights: Tensor) -> Tensor:
        """M_r = s W_r Khat N_r^q, (R, dv, d), or W_r D_r."""
        if self._by_query is not None:
            return weights @ self._by_query
        slope = self.slope if isinstance(self.slope, float) else self.slope[:, None, :]
        return ((slope * weights) @ self.key.value) @ self.query.jacobian

    def _value_column(self, vy: Tensor, c: int) -> Tensor:
        """sum_j p_rj N_j^v[:, c] y_j, (n, columns of Y)."""
        assert self.value_map is not None
        return (self.p[:, None, :] * self.value_map.jacobian[:, :, c].T).flatten(0, 1) @ vy

    def _weights(self) -> Tensor:
        """W_r = V^T Lambda_r, (R, dv, M); a sink is a key without a value."""
        if self.softmax is None:
            return softmax_weights(self.p, self.v)
        p, keys = self.softmax.p, len(self.v)
        return softmax_weights(p, torch.cat([self.v, self.v.new_zeros(p.shape[1] - keys, self.v.shape[1])]))[..., :keys]


def mapped_head(head: Head, query: MapRows, key: MapRows | None = None, *, biases: bool = False) -> NormalisedHead:
    """The form of a head whose queries pass `query` and whose keys pass `key` (the same map if None).

    Example:
        >>> one = torch.ones(2, 2)
        >>> head = Head(torch.eye(2), one, one, one, scale=1.0)
        >>> mapped_head(head, l2_norm).output().shape
        torch.Size([1, 2, 2])
    """
    return NormalisedHead(head, query(head.queries()), (key or query)(head.keys()), biases)


def cosine_head(head: Head, *, eps: float = 1e-12, biases: bool = False) -> NormalisedHead:
    """Cosine attention (Swin V2): l2-normalised queries and keys; `head.scale` is the clamped, exponentiated one."""
    return mapped_head(head, lambda rows: l2_norm(rows, eps=eps), biases=biases)


def _apply(mapped: TokenMap, rows: Tensor) -> Tensor:
    return (mapped.jacobian @ rows[:, :, None])[..., 0]


def _apply_transposed(mapped: TokenMap, rows: Tensor) -> Tensor:
    return (rows[:, None, :] @ mapped.jacobian)[:, 0]
