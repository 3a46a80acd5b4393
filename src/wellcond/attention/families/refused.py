"""Attention that q, k, v slots cannot express, each with its reason; and mixers of transformers that are no attention.

Refusing beats not recognising: a user who initialises a LeViT learns why nothing was done. Modules without any query
or key projection (squeeze-excite gates, VOLO's outlook attention) are not attention in this library's sense and are
left alone. Words are those of the tables of timm and transformers.
"""

from __future__ import annotations

TIMM = {
    "a batch norm stands between each projection and the product, so the stored rows are not the q, k, v that are "
    "multiplied.": """
    models.efficientformer_v2.Attention2d models.efficientformer_v2.Attention2dDownsample models.levit.Attention
    models.levit.AttentionDownsample models.shvit.SHSA
    """,
    "it subtracts two softmax attentions with a learned weight.": """
    layers.diff_attention.DiffAttention models.vision_transformer.DiffParallelScalingBlock
    """,
    "its projections are stored as three-dimensional parameters.": "layers.attention2d.MultiQueryAttentionV2",
    "its keys are normalised over the tokens and multiplied with the values before the queries (a lambda layer).": """
    layers.lambda_layer.LambdaLayer
    """,
    "its softmax acts on the keys alone (factorised attention), not on products of queries and keys.": """
    models.coat.FactorAttnConvRelPosEnc
    """,
    "its weights are a gated mixture of a softmax of q k^T and a softmax of positions.": "models.convit.GPSA",
    "its q, k, v are scalars and are multiplied across the batch.": "models.csatv2.SpatialTransformerBlock",
    "it is linear attention: ReLU features and no softmax.": "models.efficientvit_mit.LiteMLA",
    "each head reads the previous head's output; batch norms and a depthwise convolution follow the projections.": """
    models.efficientvit_msra.CascadedGroupAttention
    """,
    "its values are normalised per token and head after their projection, so they are not on a linear path.": """
    models.gemma4_vit.Gemma4Attention
    """,
    "its values pass a batch norm and a sigmoid after their projection.": "models.iformer.SHMA",
    "it is separable attention: one scalar score per token, no products of queries and keys.": """
    models.mobilevit.LinearSelfAttention
    """,
    "its q, k or v pass a depthwise convolution and a norm between projection and product, and the queries are "
    "added to the output.": "models.mvitv2.MultiScaleAttention",
    "its pooled queries are added to the output.": "models.mvitv2.MultiScaleAttentionPoolFirst",
    "it is additive attention: no values, no softmax.": "models.swiftformer.EfficientAdditiveAttention",
}

TRANSFORMERS = {
    "keys and values come out of a low-rank projection (multi-head latent attention), not out of one weight.": """
    axk1.AXK1Attention axk2.AXK2Attention bailing_hybrid.BailingHybridAttention deepseek_v2.DeepseekV2Attention
    deepseek_v3.DeepseekV3Attention deepseek_v32.DeepseekV32Attention deepseek_v4.DeepseekV4Attention
    glm4_moe_lite.Glm4MoeLiteAttention glm5_next.Glm5NextTextAttention glm_moe_dsa.GlmMoeDsaAttention
    hy_v4.HYV4Attention kimi_linear.KimiLinearAttention longcat_flash.LongcatFlashMLA minicpm3.MiniCPM3Attention
    mistral4.Mistral4Attention mistral_large4.MistralLarge4TextAttention youtu.YoutuAttention
    """,
    "it is linear (delta-rule or lightning) attention with convolved inputs, not softmax attention.": """
    bailing_hybrid.BailingHybridDeltaAttention glm5_next.Glm5NextTextLinearAttention
    kimi_linear.KimiLinearDeltaAttention minimax.MiniMaxLightningAttention
    """,
    "deformable attention samples values at predicted positions; it has no queries and keys to compare.": """
    d_fine.DFineMultiscaleDeformableAttention deformable_detr.DeformableDetrMultiscaleDeformableAttention
    deimv2.Deimv2MultiscaleDeformableAttention grounding_dino.GroundingDinoMultiscaleDeformableAttention
    lw_detr.LwDetrMultiscaleDeformableAttention
    mask2former.Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention
    mm_grounding_dino.MMGroundingDinoMultiscaleDeformableAttention omdet_turbo.OmDetTurboMultiscaleDeformableAttention
    oneformer.OneFormerPixelDecoderEncoderMultiscaleDeformableAttention
    pp_doclayout_v2.PPDocLayoutV2MultiscaleDeformableAttention
    pp_doclayout_v3.PPDocLayoutV3MultiscaleDeformableAttention
    pp_doclayout_v4.PPDocLayoutV4MultiscaleDeformableAttention rf_detr.RfDetrMultiscaleDeformableAttention
    rt_detr.RTDetrMultiscaleDeformableAttention rt_detr_v2.RTDetrV2MultiscaleDeformableAttention
    """,
    "positions go through the same query and key weights (disentangled attention).": """
        deberta.DisentangledSelfAttention deberta_v2.DisentangledSelfAttention sew_d.DisentangledSelfAttention
    """,
    "its weights are three-dimensional and positions have queries of their own.": """
        xlnet.XLNetRelativeAttention
    """,
    "positions and segments are multiplied with shifted queries (relative attention of Transformer-XL).": """
        funnel.FunnelRelMultiheadAttention
    """,
    "queries and keys share one weight and are compared by hashing.": "reformer.LSHSelfAttention",
    "global tokens have query, key and value weights of their own, which a site cannot hold.": """
        longformer.LongformerSelfAttention led.LEDEncoderSelfAttention
    """,
    "it predicts several future tokens with separate streams (n-gram attention).": """
        prophetnet.ProphetNetNgramSelfAttention
    """,
    "it subtracts two softmax maps of paired heads (differential attention).": "diffllama.DiffLlamaAttention",
    "its mask is computed from the values.": "doge.DogeAttention",
    "values are normalised before they are averaged, which no fact of a site can say.": """
    diffusion_gemma.DiffusionGemmaDecoderTextAttention diffusion_gemma.DiffusionGemmaEncoderTextAttention
    embedding_gemma2.EmbeddingGemma2Attention gemma3n.Gemma3nTextAttention gemma4.Gemma4TextAttention
    gemma4.Gemma4VisionAttention gemma4_unified.Gemma4UnifiedTextAttention
    """,
    "queries are scaled by a learned number per channel.": """
    gemma3n.Gemma3nAudioAttention gemma4.Gemma4AudioAttention timesfm.TimesFmAttention timesfm2_5.TimesFm2_5Attention
    videoprism.VideoPrismMultiheadAttentionPoolingHead
    """,
    "half of its heads are convolutions that share the queries.": "convbert.ConvBertSelfAttention",
    "it approximates the softmax by hashing.": "yoso.YosoSelfAttention",
    "it approximates the softmax at several resolutions.": "mra.MraSelfAttention",
    "it correlates in the frequency domain instead of comparing queries with keys.": "autoformer.AutoformerAttention",
    "only some queries attend; the others are replaced by means.": "informer.InformerProbSparseAttention",
    "its projections are grouped convolutions.": "squeezebert.SqueezeBertSelfAttention",
    "text and layout have weights of their own whose logits are added.": "lilt.LiltSelfAttention",
    "its projections feed a second attention with projections of its own.": "aria.AriaCrossAttention",
    "keys and values are convolved along the sequence.": "inkling.InklingAttention",
    "batch norms stand between its projections and its heads.": "levit.LevitAttention levit.LevitAttentionSubsample",
    "its projections begin with convolutions over the image.": "cvt.CvtSelfAttention",
    "queries go through a mixture of experts.": "jetmoe.JetMoeAttention",
    "content and position have query and key weights of their own.": """
    conditional_detr.ConditionalDetrDecoderCrossAttention conditional_detr.ConditionalDetrDecoderSelfAttention
    dab_detr.DabDetrDecoderLayerCrossAttention dab_detr.DabDetrDecoderLayerSelfAttention
    """,
    "vision and text attend to each other through one map of logits.": """
    grounding_dino.GroundingDinoBiMultiHeadAttention mm_grounding_dino.MMGroundingDinoBiMultiHeadAttention
    """,
    "tokens are assigned to groups by a hard choice, not averaged.": "groupvit.GroupViTAssignAttention",
    "values are read at relative positions too, through tables of their own.": "vits.VitsAttention",
    "values get position encodings after their projection.": "edgetam_video.EdgeTamVideoPerceiverAttention",
    "a convolution of the values is added to its output.": "fun_asr_nano.FunAsrNanoAttention",
    "it attends by learned additive scores, without comparing queries with keys.": """
        swiftformer.SwiftFormerEfficientAdditiveAttention
    """,
    "its neighbourhood attention needs the natten package, with which it was not checked.": """
        dinat.NeighborhoodAttention
    """,
    "self and cross attention share one softmax.": "t5gemma2.T5Gemma2MergedAttention",
    "values are mixed with embeddings and its own token is excluded.": "neomme.NeoMMEAttention",
    "its queries are a learned token without a weight.": "aimv2.Aimv2AttentionPoolingHead",
    "keys of several sources have weights of their own.": "evolla.EvollaSequenceAlignerCrossAttention",
    "norms of two streams stand before one fused weight.": "evolla.EvollaSequenceCompressorAttention",
    "one learned score per token replaces the queries (separable attention).": """
        mobilevitv2.MobileViTV2LinearSelfAttention
    """,
    "it scores a recurrent state against features by an additive network.": """
        slanet.SLANetAttentionGRUCell slanext.SLANeXtAttentionGRUCell
    """,
    "keys and values are compressed and convolved.": "zaya.ZayaAttention",
    "pair representations gate and bias it; it is part of a folding trunk.": """
        esm/esmfold.EsmFoldAttention esm/esmfold.EsmFoldSelfAttention esm/esmfold.EsmFoldInvariantPointAttention
        esmfold2.EsmFold2RowAttentionPooling
    """,
    "it uses fused weights of LayoutLMv2, which need detectron2 and were not checked.": """
        layoutlmv2.LayoutLMv2SelfAttention
    """,
    "its quantised projections return a scaling factor beside their output.": "ibert.IBertSelfAttention",
}

# Recurrences, gates and helpers; some have children named like projections.
NO_ATTENTION_IN_TRANSFORMERS = """
    edgetam_video.EdgeTamVideoMemoryAttentionMLP lxmert.LxmertAttentionOutput
    olmo_hybrid.OlmoHybridLinearAttentionDecoderLayer
    patchtsmixer.PatchTSMixerGatedAttention phi4_multimodal.Phi4MultimodalAudioRelativeAttentionBias xlstm.xLSTMLayer
    olmo_hybrid.OlmoHybridGatedDeltaNet qwen3_5.Qwen3_5GatedDeltaNet qwen3_5_moe.Qwen3_5MoeGatedDeltaNet
    qwen3_next.Qwen3NextGatedDeltaNet qwen4_exp.Qwen4ExpTextGatedDeltaNet rwkv.RwkvFeedForward rwkv.RwkvSelfAttention
"""
