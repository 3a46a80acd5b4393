"""`measure` on real models: what it reports is what the tensors say."""

import dataclasses
import json
import math

import pytest
import timm
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import wellcond as wc
from wellcond.jacobian.capture import capture_attention
from wellcond.jacobian.captured_forms import GenericForm, captured_form
from wellcond.jacobian.generic import GenericHead
from wellcond.jacobian.spectrum import form_spectrum

X = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def vit(**kwargs):
    torch.manual_seed(0)
    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return timm.models.VisionTransformer(**arguments | kwargs)


def autograd_jacobian(model, layer, head, x):
    """J of one head's output with respect to its rows of the fused weight, through timm's own module."""
    attention = model.blocks[layer].attn
    seen, d, D = [], attention.head_dim, attention.qkv.in_features
    handle = attention.register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach()))
    model.eval()(x)
    handle.remove()
    tokens = seen[0].double()
    stored, bias = attention.qkv.weight.detach().double(), attention.qkv.bias.detach().double()

    def output(rows):
        w = stored.clone()
        for r in range(3):
            w[r * D + head * d : r * D + (head + 1) * d] = rows[r]
        q, k, v = (tokens @ w.T + bias).view(1, -1, 3, attention.num_heads, d).permute(2, 0, 3, 1, 4)[:, 0, head]
        return (attention.scale * q @ k.T).softmax(-1) @ v

    rows = torch.stack([stored[r * D + head * d : r * D + (head + 1) * d] for r in range(3)])
    j = torch.func.jacrev(output)(rows)
    return j.flatten(0, 1).flatten(1)


def test_condition_numbers_are_those_of_autograd_through_the_model():
    model = vit()
    report = wc.measure(model, X[:1])
    for layer in range(2):
        for head in range(3):
            sigma = torch.linalg.svdvals(autograd_jacobian(model, layer, head, X[:1]))
            found = report.layers[layer].heads[head].jacobian
            assert found.condition_number == pytest.approx(float(sigma[0] / sigma[-1]), rel=1e-5)
            assert found.shape == (5 * 8, 3 * 8 * 24) and found.status == "exact"


def test_report_is_complete_and_serialises():
    report = wc.measure(vit(), X, samples=3, layers=[1], heads=[0, 2])
    [layer] = report.layers
    assert layer.name == "blocks.1.attn" and [h.index for h in layer.heads] == [0, 2]
    head = layer.heads[0]
    assert len(head.samples) == 3 and head.spread() > 1
    assert head.mean_kappa() == pytest.approx(math.prod(head.samples) ** (1 / 3))
    assert head.diagnosis is not None and head.papers_bound_log10 is not None
    data = json.loads(report.to_json())
    assert data["layers"][0]["heads"][0]["jacobian"]["condition_number"] == head.jacobian.condition_number
    assert "blocks.1.attn" in report.to_table()


def test_samples_stacked_share_the_weights():
    model = vit(depth=1)
    stacked = wc.measure(model, X[:2], samples=2, combine="stack", heads=[1]).layers[0].heads[0].jacobian
    rows = torch.cat([autograd_jacobian(model, 0, 1, X[i : i + 1]) for i in range(2)])
    sigma = torch.linalg.svdvals(rows)
    assert stacked.shape[0] == 80
    assert stacked.sigma_max == pytest.approx(float(sigma[0]), rel=1e-6)


def test_stack_convention_and_pseudo():
    head = wc.measure(vit(depth=1), X[:1], convention="stack", kappa="pseudo").layers[0].heads[0]
    assert head.jacobian.convention == "stack" and head.jacobian.condition_number == math.inf
    assert math.isfinite(head.mean_kappa())


def test_corrections_are_included():
    model = vit()
    before = wc.measure(model, X[:1]).layers[0].heads[0]
    wc.condition_(model, "balanced", target=1.5)
    conditioned = wc.measure(model, X[:1])
    after = conditioned.layers[0].heads[0]
    assert conditioned.conditioning["method"] == "balanced"
    assert after.weights["q"].condition_number <= 1.5 + 1e-6 < before.weights["q"].condition_number
    wc.fold_(model)
    folded = wc.measure(model, X[:1]).layers[0].heads[0]
    assert folded.jacobian.condition_number == pytest.approx(after.jacobian.condition_number, rel=1e-5)


@pytest.mark.filterwarnings("ignore::wellcond.NumericalWarning")
def test_a_dead_head_is_said_to_be_dead():
    report = wc.measure(wc.condition_(vit(depth=1, embed_dim=96), "identity", lam=10.0), X[:1])
    head = report.layers[0].heads[0]
    assert head.dead and head.verdict == "dead head" and "dead head" in report.to_table()


def test_causal_and_grouped_and_rotary_models():
    gpt = GPT2Model(GPT2Config(n_embd=24, n_head=3, n_layer=1, vocab_size=20, bos_token_id=0, eos_token_id=0))
    report = wc.measure(gpt, torch.arange(6)[None])
    assert report.layers[0].heads[0].how == "structured: plain softmax"
    assert report.layers[0].heads[0].diagnosis.attention.diagonal_mass > 0.3
    llama = LlamaModel(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
                    num_key_value_heads=2, vocab_size=20, bos_token_id=0, eos_token_id=0)
    )  # fmt: skip
    [layer] = wc.measure(llama, torch.arange(5)[None]).layers
    assert [h.query_heads for h in layer.heads] == [(0, 1), (2, 3)]
    assert "rotary" in layer.heads[0].how and layer.heads[0].jacobian.shape == (2 * 5 * 4, 4 * 4 * 16)


def small(name, **arguments):
    return lambda: timm.create_model(name, **arguments)


@pytest.mark.parametrize(
    "name, build, size",
    [
        ("structured: cross-covariance attention", small("xcit_nano_12_p16_224", depth=1, img_size=32), 32),
        ("structured: channel attention", small("davit_tiny", embed_dims=(24,), depths=(1,), num_heads=(2,)), 16),
        ("structured: layer norm on queries and keys", lambda: vit(depth=1, qk_norm=True), 16),
    ],
)
def test_other_structured_forms_equal_the_generic_derivatives(name, build, size):
    torch.manual_seed(0)
    model, x = build(), torch.randn(1, 3, size, size)
    captured = [c for c in capture_attention(model, x) if not c.is_plain]
    assert captured
    chosen = captured_form(captured[0], 0)
    assert chosen.how == name
    generic = GenericForm(GenericHead(captured[0], 0))
    structured, reference = form_spectrum(chosen.form), form_spectrum(generic, method="dense")
    assert structured.sigma_max == pytest.approx(reference.sigma_max, rel=1e-9)
    assert structured.rank == reference.rank
    assert structured.sigma_rank == pytest.approx(reference.sigma_rank, rel=1e-5)


def test_bad_input():
    model = vit()
    with pytest.raises(wc.WeightError, match="reads NaN or infinite"):
        wc.measure(model, X * float("nan"))
    with pytest.raises(ValueError, match="layers: expected numbers below 2, got 7"):
        wc.measure(model, X, layers=[7])
    with pytest.raises(wc.UnknownChoiceError, match="'wide', 'stack'"):
        wc.measure(model, X, convention="tall")
    with pytest.raises(ValueError, match="samples: expected at least 1"):
        wc.measure(model, X, samples=0)
    with pytest.raises(wc.AttentionNotFoundError):
        wc.measure(nn.Linear(2, 2), torch.zeros(1, 2))


def test_layers_unite_their_heads_and_go_through_the_output_projection():
    model = vit(depth=1)
    [layer] = wc.measure(model, X[:1], output=True).layers
    heads = [h.jacobian for h in layer.heads]
    assert layer.kappa() == pytest.approx(max(h.sigma_max for h in heads) / min(h.sigma_min for h in heads))
    # Through W_O: the Jacobian of the layer is W_O applied to those of its heads, side by side.
    w_o = model.blocks[0].attn.proj.weight.detach().double()
    parts = [
        torch.einsum("od,ndp->nop", w_o[:, 8 * h : 8 * h + 8], autograd_jacobian(model, 0, h, X[:1]).view(5, 8, -1))
        for h in range(3)
    ]
    sigma = torch.linalg.svdvals(torch.cat(parts, -1).flatten(0, 1))
    assert layer.with_output.shape[0] == 5 * 24
    assert layer.with_output.sigma_max == pytest.approx(float(sigma[0]), rel=1e-5)
    assert layer.with_output.sigma_rank == pytest.approx(float(sigma[layer.with_output.rank - 1]), rel=1e-4)


class TwoTowers(nn.Module):
    """One of two attentions is never called."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = (nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2))

    def forward(self, x):
        return self.used(x)


def test_an_attention_that_is_not_called_is_said_so():
    used, idle = wc.measure(TwoTowers(), torch.randn(1, 4, 8)).layers
    assert used.heads and not used.problem
    assert not idle.heads and "does not call it" in idle.problem
    with pytest.raises(ValueError, match="no attention that is measured has a key/value head 9"):
        wc.measure(TwoTowers(), torch.randn(1, 4, 8), heads=[9])


def test_a_sample_without_a_condition_number_is_not_averaged_away():
    head = wc.measure(vit(depth=1), X[:1], heads=[0]).layers[0].heads[0]
    unknown = dataclasses.replace(head, samples=(2.0, math.nan))
    assert math.isnan(unknown.mean_kappa()) and math.isnan(unknown.spread())
    assert dataclasses.replace(head, samples=(2.0, math.inf)).mean_kappa() == math.inf
    assert dataclasses.replace(head, samples=(2.0, 8.0)).mean_kappa() == pytest.approx(4.0)


def test_a_layer_with_an_unknown_head_is_unknown_in_any_order():
    layer = wc.measure(vit(depth=1), X[:1], heads=[0, 1]).layers[0]
    first, second = layer.heads
    lost = dataclasses.replace(first, jacobian=dataclasses.replace(first.jacobian, sigma_rank=math.nan))
    singular = dataclasses.replace(first, jacobian=dataclasses.replace(first.jacobian, sigma_rank=0.0))
    for heads in ((lost, second), (second, lost)):
        assert math.isnan(dataclasses.replace(layer, heads=heads).kappa("pseudo"))
    assert dataclasses.replace(layer, heads=(singular, second)).kappa("pseudo") == math.inf
