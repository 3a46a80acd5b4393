"""Statements about the parameter Jacobian of one head, as functions that check their hypotheses.

Each returns a frozen record. Outside its hypotheses a statement raises `HypothesisError` rather than return a number;
`strict=False` returns the record with value None. Proofs, and the statements of the papers that are false as printed:
docs/theory.md; the counterexamples are tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import torch

from wellcond.arguments import check_choice
from wellcond.errors import HypothesisError
from wellcond.jacobian.diagnosis import (
    SurrogateFactors,
    lower_parts,
    lower_square,
    softmax_spectra,
    upper_parts,
    upper_square,
)
from wellcond.jacobian.factors import build_factors
from wellcond.jacobian.head import Head, Ranks, contains_ones, generic_ranks, rank_and_ones
from wellcond.jacobian.problem import Convention
from wellcond.linalg.spectrum import SoftmaxSpectrum, numerical_rank, singular_values, spectrum

__all__ = [
    "Bound",
    "Head",
    "Hypothesis",
    "HypothesisError",
    "Ranks",
    "Saturation",
    "SoftmaxSpectrum",
    "StructuralRanks",
    "Surrogate",
    "exact_case",
    "generic_ranks",
    "kappa_bound",
    "lower_bound",
    "norm_upper_bound",
    "papers_bound",
    "saturation",
    "softmax_spectrum",
    "structural_ranks",
    "upper_bound",
]

LambdaNorm = Literal["actual", "half"]
Computed = tuple[float, dict[str, float]]
"""A value, and the numbers from which it is made."""


@dataclass(frozen=True)
class Hypothesis:
    """One assumption, whether it holds for the input given, and the numbers that decide it."""

    text: str
    holds: bool
    numbers: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """Base of the records: the value is None exactly where a hypothesis fails."""

    name: str
    value: float | None
    hypotheses: tuple[Hypothesis, ...]

    @property
    def applies(self) -> bool:
        """Whether every hypothesis holds."""
        return all_hold(self.hypotheses)


@dataclass(frozen=True, kw_only=True)
class Bound(Statement):
    """The statement `quantity relation value`, for example sigma_min(J)^2 >= value."""

    quantity: str
    relation: Literal["<=", "=", ">="]
    parts: Mapping[str, float]
    """The numbers from which the value is made."""


S = TypeVar("S", bound=Statement)


def all_hold(hypotheses: tuple[Hypothesis, ...]) -> bool:
    """Whether every hypothesis holds; true for none."""
    return all(h.holds for h in hypotheses)


def settle(statement: S, *, strict: bool) -> S:
    """Return the record, or raise `HypothesisError` if it is strict and does not apply."""
    if strict and not statement.applies:
        raise HypothesisError(statement)
    return statement


def check_single(head: Head) -> None:
    """Raise unless a head is what the papers' statements are about."""
    if not head.is_single:
        raise ValueError(
            "expected one query head that attends to its own tokens: the statements of wellcond.theory are not about "
            f"{head.num_query_heads} grouped heads or cross attention; use wellcond.jacobian_spectrum"
        )


def lower_bound(head: Head, *, convention: Convention = "wide", strict: bool = True) -> Bound:
    r"""(L), a lower bound on the squared least singular value.

    .. math:: \sigma_{\min}(J)^2 \ge \sigma_r(X)^2 \min_i \sigma_{\min}(M_i)^2 + \sigma_r(PX)^2, \ r = \mathrm{rank}(X)

    For the stack it concerns sigma_{dr}, the least one on the row space of X (the strict sigma_min if r = D). It is
    informative only if rank PX = r or every M_i is non-singular; it is 0 otherwise, and true.

    Raises: HypothesisError unless r = N (wide), or dv = d and X is not zero (stack).
    """
    r, n = spectrum(head.x).rank, head.num_tokens
    if convention == "wide":
        needed = Hypothesis("N = rank X", r == n, {"N": n, "rank X": r})
    else:
        needed = Hypothesis("X is not zero", r > 0, {"rank X": r})

    def compute() -> Computed:
        parts = lower_parts(build_factors(head), r)
        return lower_square(parts), parts

    quantity = "sigma_min(J_wide)^2" if convention == "wide" else "sigma_dr(J_stack)^2"
    return _bound("lower_bound", quantity, ">=", (*_exists(head, convention), needed), compute, strict)


def upper_bound(head: Head, *, convention: Convention = "wide", strict: bool = True) -> Bound:
    r"""(U1), an upper bound on the squared norm of J, for any shape.

    .. math:: \sigma_1(J)^2 \le \|X\|^2 \max_i \|M_i\|^2 + \|Q\|^2 \max_i \|B_i\|^2 + \|PX\|^2

    Raises: HypothesisError for the stack with dv != d, which does not exist.
    """

    def compute() -> Computed:
        parts = upper_parts(build_factors(head))
        return upper_square(parts), parts

    return _bound("upper_bound", "sigma_max(J)^2", "<=", _exists(head, convention), compute, strict)


def norm_upper_bound(
    head: Head, *, lambda_norm: LambdaNorm = "actual", convention: Convention = "wide", strict: bool = True
) -> Bound:
    r"""(U2), the bound (U1) with the blocks replaced by norms of the weights.

    .. math:: \sigma_1(J)^2 \le s^2 L^2 \|X\|^6 \|W_v\|^2 (\|W_q\|^2 + \|W_k\|^2) + \|PX\|^2

    since ||M_i|| <= s ||V|| ||Lambda_i|| ||K|| and ||B_i|| <= s ||V|| ||Lambda_i|| ||X||. L is max_i ||Lambda_i||
    (``actual``) or 1/2 (``half``), which needs no eigenvalue.

    Raises: HypothesisError for the stack with dv != d.
    """
    check_choice("lambda_norm", lambda_norm, get_args(LambdaNorm))

    def compute() -> Computed:
        px = head.probabilities()[0] @ head.x
        matrices = {"||X||": head.x, "||Wq||": head.w_q, "||Wk||": head.w_k, "||Wv||": head.w_v, "||PX||": px}
        parts = {"s": head.scale, "L": softmax_spectrum(head).norm if lambda_norm == "actual" else 0.5}
        parts |= {name: float(singular_values(matrix)[0]) for name, matrix in matrices.items()}
        s, lam, x, wq, wk, wv, norm_px = parts.values()
        return (s * lam * x**3 * wv) ** 2 * (wq**2 + wk**2) + norm_px**2, parts

    return _bound("norm_upper_bound", "sigma_max(J)^2", "<=", _exists(head, convention), compute, strict)


def kappa_bound(head: Head, *, convention: Convention = "wide", strict: bool = True) -> Bound:
    r"""Upper bound on the condition number of J.

    .. math:: \kappa(J) \le \sqrt{U_1 / L}

    Strict kappa for wide; for the stack the pseudo kappa sigma_1/sigma_{dr} (strict if r = D).

    Raises: HypothesisError outside the hypotheses of (L), or if L = 0, where it promises nothing.
    """
    low = lower_bound(head, convention=convention, strict=False)
    positive = Hypothesis("L > 0", bool(low.value), {"L": low.value or 0.0})

    def compute() -> Computed:
        up = upper_bound(head, convention=convention).value
        assert up is not None and low.value is not None
        return math.sqrt(up / low.value), {"U1": up, "L": low.value}

    return _bound("kappa_bound", f"kappa(J_{convention})", "<=", (*low.hypotheses, positive), compute, strict)


def exact_case(head: Head, *, strict: bool = True) -> Bound:
    r"""The least singular value of J_wide when the values can express a constant.

    .. math:: \mathbf 1 \in \mathrm{range}(V), N \le D \Rightarrow \sigma_{\min}(J_\mathrm{wide}) = \sigma_{\min}(PX)

    :math:`J J^T \succeq P X X^T P^T \otimes I` gives at least. With Vu = 1 we have M_i^T u = 0 and B_i^T u = 0, because
    Lambda_i 1 = 0, so :math:`J J^T (w \otimes u) = (P X X^T P^T w) \otimes u` gives equality. N <= d with V of full
    row rank is enough.

    Raises: HypothesisError.
    """
    check_single(head)
    n, v = head.num_tokens, head.values()
    hypotheses = (
        Hypothesis("N <= D", n <= head.width, {"N": n, "D": head.width}),
        Hypothesis("1 is in range(V)", contains_ones(v), {"N": n, "rank V": spectrum(v).rank}),
    )

    def compute() -> Computed:
        return float(singular_values(head.probabilities()[0] @ head.x)[-1]), {}

    return _bound("exact_case", "sigma_min(J_wide)", "=", hypotheses, compute, strict)


def _exists(head: Head, convention: Convention) -> tuple[Hypothesis, ...]:
    """The hypothesis under which J in this convention exists at all."""
    check_single(head)
    check_choice("convention", convention, get_args(Convention))
    d, dv = head.head_dim, head.value_dim
    return () if convention == "wide" else (Hypothesis("the stack needs dv = d", d == dv, {"d": d, "dv": dv}),)


def _bound(
    name: str,
    quantity: str,
    relation: Literal["<=", "=", ">="],
    hypotheses: tuple[Hypothesis, ...],
    compute: Callable[[], Computed],
    strict: bool,
) -> Bound:
    """The statement, with its value where all hypotheses hold."""
    value, parts = compute() if all_hold(hypotheses) else (None, {})
    statement = Bound(name=name, value=value, hypotheses=hypotheses, quantity=quantity, relation=relation, parts=parts)
    return settle(statement, strict=strict)


@dataclass(frozen=True, kw_only=True)
class Surrogate(Statement):
    """A number the papers print as an upper bound on kappa(J). It is none, in either convention (E4)."""

    log10: float | None
    """log10 of the value, finite where the value overflows to infinity."""
    kappa_x: float
    kappa_q: float
    kappa_k: float
    kappa_v: float
    kappa_p: float
    log10_kappa_lambda: float
    label: str = "surrogate, not a bound"

    @property
    def kappa_lambda(self) -> float:
        """max_i lambda_max(Lambda_i) / min_i lambda_min,nonzero(Lambda_i); infinite beyond 1e308."""
        return _power(self.log10_kappa_lambda)


def papers_bound(head: Head, *, strict: bool = True) -> Surrogate:
    r"""The papers' bound, in the pseudo reading and in log space.

    .. math:: B = \kappa(X)^3 \kappa(\Lambda) \kappa(W_v) (\kappa(W_q) + \kappa(W_k)) + \kappa(X) \kappa(P)

    **Not an upper bound on kappa(J)**: two tokens have kappa(J_wide) = 753 and B = 13 (T2). It depends on the weights
    beyond kappa(W) through P and Lambda, and lowering it need not lower kappa(J) (E12). `kappa_bound` is a bound.

    Raises: HypothesisError if a factor is not defined: a zero matrix, or Lambda = 0 throughout.

    Example:
        >>> import torch
        >>> x, w = torch.tensor([[1.0], [2.0]]), torch.ones(1, 1)
        >>> round(papers_bound(Head(x, w, w, w, 1.0)).value, 8)
        12.96494351
    """
    check_single(head)
    weights = (("X", head.x), ("Wq", head.query_weights[0]), ("Wk", head.w_k), ("Wv", head.w_v))
    kappa_of = {name: spectrum(matrix).pseudo_condition_number for name, matrix in weights}
    kappa_p = spectrum(head.probabilities()[0]).pseudo_condition_number
    factors = SurrogateFactors(kappa_of, kappa_p, softmax_spectrum(head))
    kappa, lambdas, log10 = factors.kappa, factors.lambdas, factors.log10
    hypotheses = (
        Hypothesis("X, Wq, Wk and Wv are not zero", not any(math.isnan(k) for k in kappa.values()), kappa),
        Hypothesis(
            "some token attends to two or more", bool((lambdas.rank > 0).any()), {"max rank": int(lambdas.rank.max())}
        ),
    )
    statement = Surrogate(
        name="papers_bound",
        value=None if log10 is None else _power(log10),
        hypotheses=hypotheses,
        log10=log10,
        kappa_x=kappa["X"],
        kappa_q=kappa["Wq"],
        kappa_k=kappa["Wk"],
        kappa_v=kappa["Wv"],
        kappa_p=kappa_p,
        log10_kappa_lambda=lambdas.log10_kappa,
    )
    return settle(statement, strict=strict)


def _power(log10: float) -> float:
    return 10.0**log10 if log10 < 308 else math.inf


def softmax_spectrum(head: Head) -> SoftmaxSpectrum:
    """Spectrum of every Lambda_i of one head.

    Example:
        >>> x, w = torch.tensor([[1.0], [2.0]]), torch.ones(1, 1)
        >>> round(10 ** softmax_spectrum(Head(x, w, w, w, 1.0)).log10_kappa, 9)
        1.872609003
    """
    return softmax_spectra([head])[0]


@dataclass(frozen=True, kw_only=True)
class StructuralRanks(Statement):
    """Ranks of one head; the value is that of J_wide."""

    ranks: Ranks | None


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
        ranks=ranks,
    )
    return settle(statement, strict=strict)


@dataclass(frozen=True, kw_only=True)
class Saturation(Statement):
    """The self-logit gap (the value) against the threshold from which a head is dead."""

    threshold: float

    @property
    def saturates(self) -> bool | None:
        """Whether the gap exceeds the threshold; None outside the hypotheses."""
        return None if self.value is None else self.value > self.threshold


def saturation(
    lam: float, *, head_dim: int, num_tokens: int, scale: float | None = None, strict: bool = True
) -> Saturation:
    r"""Rule of thumb for the softmax under lam I.

    .. math:: s \lambda^2 d > \ln N + 5

    For layer-normed tokens (entries of variance one) lam I on Q and K raises the logit of a token with itself over
    the others by about s lam^2 d. With a gap g the diagonal of P is 1/(1 + (N-1) e^-g), so beyond ln N + 5 at least
    1/(1 + e^-5) = 99.3 % of the mass sits on it and Wq, Wk get next to no gradient. A dead head has an excellent
    kappa(J), so the rule is worth more than the condition number.

    Args:
        lam: correction on queries and keys.
        head_dim: d.
        num_tokens: N.
        scale: s, 1/sqrt(d) if None.
        strict: raise outside the hypotheses.

    Raises: HypothesisError unless s > 0 and N >= 2.

    Example:
        >>> saturation(2.0, head_dim=64, num_tokens=197).value, saturation(2.0, head_dim=64, num_tokens=197).saturates
        (32.0, True)
    """
    scale = head_dim**-0.5 if scale is None else scale
    hypotheses = (
        Hypothesis("s > 0", scale > 0, {"s": scale}),
        Hypothesis("N >= 2", num_tokens >= 2, {"N": num_tokens}),
    )
    statement = Saturation(
        name="saturation",
        value=scale * lam**2 * head_dim if all_hold(hypotheses) else None,
        hypotheses=hypotheses,
        threshold=math.log(num_tokens) + 5,
    )
    return settle(statement, strict=strict)
