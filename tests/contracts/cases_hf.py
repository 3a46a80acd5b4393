"""A tiny model per Hugging Face family, and the facts that its attention must have.

Head counts and widths are chosen so that no two arrangements of the rows coincide: 3 heads of 8, or 6 query heads over
2 key/value heads, and a model width that is not their product where the family allows it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import nn

NUM_TOKENS = 6
VOCABULARY = 32


@dataclass(frozen=True)
class Case:
    """A model, how to call it, and what is true of its sites; keys of `sites` are parts of their names."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    sites: dict[str, dict[str, Any]]
    heads: tuple[int, int, int] = (3, 3, 8)
    """Query heads, key/value heads, head width."""
    in_float32: bool = False
    """Its forward rounds queries, keys or logits to float32, whatever the dtype of the model."""


def tokens() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {"input_ids": torch.randint(5, VOCABULARY, (1, NUM_TOKENS), generator=generator)}


def twelve_tokens() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {"input_ids": torch.randint(5, VOCABULARY, (1, 12), generator=generator)}


def tokens_and_memory() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    return tokens() | {"encoder_hidden_states": torch.randn(1, 4, 24, generator=generator, dtype=torch.float64)}


def both_tokens() -> dict[str, Any]:
    return tokens() | {"decoder_input_ids": tokens()["input_ids"][:, :4]}


def image(size: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {"pixel_values": torch.randn(1, 3, size, size, generator=generator, dtype=torch.float64)}


def image_and_tokens() -> dict[str, Any]:
    return image() | tokens()


def speech() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(1, 4, 16, generator=generator, dtype=torch.float64)
    return {"input_features": features, "decoder_input_ids": tokens()["input_ids"]}


def waveform() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {"input_values": torch.randn(1, 24, generator=generator, dtype=torch.float64)}


def make(family: str, **values: Any) -> Callable[[], nn.Module]:
    """Build `<family>Model` from `<family>Config`; transformers loads the family's file only then."""

    def build() -> nn.Module:
        with warnings.catch_warnings():
            # GPT-BigCode scripts functions when its file is imported.
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
            return getattr(tf, f"{family}Model")(getattr(tf, f"{family}Config")(**values))

    return build


def facts(**given: Any) -> dict[str, Any]:
    usual = {
        "scale": 8**-0.5, "causal": False, "cross": False, "relative_position_bias": False, "qk_norm": None,
        "rotary": False, "kind": "softmax", "talking_heads": False, "modifiers": (),
    }  # fmt: skip
    return usual | given


BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 16, "max_position_embeddings": 32,
}  # fmt: skip
LLAMA = BERT | {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
SQUARE_LLAMA = LLAMA | {"hidden_size": 48}
VIT = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ROTARY = facts(causal=True, rotary=True)
GROUPED = (6, 2, 8)


def falcon(**values: Any) -> Callable[[], nn.Module]:
    shared = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    return make("Falcon", **shared, **SPECIAL, **values)


def t5_config() -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "d_model": 20, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 3}


T5_SITES = {
    "encoder.block.0": facts(scale=1.0, relative_position_bias=True),
    "decoder.block.0.layer.0": facts(scale=1.0, relative_position_bias=True, causal=True),
    "decoder.block.0.layer.1": facts(scale=1.0, cross=True),
}
ENCODER_DECODER_SITES = {
    "encoder.layers.0.self_attn": facts(),
    "decoder.layers.0.self_attn": facts(causal=True),
    "decoder.layers.0.encoder_attn": facts(cross=True),
}
WHISPER = {
    "vocab_size": VOCABULARY, "num_mel_bins": 4, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "max_source_positions": 8, "max_target_positions": 16, "decoder_start_token_id": 1, **SPECIAL,
}  # fmt: skip
BART = {k: v for k, v in WHISPER.items() if not k.startswith(("num_mel", "max_"))} | {"max_position_embeddings": 32}


def clip() -> nn.Module:
    tower = {"hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 3}
    text = tower | {"vocab_size": VOCABULARY, "max_position_embeddings": 16, **SPECIAL}
    return tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=tower | {"image_size": 8, "patch_size": 4}))


def swin() -> nn.Module:
    config = tf.SwinConfig(image_size=16, patch_size=2, embed_dim=24, depths=[2], num_heads=[3], window_size=4)
    return tf.SwinModel(config)


def qwen3_next() -> nn.Module:
    config = tf.Qwen3NextConfig(
        **LLAMA, layer_types=["full_attention", "full_attention"], num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=8, shared_expert_intermediate_size=8, partial_rotary_factor=0.5,
        experts_implementation="eager",
    )  # fmt: skip
    return tf.Qwen3NextModel(config)


CASES = [
    Case("bert", make("Bert", **BERT), tokens, {"layer.0": facts()}),
    Case(
        "bert-decoder",
        make("Bert", **BERT, is_decoder=True, add_cross_attention=True),
        tokens_and_memory,
        {"layer.0.attention": facts(causal=True), "layer.0.crossattention": facts(cross=True)},
    ),
    Case("roberta", make("Roberta", **BERT), tokens, {"layer.0": facts()}),
    Case(
        "distilbert",
        make("DistilBert", vocab_size=VOCABULARY, dim=24, n_layers=2, n_heads=3, hidden_dim=16),
        tokens,
        {"layer.0": facts()},
    ),
    Case(
        "modernbert",
        make("ModernBert", **BERT, **SPECIAL, cls_token_id=1, sep_token_id=2),
        tokens,
        {"layers.0": facts(rotary=True), "layers.1": facts(rotary=True)},
        in_float32=True),
    Case(
        "nystromformer",
        make("Nystromformer", **BERT, num_landmarks=4, segment_means_seq_len=12),
        twelve_tokens,
        {"layer.0": facts(kind="nystrom", modifiers=("value convolution",))},
    ),
    Case("vit", make("ViT", **VIT), image, {"layers.0": facts()}),
    Case("swin", swin, lambda: image(16), {"blocks.0": facts(relative_position_bias=True)}),
    Case(
        "clip",
        clip,
        image_and_tokens,
        {"text_model.encoder.layers.0": facts(causal=True), "vision_model.encoder.layers.0": facts()},
    ),
    Case(
        "gpt2",
        make("GPT2", **GPT2),
        tokens,
        {"h.0": facts(causal=True), "h.1": facts(causal=True)},

    ),
    Case(
        "gpt2-scaled-by-layer",
        make("GPT2", **GPT2, scale_attn_by_inverse_layer_idx=True),
        tokens,
        {"h.0": facts(causal=True), "h.1": facts(causal=True, scale=8**-0.5 / 2)},

    ),
    Case(
        "gpt2-unscaled",
        make("GPT2", **GPT2, scale_attn_weights=False),
        tokens,
        {"h.0": facts(causal=True, scale=1.0)},

    ),
    Case(
        "gpt2-cross",
        make("GPT2", **GPT2, add_cross_attention=True),
        tokens_and_memory,
        {"h.0.crossattention": facts(cross=True)},

    ),
    Case(
        "gpt-neo",
        make("GPTNeo", vocab_size=VOCABULARY, hidden_size=24, num_layers=2, num_heads=3,
            attention_types=[[["global", "local"], 1]], window_size=2, max_position_embeddings=16, **SPECIAL,
        ),
        tokens,
        {"h.0": facts(causal=True, scale=1.0), "h.1": facts(causal=True, scale=1.0)},
        in_float32=True),
    Case(
        "gpt-neox",
        make("GPTNeoX", **BERT),
        tokens,
        {"layers.0": ROTARY},

    ),
    Case(
        "opt",
        make("OPT", vocab_size=VOCABULARY, hidden_size=24, word_embed_proj_dim=24, ffn_dim=16,
            num_hidden_layers=2, num_attention_heads=3, max_position_embeddings=16, **SPECIAL,
        ),
        tokens,
        {"layers.0": facts(causal=True)},
    ),
    Case(
        "bloom",
        make("Bloom", vocab_size=VOCABULARY, hidden_size=24, n_layer=2, n_head=3),
        tokens,
        {"h.0": facts(causal=True, relative_position_bias=True)},
        in_float32=True),
    Case(
        "falcon-new",
        falcon(new_decoder_architecture=True, num_kv_heads=2),
        tokens,
        {"h.0": ROTARY},
        heads=GROUPED,

    ),
    Case(
        "falcon-multi-query",
        falcon(multi_query=True, new_decoder_architecture=False),
        tokens,
        {"h.0": ROTARY},
        heads=(6, 1, 8),

    ),
    Case(
        "falcon-old-alibi",
        falcon(multi_query=False, new_decoder_architecture=False, alibi=True),
        tokens,
        {"h.0": facts(causal=True, relative_position_bias=True)},
        heads=(6, 6, 8),

    ),
    Case("llama", make("Llama", **LLAMA), tokens, {"layers.0": ROTARY}, heads=GROUPED),
    Case("mistral", make("Mistral", **LLAMA), tokens, {"layers.0": ROTARY}, heads=GROUPED),
    Case("qwen2", make("Qwen2", **SQUARE_LLAMA), tokens, {"layers.0": ROTARY}, heads=GROUPED),
    Case(
        "qwen3",
        make("Qwen3", **LLAMA),
        tokens,
        {"layers.0": facts(causal=True, rotary=True, qk_norm="rms")},
        heads=GROUPED,
    ),
    Case(
        "qwen3-next",
        qwen3_next,
        tokens,
        {"layers.0": facts(causal=True, rotary=True, qk_norm="rms", modifiers=("gated output",))},
        heads=GROUPED,

    ),
    Case(
        "phi3",
        make("Phi3", **SQUARE_LLAMA | SPECIAL),
        tokens,
        {"layers.0": ROTARY},
        heads=GROUPED,

    ),
    Case("t5", make("T5", **t5_config()), both_tokens, T5_SITES),
    Case("whisper", make("Whisper", **WHISPER), speech, ENCODER_DECODER_SITES),
    Case("bart", make("Bart", **BART), both_tokens, ENCODER_DECODER_SITES),
    Case(
        "codegen",
        make("CodeGen", vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=8, rotary_dim=4,
            n_positions=32, n_ctx=32,
        ),
        tokens,
        {"h.0": ROTARY},
        heads=(8, 8, 8),
        in_float32=True),
    Case(
        "gpt-bigcode",
        make("GPTBigCode", **GPT2),
        tokens,
        {"h.0": facts(causal=True)},
        heads=(3, 1, 8),

    ),
    Case(
        "gpt-bigcode-multi-head",
        make("GPTBigCode", **GPT2, multi_query=False),
        tokens,
        {"h.0": facts(causal=True)},

    ),
    Case(
        "mpt",
        make("Mpt", vocab_size=VOCABULARY, d_model=24, n_heads=3, n_layers=2, max_seq_len=16),
        tokens,
        {"blocks.0": facts(causal=True, relative_position_bias=True)},
        in_float32=True),
    Case(
        "gptj",
        make("GPTJ", **GPT2, rotary_dim=4),
        tokens,
        {"h.0": ROTARY}, in_float32=True),
    Case(
        "persimmon",
        make("Persimmon", **BERT, qk_layernorm=False),
        tokens,
        {"layers.0": ROTARY},

    ),
    Case(
        "gemma2",
        make("Gemma2", **LLAMA, attn_logit_softcapping=0.05),
        tokens,
        {"layers.0": facts(causal=True, rotary=True, scale=None, modifiers=("logit softcap",))},
        heads=GROUPED, in_float32=True),
    Case(
        "cohere2",
        make("Cohere2", **{k: v for k, v in SQUARE_LLAMA.items() if k != "head_dim"},
            layer_types=["sliding_attention", "full_attention"], sliding_window=4,
        ),
        tokens,
        {"layers.0": ROTARY, "layers.1": facts(causal=True)},
        heads=GROUPED, in_float32=True),
    Case(
        "gpt-oss",
        make("GptOss", **LLAMA, num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager"),
        tokens,
        # YaRN multiplies queries and keys by 0.1 log(32) + 1.
        {"layers.0": ROTARY | {"scale": 8**-0.5 * (0.1 * math.log(32) + 1) ** 2,
                               "modifiers": ("attention sinks",)}},
        heads=GROUPED, in_float32=True),
    Case("esm", make("Esm", **BERT, **SPECIAL, position_embedding_type="rotary", mask_token_id=3),
         tokens, {"layer.0": facts(rotary=True)}, in_float32=True),
    Case(
        "olmo2",
        make("Olmo2", **{k: v for k, v in SQUARE_LLAMA.items() if k != "head_dim"}),
        tokens,
        {"layers.0": facts(causal=True, rotary=True, qk_norm="rms")},
        heads=GROUPED,
    ),
    Case(
        "openai-gpt",
        make("OpenAIGPT", **GPT2),
        tokens,
        {"h.0": facts(causal=True)},

    ),
    Case(
        "imagegpt",
        make("ImageGPT", **GPT2),
        tokens,
        {"h.0": facts(causal=True)},

    ),
    Case("beit", make("Beit", **VIT, use_relative_position_bias=True), image,
         {"layer": facts(relative_position_bias=True)}),
    Case("siglip-vision", make("SiglipVision", **VIT), image, {"layers.0": facts()}),
    Case("wav2vec2", make("Wav2Vec2", **{k: v for k, v in BERT.items() if k != "max_position_embeddings"},
                          conv_dim=[8], conv_kernel=[4], conv_stride=[4], num_feat_extract_layers=1,
                          num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2), waveform, {"layers.0": facts()}),
    Case("albert", make("Albert", **BERT, embedding_size=12), tokens, {"albert_layers": facts()}),
]  # fmt: skip
