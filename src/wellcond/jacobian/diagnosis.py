"""Why a head's Jacobian is conditioned as it is: norms of its blocks, its attention map, and what dominates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from wellcond.jacobian.head import FactorStack, Head, JacobianFactors, build_factors, stack_heads
from wellcond.linalg.lanczos import largest_eigenvalues
from wellcond.linalg.spectrum import singular_values, spectrum, spectrum_of_values

Verdict = Literal["dead head", "P", "X", "norms", "balanced"]

# Collapsed attention leaves W_Q and W_K next to no gradient. Its condition number is that of the tokens alone and looks
# excellent (theory.md, section 7.1), so it must be named.
DEAD_RATIO = 1e-3
DEAD_MASS = 0.99
COLLAPSED_MASS = 0.9999


@dataclass(frozen=True)
class AttentionStatistics:
    """Means over query tokens (and over the query heads of a group)."""

    entropy: float
    """In nats."""
    normalised_entropy: float
    """Divided by the logarithm of the number of keys a token may see; 1 is uniform, NaN if it sees only one."""
    diagonal_mass: float
    """Mean probability of a token for itself; NaN under cross attention."""
    max_probability: float
    logit_std: float = math.nan
    """Standard deviation of a token's logits over the keys it attends to, those with a probability above zero."""


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
    return _statistics(p.flatten(1, 2), visible.flatten(1), own)


def map_statistics(p: Tensor, visible: Tensor, own: Tensor | None) -> AttentionStatistics:
    """Of probabilities (..., keys), with how many keys each row may see and the probability of its own token."""
    return _statistics(p.flatten(0, -2)[None], visible.flatten()[None], None if own is None else own.flatten()[None])[0]


def _statistics(p: Tensor, visible: Tensor, own: Tensor | None) -> list[AttentionStatistics]:
    """Of each map (heads, rows, keys)."""
    entropy, several = -torch.xlogy(p, p).sum(-1), visible > 1
    normalised = torch.where(several, entropy / visible.clamp_min(2).log(), 0.0).sum(-1) / several.sum(-1)
    diagonal = torch.full_like(normalised, math.nan) if own is None else own.mean(-1)
    numbers = torch.stack([entropy.mean(-1), normalised, diagonal, p.amax(-1).mean(-1), _logit_std(p)], dim=-1)
    return [AttentionStatistics(*row) for row in numbers.tolist()]


def _logit_std(p: Tensor) -> Tensor:
    """Of each map: log P differs from the logits by a constant per row, which a standard deviation does not see."""
    seen = p > 0
    count = seen.sum(-1)
    logits = torch.where(seen, p, 1.0).log()
    centred = torch.where(seen, logits - (logits.sum(-1) / count)[..., None], 0.0)
    return (centred.square().sum(-1) / count).sqrt().mean(-1)


def is_collapsed(head: Head, statistics: AttentionStatistics) -> bool:
    """Dead by the attention map alone, whatever the Jacobian: one-hot, though there are several keys."""
    return head.memory.shape[0] > 1 and statistics.max_probability >= COLLAPSED_MASS


def block_norms(factors: JacobianFactors) -> tuple[float, float, float]:
    """Spectral norms of J_Q, J_K and J_V."""
    norm_q, norm_k = factors.for_all(_query_and_key_norms).tolist()
    return norm_q, norm_k, float(factors.py_values[0])


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


def _p_values(stack: FactorStack) -> Tensor:
    return singular_values(stack.p)


def diagnose_head(
    head: Head, factors: JacobianFactors | None = None, statistics: AttentionStatistics | None = None
) -> HeadDiagnosis:
    """Measure and name what dominates the conditioning of a head's Jacobian.

    The verdict is the largest of three ratios: kappa(P), kappa of the tokens, and the spread of the norms of J_Q, J_K
    and J_V; ``balanced`` if none exceeds 10; ``dead head`` if attention has collapsed, whatever the ratios.
    """
    factors = build_factors(head) if factors is None else factors
    norm_q, norm_k, norm_v = block_norms(factors)
    kappa_p = spectrum_of_values(factors.for_all(_p_values), factors.p.shape).pseudo_condition_number
    tokens = spectrum_of_values(factors.x_values, head.x.shape) if head.is_single else spectrum(head.memory)
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
