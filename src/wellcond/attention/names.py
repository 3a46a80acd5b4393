"""Under which names attention modules keep their projections, their outputs, the sizes of their heads and their norms.

One vocabulary for everybody who looks for them. A name proposes a reading; the module's own output decides.
"""

from __future__ import annotations

SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
    ("c_q", "c_k", "c_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("Wq", "Wk", "Wv"),
    ("w_q", "w_k", "w_v"),
    ("W_q", "W_k", "W_v"),
    ("W_Q", "W_K", "W_V"),
    ("q_linear", "k_linear", "v_linear"),
    ("linear_q", "linear_k", "linear_v"),
    ("query_proj", "key_proj", "value_proj"),
    ("project_q", "project_k", "project_v"),
    ("q_net", "k_net", "v_net"),
    ("queries", "keys", "values"),
    ("q_weight", "k_weight", "v_weight"),
)
"""A projection of its own for queries, keys and values."""

QUERY_AND_FUSED = (
    *(("q", "kv"), ("to_q", "to_kv"), ("q_proj", "kv_proj"), ("wq", "wkv"), ("c_q", "c_kv")),
    ("q_attn", "c_attn"),
)
"""One for queries, one for keys and values together."""

FUSED = tuple(
    "qkv qkv_proj to_qkv c_attn query_key_value Wqkv wqkv W_pack qkv_net att_proj qkv_weight qkv_w w_qkv".split()
)
"""One for all three."""

ADDED = (("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out")
"""Of a second stream, with one set of heads for both (diffusers: Flux, SD3); what it is called in a site's name."""

STACKS = tuple("qkvo_w qkvo w_qkvo qkvo_weight attn_w qkvo_bank qkv_bank attn_bank".split())
"""A parameter that holds queries, keys, values and, as a rule, the output projection."""

PROJECTIONS = (*SEPARATE, *QUERY_AND_FUSED, *((name,) for name in FUSED))
FIRST = {*(wanted[0] for wanted in PROJECTIONS), *STACKS}
"""A module that is read by names has one of these."""

OUTPUT = tuple(
    """
    o_proj out_proj proj c_proj to_out out out_lin wo Wo w_o W_o W_O dense o output projection projection_layer fc_out
    linear_out out_linear proj_out attention_out o_weight
    """.split()
)

HEADS = ("num_heads", "n_head", "n_heads", "heads", "num_attention_heads", "nhead", "head_num", "num_head", "h")
KV_HEADS = ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_kv")
HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head", "d_head")
SCALE = ("scale", "scaling", "softmax_scale")

QK_NORM = ("q_norm", "q_layernorm", "query_layernorm", "q_layer_norm", "qk_norm")
"""A norm of the projected queries; the keys have one of the same kind."""
QK_GAINS = {"query": "query_gain", "key": "key_gain"}
"""Gains of a norm that a module which projects applies itself."""

CROSS = tuple(
    """
    encoder_attn EncDecAttention crossattention cross_attn cross_attention encoder_attention encoder_decoder_attention
    """.split()
)
"""What a part of a model is called that attends to another sequence."""
