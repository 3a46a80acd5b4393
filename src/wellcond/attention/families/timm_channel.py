"""timm's attention between channels instead of tokens: XCiT, EdgeNeXt, DaViT."""

from __future__ import annotations

from typing import Any

from wellcond.attention.find import register_adapter
from wellcond.attention.layout import fused_site
from wellcond.attention.site import AttentionSite, Place


@register_adapter("timm.models.xcit.XCA", "timm.models.edgenext.CrossCovarianceAttn")
def cross_covariance(place: Place) -> AttentionSite:
    """softmax(t norm(Q)^T norm(K)) on V^T: channels of unit length over the tokens, a learned temperature per head."""
    module: Any = place.module
    return fused_site(
        place,
        module.qkv,
        num_heads=module.num_heads,
        output=module.proj,
        family="timm XCiT",
        kind="cross_covariance",
        scale=None,
        qk_norm="l2",
    )


@register_adapter("timm.models.davit.ChannelAttention")
def davit_channel(place: Place) -> AttentionSite:
    """DaViT: softmax((s K)^T V) applied to Q^T, so the slice named q lies on the linear path."""
    module: Any = place.module
    return fused_site(
        place,
        module.qkv,
        num_heads=module.num_heads,
        output=module.proj,
        family="timm DaViT",
        kind="channel",
        scale=float(module.scale),
        roles={"query": "k", "key": "v", "value": "q"},
    )


@register_adapter("timm.models.davit.ChannelAttentionV2")
def davit_channel_v2(place: Place) -> AttentionSite:
    """DaViT, second version: softmax((s Q)^T K) on V^T; a dynamic s is the number of tokens to the power -1/2."""
    module: Any = place.module
    return fused_site(
        place,
        module.qkv,
        num_heads=module.groups,
        output=module.proj,
        family="timm DaViT",
        kind="channel",
        scale=None if module.dynamic_scale else module.head_dim**-0.5,
    )
