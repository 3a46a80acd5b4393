r"""Structural ranks of the parameter Jacobian: the largest that a Jacobian of given tokens and sizes can have.

Legend: N tokens of width D and rank r, head dimensions d (queries, keys) and dv (values), 1 the all-ones vector.

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

For one head without biases and e = min(d, r) this is 2er - e^2 - e [1 in range(X)].

On the output side dA_i = s V^T Lambda_i dS_i lies in the range of the centred V^T, of dimension min(dv, r_k). J_V =
PY (x) I fills r_v of the R = g N token directions, r_v the rank of Y, or of [Y 1] with a bias that is a parameter, and
leaves (R - r_v) min(dv, r_k) for Q and K. Generic weights attain each minimum; masks may lower it. For one head without
biases, with r_c = r - [1 in range(X)]:

    rank J_V    = dv r
    rank J_Q    = min(N min(dv, d, r_c), r min(d, r_c))
    rank J_K    = min(N min(dv, d, r_c), r_c min(d, r))
    rank J_wide = dv r + min((N - r) min(dv, r_c), 2er - e^2 - e [1 in range(X)])
    rank J_stack = d r                                          (dv = d)

For dv = d <= r and 1 not in range(X), J_wide has full row rank iff N <= 3r - d, and nullity d^2 against 3dr otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellcond.jacobian.head import Head
from wellcond.jacobian.operator import RankBound
from wellcond.linalg.spectrum import numerical_rank, resolve_rank, singular_values


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
