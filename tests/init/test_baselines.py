"""The model's own initialisation, and those that others have proposed."""

import math

import pytest
import timm
import torch
from torch import nn
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, GPT2Model
from transformers.models.bert.modeling_bert import BertSelfAttention

import wellcond as wc
from init.helpers import generator, tiny_vit
from models import unchanged
from wellcond.errors import UnsupportedLayoutError, WellcondError


def test_default_reruns_the_family():
    model = tiny_vit(embed_dim=96)
    wc.init_(model, "conditioned")
    torch.nn.init.ones_(model.blocks[0].attn.qkv.bias)
    head = model.head.weight.clone()
    wc.init_(model, "default", generator=generator())
    assert model.blocks[0].attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(model.blocks[0].attn.qkv.bias, torch.zeros(288))
    assert torch.equal(model.head.weight, head)
    wc.init_(model, "default", rule="torch")
    assert model.blocks[0].attn.qkv.weight.abs().max().item() <= 96**-0.5
    assert model.blocks[0].attn.qkv.weight.std().item() == pytest.approx((3 * 96) ** -0.5, rel=0.05)


def test_default_on_hugging_face_and_torch():
    gpt = GPT2Model(GPT2Config(n_embd=96, n_head=3, n_layer=2, vocab_size=11, n_positions=16))
    for options, std in (({}, 0.02), ({"rule": "torch"}, (3 * 96) ** -0.5)):
        wc.init_(gpt, "gaussian", std=1.0)
        wc.init_(gpt, "default", generator=generator(), **options)
        assert gpt.h[0].attn.c_attn.weight.std().item() == pytest.approx(std, rel=0.05)
    mha = nn.MultiheadAttention(64, 2)
    wc.init_(mha, "conditioned")
    wc.init_(mha, "default", generator=generator())
    # Xavier uniform on the fused (3D, D) weight; the parts are reset before the whole.
    assert mha.in_proj_weight.std().item() == pytest.approx((2 / (4 * 64)) ** 0.5, rel=0.05)
    assert torch.equal(mha.out_proj.bias, torch.zeros(64))
    wc.init_(mha, "default", rule="torch", generator=generator())
    assert mha.in_proj_weight.abs().max() <= 1 / 8 and mha.in_proj_weight.std().item() == pytest.approx(0.072, rel=0.05)


@pytest.mark.parametrize("rule", ["family", "torch"])
def test_the_default_draws_from_no_device_and_not_from_the_global_generator(rule, monkeypatch):
    seeded = []
    for name in ("manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, seeded.append)
    monkeypatch.setattr(torch.mps, "manual_seed", seeded.append)
    monkeypatch.setattr(torch.xpu, "manual_seed_all", seeded.append)
    model = nn.MultiheadAttention(8, 2)
    before = torch.get_rng_state()
    wc.init_(model, "default", rule=rule, generator=torch.Generator().manual_seed(3))
    assert not seeded and torch.equal(torch.get_rng_state(), before)
    first = model.in_proj_weight.clone()
    wc.init_(model, "default", rule=rule, generator=torch.Generator().manual_seed(3))
    assert torch.equal(first, model.in_proj_weight)


@pytest.mark.parametrize(("distribution", "largest"), [("uniform", (3 / 24) ** 0.5), ("normal", None)])
def test_queries_keys_and_values_have_unit_scale_and_the_output_is_zero(distribution, largest):
    model = tiny_vit()
    others = {
        name: value.clone()
        for name, value in model.named_parameters()
        if not name.endswith(("attn.qkv.weight", "attn.proj.weight"))
    }
    wc.init_(model, "nanochat", distribution=distribution, generator=generator())
    for site in wc.find_attention(model):
        for role in "qkv":
            heads = site.slots[role].read().detach()
            assert float(heads.std()) == pytest.approx(24**-0.5, rel=0.1)
            assert largest is None or float(heads.abs().max()) <= largest * (1 + 1e-6)
        assert not torch.equal(site.q.read(), site.k.read())
        assert not site.o.read().any()
    assert all(torch.equal(value, others[name]) for name, value in model.named_parameters() if name in others)


def test_the_attention_adds_nothing_at_step_0_but_learns():
    model = wc.init_(tiny_vit(), "nanochat", generator=generator())
    attention = model.blocks[0].attn
    tokens = torch.randn(2, 5, 24)
    attention(tokens).sum().backward()
    assert torch.equal(attention(tokens), attention.proj.bias.expand(2, 5, 24))
    assert attention.proj.weight.grad.norm() > 0


def test_an_attention_without_an_output_projection_is_refused_and_nothing_changes():
    config = BertConfig(hidden_size=24, num_attention_heads=3)
    model = nn.ModuleList([tiny_vit(), BertSelfAttention(config)])
    with unchanged(model), pytest.raises(UnsupportedLayoutError, match="W_O"):
        wc.init_(model, "nanochat")


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


@pytest.mark.parametrize("method", ["small", "t_fixup"])
def test_an_attention_in_no_list_of_blocks_is_refused(method):
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2)})
    with unchanged(model), pytest.raises(WellcondError, match="stands in no list of blocks"):
        wc.init_(model, method)
