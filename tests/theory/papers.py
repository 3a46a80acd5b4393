"""What the papers print, as functions with their hypotheses; those that are false as printed have counterexamples.

`Printed.contradicted` says whether an input is one. Statements that hold and that only the tests need are here too.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.jacobian.head import build_factors
from wellcond.jacobian.ranks import contains_ones, logit_rank
from wellcond.linalg.orthogonal import polar
from wellcond.linalg.spectrum import singular_values, spectrum
from wellcond.theory import (
    Bound,
    Head,
    Hypothesis,
    Statement,
    all_hold,
    check_single,
    papers_bound,
    settle,
    structural_ranks,
)


@dataclass(frozen=True, kw_only=True)
class Printed(Bound):
    """A statement, and the quantity itself where the input determines it."""

    observed: float | None = None

    @property
    def contradicted(self) -> bool | None:
        """Whether the observed quantity violates the statement beyond rounding; None if it was not observed."""
        if self.observed is None or self.value is None:
            return None
        slack = 1e-12 * abs(self.value)  # of the value alone, so that an infinite observation contradicts
        excess = self.observed - self.value
        if self.relation == "<=":
            return excess > slack
        if self.relation == ">=":
            return excess < -slack
        return abs(excess) > slack


@dataclass(frozen=True, kw_only=True, eq=False)
class PolarTheorem(Statement):
    """Theorem 3.5: the correction C and the condition number of W + C, which is the value."""

    correction: Tensor
    at_most: float = 2.0

    @property
    def strictly_less(self) -> bool:
        """Proof and text print `strictly less than 2`; true exactly for W of full rank (E21)."""
        return self.value is not None and self.value < self.at_most


def theorem35(weight: Tensor, *, strict: bool = True) -> PolarTheorem:
    r"""Polar correction.

    .. math:: C = \sigma_1(W)\, U V^T, \qquad \kappa(W + C) = \frac{2\sigma_1}{\sigma_1 + \sigma_{\min}} \le 2

    The equation is exact; equality with 2 holds if and only if W is rank-deficient.

    Raises: HypothesisError for W = 0, where C = 0 and kappa is not defined.

    Example:
        >>> theorem35(torch.diag(torch.tensor([3.0, 1.0]))).value
        1.5
    """
    s = spectrum(weight)
    hypotheses = (Hypothesis("W is not zero", s.rank > 0, {"sigma_max": s.sigma_max}),)
    # sigma_i(W + C) = sigma_i + sigma_1. Below full rank sigma_min is rounding, and the exact value is 2.
    sigma_min = 0.0 if s.nullity else s.sigma_min
    statement = PolarTheorem(
        name="theorem35",
        value=2 * s.sigma_max / (s.sigma_max + sigma_min) if s.rank else None,
        hypotheses=hypotheses,
        correction=s.sigma_max * polar(weight.detach().double()[None])[0],
    )
    return settle(statement, strict=strict)


def theorem38(a: Tensor, lam: float, *, strict: bool = True) -> Printed:
    r"""Identity correction, with the hypothesis that makes it true.

    If :math:`\lambda > \sigma_1` and :math:`(\lambda + \sigma_1)/(\lambda - \sigma_1) < \kappa(A)`, then

    .. math:: \kappa(A + \lambda I_k) \le \frac{\lambda + \sigma_1}{\lambda - \sigma_1} < \kappa(A).

    The second condition is :math:`\lambda > \sigma_1 (\kappa + 1)/(\kappa - 1)`. The bound is attained, for instance
    by diag(1, -1, .1) + 2I. The printed requirement that lambda >= 2 plays no role.

    Args:
        a: any m x n matrix; I_k has ones on its main diagonal.
        lam: lambda.
        strict: raise outside the hypotheses.

    Raises: HypothesisError.
    """
    s = spectrum(a)
    # Weyl: |sigma_i(A + lam I) - lam| <= sigma_1(A) for every i, hence sigma_1 in numerator and denominator.
    ratio = (lam + s.sigma_max) / (lam - s.sigma_max) if lam > s.sigma_max else float("inf")
    hypotheses = (
        Hypothesis("lam > sigma_max(A)", lam > s.sigma_max, {"lam": lam, "sigma_max": s.sigma_max}),
        Hypothesis(
            "(lam + sigma_max) / (lam - sigma_max) < kappa(A)",
            ratio < s.condition_number,  # false for A = 0, whose kappa is NaN
            {"ratio": ratio, "kappa": s.condition_number},
        ),
    )
    return settle(
        Printed(
            name="theorem38",
            value=ratio if all_hold(hypotheses) else None,
            hypotheses=hypotheses,
            quantity="kappa(A + lam I)",
            relation="<=",
            parts={"lam": lam, "sigma_max": s.sigma_max, "kappa": s.condition_number},
            observed=_kappa_after(a, lam),
        ),
        strict=strict,
    )


def theorem38_applies(a: Tensor, lam: float) -> bool:
    """Whether the corrected theorem 3.8 promises that lam I lowers the condition number of A.

    Example:
        >>> theorem38_applies(torch.diag(torch.tensor([1.0, -1.0, 0.1])), 2.0)
        True
        >>> theorem38_applies(torch.diag(torch.tensor([-9.5, -1.0])), 10.0)      # kappa rises from 9.5 to 18
        False
    """
    return theorem38(a, lam, strict=False).applies


def theorem38_printed(a: Tensor, lam: float, *, strict: bool = True) -> Printed:
    r"""Identity correction as printed, which is false (E20).

    .. math:: \frac{\sigma_1 + \lambda}{\lambda - \sigma_{\min}} \le \kappa(A),\ \lambda \ge 2
              \;\Rightarrow\; \kappa(A + \lambda I_k) \le \kappa(A)

    It has sigma_min where Weyl's inequality gives sigma_max. `contradicted` says whether A is a counterexample. Use
    `theorem38`.

    Raises: HypothesisError outside the printed hypotheses.
    """
    s = spectrum(a)
    ratio = (s.sigma_max + lam) / (lam - s.sigma_min) if lam != s.sigma_min else float("inf")
    hypotheses = (
        Hypothesis("lam >= 2", lam >= 2, {"lam": lam}),
        Hypothesis(
            "(sigma_max + lam) / (lam - sigma_min) <= kappa(A)",
            ratio <= s.condition_number,
            {"ratio": ratio, "kappa": s.condition_number},
        ),
    )
    return settle(
        Printed(
            name="theorem38_printed",
            value=s.condition_number if all_hold(hypotheses) else None,
            hypotheses=hypotheses,
            quantity="kappa(A + lam I)",
            relation="<=",
            parts={"lam": lam, "sigma_max": s.sigma_max, "sigma_min": s.sigma_min},
            observed=_kappa_after(a, lam),
        ),
        strict=strict,
    )


def _kappa_after(a: Tensor, lam: float) -> float:
    a = a.detach().double()
    return spectrum(a + lam * torch.eye(*a.shape, dtype=a.dtype, device=a.device)).condition_number


def papers_second_term(head: Head, *, strict: bool = True) -> Printed:
    r"""The second term of the papers' bound as printed on its own, which drops a factor (E11).

    .. math:: \kappa(P) \quad\text{where the bound has}\quad \kappa(X)\, \kappa(P)

    The value is the printed one, `observed` the term that the bound contains.

    Raises: HypothesisError for X = 0.
    """
    check_single(head)
    x, p = (spectrum(m).pseudo_condition_number for m in (head.x, head.probabilities()[0]))
    hypotheses = (Hypothesis("X is not zero", not math.isnan(x), {"kappa(X)": x}),)
    statement = Printed(
        name="papers_second_term",
        value=p if all_hold(hypotheses) else None,
        hypotheses=hypotheses,
        quantity="second term of papers_bound",
        relation="=",
        parts={"kappa(X)": x, "kappa(P)": p},
        observed=x * p,
    )
    return settle(statement, strict=strict)


def proposition32_printed(conditioned: Head, other: Head, *, strict: bool = True) -> Printed:
    r"""Proposition 3.2 of paper C as printed, which is false (E13).

    .. math:: \kappa(W_q) = \kappa(W_k) = \kappa(W_v) = 1 \;\Rightarrow\; B(\text{conditioned}) \le B(\text{other})

    on the same tokens. The proof keeps kappa(P) and kappa(Lambda) fixed, but both depend on the weights. Value and
    `observed` are log10 of the two bounds; `contradicted` says whether the pair is a counterexample.

    Args:
        conditioned: semi-orthogonal Q and K, identity V.
        other: any weights on the same tokens.
        strict: raise outside the hypotheses.

    Raises: HypothesisError.
    """
    mine, theirs = papers_bound(conditioned, strict=False), papers_bound(other, strict=False)
    kappas = {"kappa(Wq)": mine.kappa_q, "kappa(Wk)": mine.kappa_k, "kappa(Wv)": mine.kappa_v}
    same = conditioned.x.shape == other.x.shape and bool((conditioned.x == other.x).all())
    hypotheses = (
        Hypothesis("kappa(W) = 1 for Q, K and V", all(abs(k - 1) < 1e-9 for k in kappas.values()), kappas),
        Hypothesis("both heads read the same tokens", same, {}),
        *mine.hypotheses,
        *theirs.hypotheses,
    )
    statement = Printed(
        name="proposition32_printed",
        value=theirs.log10 if all_hold(hypotheses) else None,
        hypotheses=hypotheses,
        quantity="log10 B(conditioned)",
        relation="<=",
        parts=kappas,
        observed=mine.log10,
    )
    return settle(statement, strict=strict)


def printed_hypotheses(head: Head) -> tuple[Hypothesis, ...]:
    # Both papers assume J of full rank. Stack, their dimension count: rank dr of dD columns. Wide: N dv rows.
    ranks = structural_ranks(head, strict=False).ranks
    if ranks is None:
        return ()
    rows, columns = head.num_tokens * head.value_dim, (2 * head.head_dim + head.value_dim) * head.width
    full = {"wide": min(rows, columns), "stack": min(3 * rows, head.head_dim * head.width)}
    found = {"wide": ranks.wide, "stack": ranks.stack}
    return tuple(
        Hypothesis(f"J_{name} has full rank", rank == full[name], {"rank": rank, "full": full[name]})
        for name, rank in found.items()
        if rank is not None
    )


def sigma_min_upper_bound(head: Head) -> Printed:
    r"""Cheap upper bound on the least singular value of J_wide, for any head.

    .. math:: \sigma_{\min}(J)^2 \le \lambda_{\min}\Bigl(\sum_{ij} v_i v_j G_{ij}\Bigr), \quad G = J J^T

    where v is the last left singular vector of PX: the Rayleigh quotient of G over vectors v (x) u, d_v x d_v.
    """
    check_single(head)
    factors = build_factors(head)
    left, s, _ = torch.linalg.svd(factors.py, full_matrices=True)
    v = left[:, -1]
    px = float(s[-1]) if head.num_tokens <= head.width else 0.0
    # G_ij = (x_i.x_j) M_i M_j^T + (q_i.q_j) B_i B_j^T + (P X X^T P^T)_ij I, so the sum over i and j is
    #     T T^T + sigma_N(PX)^2 I   with   T = sum_i v_i [M_i (x) x_i^T, B_i (x) q_i^T],
    # and the singular values of T avoid squaring.
    t_q = torch.einsum("i,ioc,ia->oca", v, factors.m, factors.x).flatten(1)
    t_k = torch.einsum("i,ioa,ic->oca", v, factors.b, factors.q).flatten(1)
    t = torch.cat([t_q, t_k], 1)
    tail = float(singular_values(t)[-1]) if t.shape[1] >= t.shape[0] else 0.0
    parts = {"tail": tail, "sigma_N(PX)": px}
    value = math.hypot(tail, px)
    return Printed(
        name="sigma_min_upper_bound",
        value=value,
        hypotheses=(),
        quantity="sigma_min(J_wide)",
        relation="<=",
        parts=parts,
    )


@dataclass(frozen=True, eq=False)
class NullDirection:
    """A direction (dw_q, dw_k, dw_v) in the kernel of J_wide, in torch's (out, in) orientation."""

    name: str
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor


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


def deficient_case(head: Head, *, strict: bool = True) -> Printed:
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
        Printed(
            name="deficient_case",
            value=n * dv - (n - r) if all_hold(hypotheses) else None,
            hypotheses=hypotheses,
            quantity="rank J_wide",
            relation="<=",
            parts={"N": n, "dv": dv, "rank X": r},
        ),
        strict=strict,
    )


def parameter_nullity(
    head_dim: int, width: int, *, bias: bool = False, rope: bool = False, strict: bool = True
) -> Printed:
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
        Printed(
            name="parameter_nullity",
            value=nullity if all_hold(hypotheses) else None,
            hypotheses=hypotheses,
            quantity="nullity of J_wide",
            relation="=",
            parts={"d": d, "D": width},
        ),
        strict=strict,
    )
