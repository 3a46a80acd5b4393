"""GPT-2 and its relatives: Conv1D stores (in_features, out_features); cross attention has a query of its own."""

from __future__ import annotations

from typing import Any

from wellcond.attention.families import hf_common as hf
from wellcond.attention.find import register_adapter
from wellcond.attention.layout import fused_site, query_and_kv_site
from wellcond.attention.site import AttentionSite, Place


@register_adapter(*hf.hf("gpt2.GPT2Attention decision_transformer.DecisionTransformerGPT2Attention"))
def gpt2(place: Place) -> AttentionSite:
    """`scaling` already holds scale_attn_weights and scale_attn_by_inverse_layer_idx."""
    module: Any = place.module
    return _gpt2_like(place, scale=module.scaling)


@register_adapter(*hf.hf("imagegpt.ImageGPTAttention"))
def imagegpt(place: Place) -> AttentionSite:
    """ImageGPT computes its scale inside forward, from the same two options."""
    module: Any = place.module
    scale = module.head_dim**-0.5 if module.scale_attn_weights else 1.0
    if module.scale_attn_by_inverse_layer_idx:
        scale /= float(module.layer_idx + 1)
    return _gpt2_like(place, scale=scale)


@register_adapter(*hf.hf("openai.Attention"))
def openai_gpt(place: Place) -> AttentionSite:
    """The first GPT: `scale` says whether the logits are divided by the root of the head width."""
    module: Any = place.module
    head_dim = module.split_size // module.n_head
    return fused_site(
        place,
        module.c_attn,
        num_heads=module.n_head,
        output=module.c_proj,
        family=place.class_name,
        scale=head_dim**-0.5 if module.scale else 1.0,
        causal=True,
    )


def _gpt2_like(place: Place, scale: float) -> AttentionSite:
    module: Any = place.module
    shared = {"num_heads": module.num_heads, "output": module.c_proj, "family": place.class_name, "scale": scale}
    if module.is_cross_attention:
        return query_and_kv_site(place, module.q_attn, module.c_attn, cross=True, causal=False, **shared)
    return fused_site(place, module.c_attn, causal=True, **shared)
