r"""Softmax heads whose queries and keys pass a map of their own before they meet: QK-norm, cosine attention, rotary.

Legend (theory.md, section 5.1, on top of the legend of `wellcond.head`):

    qhat_r = f_r(q_r),  khat_j = f_j(k_j)      the mapped rows; P = softmax of s Qhat Khat^T + bias
    N_r^q = df_r/dq (d' x d),  N_j^k           the Jacobians of the maps, one per row
    W_r = V^T Lambda_r  (dv x M)               columns p_rj (v_j - o_r)
    M_r = s W_r Khat N_r^q  (dv x d)           t_rj = N_j^{kT} qhat_r  (d)

Rows of the Jacobian:

    J_Q[r]: (a, c) -> x_r[a] M_r[:, c]      J_K[r]: (a, c) -> s sum_j W_r[:, j] y_j[a] t_rj[c]
    J_V[r]: (a, o) -> (P Y)_r[a] e_o

J_K[r] is not a Kronecker product with q_r, because N_j^k differs from key to key; it is formed one channel c of the
keys at a time, F_c = s (W * t[., ., c]) Y, and J_K J_K^T = sum_c F_c F_c^T. For the same reason a bias of the keys,
which the plain softmax ignores, has a Jacobian that is not zero: it is one more constant column of Y.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wellcond.errors import WeightError
from wellcond.head import Head, compressed, softmax_weights, through_softmax
from wellcond.jacobian.form import AbstractForm, Structure, token_rank
from wellcond.jacobian.token_maps import MapRows, Symmetry, TokenMap, eye_like, is_present, l2_norm
from wellcond.linalg.spectrum import resolve_rank


def with_constant(tokens: Tensor, constant: bool) -> Tensor:
    """The inputs of a projection: tokens, and the constant input of its bias if that is a parameter."""
    return torch.cat([tokens, torch.ones_like(tokens[:, :1])], 1) if constant else tokens


@dataclass(frozen=True, eq=False)
class NormalisedHead(AbstractForm):
    """A `Head` whose queries and keys pass maps; parameters are those of the head, the maps are fixed.

    Attributes:
        head: tokens and weights; its own `probabilities()` are not those of this form.
        query: the map of `head.queries()`, values (g, N, d') or (R, d').
        key: the map of `head.keys()`, values (M, d').
        biases: the biases of the head count as parameters.
    """

    head: Head
    query: TokenMap
    key: TokenMap
    biases: bool = False

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

    @cached_property
    def p(self) -> Tensor:
        """P, (R, M)."""
        logits = self.head.scale * self.query.value @ self.key.value.T
        bias = self.head.mask
        if bias is not None:
            logits = logits + bias.expand(self.num_query_heads, -1, -1).flatten(0, 1)
        return logits.softmax(-1)

    @cached_property
    def v(self) -> Tensor:
        """V, (M, dv)."""
        return self.head.values()

    def output(self) -> Tensor:
        """P V, (g, N, dv)."""
        return (self.p @ self.v).view(self.num_query_heads, self.head.num_tokens, -1)

    def structure(self) -> Structure:
        """Sizes and an upper bound on the rank; see Note [Symmetry]."""
        return _structure(self)

    def parameter_blocks(self) -> dict[str, Tensor]:
        """J_Q, J_K, J_V (n, parameters), tokens compressed, columns (a, c); a query head owns its own columns."""
        n, weights = self.num_outputs, softmax_weights(self.p, self.v)
        x, y, vy = self._inputs()
        j_q = torch.einsum("ra,roc->roac", self._rows_of(x), self._m(weights)).reshape(n, -1)
        j_k = torch.stack([self._key_column(weights, y, c) for c in range(self.head.head_dim)], dim=2).reshape(n, -1)
        j_v = torch.einsum("ra,ok->roak", self.p @ vy, eye_like(self.v)).reshape(n, -1)
        return {"q": j_q, "k": j_k, "v": j_v}

    def explicit_jacobian(self) -> Tensor:
        """J with compressed tokens: the same singular values."""
        return torch.cat(list(self.parameter_blocks().values()), dim=1)

    def output_gram(self) -> Tensor:
        """J J^T, (n, n); J_K costs n^2 d min(M, E), one column of the keys at a time."""
        n, rows, dv = self.num_outputs, self.head.num_rows, self.head.value_dim
        weights = softmax_weights(self.p, self.v)
        x, y, vy = self._inputs()
        m, x_rows, pv = self._m(weights).reshape(n, -1), self._rows_of(x), self.p @ vy
        gram = m @ m.T
        blocks = gram.view(rows, dv, rows, dv)
        blocks.mul_((x_rows @ x_rows.T)[:, None, :, None])
        for c in range(self.head.head_dim):
            column = self._key_column(weights, y, c)
            gram.addmm_(column, column.T)
        blocks.diagonal(dim1=1, dim2=3).add_((pv @ pv.T)[:, :, None])
        return gram

    def product(self, flat: Tensor) -> Tensor:
        """J J^T times a vector of length n, at the cost of a few products R x M x d."""
        u = flat.view(self.head.num_rows, -1)
        x_gram, y_gram, value_gram = self._token_grams
        pulled = self.head.scale * through_softmax(self.p, u @ self.v.T)
        # back through the maps, to the tokens and forward again
        dq = _apply(self.query, x_gram @ _apply_transposed(self.query, pulled @ self.key.value))
        dk = _apply(self.key, y_gram @ _apply_transposed(self.key, pulled.T @ self.query.value))
        logits = self.head.scale * (dq @ self.key.value.T + self.query.value @ dk.T)
        return (through_softmax(self.p, logits) @ self.v + value_gram @ u).flatten()

    @cached_property
    def _token_grams(self) -> tuple[Tensor, Tensor, Tensor]:
        x, y, vy = self._inputs()
        pv = self.p @ vy
        x_rows = self._rows_of(x)
        return x_rows @ x_rows.T, y @ y.T, pv @ pv.T

    def _inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the query, key and value parameters multiply, compressed: (N, .), (M, .), (M, .)."""
        head = self.head
        with_q, with_k, with_v = _counted(self)
        y = head.memory
        return (
            compressed(with_constant(head.x, with_q)),
            compressed(with_constant(y, with_k)),
            compressed(with_constant(y, with_v)),
        )

    def _rows_of(self, x: Tensor) -> Tensor:
        """The tokens as each row sees them: a query head of a group owns its own columns."""
        return torch.block_diag(*[x] * self.num_query_heads)

    def _m(self, weights: Tensor) -> Tensor:
        """M_r = s W_r Khat N_r^q, (R, dv, d)."""
        return self.head.scale * (weights @ self.key.value) @ self.query.jacobian

    def _key_column(self, weights: Tensor, y: Tensor, c: int) -> Tensor:
        """F_c = s (W * t_c) Y, (n, columns of Y), with t_c[r, j] = (N_j^{kT} qhat_r)[c]."""
        t = self.head.scale * self.query.value @ self.key.jacobian[:, :, c].T
        return (weights * t[:, None, :]).flatten(0, 1) @ y


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


def _counted(form: NormalisedHead) -> tuple[bool, bool, bool]:
    """Which biases are parameters."""
    head = form.head
    return tuple(form.biases and b is not None for b in (head.b_q, head.b_k, head.b_v))  # type: ignore[return-value]


def _structure(form: NormalisedHead) -> Structure:
    r"""Sizes, and an upper bound on the rank.

    Note [Symmetry]. Directions of the query (key) parameters that cannot move qhat:
      - a (x) z with N_r z = 0 for every r: the kernel common to all rows (LayerNorm: z = 1), once per token dimension;
      - Wq itself if N_r q_r = 0 for every r (norms without eps do not see the scale of their input), once per head.
    Directions of both that cancel, (Wq E, Wk F): if the map commutes with the group of E,
      - linear, F = -E^T:                   d^2, less those with Q E = 0 and K E^T = 0
      - orthogonal, E skew, F = E:          d (d-1)/2, less those with Q E = 0 and K E = 0
      - centred (LayerNorm without affine): the same on the d - 1 dimensions orthogonal to 1
      - half, interleaved (rotary):         E = a + b S per pair of channels, F = -E^T: d
    A bias that is present but no parameter breaks them, as does an affine norm; then they are not counted.
    Logits of a row count only up to a constant, so at most sum_r (#keys seen - 1) dimensions pass the softmax.
    Generic weights have this rank under self-attention with more tokens than channels, for one of the maps above and
    no fixed biases; for combinations of maps, affine norms or a handful of keys it is an upper bound only.
    """
    head, d, g = form.head, form.head.head_dim, form.num_query_heads
    with_q, with_k, with_v = _counted(form)
    rx, ry = token_rank(head.x), token_rank(head.memory)
    qx, ky, vy = (
        token_rank(with_constant(tokens, constant)) if constant else rank
        for tokens, constant, rank in ((head.x, with_q, rx), (head.memory, with_k, ry), (head.memory, with_v, ry))
    )
    inputs_q, inputs_k = head.x.shape[1] + with_q, head.memory.shape[1] + with_k
    parameters = g * d * inputs_q + d * inputs_k + head.value_dim * (head.memory.shape[1] + with_v)
    fixed_q, fixed_k = is_present(head.b_q) and not with_q, is_present(head.b_k) and not with_k
    queries, keys = head.queries().flatten(0, 1), head.keys()
    per_head = len(queries) // g
    seen = sum(
        _visible(form.query.jacobian[at : at + per_head], queries[at : at + per_head], qx, fixed_q)
        for at in range(0, len(queries), per_head)
    ) + _visible(form.key.jacobian, keys, ky, fixed_k)
    same = form.query.symmetry == form.key.symmetry and not (fixed_q or fixed_k)
    gauge = _gauge(form.query.symmetry, queries, keys) if same else 0
    logits = min(max(0, seen - gauge), _free_logits(head))
    rank = min(form.num_outputs, logits + head.value_dim * vy)
    names = []
    if rank < form.num_outputs:
        names = ["upper bound on the rank", f"gauge (W_Q E, W_K F): {gauge}"]
        names.append(f"unseen by the maps or outside the span of the tokens: {g * d * inputs_q + d * inputs_k - seen}")
    return Structure(form.num_outputs, parameters, rx, ry, rank, "; ".join(names))


def _visible(jacobians: Tensor, rows: Tensor, inputs: int, fixed_bias: bool) -> int:
    """Dimensions of one projection's parameters that can move the mapped rows, at most."""
    stacked = jacobians.flatten(0, 1)
    _, sigma, basis = torch.linalg.svd(stacked, full_matrices=False)
    visible = int(resolve_rank(sigma, tuple(stacked.shape)))
    moved = torch.linalg.vector_norm((jacobians @ rows[:, :, None])[..., 0], dim=-1)
    sizes = torch.linalg.matrix_norm(jacobians) * torch.linalg.vector_norm(rows, dim=-1)
    unmoved = bool((moved <= 1e-13 * rows.shape[1] * sizes).all())
    in_kernel = float((rows @ basis[:visible].T).norm()) <= 1e-10 * float(rows.norm())  # then it is counted already
    return visible * inputs - int(unmoved and not in_kernel and not fixed_bias)


def _gauge(symmetry: Symmetry, queries: Tensor, keys: Tensor) -> int:
    """Dimension of the directions (Wq E, Wk F) of Note [Symmetry]."""
    d, both = queries.shape[1], torch.cat([queries, keys])
    if symmetry == "linear":
        return d * d - (d - token_rank(queries)) * (d - token_rank(keys))
    if symmetry in ("half", "interleaved"):
        return d if bool(both.any(0).all()) else 0
    if symmetry == "none":
        return 0
    if symmetry == "centred":
        d, both = d - 1, both - both.mean(-1, keepdim=True)
    free = d - token_rank(both)
    return (d * (d - 1) - free * (free - 1)) // 2


def _free_logits(head: Head) -> int:
    """sum_r (#keys that row r sees - 1)."""
    rows, keys = head.num_rows, head.memory.shape[0]
    if head.mask is None:
        return rows * (keys - 1)
    seen = (head.mask > -torch.inf).expand(head.num_query_heads, -1, -1)
    return int(seen.sum()) - rows
