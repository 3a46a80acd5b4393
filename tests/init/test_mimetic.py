"""Mimetic initialisations: products of weights, and values and outputs alone."""

import pytest
import timm
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

import wellcond as wc
from init.helpers import first, generator, tiny_vit
from models import XTransformersAttention, unchanged
from wellcond.init.tokens import sincos_2d


def test_mimetic_products():
    # experiments.md 1.3, check values at D = 192, d = 64.
    model = timm.models.VisionTransformer(img_size=16, patch_size=4, embed_dim=192, depth=1, num_heads=3)
    wc.init_(model, "mimetic", generator=generator())
    site = first(model)
    q, k = site.q.read().double(), site.k.read().double()
    assert wc.spectrum(q[0]).condition_number == pytest.approx(1.28, abs=0.03)
    assert wc.spectrum(q[0]).sigma_max == pytest.approx(1.35, abs=0.03)
    assert torch.einsum("hdc,hdc->h", q, k).div(192).tolist() == pytest.approx([0.40] * 3, abs=0.02)
    w_v = site.v.read().reshape(192, 192).T.double()
    w_o = model.blocks[0].attn.proj.weight.T.double()
    product = w_v @ w_o
    noise = product + 0.4 * torch.eye(192)
    # W_V W_O = 0.4 Z - 0.4 I with Z uniform within sqrt(3 / D): nothing may lie beyond.
    assert noise.abs().max().item() == pytest.approx(0.4 * (3 / 192) ** 0.5, rel=1e-3)
    assert noise.std().item() * 192**0.5 == pytest.approx(0.4, rel=0.02)


def test_mimetic_released_transposes_lose_the_product():
    model = timm.models.VisionTransformer(img_size=16, patch_size=4, embed_dim=192, depth=1, num_heads=3)
    wc.init_(model, "mimetic", transposes="released", generator=generator())
    w_v, w_o = first(model).v.read().reshape(192, 192).T, model.blocks[0].attn.proj.weight.T
    product = (w_v @ w_o).detach()
    off = product - product.diag().diag()
    assert product.diag().mean().item() == pytest.approx(-0.398, abs=0.02)
    assert off.std().item() * 192**0.5 == pytest.approx(0.278, abs=0.02)


def test_mimetic_position_embedding():
    model = tiny_vit()
    wc.init_(model, "mimetic", position="sincos2d")
    assert torch.equal(model.pos_embed[0, 0], torch.zeros(24))
    torch.testing.assert_close(model.pos_embed[0, 1:].double(), sincos_2d(4, 4, 24), rtol=0, atol=1e-6)
    # Patch (row 1, column 2): [sin x, cos x, sin y, cos y], omega_j = 1e4^(-j / (D/4 - 1)).
    omega = 1e4 ** (-torch.arange(6) / 5)
    expected = torch.cat([(2 * omega).sin(), (2 * omega).cos(), omega.sin(), omega.cos()])
    torch.testing.assert_close(model.pos_embed[0, 1 + 4 + 2].detach(), expected)

    gpt = GPT2Model(GPT2Config(n_embd=24, n_head=3, n_layer=1, vocab_size=11, n_positions=16))
    wc.init_(gpt, "mimetic", position="sincos1d")
    assert gpt.wpe.weight[0].tolist() == [0.0] * 12 + [1.0] * 12
    with pytest.raises(wc.WeightError, match="position='sincos2d' needs"):
        wc.init_(gpt, "mimetic", position="sincos2d")


@pytest.mark.parametrize("method", ["mimetic", "mimetic_vo"])
def test_grouped_queries_are_refused_and_nothing_changes(method):
    model = XTransformersAttention(heads=4, kv_heads=2)
    with unchanged(model), pytest.raises(wc.UnsupportedLayoutError, match="4 query heads share 2"):
        wc.init_(model, method)


def published(w_v, w_o, num_heads, head_dim, beta=0.05, noise_std=0.01):
    """Stored W_V and W_O as modded-nanogpt's pull request 214 describes them: own blocks replaced, noise on all."""
    w_v, w_o = w_v.clone(), w_o.clone()
    for h in range(num_heads):
        own = slice(h * head_dim, (h + 1) * head_dim)
        w_v[own, own] = beta**0.5 * torch.eye(head_dim)
        w_o[own, own] = -(beta**0.5) * torch.eye(head_dim)
    return w_v, w_o


@pytest.mark.parametrize("rest", ["keep", "zero"])
def test_values_and_outputs_are_the_published_blocks(rest):
    model = nn.MultiheadAttention(24, 3)
    q, k, v = (part.clone() for part in model.in_proj_weight.detach().chunk(3))
    o = model.out_proj.weight.detach().clone()
    wc.init_(model, "mimetic_vo", noise=0.0, rest=rest)
    keep = rest == "keep"
    expected_v, expected_o = published(v * keep, o * keep, 3, 8)
    now = model.in_proj_weight.detach().chunk(3)
    assert torch.equal(now[0], q) and torch.equal(now[1], k)
    torch.testing.assert_close(now[2], expected_v)
    torch.testing.assert_close(model.out_proj.weight.detach(), expected_o)


def test_each_head_takes_beta_times_its_own_coordinates_away():
    torch.manual_seed(0)
    model = wc.init_(nn.MultiheadAttention(24, 3, batch_first=True), "mimetic_vo", beta=0.2, noise=0.0, rest="zero")
    x = torch.randn(2, 5, 24)
    mixed, maps = model(x, x, x, average_attn_weights=False)
    expected = torch.cat([-0.2 * maps[:, h] @ x[..., 8 * h : 8 * h + 8] for h in range(3)], -1)
    torch.testing.assert_close(mixed, expected)


def test_the_noise_is_on_every_entry_and_of_the_asked_size():
    model = wc.init_(nn.MultiheadAttention(96, 3), "mimetic_vo", rest="zero", generator=generator())
    plain = wc.init_(nn.MultiheadAttention(96, 3), "mimetic_vo", rest="zero", noise=0.0)
    for role in "vo":
        drawn = (first(model).slots[role].read() - first(plain).slots[role].read()).detach()
        assert drawn.std().item() == pytest.approx(0.01, rel=0.05) and bool(drawn.ne(0).all())
    assert not torch.equal(first(model).v.read(), -first(model).o.read().mT)


def test_queries_and_keys_as_mimetic_sets_them():
    one = wc.init_(tiny_vit(), "mimetic", generator=generator(2))
    two = wc.init_(tiny_vit(), "mimetic_vo", qk="mimetic", generator=generator(2))
    for role in "qk":
        assert torch.equal(first(one).slots[role].read(), first(two).slots[role].read())
