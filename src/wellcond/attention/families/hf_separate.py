"""Hugging Face attention with ``q_proj``, ``k_proj``, ``v_proj`` (or three Linears under other names).

Each list was read against the classes' forward: heads follow each other in the rows, and what differs from list to list
is rotation, causality and what is added to the logits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from wellcond.attention import layout
from wellcond.attention.families import hf_common as hf
from wellcond.attention.families import modifiers
from wellcond.attention.find import register_adapter
from wellcond.attention.layout import head_rows
from wellcond.attention.site import AttentionSite, Place

ROTARY = """
    apertus.ApertusAttention arcee.ArceeAttention aria.AriaTextAttention bamba.BambaAttention bitnet.BitNetAttention
    blt.BltSelfAttention chameleon.ChameleonAttention cohere.CohereAttention cosmos3_edge.Cosmos3EdgeTextAttention
    csm.CsmAttention cwm.CwmAttention deepseek_ocr2.DeepseekOcr2TextAttention dia.DiaSelfAttention
    dinov3_vit.DINOv3ViTAttention dots1.Dots1Attention emu3.Emu3Attention eomt_dinov3.EomtDinov3Attention
    ernie4_5.Ernie4_5Attention ernie4_5_moe.Ernie4_5_MoeAttention ernie4_5_vl_moe.Ernie4_5_VLMoeTextAttention
    esmc.EsmcAttention esmfold2.EsmFold2AtomAttention eurobert.EuroBertAttention evolla.EvollaAttention
    flex_olmo.FlexOlmoAttention gemma.GemmaAttention gemma2.Gemma2Attention gemma3.Gemma3Attention glm.GlmAttention
    glm4.Glm4Attention glm4_moe.Glm4MoeAttention glm4v.Glm4vTextAttention glm4v_moe.Glm4vMoeTextAttention
    glm_image.GlmImageTextAttention glm_ocr.GlmOcrTextAttention glmasr.GlmAsrAttention gpt_oss.GptOssAttention
    gradium_phonon_tts.GradiumPhononTTSAttention granite.GraniteAttention granite4_vision.Granite4VisionTextAttention
    granitemoe.GraniteMoeAttention granitemoeshared.GraniteMoeSharedAttention gte.GteAttention helium.HeliumAttention
    higgs_audio_v2.HiggsAudioV2Attention hrm_text.HrmTextAttention hunyuan_v1_dense.HunYuanDenseV1Attention
    hunyuan_v1_moe.HunYuanMoEV1Attention hunyuan_vl.HunYuanVLDenseV1Attention hy_v3.HYV3Attention
    hyperclovax.HyperCLOVAXAttention jais2.Jais2Attention jina_embeddings_v3.JinaEmbeddingsV3Attention
    kimi_k25.Kimi_K25VisionAttention laguna.LagunaAttention lasr.LasrEncoderAttention lfm2.Lfm2Attention
    lfm2_moe.Lfm2MoeAttention llama.LlamaAttention llama4.Llama4VisionAttention mellum.MellumAttention
    mimi.MimiAttention mimo_v2_flash.MiMoV2FlashAttention minimax.MiniMaxAttention minimax_m2.MiniMaxM2Attention
    minimax_m3_vl.MiniMaxM3VLVisionAttention ministral.MinistralAttention mistral.MistralAttention
    mixtral.MixtralAttention mlcd.MLCDAttention mllama.MllamaTextSelfAttention
    modernbert_decoder.ModernBertDecoderAttention molmo2.Molmo2Attention muse_glimmer.MuseGlimmerVisionAttention
    muse_spark.MuseSparkVisionAttention nanochat.NanoChatAttention nemotron.NemotronAttention
    nemotron3_5_transcribe.Nemotron3_5TranscribeAttention nemotron3_diarization.Nemotron3DiarizationAttention
    nomic_bert.NomicBertAttention olmo.OlmoAttention olmo2.Olmo2Attention
    olmo3.Olmo3Attention olmoe.OlmoeAttention paddleocr_vl.PaddleOCRAttention paddleocr_vl.PaddleOCRVisionAttention
    pe_audio.PeAudioEncoderAttention pe_audio_video.PeAudioVideoEncoderAttention pe_video.PeVideoEncoderAttention
    phi.PhiAttention phimoe.PhimoeAttention pixtral.PixtralAttention pocket_tts.PocketTTSAttention
    pocket_tts_audio_tokenizer.PocketTTSAudioTokenizerAttention qwen2.Qwen2Attention qwen2_5_omni.Qwen2_5OmniAttention
    qwen2_5_omni.Qwen2_5OmniVisionAttention qwen2_5_vl.Qwen2_5_VLAttention qwen2_moe.Qwen2MoeAttention
    qwen2_vl.Qwen2VLAttention qwen3.Qwen3Attention qwen3_moe.Qwen3MoeAttention
    qwen3_omni_moe.Qwen3OmniMoeCode2WavAttention qwen3_omni_moe.Qwen3OmniMoeTalkerCodePredictorAttention
    qwen3_omni_moe.Qwen3OmniMoeThinkerTextAttention qwen3_vl.Qwen3VLTextAttention qwen3_vl_moe.Qwen3VLMoeTextAttention
    recurrent_gemma.RecurrentGemmaAttention sam3.Sam3ViTRoPEAttention sapiens2.Sapiens2Attention
    seed_oss.SeedOssAttention solar_open.SolarOpenAttention stablelm.StableLmAttention starcoder2.Starcoder2Attention
    step3p7.Step3p7Attention step3p7.Step3p7VisionAttention t5gemma.T5GemmaSelfAttention
    t5gemma2.T5Gemma2SelfAttention ultrabert.UltrabertAttention unlimited_ocr.UnlimitedOcrTextAttention
    vaultgemma.VaultGemmaAttention video_llama_3.VideoLlama3VisionAttention vjepa2.VJEPA2RopeAttention
    voxtral_realtime.VoxtralRealtimeAttention voxtral_realtime.VoxtralRealtimeTextAttention
"""
PLAIN = """
    albert.AlbertAttention altclip.AltCLIPAttention audio_spectrogram_transformer.ASTAttention
    audioflamingo3.AudioFlamingo3Attention bart.BartAttention
    biogpt.BioGptAttention blenderbot.BlenderbotAttention blenderbot_small.BlenderbotSmallAttention
    canary.CanaryCrossAttention canary.CanarySelfAttention chinese_clip.ChineseCLIPVisionAttention
    cohere_asr.CohereAsrCrossAttention cohere_asr.CohereAsrSelfAttention conditional_detr.ConditionalDetrSelfAttention
    cosmos3_edge.Cosmos3EdgeVisionAttention ctrl.MultiHeadAttention d_fine.DFineSelfAttention
    data2vec/data2vec_audio.Data2VecAudioAttention deformable_detr.DeformableDetrSelfAttention
    deimv2.Deimv2SelfAttention deit.DeiTAttention detr.DetrCrossAttention detr.DetrSelfAttention dia.DiaCrossAttention
    dinov2.Dinov2Attention dinov2_with_registers.Dinov2WithRegistersAttention distilbert.DistilBertSelfAttention
    emu3.Emu3VQVAEAttentionBlock eomt.EomtAttention esmfold2.EsmFold2DiffusionAttention git.GitVisionAttention
    hubert.HubertAttention hunyuan_vl.HunYuanVLVisionAttention idefics2.Idefics2VisionAttention
    idefics3.Idefics3VisionAttention ijepa.IJepaAttention internvl.InternVLVisionAttention
    jamba.JambaAttention janus.JanusVisionAttention kosmos2.Kosmos2VisionAttention kosmos2.KosmosTextAttention
    kosmos2_5.Kosmos2_5TextAttention kosmos2_5.Kosmos2_5VisionAttention lw_detr.LwDetrAttention
    lw_detr.LwDetrViTAttention m2m_100.M2M100Attention marian.MarianAttention mask2former.Mask2FormerAttention
    maskformer.MaskFormerDetrCrossAttention maskformer.MaskFormerDetrSelfAttention mbart.MBartAttention
    minicpm_ocr.MiniCPMOcrVisionAttention minicpmv4_6.MiniCPMV4_6VisionAttention
    minicpmv4_7.MiniCPMV4_7VisionAttention mllama.MllamaTextCrossAttention mllama.MllamaVisionAttention
    moonshine_streaming.MoonshineStreamingEncoderAttention moss_transcribe_diarize.MossTranscribeDiarizeAudioAttention
    musicgen.MusicgenAttention musicgen_melody.MusicgenMelodyAttention nemotron_h.NemotronHAttention
    oneformer.OneFormerAttention oneformer.OneFormerTextMapperAttention opt.OPTAttention
    ovis2.Ovis2VisionAttention patchtsmixer.PatchTSMixerAttention patchtst.PatchTSTAttention pegasus.PegasusAttention
    pegasus_x.PegasusXGlobalLocalAttention pix2struct.Pix2StructVisionAttention
    pixio.PixioAttention plbart.PLBartAttention pp_doclayout_v2.PPDocLayoutV2SelfAttention
    pp_doclayout_v3.PPDocLayoutV3SelfAttention pp_doclayout_v4.PPDocLayoutV4SelfAttention
    pp_formulanet.PPFormulaNetAttention qianfan_ocr.QianfanOCRVisionAttention qwen2_5_omni.Qwen2_5OmniAudioAttention
    qwen2_audio.Qwen2AudioAttention qwen3_asr.Qwen3ASRAudioAttention qwen3_omni_moe.Qwen3OmniMoeAudioAttention
    radio.RadioAttention rf_detr.RfDetrAttention rf_detr.RfDetrDinov2Attention rt_detr.RTDetrSelfAttention
    rt_detr_v2.RTDetrV2SelfAttention seamless_m4t.SeamlessM4TAttention seamless_m4t_v2.SeamlessM4Tv2Attention
    segformer.SegformerAttention sew.SEWAttention siglip.SiglipAttention siglip2.Siglip2Attention
    smolvlm.SmolVLMVisionAttention speech_to_text.Speech2TextAttention t5gemma.T5GemmaCrossAttention
    time_series_transformer.TimeSeriesTransformerAttention tipsv2.Tipsv2VisionAttention unispeech.UniSpeechAttention
    unispeech_sat.UniSpeechSatAttention unlimited_ocr.UnlimitedOcrAttention videomt.VideomtAttention
    videoprism.VideoPrismAttention vit.ViTAttention vit_mae.ViTMAEAttention vit_msn.ViTMSNAttention
    vivit.VivitAttention vjepa2.VJEPA2PoolerCrossAttention vjepa2.VJEPA2PoolerSelfAttention voxtral.VoxtralAttention
    wav2vec2.Wav2Vec2Attention whisper.WhisperAttention x_clip.XCLIPCrossAttention zamba.ZambaAttention
"""
# One class serves both towers; only the text tower is masked causally.
CAUSAL_IN_TEXT = """
    aimv2.Aimv2Attention clip.CLIPAttention clipseg.CLIPSegAttention groupvit.GroupViTAttention
    metaclip_2.MetaClip2Attention owlv2.Owlv2Attention owlvit.OwlViTAttention x_clip.XCLIPAttention
"""
# These know that they belong to a decoder, not whether they are causal.
DECODER_FLAG = """
    bigbird_pegasus.BigBirdPegasusDecoderAttention informer.InformerAttention nllb_moe.NllbMoeAttention
    pegasus_x.PegasusXAttention
    led.LEDDecoderAttention mvp.MvpAttention trocr.TrOCRAttention xglm.XGLMAttention
"""
# Two-way attention of mask decoders.
SEGMENT_ANYTHING = """
    edgetam.EdgeTamAttention edgetam_video.EdgeTamVideoAttention sam.SamAttention sam2.Sam2Attention
    sam2_video.Sam2VideoAttention sam3_tracker.Sam3TrackerAttention sam3_tracker_video.Sam3TrackerVideoAttention
    sam_hq.SamHQAttention
"""
# The class says causal, but its encoder passes a mask of its own.
MASK_DECIDES = """
    phi4_multimodal.Phi4MultimodalAudioAttention phi4_multimodal.Phi4MultimodalVisionAttention
"""

hf.register(ROTARY, partial(hf.separate, rotary=True))
hf.register(PLAIN, hf.separate)
hf.register(CAUSAL_IN_TEXT, partial(hf.separate, causal=hf.in_text_tower))
hf.register(DECODER_FLAG, partial(hf.separate, causal=hf.is_decoder_self_attention))
hf.register(
    SEGMENT_ANYTHING,
    partial(hf.separate, causal=False, cross=lambda place: "self_attn" not in place.name.rpartition(".")[2]),
)
# They rotate by the number of the head, which drops out of the products of q and k.
hf.register("neucodec.NeuCodecAttention xcodec2.Xcodec2Attention", hf.separate)
hf.register(MASK_DECIDES, partial(hf.separate, causal=None))
hf.register("deepseek_ocr2.DeepseekOcr2VisionAttention", partial(hf.separate, causal=None, rotary=True))


def _attribute(name: str) -> hf.Rule:
    return lambda place: bool(getattr(place.module, name))


def _layer_value(name: str) -> hf.Rule:
    """Whether a per-layer list of the config is truthy at this module's layer."""
    return lambda place: bool(place.config(name)[place.module.layer_idx])


def _slides(place: Place) -> bool:
    return place.module.sliding_window is not None


ROTARY_WHERE: dict[str, hf.Rule] = {
    "cohere2.Cohere2Attention flint.FlintAttention": _slides,
    "cohere2_moe.Cohere2MoeAttention": lambda place: _slides(place) or bool(place.module.force_rope),
    """
    exaone4.Exaone4Attention exaone4_5.Exaone4_5_Attention exaone_moe.ExaoneMoeAttention kolibri1.Kolibri1Attention
    """: lambda place: not _slides(place) or bool(place.module.is_sliding),
    "afmoe.AfmoeAttention": _attribute("is_local_attention"),
    "smollm3.SmolLM3Attention": _attribute("use_rope"),
    "granitemoehybrid.GraniteMoeHybridAttention": lambda place: place.config("position_embedding_type") == "rope",
    "moonshine.MoonshineAttention": lambda place: not hf.is_cross(place),
    "moonshine_streaming.MoonshineStreamingAttention": lambda place: not hf.is_cross(place),
}
for _names, _rule in ROTARY_WHERE.items():
    hf.register(_names, partial(hf.separate, rotary=_rule))


@register_adapter(*hf.hf("llama4.Llama4TextAttention"))
def llama4_text(place: Place) -> AttentionSite:
    """Layers without rotation scale their queries by position, so they have no one scale."""
    module: Any = place.module
    tuned = bool(module.attn_temperature_tuning and not module.use_rope)
    added = modifiers.those({modifiers.POSITION_DEPENDENT_SCALE: tuned})
    return hf.separate(place, rotary=bool(module.use_rope), scale=None if tuned else hf.scale_of, modifiers=added)


@register_adapter(*hf.hf("ministral3.Ministral3Attention"))
def ministral3(place: Place) -> AttentionSite:
    """Queries are multiplied by a factor that grows with the position if `llama_4_scaling_beta` is set."""
    beta = (place.config("rope_parameters") or {}).get("llama_4_scaling_beta")
    added = modifiers.those({modifiers.POSITION_DEPENDENT_SCALE: bool(beta)})
    return hf.separate(place, rotary=True, scale=None if beta else hf.scale_of, modifiers=added)


@register_adapter(*hf.hf("muse_glimmer.MuseGlimmerTextAttention muse_spark.MuseSparkTextAttention"))
def muse(place: Place) -> AttentionSite:
    """Normalised queries are multiplied by a fixed number; layers without a base frequency are not rotated."""
    module: Any = place.module
    scale = module.scaling * float(module.qk_scale_factor)
    return hf.separate(place, rotary=_layer_value("layer_rope_theta"), scale=scale)


@register_adapter(*hf.hf("falcon_h1.FalconH1Attention"))
def falcon_h1(place: Place) -> AttentionSite:
    """Keys are multiplied by a fixed number."""
    return hf.separate(place, rotary=True, scale=lambda p: p.module.scaling * p.module.key_multiplier)


@register_adapter(*hf.hf("openai_privacy_filter.OpenAIPrivacyFilterAttention"))
def openai_privacy_filter(place: Place) -> AttentionSite:
    """Queries and keys are each multiplied by `scaling`."""
    return hf.separate(place, rotary=True, scale=lambda p: p.module.scaling**2)


@register_adapter(*hf.hf("gpt_neo.GPTNeoSelfAttention"))
def gpt_neo(place: Place) -> AttentionSite:
    """GPT-Neo does not scale its logits; local layers have a window besides the causal mask."""
    return hf.separate(place, scale=1.0)


@register_adapter(*hf.hf("gptj.GPTJAttention"))
def gptj(place: Place) -> AttentionSite:
    """GPT-J: `scale_attn` divides the logits."""
    return hf.separate(place, rotary=True, scale=hf.inverse_root)


@register_adapter(*hf.hf("swin.SwinAttention"))
def swin(place: Place) -> AttentionSite:
    """Windows with a table of relative position biases."""
    return hf.separate(place, relative_position_bias=True)


@register_adapter(*hf.hf("beit.BeitAttention"))
def beit(place: Place) -> AttentionSite:
    """The layer around it has a relative position bias, or the encoder shares one with all layers."""
    own = getattr(place.parent, "relative_position_bias", None) is not None
    shared = bool(place.config("use_shared_relative_position_bias", False))
    return hf.separate(place, relative_position_bias=own or shared)


@register_adapter(*hf.hf("wavlm.WavLMAttention"))
def wavlm(place: Place) -> AttentionSite:
    """The gate on its relative position bias reads the tokens, not the queries."""
    return hf.separate(place, causal=False, relative_position_bias=True)


@register_adapter(
    *hf.hf("""
    fastspeech2_conformer.FastSpeech2ConformerAttention seamless_m4t.SeamlessM4TConformerSelfAttention
    seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention wav2vec2_bert.Wav2Vec2BertSelfAttention
    wav2vec2_conformer.Wav2Vec2ConformerSelfAttention
""")
)
def conformer(place: Place) -> AttentionSite:
    """Relative positions are multiplied with the queries; its rotary variant rotates tokens, not queries and keys."""
    kind = getattr(place.module, "position_embeddings_type", "relative")
    relative = kind in ("relative", "relative_key")
    scale = None if relative else hf.inverse_root
    added = modifiers.those({modifiers.QUERY_POSITION_TERM: relative})
    return hf.separate(place, causal=False, scale=scale, relative_position_bias=relative, modifiers=added)


@register_adapter(*hf.hf("parakeet.ParakeetEncoderAttention"))
def parakeet(place: Place) -> AttentionSite:
    """Relative positions are multiplied with the queries."""
    added = (modifiers.QUERY_POSITION_TERM,)
    return hf.separate(place, scale=None, relative_position_bias=True, modifiers=added)


@register_adapter(*hf.hf("speecht5.SpeechT5Attention"))
def speecht5(place: Place) -> AttentionSite:
    """The encoder multiplies relative positions with the queries; the decoder has none."""
    in_encoder = not getattr(place.module, "is_decoder", False)
    scale = None if in_encoder else hf.scale_of
    causal = hf.is_decoder_self_attention
    added = modifiers.those({modifiers.QUERY_POSITION_TERM: in_encoder})
    return hf.separate(place, causal=causal, scale=scale, relative_position_bias=in_encoder, modifiers=added)


@register_adapter(*hf.hf("mpnet.MPNetSelfAttention"))
def mpnet(place: Place) -> AttentionSite:
    """One table of relative position biases, shared by all layers."""
    return hf.separate(place, scale=hf.inverse_root, causal=False, relative_position_bias=True)


@register_adapter(*hf.hf("xlm.MultiHeadAttention flaubert.MultiHeadAttention"))
def xlm(place: Place) -> AttentionSite:
    """Causal only if the config asks for it."""
    causal = bool(place.config("causal", False)) and "encoder_attn" not in place.name
    return hf.separate(place, scale=hf.inverse_root, causal=causal)


@register_adapter(
    *hf.hf("""
    qwen3_5.Qwen3_5Attention qwen3_5_moe.Qwen3_5MoeAttention qwen3_next.Qwen3NextAttention
    qwen4_exp.Qwen4ExpTextAttention
""")
)
def gated_query(place: Place) -> AttentionSite:
    """``q_proj`` has, for each head, the query's rows and then the rows of a sigmoid gate on the output."""
    module: Any = place.module
    head_dim = module.head_dim
    num_heads = layout.out_features(module.q_proj) // (2 * head_dim)
    num_kv_heads = layout.out_features(module.k_proj) // head_dim
    layout.check_rows(place, "query and gate", layout.out_features(module.q_proj), [num_heads], [2 * head_dim])
    return AttentionSite(
        name=place.name,
        module=module,
        q=layout.projection_slot(module.q_proj, head_rows(num_heads, head_dim, stride=2 * head_dim)),
        k=layout.projection_slot(module.k_proj, head_rows(num_kv_heads, head_dim)),
        v=layout.projection_slot(module.v_proj, head_rows(num_kv_heads, head_dim)),
        o=layout.output_slot(place, module.o_proj, num_heads, head_dim),
        **hf.facts_of(place, {"rotary": True, "modifiers": (modifiers.GATED_OUTPUT,)}, head_dim),
    )
