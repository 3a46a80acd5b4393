"""`conditioned` and its controls, tied keys, and the warning of W_V at scale 1 under a causal mask."""

import math
import warnings
from dataclasses import replace

import pytest
import timm
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

import wellcond as wc
from init.helpers import assert_semi_orthogonal, first, generator, tiny_vit
from models import NanoGPTAttention, XTransformersAttention, unchanged
from wellcond.init.conditioned import own_token_scale
from wellcond.lab.methods import MethodSettings
from wellcond.linalg.spectrum import singular_values


def test_conditioned_is_paper_c():
    model = tiny_vit()
    others = {n: p.clone() for n, p in model.named_parameters() if "qkv.weight" not in n}
    wc.init_(model, "conditioned", generator=generator())
    for site in wc.find_attention(model):
        assert_semi_orthogonal(site.q.read())
        assert_semi_orthogonal(site.k.read())
        # W_V^T is the d x D identity, the same in every head.
        assert torch.equal(site.v.read(), torch.eye(8, 24).expand(3, 8, 24))
        assert not torch.allclose(site.q.read()[0], site.q.read()[1]) and not torch.allclose(
            site.q.read(), site.k.read()
        )
    assert all(torch.equal(p, others[n]) for n, p in model.named_parameters() if n in others)


@pytest.mark.parametrize("orthogonal", ["svd", "qr"])
def test_conditioned_options(orthogonal):
    model = tiny_vit()
    wc.init_(model, "conditioned", orthogonal=orthogonal, value="joint", value_scale=0.5, output="identity")
    site = first(model)
    assert_semi_orthogonal(site.q.read())
    torch.testing.assert_close(site.v.read().reshape(24, 24), 0.5 * torch.eye(24))
    assert torch.equal(site.module.proj.weight, torch.eye(24))

    wc.init_(model, "conditioned", value="orthogonal", output=True, heads="joint", orthogonal=orthogonal)
    assert_semi_orthogonal(first(model).v.read().reshape(1, 24, 24))
    assert_semi_orthogonal(site.module.proj.weight[None])
    site = first(wc.init_(tiny_vit(), "orthogonal", orthogonal=orthogonal))
    for role in "qkv":
        assert_semi_orthogonal(site.slots[role].read())


def test_match_norm_keeps_the_frobenius_norm_of_every_head():
    model = tiny_vit()
    norms = [slot.read().flatten(1).norm(dim=1) for slot in (first(model).q, first(model).v)]
    wc.init_(model, "conditioned", match_norm=True)
    for slot, norm in zip((first(model).q, first(model).v), norms, strict=True):
        torch.testing.assert_close(slot.read().flatten(1).norm(dim=1), norm)
        assert wc.spectrum(slot.read()[0]).condition_number == pytest.approx(1.0, abs=1e-5)


def test_gaussian_matches_the_scale_of_semi_orthogonal():
    model = tiny_vit(embed_dim=96, num_heads=3)
    wc.init_(model, "gaussian", generator=generator())
    for slot in (first(model).q, first(model).k, first(model).v):
        assert slot.read().std().item() == pytest.approx(96**-0.5, rel=0.05)
    wc.init_(model, "gaussian", std=0.3, value="per_head", projections="qv", generator=generator())
    assert first(model).q.read().std().item() == pytest.approx(0.3, rel=0.05)
    assert torch.equal(first(model).v.read()[1], torch.eye(32, 96))


def test_grouped_queries_and_wide_heads():
    site = first(wc.init_(XTransformersAttention(12, heads=4, kv_heads=2, dim_head=5), "conditioned"))
    assert site.q.read().shape == (4, 5, 12) and site.k.read().shape == (2, 5, 12)
    assert_semi_orthogonal(site.k.read())
    # head_dim > in_features: orthonormal columns, and an identity that runs out of columns.
    wide = first(wc.init_(XTransformersAttention(4, heads=2, dim_head=6), "conditioned"))
    assert_semi_orthogonal(wide.q.read())
    assert torch.equal(wide.v.read()[0], torch.eye(6, 4))


def test_davit_channel_attention_gets_its_identity_on_the_linear_path():
    model = timm.create_model("davit_tiny", embed_dims=(24, 48), depths=(1, 1), num_heads=(2, 4))
    by_role = [s for s in wc.find_attention(wc.init_(model, "conditioned")) if s.kind == "channel"]
    eye = torch.eye(12, 24).expand(2, 12, 24)
    assert torch.equal(by_role[0].q.read(), eye) and not torch.equal(by_role[0].v.read(), eye)
    wc.init_(model, "conditioned", roles="by_name")
    assert torch.equal(by_role[0].v.read(), eye) and not torch.equal(by_role[0].q.read(), eye)


@pytest.mark.parametrize("value", ["per_head", "joint", "orthogonal"])
def test_values_at_the_norm_of_the_default(value):
    model = tiny_vit()
    with torch.no_grad():
        first(model).v.write_(first(model).v.read() * torch.tensor([1.0, 2.0, 3.0])[:, None, None])
    norms = first(model).v.read().flatten(1).norm(dim=1)
    wc.init_(model, "conditioned", value=value, value_scale="default", generator=generator())
    site = first(model)
    torch.testing.assert_close(site.v.read().flatten(1).norm(dim=1), norms)
    plain = wc.init_(tiny_vit(), "conditioned", value=value, generator=generator())
    torch.testing.assert_close(site.q.read(), first(plain).q.read())
    directions = [nn.functional.normalize(one.v.read().flatten(1)) for one in (site, first(plain))]
    torch.testing.assert_close(*directions)


# Tied keys: W_K = W_Q, for causal attention.


F64 = torch.float64


def gpt2(width=48, num_heads=3, **arguments):
    sizes = {"n_layer": 1, "vocab_size": 11, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2Model(GPT2Config(n_embd=width, n_head=num_heads, **sizes | arguments))


def wide_vit(**arguments):
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 48, "depth": 1, "num_heads": 3, "num_classes": 0}
    return timm.models.VisionTransformer(**sizes | arguments)


def normed_tokens(*shape):
    return nn.functional.layer_norm(torch.randn(*shape, generator=generator(), dtype=F64), shape[-1:])


@pytest.mark.parametrize("make", [gpt2, wide_vit])
def test_keys_are_the_queries_and_every_singular_value_is_the_scale(make):
    site = first(wc.init_(make(), "conditioned", keys="tied", own_token=0.6, tokens=200, generator=generator()))
    q = site.q.read()
    assert torch.equal(site.k.read(), q) and not torch.equal(q[0], q[1])
    a = own_token_scale(16**-0.5, 16, 0.6, 200)
    torch.testing.assert_close(singular_values(q), torch.full((3, 16), a, dtype=F64), rtol=0, atol=5e-6)
    assert torch.equal(site.v.read(), torch.eye(16, 48).expand(3, 16, 48))
    # The queries are those of independent keys, scaled: nothing else of the draw changes.
    plain = first(wc.init_(make(), "conditioned", generator=generator())).q.read()
    torch.testing.assert_close(q, a * plain)


def test_the_scale_solves_its_equation():
    for width, p, n in ((16, 0.5, 128), (64, 0.9, 1024), (12, 0.1, 16)):
        t = width**0.5 * own_token_scale(width**-0.5, width, p, n) ** 2
        assert 1 / (1 + (n - 1) * math.exp(t * t / (2 * width) - t)) == pytest.approx(p, rel=1e-12)
    assert own_token_scale(1.0, 16, 0.5, 128) == pytest.approx(own_token_scale(0.25, 16, 0.5, 128) / 2)


@pytest.mark.parametrize(("width", "num_heads", "tokens"), [(64, 4, 128), (64, 4, 32)])
def test_the_last_token_gives_itself_what_was_asked_for(width, num_heads, tokens):
    site = first(wc.init_(gpt2(width, num_heads), "conditioned", keys="tied", tokens=tokens, generator=generator()))
    x = normed_tokens(100, tokens, width)
    q, k = site.q.read().detach().double(), site.k.read().detach().double()
    queries = torch.einsum("hde,be->bhd", q, x[:, -1])
    keys = torch.einsum("hde,bne->bhnd", k, x)
    own = torch.softmax(site.scale * torch.einsum("bhd,bhnd->bhn", queries, keys), -1)[..., -1]
    assert float(own.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(own.median()) == pytest.approx(0.5, abs=0.05)


def causal_kappa(model, x):
    site = first(model)
    q, k, v = (slot.read()[0].double() for slot in (site.q, site.k, site.v))
    allowed = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    spectrum = wc.jacobian_spectrum(x, q, k, v, scale=site.scale, mask=allowed)
    assert spectrum.status == "exact" and spectrum.nullity == 0
    return spectrum.pseudo_condition_number


@pytest.mark.parametrize("shape", [(16, 48, 4), (24, 48, 4), (32, 64, 4)], ids=str)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_T11_tied_keys_condition_causal_attention_where_independent_ones_do_not(shape, seed):
    n, width, num_heads = shape
    x = nn.functional.layer_norm(torch.randn(n, width, generator=generator(seed), dtype=F64), (width,))
    model = NanoGPTAttention(width, num_heads)

    def kappa(method, **options):
        return causal_kappa(wc.init_(model, method, generator=generator(100 + seed), **options), x)

    usual = kappa("gaussian", std=0.02 * (768 / width) ** 0.5)
    assert kappa("conditioned") > 5 * usual
    tied = kappa("conditioned", keys="tied", tokens=n)
    assert tied < 0.3 * usual
    # The tie does it, not the singular values of W: Gaussian weights with tied keys are as good within a factor of 3.
    assert tied / 3 < kappa("gaussian", keys="tied", tokens=n) < 3 * tied


def test_the_gaussian_control_has_the_same_scale():
    site = first(wc.init_(gpt2(192, 3), "gaussian", keys="tied", generator=generator()))
    assert torch.equal(site.k.read(), site.q.read())
    a = own_token_scale(1 / 8, 64, 0.5, 128)
    assert site.q.read().std().item() == pytest.approx(a * 192**-0.5, rel=0.02)
    assert site.v.read().std().item() == pytest.approx(192**-0.5, rel=0.02)
    site = first(wc.init_(gpt2(192, 3), "gaussian", keys="tied", std=0.02, generator=generator()))
    assert torch.equal(site.k.read(), site.q.read()) and site.k.read().std().item() == pytest.approx(0.02, rel=0.02)


def test_match_norm_and_projections():
    model = gpt2()
    before = {role: slot.read().clone() for role, slot in first(model).slots.items()}
    wc.init_(model, "conditioned", keys="tied", projections="qk", match_norm=True)
    site = first(model)
    for role in "vo":
        assert torch.equal(site.slots[role].read(), before[role])
    norms = {role: site.slots[role].read().flatten(1).norm(dim=1) for role in "qk"}
    for role in "qk":
        torch.testing.assert_close(norms[role], before[role].flatten(1).norm(dim=1))
    torch.testing.assert_close(site.k.read() / norms["k"][:, None, None], site.q.read() / norms["q"][:, None, None])


def test_heads_wider_than_the_tokens():
    site = first(wc.init_(XTransformersAttention(24, heads=2, dim_head=32), "conditioned", keys="tied"))
    assert torch.equal(site.k.read(), site.q.read())
    expected = own_token_scale(32**-0.5, 24, 0.5, 128)
    torch.testing.assert_close(
        singular_values(site.q.read()), torch.full((2, 24), expected, dtype=F64), rtol=0, atol=2e-5
    )


IMPOSSIBLE = {
    "4 query heads share 2 key heads": lambda: XTransformersAttention(48, heads=4, kv_heads=2, dim_head=12),
    "crossattention: .* read different tokens": lambda: gpt2(n_layer=2, add_cross_attention=True),
    "multihead_attn: .* read different tokens": lambda: nn.TransformerDecoderLayer(48, 3),
    "queries and keys are normalised": lambda: wide_vit(qk_norm=True),
    "of kind cross_covariance": lambda: timm.create_model("xcit_nano_12_p16_224", img_size=32, depth=1),
    r"heads of width 8 .* own_token=0.5; lower it \(at most 0.3 here\)": lambda: gpt2(24, 3),
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_where_tying_is_impossible_nothing_is_changed(message):
    model = IMPOSSIBLE[message]()
    for method in ("conditioned", "gaussian"):
        with unchanged(model), pytest.raises(wc.WeightError, match=message):
            wc.init_(model, method, keys="tied")


def test_an_unknown_logit_scale_is_refused_and_other_sites_can_be_left_out():
    model = gpt2(n_layer=2, add_cross_attention=True)
    with pytest.raises(wc.WeightError, match="logit scale"):
        wc.init_(model, "conditioned", keys="tied", sites=[replace(first(model), scale=None)])
    own = [site for site in wc.find_attention(model) if not site.cross]
    wc.init_(model, "conditioned", keys="tied", sites=own)
    assert all(torch.equal(site.k.read(), site.q.read()) is not site.cross for site in wc.find_attention(model))


# W_V at scale 1 under a causal mask.


@pytest.mark.parametrize("method", ["conditioned", "gaussian", "orthogonal"])
def test_values_at_scale_one_in_a_causal_model(method):
    with pytest.warns(wc.EvidenceWarning, match="projections='qk'") as said:
        wc.init_(gpt2(16, 2, n_layer=2), method)
    assert len(said) == 1 and said[0].filename == __file__
    assert ("value_scale='default'" in str(said[0].message)) == (method == "conditioned")


@pytest.mark.parametrize(
    "method, options",
    [
        ("conditioned", {"projections": "qk"}),
        ("conditioned", {"value_scale": "default"}),
        ("conditioned", {"value_scale": 0.2}),
        ("conditioned", {"match_norm": True}),
        ("conditioned", {"keys": "tied", "tokens": 16}),
        ("gaussian", {"projections": "qk"}),
        ("gaussian", {"std": 0.02}),
        ("nanochat", {}),
        ("mimetic", {}),
        ("default", {}),
    ],
    ids=str,
)
def test_starts_that_avoid_it(method, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wc.init_(gpt2(16, 2, n_layer=2), method, **options)


def test_other_models_and_comparisons_are_not_warned():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wc.init_(nn.MultiheadAttention(16, 2), "conditioned")  # the caller's mask decides
        MethodSettings(init="conditioned").apply_(gpt2(16, 2, n_layer=2), seed=0)


def test_a_failure_comes_before_the_warning():
    model = gpt2(16, 2, n_layer=2)
    model.h[0].attn.c_attn.weight.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(wc.WeightError):
            wc.init_(model, "conditioned")
