"""What a user should know before training with a correction."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
from torch import nn

from wellcond.attention.blocks import POSITIONS
from wellcond.attention.sharding import whole
from wellcond.attention.site import AttentionSite
from wellcond.errors import NumericalWarning
from wellcond.linalg.spectrum import spectra

STACK_LEVEL = 6  # the line that calls condition_, under torch's decorator and the functions of apply.py
SHORT = 197
"""Tokens of a ViT at 224 px: where a model does not say how many it has, the rule must hold for that many at least."""
RECORDS = (
    "In our records lam = 10 loses on every image task at every learning rate (digits: 21 % correct, 91 % without; "
    "CIFAR-10 with a ViT: 18 % and 31 %; results/README.md)."
)


def warn_if_saturating(
    model: nn.Module, sites: Iterable[AttentionSite], lams: dict[str, float], num_tokens: int | None
) -> None:
    """Warn when lam I makes every token attend to itself alone.

    With layer-normed tokens, lam I on Q and K raises each token's logit with itself over the others by about
    s lam_q lam_k d. From ln N + 5 on, at least 99 % of the attention sits on the diagonal: Q and K get next to no
    gradient (theory.md, section 7.1).

    Args:
        model: what the sites are a part of.
        sites: attention layers that are corrected.
        lams: lam of each projection.
        num_tokens: N; None for what the model's learned positions say.
    """
    for site in sites:
        if site.kind != "softmax" or site.scale is None or site.qk_norm is not None or site.cross:
            continue
        gap = site.scale * lams["q"] * lams["k"] * min(site.head_dim, site.in_features)
        known = num_tokens or count_positions(model, site)
        limit = math.log(known or SHORT) + 5
        if gap > limit:
            at = f"at N = {known} tokens" if known else f"at N = {SHORT}; how many tokens this model reads is not known"
            warnings.warn(
                f"{site.name or 'the model'}: lam={lams['q']:g} saturates the softmax: each token's own logit exceeds "
                f"the others by about s lam^2 d = {gap:.0f}, more than ln N + 5 = {limit:.1f} {at}. So attention "
                "begins as the identity and W_Q, W_K receive almost no gradient. "
                f"{RECORDS} condition_(model, 'balanced') leaves the scale of the logits as it is.",
                NumericalWarning,
                stacklevel=STACK_LEVEL,
            )
            return


def count_positions(model: nn.Module, site: AttentionSite) -> int | None:
    """Tokens for which a model has learned positions as wide as the tokens of a site; None if it has none or several.

    A table of positions holds all tokens of an image, or those of the longest text.
    """
    lengths = set()
    for name, parameter in model.named_parameters():
        in_attention = site.name and name.startswith(f"{site.name}.")
        table = any(part in name for part in POSITIONS) and parameter.dim() in (2, 3)
        if table and not in_attention and parameter.shape[-1] == site.in_features:
            lengths.add(parameter.shape[-2] + _tokens_without_position(model, name))
    return lengths.pop() if len(lengths) == 1 else None


def _tokens_without_position(model: nn.Module, name: str) -> int:
    """Class and register tokens that timm's models put before tokens which have their positions already."""
    owner = model.get_submodule(name.rpartition(".")[0])
    count = getattr(owner, "num_prefix_tokens", 0) if getattr(owner, "no_embed_class", False) else 0
    return count if isinstance(count, int) else 0


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
            warnings.warn(f"{shown}: {what}.", NumericalWarning, stacklevel=STACK_LEVEL)


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
                    stacklevel=STACK_LEVEL,
                )
                return
