"""timm's attention inside windows, blocks and mask units: Swin, DaViT, Twins, MaxViT, NesT, GCViT, Hiera, TinyViT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wellcond.attention.families.timm_common import in_windows, logit_scale, refuse
from wellcond.attention.families.timm_vit import fused_blocks, with_apart_biases
from wellcond.attention.find import register_adapter
from wellcond.attention.layout import fused_site
from wellcond.attention.site import AttentionSite, Place

POOLED_QUERIES = (
    "its queries are max-pooled over tokens between projection and product, so the rows of its query weight are not "
    "what is compared with the keys."
)


def _smaller_than_map(place: Place) -> tuple[str, ...]:
    """Swin's block: its window is the whole map where the map is no larger."""
    block: Any = place.parent
    size = getattr(block, "input_resolution", None) or getattr(block, "feat_size", None)
    return in_windows(
        size is not None and any(side > window for side, window in zip(size, block.window_size, strict=True))
    )


def _of_block(place: Place, attribute: str) -> tuple[str, ...]:
    """A block that divides every map that it is given says so by an attribute."""
    return in_windows(bool(getattr(place.parent, attribute, None)))


@register_adapter("timm.models.swin_transformer.WindowAttention")
def swin_window(place: Place) -> AttentionSite:
    """Swin: a table of biases by relative position."""
    return fused_blocks(place, family="timm Swin", relative_position_bias=True, modifiers=_smaller_than_map(place))


@register_adapter(
    "timm.models.swin_transformer_v2.WindowAttention",
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention",
)
def swin_v2_window(place: Place) -> AttentionSite:
    """SwinV2: cosine attention (q and k of unit length), a learned scale per head, biases from a small network."""
    module: Any = place.module
    site = fused_site(
        place,
        module.qkv,
        num_heads=module.num_heads,
        output=module.proj,
        family="timm SwinV2",
        scale=None,
        qk_norm="l2",
        relative_position_bias=True,
        modifiers=_smaller_than_map(place),
    )
    # Christoph Reich's version keeps one ordinary bias on qkv.
    return with_apart_biases(site) if hasattr(module, "q_bias") else site


@register_adapter("timm.models.davit.WindowAttention")
def davit_window(place: Place) -> AttentionSite:
    """DaViT's spatial half: windows without a position bias."""
    return fused_blocks(place, family="timm DaViT", modifiers=_of_block(place, "window_size"))


@register_adapter("timm.models.twins.LocallyGroupedAttn")
def twins_local(place: Place) -> AttentionSite:
    """Twins: attention inside groups of tokens."""
    return fused_blocks(place, family="timm Twins", modifiers=in_windows(True))


@register_adapter("timm.models.maxxvit.AttentionCl", "timm.models.maxxvit.Attention2d")
def maxvit_attention(place: Place) -> AttentionSite:
    """MaxViT, CoAtNet: `head_first` decides whether q, k, v alternate per head or follow each other in blocks."""
    module: Any = place.module
    return fused_site(
        place,
        module.qkv,
        num_heads=module.num_heads,
        head_dim=module.dim_head,
        arrangement="groups" if module.head_first else "blocks",
        output=module.proj,
        family="timm MaxViT",
        scale=logit_scale(module, module.dim_head),
        relative_position_bias=module.rel_pos is not None,
        modifiers=_of_block(place, "partition_size"),
    )


@register_adapter("timm.models.nest.Attention")
def nest_attention(place: Place) -> AttentionSite:
    """NesT: attention inside image blocks; its output puts the heads innermost, so head h owns columns h, h + H, ..."""
    # Each level holds position embeddings (1, blocks, tokens, width); the last level has one block.
    tables = [getattr(level, "pos_embed", None) for level in place.ancestors()]
    divided = any(table is not None and table.shape[1] > 1 for table in tables)
    site = fused_blocks(place, family="timm NesT", modifiers=in_windows(divided))
    assert site.o is not None
    interleaved = site.o.rows.reshape(site.head_dim, site.num_heads).T
    return replace(site, o=replace(site.o, rows=interleaved))


@register_adapter("timm.models.gcvit.WindowAttentionGlobal")
def gcvit_window(place: Place) -> AttentionSite:
    """GCViT's local windows; the global ones have no query projection."""
    if place.module.use_global:
        refuse(place, "its queries come from a convolutional network over the whole image: it has no query projection.")
    divided = in_windows(getattr(place.parent, "num_windows", 1) > 1)
    return fused_blocks(place, family="timm GCViT", relative_position_bias=True, modifiers=divided)


@register_adapter("timm.models.hiera.MaskUnitAttention")
def hiera_mask_unit(place: Place) -> AttentionSite:
    """Hiera: attention inside mask units, or global; refused where it pools its queries."""
    module: Any = place.module
    if module.q_stride > 1:
        refuse(place, POOLED_QUERIES)
    return fused_site(
        place,
        module.qkv,
        num_heads=module.heads,
        output=module.proj,
        family="timm Hiera",
        scale=logit_scale(module, module.head_dim),
        modifiers=in_windows(module.use_mask_unit_attn),
    )


@register_adapter("timm.models.hieradet_sam2.MultiScaleAttention")
def sam2_attention(place: Place) -> AttentionSite:
    """SAM 2's Hiera; refused where it pools its queries."""
    if place.module.q_pool is not None:
        refuse(place, POOLED_QUERIES)
    return fused_blocks(place, family="timm SAM 2", modifiers=_of_block(place, "is_windowed"))


@register_adapter("timm.models.tiny_vit.Attention", "timm.models.efficientformer.Attention")
def biased_groups(place: Place) -> AttentionSite:
    """TinyViT, EfficientFormer: per head its query, key and (wider) value; biases by relative position.

    TinyViT normalises its tokens inside the module: the projection reads ``norm(x)``.
    """
    module: Any = place.module
    return fused_site(
        place,
        module.qkv,
        num_heads=module.num_heads,
        head_dim=module.key_dim,
        value_head_dim=module.val_dim,
        arrangement="groups",
        output=module.proj,
        family="timm TinyViT",
        scale=logit_scale(module, module.key_dim),
        relative_position_bias=True,
        modifiers=_of_block(place, "window_size"),
    )
