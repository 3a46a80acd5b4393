r"""The papers' bound on kappa(J), which is not one, and what they deduce from it.

Legend: kappa here is the pseudo condition number, over the non-zero singular values; for Lambda over the structurally
non-zero eigenvalues (`softmax_spectrum`). P is the actual one, with scale and mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wellcond.jacobian.head import Head, stack_heads
from wellcond.linalg.spectrum import SECTION_ENTRIES, SoftmaxSpectrum, softmax_eigenvalues, spectrum
from wellcond.theory.ranks import structural_ranks
from wellcond.theory.statement import AbstractStatement, Bound, Hypothesis, all_hold, check_single, paper_c, settle

PRINTED_IN = "Theorem 3.1, eq 8 (Spectral Conditioning of Attention: Theorem 3.4, eq 10)"


def softmax_spectrum(head: Head) -> SoftmaxSpectrum:
    """Spectrum of every Lambda_i of one head.

    Example:
        >>> import torch
        >>> x, w = torch.tensor([[1.0], [2.0]]), torch.ones(1, 1)
        >>> round(10 ** softmax_spectrum(Head(x, w, w, w, 1.0)).log10_kappa, 9)
        1.872609003
    """
    return softmax_spectra([head])[0]


def softmax_spectra(heads: Sequence[Head]) -> list[SoftmaxSpectrum]:
    """`softmax_spectrum` of heads that `can_stack`, together as far as they are small."""
    at_once = max(1, SECTION_ENTRIES // (heads[0].num_rows * len(heads[0].memory)))
    found = []
    for at in range(0, len(heads), at_once):
        some = heads[at : at + at_once]
        of_all = softmax_eigenvalues(stack_heads(some).log_probabilities().flatten(0, 2))
        parts = (numbers.cpu().chunk(len(some)) for numbers in (of_all.rank, of_all.log_max, of_all.log_min))
        found += [SoftmaxSpectrum(*of_head) for of_head in zip(*parts, strict=True)]
    return found


@dataclass(frozen=True, kw_only=True)
class Surrogate(AbstractStatement):
    """A number the papers print as an upper bound on kappa(J). It is none, in either convention (E4)."""

    log10: float | None
    """log10 of the value, finite where the value overflows to infinity."""
    kappa_x: float
    kappa_q: float
    kappa_k: float
    kappa_v: float
    kappa_p: float
    log10_kappa_lambda: float
    printed_hypotheses: tuple[Hypothesis, ...]
    """What the papers assume. It is reported, not required: the theorem fails with and without it."""
    literal_bound_infinite: bool = True
    """Read literally, kappa(Lambda) and with it the bound are infinite for every head, because Lambda_i 1 = 0 (E3)."""
    label: str = "surrogate, not a bound"

    @property
    def kappa_lambda(self) -> float:
        """max_i lambda_max(Lambda_i) / min_i lambda_min,nonzero(Lambda_i); infinite beyond 1e308."""
        return _power(self.log10_kappa_lambda)


@dataclass(frozen=True, eq=False)
class Factors:
    """What the papers' bound is made of: condition numbers of X, Wq, Wk, Wv (in this order), of P, and Lambda_i."""

    kappa: dict[str, float]
    kappa_p: float
    lambdas: SoftmaxSpectrum

    @property
    def log10(self) -> float | None:
        """log10 of the bound; None if a factor is not defined."""
        if any(math.isnan(k) for k in self.kappa.values()) or not bool((self.lambdas.rank > 0).any()):
            return None
        x, q, k, v = (math.log10(number) for number in self.kappa.values())
        first = 3 * x + self.lambdas.log10_kappa + v + _add(q, k)
        return _add(first, x + math.log10(self.kappa_p))


def _factors(head: Head) -> Factors:
    weights = (("X", head.x), ("Wq", head.query_weights[0]), ("Wk", head.w_k), ("Wv", head.w_v))
    kappa = {name: spectrum(matrix).pseudo_condition_number for name, matrix in weights}
    return Factors(kappa, spectrum(head.probabilities()[0]).pseudo_condition_number, softmax_spectrum(head))


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
    factors = _factors(head)
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
        reference=paper_c(PRINTED_IN),
        log10=log10,
        kappa_x=kappa["X"],
        kappa_q=kappa["Wq"],
        kappa_k=kappa["Wk"],
        kappa_v=kappa["Wv"],
        kappa_p=factors.kappa_p,
        log10_kappa_lambda=lambdas.log10_kappa,
        printed_hypotheses=_full_rank(head),
    )
    return settle(statement, strict=strict)


def papers_second_term(head: Head, *, strict: bool = True) -> Bound:
    r"""The second term of the papers' bound as printed on its own, which drops a factor (E11).

    .. math:: \kappa(P) \quad\text{where the bound has}\quad \kappa(X)\, \kappa(P)

    The value is the printed one, `observed` the term that the bound contains.

    Raises: HypothesisError for X = 0.
    """
    check_single(head)
    x, p = (spectrum(m).pseudo_condition_number for m in (head.x, head.probabilities()[0]))
    hypotheses = (Hypothesis("X is not zero", not math.isnan(x), {"kappa(X)": x}),)
    statement = Bound(
        name="papers_second_term",
        value=p if all_hold(hypotheses) else None,
        hypotheses=hypotheses,
        reference=paper_c("eq 10 (Spectral Conditioning of Attention: eq 12)"),
        quantity="second term of papers_bound",
        relation="=",
        parts={"kappa(X)": x, "kappa(P)": p},
        observed=x * p,
    )
    return settle(statement, strict=strict)


def proposition32_printed(conditioned: Head, other: Head, *, strict: bool = True) -> Bound:
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
    statement = Bound(
        name="proposition32_printed",
        value=theirs.log10 if all_hold(hypotheses) else None,
        hypotheses=hypotheses,
        reference=paper_c("Proposition 3.2, as printed"),
        quantity="log10 B(conditioned)",
        relation="<=",
        parts=kappas,
        observed=mine.log10,
    )
    return settle(statement, strict=strict)


def _full_rank(head: Head) -> tuple[Hypothesis, ...]:
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


def _add(a: float, b: float) -> float:
    """log10(10^a + 10^b)."""
    return float(np.logaddexp(a * math.log(10), b * math.log(10))) / math.log(10)


def _power(log10: float) -> float:
    return 10.0**log10 if log10 < 308 else math.inf
