"""torchtitan's grouped-query attention: llama3, qwen3."""

from __future__ import annotations

from typing import Any

from wellcond.attention.families.table import ROOT, attention, holds
from wellcond.attention.site import ModuleContext


def arrangement(place: ModuleContext) -> str | None:
    """A fused weight has, for each key/value head, its query heads, its key and its value; nothing of separate ones."""
    module: Any = place.module
    return "groups" if hasattr(module.qkv_linear, "wqkv") else None


TABLE = {
    # Kernel and mask (flex, varlen) are the caller's choice; the rotation has no factor of its own.
    "torchtitan.models.common.attention.GQAttention": attention(
        "qkv_linear.wqkv | qkv_linear.wq qkv_linear.wk qkv_linear.wv",
        output="wo",
        num_heads="n_heads",
        num_kv_heads="n_kv_heads",
        head_dim="head_dim",
        arrangement=arrangement,
        scale=ROOT,
        causal=None,
        rotary=True,
        qk_norm=lambda place: "rms" if holds("q_norm")(place) else None,
    )
}
