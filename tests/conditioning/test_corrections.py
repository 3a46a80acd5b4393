"""What the corrections compute, and what they leave alone."""

import copy

import pytest
import timm
import torch
import torch.utils.checkpoint
from torch import nn
from transformers import GPT2Config, GPT2Model

import wellcond as wc
from models import NanoGPTAttention, XTransformersAttention, stack
from wellcond.attention.slot import corrections_of, effective_weight
from wellcond.linalg.orthogonal import polar
from wellcond.linalg.spectrum import spectra

METHODS = [
    ("identity", {"lam": 0.5}),
    ("identity", {"lam": {"q": 0.3, "v": 2.0}, "layout": "per_head"}),
    ("polar", {}),
    ("polar", {"layout": "joint"}),
    ("polar", {"frozen": True}),
    ("balanced", {}),
    ("balanced", {"target": 1.25}),
]
IDS = [f"{name}-{'-'.join(map(str, options))}{i}" for i, (name, options) in enumerate(METHODS)]
KINDS = ({"lam": {"q": 0.3, "v": 2.0}, "layout": "per_head"}, {"frozen": True}, {"target": 1.25})
"""Fixed, frozen and following; the other methods differ from these only in the matrix that they compute."""
each_method = pytest.mark.parametrize(
    "method, options",
    [pytest.param(*one, marks=() if one[1] in KINDS else pytest.mark.slow) for one in METHODS],
    ids=IDS,
)


def every_storage():
    """The same attention in five storages, all initialised alike."""
    models = {
        "timm": timm.models.VisionTransformer(
            img_size=8, patch_size=4, embed_dim=24, depth=1, num_heads=3, num_classes=0
        ),
        "nanogpt": NanoGPTAttention(24, 3),
        "x-transformers": XTransformersAttention(24, heads=3, dim_head=8),
        "torch": nn.MultiheadAttention(24, 3),
        "gpt2": GPT2Model(GPT2Config(n_embd=24, n_head=3, n_layer=1, vocab_size=11, n_positions=16)),
    }
    for model in models.values():
        wc.init_(model, "gaussian", std=0.2, generator=torch.Generator().manual_seed(1))
    return models


def vit(depth=2):
    return timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=24, depth=depth, num_heads=3, num_classes=5
    )


def effective(model, role="q"):
    return wc.find_attention(model)[0].slots[role].read().detach()


@pytest.mark.parametrize("method, options", METHODS, ids=IDS)
def test_the_correction_does_not_depend_on_the_storage(method, options):
    results = {}
    for name, model in every_storage().items():
        wc.condition_(model, method, **options)
        results[name] = {role: effective(model, role) for role in "qkv"}
        wc.fold_(model)
        for role in "qkv":
            torch.testing.assert_close(results[name][role], effective(model, role), rtol=0, atol=1e-6)
    for name, heads in results.items():
        for role in "qkv":
            torch.testing.assert_close(heads[role], results["torch"][role], msg=f"{name} {role}")


@pytest.mark.parametrize("layout", ["joint", "per_head"])
def test_identity_adds_lam_on_the_diagonal_of_q_k_and_v(layout):
    for model in every_storage().values():
        before = {role: effective(model, role) for role in "qkv"}
        wc.condition_(model, "identity", lam={"q": 0.5, "k": 0.25, "v": 3.0}, layout=layout)
        for role, lam in (("q", 0.5), ("k", 0.25), ("v", 3.0)):
            eye = torch.eye(24).reshape(3, 8, 24) if layout == "joint" else torch.eye(8, 24).expand(3, 8, 24)
            torch.testing.assert_close(effective(model, role) - before[role], lam * eye)


@pytest.mark.filterwarnings("ignore::wellcond.NumericalWarning")  # lambda = 10 saturates the softmax
def test_lambda_of_ten_lowers_the_condition_number_of_every_head():
    """A claim of results/claims.md rests on it."""
    model = nn.MultiheadAttention(192, 3)  # ViT-Ti's size, and its start
    wc.init_(model, "gaussian", std=0.02, generator=torch.Generator().manual_seed(0))
    before = [spectra(effective(model, role)) for role in "qkv"]
    wc.condition_(model, "identity", lam=10.0)
    for role, heads in zip("qkv", before, strict=True):
        for was, now in zip(heads, spectra(effective(model, role)), strict=True):
            assert now.condition_number < was.condition_number
            assert now.condition_number <= (10 + was.sigma_max) / (10 - was.sigma_max) * (1 + 1e-6)


@pytest.mark.parametrize("options", [{}, {"solver": "svd"}], ids=["products", "svd"])
def test_polar_is_theorem_35_per_head(options):
    model = vit()
    before = effective(model)
    s = spectra(before)
    wc.condition_(model, "polar", **options)
    for was, now in zip(s, spectra(effective(model)), strict=True):
        assert now.condition_number == pytest.approx(2 * was.sigma_max / (was.sigma_max + was.sigma_min), rel=1e-4)
        assert now.condition_number <= 2 * (1 + 1e-6)
    expected = before + torch.linalg.matrix_norm(before, 2)[:, None, None] * polar(before.double())
    torch.testing.assert_close(effective(model).double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("target", [1.0, 1.5, 2.0, 5.0])
def test_balanced_keeps_the_spectral_norm(target):
    model = vit()
    before = spectra(effective(model))
    wc.condition_(model, "balanced", target=target)
    for was, now in zip(before, spectra(effective(model)), strict=True):
        assert now.sigma_max == pytest.approx(was.sigma_max, rel=1e-4)
        assert now.condition_number <= target * (1 + 1e-4)


@each_method
def test_gradients_flow_to_the_original_weights_only(method, options):
    model = vit()
    parameters = dict(model.named_parameters())
    wc.condition_(model, method, **options)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    x = torch.randn(2, 3, 16, 16)
    model(x).square().sum().backward()
    grads = {name: p.grad.clone() for name, p in parameters.items()}
    # C carries no gradient, so the gradient of W is that of the effective weight in the folded model.
    wc.fold_(model)
    model.zero_grad()
    model(x).square().sum().backward()
    for name, p in parameters.items():
        torch.testing.assert_close(grads[name], p.grad, msg=name)


def test_projections_subset():
    model = vit()
    before = {role: effective(model, role) for role in "qkv"}
    wc.condition_(model, "balanced", projections="qk")
    assert torch.equal(effective(model, "v"), before["v"])
    assert not torch.allclose(effective(model, "k"), before["k"])


def corrections(model):
    return [c for module in model.modules() for c in corrections_of(module).values()]


def test_frozen_keeps_the_first_correction():
    model = vit(depth=1)
    wc.condition_(model, "polar", frozen=True)
    qkv = model.blocks[0].attn.qkv
    first = (effective_weight(qkv, "weight") - qkv.weight).detach()
    with torch.no_grad():
        qkv.weight.add_(torch.randn_like(qkv.weight))
    torch.testing.assert_close((effective_weight(qkv, "weight") - qkv.weight).detach(), first, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_weight_decay_acts_on_w_only(optimizer):
    # theory.md T1: lr = wd = 0.1, lam = 10: the diagonals differ by lr * wd * lam = 0.1 after one step.
    fixed = XTransformersAttention(6, heads=1, dim_head=6).double()
    start = copy.deepcopy(fixed)
    wc.condition_(fixed, "identity", lam=10.0, projections="v")
    wc.fold_(wc.condition_(start, "identity", lam=10.0, projections="v"))
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    for model in (fixed, start):
        step = optimizer(model.parameters(), lr=0.1, weight_decay=0.1)
        model(x).sum().backward()
        step.step()
    difference = (effective(fixed, "v") - effective(start, "v"))[0]
    torch.testing.assert_close(difference, 0.1 * torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "build, tokens",
    [
        (lambda: timm.create_model("vit_tiny_patch16_224", img_size=128, depth=1), "at N = 65 tokens"),
        (lambda: timm.create_model("deit3_small_patch16_224", img_size=32, depth=1), "at N = 5 tokens"),
        (lambda: GPT2Model(GPT2Config(n_embd=24, n_head=3, n_layer=1, vocab_size=11, n_positions=16)), "at N = 16"),
        (lambda: nn.MultiheadAttention(24, 3), "how many tokens this model reads is not known"),
    ],
    ids=["vit", "class token without a position", "gpt2", "unknown"],
)
def test_saturation_warning_counts_the_tokens_of_the_model(build, tokens):
    with pytest.warns(wc.NumericalWarning, match=tokens):
        wc.condition_(build(), "identity")


def test_degenerate_heads_are_named():
    model = vit(depth=1)
    site = wc.find_attention(model)[0]
    heads = site.k.read().detach().clone()
    heads[1] = 0
    heads[2, :, 3:] = 0
    site.k.write_(heads)
    with pytest.warns(wc.NumericalWarning) as caught:
        wc.condition_(model, "polar")
    messages = [str(w.message) for w in caught]
    assert any("blocks.0.attn (k, head 1): zero weights" in m for m in messages)
    assert any("blocks.0.attn (k, head 2): rank-deficient" in m for m in messages)
    now = effective(model, "k")
    assert torch.equal(now[1], torch.zeros(8, 24))
    assert spectra(now)[2].condition_number == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused(bad):
    model = stack(depth=2)
    with torch.no_grad():
        model[1].attn.c_attn.weight[13, 0] = bad
    with pytest.raises(wc.WeightError, match=r"1.attn \(k\).*heads \[0\]"):
        wc.condition_(model, "polar")
    assert not corrections(model) and wc.conditioning_of(model) is None


def test_diverged_weights_stay_visible_in_the_forward():
    model = stack(depth=1)
    wc.condition_(model, "polar")
    with torch.no_grad():
        model[0].attn.c_attn.weight[30, 0] = float("nan")
    assert model(torch.randn(1, 4, 12)).isnan().any()
    with pytest.raises(wc.WeightError, match="nothing was folded"):
        wc.fold_(model)
    assert corrections(model)


def test_bad_options_list_the_choices():
    model = stack(depth=1)
    with pytest.raises(wc.UnknownChoiceError, match=r"wellcond.init_\(model, \"conditioned\"\)"):
        wc.condition_(model, "conditioned")
    for method, options, error, said in (
        ("svd", {}, wc.UnknownChoiceError, "'balanced', .*'polar'"),
        ("identity", {"lambda_": 1.0}, wc.UnknownChoiceError, "'lam', 'layout'"),
        ("identity", {"layout": "fused"}, wc.UnknownChoiceError, "'joint', 'per_head'"),
        ("identity", {"lam": {"o": 1.0}}, wc.UnknownChoiceError, "projection of lam"),
        ("balanced", {"target": 0.5}, ValueError, "target"),
    ):
        with pytest.raises(error, match=said):
            wc.condition_(model, method, **options)
    assert not corrections(model)


def test_conditioning_twice_and_initialising_a_conditioned_model_are_refused():
    model = wc.condition_(stack(depth=1), "balanced")
    with pytest.raises(wc.ConditioningError, match="fold_"):
        wc.condition_(model, "balanced")
    with pytest.raises(wc.ConditioningError, match="fold_"):
        wc.init_(model, "conditioned")
    wc.fold_(model)
    wc.init_(model, "conditioned")
    wc.condition_(model, "polar")


def test_weights_tied_alike_are_folded_once():
    model = stack(XTransformersAttention, depth=2)
    model[1].attn.to_q.weight = model[0].attn.to_q.weight
    x = torch.randn(1, 4, 12)
    wc.condition_(model, "identity", lam=0.5)
    conditioned = model(x)
    wc.fold_(model)
    assert model[1].attn.to_q.weight is model[0].attn.to_q.weight
    torch.testing.assert_close(model(x), conditioned)


def test_wide_heads_and_grouped_queries():
    # head_dim > in_features; 4 query heads on 2 key/value heads
    model = XTransformersAttention(4, heads=4, kv_heads=2, dim_head=6)
    wc.condition_(model, "balanced")
    for role in "qkv":
        assert all(s.condition_number <= 2.001 for s in spectra(effective(model, role)))
    wc.fold_(model)
    before = effective(model)
    wc.condition_(model, "identity", lam=1.0)
    # joint: rows beyond in_features get nothing
    torch.testing.assert_close((effective(model) - before).reshape(24, 4), torch.eye(24, 4))


def test_frozen_parameters_are_refused():
    frozen = stack(depth=1)
    frozen[0].attn.c_attn.weight.requires_grad_(False)
    with pytest.raises(wc.WeightError, match="frozen"):
        wc.condition_(frozen, "polar")
