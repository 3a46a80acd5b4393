"""Claims that need no runs: they are computed when the page is made, with the same result everywhere."""

from __future__ import annotations

import torch

from wellcond.reproduce.correction_cost import SIZES, Forms
from wellcond.theory.weights import theorem38_printed

REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"


def computed(what: str) -> dict[str, str]:
    """Word and evidence of a computed claim: theorem38, memory, flops or folding."""
    holds, evidence = {"theorem38": _theorem38, "memory": _memory, "flops": _flops, "folding": _folding}[what]()
    return {"word": REPRODUCED if holds else NOT_REPRODUCED, "evidence": evidence}


def _theorem38() -> tuple[bool, str]:
    """A = diag(-1.9, 0.1) and lambda = 2 meet the printed hypothesis."""
    a, lam = torch.diag(torch.tensor([-1.9, 0.1], dtype=torch.float64)), 2.0
    met = theorem38_printed(a, lam, strict=False).applies
    before, after = (float(torch.linalg.cond(m)) for m in (a, a + lam * torch.eye(2, dtype=torch.float64)))
    evidence = (
        f"A = diag(-1.9, 0.1) with lambda = 2 {'meets' if met else 'does not meet'} the hypothesis, and the condition "
        f"number goes from {before:.3g} to {after:.3g}; it needs lambda > sigma_max (kappa + 1) / (kappa - 1)"
    )
    return not (met and after > before), evidence


def _memory() -> tuple[bool, str]:
    plain, spectral = (Forms(SIZES["paper"]).count(form) for form in ("original", "activation"))
    same = (plain.parameters, plain.gradients) == (spectral.parameters, spectral.gradients)
    evidence = (
        f"counted for {SIZES['paper']}: {spectral.parameters} parameters and as many gradients in both, "
        f"{spectral.correction} stored number"
    )
    return same and spectral.correction == 1, evidence


def _flops() -> tuple[bool, str]:
    size = SIZES["paper"]
    counted = Forms(size).count("activation")
    # A multiplication and an addition for each entry; the paper counts them as one.
    as_one, both = counted.elementwise / 2 / counted.matmul_flops, counted.elementwise / counted.matmul_flops
    evidence = (
        f"counted for {size}: {as_one:.3%} with one operation an entry (1 / (2D) = {1 / (2 * size.width):.3%}), "
        f"{both:.3%} with the multiplication and the addition"
    )
    return abs(as_one * 2 * size.width - 1) < 1e-9, evidence


def _folding() -> tuple[bool, str]:
    plain, folded = (Forms(SIZES["paper"]).count(form) for form in ("original", "folded"))
    same = all(
        getattr(plain, name) == getattr(folded, name)
        for name in ("parameters", "activations", "matmul_flops", "elementwise", "peak_bytes")
    )
    evidence = (
        f"counted for {SIZES['paper']}: the same FLOPs, parameters and memory as the original; largest difference to "
        f"X (W + C), relative: {folded.error:.0e}"
    )
    return same and folded.error < 1e-6, evidence
