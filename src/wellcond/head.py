r"""One softmax head (or the heads of one key/value group) on given tokens, and the blocks its Jacobian is made of.

Legend (theory.md, section 3; everything float64):

    X  N x D    query tokens            Y  M x E     key/value tokens (Y = X for self-attention)
    q_r, k_j, v_j                       rows of Q = X Wq, K = Y Wk, V = Y Wv, biases included
    r                                   a row of the output: a token of a head; R = g N rows for g grouped heads
    P  R x M    softmax of s Q K^T + mask;  p_r a row of it;   o_r = V^T p_r the output
    Lambda_r    diag(p_r) - p_r p_r^T
    M_r = s V^T Lambda_r K  (dv x d)    B_r = s V^T Lambda_r Y  (dv x E)

The Jacobian is made of rows

    J_Q[r]: (a, c) -> x_r[a] M_r[:, c]        J_K[r]: (a, c) -> B_r[:, a] q_r[c]        J_V[r]: (a, o) -> (P Y)_r[a] e_o

so it depends on the tokens of the keys only through Gram matrices: Y may be replaced by any L with L L^T = Y Y^T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from wellcond.errors import WeightError
from wellcond.linalg.spectrum import cast_to_float64, move_to_cpu

CHUNK_BYTES = 64 * 2**20
BISECTIONS = 80  # an interval of width 1e3 in log p shrinks below 1e-20
LARGEST_SECTION, SECTION_ENTRIES = 16, 2**18
SMALLEST_ON_DEVICE = 1024  # outputs; fewer do not fill a GPU, whose library decomposes small matrices one by one
TENSORS = ("x", "w_q", "w_k", "w_v", "mask", "y", "b_q", "b_k", "b_v", "p")


@dataclass(frozen=True, eq=False)
class Head:
    """Tokens and weights of one head, held in float64; weights are (out, in) as in torch.

    With at least `SMALLEST_ON_DEVICE` outputs it stays on its device, if that has float64; else it goes to the CPU.

    Args:
        x: tokens, N x D.
        w_q: query weight, d x D, or (g, d, D) for g query heads that share one key/value head.
        w_k: key weight, d x E.
        w_v: value weight, dv x E.
        scale: logit scale s, usually 1/sqrt(d).
        mask: added to the logits, N x M or (g, N, M): -inf where a key is masked, a relative position bias, or both. A
            large negative number counts as unmasked.
        y: tokens of keys and values, M x E; x if None.
        b_q: query bias, (d) or (g, d).
        b_k: key bias, (d).
        b_v: value bias, (dv).
        p: attention probabilities, N x M or (g, N, M), if they come from elsewhere (measured, or another logit rule).
            Their zeros are taken as masked.

    Raises:
        ValueError: shapes that do not fit, probabilities that are not.
        WeightError: entries that are not finite, or a token that is masked from everything (its softmax is NaN).

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
    y: Tensor | None = None
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    p: Tensor | None = None

    def __post_init__(self) -> None:
        """Take to float64, to the CPU if small, and check shapes and values."""
        cast_to_float64(self, TENSORS, unchecked=("mask",))
        _check(self)
        if self.num_outputs < SMALLEST_ON_DEVICE:
            move_to_cpu(self, TENSORS)

    def cpu(self) -> Head:
        """The same on the CPU."""
        return replace(self, **{name: t.cpu() for name in TENSORS if (t := getattr(self, name)) is not None})

    @property
    def memory(self) -> Tensor:
        """Tokens that keys and values are made of."""
        return self.x if self.y is None else self.y

    @property
    def query_weights(self) -> Tensor:
        """w_q of every query head, (g, d, D)."""
        return self.w_q if self.w_q.dim() == 3 else self.w_q[None]

    @property
    def query_biases(self) -> Tensor | None:
        """b_q of every query head, (g, d)."""
        return self.b_q[None] if self.b_q is not None and self.b_q.dim() == 1 else self.b_q

    @property
    def num_query_heads(self) -> int:
        """Query heads g of the group."""
        return self.query_weights.shape[0]

    @property
    def num_tokens(self) -> int:
        """Query tokens N."""
        return self.x.shape[0]

    @property
    def width(self) -> int:
        """D."""
        return self.x.shape[1]

    @property
    def num_rows(self) -> int:
        """R = g N."""
        return self.num_query_heads * self.num_tokens

    @property
    def head_dim(self) -> int:
        """d, of queries and keys."""
        return self.w_k.shape[0]

    @property
    def value_dim(self) -> int:
        """dv, of values."""
        return self.w_v.shape[0]

    @property
    def num_outputs(self) -> int:
        """Rows of the wide Jacobian, R dv."""
        return self.num_rows * self.value_dim

    @property
    def is_single(self) -> bool:
        """One query head that attends to its own tokens: what the papers and their statements are about."""
        return self.num_query_heads == 1 and self.y is None

    def queries(self) -> Tensor:
        """Q, (g, N, d)."""
        q = torch.einsum("nc,gdc->gnd", self.x, self.query_weights)
        return q if self.query_biases is None else q + self.query_biases[:, None, :]

    def keys(self) -> Tensor:
        """K, (M, d)."""
        k = self.memory @ self.w_k.T
        return k if self.b_k is None else k + self.b_k

    def values(self) -> Tensor:
        """V, (M, dv)."""
        v = self.memory @ self.w_v.T
        return v if self.b_v is None else v + self.b_v

    def logits(self) -> Tensor:
        """Logits s Q K^T + mask, (g, N, M)."""
        logits = self.scale * self.queries() @ self.keys().T
        return logits if self.mask is None else logits + self.mask

    def probabilities(self) -> Tensor:
        """P, (g, N, M)."""
        if self.p is not None:
            return self.p.expand(self.num_query_heads, -1, -1)
        return self._softmax

    @cached_property
    def _softmax(self) -> Tensor:
        return self.logits().softmax(-1)

    def log_probabilities(self) -> Tensor:
        """Logarithm of P, finite where P underflows (a logit gap of 800 is e^-800); -inf where it is masked."""
        return self.probabilities().log() if self.p is not None else self.logits().log_softmax(-1)

    def output(self) -> Tensor:
        """P V, (g, N, dv)."""
        return self.probabilities() @ self.values()


def _check(head: Head) -> None:
    expected = "expected x (N, D), w_q (d, D) or (g, d, D), w_k (d, E), w_v (dv, E)"
    if any(t.dim() != 2 for t in (head.x, head.memory, head.w_k, head.w_v)) or head.w_q.dim() not in (2, 3):
        shapes = [tuple(t.shape) for t in (head.x, head.memory, head.w_q, head.w_k, head.w_v)]
        raise ValueError(f"expected matrices: {expected}; got x, y, w_q, w_k, w_v of shapes {shapes}")
    D, E = head.x.shape[-1], head.memory.shape[-1]
    for name, tensor, last in (("w_q", head.w_q, D), ("w_k", head.w_k, E), ("w_v", head.w_v, E)):
        if tensor.shape[-1] != last:
            raise ValueError(f"{name}: expected {last} columns ({expected}), got shape {tuple(tensor.shape)}")
    if head.w_q.shape[-2] != head.w_k.shape[0]:
        raise ValueError(f"queries and keys differ in width: {head.w_q.shape[-2]} and {head.w_k.shape[0]}")
    shape = (head.num_tokens, head.memory.shape[0])
    for name, matrix in (("mask", head.mask), ("p", head.p)):
        if matrix is not None and (tuple(matrix.shape[-2:]) != shape or matrix.dim() > 3):
            raise ValueError(f"expected {name} of shape {shape} (or one per query head), got {tuple(matrix.shape)}")
    if head.mask is not None:
        if bool(torch.isnan(head.mask).any()) or bool((head.mask == torch.inf).any()):
            raise ValueError("mask: expected finite numbers and -inf, found NaN or +inf")
        dead = (head.mask == -torch.inf).all(-1)
        if bool(dead.any()):
            rows = dead.nonzero()[:, -1].unique().tolist()
            raise WeightError(
                f"mask: tokens {rows[:8]} may attend to nothing (masked throughout), so their softmax is not defined"
            )
    if head.p is not None and not bool((head.p >= 0).all() and ((head.p.sum(-1) - 1).abs() < 1e-6).all()):
        raise ValueError("expected the rows of p to be probabilities: non-negative, with sum 1")


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

    @cached_property
    def py_values(self) -> Tensor:
        """Singular values of py."""
        return torch.linalg.svdvals(self.py)

    @cached_property
    def x_values(self) -> Tensor:
        """Those of x."""
        return torch.linalg.svdvals(self.x)

    @cached_property
    def m_values(self) -> Tensor:
        """Those of every M_r."""
        return torch.linalg.svdvals(self.m)


def build_blocks(head: Head, *, biases: bool = False, compress: bool = True) -> Blocks:
    """The blocks of a head.

    Args:
        head: tokens and weights.
        biases: biases count as parameters.
        compress: replace Y by an equivalent L with at most as many columns as tokens; singular values are unchanged.
    """
    g = head.num_query_heads
    p, k, v = head.probabilities().flatten(0, 1), head.keys(), head.values()
    y = compressed(head.memory) if compress else head.memory
    x = y if head.y is None else compressed(head.x) if compress else head.x
    x = with_constant(x, biases and head.b_q is not None)
    rows = torch.block_diag(*[x] * g) if g > 1 else x
    py = with_constant(p @ y, biases and head.b_v is not None)
    m, b = weighted_covariances(p, k, v, y, head.scale)
    return Blocks(x=rows, q=head.queries().flatten(0, 1), py=py, m=m, b=b, p=p, k=k, v=v)


def compressed(tokens: Tensor) -> Tensor:
    """L with L L^T = T T^T and min(N, D) columns: the R factor of T^T, transposed."""
    if tokens.shape[0] >= tokens.shape[1]:
        return tokens
    return torch.linalg.qr(tokens.T).R.T


def with_constant(tokens: Tensor, constant: bool) -> Tensor:
    """The inputs of a projection: tokens, and the constant input of its bias if that is a parameter."""
    return torch.cat([tokens, torch.ones_like(tokens[:, :1])], 1) if constant else tokens


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


def through_softmax(p: Tensor, t: Tensor) -> Tensor:
    """Lambda_r t_r for every row: the derivative of the row softmax, which is its own transpose."""
    return p * (t - (p * t).sum(-1, keepdim=True))


def softmax_weights(p: Tensor, v: Tensor) -> Tensor:
    """V^T Lambda_r of every row, (R, dv, M): columns p_rj (v_j - o_r).

    The columns of each sum to zero. Where p_r is nearly one-hot, v_j - o_r cancels for its largest entry, and only for
    that one; it is replaced by minus the sum of the others, which keeps relative accuracy.
    """
    w = p[:, None, :] * (v.T - (p @ v)[:, :, None])
    top = p.argmax(-1)[:, None, None].expand(-1, v.shape[1], 1)
    w.scatter_(2, top, 0.0)
    return w.scatter_(2, top, -w.sum(-1, keepdim=True))


@dataclass(frozen=True, eq=False)
class SoftmaxSpectrum:
    """Per row i: the rank of Lambda_i and the natural logarithms of its extreme non-zero eigenvalues.

    A row with a single unmasked entry has Lambda_i = 0, rank 0, and both logarithms -inf.
    """

    rank: Tensor
    log_max: Tensor
    log_min: Tensor

    @property
    def norm(self) -> float:
        """Lmax = max_i ||Lambda_i||, at most 1/2."""
        return math.exp(float(self.log_max.max()))

    @property
    def log10_kappa(self) -> float:
        r"""log10 of kappa(Lambda) = max_i lambda_max(Lambda_i) / min_i lambda_min,nonzero(Lambda_i).

        Lambda_i 1 = 0, so kappa(Lambda) is infinite if read literally; this is the pseudo reading. Rows of rank 0 are
        skipped; NaN if there is no other.
        """
        rows = self.rank > 0
        if not bool(rows.any()):
            return math.nan
        return float(self.log_max[rows].max() - self.log_min[rows].min()) / math.log(10)


def softmax_spectrum(head: Head) -> SoftmaxSpectrum:
    """`softmax_spectra` of one head.

    Example:
        >>> x, w = torch.tensor([[1.0], [2.0]]), torch.ones(1, 1)
        >>> round(10 ** softmax_spectrum(Head(x, w, w, w, 1.0)).log10_kappa, 9)
        1.872609003
    """
    return softmax_spectra([head])[0]


def softmax_spectra(heads: Sequence[Head]) -> list[SoftmaxSpectrum]:
    """Spectrum of every Lambda_i, for heads with equally many keys.

    Accurate to a few rounding errors of log p relative to each eigenvalue.
    The rank is structural, the number of unmasked entries less one; no eigenvalue is dropped for being small: under
    lambda-corrections it is 1e-280 and smaller, which no eigenvalue routine resolves.
    """
    at_once = max(1, SECTION_ENTRIES // (heads[0].num_rows * len(heads[0].memory)))  # few large ones, many small ones
    return [one for at in range(0, len(heads), at_once) for one in _softmax_spectra(heads[at : at + at_once])]


def _softmax_spectra(heads: Sequence[Head]) -> list[SoftmaxSpectrum]:
    log_p = torch.cat([head.log_probabilities().flatten(0, 1) for head in heads])
    rank = torch.isfinite(log_p).sum(-1) - 1
    inside = rank > 0
    log_max = torch.full_like(log_p[:, 0], -torch.inf)
    log_min = log_max.clone()
    if bool(inside.any()):
        rows = log_p[inside]
        top = rows.topk(2, -1).values
        bottom = rows.masked_fill(torch.isneginf(rows), torch.inf).topk(2, -1, largest=False).values
        low, high = torch.cat([top[:, 1], bottom[:, 0]]), torch.cat([top[:, 0], bottom[:, 1]])
        log_max[inside], log_min[inside] = _root(rows.repeat(2, 1), low, high).chunk(2)
    sizes = [head.num_rows for head in heads]
    parts = (numbers.split(sizes) for numbers in (rank, log_max, log_min))
    return [SoftmaxSpectrum(*of_head) for of_head in zip(*parts, strict=True)]


def _root(log_p: Tensor, low: Tensor, high: Tensor) -> Tensor:
    # diag(p) - p p^T is a rank-one update of a diagonal matrix: mu is an eigenvalue between two neighbouring p_j iff
    #     1 = sum_j p_j^2 / (p_j - mu) = sum_j p_j + mu sum_j p_j / (p_j - mu).
    # With sum_j p_j = 1 and mu != 0 this is
    #     f(mu) = sum_j p_j / (p_j - mu) = sum_j 1 / (1 - e^(log mu - log p_j)) = 0,
    # which increases from -inf to +inf between neighbours: one root, found by sections of log mu, more than two at once
    # where they are small. Masked entries (log p = -inf) contribute 1 / (1 - inf) = 0, and equal neighbours are their
    # own root.
    parts = max(2, min(LARGEST_SECTION, SECTION_ENTRIES // log_p.numel()))
    fractions = torch.arange(1, parts, dtype=torch.float64, device=log_p.device) / parts
    for _ in range(math.ceil(BISECTIONS / math.log2(parts))):
        inner = low[:, None] + (high - low)[:, None] * fractions
        if bool(((inner <= low[:, None]) | (inner >= high[:, None])).all()):
            break  # no number lies between
        left = (-torch.expm1(inner[:, :, None] - log_p[:, None, :])).reciprocal().sum(-1) <= 0
        ends, at = torch.cat([low[:, None], inner, high[:, None]], 1), left.sum(-1, keepdim=True)
        low, high = ends.gather(1, at)[:, 0], ends.gather(1, at + 1)[:, 0]
    return (low + high) / 2
