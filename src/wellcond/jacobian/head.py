r"""One softmax head (or the heads of one key/value group) on given tokens, and the blocks its Jacobian is made of.

Legend (theory.md, sections 1 to 3; everything float64):

    X  N x D    query tokens            Y  M x E     key/value tokens (Y = X for self-attention)
    q_r, k_j, v_j                       rows of Q = X Wq, K = Y Wk, V = Y Wv, biases included
    r                                   a row of the output: a token of a head; R = g N rows for g grouped heads
    P  R x M    softmax of s Q K^T + bias;  p_r a row of it;   o_r = V^T p_r the output
    Lambda_r    diag(p_r) - p_r p_r^T
    M_r = s V^T Lambda_r K  (dv x d)    B_r = s V^T Lambda_r Y  (dv x E)

The Jacobian is made of rows (theory.md 2.2)

    J_Q[r]: (a, c) -> x_r[a] M_r[:, c]        J_K[r]: (a, c) -> B_r[:, a] q_r[c]        J_V[r]: (a, o) -> (P Y)_r[a] e_o

so it depends on the tokens of the keys only through Gram matrices: Y may be replaced by any L with L L^T = Y Y^T.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from wellcond.errors import WeightError

CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class SoftmaxHead:
    """Tokens and weights of one head; weights are (out, in) as torch stores them.

    `w_q` is (d, D), or (g, d, D) for g query heads that share one key/value head. `logit_bias` is added to the logits:
    -inf where a key is masked, a relative position bias, or both; (N, M) or (g, N, M).
    """

    x: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    scale: float
    y: Tensor | None = None
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    logit_bias: Tensor | None = None

    def __post_init__(self) -> None:
        """Take to the CPU in float64, where LAPACK is, and check shapes and values."""
        for name in ("x", "w_q", "w_k", "w_v", "y", "b_q", "b_k", "b_v", "logit_bias"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, value.detach().cpu().to(torch.float64))
        if self.w_q.dim() == 2:
            object.__setattr__(self, "w_q", self.w_q[None])
        if self.b_q is not None and self.b_q.dim() == 1:
            object.__setattr__(self, "b_q", self.b_q[None])
        _check(self)

    @property
    def memory(self) -> Tensor:
        """Tokens that keys and values are made of."""
        return self.x if self.y is None else self.y

    @property
    def num_query_heads(self) -> int:
        """Query heads g of the group."""
        return self.w_q.shape[0]

    @property
    def num_tokens(self) -> int:
        """Query tokens N."""
        return self.x.shape[0]

    @property
    def num_rows(self) -> int:
        """R = g N."""
        return self.num_query_heads * self.num_tokens

    @property
    def head_dim(self) -> int:
        """D."""
        return self.w_k.shape[0]

    @property
    def value_dim(self) -> int:
        """Dv."""
        return self.w_v.shape[0]

    @property
    def num_outputs(self) -> int:
        """Rows of the wide Jacobian, R dv."""
        return self.num_rows * self.value_dim

    def queries(self) -> Tensor:
        """Q, (g, N, d)."""
        q = torch.einsum("nc,gdc->gnd", self.x, self.w_q)
        return q if self.b_q is None else q + self.b_q[:, None, :]

    def keys(self) -> Tensor:
        """K, (M, d)."""
        k = self.memory @ self.w_k.T
        return k if self.b_k is None else k + self.b_k

    def values(self) -> Tensor:
        """V, (M, dv)."""
        v = self.memory @ self.w_v.T
        return v if self.b_v is None else v + self.b_v

    def probabilities(self) -> Tensor:
        """P, (g, N, M)."""
        logits = self.scale * self.queries() @ self.keys().T
        return (logits if self.logit_bias is None else logits + self.logit_bias).softmax(-1)

    def output(self) -> Tensor:
        """P V, (g, N, dv)."""
        return self.probabilities() @ self.values()


def _check(head: SoftmaxHead) -> None:
    D, E = head.x.shape[-1], head.memory.shape[-1]
    for name, tensor, last in (("w_q", head.w_q, D), ("w_k", head.w_k, E), ("w_v", head.w_v, E)):
        if tensor.shape[-1] != last:
            raise ValueError(f"{name}: expected {last} columns for these tokens, got shape {tuple(tensor.shape)}")
    if head.x.dim() != 2 or head.memory.dim() != 2:
        raise ValueError(f"expected tokens (N, D), got {tuple(head.x.shape)} and {tuple(head.memory.shape)}")
    if head.w_q.shape[1] != head.w_k.shape[0]:
        raise ValueError(f"queries and keys differ in width: {head.w_q.shape[1]} and {head.w_k.shape[0]}")
    for name in ("x", "y", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v"):
        tensor = getattr(head, name)
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise WeightError(f"{name} has NaN or infinite entries: the Jacobian is not defined")
    bias = head.logit_bias
    if bias is not None:
        expected = (head.num_tokens, head.memory.shape[0])
        if tuple(bias.shape[-2:]) != expected or bias.dim() > 3:
            raise ValueError(f"mask: expected shape {expected} (or one per query head), got {tuple(bias.shape)}")
        if bool(torch.isnan(bias).any()) or bool((bias == torch.inf).any()):
            raise ValueError("mask: expected finite numbers and -inf, found NaN or +inf")
        dead = (bias == -torch.inf).all(-1)
        if bool(dead.any()):
            rows = dead.nonzero()[:, -1].unique().tolist()
            raise ValueError(f"mask: tokens {rows[:8]} may attend to nothing, so their softmax is not defined")


@dataclass(frozen=True, eq=False)
class Blocks:
    """What every form of the Jacobian is assembled from; see the legend of this file.

    `x` (R, gD~) are the inputs of the query parameters as each row sees them, a bias being one more constant input, and
    a query head of a group owning its own columns. `py` likewise for the value parameters. The bias of the keys has a
    zero Jacobian (V^T Lambda_r 1 = 0) and does not appear.
    """

    x: Tensor
    q: Tensor
    py: Tensor
    m: Tensor
    b: Tensor
    p: Tensor
    k: Tensor = field(repr=False)
    v: Tensor = field(repr=False)


def build_blocks(head: SoftmaxHead, *, biases: bool = False, compress: bool = True) -> Blocks:
    """The blocks of a head.

    Args:
        head: tokens and weights.
        biases: biases count as parameters.
        compress: replace Y by an equivalent L with at most as many columns as tokens; singular values are unchanged.
    """
    g, N = head.num_query_heads, head.num_tokens
    p, k, v = head.probabilities().flatten(0, 1), head.keys(), head.values()
    y = compressed(head.memory) if compress else head.memory
    x = compressed(head.x) if compress else head.x
    if biases and head.b_q is not None:
        x = torch.cat([x, x.new_ones(N, 1)], dim=1)
    rows = torch.block_diag(*[x] * g) if g > 1 else x
    py = p @ y
    if biases and head.b_v is not None:
        py = torch.cat([py, py.new_ones(len(py), 1)], dim=1)
    m, b = weighted_covariances(p, k, v, y, head.scale)
    return Blocks(x=rows, q=head.queries().flatten(0, 1), py=py, m=m, b=b, p=p, k=k, v=v)


def compressed(tokens: Tensor) -> Tensor:
    """L with L L^T = T T^T and min(N, D) columns: the R factor of T^T, transposed."""
    if tokens.shape[0] >= tokens.shape[1]:
        return tokens
    return torch.linalg.qr(tokens.T).R.T


def weighted_covariances(p: Tensor, k: Tensor, v: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """M_r and B_r, in the centred form, which keeps relative accuracy when p_r is nearly one-hot.

    V^T Lambda_r Z = sum_j p_rj (v_j - o_r) (z_j - Z^T p_r)^T
    """
    rows, dv = len(p), v.shape[1]
    m, b = p.new_empty(rows, dv, k.shape[1]), p.new_empty(rows, dv, y.shape[1])
    widest = max(dv, k.shape[1], y.shape[1])
    size = max(1, CHUNK_BYTES // (8 * v.shape[0] * widest))
    for at in range(0, rows, size):
        some = slice(at, at + size)
        part = p[some]
        weighted_v = scale * part[:, :, None] * (v - (part @ v)[:, None, :])
        m[some] = weighted_v.mT @ (k - (part @ k)[:, None, :])
        b[some] = weighted_v.mT @ (y - (part @ y)[:, None, :])
    return m, b
