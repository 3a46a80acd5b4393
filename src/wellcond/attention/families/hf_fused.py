"""Hugging Face attention with one fused projection: GPT-NeoX, BLOOM, Falcon, Phi-3, ModernBERT, CodeGen, vision."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from wellcond.attention.families import hf_common as hf
from wellcond.attention.families import modifiers
from wellcond.attention.find import register_adapter
from wellcond.attention.layout import fused_site
from wellcond.attention.site import AttentionSite, Place

FUSED_NAMES = ("query_key_value", "qkv_proj", "Wqkv", "qkv", "att_proj", "c_attn")
LAYOUT = ("num_heads", "num_kv_heads", "head_dim", "arrangement", "order", "shards")

# (tokens, 3, heads, head_dim) in the rows: all queries, all keys, all values.
VISION_ROTARY = """
    cohere_compass.CohereCompassVisionAttention ernie4_5_vl_moe.Ernie4_5_VLMoeVisionAttention
    glm4v.Glm4vVisionAttention glm4v_moe.Glm4vMoeVisionAttention glm5_next.Glm5NextVisionAttention
    glm_ocr.GlmOcrVisionAttention qwen2_5_vl.Qwen2_5_VLVisionAttention qwen2_vl.VisionAttention
    qwen3_5.Qwen3_5VisionAttention qwen3_5_moe.Qwen3_5MoeVisionAttention qwen3_omni_moe.Qwen3OmniMoeVisionAttention
    qwen3_vl.Qwen3VLVisionAttention qwen3_vl_moe.Qwen3VLMoeVisionAttention qwen4_exp.Qwen4ExpVisionAttention
"""
VISION = """
    blip.BlipAttention blip_2.Blip2Attention florence2.Florence2VisionWindowAttention
    glm_image.GlmImageVisionAttention instructblip.InstructBlipAttention instructblipvideo.InstructBlipVideoAttention
    mgp_str.MgpstrAttention pp_ocrv5_mobile_rec.PPOCRV5MobileRecAttention
    pp_ocrv5_server_rec.PPOCRV5ServerRecAttention pp_ocrv6_small_rec.PPOCRV6SmallRecAttention
    timesformer.TimesformerSelfAttention
"""
# Decomposed relative positions are multiplied with the queries.
SAM_VISION = """
    deepseek_ocr2.DeepseekOcr2SamVisionSdpaAttention sam.SamVisionSdpaAttention sam_hq.SamHQVisionSdpaAttention
    unlimited_ocr.UnlimitedOcrSamVisionSdpaAttention
    deepseek_ocr2.DeepseekOcr2SamVisionAttention got_ocr2.GotOcr2VisionAttention
    pp_formulanet.PPFormulaNetVisionAttention sam.SamVisionAttention sam_hq.SamHQVisionAttention
    seggpt.SegGptAttention slanext.SLANeXtVisionAttention unlimited_ocr.UnlimitedOcrSamVisionAttention
    vitdet.VitDetAttention
"""


def fused(place: Place, **rules: Any) -> AttentionSite:
    """Site of a module with one fused projection; `rules` hold the layout and override the facts it states."""
    projection = hf.first_attribute(place.module, FUSED_NAMES)
    if not isinstance(projection, nn.Module):
        raise hf.refusal(place, f"it has no fused projection under any of {', '.join(FUSED_NAMES)}.")
    layout_rules = {"num_heads": hf.head_count_of} | {name: rules.pop(name) for name in LAYOUT if name in rules}
    layout = hf.resolve(place, layout_rules)
    bare = fused_site(place, projection, family=place.class_name, **layout)
    output = hf.output_of(place, bare.num_heads * bare.head_dim)
    facts = hf.facts_of(place, rules, bare.head_dim)
    return fused_site(place, projection, output=output, family=place.class_name, **layout, **facts)


hf.register(VISION_ROTARY, partial(fused, rotary=True))
hf.register(VISION, fused)


def _multiplies_positions(place: Place) -> bool:
    return bool(hf.first_attribute(place.module, ("use_rel_pos", "use_relative_position_embeddings")))


@register_adapter(*hf.hf(SAM_VISION))
def sam_vision(place: Place) -> AttentionSite:
    """Image encoder of SAM and its relatives."""
    relative = _multiplies_positions(place)
    added = modifiers.those({modifiers.QUERY_POSITION_TERM: relative})
    return fused(place, scale=None if relative else hf.scale_of, relative_position_bias=relative, modifiers=added)


@register_adapter(*hf.hf("sam2.Sam2MultiScaleAttention hiera.HieraMaskUnitAttention"))
def pooled_query(place: Place) -> AttentionSite:
    """Queries may be max-pooled over tokens; their logits are then not products of projected tokens."""
    stride: Any = place.module.query_stride
    pools = stride is not None and stride != 1
    added = modifiers.those({modifiers.POOLED_QUERIES: pools})
    return fused(place, causal=False, scale=None if pools else hf.scale_of, modifiers=added)


@register_adapter(*hf.hf("exaone4_5.Exaone4_5_VisionAttention"))
def exaone_vision(place: Place) -> AttentionSite:
    """Grouped queries in a vision tower."""
    return fused(place, num_kv_heads=place.module.num_key_value_heads, rotary=True)


@register_adapter(*hf.hf("gpt_neox.GPTNeoXAttention"))
def gpt_neox(place: Place) -> AttentionSite:
    """Per head: query, key, value."""
    heads = place.config("num_attention_heads")
    return fused(place, num_heads=heads, arrangement="groups", rotary=True)


@register_adapter(*hf.hf("gpt_neox_japanese.GPTNeoXJapaneseAttention"))
def gpt_neox_japanese(place: Place) -> AttentionSite:
    """Per head: query, key, value; `norm_factor` divides the logits."""
    return fused(place, arrangement="groups", rotary=True, causal=True, scale=hf.inverse_root_of("head_size"))


@register_adapter(*hf.hf("persimmon.PersimmonAttention"))
def persimmon(place: Place) -> AttentionSite:
    """Per head: query, key, value."""
    return fused(place, arrangement="groups", rotary=True)


@register_adapter(*hf.hf("bloom.BloomAttention"))
def bloom(place: Place) -> AttentionSite:
    """Per head: query, key, value; ALiBi is a bias that depends on the distance."""
    scale = place.module.inv_norm_factor
    return fused(place, arrangement="groups", causal=True, scale=scale, relative_position_bias=True)


@register_adapter(*hf.hf("falcon.FalconAttention"))
def falcon(place: Place) -> AttentionSite:
    """Three layouts: groups of queries with their key and value, one key and value for all, or per head q, k, v."""
    module: Any = place.module
    if module.new_decoder_architecture:
        layout = {"num_kv_heads": module.num_kv_heads, "arrangement": "groups"}
    elif module.multi_query:
        layout = {"num_kv_heads": 1, "arrangement": "blocks"}
    else:
        layout = {"num_kv_heads": module.num_heads, "arrangement": "groups"}
    alibi = bool(place.config("alibi", False))
    scale = module.inv_norm_factor
    return fused(place, **layout, scale=scale, rotary=not alibi, relative_position_bias=alibi)


@register_adapter(*hf.hf("phi3.Phi3Attention phi4_multimodal.Phi4MultimodalAttention"))
def phi3(place: Place) -> AttentionSite:
    """All queries, then all keys, then all values, with grouped queries."""
    heads, kv_heads = place.config("num_attention_heads"), place.config("num_key_value_heads")
    return fused(place, num_heads=heads, num_kv_heads=kv_heads, head_dim=place.module.head_dim, rotary=True)


@register_adapter(*hf.hf("dbrx.DbrxAttention"))
def dbrx(place: Place) -> AttentionSite:
    """All queries, then all keys, then all values, with grouped queries and clipping."""
    return fused(place, num_kv_heads=place.module.num_key_value_heads, rotary=True)


@register_adapter(*hf.hf("modernbert.ModernBertAttention"))
def modernbert(place: Place) -> AttentionSite:
    """All queries, all keys, all values; the scale is computed inside forward."""
    heads = place.config("num_attention_heads")
    return fused(place, num_heads=heads, scale=hf.inverse_root_of("head_dim"), rotary=True)


@register_adapter(*hf.hf("mpt.MptAttention"))
def mpt(place: Place) -> AttentionSite:
    """All queries, all keys, all values; ALiBi, and optional clipping."""
    return fused(place, causal=True, relative_position_bias=True)


@register_adapter(*hf.hf("bark.BarkSelfAttention"))
def bark(place: Place) -> AttentionSite:
    """All queries, all keys, all values."""
    return fused(place, scale=hf.inverse_root_of("head_dim"))


@register_adapter(*hf.hf("codegen.CodeGenAttention"))
def codegen(place: Place) -> AttentionSite:
    """Four shards, each with its queries, then its values, then its keys."""
    scale = hf.inverse_root_of("head_dim")
    return fused(place, order="qvk", shards=4, causal=True, rotary=True, scale=scale)


@register_adapter(*hf.hf("gpt_bigcode.GPTBigCodeAttention"))
def gpt_bigcode(place: Place) -> AttentionSite:
    """Multi-query: all queries, one key, one value; otherwise per head query, key, value."""
    module: Any = place.module
    if module.is_cross_attention:
        raise hf.refusal(place, "its cross attention reads one key and one value head out of weights for all heads.")
    arrangement = "blocks" if module.multi_query else "groups"
    return fused(place, num_kv_heads=module.kv_heads, arrangement=arrangement)


@register_adapter(*hf.hf("florence2.Florence2VisionChannelAttention"))
def florence2_channel(place: Place) -> AttentionSite:
    """Channels attend to channels within groups: softmax(q^T k) applied to v; the scale depends on the tokens."""
    return fused(place, num_heads=place.module.groups, kind="channel", scale=None)
