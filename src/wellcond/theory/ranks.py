r"""Structural ranks of the parameter Jacobian, and the directions in weight space that change nothing.

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
from wellcond.linalg.spectrum import numerical_rank, resolve_rank, singular_values, spectrum
from wellcond.theory.statement import AbstractStatement, Bound, Hypothesis, all_hold, check_single, ours, settle


@dataclass(frozen=True)
class Structure:
    """Sizes and structural ranks of a Jacobian."""

    num_outputs: int
    num_parameters: int
    token_rank: int
    memory_rank: int
    max_rank: int
    """No Jacobian of this structure has a larger rank; a generic one has this rank."""
    null_space: str
    """Names of null directions, empty where there are none that matter."""

    @property
    def smaller_side(self) -> int:
        """min(shape)."""
        return min(self.num_outputs, self.num_parameters)


@dataclass(frozen=True)
class Ranks:
    """Ranks of the three blocks and of both ways to join them; the stack exists for dv = d only."""

    query: int
    key: int
    value: int
    wide: int
    stack: int | None


@dataclass(frozen=True, kw_only=True)
class StructuralRanks(AbstractStatement):
    """Ranks of one head; the value is that of J_wide."""

    ranks: Ranks | None


@dataclass(frozen=True, eq=False)
class NullDirection:
    """A direction (dw_q, dw_k, dw_v) in the kernel of J_wide, in torch's (out, in) orientation."""

    name: str
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor


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


def wide_structure(head: Head, *, biases: bool = False, known: dict[Any, tuple[int, bool]] | None = None) -> Structure:
    """Sizes and rank of J_wide, R dv x parameters, for a head or a group of heads; `biases` are parameters.

    `known` keeps the ranks of tokens for the next head, which has the same ones in most layers.
    """
    d, dv, g = head.head_dim, head.value_dim, head.num_query_heads
    with_q, with_k, with_v = (biases and bias is not None for bias in (head.b_q, head.b_k, head.b_v))
    rx, ones_x = _rank_of(head.x, known)
    ry, ones_y = (rx, ones_x) if head.y is None else _rank_of(head.memory, known)
    query, key, value = rx + (with_q and not ones_x), ry - ones_y, ry + (with_v and not ones_y)
    fixed = 0 if head.query_biases is None or with_q or ones_x else numerical_rank(head.query_biases)
    rank = wide_rank(head.num_rows, query, key, value, head_dim=d, value_dim=dv, groups=g, fixed=fixed)
    width, memory_width = head.x.shape[1], head.memory.shape[1]
    parameters = g * d * (width + with_q) + d * (memory_width + with_k) + dv * (memory_width + with_v)
    names = []
    if rank < min(head.num_outputs, parameters):
        # Of what the tokens span, the constant key moves no softmax, and the gauge is the rest that moves nothing.
        seen = d * (g * query + ry)
        gauge = seen - d * ones_y - logit_rank(query, key, head_dim=d, groups=g, fixed=fixed)
        outside = parameters - seen - dv * value
        names = [f"gauge (W_Q E, -W_K E^T): {gauge}"]
        names += [f"the same added to all keys: {d}"] if ones_y else []
        names += [f"outside the span of the tokens: {outside}"] if outside else []
    return Structure(head.num_outputs, parameters, rx, ry, rank, "; ".join(names))


def _rank_of(tokens: Tensor, known: dict[Any, tuple[int, bool]] | None) -> tuple[int, bool]:
    place = tokens.data_ptr(), tokens.shape, tokens.stride()
    found = None if known is None else known.get(place)
    if found is None:
        found = rank_and_ones(tokens)
        if known is not None:
            known[place] = found
    return found


def stack_structure(head: Head, *, known: dict[Any, tuple[int, bool]] | None = None) -> Structure:
    """Sizes and rank of the papers' stacked matrix, 3 R dv x Dd; `known` as in `wide_structure`."""
    d, (r, _), width = head.head_dim, _rank_of(head.x, known), head.x.shape[1]
    names = f"outside the span of the tokens: {d * (width - r)}" if r < width else ""
    return Structure(3 * head.num_outputs, d * width, r, r, d * r, names)


def structural_ranks(head: Head, *, strict: bool = True) -> StructuralRanks:
    """Ranks of one head from the rank of its tokens, its sizes, and whether 1 lies in range(X).

    They hold for almost every weight; special weights (zero, equal, aligned) have less.

    Raises: HypothesisError if entries of P are masked, or X = 0.
    """
    check_single(head)
    r, ones = rank_and_ones(head.x)
    masked = int(torch.isneginf(head.log_probabilities()).sum())
    hypotheses = (
        Hypothesis("no entry of P is masked", masked == 0, {"masked": masked}),
        Hypothesis("X is not zero", r > 0, {"rank X": r}),
    )
    ranks = None
    if all_hold(hypotheses):
        fixed = 0 if head.query_biases is None else numerical_rank(head.query_biases)
        ranks = generic_ranks(
            head.num_tokens, r, head.head_dim, value_dim=head.value_dim, ones_in_range=ones, fixed_biases=fixed
        )
    statement = StructuralRanks(
        name="structural_ranks",
        value=None if ranks is None else ranks.wide,
        hypotheses=hypotheses,
        reference=ours("section 4"),
        ranks=ranks,
    )
    return settle(statement, strict=strict)


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


def gauge_direction(head: Head, e: Tensor) -> NullDirection:
    """The gauge direction (Wq E, -Wk E^T, 0): Wq -> Wq (I + tE), Wk -> Wk (I + tE)^-T leaves every logit unchanged.

    In torch's orientation the blocks are E^T w_q and -E w_k. The d^2 choices of E are the gauge nullity.

    Args:
        head: one head.
        e: any d x d matrix.
    """
    e = e.to(head.x)
    return NullDirection("gauge", e.T @ head.w_q, -e @ head.w_k, torch.zeros_like(head.w_v))


def key_shift_direction(head: Head, z: Tensor) -> NullDirection:
    """The key shift Wk + X^+ 1 z^T: every key moves by z, every logit row by a constant.

    Args:
        head: one head with 1 in range(X), for instance N = r, or biases; the key bias itself is this shift.
        z: any vector of length d.

    Raises: ValueError if 1 is not in range(X), where no such direction exists.
    """
    if not contains_ones(head.x):
        raise ValueError("the key shift needs the all-ones vector in range(X), and it is not: no such null direction")
    shift = torch.outer(z.to(head.x), torch.linalg.pinv(head.x).sum(-1))
    return NullDirection("key shift", torch.zeros_like(head.w_q), shift, torch.zeros_like(head.w_v))


def deficient_case(head: Head, *, strict: bool = True) -> Bound:
    r"""Row-rank deficiency of J_wide when values contain the all-ones vector.

    .. math:: \mathbf 1 \in \mathrm{range}(V) \;\Rightarrow\; \mathrm{rank}(J_\mathrm{wide}) \le N d_v - (N - r)

    With Vu = 1: Lambda_i V u = 0, so G (w (x) u) = (P X X^T P^T w) (x) u, which vanishes for w in ker X^T P^T.

    Raises: HypothesisError unless 1 is in range(V) and N > r.
    """
    check_single(head)
    r, n, dv = spectrum(head.x).rank, head.num_tokens, head.value_dim
    values = head.values()
    hypotheses = (
        Hypothesis("1 is in range(V)", contains_ones(values), {"rank V": spectrum(values).rank, "N": n}),
        Hypothesis("N > rank X", n > r, {"N": n, "rank X": r}),
    )
    return settle(
        Bound(
            name="deficient_case",
            value=n * dv - (n - r) if all_hold(hypotheses) else None,
            hypotheses=hypotheses,
            reference=ours("section 6, exact case"),
            quantity="rank J_wide",
            relation="<=",
            parts={"N": n, "dv": dv, "rank X": r},
        ),
        strict=strict,
    )


def parameter_nullity(
    head_dim: int, width: int, *, bias: bool = False, rope: bool = False, strict: bool = True
) -> Bound:
    """Nullity of J_wide per key/value head with many generic tokens (also causal, also grouped queries).

    d^2 without biases for d <= D, d^2 + d with biases on Q, K, V, 2Dd - D^2 for d > D, d with RoPE: what Q and K have
    less what of them moves the output, Note [Rank of the Jacobian]. Rotations leave of the gauge only what commutes
    with them, a complex number per pair of coordinates.

    Args:
        head_dim: d.
        width: D.
        bias: whether Q, K and V have biases, counted as parameters.
        rope: whether rotary positions act on queries and keys.
        strict: raise outside the hypotheses.

    Raises: HypothesisError for RoPE with biases, with d > D, or with odd d, which the table does not cover.

    Example:
        >>> [parameter_nullity(2, 4, bias=b).value for b in (False, True)], parameter_nullity(4, 2).value
        ([4, 6], 12)
    """
    d, full = head_dim, width + bias
    hypotheses = (
        Hypothesis("RoPE: no biases", not (rope and bias), {"bias": bias}),
        Hypothesis("RoPE: d <= D and d even", not rope or (d <= width and d % 2 == 0), {"d": d, "D": width}),
    )
    nullity = d if rope else 2 * full * d - logit_rank(full, full - bias, head_dim=d)
    return settle(
        Bound(
            name="parameter_nullity",
            value=nullity if all_hold(hypotheses) else None,
            hypotheses=hypotheses,
            reference=ours("section 4"),
            quantity="nullity of J_wide",
            relation="=",
            parts={"d": d, "D": width},
        ),
        strict=strict,
    )
