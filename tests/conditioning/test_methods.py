"""The registry of corrections: a user's own one, learned parameters, and weights that are stored as stacks."""

import logging
import pickle

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import wellcond as wc
from attention.modern import PerHead, Stack
from conditioning.test_corrections import effective, vit
from wellcond.arguments import CORRECTIONS
from wellcond.conditioning import methods
from wellcond.linalg.spectrum import spectra

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def registry():
    """What a test registers is forgotten after it."""
    known = set(CORRECTIONS)
    yield
    for name in set(CORRECTIONS) - known:
        del CORRECTIONS[name]


@pytest.fixture
def equal_rows(registry):
    @wc.register_condition("equal_rows")
    def equal_rows(*, strength=1.0, layout="per_head", frozen=False):
        def correct(heads):
            norms = heads.norm(dim=-1, keepdim=True)
            return heads * (norms.mean(dim=-2, keepdim=True) / norms) ** strength

        return wc.Correction(correct, layout=layout, frozen=frozen)


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"layout": "joint", "strength": 0.5}], ids=str)
def test_a_users_own_correction_trains_folds_saves_and_loads(equal_rows, options, tmp_path):
    torch.manual_seed(0)
    model = wc.condition_(vit(), "equal_rows", **options)
    if not options:
        norms = effective(model).norm(dim=-1)
        torch.testing.assert_close(norms, norms.mean(dim=-1, keepdim=True).expand_as(norms))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(X).square().sum().backward()
    optimizer.step()
    output = model.eval()(X)
    assert wc.conditioning_of(model) | options == wc.conditioning_of(model)

    torch.save(model.state_dict(), tmp_path / "raw.pt")
    state = torch.load(tmp_path / "raw.pt", weights_only=True)
    twin = wc.recondition_(vit().eval(), state)
    twin.load_state_dict(state)
    for other in (twin, pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(X), output)
    with wc.folded(model):
        torch.testing.assert_close(model(X), output, rtol=1e-5, atol=1e-6)


def test_a_plain_function_is_enough_and_names_are_not_taken_twice(registry):
    wc.register_condition("doubled")(lambda: lambda heads: 2 * heads)
    model = vit()
    before = effective(model)
    torch.testing.assert_close(effective(wc.condition_(model, "doubled")), 2 * before)
    with pytest.raises(ValueError, match="'polar'"):
        wc.register_condition("polar")(lambda: None)
    with pytest.raises(wc.UnknownChoiceError, match="'doubled'"):
        wc.condition_(vit(), "double")
    with pytest.raises(ValueError, match="expected one of them"):
        wc.Correction()


@pytest.fixture
def gained(registry):
    """A gain for each head, learned, on weights of spectral norm one: sigma-reparametrisation."""

    @wc.register_condition("gained")
    def gained():
        def correct(heads, gain):
            norms = torch.linalg.matrix_norm(heads, 2).detach()
            return heads * (gain / norms)[:, None, None]

        first = {"gain": lambda heads: torch.linalg.matrix_norm(heads, 2)}
        return wc.Correction(correct, gradient="through", learned=first)


def test_learned_parameters_are_trained_saved_and_folded_away(gained):
    torch.manual_seed(0)
    model = vit().eval()
    before, keys = model(X), list(model.state_dict())
    wc.condition_(model, "gained")
    torch.testing.assert_close(model(X), before, rtol=1e-4, atol=1e-5)
    gain = model.blocks[0].attn.qkv.weight_wellcond_gain
    assert gain.shape == (9,) and "blocks.0.attn.qkv.weight_wellcond_gain" in dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).square().sum().backward()
    assert gain.grad.abs().min() > 0
    optimizer.step()
    torch.testing.assert_close(torch.tensor([s.sigma_max for s in spectra(effective(model))]), gain[:3].detach())
    output, state = model(X), model.state_dict()
    twin = wc.recondition_(vit().eval(), state)
    twin.load_state_dict(state)
    assert torch.equal(twin(X), output)
    with wc.folded(model):
        assert list(model.state_dict()) == keys
    assert model.blocks[0].attn.qkv.weight_wellcond_gain is gain
    torch.testing.assert_close(wc.fold_(model)(X), output, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == keys


METHODS = [
    ("identity", {"lam": {"q": 0.2, "v": 1.0}, "layout": "per_head"}),
    ("balanced", {"layout": "joint"}),
    ("balanced", {"frozen": True}),
]


@pytest.mark.parametrize("method, options", METHODS, ids=str)
@pytest.mark.parametrize("build", [Stack, PerHead])
def test_weights_that_are_stacks_are_corrected_like_separate_ones(build, method, options):
    torch.manual_seed(0)
    model, reference = build(), nn.MultiheadAttention(32, 4)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    site, plain = wc.find_attention(model)[0], wc.find_attention(reference)[0]
    for role in "qkv":
        plain.slots[role].write_(site.slots[role].read_raw())
    wc.condition_(model, method, **options)
    wc.condition_(reference, method, **options)
    for role in "qkv":
        torch.testing.assert_close(site.slots[role].read(), plain.slots[role].read())
    x = torch.randn(2, 5, 32)
    output = model(x)
    output.square().sum().backward()
    parameters = list(model.parameters())
    assert all(p.grad is not None for p in parameters)
    gradients = [p.grad.clone() for p in parameters]
    wc.fold_(model).zero_grad()
    torch.testing.assert_close(model(x), output)
    model(x).square().sum().backward()
    for ours, p in zip(gradients, parameters, strict=True):
        torch.testing.assert_close(ours, p.grad)
    assert type(model) is build


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": 11, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_folded_serves_generation_with_one_polar_factor_for_each_weight(order, monkeypatch):
    counted = []
    mix = methods.mix_with_polar
    monkeypatch.setattr(methods, "mix_with_polar", lambda heads, **o: counted.append(len(heads)) or mix(heads, **o))
    model = wc.condition_(gpt2(), "balanced")
    heads, raw = 2 * 3 * 3, {name: p.detach().clone() for name, p in model.named_parameters()}
    prompt = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    options = {"min_new_tokens": 5, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    counted.clear()
    with torch.no_grad():
        tokens = model.generate(**prompt, **options)
    assert sum(counted) == 5 * heads  # once for each token
    counted.clear()
    if order == "inside":
        with wc.folded(model), torch.inference_mode():
            again = model.generate(**prompt, **options)
    else:
        with torch.inference_mode(), wc.folded(model):
            again = model.generate(**prompt, **options)
    assert sum(counted) == heads
    assert torch.equal(again, tokens) and wc.conditioning_of(model)["method"] == "balanced"
    assert all(torch.equal(p, raw[name]) for name, p in model.named_parameters())
    model(**prompt, labels=prompt["input_ids"]).loss.backward()  # and it trains on


def test_the_verbs_log_one_line(caplog):
    with caplog.at_level(logging.INFO, "wellcond"):
        model = wc.condition_(vit(), "balanced", projections="qk")
        settings = wc.conditioning_of(model)
        wc.fold_(model)
        wc.recondition_(model, settings)
    lines = [record.getMessage() for record in caplog.records if record.name == "wellcond"]
    changed = "2 attention layers, 2 weights with 3,456 numbers"
    assert lines == [
        f"condition_ 'balanced' on qk: 12 heads of {changed}",
        f"fold_: {changed}",
        f"condition_ 'balanced' on qk: 12 heads of {changed}",
    ]
