"""Attention of Hugging Face transformers.

Each row was read against the classes' forward. Sizes, scale, causality and norms are as a rule what a module states
about itself; the columns of a row say what it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from wellcond.attention import layout, names
from wellcond.attention.families import Adapter, refused, table
from wellcond.attention.families.table import (
    ROOT,
    Rule,
    around,
    attribute,
    by_class,
    has,
    holds,
    negated,
    setting,
    storage_of,
    value_of,
    with_facts,
)
from wellcond.attention.site import AttentionSite, ModuleContext


def dotted(word: str) -> str:
    """Dotted class name from a word such as ``llama.LlamaAttention``.

    A word is the folder under transformers.models (``folder/file`` where the file is not named after it) and the class.

    Example:
        >>> dotted("llama.LlamaAttention")
        'transformers.models.llama.modeling_llama.LlamaAttention'
    """
    where, _, cls = word.rpartition(".")
    folder, _, file = where.partition("/")
    return f"transformers.models.{folder}.modeling_{file or folder}.{cls}"


# What a module states about itself


def stated(module: nn.Module, wanted: Sequence[str]) -> Any:
    """The first of these attributes that the module has and that is not None."""
    return next((value for value in (getattr(module, name, None) for name in wanted) if value is not None), None)


def stated_scale(place: ModuleContext) -> Any:
    """Logit scale as the module states it; where it does not, forward divides by the root of the head width."""
    scale = stated(place.module, names.SCALE)
    if scale is None:
        return ROOT
    return float(scale) if isinstance(scale, (int, float)) and not isinstance(scale, bool) else None


def is_cross(place: ModuleContext) -> bool:
    """Whether the module, the part of its layer that it stands in, or its layer is named as cross attention."""
    if getattr(place.module, "is_cross_attention", None) is True:
        return True
    named = any(part in names.CROSS for part in place.name.split("."))
    return named or "CrossAttention" in place.class_name or "CrossAttention" in type(place.parent).__name__


def in_decoder(place: ModuleContext) -> bool:
    """Causality of modules that belong to a decoder, other than cross attention."""
    return has("is_decoder")(place) and not is_cross(place)


def is_causal(place: ModuleContext) -> bool:
    """Causality as the module states it, else by whether it belongs to a decoder; never of cross attention."""
    stated = getattr(place.module, "is_causal", None)
    return in_decoder(place) if stated is None else bool(stated) and not is_cross(place)


def qk_norm(place: ModuleContext) -> str | None:
    """Normaliser of queries and keys by the class of the module's own norm."""
    norm = stated(place.module, names.QK_NORM)
    if not isinstance(norm, nn.Module) or isinstance(norm, nn.Identity):
        return None
    name = type(norm).__name__.lower()
    # transformers' "L2Norm" divides by the root mean square.
    if "rms" in name or "l2norm" in name:
        return "rms"
    return "layer" if "layernorm" in name else "other"


def holds_module(*wanted: str) -> Rule:
    """Whether one of these attributes is a module."""
    return lambda place: any(isinstance(getattr(place.module, name, None), nn.Module) for name in wanted)


STATED_MODIFIERS: dict[str, Rule] = {
    table.ATTENTION_SINKS: holds("sinks"),
    table.SELECTED_KEYS: lambda place: getattr(place.module, "num_random_blocks", 0) > 0 or holds("indexer")(place),
    table.LOGIT_SOFTCAP: holds("attn_logit_softcapping"),
    table.CLIPPED_QKV: lambda place: getattr(place.module, "clip_qkv", None) or place.config("clip_qkv"),
    table.SCALED_VALUES: lambda place: getattr(place.module, "v_scale", 1.0) != 1.0,
    table.OUTPUT_NORM: holds_module("attn_sub_norm", "inner_attn_ln", "o_norm"),
    table.GATED_OUTPUT: holds_module("gate_proj", "g_proj"),
}
STATED: dict[str, Any] = {"scale": stated_scale, "causal": is_causal, "cross": is_cross, "qk_norm": qk_norm}
# With these, logits are not one fixed multiple of the products of q and k plus terms that do not depend on q and k.
WITHOUT_SCALE = {
    table.LOGIT_SOFTCAP,
    table.CLIPPED_QKV,
    table.QUERY_POSITION_TERM,
    table.POSITION_DEPENDENT_SCALE,
    table.POOLED_QUERIES,
}


def rotation_factor(place: ModuleContext, head_dim: int) -> float | None:
    """What the rotary embedding multiplies queries and keys with (YaRN, LongRoPE); None where it is not one number."""
    for holder in (place.module, *place.ancestors()):
        rotary = getattr(holder, "rotary_emb", None)
        if not isinstance(rotary, nn.Module):
            continue
        factors = {value for name, value in vars(rotary).items() if name.endswith("attention_scaling")}
        if factors <= {1.0, None}:
            return 1.0
        rotated = {2 * buffer.numel() for name, buffer in rotary.named_buffers() if name.endswith("inv_freq")}
        # Channels that are not rotated keep their size.
        return float(factors.pop()) if len(factors) == 1 and rotated == {head_dim} else None
    return 1.0


# How a module is described


def attention(**columns: Any) -> Adapter:
    """How a class is described: its projections are found under the usual names, and what it states is taken."""
    table.checked(columns)

    def describe(place: ModuleContext) -> AttentionSite:
        table.check_refusal(place, columns)
        parts = projections_of(place)
        site = table.build(place, parts, columns, **sizes_of(place, parts, columns))
        output = output_of(place, site.num_heads * site.v.head_dim)
        site = replace(site, o=layout.output_slot(place, output, site.num_heads, site.v.head_dim))
        return with_stated_facts(place, site, columns)

    return describe


def with_stated_facts(place: ModuleContext, site: AttentionSite, columns: dict[str, Any]) -> AttentionSite:
    """The site with what the module states about itself and, over that, what the columns say.

    The scale includes the rotation's own factor.
    """
    modifiers = STATED_MODIFIERS | columns.get("modifiers", {})
    holding = {word: bool(value_of(rule, place)) for word, rule in modifiers.items()}
    facts = STATED | {"relative_position_bias": holding.get(table.QUERY_POSITION_TERM, False)} | columns
    facts["modifiers"] = holding
    if any(holding.get(word) for word in WITHOUT_SCALE):
        facts["scale"] = None
    site = with_facts(place, site, facts)
    if site.rotary and site.scale is not None:
        factor = rotation_factor(place, site.head_dim)
        return replace(site, scale=None if factor is None else site.scale * factor**2)
    return site


def projections_of(place: ModuleContext) -> list[nn.Module]:
    """Projections under their usual names; Moshi wraps each of them."""
    for wanted in names.PROJECTIONS:
        parts = [_unwrapped(getattr(place.module, name, None)) for name in wanted]
        if all(layout.is_projection(part) for part in parts):
            return parts
    place.refuse("its projections of queries, keys and values are not plain linear maps under usual names.")


def _unwrapped(part: Any) -> Any:
    return part if layout.is_projection(part) else getattr(part, "linear", part)


def sizes_of(place: ModuleContext, parts: list[nn.Module], columns: dict[str, Any]) -> dict[str, Any]:
    """Counts and widths: of three projections by their rows, else as declared."""
    if len(parts) < 3:
        declared = {"num_heads": head_count, "num_kv_heads": lambda place: stated(place.module, names.KV_HEADS)}
        return storage_of(place, declared | columns)
    rows, kv_rows, _ = (layout.out_features(part) for part in parts)
    head_dim = storage_of(place, columns).get("head_dim") or stated(place.module, names.HEAD_DIM)
    head_dim = int(head_dim or layout.divide_heads(place, "query", rows, head_count(place)))
    return {"num_heads": rows // head_dim, "num_kv_heads": kv_rows // head_dim, "head_dim": head_dim}


def head_count(place: ModuleContext) -> int:
    """Number of query heads that the module, or a config around it, declares."""
    count = place.first_int(names.HEADS)
    if count is None:
        place.refuse("it declares neither a number of heads nor a head width.")
    return count


def output_of(place: ModuleContext, width: int) -> nn.Module | None:
    """W_O: a child of the module, or the `dense` of the `output` beside it (BERT), if its columns are the heads."""
    candidates: list[Any] = [getattr(place.module, name, None) for name in names.OUTPUT]
    candidates += [getattr(getattr(place.parent, "output", None), "dense", None), getattr(place.parent, "o_proj", None)]
    for candidate in candidates:
        if isinstance(candidate, (nn.Sequential, nn.ModuleList)) and len(candidate):
            candidate = candidate[0]
        candidate = _unwrapped(candidate)
        if layout.is_projection(candidate):
            columns = candidate.weight.shape[0 if layout.is_conv1d(candidate) else 1]
            return candidate if columns == width else None
    return None


def gated_query(place: ModuleContext) -> AttentionSite:
    """``q_proj`` has, for each head, the query's rows and then the rows of a sigmoid gate on the output."""
    module: Any = place.module
    width = module.head_dim
    heads, kv_heads = layout.out_features(module.q_proj) // (2 * width), layout.out_features(module.k_proj) // width
    site = AttentionSite(
        name=place.name,
        module=module,
        q=layout.projection_slot(module.q_proj, layout.head_rows(heads, width, stride=2 * width)),
        k=layout.projection_slot(module.k_proj, layout.head_rows(kv_heads, width)),
        v=layout.projection_slot(module.v_proj, layout.head_rows(kv_heads, width)),
        o=layout.output_slot(place, module.o_proj, heads, width),
    )
    return with_stated_facts(place, site, {"rotary": True, "modifiers": {table.GATED_OUTPUT: True}})


# Rules of single columns


def in_text_tower(place: ModuleContext) -> bool:
    """Causality of CLIP-like classes: one class for both towers, and only the text tower gets a causal mask."""
    for ancestor in place.ancestors():
        name = type(ancestor).__name__
        # The nearest class that names one of the two; VisionTextDualEncoder names both and decides nothing.
        if ("Text" in name) != ("Vision" in name):
            return "Text" in name
    return False


def named(part: str) -> Rule:
    """Whether the module's name contains this."""
    return lambda place: part in place.name


def is_not_self(place: ModuleContext) -> bool:
    """Whether the module is called otherwise than self-attention."""
    return "self_attn" not in place.name.rpartition(".")[2]


def layer_value(name: str) -> Rule:
    """Whether a per-layer list of the config is true at this module's layer."""
    return lambda place: bool(place.config(name)[place.module.layer_idx])


def layer_type_rotates(place: ModuleContext) -> bool:
    """Layer types without rope parameters are not rotated."""
    layer_type = place.config("layer_types")[place.module.layer_idx]
    return place.config("rope_parameters")[layer_type] is not None


def beit_bias(place: ModuleContext) -> bool:
    """The module or its layer has a relative position bias, or the encoder shares one with all layers."""
    own = getattr(place.module, "has_relative_position_bias", False)
    of_layer = getattr(place.parent, "relative_position_bias", None) is not None
    return bool(own or of_layer or place.config("use_shared_relative_position_bias", False))


def in_other_image(place: ModuleContext) -> bool:
    """SuperGlue's layers alternate between one image and the other."""
    number = int(next(part for part in place.name.split(".") if part.isdigit()))
    return place.config("gnn_layers_types")[number] == "cross"


def in_rotating_encoder(place: ModuleContext) -> bool:
    """CLVP's encoders rotate their values too; its decoder rotates nothing."""
    in_encoder = any(type(ancestor).__name__ == "ClvpEncoder" for ancestor in place.ancestors())
    return in_encoder and bool(place.config("use_rotary_embedding", False))


def falcon_kv_heads(place: ModuleContext) -> int:
    """Falcon: groups of queries with their key and value, one key and value for all, or as many as queries."""
    module: Any = place.module
    if module.new_decoder_architecture:
        return module.num_kv_heads
    return 1 if module.multi_query else module.num_heads


def falcon_arrangement(place: ModuleContext) -> str:
    """Falcon's old multi-query weight has blocks; its others have a key and a value after their queries."""
    module: Any = place.module
    return "blocks" if module.multi_query and not module.new_decoder_architecture else "groups"


def imagegpt_scale(place: ModuleContext) -> float:
    """It is computed inside forward, from two options."""
    module: Any = place.module
    scale = module.head_dim**-0.5 if module.scale_attn_weights else 1.0
    return scale / (module.layer_idx + 1) if module.scale_attn_by_inverse_layer_idx else scale


def nystrom_kind(place: ModuleContext) -> str:
    """With as many landmarks as tokens and no convolution a Nystromformer is plain softmax attention."""
    module: Any = place.module
    is_exact = module.num_landmarks == module.seq_len and module.conv_kernel_size is None
    return "softmax" if is_exact else "nystrom"


POSITION_TERM = {table.QUERY_POSITION_TERM: True}
slides = holds("sliding_window")

# Which rotate their queries and keys, and state the rest. DiT rotates only its first head.
ROTARY = """
    apertus.ApertusAttention arcee.ArceeAttention aria.AriaTextAttention bamba.BambaAttention bitnet.BitNetAttention
    blt.BltSelfAttention chameleon.ChameleonAttention cohere.CohereAttention
    cohere_compass.CohereCompassVisionAttention cosmos3_edge.Cosmos3EdgeTextAttention csm.CsmAttention
    cwm.CwmAttention dbrx.DbrxAttention deepseek_ocr2.DeepseekOcr2TextAttention dia.DiaSelfAttention
    dinov3_vit.DINOv3ViTAttention dots1.Dots1Attention emu3.Emu3Attention eomt_dinov3.EomtDinov3Attention
    ernie4_5.Ernie4_5Attention ernie4_5_moe.Ernie4_5_MoeAttention ernie4_5_vl_moe.Ernie4_5_VLMoeTextAttention
    ernie4_5_vl_moe.Ernie4_5_VLMoeVisionAttention esmc.EsmcAttention esmfold2.EsmFold2AtomAttention
    eurobert.EuroBertAttention evolla.EvollaAttention exaone4_5.Exaone4_5_VisionAttention
    flex_olmo.FlexOlmoAttention gemma.GemmaAttention gemma2.Gemma2Attention glm.GlmAttention glm4.Glm4Attention
    glm4_moe.Glm4MoeAttention glm4v.Glm4vTextAttention glm4v.Glm4vVisionAttention glm4v_moe.Glm4vMoeTextAttention
    glm4v_moe.Glm4vMoeVisionAttention glm5_next.Glm5NextVisionAttention glm_image.GlmImageTextAttention
    glm_ocr.GlmOcrTextAttention glm_ocr.GlmOcrVisionAttention glmasr.GlmAsrAttention gpt_oss.GptOssAttention
    gptj.GPTJAttention gradium_phonon_tts.GradiumPhononTTSAttention granite.GraniteAttention
    granite4_vision.Granite4VisionTextAttention granitemoe.GraniteMoeAttention
    granitemoeshared.GraniteMoeSharedAttention gte.GteAttention helium.HeliumAttention
    higgs_audio_v2.HiggsAudioV2Attention hrm_text.HrmTextAttention hunyuan_v1_dense.HunYuanDenseV1Attention
    hunyuan_v1_moe.HunYuanMoEV1Attention hunyuan_vl.HunYuanVLDenseV1Attention hy_v3.HYV3Attention
    hyperclovax.HyperCLOVAXAttention jais2.Jais2Attention jina_embeddings_v3.JinaEmbeddingsV3Attention
    kimi_k25.Kimi_K25VisionAttention laguna.LagunaAttention lasr.LasrEncoderAttention lfm2.Lfm2Attention
    lfm2_moe.Lfm2MoeAttention llama.LlamaAttention llama4.Llama4VisionAttention mellum.MellumAttention
    mimi.MimiAttention mimo_v2_flash.MiMoV2FlashAttention minimax.MiniMaxAttention minimax_m2.MiniMaxM2Attention
    minimax_m3_vl.MiniMaxM3VLAttention minimax_m3_vl.MiniMaxM3VLVisionAttention ministral.MinistralAttention
    mistral.MistralAttention mixtral.MixtralAttention mlcd.MLCDAttention mllama.MllamaTextSelfAttention
    modernbert.ModernBertAttention modernbert_decoder.ModernBertDecoderAttention molmo2.Molmo2Attention
    muse_glimmer.MuseGlimmerVisionAttention muse_glimmer_assistant.MuseGlimmerAssistantAttention
    muse_spark.MuseSparkVisionAttention nanochat.NanoChatAttention nemotron.NemotronAttention
    nemotron3_5_transcribe.Nemotron3_5TranscribeAttention nemotron3_diarization.Nemotron3DiarizationAttention
    nomic_bert.NomicBertAttention olmo.OlmoAttention olmo2.Olmo2Attention olmo3.Olmo3Attention olmoe.OlmoeAttention
    paddleocr_vl.PaddleOCRAttention paddleocr_vl.PaddleOCRVisionAttention pe_audio.PeAudioEncoderAttention
    pe_audio_video.PeAudioVideoEncoderAttention pe_video.PeVideoEncoderAttention phi.PhiAttention phi3.Phi3Attention
    phi4_multimodal.Phi4MultimodalAttention phimoe.PhimoeAttention pixtral.PixtralAttention
    pocket_tts.PocketTTSAttention pocket_tts_audio_tokenizer.PocketTTSAudioTokenizerAttention qwen2.Qwen2Attention
    qwen2_5_omni.DiTAttention qwen2_5_omni.Qwen2_5OmniAttention qwen2_5_omni.Qwen2_5OmniVisionAttention
    qwen2_5_vl.Qwen2_5_VLAttention qwen2_5_vl.Qwen2_5_VLVisionAttention qwen2_moe.Qwen2MoeAttention
    qwen2_vl.Qwen2VLAttention qwen2_vl.VisionAttention qwen3.Qwen3Attention qwen3_5.Qwen3_5VisionAttention
    qwen3_5_moe.Qwen3_5MoeVisionAttention qwen3_moe.Qwen3MoeAttention qwen3_omni_moe.Qwen3OmniMoeCode2WavAttention
    qwen3_omni_moe.Qwen3OmniMoeTalkerCodePredictorAttention qwen3_omni_moe.Qwen3OmniMoeThinkerTextAttention
    qwen3_omni_moe.Qwen3OmniMoeVisionAttention qwen3_vl.Qwen3VLTextAttention qwen3_vl.Qwen3VLVisionAttention
    qwen3_vl_moe.Qwen3VLMoeTextAttention qwen3_vl_moe.Qwen3VLMoeVisionAttention qwen4_exp.Qwen4ExpVisionAttention
    recurrent_gemma.RecurrentGemmaAttention sam3.Sam3ViTRoPEAttention sapiens2.Sapiens2Attention
    seed_oss.SeedOssAttention solar_open.SolarOpenAttention stablelm.StableLmAttention
    starcoder2.Starcoder2Attention step3p7.Step3p7Attention step3p7.Step3p7VisionAttention
    t5gemma.T5GemmaSelfAttention ultrabert.UltrabertAttention unlimited_ocr.UnlimitedOcrTextAttention
    vaultgemma.VaultGemmaAttention video_llama_3.VideoLlama3VisionAttention vjepa2.VJEPA2RopeAttention
    voxtral_realtime.VoxtralRealtimeAttention voxtral_realtime.VoxtralRealtimeTextAttention
"""
# Which state everything. NeuCodec and Xcodec2 rotate by the number of the head, which drops out of the products.
PLAIN = """
    albert.AlbertAttention align.AlignTextSelfAttention altclip.AltCLIPAttention altclip.AltRobertaSelfAttention
    audio_spectrogram_transformer.ASTAttention audioflamingo3.AudioFlamingo3Attention bark.BarkSelfAttention
    bart.BartAttention bert.BertCrossAttention bert.BertSelfAttention bert_generation.BertGenerationCrossAttention
    bert_generation.BertGenerationSelfAttention big_bird.BigBirdBlockSparseAttention big_bird.BigBirdSelfAttention
    bigbird_pegasus.BigBirdPegasusBlockSparseAttention bigbird_pegasus.BigBirdPegasusSelfAttention
    biogpt.BioGptAttention blenderbot.BlenderbotAttention blenderbot_small.BlenderbotSmallAttention
    blip.BlipAttention blip_2.Blip2Attention blip_2.Blip2QFormerMultiHeadAttention
    bridgetower.BridgeTowerCrossAttention bridgetower.BridgeTowerSelfAttention camembert.CamembertCrossAttention
    camembert.CamembertSelfAttention canary.CanaryCrossAttention canary.CanarySelfAttention
    canine.CanineSelfAttention chinese_clip.ChineseCLIPTextSelfAttention chinese_clip.ChineseCLIPVisionAttention
    clap.ClapTextSelfAttention cohere_asr.CohereAsrCrossAttention cohere_asr.CohereAsrSelfAttention
    conditional_detr.ConditionalDetrSelfAttention cosmos3_edge.Cosmos3EdgeVisionAttention ctrl.MultiHeadAttention
    d_fine.DFineSelfAttention dab_detr.DetrAttention data2vec/data2vec_audio.Data2VecAudioAttention
    data2vec/data2vec_text.Data2VecTextCrossAttention data2vec/data2vec_text.Data2VecTextSelfAttention
    deformable_detr.DeformableDetrSelfAttention deimv2.Deimv2SelfAttention deit.DeiTAttention
    detr.DetrCrossAttention detr.DetrSelfAttention dia.DiaCrossAttention dinov2.Dinov2Attention
    dinov2_with_registers.Dinov2WithRegistersAttention distilbert.DistilBertSelfAttention dpt.DPTSelfAttention
    electra.ElectraCrossAttention electra.ElectraSelfAttention emu3.Emu3VQVAEAttentionBlock eomt.EomtAttention
    ernie.ErnieCrossAttention ernie.ErnieSelfAttention esmfold2.EsmFold2DiffusionAttention flava.FlavaSelfAttention
    florence2.Florence2VisionWindowAttention git.GitVisionAttention glm_image.GlmImageVisionAttention
    glpn.GLPNEfficientSelfAttention grounding_dino.GroundingDinoMultiheadAttention hubert.HubertAttention
    hunyuan_vl.HunYuanVLVisionAttention idefics2.Idefics2VisionAttention idefics3.Idefics3VisionAttention
    ijepa.IJepaAttention instructblip.InstructBlipAttention instructblip.InstructBlipQFormerMultiHeadAttention
    instructblipvideo.InstructBlipVideoAttention instructblipvideo.InstructBlipVideoQFormerMultiHeadAttention
    internvl.InternVLVisionAttention jamba.JambaAttention janus.JanusVisionAttention kosmos2.Kosmos2VisionAttention
    kosmos2.KosmosTextAttention kosmos2_5.Kosmos2_5TextAttention kosmos2_5.Kosmos2_5VisionAttention
    layoutlm.LayoutLMSelfAttention led.LEDDecoderAttention lw_detr.LwDetrAttention lw_detr.LwDetrViTAttention
    lxmert.LxmertAttention m2m_100.M2M100Attention marian.MarianAttention markuplm.MarkupLMSelfAttention
    mask2former.Mask2FormerAttention maskformer.MaskFormerDetrCrossAttention maskformer.MaskFormerDetrSelfAttention
    mbart.MBartAttention megatron_bert.MegatronBertSelfAttention mgp_str.MgpstrAttention
    minicpm_ocr.MiniCPMOcrVisionAttention minicpmv4_6.MiniCPMV4_6VisionAttention
    minicpmv4_7.MiniCPMV4_7VisionAttention mllama.MllamaTextCrossAttention mllama.MllamaVisionAttention
    mm_grounding_dino.MMGroundingDinoMultiheadAttention mobilebert.MobileBertSelfAttention
    mobilevit.MobileViTSelfAttention moonshine_streaming.MoonshineStreamingEncoderAttention
    moss_transcribe_diarize.MossTranscribeDiarizeAudioAttention musicgen.MusicgenAttention
    musicgen_melody.MusicgenMelodyAttention nemotron_h.NemotronHAttention neucodec.NeuCodecAttention
    omdet_turbo.OmDetTurboMultiheadAttention oneformer.OneFormerAttention oneformer.OneFormerTextMapperAttention
    opt.OPTAttention ovis2.Ovis2VisionAttention patchtsmixer.PatchTSMixerAttention patchtst.PatchTSTAttention
    pegasus.PegasusAttention pegasus_x.PegasusXGlobalLocalAttention pix2struct.Pix2StructVisionAttention
    pixio.PixioAttention plbart.PLBartAttention pp_doclayout_v2.PPDocLayoutV2SelfAttention
    pp_doclayout_v3.PPDocLayoutV3SelfAttention pp_doclayout_v4.PPDocLayoutV4SelfAttention
    pp_formulanet.PPFormulaNetAttention pp_ocrv5_mobile_rec.PPOCRV5MobileRecAttention
    pp_ocrv5_server_rec.PPOCRV5ServerRecAttention pp_ocrv6_small_rec.PPOCRV6SmallRecAttention
    prophetnet.ProphetNetAttention pvt.PvtEfficientSelfAttention pvt_v2.PvtV2SelfAttention
    qianfan_ocr.QianfanOCRVisionAttention qwen2_5_omni.Qwen2_5OmniAudioAttention qwen2_audio.Qwen2AudioAttention
    qwen3_asr.Qwen3ASRAudioAttention qwen3_omni_moe.Qwen3OmniMoeAudioAttention radio.RadioAttention
    rembert.RemBertSelfAttention rf_detr.RfDetrAttention rf_detr.RfDetrDinov2Attention roberta.RobertaCrossAttention
    roberta.RobertaSelfAttention roberta_prelayernorm.RobertaPreLayerNormCrossAttention
    roberta_prelayernorm.RobertaPreLayerNormSelfAttention roc_bert.RoCBertCrossAttention
    roc_bert.RoCBertSelfAttention rt_detr.RTDetrSelfAttention rt_detr_v2.RTDetrV2SelfAttention
    seamless_m4t.SeamlessM4TAttention seamless_m4t_v2.SeamlessM4Tv2Attention segformer.SegformerAttention
    sew.SEWAttention siglip.SiglipAttention siglip2.Siglip2Attention smolvlm.SmolVLMVisionAttention
    speech_to_text.Speech2TextAttention splinter.SplinterSelfAttention t5gemma.T5GemmaCrossAttention
    table_transformer.TableTransformerAttention tapas.TapasSelfAttention
    time_series_transformer.TimeSeriesTransformerAttention timesformer.TimesformerSelfAttention
    tipsv2.Tipsv2VisionAttention trocr.TrOCRAttention tvp.TvpAttention unispeech.UniSpeechAttention
    unispeech_sat.UniSpeechSatAttention unlimited_ocr.UnlimitedOcrAttention videomae.VideoMAESelfAttention
    videomt.VideomtAttention videoprism.VideoPrismAttention vilt.ViltSelfAttention
    visual_bert.VisualBertSelfAttention vit.ViTAttention vit_mae.ViTMAEAttention vit_msn.ViTMSNAttention
    vitpose_backbone.VitPoseBackboneSelfAttention vivit.VivitAttention vjepa2.VJEPA2PoolerCrossAttention
    vjepa2.VJEPA2PoolerSelfAttention voxtral.VoxtralAttention wav2vec2.Wav2Vec2Attention whisper.WhisperAttention
    x_clip.XCLIPCrossAttention xcodec2.Xcodec2Attention xglm.XGLMAttention xlm_roberta.XLMRobertaCrossAttention
    xlm_roberta.XLMRobertaSelfAttention xlm_roberta_xl.XLMRobertaXLCrossAttention
    xlm_roberta_xl.XLMRobertaXLSelfAttention xmod.XmodCrossAttention xmod.XmodSelfAttention yolos.YolosSelfAttention
    zamba.ZambaAttention zoedepth.ZoeDepthMultiheadAttention
"""

ROWS: dict[str, Adapter] = {
    ROTARY: attention(rotary=True),
    PLAIN: attention(),
    # They keep a value of attn_logit_softcapping that their forward does not use.
    "gemma3.Gemma3Attention t5gemma2.T5Gemma2SelfAttention": attention(
        rotary=True, modifiers={table.LOGIT_SOFTCAP: False}
    ),
    # Rotation by layer.
    "cohere2.Cohere2Attention flint.FlintAttention": attention(rotary=slides),
    "cohere2_moe.Cohere2MoeAttention": attention(rotary=lambda place: slides(place) or bool(place.module.force_rope)),
    """
    exaone4.Exaone4Attention exaone4_5.Exaone4_5_Attention exaone_moe.ExaoneMoeAttention kolibri1.Kolibri1Attention
    """: attention(rotary=lambda place: not slides(place) or bool(place.module.is_sliding)),
    "afmoe.AfmoeAttention": attention(rotary=has("is_local_attention")),
    "smollm3.SmolLM3Attention": attention(rotary=has("use_rope")),
    "granitemoehybrid.GraniteMoeHybridAttention": attention(
        rotary=lambda place: place.config("position_embedding_type") == "rope"
    ),
    "granite_swa.GraniteSWAAttention granitemoe_swa.GraniteMoeSWAAttention": attention(
        rotary=layer_value("layer_rope_theta")
    ),
    "olmo_hybrid.OlmoHybridAttention": attention(rotary=around("rotary_emb")),
    "cohere_compass.CohereCompassAttention": attention(rotary=layer_type_rotates),
    # Layers that are not rotated scale their queries by position.
    "beam.BeamAttention": attention(
        rotary=layer_type_rotates, modifiers={table.POSITION_DEPENDENT_SCALE: negated(layer_type_rotates)}
    ),
    "llama4.Llama4TextAttention": attention(
        rotary=has("use_rope"),
        modifiers={
            table.POSITION_DEPENDENT_SCALE: lambda place: (
                place.module.attn_temperature_tuning and not place.module.use_rope
            )
        },
    ),
    "ministral3.Ministral3Attention": attention(
        rotary=True,
        modifiers={
            table.POSITION_DEPENDENT_SCALE: lambda place: (place.config("rope_parameters") or {}).get(
                "llama_4_scaling_beta"
            )
        },
    ),
    # Only self-attention is rotated.
    """
    moonshine.MoonshineAttention moonshine_streaming.MoonshineStreamingAttention idefics.IdeficsAttention
    """: attention(rotary=negated(is_cross)),
    "roformer.RoFormerSelfAttention": attention(
        rotary=negated(is_cross), refuse=(has("rotary_value"), "it rotates its values too (rotary_value=True).")
    ),
    "clvp.ClvpSelfAttention": attention(
        causal=named("decoder"), refuse=(in_rotating_encoder, "it rotates its values too.")
    ),
    "zamba2.Zamba2Attention": attention(
        rotary=setting("use_mem_rope"),
        refuse=(
            setting("use_shared_attention_adapter"),
            "each use of this shared block adds low-rank weights of its own.",
        ),
    ),
    # Projections are wrapped; the depth decoder has one weight per codebook, which a slot cannot hold.
    "moshi.MoshiAttention kyutai_speech_to_text.KyutaiSpeechToTextAttention": attention(
        causal=True,
        rotary=holds("rotary_emb"),
        refuse=(
            lambda place: not layout.is_projection(place.module.q_proj.linear),
            "its projections have one weight per codebook.",
        ),
    ),
    # A scale of its own: a fixed number on queries, keys or both.
    "muse_glimmer.MuseGlimmerTextAttention muse_spark.MuseSparkTextAttention": attention(
        rotary=layer_value("layer_rope_theta"),
        scale=lambda place: place.module.scaling * float(place.module.qk_scale_factor),
    ),
    "falcon_h1.FalconH1Attention": attention(
        rotary=True, scale=lambda place: place.module.scaling * place.module.key_multiplier
    ),
    "openai_privacy_filter.OpenAIPrivacyFilterAttention": attention(
        rotary=True, scale=lambda place: place.module.scaling**2
    ),
    "gpt_neo.GPTNeoSelfAttention": attention(scale=1.0),
    "openai.Attention": attention(causal=True, scale=lambda place: ROOT if place.module.scale else 1.0),
    # ESM scales before the rotation.
    "esm.EsmSelfAttention evolla.EvollaSaProtSelfAttention": attention(
        scale=ROOT, rotary=lambda place: getattr(place.module, "position_embedding_type", None) == "rotary"
    ),
    # Landmarks are means of scaled queries and keys, and a convolution of the values is added.
    "nystromformer.NystromformerSelfAttention": attention(
        kind=nystrom_kind, modifiers={table.VALUE_CONVOLUTION: holds("conv_kernel_size")}
    ),
    "luke.LukeSelfAttention": attention(
        refuse=(
            has("use_entity_aware_attention"),
            "entity-aware attention has four query weights (query, w2e, e2w, e2e).",
        ),
    ),
    "superglue.SuperGlueSelfAttention": attention(cross=in_other_image),
    # Queries and keys have one width per head, values another.
    "perceiver.PerceiverSelfAttention": attention(head_dim="qk_channels_per_head", cross=named("cross_attention")),
    # One head over all channels, with 1x1 convolutions as projections.
    "chameleon.ChameleonVQVAEEncoderAttnBlock janus.JanusVQVAEAttnBlock": attention(
        head_dim=lambda place: layout.out_features(place.module.q)
    ),
    # Causality: by tower, by the config, or by a mask that the caller makes.
    """
    aimv2.Aimv2Attention clip.CLIPAttention clipseg.CLIPSegAttention groupvit.GroupViTAttention
    metaclip_2.MetaClip2Attention owlv2.Owlv2Attention owlvit.OwlViTAttention x_clip.XCLIPAttention
    """: attention(causal=in_text_tower),
    """
    bigbird_pegasus.BigBirdPegasusDecoderAttention informer.InformerAttention nllb_moe.NllbMoeAttention
    pegasus_x.PegasusXAttention
    """: attention(causal=in_decoder),
    "mvp.MvpAttention": attention(modifiers={table.EXTRA_KEYS: setting("use_prompt")}),
    "reformer.LocalSelfAttention": attention(causal=setting("is_decoder")),
    "xlm.MultiHeadAttention flaubert.MultiHeadAttention": attention(
        causal=lambda place: bool(place.config("causal", False)) and "encoder_attn" not in place.name
    ),
    "fsmt.Attention": attention(
        cross=has("encoder_decoder_attention"),
        causal=lambda place: "decoder" in place.name.split(".") and not place.module.encoder_decoder_attention,
    ),
    # Text of GIT is causal after an image prefix that sees itself wholly.
    """
    git.GitSelfAttention phi4_multimodal.Phi4MultimodalAudioAttention phi4_multimodal.Phi4MultimodalVisionAttention
    sam3_lite_text.Sam3LiteTextTextAttention
    """: attention(causal=None),
    "deepseek_ocr2.DeepseekOcr2VisionAttention": attention(causal=None, rotary=True),
    # An argument of the model's forward decides.
    "blip/blip_text.BlipTextSelfAttention": attention(causal=lambda place: False if is_cross(place) else None),
    "tipsv2.Tipsv2TextAttention": attention(causal=False),
    # Keys and values of another sequence: mask decoders, memories of video models, matchers of two images, poolers.
    """
    edgetam.EdgeTamAttention edgetam_video.EdgeTamVideoAttention sam.SamAttention sam2.Sam2Attention
    sam2_video.Sam2VideoAttention sam3_tracker.Sam3TrackerAttention sam3_tracker_video.Sam3TrackerVideoAttention
    sam_hq.SamHQAttention
    """: attention(cross=is_not_self),
    """
    edgetam_video.EdgeTamVideoRoPECrossAttention edgetam_video.EdgeTamVideoRoPESelfAttention
    sam2_video.Sam2VideoRoPEAttention sam3_tracker_video.Sam3TrackerVideoRoPEAttention
    """: attention(cross=is_not_self, rotary=True),
    # The decoder's attention to the image adds biases from the boxes of its queries.
    "sam3.Sam3Attention sam3_lite_text.Sam3LiteTextAttention": attention(
        cross=is_not_self, relative_position_bias=lambda place: place.name.endswith("vision_cross_attn")
    ),
    "efficientloftr.EfficientLoFTRAttention": attention(
        cross=named("cross_attention"), rotary=negated(named("cross_attention")), causal=False
    ),
    "lightglue.LightGlueAttention": attention(
        cross=named("cross_attention"), rotary=negated(named("cross_attention")), causal=None
    ),
    # Its query norm acts on the tokens, before the projections.
    "blt.BltCrossAttention": attention(cross=True, qk_norm=None),
    "idefics2.Idefics2PerceiverAttention": attention(cross=True),
    "molmo2.Molmo2VisionAttention": attention(cross=named("pooling")),
    # Biases by relative position. The gate on WavLM's reads the tokens, not the queries.
    """
    clap.ClapAudioSelfAttention donut/donut_swin.DonutSwinSelfAttention
    maskformer/maskformer_swin.MaskFormerSwinSelfAttention mpnet.MPNetSelfAttention
    pp_doclayout_v2.PPDocLayoutV2ReadingOrderSelfAttention swin.SwinAttention wavlm.WavLMAttention
    """: attention(relative_position_bias=True),
    "layoutlmv3.LayoutLMv3SelfAttention": attention(relative_position_bias=has("has_relative_attention_bias")),
    """
    beit.BeitAttention data2vec/data2vec_vision.Data2VecVisionSelfAttention
    data2vec/data2vec_vision.Data2VecVisionSdpaSelfAttention
    """: attention(relative_position_bias=beit_bias),
    # A prefix that sees itself, causal text after it.
    "cpmant.CpmAntAttention": attention(causal=None, relative_position_bias=True),
    # Cosine attention: normalised q and k, a learned scale, and a bias computed from relative coordinates.
    "swin2sr.Swin2SRSelfAttention swinv2.Swinv2SelfAttention": attention(
        scale=None, qk_norm="l2", relative_position_bias=True
    ),
    # T5: no scale. The first layer of a stack owns the bias table and hands its bias to all self-attention layers.
    """
    longt5.LongT5Attention longt5.LongT5LocalAttention longt5.LongT5TransientGlobalAttention mt5.MT5Attention
    pix2struct.Pix2StructTextAttention pop2piano.Pop2PianoAttention switch_transformers.SwitchTransformersAttention
    t5.T5Attention udop.UdopAttention umt5.UMT5Attention
    """: attention(scale=1.0, relative_position_bias=negated(is_cross)),
    # Relative positions are multiplied with the queries.
    """
    bros.BrosSelfAttention granite_speech.GraniteSpeechConformerAttention parakeet.ParakeetEncoderAttention
    granite_speech5.GraniteSpeech5EncoderAttention granite_speech_plus.GraniteSpeechPlusConformerAttention
    nemotron_asr_streaming.NemotronAsrStreamingEncoderAttention
    """: attention(modifiers=POSITION_TERM),
    """
    fastspeech2_conformer.FastSpeech2ConformerAttention seamless_m4t.SeamlessM4TConformerSelfAttention
    seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention wav2vec2_bert.Wav2Vec2BertSelfAttention
    wav2vec2_conformer.Wav2Vec2ConformerSelfAttention
    """: attention(
        # Rotary ones rotate tokens, not queries and keys.
        modifiers={
            table.QUERY_POSITION_TERM: lambda place: (
                getattr(place.module, "position_embeddings_type", "relative") in ("relative", "relative_key")
            )
        },
    ),
    # The encoder does so, the decoder does not.
    "speecht5.SpeechT5Attention": attention(modifiers={table.QUERY_POSITION_TERM: negated(has("is_decoder"))}),
    # One weight for queries, keys and values.
    "mpt.MptAttention": attention(causal=True, relative_position_bias=True),
    "gpt2.GPT2Attention decision_transformer.DecisionTransformerGPT2Attention": attention(causal=negated(is_cross)),
    "imagegpt.ImageGPTAttention": attention(causal=negated(is_cross), scale=imagegpt_scale),
    # Image encoders of SAM and its relatives may multiply decomposed relative positions with the queries.
    """
    deepseek_ocr2.DeepseekOcr2SamVisionAttention deepseek_ocr2.DeepseekOcr2SamVisionSdpaAttention
    got_ocr2.GotOcr2VisionAttention pp_formulanet.PPFormulaNetVisionAttention sam.SamVisionAttention
    sam.SamVisionSdpaAttention sam_hq.SamHQVisionAttention sam_hq.SamHQVisionSdpaAttention seggpt.SegGptAttention
    slanext.SLANeXtVisionAttention unlimited_ocr.UnlimitedOcrSamVisionAttention
    unlimited_ocr.UnlimitedOcrSamVisionSdpaAttention vitdet.VitDetAttention
    """: attention(modifiers={table.QUERY_POSITION_TERM: has("use_rel_pos", "use_relative_position_embeddings")}),
    # Queries may be max-pooled over tokens.
    "sam2.Sam2MultiScaleAttention hiera.HieraMaskUnitAttention": attention(
        modifiers={table.POOLED_QUERIES: lambda place: place.module.query_stride not in (None, 1)}
    ),
    # Per head: query, key, value. BLOOM's ALiBi is a bias that depends on the distance.
    "gpt_neox.GPTNeoXAttention persimmon.PersimmonAttention": attention(arrangement="groups", rotary=True),
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": attention(arrangement="groups", rotary=True, causal=True),
    "bloom.BloomAttention": attention(
        arrangement="groups", causal=True, scale=attribute("inv_norm_factor"), relative_position_bias=True
    ),
    "falcon.FalconAttention": attention(
        num_kv_heads=falcon_kv_heads,
        arrangement=falcon_arrangement,
        scale=attribute("inv_norm_factor"),
        rotary=negated(setting("alibi")),
        relative_position_bias=setting("alibi"),
    ),
    # Multi-query: all queries, one key, one value.
    "gpt_bigcode.GPTBigCodeAttention": attention(
        arrangement=lambda place: "blocks" if place.module.multi_query else "groups",
        refuse=(
            has("is_cross_attention"),
            "its cross attention reads one key and one value head out of weights for all heads.",
        ),
    ),
    # Four shards, each with its queries, then its values, then its keys.
    "codegen.CodeGenAttention": attention(letters="qvk", shards=4, causal=True, rotary=True),
    # Channels attend to channels within groups: softmax(q^T k) applied to v; the scale depends on the tokens.
    "florence2.Florence2VisionChannelAttention": attention(num_heads="groups", kind="channel", scale=None),
    """
    qwen3_5.Qwen3_5Attention qwen3_5_moe.Qwen3_5MoeAttention qwen3_next.Qwen3NextAttention
    qwen4_exp.Qwen4ExpTextAttention
    """: gated_query,
    refused.NO_ATTENTION_IN_TRANSFORMERS: lambda place: None,
}
ROWS |= {classes: table.refused(reason) for reason, classes in refused.TRANSFORMERS.items()}
TABLE = by_class(ROWS, dotted)
TABLE["transformers.models.idefics.vision.IdeficsVisionAttention"] = attention()
