"""T5 and its relatives: no logit scale, relative position biases, head width independent of the model width."""

from __future__ import annotations

from typing import Any

from wellcond.attention.families import hf_common as hf
from wellcond.attention.find import register_adapter
from wellcond.attention.site import AttentionSite, Place


@register_adapter(
    *hf.hf("""
    longt5.LongT5Attention mt5.MT5Attention pix2struct.Pix2StructTextAttention pop2piano.Pop2PianoAttention
    switch_transformers.SwitchTransformersAttention t5.T5Attention udop.UdopAttention umt5.UMT5Attention
""")
)
def t5(place: Place) -> AttentionSite:
    """Encoder, decoder and cross attention.

    The first layer of a stack owns the bias table and hands its bias to the others, so all self attentions have one.
    """
    cross = hf.is_cross(place) or "CrossAttention" in type(place.parent).__name__
    causal = bool(place.module.is_causal) and not cross
    return hf.separate(place, scale=1.0, cross=cross, causal=causal, relative_position_bias=not cross)


@register_adapter(*hf.hf("longt5.LongT5LocalAttention longt5.LongT5TransientGlobalAttention"))
def longt5_local(place: Place) -> AttentionSite:
    """Attention within neighbouring blocks, and to summaries of all blocks, with the same projections."""
    facts: dict[str, Any] = {"scale": 1.0, "causal": False, "relative_position_bias": True}
    return hf.separate(place, **facts)
