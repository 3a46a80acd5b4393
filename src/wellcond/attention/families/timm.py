"""timm's attention.

Where queries and keys do not read the same tokens `cross` is True: a class token attends to all tokens, keys and values
are projected from a subsampled map.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from wellcond.attention.families import Adapter, refused, table
from wellcond.attention.families.table import ROOT, Rule, around, attribute, by_class, has, holds, with_facts
from wellcond.attention.layout import QKVLayout, head_rows, output_slot, projection_slot
from wellcond.attention.site import AttentionSite, ModuleContext, Normaliser
from wellcond.attention.slot import Slot

# What a module states


def stated_scale(place: ModuleContext) -> Any:
    """The module's `scale`, or torch's own where its fused kernel ignores that attribute."""
    return ROOT if getattr(place.module, "fused_attn", False) else float(place.module.scale)  # type: ignore[arg-type]


def norm_kind(norm: nn.Module | None) -> Normaliser | None:
    """Which normaliser a q_norm or k_norm is; None for none or Identity."""
    if norm is None or isinstance(norm, nn.Identity):
        return None
    names = [base.__name__.lower() for base in type(norm).__mro__]
    if any(name.startswith("rmsnorm") for name in names):
        return "rms"
    return "layer" if isinstance(norm, nn.LayerNorm) else "other"


def query_key_norm(place: ModuleContext) -> Normaliser | None:
    """The normaliser between the projections and their product, under timm's usual names."""
    kinds = {norm_kind(getattr(place.module, name, None)) for name in ("q_norm", "k_norm")}
    return kinds.pop() if len(kinds) == 1 else "other"


def either(*rules: Rule) -> Rule:
    """Whether one of the rules holds."""
    return lambda place: any(rule(place) for rule in rules)


def by_head(place: ModuleContext) -> str:
    """`head_first` decides whether q, k, v alternate per head or follow each other in blocks."""
    return "groups" if place.module.head_first else "blocks"


# How a module is described


def attention(projections: str = "qkv", **columns: Any) -> Adapter:
    """How classes of timm are described; by default with ``qkv`` stored as [Q | K | V], and ``proj``."""
    usual: dict[str, Any] = {
        "output": "proj",
        "num_heads": "num_heads",
        "scale": stated_scale,
        "qk_norm": query_key_norm,
    }
    return table.attention(projections, **(usual | columns))


def with_apart_biases(site: AttentionSite) -> AttentionSite:
    """The same site with the biases where BEiT keeps them: ``q_bias`` and ``v_bias``, and none on the keys."""
    if getattr(site.module, "q_bias", None) is None:
        return site

    def biased(slot: Slot, name: str) -> Slot:
        rows = head_rows(slot.num_heads, slot.head_dim)
        return replace(slot, bias_owner=site.module, bias_name=name, bias_rows=rows)

    # k_bias is a buffer of zeros that only fills the concatenation: the keys have no bias.
    return replace(site, q=biased(site.q, "q_bias"), v=biased(site.v, "v_bias"))


def with_heads_innermost(site: AttentionSite) -> AttentionSite:
    """NesT's output puts the heads innermost, so head h owns columns h, h + H, ..."""
    assert site.o is not None
    interleaved = site.o.rows.reshape(site.head_dim, site.num_heads).T
    return replace(site, o=replace(site.o, rows=interleaved))


def parallel_block(place: ModuleContext) -> AttentionSite:
    """ViT-22B: one input projection holds the MLP's rows, then Q, K, V; the attention is the block itself."""
    module: Any = place.module
    heads, width = module.num_heads, module.head_dim
    q, k, v = (projection_slot(module.in_proj, module.in_split[0] + QKVLayout(heads, width).rows(r)) for r in "qkv")
    fused: nn.Module | None = getattr(module, "out_proj", None)
    if fused is not None:  # the attention's columns come first, the MLP's after them
        o: Slot | None = projection_slot(fused, head_rows(heads, width), heads_on_input=True)
    else:
        o = output_slot(place, module.attn_out_proj, heads, width)
    site = AttentionSite(name=place.name, module=module, q=q, k=k, v=v, o=o)
    return with_facts(place, site, {"scale": stated_scale, "qk_norm": query_key_norm})


# What stands between the heads and W_O in ViT, EVA and NaFlexViT: a norm (`scale_norm`), a gate (`gated`).
BEFORE_OUTPUT: dict[str, Rule] = {
    table.OUTPUT_NORM: lambda place: norm_kind(getattr(place.module, "norm", None)) is not None,
    table.GATED_OUTPUT: holds("gate"),
}
POSITION_TERM = {table.QUERY_POSITION_TERM: True}
POOLED_QUERIES = (
    "its queries are max-pooled over tokens between projection and product, so the rows of its query weight are not "
    "what is compared with the keys."
)
own_scale: Rule = attribute("scale")
windows = partial(attention, relative_position_bias=True)

ROWS: dict[str, Adapter] = {
    # Tokens of a plain transformer; copies of it read maps (FastViT) or use 1x1 convolutions (Visformer).
    """
    layers.attention.Attention models.vision_transformer.Attention models.volo.Attention models.metaformer.Attention
    models.fastvit.Attention models.visformer.Attention models.convit.MHSA
    """: attention(modifiers=BEFORE_OUTPUT),
    "layers.attention.AttentionRope": attention(
        "qkv | q_proj k_proj v_proj", num_kv_heads="num_kv_heads", rotary=around("rope"), modifiers=BEFORE_OUTPUT
    ),
    "models.eva.EvaAttention": attention(
        "qkv | q_proj k_proj v_proj", rotary=around("rope"), modifiers=BEFORE_OUTPUT, then=with_apart_biases
    ),
    "models.beit.Attention": attention(
        relative_position_bias=either(holds("relative_position_bias_table"), around("rel_pos_bias")),
        then=with_apart_biases,
    ),
    "models.vision_transformer_relpos.RelPosAttention": attention(
        relative_position_bias=either(holds("rel_pos"), around("shared_rel_pos"))
    ),
    # Either a position term on the logits that is linear in the unscaled query, or a rotary embedding.
    "models.vision_transformer_sam.Attention": attention(
        relative_position_bias=has("use_rel_pos"),
        rotary=holds("rope"),
        modifiers={table.QUERY_POSITION_TERM: has("use_rel_pos")},
    ),
    "models.vision_transformer.ParallelScalingBlock": parallel_block,
    "models.tnt.Attention": attention("qk v", letters="qk v", qk_norm=None),
    # Linear maps over the heads before and after the softmax.
    "models.cait.TalkingHeadAttn": attention(talking_heads=True),
    # Class tokens and learned latents.
    "models.cait.ClassAttn": attention("q k v", cross=True),
    "models.crossvit.CrossAttention": attention("wq wk wv", scale=own_scale, cross=True),
    "models.volo.ClassAttention": attention("q kv", scale=own_scale, cross=True),
    "layers.attention_pool.AttentionPoolLatent": attention(
        "q kv",
        cross=True,
        refuse=(
            lambda place: isinstance(place.module.q, nn.Identity),
            "its learned latents are the queries themselves: it has no query projection.",
        ),
    ),
    # CLIP's pool over a feature map and its mean: all tokens are queries, only the first is kept.
    "layers.attention_pool2d.AttentionPool2d": attention("qkv | q k v"),
    "layers.attention_pool2d.RotAttentionPool2d": attention("qkv | q k v", rotary=True),
    # Windows, blocks and mask units.
    "models.swin_transformer.WindowAttention": windows(),
    # Cosine attention (q and k of unit length), a learned scale per head, biases from a small network.
    """
    models.swin_transformer_v2.WindowAttention models.swin_transformer_v2_cr.WindowMultiHeadAttention
    """: windows(scale=None, qk_norm="l2", then=with_apart_biases),
    "models.davit.WindowAttention models.twins.LocallyGroupedAttn": attention(),
    "models.maxxvit.AttentionCl models.maxxvit.Attention2d": attention(
        head_dim="dim_head", arrangement=by_head, relative_position_bias=holds("rel_pos")
    ),
    "models.nest.Attention": attention(then=with_heads_innermost),
    "models.gcvit.WindowAttentionGlobal": windows(
        refuse=(
            has("use_global"),
            "its queries come from a convolutional network over the whole image: it has no query projection.",
        )
    ),
    "models.hiera.MaskUnitAttention": attention(
        num_heads="heads", refuse=(lambda place: place.module.q_stride > 1, POOLED_QUERIES)
    ),
    "models.hieradet_sam2.MultiScaleAttention": attention(refuse=(holds("q_pool"), POOLED_QUERIES)),
    # Per head its query, key and (wider) value. TinyViT's projection reads norm(x).
    "models.tiny_vit.Attention models.efficientformer.Attention": windows(
        head_dim="key_dim", value_head_dim="val_dim", arrangement="groups"
    ),
    # Keys and values of a strided or pooled map.
    "models.pvt_v2.Attention models.twins.GlobalSubSampleAttn": attention("q kv", cross=holds("sr")),
    "models.nextvit.EfficientAttention": attention("q k v", cross=holds("sr")),
    # MobileNetV4: one key/value head for all queries, each projection after a subsampling of its own.
    "layers.attention2d.MultiQueryAttention2d": attention(
        "query.proj key.proj value.proj",
        output="output.proj",
        num_kv_heads=1,
        cross=lambda place: place.module.kv_stride > 1 or place.module.has_query_strides,
    ),
    "layers.attention2d.Attention2d": attention(arrangement=by_head, scale=ROOT),
    # LowFormer, CPUBone: q, k, v per head from a strided map; the output may be fused with the upsampling.
    "models.lowformer.ConvAttention models.cpubone.ConvAttention": attention(
        "pwise", output="o_proj", arrangement="groups"
    ),
    # BoTNet and HaloNet, whose keys come from a block and a halo around it: position terms linear in the query.
    "layers.bottleneck_attn.BottleneckAttn": windows(
        output=None,
        head_dim="dim_head_qk",
        value_head_dim="dim_head_v",
        scale=own_scale,
        modifiers=POSITION_TERM,
    ),
    "layers.halo_attn.HaloAttn": windows(
        "q kv",
        output=None,
        head_dim="dim_head_qk",
        value_head_dim="dim_head_v",
        arrangement="groups",
        scale=own_scale,
        cross=True,
        modifiers=POSITION_TERM,
    ),
    # The non-local block: one head; its output projection is followed by a batch norm.
    "layers.non_local_attn.NonLocalAttn": attention("t p g", output="z", num_heads=1, scale=own_scale),
    # Between channels: softmax(t norm(Q)^T norm(K)) on V^T, with a learned temperature t per head.
    "models.xcit.XCA models.edgenext.CrossCovarianceAttn": attention(kind="cross_covariance", scale=None, qk_norm="l2"),
    # softmax((s K)^T V) applied to Q^T, so the slice named q lies on the linear path.
    "models.davit.ChannelAttention": attention(
        kind="channel", scale=own_scale, roles={"query": "k", "key": "v", "value": "q"}
    ),
    # softmax((s Q)^T K) on V^T; a dynamic s is the number of tokens to the power -1/2.
    "models.davit.ChannelAttentionV2": attention(
        num_heads="groups",
        kind="channel",
        scale=lambda place: None if place.module.dynamic_scale else ROOT,
    ),
}
ROWS |= {classes: table.refused(reason) for reason, classes in refused.TIMM.items()}
TABLE = by_class(ROWS, lambda word: f"timm.{word}")
