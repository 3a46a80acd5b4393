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
import wellcond.jacobian.solve as spectrum_module
from wellcond.errors import ReportDataError
from wellcond.jacobian.capture import capture_attention
from wellcond.jacobian.module import ModuleJacobian
from wellcond.jacobian.select import select_operator
from wellcond.jacobian.softmax import SoftmaxJacobian
from wellcond.jacobian.solve import operator_spectrum
from wellcond.pages.measurement import render_measurement
from wellcond.theory import papers_bound

X = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def vit(**kwargs):
    torch.manual_seed(0)
    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return timm.models.VisionTransformer(**arguments | kwargs)


def small_llama():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 20}
    return LlamaModel(
        LlamaConfig(num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0, **sizes)
    )


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
    report = wc.measure(vit(), X[:1])
    for number, layer in enumerate(report.layers):
        for head in layer.heads:
            sigma = torch.linalg.svdvals(autograd_jacobian(vit(), number, head.index, X[:1]))
            assert head.jacobian.condition_number == pytest.approx(float(sigma[0] / sigma[-1]), rel=1e-5)
            assert head.jacobian.shape == (5 * 8, 3 * 8 * 24) and head.jacobian.status == "exact"


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
    report = wc.measure(wc.condition_(vit(depth=1, embed_dim=96), "identity", lam=10.0), X[:1], heads=[0])
    head = report.layers[0].heads[0]
    assert head.dead and head.verdict == "dead head" and "dead head" in report.to_table()
    collapsed = wc.condition_(vit(depth=1, embed_dim=96), "identity", lam=30.0)
    assert wc.measure(collapsed, X[:1], jacobian=False).layers[0].heads[0].dead


def test_causal_and_grouped_and_rotary_models():
    gpt = GPT2Model(GPT2Config(n_embd=24, n_head=3, n_layer=1, vocab_size=20, bos_token_id=0, eos_token_id=0))
    report = wc.measure(gpt, torch.arange(6)[None])
    assert report.layers[0].heads[0].how == "structured: plain softmax"
    assert report.layers[0].heads[0].diagnosis.attention.diagonal_mass > 0.3
    llama = small_llama()
    [layer] = wc.measure(llama, torch.arange(5)[None]).layers
    assert [h.query_heads for h in layer.heads] == [(0, 1), (2, 3)]
    assert "rotary" in layer.heads[0].how and layer.heads[0].jacobian.shape == (2 * 5 * 4, 4 * 4 * 16)
    assert layer.heads[0].diagnosis.norm_q > 0 and layer.heads[0].attention.diagonal_mass > 0.3
    assert layer.heads[0].verdict in ("P", "X", "norms", "balanced")


def test_query_heads_of_a_group_can_be_measured_one_by_one():
    """Rows of the group's Jacobian: no singular value exceeds those of the group; a layer is not their union."""
    llama, ids = small_llama(), torch.arange(5)[None]
    [joint] = wc.measure(llama, ids).layers
    [each] = wc.measure(llama, ids, grouped="each").layers
    assert [(head.index, head.query_heads) for head in each.heads] == [(n, (n,)) for n in range(4)]
    cond = torch.linalg.cond(llama.layers[0].self_attn.q_proj.weight.detach().double().view(4, 4, 16))
    for head in each.heads:
        group = joint.heads[head.index // 2]
        assert head.jacobian.shape == (5 * 4, 3 * 4 * 16) and "rotary" in head.how
        assert head.jacobian.sigma_max <= group.jacobian.sigma_max * (1 + 1e-9)
        assert head.weights["q"].condition_number == pytest.approx(float(cond[head.index]))
        assert head.weights["k"] == group.weights["k"]
    assert group.jacobian.condition_number == math.inf and head.jacobian.condition_number < math.inf
    assert joint.kappa() == math.inf and math.isnan(each.kappa("pseudo"))
    [chosen] = wc.measure(llama, ids, grouped="each", heads=[3], jacobian=False).layers
    assert [head.query_heads for head in chosen.heads] == [(3,)]
    with pytest.raises(ValueError, match="query head 4"):
        wc.measure(llama, ids, grouped="each", heads=[4])


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
    chosen = select_operator(captured[0], 0)
    assert chosen.how == name
    generic = ModuleJacobian(captured[0], 0)
    structured, reference = operator_spectrum(chosen.operator), operator_spectrum(generic, method="dense")
    assert structured.sigma_max == pytest.approx(reference.sigma_max, rel=1e-9)
    assert structured.rank == reference.rank
    assert structured.sigma_rank == pytest.approx(reference.sigma_rank, rel=1e-5)


WRONG = {
    "layers": {"layers": [7]}, "samples": {"samples": 0}, "Jacobian method": {"method": "x"},
    "convention": {"convention": "tall"}, "grouped": {"grouped": "all"}, "heads": {"heads": [9]},
    "biases": {"convention": "stack", "biases": True}, "jacobian=False": {"jacobian": False, "output": True},
}  # fmt: skip


@pytest.mark.parametrize("named", WRONG)
def test_wrong_options_are_named(named):
    with pytest.raises(ValueError, match=named):
        wc.measure(vit(depth=1), X, **WRONG[named])


def test_what_has_no_attention_or_no_number_is_refused():
    with pytest.raises(wc.WeightError, match="NaN or infinite"):
        wc.measure(vit(), X * float("nan"))
    with pytest.raises(wc.AttentionNotFoundError):
        wc.measure(nn.Linear(2, 2), torch.zeros(1, 2))


def test_numbers_of_a_layer_are_known_only_if_those_of_all_its_heads_are():
    layer = wc.measure(vit(depth=1), X[:1]).layers[0]
    spectra = [head.jacobian for head in layer.heads]
    assert layer.kappa() == pytest.approx(max(s.sigma_max for s in spectra) / min(s.sigma_min for s in spectra))
    first, *rest = layer.heads

    def changed(sigma_rank):
        return dataclasses.replace(first, jacobian=dataclasses.replace(first.jacobian, sigma_rank=sigma_rank))

    for heads in ((), rest, (*rest, rest[0]), (*rest, changed(math.nan)), (changed(math.nan), *rest)):
        assert math.isnan(dataclasses.replace(layer, heads=tuple(heads)).kappa("pseudo"))
    assert dataclasses.replace(layer, heads=(changed(0.0), *rest)).kappa("pseudo") == math.inf
    unknown = dataclasses.replace(first, samples=(2.0, math.nan))
    assert math.isnan(unknown.mean_kappa()) and math.isnan(unknown.spread())
    assert dataclasses.replace(first, samples=(2.0, math.inf)).mean_kappa() == math.inf
    assert dataclasses.replace(first, samples=(2.0, 8.0)).mean_kappa() == pytest.approx(4.0)


@pytest.mark.parametrize("combine", ["mean", "stack"])
def test_layers_go_through_the_output_projection(combine):
    """Through W_O: the Jacobian of the layer is W_O applied to those of its heads, side by side."""
    model, rows = vit(depth=1), []
    [layer] = wc.measure(model, X, samples=3, combine=combine, output=True, heads=[0]).layers
    w_o = model.blocks[0].attn.proj.weight.detach().double()
    for i in range(3):
        heads = [autograd_jacobian(model, 0, h, X[i : i + 1]).view(5, 8, -1) for h in range(3)]
        parts = [torch.einsum("od,ndp->nop", w_o[:, 8 * h : 8 * h + 8], j) for h, j in enumerate(heads)]
        rows.append(torch.cat(parts, -1).flatten(0, 1))
    measured = rows if combine == "mean" else [torch.cat(rows)]
    assert len(layer.output_samples["strict"]) == len(measured) and not layer.output_problem
    assert layer.with_output.shape[0] == len(measured[0])
    for jacobian, kappa in zip(measured, layer.output_samples["pseudo"], strict=True):
        sigma = torch.linalg.svdvals(jacobian)
        assert kappa == pytest.approx(float(sigma[0] / sigma[layer.with_output.rank - 1]), rel=1e-3)


def test_a_layer_that_fails_through_its_output_projection_leaves_the_rest():
    model = vit()
    with torch.no_grad():
        model.blocks[1].attn.proj.weight[0, 0] = torch.inf
    report = wc.measure(model, X[:1], output=True)
    whole, broken = report.layers
    assert whole.with_output is not None and len(whole.heads) == len(broken.heads) == 3 and not broken.problem
    assert broken.with_output is None and "W_O has NaN or infinite entries" in broken.output_problem
    assert "not measured through W_O: blocks.1.attn: W_O has NaN" in report.to_table()


def test_an_attention_for_which_the_convention_is_not_defined_leaves_the_rest():
    decoder = nn.TransformerDecoderLayer(8, 2, 8, batch_first=True)
    own, cross = wc.measure(decoder, (torch.randn(1, 4, 8), torch.randn(1, 5, 8)), convention="stack").layers
    assert own.heads and not own.problem
    assert not cross.heads and "stacked convention is defined for one self-attention head" in cross.problem
    with pytest.raises(wc.WellcondError, match="needs full row rank"):
        wc.measure(vit(img_size=64), torch.randn(1, 3, 64, 64), method="cholesky")


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
    with pytest.raises(ValueError, match="no attention layer that is measured has a key/value head 9"):
        wc.measure(TwoTowers(), torch.randn(1, 4, 8), heads=[9])


@pytest.mark.parametrize("method", [None, "balanced"])
def test_without_the_jacobian_weights_and_attention_are_the_same(method):
    model = vit() if method is None else wc.condition_(vit(), method)
    full, cheap = (wc.measure(model, X, samples=2, jacobian=jacobian) for jacobian in (True, False))
    for layer, other in zip(full.layers, cheap.layers, strict=True):
        assert math.isnan(other.kappa()) and math.isfinite(layer.kappa())
        for head, light in zip(layer.heads, other.heads, strict=True):
            assert (light.weights, light.raw_weights) == (head.weights, head.raw_weights)
            assert light.attention == head.attention == head.diagnosis.attention
            assert light.jacobian is light.diagnosis is light.bound_log10 is light.papers_bound_log10 is None
            assert math.isnan(light.mean_kappa()) and math.isnan(light.spread())
            assert light.verdict == "unknown" and light.status == "not measured" and not light.dead
    assert "not measured" in cheap.to_table() and (method is None) == all(
        head.raw_weights == head.weights for layer in cheap.layers for head in layer.heads
    )
    assert json.loads(cheap.to_json())["layers"][0]["heads"][0]["jacobian"] is None
    with pytest.raises(ReportDataError, match="no Jacobians"):
        render_measurement(cheap.to_dict())


def test_weights_of_grouped_queries_are_the_worst_of_their_own_group():
    llama = small_llama()
    wc.condition_(llama, "polar", projections="k")
    [layer] = wc.measure(llama, torch.arange(5)[None], heads=[1, 0], jacobian=False).layers
    attention = llama.layers[0].self_attn
    worst = torch.linalg.cond(attention.q_proj.weight.detach().double().view(2, 2, 4, 16)).amax(1)
    raw_k = torch.linalg.cond(attention.k_proj._parameters["weight"].detach().double().view(2, 4, 16))
    for head in layer.heads:
        assert head.weights["q"].condition_number == pytest.approx(float(worst[head.index]))
        assert head.raw_weights["k"].condition_number == pytest.approx(float(raw_k[head.index]))
        assert head.weights["k"].condition_number < head.raw_weights["k"].condition_number


@pytest.mark.parametrize("convention, kappa", [("wide", "strict"), ("stack", "pseudo")])
def test_the_bound_holds_also_with_biases(convention, kappa):
    model = vit()
    plain = wc.measure(model, X, convention=convention, samples=2)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.bias.normal_(std=30.0)  # the queries are then mostly bias
    biased = wc.measure(model, X, convention=convention)
    for report in (plain, biased):
        for head in (head for layer in report.layers for head in layer.heads):
            assert head.bound_log10 >= math.log10(head.jacobian.kappa(kappa))
    # (U1) of the biased head, whose J_K reads Q + b: without b the bound would be smaller than this.
    head = capture_attention(model, X[:1])[0].head(0)
    low, high = SoftmaxJacobian(head).hints.bounds()
    if convention == "wide":
        assert biased.layers[0].heads[0].bound_log10 == pytest.approx(math.log10(high / low), abs=1e-6)


def test_ill_conditioned_heads_skip_the_eigenvalues_and_give_the_same(monkeypatch):
    model = vit(img_size=32)
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for block in model.blocks:
            block.norm1.weight[1:] *= 1e-4
    quick = wc.measure(model, images)
    monkeypatch.setattr(spectrum_module, "_squaring_loses", lambda gram: False)
    slow = wc.measure(model, images)
    assert quick == slow and quick.layers[0].heads[0].jacobian.condition_number > 1e6


def test_heads_share_their_tokens_and_have_the_papers_bound_of_the_theory():
    model = vit()
    heads = capture_attention(model, X[:1])[1].heads([(0, None), (2, None)])
    assert heads[0].x.data_ptr() == heads[1].x.data_ptr()
    report = wc.measure(model, X[:1], layers=[1], heads=[0, 2])
    for head, found in zip(heads, report.layers[0].heads, strict=True):
        assert found.papers_bound_log10 == pytest.approx(papers_bound(head).log10, rel=1e-12)
    alone = wc.measure(model, X[:1], layers=[1], heads=[2]).layers[0].heads[0]
    together = report.layers[0].heads[1]  # equal but for rounding, which differs between processors
    assert alone.papers_bound_log10 == pytest.approx(together.papers_bound_log10, rel=1e-12)
    assert alone.jacobian.sigma_max == pytest.approx(together.jacobian.sigma_max, rel=1e-12)


# -- options, and how far one call walks


def test_settings_are_a_record_and_keywords_replace_its_fields():
    model, settings = vit(depth=1), wc.MeasureSettings(samples=2, kappa="pseudo")
    report = wc.measure(model, X, settings=settings, heads=[0])
    assert report == wc.measure(model, X, samples=2, kappa="pseudo", heads=[0])
    [alone] = wc.measure(model, X, settings=settings, samples=1, heads=[0]).layers[0].heads
    assert len(alone.samples) == 1 and alone.samples == report.layers[0].heads[0].samples[:1]
    with pytest.raises(TypeError, match="sample"):
        wc.measure(model, X, sample=2)
