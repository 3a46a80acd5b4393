"""timm's attention on maps, much of it with subsampled keys and values: PVT, Twins, NextViT, MobileNetV4, LowFormer.

Where keys and values are projected from a subsampled map and queries are not, `cross` is True: the projections do not
read the same tokens.
"""

from __future__ import annotations

from typing import Any

from wellcond.attention.families import modifiers
from wellcond.attention.families.timm_common import logit_scale, with_projections
from wellcond.attention.find import register_adapter
from wellcond.attention.layout import (
    QKVLayout,
    check_rows,
    fused_site,
    head_rows,
    out_features,
    projection_slot,
    separate_site,
)
from wellcond.attention.site import AttentionSite, Place


@register_adapter("timm.models.pvt_v2.Attention", "timm.models.twins.GlobalSubSampleAttn")
def subsampled_kv(place: Place) -> AttentionSite:
    """PVTv2, Twins: keys and values of a strided (or pooled) and normalised map."""
    module: Any = place.module
    head_dim = module.dim // module.num_heads
    return with_projections(
        place,
        "q",
        "kv",
        family="timm PVT",
        scale=logit_scale(module, head_dim),
        cross=module.sr is not None,
    )


@register_adapter("timm.models.nextvit.EfficientAttention")
def nextvit_attention(place: Place) -> AttentionSite:
    """NextViT: keys and values of pooled and normalised tokens."""
    module: Any = place.module
    return with_projections(
        place,
        "q",
        "k",
        "v",
        family="timm NextViT",
        scale=logit_scale(module, module.head_dim),
        cross=module.sr is not None,
    )


@register_adapter("timm.layers.attention2d.MultiQueryAttention2d")
def multi_query_2d(place: Place) -> AttentionSite:
    """MobileNetV4: one key/value head for all queries, each projection after a subsampling of its own."""
    module: Any = place.module
    return separate_site(
        place,
        module.query.proj,
        module.key.proj,
        module.value.proj,
        num_heads=module.num_heads,
        num_kv_heads=1,
        output=module.output.proj,
        family="timm MobileNetV4",
        scale=logit_scale(module, module.key_dim),
        cross=module.kv_stride > 1 or module.has_query_strides,
    )


@register_adapter("timm.layers.attention2d.Attention2d")
def attention_2d(place: Place) -> AttentionSite:
    """1x1 convolutions on a map; `head_first` decides the arrangement."""
    module: Any = place.module
    return fused_site(
        place,
        module.qkv,
        num_heads=module.num_heads,
        arrangement="groups" if module.head_first else "blocks",
        output=module.proj,
        family="timm MobileNetV4",
        scale=module.dim_head**-0.5,
    )


@register_adapter("timm.models.lowformer.ConvAttention", "timm.models.cpubone.ConvAttention")
def low_resolution(place: Place) -> AttentionSite:
    """LowFormer, CPUBone: q, k, v per head from a strided map; the output may be fused with the upsampling."""
    module: Any = place.module
    return fused_site(
        place,
        module.pwise,
        num_heads=module.num_heads,
        arrangement="groups",
        output=module.o_proj,
        family="timm LowFormer",
        scale=logit_scale(module, module.head_dim),
    )


@register_adapter("timm.layers.bottleneck_attn.BottleneckAttn")
def bottleneck(place: Place) -> AttentionSite:
    """BoTNet: a position term on the logits that is linear in the query; no output projection."""
    module: Any = place.module
    return fused_site(
        place,
        module.qkv,
        num_heads=module.num_heads,
        head_dim=module.dim_head_qk,
        value_head_dim=module.dim_head_v,
        arrangement="blocks",
        output=None,
        family="timm BoTNet",
        scale=float(module.scale),
        relative_position_bias=True,
        modifiers=(modifiers.QUERY_POSITION_TERM,),
    )


@register_adapter("timm.layers.halo_attn.HaloAttn")
def halo(place: Place) -> AttentionSite:
    """HaloNet: blocks of queries, wider windows of keys and values (per head its key, then its value)."""
    module: Any = place.module
    heads, key_dim, value_dim = module.num_heads, module.dim_head_qk, module.dim_head_v
    check_rows(place, "fused k, v", out_features(module.kv), [heads, heads], [key_dim, value_dim])
    layout = QKVLayout(heads, key_dim, value_head_dim=value_dim, arrangement="groups", order="kv")
    return AttentionSite(
        name=place.name,
        module=place.module,
        q=projection_slot(module.q, head_rows(heads, key_dim)),
        k=projection_slot(module.kv, layout.rows("k")),
        v=projection_slot(module.kv, layout.rows("v")),
        scale=float(module.scale),
        # Keys come from the block and a halo around it.
        cross=True,
        relative_position_bias=True,
        modifiers=(modifiers.LOCAL_WINDOW, modifiers.QUERY_POSITION_TERM),
    )


@register_adapter("timm.layers.non_local_attn.NonLocalAttn")
def non_local(place: Place) -> AttentionSite:
    """The non-local block: one head; its output projection is followed by a batch norm."""
    module: Any = place.module
    return separate_site(
        place,
        module.t,
        module.p,
        module.g,
        num_heads=1,
        output=module.z,
        family="timm non-local",
        scale=float(module.scale),
    )
