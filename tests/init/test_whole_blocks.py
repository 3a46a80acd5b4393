"""Starts of whole blocks: small initialisation and T-Fixup."""

import math

import pytest
import timm
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import wellcond as wc
from wellcond.errors import WellcondError


def vit():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=96, depth=4, num_heads=3, num_classes=5)


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=96, n_layer=4, n_head=3, vocab_size=300, n_positions=32))


def seeded():
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize("make, mlp", [(vit, "blocks.2.mlp.fc2"), (gpt2, "transformer.h.2.mlp.c_proj")])
@pytest.mark.parametrize("gamma", [0.6, 1.0])
def test_small_draws_every_matrix_by_its_fan_in(make, mlp, gamma):
    model = wc.init_(make(), "small", gamma=gamma, generator=seeded())
    for site in wc.find_attention(model):
        for role in "qkv":
            assert site.slots[role].read().detach().std() == pytest.approx(96**-gamma, rel=0.05)
        assert site.o.read().detach().std() == pytest.approx(96**-gamma, rel=0.05)
    assert model.get_submodule(mlp).weight.detach().std() == pytest.approx(384**-gamma, rel=0.05)


def test_only_matrices_of_blocks_change():
    plain, model = vit(), wc.init_(vit(), "small", generator=seeded())
    changed = {name for name, value in model.named_parameters() if not value.equal(plain.get_parameter(name))}
    kinds = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
    assert changed == {f"blocks.{i}.{kind}" for i in range(4) for kind in kinds}


@pytest.mark.parametrize("make, mlp", [(vit, "blocks.2.mlp.fc1"), (gpt2, "transformer.h.2.mlp.c_fc")])
def test_t_fixup_shrinks_what_adds_to_the_stream(make, mlp):
    model = wc.init_(make(), "t_fixup", generator=seeded())
    shrink, xavier = 0.67 * 4**-0.25, math.sqrt(2 / (96 + 96))
    for site in wc.find_attention(model):
        for role, factor in (("q", 1), ("k", 1), ("v", shrink), ("o", shrink)):
            assert site.slots[role].read().detach().std() == pytest.approx(xavier * factor, rel=0.05)
    assert model.get_submodule(mlp).weight.detach().std() == pytest.approx(shrink * math.sqrt(2 / (96 + 384)), rel=0.05)


def test_t_fixup_draws_word_embeddings_and_leaves_patches():
    model = wc.init_(gpt2(), "t_fixup", generator=seeded())
    assert model.transformer.wte.weight.detach().std() == pytest.approx((9 * 4) ** -0.25 * 96**-0.5, rel=0.05)
    assert model.lm_head.weight is model.transformer.wte.weight
    plain, image_model = vit(), wc.init_(vit(), "t_fixup", generator=seeded())
    assert image_model.patch_embed.proj.weight.equal(plain.patch_embed.proj.weight)


@pytest.mark.parametrize("method", ["small", "t_fixup"])
def test_a_seed_gives_the_same_weights(method):
    first, second = (wc.init_(vit(), method, generator=seeded()) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("method", ["small", "t_fixup"])
def test_an_attention_in_no_list_of_blocks_is_refused(method):
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2)})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(WellcondError, match="stands in no list of blocks"):
        wc.init_(model, method)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
