"""What a user should know before training with a correction."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch

from wellcond.attention.distributed import whole
from wellcond.attention.site import AttentionSite
from wellcond.errors import NumericalWarning
from wellcond.linalg.spectrum import spectra

DEFAULT_NUM_TOKENS = 197  # a ViT-B at 224 px; the rule depends on its logarithm only


def warn_if_saturating(sites: Iterable[AttentionSite], lams: dict[str, float], num_tokens: int) -> None:
    """Warn when lam I makes every token attend to itself alone.

    With layer-normed tokens, lam I on Q and K raises each token's logit with itself over the others by about
    s lam_q lam_k d. From ln N + 5 on, at least 99 % of the attention sits on the diagonal: Q and K get next to no
    gradient (theory.md, section 7.1).
    """
    for site in sites:
        if site.kind != "softmax" or site.scale is None or site.qk_norm is not None or site.cross:
            continue
        gap = site.scale * lams["q"] * lams["k"] * min(site.head_dim, site.in_features)
        limit = math.log(num_tokens) + 5
        if gap > limit:
            warnings.warn(
                f"{site.name or 'the model'}: lam={lams['q']:g} saturates the softmax: each token's own logit exceeds "
                f"the others by about {gap:.0f} (more than {limit:.1f} at {num_tokens} tokens), so attention starts as "
                "the identity and W_Q, W_K receive almost no gradient. condition_(model, 'balanced') conditions "
                "without changing the scale of the logits.",
                NumericalWarning,
                stacklevel=4,
            )
            return


def warn_if_degenerate(sites: Iterable[AttentionSite], projections: str) -> None:
    """Warn about zero and rank-deficient heads, whose polar factor is not unique."""
    zero, deficient = [], []
    for site in sites:
        for role in projections:
            for head, s in enumerate(spectra(site.slots[role].read_raw())):
                if s.rank == 0:
                    zero.append(f"{site.name} ({role}, head {head})")
                elif s.nullity:
                    deficient.append(f"{site.name} ({role}, head {head})")
    for heads, what in (
        (zero, "zero weights have no polar factor and stay zero (C = 0)"),
        (deficient, "rank-deficient weights have many polar factors; the one of the SVD is used"),
    ):
        if heads:
            shown = ", ".join(heads[:3]) + (f" and {len(heads) - 3} more" if len(heads) > 3 else "")
            warnings.warn(f"{shown}: {what}.", NumericalWarning, stacklevel=4)


def warn_if_rounded_away(sites: Iterable[AttentionSite], lams: dict[str, float]) -> None:
    """Warn when a 16-bit weight of the size of W vanishes beside lam."""
    for site in sites:
        for role, lam in lams.items():
            weight = site.slots[role].parameter
            if weight.element_size() > 2 or lam == 0:
                continue
            spacing = torch.finfo(weight.dtype).eps * 2 ** math.floor(math.log2(abs(lam)))
            typical = float(whole(weight.detach()).float().square().mean().sqrt())
            # Rounding errors are spread evenly over one spacing: standard deviation spacing / sqrt(12).
            if spacing / math.sqrt(12) > 0.25 * typical:
                warnings.warn(
                    f"{site.name or 'the model'} ({role}): stored as {weight.dtype}, whose numbers near {lam:g} are "
                    f"{spacing:g} apart, so weights of about {typical:.2g} are rounded away on the diagonal of W + C. "
                    "Keep master weights in float32 (autocast), and fold in float32.",
                    NumericalWarning,
                    stacklevel=4,
                )
                return
