"""timm's plain transformers: ViT, DeiT, PiT, EVA, BEiT, NaFlexViT, SAM and those that reuse their attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from wellcond.attention.families import modifiers
from wellcond.attention.families.timm_common import (
    ancestor_has,
    before_output,
    logit_scale,
    query_key_norm,
)
from wellcond.attention.find import register_adapter
from wellcond.attention.layout import QKVLayout, fused_site, head_rows, output_slot, projection_slot, separate_site
from wellcond.attention.site import AttentionSite, Place, Slot


def fused_blocks(place: Place, *, family: str, **facts: Any) -> AttentionSite:
    """Softmax attention with ``qkv`` stored as [Q | K | V] and ``proj``, the form most timm classes have."""
    module: Any = place.module
    facts.setdefault("qk_norm", query_key_norm(place))
    site = fused_site(place, module.qkv, num_heads=module.num_heads, output=module.proj, family=family, **facts)
    return replace(site, scale=logit_scale(module, site.head_dim))


@register_adapter(
    "timm.layers.attention.Attention",
    "timm.models.vision_transformer.Attention",
    "timm.models.volo.Attention",
    "timm.models.metaformer.Attention",
    "timm.models.fastvit.Attention",
    "timm.models.visformer.Attention",
    "timm.models.convit.MHSA",
)
def vit_attention(place: Place) -> AttentionSite:
    """ViT's attention, and copies of it that read tokens, maps (FastViT) or use 1x1 convolutions (Visformer)."""
    return fused_blocks(place, family="timm ViT", modifiers=before_output(place.module))


@register_adapter("timm.layers.attention.AttentionRope")
def rope_attention(place: Place) -> AttentionSite:
    """Fused, or separate and then possibly with grouped queries; rotary where the model holds a rotary table."""
    module: Any = place.module
    rotary = ancestor_has(place, "rope")
    if module.qkv is not None:
        return fused_blocks(place, family="timm rotary ViT", rotary=rotary, modifiers=before_output(module))
    return separate_site(
        place,
        module.q_proj,
        module.k_proj,
        module.v_proj,
        num_heads=module.num_heads,
        num_kv_heads=getattr(module, "num_kv_heads", None),
        output=module.proj,
        family="timm rotary ViT",
        scale=logit_scale(module, module.head_dim),
        qk_norm=query_key_norm(place),
        rotary=rotary,
        modifiers=before_output(module),
    )


def with_apart_biases(site: AttentionSite) -> AttentionSite:
    """The same site with the biases where BEiT keeps them: ``q_bias`` and ``v_bias``, and none on the keys."""
    module: Any = site.module
    if module.q_bias is None:
        return site

    def biased(slot: Slot, name: str) -> Slot:
        rows = head_rows(slot.num_heads, slot.head_dim)
        return replace(slot, bias_owner=module, bias_name=name, bias_rows=rows)

    # k_bias is a buffer of zeros that only fills the concatenation: the keys have no bias.
    return replace(site, q=biased(site.q, "q_bias"), v=biased(site.v, "v_bias"))


@register_adapter("timm.models.eva.EvaAttention")
def eva_attention(place: Place) -> AttentionSite:
    """EVA: fused with biases apart, or separate without a key bias; rotary where the model holds a rotary table."""
    module: Any = place.module
    rotary = ancestor_has(place, "rope")
    if module.qkv is not None:
        site = fused_blocks(place, family="timm EVA", rotary=rotary, modifiers=before_output(module))
        return with_apart_biases(site)
    return separate_site(
        place,
        module.q_proj,
        module.k_proj,
        module.v_proj,
        num_heads=module.num_heads,
        output=module.proj,
        family="timm EVA",
        scale=logit_scale(module, module.head_dim),
        qk_norm=query_key_norm(place),
        rotary=rotary,
        modifiers=before_output(module),
    )


@register_adapter("timm.models.beit.Attention")
def beit_attention(place: Place) -> AttentionSite:
    """BEiT: biases apart; a relative position bias of its own or one that all layers share."""
    own = place.module.relative_position_bias_table is not None
    site = fused_blocks(place, family="timm BEiT", relative_position_bias=own or ancestor_has(place, "rel_pos_bias"))
    return with_apart_biases(site)


@register_adapter("timm.models.vision_transformer_relpos.RelPosAttention")
def relpos_attention(place: Place) -> AttentionSite:
    """ViT with a bias by relative position, of each layer or shared."""
    biased = place.module.rel_pos is not None or ancestor_has(place, "shared_rel_pos")
    return fused_blocks(place, family="timm ViT relpos", relative_position_bias=biased)


@register_adapter("timm.models.vision_transformer_sam.Attention")
def sam_attention(place: Place) -> AttentionSite:
    """SAM: either a position term on the logits that is linear in the unscaled query, or a rotary embedding."""
    module: Any = place.module
    return fused_blocks(
        place,
        family="timm SAM",
        relative_position_bias=module.use_rel_pos,
        rotary=module.rope is not None,
        modifiers=modifiers.those(
            {
                modifiers.QUERY_POSITION_TERM: module.use_rel_pos,
                modifiers.LOCAL_WINDOW: bool(getattr(place.parent, "window_size", 0)),
            }
        ),
    )


@register_adapter("timm.models.vision_transformer.ParallelScalingBlock")
def parallel_block(place: Place) -> AttentionSite:
    """ViT-22B: one input projection holds the MLP's rows, then Q, K, V; the attention is the block itself."""
    module: Any = place.module
    num_heads, head_dim = module.num_heads, module.head_dim
    layout = QKVLayout(num_heads, head_dim)
    mlp_rows = module.in_split[0]

    def slot(role: str) -> Slot:
        return projection_slot(module.in_proj, mlp_rows + layout.rows(role))

    return AttentionSite(
        name=place.name,
        module=place.module,
        q=slot("q"),
        k=slot("k"),
        v=slot("v"),
        o=_parallel_output(place, head_rows(num_heads, head_dim)),
        scale=logit_scale(module, head_dim),
        qk_norm=query_key_norm(place),
    )


def _parallel_output(place: Place, columns: Tensor) -> Slot | None:
    module: Any = place.module
    fused: nn.Module | None = getattr(module, "out_proj", None)
    if fused is not None:  # the attention's columns come first, the MLP's after them
        return projection_slot(fused, columns, heads_on_input=True)
    return output_slot(place, module.attn_out_proj, *columns.shape)


@register_adapter("timm.models.tnt.Attention")
def tnt_attention(place: Place) -> AttentionSite:
    """TNT: queries and keys in one projection, values in another."""
    module: Any = place.module
    layout = QKVLayout(module.num_heads, module.head_dim, order="qk")
    value_dim = module.v.out_features // module.num_heads
    return AttentionSite(
        name=place.name,
        module=place.module,
        q=projection_slot(module.qk, layout.rows("q")),
        k=projection_slot(module.qk, layout.rows("k")),
        v=projection_slot(module.v, head_rows(module.num_heads, value_dim)),
        o=output_slot(place, module.proj, module.num_heads, value_dim),
        scale=logit_scale(module, module.head_dim),
    )
