r"""One attention head as data, and the quantities that the statements are about.

Legend (letters of the papers; their weights are D x d, ours are torch's (out, in) transposes):

    X   N x D    tokens                         w_q, w_k  d x D,  w_v  dv x D,   s  logit scale
    Q = X w_q^T, K = X w_k^T, V = X w_v^T       P = softmax_rows(s Q K^T + mask),  rows p_i
    Lambda_i = diag(p_i) - p_i p_i^T            M_i = s V^T Lambda_i K  (dv x d),  B_i = s V^T Lambda_i X  (dv x D)

The parameter Jacobian of the head output A = P V has the three blocks, rows ordered (token i, output o),

    J_Q = blockdiag(M_i) (X (x) I_d),   J_K = blockdiag(B_i) (Q (x) I_D) up to column order,   J_V = P X (x) I_dv.

Biases are one more column: X -> [X 1], w -> [w b]; every statement then holds for the weights and biases together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.errors import WeightError
from wellcond.linalg.float64 import to_float64

MAX_ELEMENTS = 2**23  # of one temporary of `_centred`: 64 MB in float64


@dataclass(frozen=True, eq=False)
class Head:
    """Tokens, weights and mask of one head, held in float64 and without gradient.

    Args:
        x: tokens, N x D.
        w_q: query weight, d x D.
        w_k: key weight, d x D.
        w_v: value weight, dv x D.
        scale: logit scale s, usually 1/sqrt(d).
        mask: additive N x N mask, -inf where an entry is masked; a large negative number counts as unmasked.
        p: attention probabilities, N x N, if they come from elsewhere (measured, or another logit rule). Their zeros
            are taken as masked.

    Raises:
        ValueError: shapes that do not fit, probabilities that are not.
        WeightError: entries that are not finite, or a row that is masked throughout (its softmax is NaN).

    Example:
        >>> eye = torch.eye(2)
        >>> Head(eye, eye, eye, eye, scale=0.0).num_tokens
        2
    """

    x: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    scale: float
    mask: Tensor | None = None
    p: Tensor | None = None

    def __post_init__(self) -> None:
        """Cast to float64 and check."""
        for name in ("x", "w_q", "w_k", "w_v", "mask", "p"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, to_float64(value))
        if any(t.dim() != 2 for t in (self.x, self.w_q, self.w_k, self.w_v)):
            raise ValueError("expected matrices x (N x D), w_q and w_k (d x D), w_v (dv x D)")
        shapes = [tuple(t.shape) for t in (self.x, self.w_q, self.w_k, self.w_v)]
        if self.w_q.shape != self.w_k.shape or len({shape[1] for shape in shapes}) > 1:
            raise ValueError(f"expected x (N, D), w_q and w_k (d, D), w_v (dv, D); got {shapes}")
        if not all(bool(torch.isfinite(t).all()) for t in (self.x, self.w_q, self.w_k, self.w_v)):
            raise WeightError("expected finite tokens and weights, found NaN or infinity")
        square = (self.num_tokens, self.num_tokens)
        for name, matrix in (("mask", self.mask), ("p", self.p)):
            if matrix is not None and tuple(matrix.shape) != square:
                raise ValueError(f"expected {name} of shape {square}, got {tuple(matrix.shape)}")
        if self.mask is not None and bool(torch.isneginf(self.mask).all(-1).any()):
            raise WeightError("a row of the mask is -inf throughout: its softmax is not defined. Drop that token.")
        if self.p is not None and not bool((self.p >= 0).all() and ((self.p.sum(-1) - 1).abs() < 1e-6).all()):
            raise ValueError("expected the rows of p to be probabilities: non-negative, with sum 1")

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.x.shape[0]

    @property
    def width(self) -> int:
        """D."""
        return self.x.shape[1]

    @property
    def head_dim(self) -> int:
        """d, of queries and keys."""
        return self.w_q.shape[0]

    @property
    def value_dim(self) -> int:
        """dv, of values."""
        return self.w_v.shape[0]


def queries(head: Head) -> Tensor:
    """Q = X w_q^T, N x d."""
    return head.x @ head.w_q.T


def keys(head: Head) -> Tensor:
    """K = X w_k^T, N x d."""
    return head.x @ head.w_k.T


def values(head: Head) -> Tensor:
    """V = X w_v^T, N x dv."""
    return head.x @ head.w_v.T


def log_probabilities(head: Head) -> Tensor:
    """Logarithm of P, finite where P underflows (a self-logit gap of 800 is e^-800); -inf where it is masked."""
    if head.p is not None:
        return head.p.log()
    logits = head.scale * queries(head) @ keys(head).T
    return torch.log_softmax(logits if head.mask is None else logits + head.mask, -1)


def probabilities(head: Head) -> Tensor:
    """P = softmax_rows(s Q K^T + mask), N x N."""
    return head.p if head.p is not None else log_probabilities(head).exp()


def mixed_tokens(head: Head) -> Tensor:
    """P X, N x D."""
    return probabilities(head) @ head.x


def query_blocks(head: Head) -> Iterator[Tensor]:
    """M_i = s V^T Lambda_i K, in chunks of shape (rows, dv, d)."""
    return _centred(head, keys(head))


def key_blocks(head: Head) -> Iterator[Tensor]:
    """B_i = s V^T Lambda_i X, in chunks of shape (rows, dv, D)."""
    return _centred(head, head.x)


def query_block_singular_values(head: Head) -> Tensor:
    """Singular values of every M_i, largest first, (N, min(dv, d))."""
    return torch.cat([torch.linalg.svdvals(m) for m in query_blocks(head)])


def key_block_norms(head: Head) -> Tensor:
    """||B_i||, (N,)."""
    return torch.cat([torch.linalg.svdvals(b)[:, 0] for b in key_blocks(head)])


def _centred(head: Head, z: Tensor) -> Iterator[Tensor]:
    # V^T Lambda_i Z = sum_j p_ij v_j z_j^T - (V^T p_i)(Z^T p_i)^T cancels when p_i is nearly one-hot. The equal
    #     sum_j p_ij (v_j - V^T p_i)(z_j - Z^T p_i)^T
    # keeps relative accuracy: 4.9e-170 against a spurious 0 in the dead head of T13.
    p, v = probabilities(head), values(head)
    v_mean, z_mean = p @ v, p @ z
    rows = max(1, MAX_ELEMENTS // (head.num_tokens * max(v.shape[1], z.shape[1])))
    for start in range(0, head.num_tokens, rows):
        chunk = slice(start, start + rows)
        left = p[chunk, :, None] * (v[None] - v_mean[chunk, None])
        right = z[None] - z_mean[chunk, None]
        yield head.scale * left.mT @ right
