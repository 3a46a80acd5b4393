"""Modifiers: every word on a model that has it, the same family with the setting off, and what the forward shows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import timm
import torch
import transformers as tf
from torch import Tensor, nn

from contracts import cases_timm
from contracts.cases_hf import (
    BART,
    BERT,
    EXPERTS,
    LLAMA,
    SLIDING_THEN_FULL,
    SQUARE_LLAMA,
    VIT,
    WAVE,
    WITHOUT_WIDTH,
    make,
    qwen3_next,
    tokens,
)
from contracts.harness import heads_of, randomise_, watch
from wellcond.attention.families.table import (
    ATTENTION_SINKS,
    CLIPPED_QKV,
    EXTRA_KEYS,
    GATED_OUTPUT,
    LOGIT_SOFTCAP,
    OUTPUT_NORM,
    POOLED_QUERIES,
    POSITION_DEPENDENT_SCALE,
    QUERY_POSITION_TERM,
    SCALED_VALUES,
    SELECTED_KEYS,
    VALUE_CONVOLUTION,
    VOCABULARY,
)
from wellcond.attention.find import find_attention
from wellcond.attention.site import AttentionSite

SLIDING = SLIDING_THEN_FULL | {"sliding_window": 2}


def text(family: str, **values: Any) -> Callable[[], nn.Module]:
    """Build `<family>TextModel` from `<family>TextConfig`."""
    return lambda: getattr(tf, f"{family}TextModel")(getattr(tf, f"{family}TextConfig")(**values))


def kosmos() -> nn.Module:
    layers = {"vocab_size": 32, "embed_dim": 24, "layers": 1, "ffn_dim": 16, "attention_heads": 3}
    return tf.Kosmos2Model(tf.Kosmos2Config(text_config=layers, vision_config=VIT))


def hiera() -> nn.Module:
    patches = {"patch_size": [7, 7], "patch_stride": [4, 4], "patch_padding": [3, 3], "image_size": [32, 32]}
    config = tf.HieraConfig(
        **patches, embed_dim=8, depths=[1, 2], num_heads=[2, 2], query_stride=[2, 2], num_query_pool=1,
        masked_unit_size=[2, 2], masked_unit_attention=[True, False],
    )  # fmt: skip
    return tf.HieraModel(config)


def sam(use_rel_pos: bool) -> nn.Module:
    config = tf.SamVisionConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=16, patch_size=4, output_channels=8,
        window_size=2, global_attn_indexes=[1], use_rel_pos=use_rel_pos,
    )  # fmt: skip
    return tf.SamVisionModel(config)


def ministral3(beta: float | None) -> nn.Module:
    rope = {
        "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": beta,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    return tf.Ministral3Model(tf.Ministral3Config(**LLAMA, rope_parameters=rope, sliding_window=None))


def vit(**options: Any) -> Callable[[], nn.Module]:
    return partial(timm.create_model, "vit_tiny_patch16_224", num_classes=3, **cases_timm.VIT, **options)


def swin(window: int) -> Callable[[], nn.Module]:
    values = {"image_size": 16, "patch_size": 2, "embed_dim": 24, "depths": [1], "num_heads": [3]}
    return make("Swin", **values, window_size=window)


def mpt(clip: float | None) -> Callable[[], nn.Module]:
    return make("Mpt", vocab_size=32, d_model=24, n_heads=3, n_layers=1, max_seq_len=16, attn_config={"clip_qkv": clip})


def gpt_oss() -> nn.Module:
    return tf.GptOssModel(tf.GptOssConfig(**LLAMA, **SLIDING, **EXPERTS))


def mimo(**values: Any) -> Callable[[], nn.Module]:
    # Its sliding layers have twice as many key/value heads.
    layers = LLAMA | SLIDING | {"num_key_value_heads": 1, "v_head_dim": 4}
    return make("MiMoV2Flash", **layers, mlp_layer_types=["dense", "dense"], **values)


ROWS: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[str, ...]]]] = {
    "gpt-oss": (gpt_oss, {"layers.0": (ATTENTION_SINKS,), "layers.1": (ATTENTION_SINKS,)}),
    "mimo-v2-flash": (
        mimo(attention_value_scale=0.5),
        {"layers.0": (ATTENTION_SINKS, SCALED_VALUES), "layers.1": (SCALED_VALUES,)},
    ),
    "mimo-v2-flash, unscaled": (
        mimo(attention_value_scale=None), {"layers.0": (ATTENTION_SINKS,), "layers.1": ()}
    ),
    "mvp with prompts": (
        make("Mvp", **BART, use_prompt=True, prompt_length=2, prompt_mid_dim=8),
        {"encoder.layers.0.self_attn": (EXTRA_KEYS,), "decoder.layers.0.encoder_attn": (EXTRA_KEYS,)},
    ),
    "mvp": (make("Mvp", **BART), {"encoder.layers.0.self_attn": (), "decoder.layers.0.encoder_attn": ()}),
    "torch, learned key": (partial(nn.MultiheadAttention, 8, 2, add_bias_kv=True), {"": (EXTRA_KEYS,)}),
    "torch, zero key": (partial(nn.MultiheadAttention, 8, 2, add_zero_attn=True), {"": (EXTRA_KEYS,)}),
    "torch": (partial(nn.MultiheadAttention, 8, 2), {"": ()}),
    "mistral": (make("Mistral", **LLAMA, sliding_window=2), {"layers.1": ()}),
    "mistral, full": (make("Mistral", **LLAMA, sliding_window=None), {"layers.1": ()}),
    "qwen2": (
        make("Qwen2", **SQUARE_LLAMA, use_sliding_window=True, **SLIDING),
        {"layers.0": (), "layers.1": ()},
    ),
    "exaone4": (
        make("Exaone4", **LLAMA, **SLIDING, sliding_window_pattern="LG"),
        {"layers.0": (), "layers.1": ()},
    ),
    "swin": (swin(4), {"blocks.0": ()}),
    "big bird": (
        make("BigBird", **BERT, attention_type="block_sparse", block_size=4, num_random_blocks=1),
        {"layer.0": (SELECTED_KEYS,)},
    ),
    "big bird, full": (make("BigBird", **BERT, attention_type="original_full"), {"layer.0": ()}),
    "minimax m3": (
        text("MiniMaxM3VL", **LLAMA, layer_types=["minimax_m3_sparse", "full_attention"]),
        {"layers.0": (SELECTED_KEYS,), "layers.1": ()},
    ),
    "sam": (
        partial(sam, True), {"layers.0": (QUERY_POSITION_TERM,), "layers.1": (QUERY_POSITION_TERM,)}
    ),
    "sam, no positions": (partial(sam, False), {"layers.0": (), "layers.1": ()}),
    "wav2vec2 conformer": (
        make("Wav2Vec2Conformer", **WAVE, position_embeddings_type="relative"), {"layers.0": (QUERY_POSITION_TERM,)}
    ),
    "wav2vec2 conformer, rotary": (
        make("Wav2Vec2Conformer", **WAVE, position_embeddings_type="rotary"), {"layers.0": ()}
    ),
    "llama4": (
        text("Llama4", **LLAMA, **EXPERTS, no_rope_layers=[1, 0], attn_temperature_tuning=True),
        {"layers.0": (), "layers.1": (POSITION_DEPENDENT_SCALE,)},
    ),
    "llama4, untuned": (
        text("Llama4", **LLAMA, **EXPERTS, no_rope_layers=[1, 0], attn_temperature_tuning=False), {"layers.1": ()}
    ),
    "ministral3": (partial(ministral3, 0.1), {"layers.0": (POSITION_DEPENDENT_SCALE,)}),
    "ministral3, one scale": (partial(ministral3, None), {"layers.0": ()}),
    "gemma2": (
        make("Gemma2", **LLAMA, **SLIDING, attn_logit_softcapping=0.05),
        {"layers.0": (LOGIT_SOFTCAP,), "layers.1": (LOGIT_SOFTCAP,)},
    ),
    "gemma2, uncapped": (
        make("Gemma2", **LLAMA, **SLIDING, attn_logit_softcapping=None),
        {"layers.0": (), "layers.1": ()},
    ),
    # Its config has the cap, and its forward does not use it.
    "gemma3": (
        text("Gemma3", **LLAMA, **SLIDING, attn_logit_softcapping=0.05),
        {"layers.0": (), "layers.1": ()},
    ),
    "hiera": (
        hiera, {"stages.0.layers.0": (), "stages.1.layers.0": (POOLED_QUERIES,),
                "stages.1.layers.1": ()}
    ),
    "olmo": (make("Olmo", **WITHOUT_WIDTH, clip_qkv=0.05), {"layers.0": (CLIPPED_QKV,)}),
    "olmo, unclipped": (make("Olmo", **WITHOUT_WIDTH, clip_qkv=None), {"layers.0": ()}),
    "mpt": (mpt(0.05), {"blocks.0": (CLIPPED_QKV,)}),
    "mpt, unclipped": (mpt(None), {"blocks.0": ()}),
    "nystromformer": (
        make("Nystromformer", **BERT, num_landmarks=4, segment_means_seq_len=12), {"layer.0": (VALUE_CONVOLUTION,)}
    ),
    "bitnet": (make("BitNet", **WITHOUT_WIDTH), {"layers.0": (OUTPUT_NORM,)}),
    "kosmos2": (kosmos, {"text_model.model.layers.0": (OUTPUT_NORM,), "image_to_text_projection": ()}),
    "eva": (
        partial(timm.create_model, "eva02_tiny_patch14_224", scale_attn_inner=True, **cases_timm.ROPE),
        {"blocks.0": (OUTPUT_NORM,)},
    ),
    "vit, norm and gate": (
        partial(timm.layers.Attention, 12, num_heads=4, gated=True, scale_norm=True, norm_layer=nn.LayerNorm),
        {"": (OUTPUT_NORM, GATED_OUTPUT)},
    ),
    "vit, norm": (vit(scale_attn_norm=True), {"blocks.0": (OUTPUT_NORM,)}),
    "vit": (vit(), {"blocks.0": ()}),
    "qwen3-next": (qwen3_next, {"layers.0": (GATED_OUTPUT,)}),
    "beam": (
        make("Beam", **LLAMA), {"layers.0": (GATED_OUTPUT,),
                                "layers.1": (POSITION_DEPENDENT_SCALE, GATED_OUTPUT)}
    ),
}  # fmt: skip


def site_of(model: nn.Module, part: str) -> AttentionSite:
    return next(site for site in find_attention(model) if part in site.name)


@pytest.mark.parametrize("name", ROWS)
def test_modifiers_are_those_of_the_settings(name: str):
    build, expected = ROWS[name]
    model = build()
    assert {part: site_of(model, part).modifiers for part in expected} == expected


def test_every_word_is_set_somewhere_and_means_something():
    used = {word for _, sites in ROWS.values() for words in sites.values() for word in words}
    assert used == set(VOCABULARY)
    assert all(VOCABULARY.values())


@dataclass
class Seen:
    """One attention inside its model's forward, on six tokens."""

    site: AttentionSite
    tokens: Tensor
    logits: Tensor
    weights: Tensor
    before_output: Tensor


def see(name: str, part: str) -> Seen:
    torch.manual_seed(0)
    model = randomise_(ROWS[name][0]())
    site = site_of(model, part)
    read: list[Tensor] = []
    hook = site.o.owner.register_forward_pre_hook(lambda _, args: read.append(args[0].clone()))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = watch(site, lambda: model(**tokens()))
    hook.remove()
    x = call.args[0] if call.args else call.kwargs["hidden_states"]
    logits, weights = (side.reshape(-1, *side.shape[-2:]) for side in call.softmaxes[0])
    return Seen(site, x, logits, weights, read[0])


TEXT = [
    (name, part)
    for name in ("gpt-oss", "mimo-v2-flash", "mimo-v2-flash, unscaled", "mistral", "mistral, full", "qwen2", "exaone4",
                 "gemma2", "gemma2, uncapped", "gemma3", "olmo", "olmo, unclipped", "mpt", "mpt, unclipped", "bitnet",
                 "qwen3-next")
    for part in ROWS[name][1]
]  # fmt: skip


@pytest.mark.parametrize(("name", "part"), TEXT)
def test_modifiers_are_what_the_forward_shows(name: str, part: str):
    seen = see(name, part)
    words, num_tokens = set(seen.site.modifiers), seen.tokens.shape[1]
    assert seen.weights.shape[-1] - num_tokens == (ATTENTION_SINKS in words)
    if CLIPPED_QKV not in words:  # products of clipped queries and keys are small too
        # Of one query, over the keys it sees: a constant that is subtracted from all logits drops out.
        last, previous = seen.logits[:, -1, num_tokens - 1], seen.logits[:, -1, num_tokens - 2]
        is_capped = bool(((last - previous).abs() <= 2 * 0.05).all())
        assert is_capped == (LOGIT_SOFTCAP in words)
    # Heads reach W_O as they are unless a word says otherwise.
    heads = seen.weights[:, :, :num_tokens].double() @ heads_of(seen.site, "v", seen.tokens)
    found = seen.before_output.reshape(-1, seen.before_output.shape[-1])[:, seen.site.o.rows].transpose(0, 1)
    changing = {GATED_OUTPUT, OUTPUT_NORM, SCALED_VALUES, CLIPPED_QKV, VALUE_CONVOLUTION}
    assert torch.allclose(found, heads, rtol=1e-4, atol=1e-5) != bool(changing & words)
