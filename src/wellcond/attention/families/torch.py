"""torch.nn.MultiheadAttention: fused ``in_proj_weight``, or three weights when key or value widths differ."""

from __future__ import annotations

from torch import nn

from wellcond.attention.families.table import EXTRA_KEYS, those
from wellcond.attention.layout import QKVLayout, head_rows, output_slot
from wellcond.attention.site import AttentionSite, ModuleContext
from wellcond.attention.slot import Slot


def multihead_attention(place: ModuleContext) -> AttentionSite:
    """Describe an nn.MultiheadAttention. Its caller's mask decides whether it is causal."""
    module: nn.MultiheadAttention = place.module  # type: ignore[assignment]
    layout = QKVLayout(module.num_heads, module.head_dim)
    is_fused = module.kdim == module.vdim == module.embed_dim
    bias_name = "in_proj_bias" if module.in_proj_bias is not None else None

    def slot(role: str) -> Slot:
        fused_rows = layout.rows(role)
        if is_fused:
            return Slot(module, "in_proj_weight", fused_rows, bias_name=bias_name)
        # The three weights are apart, but the bias stays fused.
        rows = head_rows(module.num_heads, module.head_dim)
        return Slot(module, f"{role}_proj_weight", rows, bias_name=bias_name, bias_rows=fused_rows)

    decoder = place.parent
    after_encoder = isinstance(decoder, nn.TransformerDecoderLayer) and decoder.multihead_attn is module
    return AttentionSite(
        name=place.name,
        module=module,
        q=slot("q"),
        k=slot("k"),
        v=slot("v"),
        o=output_slot(place, module.out_proj, module.num_heads, module.head_dim),
        scale=module.head_dim**-0.5,
        causal=None,
        cross=after_encoder or not is_fused,
        modifiers=those({EXTRA_KEYS: module.bias_k is not None or module.add_zero_attn}),
    )


TABLE = {"torch.nn.modules.activation.MultiheadAttention": multihead_attention}
