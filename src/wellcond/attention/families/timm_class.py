"""timm's attention with few queries (class tokens, latent pools), and talking heads.

A class attention computes queries of the class token only and keys of every token: `cross` is True, since its queries
and its keys are not made from the same tokens.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from wellcond.attention.families.timm_common import logit_scale, query_key_norm, refuse, with_projections
from wellcond.attention.families.timm_vit import fused_blocks
from wellcond.attention.find import register_adapter
from wellcond.attention.site import AttentionSite, Place


@register_adapter("timm.models.cait.ClassAttn")
def cait_class(place: Place) -> AttentionSite:
    """CaiT, XCiT: the class token attends to all tokens, itself included."""
    module: Any = place.module
    return with_projections(
        place,
        "q",
        "k",
        "v",
        family="timm CaiT",
        scale=logit_scale(module, module.q.out_features // module.num_heads),
        cross=True,
    )


@register_adapter("timm.models.cait.TalkingHeadAttn")
def cait_talking_heads(place: Place) -> AttentionSite:
    """CaiT: linear maps over the heads before and after the softmax."""
    return fused_blocks(place, family="timm CaiT", talking_heads=True)


@register_adapter("timm.models.crossvit.CrossAttention")
def crossvit_cross(place: Place) -> AttentionSite:
    """CrossViT: the class token of one branch attends to the tokens of the other."""
    module: Any = place.module
    return with_projections(
        place,
        "wq",
        "wk",
        "wv",
        family="timm CrossViT",
        scale=float(module.scale),
        cross=True,
    )


@register_adapter("timm.models.volo.ClassAttention")
def volo_class(place: Place) -> AttentionSite:
    """VOLO: the class token attends to all tokens."""
    module: Any = place.module
    return with_projections(
        place,
        "q",
        "kv",
        family="timm VOLO",
        scale=float(module.scale),
        cross=True,
    )


@register_adapter("timm.layers.attention_pool.AttentionPoolLatent")
def latent_pool(place: Place) -> AttentionSite:
    """SigLIP's pool: learned latent queries attend to all tokens."""
    module: Any = place.module
    if isinstance(module.q, nn.Identity):
        refuse(place, "its learned latents are the queries themselves: it has no query projection.")
    return with_projections(
        place,
        "q",
        "kv",
        family="timm attention pool",
        scale=logit_scale(module, module.head_dim),
        qk_norm=query_key_norm(place),
        cross=True,
    )


@register_adapter("timm.layers.attention_pool2d.AttentionPool2d", "timm.layers.attention_pool2d.RotAttentionPool2d")
def map_pool(place: Place) -> AttentionSite:
    """CLIP's pool over a feature map and its mean: all tokens are queries, only the first is kept."""
    module: Any = place.module
    rotary = place.class_name.startswith("Rot")
    if module.qkv is not None:
        return fused_blocks(place, family="timm attention pool", rotary=rotary)
    return with_projections(
        place,
        "q",
        "k",
        "v",
        family="timm attention pool",
        scale=logit_scale(module, module.head_dim),
        rotary=rotary,
    )
