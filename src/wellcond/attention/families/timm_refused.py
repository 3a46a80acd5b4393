"""timm modules that are called attention and have no per-head linear Q, K, V; each is refused with its reason.

Refusing beats not recognising: a user who initialises a LeViT learns why nothing was done. Modules without any query
or key projection (squeeze-excite gates, VOLO's outlook attention) are not attention in this library's sense and are
left alone.
"""

from __future__ import annotations

from collections.abc import Callable

from wellcond.attention.families.timm_common import refuse
from wellcond.attention.find import register_adapter
from wellcond.attention.site import AttentionSite, Place

BATCH_NORM = (
    "a batch norm stands between each projection and the product, so the stored rows are not the q, k, v that are "
    "multiplied."
)
REASONS = {
    "timm.layers.attention2d.MultiQueryAttentionV2": "its projections are stored as three-dimensional parameters.",
    "timm.layers.diff_attention.DiffAttention": "it subtracts two softmax attentions with a learned weight.",
    "timm.layers.lambda_layer.LambdaLayer": (
        "its keys are normalised over the tokens and multiplied with the values before the queries (a lambda layer)."
    ),
    "timm.models.coat.FactorAttnConvRelPosEnc": (
        "its softmax acts on the keys alone (factorised attention), not on products of queries and keys."
    ),
    "timm.models.convit.GPSA": "its weights are a gated mixture of a softmax of q k^T and a softmax of positions.",
    "timm.models.csatv2.SpatialTransformerBlock": "its q, k, v are scalars and are multiplied across the batch.",
    "timm.models.efficientformer_v2.Attention2d": BATCH_NORM,
    "timm.models.efficientformer_v2.Attention2dDownsample": BATCH_NORM,
    "timm.models.efficientvit_mit.LiteMLA": "it is linear attention: ReLU features and no softmax.",
    "timm.models.efficientvit_msra.CascadedGroupAttention": (
        "each head reads the previous head's output; batch norms and a depthwise convolution follow the projections."
    ),
    "timm.models.gemma4_vit.Gemma4Attention": (
        "its values are normalised per token and head after their projection, so they are not on a linear path."
    ),
    "timm.models.iformer.SHMA": "its values pass a batch norm and a sigmoid after their projection.",
    "timm.models.levit.Attention": BATCH_NORM,
    "timm.models.levit.AttentionDownsample": BATCH_NORM,
    "timm.models.mobilevit.LinearSelfAttention": (
        "it is separable attention: one scalar score per token, no products of queries and keys."
    ),
    "timm.models.mvitv2.MultiScaleAttention": (
        "its q, k or v pass a depthwise convolution and a norm between projection and product, and the queries are "
        "added to the output."
    ),
    "timm.models.mvitv2.MultiScaleAttentionPoolFirst": "its pooled queries are added to the output.",
    "timm.models.shvit.SHSA": BATCH_NORM,
    "timm.models.swiftformer.EfficientAdditiveAttention": "it is additive attention: no values, no softmax.",
    "timm.models.vision_transformer.DiffParallelScalingBlock": (
        "it subtracts two softmax attentions with a learned weight."
    ),
}


def _refusal(reason: str) -> Callable[[Place], AttentionSite | None]:
    def describe(place: Place) -> AttentionSite | None:
        refuse(place, reason)

    return describe


for _class, _reason in REASONS.items():
    register_adapter(_class)(_refusal(_reason))
