r"""One softmax head (or the heads of one key/value group) on given tokens, and the rank that its Jacobian can have.

Legend (theory.md, section 3; everything float64):

    X  N x D    query tokens            Y  M x E     key/value tokens (Y = X for self-attention)
    q_r, k_j, v_j                       rows of Q = X Wq, K = Y Wk, V = Y Wv, biases included
    r                                   a row of the output: a token of a head; R = g N rows for g grouped heads
    P  R x M    softmax of s Q K^T + mask;  p_r a row of it;   o_r = V^T p_r the output
    Lambda_r    diag(p_r) - p_r p_r^T

# Note [Rank of the Jacobian]
The output sees Wq and Wk only through the logits, dS = X dWq K^T + Q dWk^T Y^T (the papers' D x d weights), up to a
constant per row, which softmax ignores: Y and K count as centred. Let g query heads share the keys, and let

    r_q   the rank of what the query weights multiply: X, or [X 1] with a bias that is a parameter
    r_k   that of the centred Y: rank Y - [1 in range(Y)]; a bias of the keys is centred away
    f     the rank of query biases that are no parameters; 0 if 1 in range(X), where they change nothing

In coordinates of these spans the first term is any g r_q x r_k matrix with rows in the range of the keys, of dimension
e_k = min(d, r_k), and the second any with columns in the range of the queries, of dimension e_q = min(d, g r_q + f).
They have in common what cancels, the gauge (Wq E, -Wk E^T) with b E = 0 for biases b: min(d - f, g r_q) e_k dimensions.

    rank (J_Q J_K) = g r_q e_k + e_q r_k - min(d - f, g r_q) e_k

On the output side dA_i = s V^T Lambda_i dS_i lies in the range of the centred V^T, of dimension min(dv, r_k). J_V =
PY (x) I fills r_v of the R = g N token directions, r_v the rank of Y, or of [Y 1] with a bias that is a parameter, and
leaves (R - r_v) min(dv, r_k) for Q and K. Generic weights attain each minimum; masks may lower it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wellcond.errors import WeightError
from wellcond.jacobian.operator import RankBound
from wellcond.linalg.spectrum import cast_to_float64, move_to, numerical_rank, resolve_rank, singular_values

TENSORS = ("x", "w_q", "w_k", "w_v", "mask", "y", "b_q", "b_k", "b_v")
GROUPED = {"w_q": 3, "b_q": 2, "mask": 3}  # dimensions with the axis of a group of query heads, which may lack


@dataclass(frozen=True, eq=False)
class Head:
    """Tokens and weights of one head, held in float64; weights are (out, in) as in torch.

    It is on the device of its tokens, if that has float64.

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

    Raises:
        ValueError: shapes that do not fit.
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

    def __post_init__(self) -> None:
        cast_to_float64(self, TENSORS, unchecked=("mask",))
        move_to(self.x.device, self, TENSORS)
        _check(self)

    def cpu(self) -> Head:
        """This head on the CPU."""
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
        return self.query_weights.shape[-3]

    @property
    def num_tokens(self) -> int:
        """Query tokens N."""
        return self.x.shape[-2]

    @property
    def width(self) -> int:
        """D."""
        return self.x.shape[-1]

    @property
    def num_rows(self) -> int:
        """R = g N."""
        return self.num_query_heads * self.num_tokens

    @property
    def head_dim(self) -> int:
        """d, of queries and keys."""
        return self.w_k.shape[-2]

    @property
    def value_dim(self) -> int:
        """dv, of values."""
        return self.w_v.shape[-2]

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
        q = self.x[..., None, :, :] @ self.query_weights.mT
        return q if self.query_biases is None else q + self.query_biases[..., None, :]

    def keys(self) -> Tensor:
        """K, (M, d)."""
        k = self.memory @ self.w_k.mT
        return k if self.b_k is None else k + self.b_k[..., None, :]

    def values(self) -> Tensor:
        """V, (M, dv)."""
        v = self.memory @ self.w_v.mT
        return v if self.b_v is None else v + self.b_v[..., None, :]

    def logits(self) -> Tensor:
        """Logits s Q K^T + mask, (g, N, M)."""
        logits = self.scale * self.queries() @ self.keys()[..., None, :, :].mT
        return logits if self.mask is None else logits + self.mask

    def probabilities(self) -> Tensor:
        """P, (g, N, M)."""
        return self._softmax

    @cached_property
    def _softmax(self) -> Tensor:
        return self.logits().softmax(-1)

    def log_probabilities(self) -> Tensor:
        """Logarithm of P, finite where P underflows (a logit gap of 800 is e^-800); -inf where it is masked."""
        return self.logits().log_softmax(-1)

    def output(self) -> Tensor:
        """P V, (g, N, dv)."""
        return self.probabilities() @ self.values()[..., None, :, :]


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
    _check_biases(head)
    shape = (head.num_tokens, head.memory.shape[0])
    if head.mask is not None:
        if tuple(head.mask.shape[-2:]) != shape or head.mask.dim() > 3:
            raise ValueError(f"expected mask of shape {shape} (or one per query head), got {tuple(head.mask.shape)}")
        if bool(torch.isnan(head.mask).any()) or bool((head.mask == torch.inf).any()):
            raise ValueError("mask: expected finite numbers and -inf, found NaN or +inf")
        dead = (head.mask == -torch.inf).all(-1)
        if bool(dead.any()):
            rows = dead.nonzero()[:, -1].unique().tolist()
            raise WeightError(
                f"mask: tokens {rows[:8]} may attend to nothing (masked throughout), so their softmax is not defined"
            )


def _check_biases(head: Head) -> None:
    """A bias has an entry for each row of its weight; that of grouped queries, of every query head."""
    for name, weight in (("b_q", head.w_q), ("b_k", head.w_k), ("b_v", head.w_v)):
        bias, expected = getattr(head, name), tuple(weight.shape[:-1])
        if bias is not None and tuple(bias.shape) not in (expected, expected[-1:]):
            raise ValueError(
                f"{name}: expected the shape {expected} of the rows of its weight, got {tuple(bias.shape)}"
            )


@dataclass(frozen=True, eq=False)
class HeadStack(Head):
    """Heads of one shape: tensors have one axis more in front, masks and P always that of a group too."""

    def __post_init__(self) -> None:
        """The heads were checked."""

    query_weights = property(lambda self: self.w_q)  # type: ignore[assignment]
    query_biases = property(lambda self: self.b_q)  # type: ignore[assignment]


def can_stack(heads: Sequence[Head]) -> bool:
    """Whether heads have one shape, one scale and one device."""

    def form(head: Head) -> tuple[object, ...]:
        return head.scale, head.x.device, *(getattr(getattr(head, name), "shape", None) for name in TENSORS)

    return all(form(head) == form(heads[0]) for head in heads)


def stack_heads(heads: Sequence[Head]) -> HeadStack:
    """Heads that `can_stack`. What all of them share, tokens most of all, is not copied."""

    def together(name: str) -> Any:
        first, *others = found = [getattr(head, name) for head in heads]
        if first is None:
            return None
        same = all(t.data_ptr() == first.data_ptr() and t.stride() == first.stride() for t in others)
        stacked = first.expand(len(found), *first.shape) if same else torch.stack(found)
        return stacked if first.dim() == GROUPED.get(name, first.dim()) else stacked[:, None]

    return HeadStack(scale=heads[0].scale, **{name: together(name) for name in TENSORS})


def compressed(tokens: Tensor) -> Tensor:
    """L with L L^T = T T^T and min(N, D) columns: the R factor of T^T, transposed."""
    if tokens.shape[-2] >= tokens.shape[-1]:
        return tokens
    return torch.linalg.qr(tokens.mT).R.mT


def with_constant(tokens: Tensor, constant: bool) -> Tensor:
    """The inputs of a projection: tokens, and the constant input of its bias if that is a parameter."""
    return torch.cat([tokens, torch.ones_like(tokens[..., :1])], -1) if constant else tokens


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


# --- ranks: see Note [Rank of the Jacobian] --------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """Ranks of the three blocks and of both ways to join them; the stack exists for dv = d only."""

    query: int
    key: int
    value: int
    wide: int
    stack: int | None


def generic_ranks(
    num_tokens: int,
    rank: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    ones_in_range: bool | None = None,
    fixed_biases: int = 0,
) -> Ranks:
    """Ranks for almost every head of these sizes without a mask; Note [Rank of the Jacobian].

    Args:
        num_tokens: N.
        rank: r, of the tokens.
        head_dim: d.
        value_dim: dv; d if None.
        ones_in_range: whether 1 is in range(X): always for r = N, with biases ([X 1]), else generically not (None).
        fixed_biases: f, 1 for a query bias that is no parameter.

    Raises: ValueError unless 1 <= r <= N.

    Example:
        >>> generic_ranks(12, 4, 2)
        Ranks(query=8, key=8, value=8, wide=20, stack=8)
    """
    n, r, d = num_tokens, rank, head_dim
    if not 1 <= r <= n:
        raise ValueError(f"expected a rank between 1 and {n} tokens, got {r}")
    dv = d if value_dim is None else value_dim
    ones = r == n or bool(ones_in_range)
    r_c, fixed = r - ones, 0 if ones else fixed_biases
    rows = n * min(dv, d, r_c)
    return Ranks(
        query=min(rows, r * min(d, r_c)),
        key=min(rows, r_c * min(d, r + fixed)),
        value=dv * r,
        wide=wide_rank(n, r, r_c, r, head_dim=d, value_dim=dv, fixed=fixed),
        stack=d * r if dv == d else None,
    )


def logit_rank(query: int, key: int, *, head_dim: int, groups: int = 1, fixed: int = 0) -> int:
    """Dimensions of W_Q and W_K that can move the output: r_q, r_k, d, g and f of Note [Rank of the Jacobian]."""
    e_q, e_k = min(head_dim, groups * query + fixed), min(head_dim, key)
    return groups * query * e_k + e_q * key - min(head_dim - fixed, groups * query) * e_k


def wide_rank(
    rows: int, query: int, key: int, value: int, *, head_dim: int, value_dim: int, groups: int = 1, fixed: int = 0
) -> int:
    """Rank of J_wide with `rows` rows of tokens: R, r_q, r_k, r_v, d, dv, g and f of Note [Rank of the Jacobian]."""
    filled = min(rows, value)
    by_logits = logit_rank(query, key, head_dim=head_dim, groups=groups, fixed=fixed)
    return value_dim * filled + min((rows - filled) * min(value_dim, key), by_logits)


def wide_shape(head: Head, *, biases: bool = False) -> tuple[int, int]:
    """Outputs and parameters of a head or a group of heads; `biases` are parameters."""
    with_q, with_k, with_v = counted_biases(head, biases)
    width, memory_width = head.x.shape[1], head.memory.shape[1]
    of_queries = head.num_query_heads * head.head_dim * (width + with_q)
    return head.num_outputs, of_queries + head.head_dim * (memory_width + with_k) + head.value_dim * (
        memory_width + with_v
    )


def counted_biases(head: Head, biases: bool) -> tuple[bool, bool, bool]:
    """Which biases of queries, keys and values are there and count as parameters."""
    return biases and head.b_q is not None, biases and head.b_k is not None, biases and head.b_v is not None


def wide_rank_bound(head: Head, *, biases: bool = False, known: dict[Any, tuple[int, bool]] | None = None) -> RankBound:
    """Rank of J_wide for a head or a group of heads; `biases` are parameters.

    `known` keeps the ranks of tokens for the next head, which has the same ones in most layers.
    """
    d, dv, g = head.head_dim, head.value_dim, head.num_query_heads
    with_q, _, with_v = counted_biases(head, biases)
    rx, ones_x = _rank_of(head.x, known)
    ry, ones_y = (rx, ones_x) if head.y is None else _rank_of(head.memory, known)
    query, key, value = rx + (with_q and not ones_x), ry - ones_y, ry + (with_v and not ones_y)
    fixed = 0 if head.query_biases is None or with_q or ones_x else numerical_rank(head.query_biases)
    rank = wide_rank(head.num_rows, query, key, value, head_dim=d, value_dim=dv, groups=g, fixed=fixed)
    outputs, parameters = wide_shape(head, biases=biases)
    names = []
    if rank < min(outputs, parameters):
        # Of what the tokens span, the constant key moves no softmax, and the gauge is the rest that moves nothing.
        seen = d * (g * query + ry)
        gauge = seen - d * ones_y - logit_rank(query, key, head_dim=d, groups=g, fixed=fixed)
        outside = parameters - seen - dv * value
        names = [f"gauge (W_Q E, -W_K E^T): {gauge}"]
        names += [f"the same added to all keys: {d}"] if ones_y else []
        names += [f"outside the span of the tokens: {outside}"] if outside else []
    return RankBound(rank, "; ".join(names), ry)


def _rank_of(tokens: Tensor, known: dict[Any, tuple[int, bool]] | None) -> tuple[int, bool]:
    place = tokens.data_ptr(), tokens.shape, tokens.stride()
    found = None if known is None else known.get(place)
    if found is None:
        found = rank_and_ones(tokens)
        if known is not None:
            known[place] = found
    return found


def stack_rank_bound(head: Head, *, known: dict[Any, tuple[int, bool]] | None = None) -> RankBound:
    """Rank of the papers' stacked matrix, 3 R dv x Dd; `known` as in `wide_rank_bound`."""
    d, (r, _), width = head.head_dim, _rank_of(head.x, known), head.x.shape[1]
    names = f"outside the span of the tokens: {d * (width - r)}" if r < width else ""
    return RankBound(d * r, names, r)


def rank_and_ones(matrix: Tensor) -> tuple[int, bool]:
    """Numerical rank of a matrix, and whether the all-ones vector lies in its range: appending it adds no rank."""
    sigma = singular_values(matrix)
    rank = int(resolve_rank(sigma, tuple(matrix.shape)))
    if rank in (0, len(matrix)):
        return rank, rank > 0
    # At the length of the largest singular value the added column leaves the tolerance where it was.
    ones = matrix.new_full((len(matrix), 1), float(sigma[0]) / len(matrix) ** 0.5)
    return rank, numerical_rank(torch.cat([matrix, ones], 1)) == rank


def contains_ones(matrix: Tensor) -> bool:
    """Whether the all-ones vector lies in range(matrix).

    Example:
        >>> contains_ones(torch.eye(2)), contains_ones(torch.tensor([[1.0], [2.0]]))
        (True, False)
    """
    return rank_and_ones(matrix)[1]
