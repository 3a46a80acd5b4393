"""Why a head's Jacobian is conditioned as it is: norms of its blocks, its attention map, and what dominates."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from wellcond.head import Blocks, Head, build_blocks
from wellcond.linalg.spectrum import largest_eigenvalue, spectrum

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
    p = head.probabilities()
    visible = torch.full(p.shape[:-1], float(p.shape[-1]), dtype=p.dtype, device=p.device)
    if head.mask is not None:
        visible = (head.mask > -torch.inf).sum(-1).to(p).expand(p.shape[:-1])
    square = head.y is None and p.shape[-1] == p.shape[-2]
    return map_statistics(p, visible, p.diagonal(dim1=-2, dim2=-1) if square else None)


def map_statistics(p: Tensor, visible: Tensor, own: Tensor | None) -> AttentionStatistics:
    """Of probabilities (..., keys), with how many keys each row may see and the probability of its own token."""
    entropy = -torch.xlogy(p, p).sum(-1)
    several = visible > 1
    normalised = (entropy[several] / visible[several].log()).mean() if bool(several.any()) else math.nan
    diagonal = math.nan if own is None else float(own.mean())
    return AttentionStatistics(float(entropy.mean()), float(normalised), diagonal, float(p.amax(-1).mean()))


def is_collapsed(head: Head, statistics: AttentionStatistics) -> bool:
    """Dead by the attention map alone, whatever the Jacobian: one-hot, though there are several keys."""
    return head.memory.shape[0] > 1 and statistics.max_probability >= COLLAPSED_MASS


def block_norms(blocks: Blocks) -> tuple[float, float, float]:
    """Spectral norms of J_Q, J_K and J_V."""
    norm_q, norm_k = _product_norm(blocks.m, blocks.x), _product_norm(blocks.b, blocks.q)
    return norm_q, norm_k, float(blocks.py_values[0])


def _product_norm(covariances: Tensor, factors: Tensor) -> float:
    """Norm of the matrix with rows (r, o) -> C_r[o, :] (x) t_r: J_Q from M and X, J_K from B and Q."""
    largest = float(covariances.abs().max())
    if largest == 0:
        return 0.0
    # Scaled to one, so that the squares of a nearly dead head do not underflow.
    scaled = covariances / largest
    rows, dv, _ = scaled.shape
    gram = factors @ factors.T

    def product(flat: Tensor) -> Tensor:
        """C (T T^T (C^T u))."""
        pulled = (flat.to(scaled.device).view(rows, 1, dv) @ scaled)[:, 0]
        return (scaled @ (gram @ pulled)[:, :, None]).flatten().cpu()

    # Ritz values that agree to 1e-6 three times in a row are right to about 1e-10.
    return largest * math.sqrt(largest_eigenvalue(product, rows * dv, tolerance=1e-6).value)


def diagnose_head(head: Head, blocks: Blocks | None = None) -> HeadDiagnosis:
    """Measure and name what dominates the conditioning of a head's Jacobian.

    The verdict is the largest of three ratios: kappa(P), kappa of the tokens, and the spread of the norms of J_Q, J_K
    and J_V; ``balanced`` if none exceeds 10; ``dead head`` if attention has collapsed, whatever the ratios.
    """
    blocks = build_blocks(head) if blocks is None else blocks
    norm_q, norm_k, norm_v = block_norms(blocks)
    kappa_p = spectrum(blocks.p).pseudo_condition_number
    kappa_x = spectrum(head.memory).pseudo_condition_number
    statistics = attention_statistics(head)
    moving = max(norm_q, norm_k)
    nearly = head.memory.shape[0] > 1 and statistics.max_probability >= DEAD_MASS
    dead = is_collapsed(head, statistics) or (nearly and moving <= DEAD_RATIO * norm_v)
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
            "that of the tokens alone and says nothing good"
        )
    text = {
        "P": f"the attention map is nearly singular (kappa {ratios['P']:.3g}): many tokens attend alike",
        "X": f"the tokens are nearly dependent (kappa {ratios['X']:.3g})",
        "norms": f"the Jacobians of Q, K and V differ in size by a factor of {ratios['norms']:.3g}",
        "balanced": "neither attention map, tokens nor norms stand out",
    }
    return text[verdict]
