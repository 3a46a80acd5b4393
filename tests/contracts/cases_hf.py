"""A tiny model per Hugging Face family, and the facts that its attention must have.

Head counts and widths are chosen so that no two arrangements of the rows coincide: 3 heads of 8, or 6 query heads over
2 key/value heads, and a model width that is not their product where the family allows it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

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
    # What `harness.Seen` asks of a family of timm.
    token_dims: ClassVar[int] = 1
    reader: ClassVar[None] = None
    regroup: ClassVar[None] = None

    def run(self, model: nn.Module) -> Any:
        return model(**self.inputs())

    def chosen(self, sites: list[Any]) -> list[Any]:
        return [next(site for site in sites if part in site.name) for part in self.sites]


def tokens(count: int = NUM_TOKENS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {"input_ids": torch.randint(5, VOCABULARY, (1, count), generator=generator)}


def twelve_tokens() -> dict[str, Any]:
    return tokens(12)


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


def falcon(**values: Any) -> dict[str, Any]:
    shared = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    return {"new_decoder_architecture": False} | shared | SPECIAL | values


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


CAUSAL = facts(causal=True)
BIASED = facts(relative_position_bias=True)
ALIBI = facts(causal=True, relative_position_bias=True)
NORMED = facts(causal=True, rotary=True, qk_norm="rms")
WITHOUT_POSITIONS = {key: value for key, value in BERT.items() if key != "max_position_embeddings"}
WITHOUT_WIDTH = {key: value for key, value in SQUARE_LLAMA.items() if key != "head_dim"}
SLIDING_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
WAVE = WITHOUT_POSITIONS | {
    "conv_dim": [8], "conv_kernel": [4], "conv_stride": [4], "num_feat_extract_layers": 1,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
GPT_NEO = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_layers": 2, "num_heads": 3, "window_size": 2,
    "max_position_embeddings": 16, "attention_types": [[["global", "local"], 1]],
}  # fmt: skip
OPT = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "word_embed_proj_dim": 24, "ffn_dim": 16, "num_hidden_layers": 2,
    "num_attention_heads": 3, "max_position_embeddings": 16,
}  # fmt: skip
CODEGEN = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 8, "rotary_dim": 4, "n_positions": 32}
# YaRN multiplies queries and keys by 0.1 log(32) + 1.
GPT_OSS = ROTARY | {"scale": 8**-0.5 * (0.1 * math.log(32) + 1) ** 2, "modifiers": ("attention sinks",)}


def text(name: str, family: str, values: dict[str, Any], sites: dict[str, dict[str, Any]], **options: Any) -> Case:
    """A model that reads tokens."""
    return Case(name, make(family, **values), tokens, sites, **options)


CASES = [
    text("bert", "Bert", BERT, {"layer.0": facts()}),
    Case(
        "bert-decoder",
        make("Bert", **BERT, is_decoder=True, add_cross_attention=True),
        tokens_and_memory,
        {"layer.0.attention": CAUSAL, "layer.0.crossattention": facts(cross=True)},
    ),
    text("roberta", "Roberta", BERT, {"layer.0": facts()}),
    text(
        "distilbert",
        "DistilBert",
        {"vocab_size": VOCABULARY, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 16},
        {"layer.0": facts()},
    ),
    text(
        "modernbert",
        "ModernBert",
        BERT | SPECIAL | {"cls_token_id": 1, "sep_token_id": 2},
        {"layers.0": facts(rotary=True), "layers.1": facts(rotary=True)},
        in_float32=True,
    ),
    Case(
        "nystromformer",
        make("Nystromformer", **BERT, num_landmarks=4, segment_means_seq_len=12),
        twelve_tokens,
        {"layer.0": facts(kind="nystrom", modifiers=("value convolution",))},
    ),
    Case("vit", make("ViT", **VIT), image, {"layers.0": facts()}),
    Case("swin", swin, lambda: image(16), {"blocks.0": BIASED}),
    Case(
        "clip",
        clip,
        image_and_tokens,
        {"text_model.encoder.layers.0": CAUSAL, "vision_model.encoder.layers.0": facts()},
    ),
    text("gpt2", "GPT2", GPT2, {"h.0": CAUSAL, "h.1": CAUSAL}),
    text(
        "gpt2-scaled-by-layer",
        "GPT2",
        GPT2 | {"scale_attn_by_inverse_layer_idx": True},
        {"h.0": CAUSAL, "h.1": facts(causal=True, scale=8**-0.5 / 2)},
    ),
    text("gpt2-unscaled", "GPT2", GPT2 | {"scale_attn_weights": False}, {"h.0": facts(causal=True, scale=1.0)}),
    Case(
        "gpt2-cross",
        make("GPT2", **GPT2, add_cross_attention=True),
        tokens_and_memory,
        {"h.0.crossattention": facts(cross=True)},
    ),
    text(
        "gpt-neo",
        "GPTNeo",
        GPT_NEO | SPECIAL,
        {"h.0": facts(causal=True, scale=1.0), "h.1": facts(causal=True, scale=1.0)},
        in_float32=True,
    ),
    text("gpt-neox", "GPTNeoX", BERT, {"layers.0": ROTARY}),
    text("opt", "OPT", OPT | SPECIAL, {"layers.0": CAUSAL}),
    text(
        "bloom",
        "Bloom",
        {"vocab_size": VOCABULARY, "hidden_size": 24, "n_layer": 2, "n_head": 3},
        {"h.0": ALIBI},
        in_float32=True,
    ),
    text("falcon-new", "Falcon", falcon(new_decoder_architecture=True, num_kv_heads=2), {"h.0": ROTARY}, heads=GROUPED),
    text("falcon-multi-query", "Falcon", falcon(multi_query=True), {"h.0": ROTARY}, heads=(6, 1, 8)),
    text("falcon-old-alibi", "Falcon", falcon(multi_query=False, alibi=True), {"h.0": ALIBI}, heads=(6, 6, 8)),
    text("llama", "Llama", LLAMA, {"layers.0": ROTARY}, heads=GROUPED),
    text("mistral", "Mistral", LLAMA, {"layers.0": ROTARY}, heads=GROUPED),
    text("qwen2", "Qwen2", SQUARE_LLAMA, {"layers.0": ROTARY}, heads=GROUPED),
    text("qwen3", "Qwen3", LLAMA, {"layers.0": NORMED}, heads=GROUPED),
    Case("qwen3-next", qwen3_next, tokens, {"layers.0": NORMED | {"modifiers": ("gated output",)}}, heads=GROUPED),
    text("phi3", "Phi3", SQUARE_LLAMA | SPECIAL, {"layers.0": ROTARY}, heads=GROUPED),
    Case("t5", make("T5", **t5_config()), both_tokens, T5_SITES),
    Case("whisper", make("Whisper", **WHISPER), speech, ENCODER_DECODER_SITES),
    Case("bart", make("Bart", **BART), both_tokens, ENCODER_DECODER_SITES),
    text("codegen", "CodeGen", CODEGEN | {"n_ctx": 32}, {"h.0": ROTARY}, heads=(8, 8, 8), in_float32=True),
    text("gpt-bigcode", "GPTBigCode", GPT2, {"h.0": CAUSAL}, heads=(3, 1, 8)),
    text("gpt-bigcode-multi-head", "GPTBigCode", GPT2 | {"multi_query": False}, {"h.0": CAUSAL}),
    text(
        "mpt",
        "Mpt",
        {"vocab_size": VOCABULARY, "d_model": 24, "n_heads": 3, "n_layers": 2, "max_seq_len": 16},
        {"blocks.0": ALIBI},
        in_float32=True,
    ),
    text("gptj", "GPTJ", GPT2 | {"rotary_dim": 4}, {"h.0": ROTARY}, in_float32=True),
    text("persimmon", "Persimmon", BERT | {"qk_layernorm": False}, {"layers.0": ROTARY}),
    text(
        "gemma2",
        "Gemma2",
        LLAMA | {"attn_logit_softcapping": 0.05},
        {"layers.0": facts(causal=True, rotary=True, scale=None, modifiers=("logit softcap",))},
        heads=GROUPED,
        in_float32=True,
    ),
    text(
        "cohere2",
        "Cohere2",
        WITHOUT_WIDTH | SLIDING_THEN_FULL | {"sliding_window": 4},
        {"layers.0": ROTARY, "layers.1": CAUSAL},
        heads=GROUPED,
        in_float32=True,
    ),
    text("gpt-oss", "GptOss", LLAMA | EXPERTS, {"layers.0": GPT_OSS}, heads=GROUPED, in_float32=True),
    text(
        "esm",
        "Esm",
        BERT | SPECIAL | {"position_embedding_type": "rotary", "mask_token_id": 3},
        {"layer.0": facts(rotary=True)},
        in_float32=True,
    ),
    text("olmo2", "Olmo2", WITHOUT_WIDTH, {"layers.0": NORMED}, heads=GROUPED),
    text("openai-gpt", "OpenAIGPT", GPT2, {"h.0": CAUSAL}),
    text("imagegpt", "ImageGPT", GPT2, {"h.0": CAUSAL}),
    Case("beit", make("Beit", **VIT, use_relative_position_bias=True), image, {"layer": BIASED}),
    Case("siglip-vision", make("SiglipVision", **VIT), image, {"layers.0": facts()}),
    Case("wav2vec2", make("Wav2Vec2", **WAVE), waveform, {"layers.0": facts()}),
    text("albert", "Albert", BERT | {"embedding_size": 12}, {"albert_layers": facts()}),
]
