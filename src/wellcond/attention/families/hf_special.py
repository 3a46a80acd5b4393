"""Hugging Face classes with three plain projections and something of their own around them."""

from __future__ import annotations

from functools import partial
from typing import Any

from wellcond.attention import layout
from wellcond.attention.families import hf_common as hf
from wellcond.attention.families import hf_modifiers, modifiers
from wellcond.attention.find import register_adapter
from wellcond.attention.site import AttentionSite, Place

# Detectors: position embeddings are added to the tokens that queries and keys read.
DETECTORS = "dab_detr.DetrAttention table_transformer.TableTransformerAttention"
# Memory attention of video models; the memory is another sequence.
ROTARY_MEMORY = """
    edgetam_video.EdgeTamVideoRoPECrossAttention edgetam_video.EdgeTamVideoRoPESelfAttention
    sam2_video.Sam2VideoRoPEAttention sam3_tracker_video.Sam3TrackerVideoRoPEAttention
"""
BLOCK_SPARSE = """
    big_bird.BigBirdBlockSparseAttention bigbird_pegasus.BigBirdPegasusBlockSparseAttention
"""
# Relative positions are multiplied with the queries.
RELATIVE_KEYS = """
    granite_speech5.GraniteSpeech5EncoderAttention nemotron_asr_streaming.NemotronAsrStreamingEncoderAttention
"""


def _leaf(place: Place) -> str:
    return place.name.rpartition(".")[2]


def _is_not_self(place: Place) -> bool:
    return "self_attn" not in _leaf(place)


def _layer_index(place: Place) -> int:
    return int(next(part for part in place.name.split(".") if part.isdigit()))


hf.register(DETECTORS, partial(hf.separate, causal=False))
hf.register(ROTARY_MEMORY, partial(hf.separate, causal=False, cross=_is_not_self, rotary=True))
hf.register(BLOCK_SPARSE, partial(hf.separate, causal=False, scale=hf.inverse_root))
hf.register(
    RELATIVE_KEYS,
    partial(
        hf.separate,
        causal=False,
        scale=None,
        relative_position_bias=True,
        modifiers=(modifiers.QUERY_POSITION_TERM,),
    ),
)
# A selection of blocks or a longer key sequence changes nothing about the projections.
hf.register(
    "minimax_m3_vl.MiniMaxM3VLAttention muse_glimmer_assistant.MuseGlimmerAssistantAttention",
    partial(hf.separate, rotary=True),
)
# Text encoders that see the whole sentence.
hf.register("tipsv2.Tipsv2TextAttention", partial(hf.separate, causal=False))
# Its query norm acts on the tokens, before the projections.
hf.register("blt.BltCrossAttention", partial(hf.separate, cross=True, qk_norm=None))
# Keys and values also come from the image.
hf.register("idefics2.Idefics2PerceiverAttention", partial(hf.separate, cross=True))
hf.register("molmo2.Molmo2VisionAttention", partial(hf.separate, cross=lambda place: "pooling" in place.name))
hf.register("sam3_lite_text.Sam3LiteTextTextAttention", partial(hf.separate, causal=None))
register_adapter("transformers.models.idefics.vision.IdeficsVisionAttention")(hf.separate)


@register_adapter(*hf.hf("sam3.Sam3Attention sam3_lite_text.Sam3LiteTextAttention"))
def sam3(place: Place) -> AttentionSite:
    """The decoder's attention to the image adds biases from the boxes of its queries."""
    relative = _leaf(place) == "vision_cross_attn"
    return hf.separate(place, causal=False, cross=_is_not_self, relative_position_bias=relative)


@register_adapter(*hf.hf("prophetnet.ProphetNetAttention"))
def prophetnet(place: Place) -> AttentionSite:
    """Encoder self attention and the decoder's cross attention."""
    return hf.separate(place, causal=False, scale=hf.inverse_root)


@register_adapter(*hf.hf("idefics.IdeficsAttention"))
def idefics(place: Place) -> AttentionSite:
    """Gated cross attention to images is not rotated."""
    return hf.separate(place, rotary=not hf.is_cross(place))


@register_adapter(*hf.hf("granite_swa.GraniteSWAAttention granitemoe_swa.GraniteMoeSWAAttention"))
def granite_sliding(place: Place) -> AttentionSite:
    """Layers without a base frequency are not rotated."""
    theta = place.config("layer_rope_theta")[place.module.layer_idx]
    return hf.separate(place, rotary=bool(theta))


@register_adapter(*hf.hf("cohere_compass.CohereCompassAttention beam.BeamAttention"))
def rotary_by_layer_type(place: Place) -> AttentionSite:
    """Layer types without rope parameters are not rotated; Beam then scales its queries by position."""
    layer_type = place.config("layer_types")[place.module.layer_idx]
    rotary = place.config("rope_parameters")[layer_type] is not None
    by_position = place.class_name == "BeamAttention" and not rotary
    added = modifiers.those({modifiers.POSITION_DEPENDENT_SCALE: by_position})
    return hf.separate(place, rotary=rotary, scale=None if by_position else hf.scale_of, modifiers=added)


@register_adapter(*hf.hf("olmo_hybrid.OlmoHybridAttention"))
def olmo_hybrid(place: Place) -> AttentionSite:
    """Rotated if the model has a rotary embedding at all."""
    return hf.separate(place, rotary=any(getattr(a, "rotary_emb", None) is not None for a in place.ancestors()))


@register_adapter(*hf.hf("zamba2.Zamba2Attention"))
def zamba2(place: Place) -> AttentionSite:
    """Shared blocks; low-rank additions for each use are refused."""
    if place.config("use_shared_attention_adapter", False):
        raise hf.refusal(place, "each use of this shared block adds low-rank weights of its own.")
    return hf.separate(place, rotary=bool(place.config("use_mem_rope", False)))


@register_adapter(*hf.hf("efficientloftr.EfficientLoFTRAttention lightglue.LightGlueAttention"))
def matcher(place: Place) -> AttentionSite:
    """Keypoint matchers rotate within an image and not between images; the caller's mask decides what is seen."""
    cross = "cross_attention" in place.name
    causal = None if place.class_name == "LightGlueAttention" else False
    return hf.separate(place, cross=cross, rotary=not cross, causal=causal)


@register_adapter(*hf.hf("superglue.SuperGlueSelfAttention"))
def superglue(place: Place) -> AttentionSite:
    """Layers alternate between one image and the other."""
    cross = place.config("gnn_layers_types")[_layer_index(place)] == "cross"
    return hf.separate(place, causal=False, cross=cross, scale=hf.inverse_root)


@register_adapter(*hf.hf("clvp.ClvpSelfAttention"))
def clvp(place: Place) -> AttentionSite:
    """The encoders rotate their values too, which is refused; the decoder rotates nothing."""
    in_encoder = any(type(ancestor).__name__ == "ClvpEncoder" for ancestor in place.ancestors())
    if in_encoder and place.config("use_rotary_embedding", False):
        raise hf.refusal(place, "it rotates its values too.")
    return hf.separate(place, causal="decoder" in place.name)


@register_adapter(*hf.hf("qwen2_5_omni.DiTAttention"))
def qwen_dit(place: Place) -> AttentionSite:
    """Only the first head is rotated."""
    return hf.separate(place, scale=hf.inverse_root, rotary=True)


@register_adapter(*hf.hf("cpmant.CpmAntAttention"))
def cpmant(place: Place) -> AttentionSite:
    """A prefix that sees itself, causal text after it, and a table of relative position biases."""
    return hf.separate(place, scale=hf.inverse_root, causal=None, relative_position_bias=True)


@register_adapter(*hf.hf("fsmt.Attention"))
def fsmt(place: Place) -> AttentionSite:
    """Causal in the decoder; `encoder_decoder_attention` marks cross attention."""
    cross = bool(place.module.encoder_decoder_attention)
    return hf.separate(place, cross=cross, causal="decoder" in place.name.split(".") and not cross)


@register_adapter(*hf.hf("pp_doclayout_v2.PPDocLayoutV2ReadingOrderSelfAttention"))
def reading_order(place: Place) -> AttentionSite:
    """Biases of relative box positions."""
    return hf.separate(place, scale=hf.inverse_root, causal=False, relative_position_bias=True)


@register_adapter(*hf.hf("perceiver.PerceiverSelfAttention"))
def perceiver(place: Place) -> AttentionSite:
    """Queries and keys have one width per head, values another."""
    module: Any = place.module
    value_width = module.num_heads * module.v_channels_per_head
    return layout.separate_site(
        place,
        module.query,
        module.key,
        module.value,
        num_heads=module.num_heads,
        head_dim=module.qk_channels_per_head,
        output=hf.output_of(place, value_width),
        family=place.class_name,
        scale=module.qk_channels_per_head**-0.5,
        cross="cross_attention" in place.name,
    )


@register_adapter(*hf.hf("moshi.MoshiAttention kyutai_speech_to_text.KyutaiSpeechToTextAttention"))
def moshi(place: Place) -> AttentionSite:
    """Projections are wrapped; the depth decoder has one weight per codebook, which a slot cannot hold."""
    module: Any = place.module
    wrapped: list[Any] = [getattr(getattr(module, f"{name}_proj"), "linear", None) for name in "qkvo"]
    if not all(layout.is_projection(part) for part in wrapped):
        raise hf.refusal(place, "its projections have one weight per codebook.")
    q, k, v, o = wrapped
    return layout.separate_site(
        place,
        q,
        k,
        v,
        num_heads=layout.out_features(q) // module.head_dim,
        num_kv_heads=layout.out_features(k) // module.head_dim,
        head_dim=module.head_dim,
        output=o,
        family=place.class_name,
        scale=float(module.scaling),
        causal=True,
        rotary=module.rotary_emb is not None,
    )


@register_adapter(*hf.hf("chameleon.ChameleonVQVAEEncoderAttnBlock janus.JanusVQVAEAttnBlock"))
def image_tokenizer(place: Place) -> AttentionSite:
    """One head over all channels, with 1x1 convolutions as projections."""
    module: Any = place.module
    shared = {"num_heads": 1, "family": place.class_name, "scale": layout.out_features(module.q) ** -0.5}
    return layout.separate_site(place, module.q, module.k, module.v, output=module.proj_out, **shared)


@register_adapter(
    *hf.hf("granite_speech.GraniteSpeechConformerAttention granite_speech_plus.GraniteSpeechPlusConformerAttention")
)
def granite_speech(place: Place) -> AttentionSite:
    """Keys and values in one weight; relative positions are multiplied with the queries."""
    module: Any = place.module
    return layout.query_and_kv_site(
        place,
        module.to_q,
        module.to_kv,
        num_heads=module.num_heads,
        output=module.to_out,
        family=place.class_name,
        scale=None,
        relative_position_bias=True,
        modifiers=modifiers.union(hf_modifiers.stated(place), (modifiers.QUERY_POSITION_TERM,)),
    )
