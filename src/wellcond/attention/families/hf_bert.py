"""BERT and its relatives: ``query``, ``key``, ``value`` here, the output projection in a sibling of the parent."""

from __future__ import annotations

from functools import partial
from typing import Any

from wellcond.attention.families import hf_common as hf
from wellcond.attention.families import modifiers
from wellcond.attention.find import register_adapter
from wellcond.attention.site import AttentionSite, Place

STATED = """
    align.AlignTextSelfAttention altclip.AltRobertaSelfAttention bert.BertCrossAttention bert.BertSelfAttention
    bert_generation.BertGenerationCrossAttention bert_generation.BertGenerationSelfAttention
    blip_2.Blip2QFormerMultiHeadAttention bridgetower.BridgeTowerCrossAttention bridgetower.BridgeTowerSelfAttention
    camembert.CamembertCrossAttention camembert.CamembertSelfAttention chinese_clip.ChineseCLIPTextSelfAttention
    clap.ClapTextSelfAttention data2vec/data2vec_text.Data2VecTextCrossAttention
    data2vec/data2vec_text.Data2VecTextSelfAttention dpt.DPTSelfAttention electra.ElectraCrossAttention
    electra.ElectraSelfAttention ernie.ErnieCrossAttention ernie.ErnieSelfAttention
    instructblip.InstructBlipQFormerMultiHeadAttention instructblipvideo.InstructBlipVideoQFormerMultiHeadAttention
    layoutlm.LayoutLMSelfAttention markuplm.MarkupLMSelfAttention mobilebert.MobileBertSelfAttention
    roberta.RobertaCrossAttention roberta.RobertaSelfAttention roberta_prelayernorm.RobertaPreLayerNormCrossAttention
    roberta_prelayernorm.RobertaPreLayerNormSelfAttention roc_bert.RoCBertCrossAttention roc_bert.RoCBertSelfAttention
    splinter.SplinterSelfAttention videomae.VideoMAESelfAttention vitpose_backbone.VitPoseBackboneSelfAttention
    xlm_roberta.XLMRobertaCrossAttention xlm_roberta.XLMRobertaSelfAttention xlm_roberta_xl.XLMRobertaXLCrossAttention
    xlm_roberta_xl.XLMRobertaXLSelfAttention xmod.XmodCrossAttention xmod.XmodSelfAttention yolos.YolosSelfAttention
"""
# Encoders that divide by the root of the head width inside forward.
ENCODERS = """
    canine.CanineSelfAttention flava.FlavaSelfAttention glpn.GLPNEfficientSelfAttention
    grounding_dino.GroundingDinoMultiheadAttention mm_grounding_dino.MMGroundingDinoMultiheadAttention
    mobilevit.MobileViTSelfAttention omdet_turbo.OmDetTurboMultiheadAttention pvt.PvtEfficientSelfAttention
    pvt_v2.PvtV2SelfAttention tvp.TvpAttention vilt.ViltSelfAttention visual_bert.VisualBertSelfAttention
    zoedepth.ZoeDepthMultiheadAttention
"""
# The same, and causal if the config makes a decoder of them.
DECODER_FLAG = """
    big_bird.BigBirdSelfAttention bigbird_pegasus.BigBirdPegasusSelfAttention
    megatron_bert.MegatronBertSelfAttention rembert.RemBertSelfAttention tapas.TapasSelfAttention
"""
SWIN_LIKE = """
    clap.ClapAudioSelfAttention donut/donut_swin.DonutSwinSelfAttention
    maskformer/maskformer_swin.MaskFormerSwinSelfAttention
"""
COSINE = """
    swin2sr.Swin2SRSelfAttention swinv2.Swinv2SelfAttention
"""

hf.register(STATED, hf.separate)
hf.register(ENCODERS, partial(hf.separate, scale=hf.inverse_root, causal=False))
hf.register(DECODER_FLAG, partial(hf.separate, scale=hf.inverse_root, causal=hf.is_decoder_self_attention))
hf.register(SWIN_LIKE, partial(hf.separate, scale=hf.inverse_root, causal=False, relative_position_bias=True))
# Cosine attention: normalised q and k, a learned scale, and a bias computed from relative coordinates.
hf.register(COSINE, partial(hf.separate, scale=None, causal=False, qk_norm="l2", relative_position_bias=True))


@register_adapter(*hf.hf("esm.EsmSelfAttention evolla.EvollaSaProtSelfAttention"))
def esm(place: Place) -> AttentionSite:
    """ESM scales its queries before the rotation and states a scaling of one for the rest."""
    rotary = getattr(place.module, "position_embedding_type", None) == "rotary"
    return hf.separate(place, scale=hf.inverse_root, rotary=rotary)


@register_adapter(*hf.hf("roformer.RoFormerSelfAttention"))
def roformer(place: Place) -> AttentionSite:
    """RoFormer; its option of rotating the values too is refused."""
    if getattr(place.module, "rotary_value", False):
        raise hf.refusal(place, "it rotates its values too (rotary_value=True).")
    causal = hf.is_decoder_self_attention
    return hf.separate(place, scale=hf.inverse_root, causal=causal, rotary=not hf.is_cross(place))


@register_adapter(*hf.hf("git.GitSelfAttention"))
def git_text(place: Place) -> AttentionSite:
    """GIT: text is causal after an image prefix that sees itself wholly."""
    return hf.separate(place, scale=hf.inverse_root, causal=None)


@register_adapter(*hf.hf("blip/blip_text.BlipTextSelfAttention"))
def blip_text(place: Place) -> AttentionSite:
    """An argument of the model's forward decides whether it is causal."""
    return hf.separate(place, scale=hf.inverse_root, causal=False if hf.is_cross(place) else None)


@register_adapter(*hf.hf("lxmert.LxmertAttention"))
def lxmert(place: Place) -> AttentionSite:
    """One class for self and cross attention; the layer around it tells which."""
    cross = "CrossAttention" in type(place.parent).__name__
    return hf.separate(place, scale=hf.inverse_root, causal=False, cross=cross)


@register_adapter(*hf.hf("bros.BrosSelfAttention"))
def bros(place: Place) -> AttentionSite:
    """Embeddings of box distances are multiplied with the queries."""
    facts: dict[str, Any] = {"scale": None, "causal": hf.is_decoder_self_attention, "relative_position_bias": True}
    return hf.separate(place, modifiers=(modifiers.QUERY_POSITION_TERM,), **facts)


@register_adapter(
    *hf.hf("""
    data2vec/data2vec_vision.Data2VecVisionSelfAttention data2vec/data2vec_vision.Data2VecVisionSdpaSelfAttention
    """)
)
def data2vec_vision(place: Place) -> AttentionSite:
    """A relative position bias of its own, or one shared by all layers."""
    own = bool(getattr(place.module, "has_relative_position_bias", False))
    shared = bool(place.config("use_shared_relative_position_bias", False))
    return hf.separate(place, scale=hf.inverse_root, causal=False, relative_position_bias=own or shared)


@register_adapter(*hf.hf("layoutlmv3.LayoutLMv3SelfAttention"))
def layoutlmv3(place: Place) -> AttentionSite:
    """Biases of relative text and box positions."""
    relative = bool(getattr(place.module, "has_relative_attention_bias", False))
    return hf.separate(place, scale=hf.inverse_root, causal=False, relative_position_bias=relative)


@register_adapter(*hf.hf("nystromformer.NystromformerSelfAttention"))
def nystromformer(place: Place) -> AttentionSite:
    """Landmarks are means of scaled queries and keys, and a convolution of the values is added.

    With as many landmarks as tokens and no convolution it is plain softmax attention.
    """
    module: Any = place.module
    convolves = module.conv_kernel_size is not None
    exact = module.num_landmarks == module.seq_len and not convolves
    added = modifiers.those({modifiers.VALUE_CONVOLUTION: convolves})
    kind = "softmax" if exact else "nystrom"
    return hf.separate(place, scale=hf.inverse_root, causal=False, kind=kind, modifiers=added)


@register_adapter(*hf.hf("reformer.LocalSelfAttention"))
def reformer_local(place: Place) -> AttentionSite:
    """Softmax within chunks; the keys are divided by the root of the head width."""
    return hf.separate(place, scale=hf.inverse_root, causal=bool(place.config("is_decoder", False)))


@register_adapter(*hf.hf("luke.LukeSelfAttention"))
def luke(place: Place) -> AttentionSite:
    """LUKE; entity-aware attention has four query weights, which a site cannot hold."""
    if getattr(place.module, "use_entity_aware_attention", False):
        raise hf.refusal(place, "entity-aware attention has four query weights (query, w2e, e2w, e2e).")
    return hf.separate(place, scale=hf.inverse_root, causal=False)
