r"""Structural ranks of the parameter Jacobian, and the directions in weight space that change nothing.

Legend: N tokens of width D and rank r, head dimensions d (queries, keys) and dv (values), 1 the all-ones vector.

# Note [Rank of the Jacobian]
The output sees Wq and Wk only through the logits, dS = X (dWq Wk^T + Wq dWk^T) X^T (the papers' D x d weights), up to a
constant per row, which softmax ignores. With e = min(d, r) the matrices dWq Wk^T + Wq dWk^T, restricted to the row
space of X, are the tangent space at a rank-e matrix of size r x r: dimension 2er - e^2. If 1 = Xc lies in range(X),
those of the form u c^T move the logits by row constants; u ranges over range(Wq), so e of them are lost.

On the output side dA_i = s V^T Lambda_i dS_i lies in the range of the centred V^T, of dimension min(dv, r_c), where
r_c = rank of the centred X = r - [1 in range(X)]. J_V = PX (x) I fills r of the N token directions, which leaves
(N - r) min(dv, r_c) for Q and K. Generic weights attain each minimum:

    rank J_V    = dv r
    rank J_Q    = min(N min(dv, d, r_c), r min(d, r_c))
    rank J_K    = min(N min(dv, d, r_c), r_c min(d, r))
    rank J_wide = dv r + min((N - r) min(dv, r_c), 2er - e^2 - e [1 in range(X)])
    rank J_stack = d r                                          (dv = d)

For dv = d <= r and 1 not in range(X), J_wide has full row rank iff N <= 3r - d, and nullity d^2 against 3dr otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.head import Head
from wellcond.linalg.spectrum import spectrum
from wellcond.theory.statement import AbstractStatement, Bound, Hypothesis, all_hold, check_single, ours, settle


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
    num_tokens: int, rank: int, head_dim: int, *, value_dim: int | None = None, ones_in_range: bool | None = None
) -> Ranks:
    """Ranks for almost every head of these sizes without a mask; Note [Rank of the Jacobian].

    Args:
        num_tokens: N.
        rank: r, of the tokens.
        head_dim: d.
        value_dim: dv; d if None.
        ones_in_range: whether 1 is in range(X): always for r = N, with biases ([X 1]), else generically not (None).

    Raises: ValueError unless 1 <= r <= N.

    Example:
        >>> generic_ranks(12, 4, 2)
        Ranks(query=8, key=8, value=8, wide=20, stack=8)
    """
    n, r, d = num_tokens, rank, head_dim
    if not 1 <= r <= n:
        raise ValueError(f"expected a rank between 1 and {n} tokens, got {r}")
    dv = d if value_dim is None else value_dim
    ones = int(r == n or bool(ones_in_range))
    r_c, e = r - ones, min(d, r)
    rows = n * min(dv, d, r_c)
    return Ranks(
        query=min(rows, r * min(d, r_c)),
        key=min(rows, r_c * e),
        value=dv * r,
        wide=dv * r + min((n - r) * min(dv, r_c), 2 * e * r - e * e - e * ones),
        stack=d * r if dv == d else None,
    )


def structural_ranks(head: Head, *, strict: bool = True) -> StructuralRanks:
    """Ranks of one head from the rank of its tokens, its sizes, and whether 1 lies in range(X).

    They hold for almost every weight; special weights (zero, equal, aligned) have less.

    Raises: HypothesisError if entries of P are masked, or X = 0.
    """
    check_single(head)
    r = spectrum(head.x).rank
    masked = int(torch.isneginf(head.log_probabilities()).sum())
    hypotheses = (
        Hypothesis("no entry of P is masked", masked == 0, {"masked": masked}),
        Hypothesis("X is not zero", r > 0, {"rank X": r}),
    )
    ranks = None
    if all_hold(hypotheses):
        ranks = generic_ranks(
            head.num_tokens, r, head.head_dim, value_dim=head.value_dim, ones_in_range=contains_ones(head.x)
        )
    statement = StructuralRanks(
        name="structural_ranks",
        value=None if ranks is None else ranks.wide,
        hypotheses=hypotheses,
        reference=ours("section 4"),
        ranks=ranks,
    )
    return settle(statement, strict=strict)


def contains_ones(matrix: Tensor) -> bool:
    """Whether the all-ones vector lies in range(matrix): appending it does not raise the numerical rank.

    Example:
        >>> contains_ones(torch.eye(2)), contains_ones(torch.tensor([[1.0], [2.0]]))
        (True, False)
    """
    before = spectrum(matrix)
    # At the length of the largest singular value the added column leaves the tolerance where it was.
    ones = matrix.new_full((len(matrix), 1), before.sigma_max / len(matrix) ** 0.5)
    return before.rank > 0 and spectrum(torch.cat([matrix, ones], 1)).rank == before.rank


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

    d^2 without biases for d <= D, d^2 + d with biases on Q, K, V, 2Dd - D^2 for d > D, d with RoPE. In general, with
    R = D + bias and e = min(d, R), it is 2R(d - e) + e^2 + e bias: 3dR less the rank of Note [Rank of the Jacobian].
    Rotations leave of the gauge only what commutes with them, a complex number per pair of coordinates.

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
    e = min(d, full)
    hypotheses = (
        Hypothesis("RoPE: no biases", not (rope and bias), {"bias": bias}),
        Hypothesis("RoPE: d <= D and d even", not rope or (d <= width and d % 2 == 0), {"d": d, "D": width}),
    )
    nullity = d if rope else 2 * full * (d - e) + e * e + e * bias
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
