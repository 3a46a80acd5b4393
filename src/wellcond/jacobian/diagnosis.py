r"""Why a head's Jacobian is conditioned as it is: norms of its blocks, its attention map, what dominates; and bounds.

# Note [Bounds]
J J^T (wide) and J^T J (stack) are sums of three PSD terms, one for each block, which gives the bounds (L) and (U1).
They involve norms of W and P, not kappa(W): no bound in kappa(W) alone can exist (Wq -> tWq, Wk -> Wk/t).
`wellcond.theory` states them with their hypotheses, theory.md, section 6, proves them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from wellcond.attention.kernels import AttentionStatistics, statistics_of_maps
from wellcond.jacobian.factors import FactorStack, JacobianFactors, build_factors
from wellcond.jacobian.head import Head, stack_heads
from wellcond.jacobian.problem import Convention
from wellcond.linalg.lanczos import largest_eigenvalues
from wellcond.linalg.spectrum import (
    SECTION_ENTRIES,
    SoftmaxSpectrum,
    default_rtol,
    resolve_rank,
    softmax_eigenvalues,
    spectrum,
    spectrum_of_values,
    where_decomposed,
)

Verdict = Literal["dead head", "P", "X", "norms", "balanced"]

# Collapsed attention leaves W_Q and W_K next to no gradient. Its condition number is that of the tokens alone and looks
# excellent (theory.md, section 7.1), so it must be named.
DEAD_RATIO = 1e-3
DEAD_MASS = 0.99
COLLAPSED_MASS = 0.9999


@dataclass(frozen=True)
class HeadDiagnosis:
    """What a condition number of the Jacobian must never be read without."""

    norm_q: float
    norm_k: float
    norm_v: float
    kappa_p: float
    kappa_x: float
    attention: AttentionStatistics
    dead: bool
    verdict: Verdict
    explanation: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)


def attention_statistics(head: Head) -> AttentionStatistics:
    """Entropy, diagonal mass and largest probability of a head's attention map."""
    return all_attention_statistics([head])[0]


def all_attention_statistics(heads: Sequence[Head]) -> list[AttentionStatistics]:
    """`attention_statistics` of heads that `can_stack`, computed together."""
    stack = stack_heads(heads)
    p = stack.probabilities()
    visible = torch.full(p.shape[:-1], float(p.shape[-1]), dtype=p.dtype, device=p.device)
    if stack.mask is not None:
        visible = (stack.mask > -torch.inf).sum(-1).to(p).expand(p.shape[:-1])
    square = stack.y is None and p.shape[-1] == p.shape[-2]
    own = p.diagonal(dim1=-2, dim2=-1).flatten(1) if square else None
    return statistics_of_maps(p.flatten(1, 2), visible.flatten(1), own)


def is_collapsed(head: Head, statistics: AttentionStatistics) -> bool:
    """Dead by the attention map alone, whatever the Jacobian: one-hot, though there are several keys."""
    return head.memory.shape[0] > 1 and statistics.max_probability >= COLLAPSED_MASS


def block_norms(factors: JacobianFactors) -> tuple[float, float, float]:
    """Spectral norms of J_Q, J_K and J_V."""
    norm_q, norm_k = factors.for_all(_query_and_key_norms).tolist()
    return norm_q, norm_k, float(factors.values("py")[0])


def _query_and_key_norms(stack: FactorStack) -> Tensor:
    """Norms of J_Q and J_K of each head, (heads, 2), by one run of Lanczos."""
    heads, rows, dv, _ = stack.m.shape
    # Scaled to one, so that the squares of a nearly dead head do not underflow.
    largest = torch.stack([t.abs().amax((-3, -2, -1)) for t in (stack.m, stack.b)])
    sizes = torch.where(largest == 0, 1.0, largest)[:, :, None, None, None]
    m, b = stack.m / sizes[0], stack.b / sizes[1]
    x_gram, q_gram = stack.x @ stack.x.mT, stack.q @ stack.q.mT

    def product(flat: Tensor) -> Tensor:
        """C_r (T T^T (C_r^T u)) of the matrices with rows (r, o) -> C_r[o, :] (x) t_r: M and X, then B and Q."""
        of_q, of_k = flat.view(2, heads, rows, 1, dv)
        found = [
            scaled @ (gram @ (u @ scaled)[:, :, 0])[..., None]
            for u, scaled, gram in ((of_q, m, x_gram), (of_k, b, q_gram))
        ]
        return torch.cat(found).flatten(1)

    # Ritz values that agree to 1e-6 three times in a row are right to about 1e-10.
    found = largest_eigenvalues(product, 2 * heads, rows * dv, tolerance=1e-6, device=m.device)
    squares = torch.tensor([top.value for top in found], dtype=m.dtype).clamp_min(0)
    return (largest.cpu() * squares.sqrt().view(2, heads)).T


def diagnose_head(
    head: Head, factors: JacobianFactors | None = None, statistics: AttentionStatistics | None = None
) -> HeadDiagnosis:
    """Measure and name what dominates the conditioning of a head's Jacobian.

    The verdict is the largest of three ratios: kappa(P), kappa of the tokens, and the spread of the norms of J_Q, J_K
    and J_V; ``balanced`` if none exceeds 10; ``dead head`` if attention has collapsed, whatever the ratios.
    """
    factors = build_factors(head) if factors is None else factors
    norm_q, norm_k, norm_v = block_norms(factors)
    kappa_p = spectrum_of_values(factors.values("p"), factors.p.shape).pseudo_condition_number
    tokens = spectrum_of_values(factors.values("x"), head.x.shape) if head.is_single else spectrum(head.memory)
    kappa_x = tokens.pseudo_condition_number
    statistics = statistics or attention_statistics(head)
    return judge_head((norm_q, norm_k, norm_v), kappa_p, kappa_x, statistics, several_keys=head.memory.shape[0] > 1)


def judge_head(
    norms: tuple[float, float, float],
    kappa_p: float,
    kappa_x: float,
    statistics: AttentionStatistics,
    *,
    several_keys: bool,
) -> HeadDiagnosis:
    """Name what dominates, from the spectral norms of J_Q, J_K and J_V, the tokens and the attention map."""
    norm_q, norm_k, norm_v = norms
    moving = max(norm_q, norm_k)
    nearly = statistics.max_probability >= DEAD_MASS and moving <= DEAD_RATIO * norm_v
    dead = several_keys and (statistics.max_probability >= COLLAPSED_MASS or nearly)
    spread = max(moving, norm_v) / max(min(norm_q, norm_k, norm_v), 1e-300)
    ratios: dict[Verdict, float] = {"P": kappa_p, "X": kappa_x, "norms": spread}
    worst = max(ratios, key=lambda name: ratios[name] if math.isfinite(ratios[name]) else -1.0)
    verdict: Verdict = "dead head" if dead else (worst if ratios[worst] > 10 else "balanced")
    return HeadDiagnosis(
        norm_q, norm_k, norm_v, kappa_p, kappa_x, statistics, dead, verdict, _explain(verdict, ratios, statistics)
    )


def _explain(verdict: Verdict, ratios: dict[Verdict, float], statistics: AttentionStatistics) -> str:
    if verdict == "dead head":
        where = "itself" if statistics.diagonal_mass >= DEAD_MASS else "one other token"
        return (
            f"attention has collapsed: every token attends to {where} (largest probability "
            f"{statistics.max_probability:.4f}), so W_Q and W_K receive almost no gradient; the condition number is "
            "that of the tokens alone and is not meaningful"
        )
    text = {
        "P": f"the attention map is nearly singular (kappa {ratios['P']:.3g}): many tokens attend alike",
        "X": f"the tokens are nearly dependent (kappa {ratios['X']:.3g})",
        "norms": f"the Jacobians of Q, K and V differ in size by a factor of {ratios['norms']:.3g}",
        "balanced": "neither attention map, tokens nor norms stand out",
    }
    return text[verdict]


# --- bounds: see Note [Bounds] ---------------------------------------------------------------------------------------


def lower_parts(factors: JacobianFactors, rank: int, *, less_rounding: bool = False) -> dict[str, float]:
    """Numbers that (L) is made of at rank r of the tokens; zero where there are fewer than r singular values.

    `less_rounding` takes the rounding of the SVD off, so that dependent rows get no positive bound.
    """

    def sigma_r(matrix: Tensor, sigma: Tensor) -> float:
        if rank > len(sigma):
            return 0.0
        return max(0.0, float(sigma[rank - 1]) - rounding(matrix) * float(sigma[0]))

    def rounding(matrix: Tensor) -> float:
        return default_rtol(tuple(matrix.shape)) if less_rounding else 0.0

    # bd(M_i) bd(M_i)^T >= min_i sigma_dv(M_i)^2, and sigma_dv = 0 for a tall M_i (d < dv).
    tall = factors.m.shape[2] < factors.m.shape[1]
    of_m = factors.values("m")
    m = 0.0 if tall else max(0.0, float((of_m[:, -1] - rounding(factors.m) * of_m[:, 0]).min()))
    of_x, of_px = sigma_r(factors.x, factors.values("x")), sigma_r(factors.py, factors.values("py"))
    return {"sigma_r(X)": of_x, "min sigma_min(M_i)": m, "sigma_r(PX)": of_px}


def upper_parts(factors: JacobianFactors) -> dict[str, float]:
    """Numbers that (U1) is made of."""
    return {
        "||X||": float(factors.values("x")[0]),
        "max ||M_i||": float(factors.values("m")[:, 0].max()),
        "||Q||": float(factors.for_all(_norms, "q")),
        "max ||B_i||": float(factors.for_all(_norms, "b").max()),
        "||PX||": float(factors.values("py")[0]),
    }


def _norms(matrices: Tensor) -> Tensor:
    """Of each matrix; squaring loses nothing of a largest singular value."""
    return torch.linalg.eigvalsh(where_decomposed(matrices @ matrices.mT))[..., -1].clamp_min(0).sqrt()


def lower_square(parts: Mapping[str, float]) -> float:
    """(L) from its parts."""
    x, m, px = parts.values()
    return (x * m) ** 2 + px**2


def upper_square(parts: Mapping[str, float]) -> float:
    """(U1) from its parts."""
    x, m, q, b, px = parts.values()
    return (x * m) ** 2 + (q * b) ** 2 + px**2


def norm_bound(factors: JacobianFactors) -> float:
    """The square root of (U1), which rounding must not make smaller than what it bounds."""
    return math.sqrt(upper_square(upper_parts(factors))) * (1 + 1e-12)


def log10_kappa_bound(head: Head, factors: JacobianFactors, *, convention: Convention = "wide") -> float | None:
    """log10 of sqrt(U1 / L), an upper bound on kappa(J); None where that says nothing but rounding."""
    rank = int(resolve_rank(factors.values("x"), tuple(head.x.shape)))
    if rank == 0 or (convention == "wide" and rank < head.num_tokens):
        return None
    lower = lower_square(lower_parts(factors, rank, less_rounding=True))
    return None if lower == 0 else (math.log10(upper_square(upper_parts(factors))) - math.log10(lower)) / 2


def softmax_spectra(heads: Sequence[Head]) -> list[SoftmaxSpectrum]:
    """Spectra of the derivatives Lambda_i of the softmax, of heads that `can_stack`, together as far as they are small.

    Example:
        >>> x, w = torch.tensor([[1.0], [2.0]]), torch.ones(1, 1)
        >>> round(10 ** softmax_spectra([Head(x, w, w, w, 1.0)])[0].log10_kappa, 9)
        1.872609003
    """
    at_once = max(1, SECTION_ENTRIES // (heads[0].num_rows * len(heads[0].memory)))
    found = []
    for at in range(0, len(heads), at_once):
        some = heads[at : at + at_once]
        of_all = softmax_eigenvalues(stack_heads(some).log_probabilities().flatten(0, 2))
        parts = (numbers.cpu().chunk(len(some)) for numbers in (of_all.rank, of_all.log_max, of_all.log_min))
        found += [SoftmaxSpectrum(*of_head) for of_head in zip(*parts, strict=True)]
    return found


@dataclass(frozen=True, eq=False)
class SurrogateFactors:
    r"""What the papers' bound is made of: condition numbers of X, Wq, Wk, Wv (in this order), of P, and Lambda_i.

    .. math:: B = \kappa(X)^3 \kappa(\Lambda) \kappa(W_v) (\kappa(W_q) + \kappa(W_k)) + \kappa(X) \kappa(P)

    It is no bound on kappa(J), in either convention; see `wellcond.theory.papers_bound`.
    """

    kappa: dict[str, float]
    kappa_p: float
    lambdas: SoftmaxSpectrum

    @property
    def log10(self) -> float | None:
        """log10 of B, which may exceed any float; None if a factor is not defined."""
        if any(math.isnan(k) for k in self.kappa.values()) or not bool((self.lambdas.rank > 0).any()):
            return None
        x, q, k, v = (math.log10(number) for number in self.kappa.values())
        first = 3 * x + self.lambdas.log10_kappa + v + _log10_sum(q, k)
        return _log10_sum(first, x + math.log10(self.kappa_p))


def _log10_sum(a: float, b: float) -> float:
    """log10(10^a + 10^b)."""
    return float(np.logaddexp(a * math.log(10), b * math.log(10))) / math.log(10)
