"""tokens(embeddings=..., positions=...): which weights are multiplied, and how it combines with methods."""

import pytest
import timm
import torch
import transformers

from lab.helpers import same_state, tiny_bert, tiny_gpt2, tiny_vit
from wellcond.attention.slot import is_conditioned
from wellcond.errors import RecipeError
from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.build import build_model
from wellcond.lab.models.changes import scale_tokens_

BERT = {"bert.embeddings.word_embeddings.weight"}, {"bert.embeddings.position_embeddings.weight"}
SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}
XCIT = {"img_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 2, "cls_attn_layers": 1}
CRAMMED = {"layers": 1, "width": 8, "heads": 2, "feed_forward": 16, "vocab_size": 20, "length": 16}
LLAMA = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
LONG = {"length": 16, "landmarks": 4, "vocab_size": 20, "num_labels": 2, "width": 8, "feed_forward": 8}


def vit(name="vit_tiny_patch16_224", **arguments):
    return timm.create_model(name, **{"img_size": 32, "embed_dim": 8, "depth": 1, "num_heads": 2} | arguments)


def hf_vit():
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=32
    )
    return transformers.ViTForImageClassification(config)


MODELS = {
    "vit": (vit, {"patch_embed.proj.weight", "patch_embed.proj.bias"}, {"pos_embed", "cls_token"}),
    "deit, distilled": (
        lambda: vit("deit_tiny_distilled_patch16_224"),
        {"patch_embed.proj.weight", "patch_embed.proj.bias"},
        {"pos_embed", "cls_token", "dist_token"},
    ),
    "registers": (
        lambda: vit(reg_tokens=2),
        {"patch_embed.proj.weight", "patch_embed.proj.bias"},
        {"pos_embed", "cls_token", "reg_token"},
    ),
    "xcit": (
        lambda: timm.create_model("xcit_nano_12_p8_224", **XCIT),
        {"patch_embed.proj.4.1.weight", "patch_embed.proj.4.1.bias"},
        {"pos_embed.token_projection.weight", "pos_embed.token_projection.bias", "cls_token"},
    ),
    "gpt2": (lambda: tiny_gpt2(20, 16), {"transformer.wte.weight"}, {"transformer.wpe.weight"}),
    "bert": (lambda: tiny_bert(20), *BERT),
    "hf vit": (
        hf_vit,
        {"vit.embeddings.patch_embeddings.projection.weight", "vit.embeddings.patch_embeddings.projection.bias"},
        {"vit.embeddings.position_embeddings", "vit.embeddings.cls_token"},
    ),
    "crammed": (
        lambda: build_model("wellcond:crammed_bert", CRAMMED),
        {"encoder.embedding.word_embedding.weight"},
        {"encoder.embedding.pos_embedding.scale_factor"},
    ),
    "long range": (
        lambda: build_model("wellcond:long_range", LONG),
        {"word_embeddings.weight"},
        {"position_embeddings.weight"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_and_positions_are_multiplied_and_nothing_else(name):
    build, embeddings, positions = MODELS[name]
    model = build()
    before = {key: value.clone() for key, value in model.named_parameters()}
    assert set(scale_tokens_(model, {"embeddings": 3.0, "positions": 0.5})) == embeddings | positions
    for key, value in model.named_parameters():
        factor = 3.0 if key in embeddings else 0.5 if key in positions else 1.0
        assert torch.equal(value, factor * before[key]), key


@pytest.mark.parametrize("name", ["vit", "gpt2", "xcit", "hf vit"])
def test_the_tokens_of_the_first_block_grow_by_the_factor(name):
    model = MODELS[name][0]().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():  # as in training, none of them is negligible
            if "cls_token" in key:
                value.normal_()
    inputs = torch.arange(16)[None] if name == "gpt2" else torch.rand(1, 3, 32, 32)
    blocks = {"gpt2": "transformer.h.0", "hf vit": "vit.layers.0"}
    seen = []
    model.get_submodule(blocks.get(name, "blocks.0")).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(inputs)
        scale_tokens_(model, {"embeddings": 2.0, "positions": 2.0})
        model(inputs)
    torch.testing.assert_close(seen[1], 2 * seen[0])


def test_an_output_layer_that_is_tied_follows_the_words():
    model = tiny_gpt2(20, 16)
    before = model.lm_head.weight.clone()
    scale_tokens_(model, {"embeddings": 4.0})
    assert model.lm_head.weight is model.transformer.wte.weight and torch.equal(model.lm_head.weight, 4 * before)


def test_patches_under_a_norm_are_scaled_by_the_norm():
    model = timm.create_model("swin_tiny_patch4_window7_224", **SWIN)
    assert scale_tokens_(model, {"embeddings": 2.0}) == ["patch_embed.norm.weight", "patch_embed.norm.bias"]


@pytest.mark.parametrize(
    "build",
    [
        lambda: timm.create_model("swin_tiny_patch4_window7_224", **SWIN),
        lambda: build_model("hf:llama", LLAMA),
    ],
    ids=["swin", "llama"],
)
def test_positions_without_weights_are_refused_and_nothing_changes(build):
    model = build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(RecipeError, match="learned positions"):
        scale_tokens_(model, {"embeddings": 2.0, "positions": 2.0})
    assert same_state(model.state_dict(), before)


@pytest.mark.parametrize(
    "text", ["tokens(positions=25)+conditioned+balanced", "conditioned+balanced+tokens(positions=25)"]
)
def test_tokens_combine_with_an_initialisation_and_a_condition(text):
    def applied(text):
        torch.manual_seed(0)
        return MethodSettings.model_validate(text).apply_(tiny_vit(), seed=1)

    both, alone = applied(text), applied("conditioned+balanced")
    assert is_conditioned(both)
    for key, value in alone.named_parameters():
        factor = 25 if key in ("pos_embed", "cls_token") else 1
        assert torch.equal(both.get_parameter(key), factor * value), key


def test_the_text_is_canonical():
    method = MethodSettings.model_validate("tokens(positions=25.0, embeddings=2) + gaussian")
    assert (method.init, method.tokens, method.condition) == ("gaussian", {"embeddings": 2, "positions": 25}, None)
    assert method.canonical() == "tokens(embeddings=2, positions=25)+gaussian"
    assert MethodSettings(tokens={"positions": 25}).label == "tokens(positions=25)"
    assert MethodSettings(tokens={"positions": 1.0}).label == "default"
    assert MethodSettings.model_validate("tokens(positions=2)+default(library=true)").library


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens", "expected one tokens"),
        ("tokens(position=2)", "expected factors of embeddings and positions .*, found position=2"),
        ("tokens(positions=0)", "above 0 and at most 1e6, found positions=0"),
        ("tokens(positions=1e9)", "at most 1e6, found positions=1000000000"),
        ("token(positions=2)", "Did you mean 'tokens'"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        MethodSettings.model_validate(text)
