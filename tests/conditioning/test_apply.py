"""Surgery restoration, checkpoints and everything that people do with models in between."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import wellcond as wc
from conditioning.test_corrections import corrections, each_method, vit
from models import XTransformersAttention, unchanged
from wellcond.attention.slot import effective_weight

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def everything_about(model):
    """All that must survive `condition_` then `fold_`, except values."""
    return {
        "classes": [type(m) for m in model.modules()],
        "instance dicts": [sorted(vars(m)) for m in model.modules()],
        "parameters": [(name, id(p), p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()],
        "keys": list(model.state_dict()),
        "training": [m.training for m in model.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._load_state_dict_pre_hooks))
            for m in model.modules()
        ],
    }


@each_method
def test_folding_restores_a_plain_model_with_the_same_outputs(method, options):
    model = vit().eval()
    model.blocks[0].attn.register_forward_hook(lambda *_: None)
    model.blocks[1].train()
    before = everything_about(model)
    wc.condition_(model, method, **options)
    conditioned = model(X)
    assert wc.fold_(model) is model
    assert everything_about(model) == before
    torch.testing.assert_close(model(X), conditioned, rtol=0, atol=1e-6)
    fresh = vit().eval()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(X), conditioned, rtol=0, atol=1e-6)


def test_folding_a_plain_model_or_a_part_is_refused():
    model = vit()
    with pytest.raises(wc.ConditioningError, match="nothing to fold"):
        wc.fold_(model)
    wc.condition_(model, "balanced")
    with pytest.raises(wc.ConditioningError, match="fold the whole model"):
        wc.fold_(model.blocks[0])
    wrapper = nn.Sequential(model)
    wc.fold_(wrapper)
    assert wc.conditioning_of(model) is None


@each_method
def test_folded_is_plain_inside_and_exact_after(method, options):
    model = vit().eval()
    keys = list(model.state_dict())
    wc.condition_(model, method, **options)
    raw = {name: p.clone() for name, p in model.named_parameters()}
    output, inside = model(X), everything_about(model)
    with wc.folded(model) as plain:
        assert plain is model and list(model.state_dict()) == keys
        torch.testing.assert_close(model(X), output, rtol=0, atol=1e-6)
        assert wc.conditioning_of(model) is None
    assert everything_about(model) == inside
    assert all(torch.equal(p, raw[name]) for name, p in model.named_parameters())
    with pytest.raises(ZeroDivisionError), wc.folded(model):
        raise ZeroDivisionError
    assert torch.equal(model(X), output)


@each_method
def test_training_checkpoints_resume_exactly(method, options):
    def make():
        torch.manual_seed(1)
        model = wc.condition_(vit(), method, **options)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X), torch.tensor([0, 1])).backward()
            optimizer.step()

    model, optimizer = make()
    plain_keys = set(vit().state_dict())
    train(model, optimizer, 2)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    extra = set(model.state_dict()) - plain_keys
    assert plain_keys <= set(model.state_dict()) and sum(key == "wellcond_conditioning" for key in extra) == 1
    train(model, optimizer, 2)

    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    torch.manual_seed(99)
    resumed = wc.condition_(vit(), method, **options)
    resumed_optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.01)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    train(resumed, resumed_optimizer, 2)
    for (name, a), b in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_marked_checkpoint_tells_a_plain_model_what_to_run():
    conditioned = wc.condition_(vit(), "identity", lam=0.5).eval()
    plain, state = vit().eval(), conditioned.state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*wellcond_conditioning"):
        plain.load_state_dict(state)
    wc.recondition_(plain, state).load_state_dict(state)
    assert torch.equal(plain(X), conditioned(X))


def test_a_checkpoint_of_another_conditioning_is_refused_whole():
    source = wc.condition_(vit(), "identity", lam=0.5)
    target = wc.condition_(vit(), "identity", lam=0.25)
    with unchanged(target), pytest.raises(wc.CheckpointMismatchError, match="nothing was loaded"):
        target.load_state_dict(source.state_dict())


def test_a_conditioned_submodule_keeps_its_prefix():
    model = nn.Sequential(nn.Identity(), wc.condition_(vit().eval(), "balanced"))
    fresh = nn.Sequential(nn.Identity(), wc.condition_(vit().eval(), "balanced"))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(X), model(X))


@each_method
def test_deepcopy_and_pickle_are_independent_models(method, options):
    model = wc.condition_(vit().eval(), method, **options)
    output = model(X)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), output)
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(0.01)
        assert torch.equal(model(X), output) and not torch.equal(twin(X), output)
        wc.fold_(twin)
        assert corrections(model) and not corrections(twin)


def test_recondition_follows_a_record():
    model = vit()
    sites = wc.find_attention(model)[1:]
    wc.condition_(model, "balanced", target=1.5, projections="kq", sites=sites)
    record = wc.conditioning_of(model)
    assert record == {
        "method": "balanced", "target": 1.5, "layout": "per_head", "frozen": False, "projections": "qk",
        "sites": ["blocks.1.attn"],
    }  # fmt: skip
    twin = wc.recondition_(vit(), record)
    assert wc.conditioning_of(twin) == record
    with pytest.raises(wc.WeightError, match="which this model does not have"):
        wc.recondition_(vit(depth=1), record)


@each_method
def test_gradient_checkpointing(method, options):
    model = wc.condition_(vit(), method, **options)
    model(X).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    for reentrant in (True, False):
        model.zero_grad()
        x = X.clone().requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], msg=name)


@each_method
def test_moving_between_dtypes(method, options):
    model = wc.condition_(vit().eval(), method, **options)
    output = model(X)
    torch.testing.assert_close(model.double()(X.double()).float(), output, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.float()(X), output)


def test_bfloat16_storage_warns_when_the_weight_would_vanish():
    with pytest.warns(wc.NumericalWarning) as caught:
        wc.condition_(vit(depth=1).bfloat16(), "identity", lam=10.0)
    assert any("rounded away" in str(w.message) for w in caught)
    wc.condition_(vit(depth=1).bfloat16(), "identity", lam=0.5)


def test_functional_call_sees_the_correction():
    model = wc.condition_(vit().eval(), "polar")
    parameters = {name: p.detach() * 1.1 for name, p in model.named_parameters()}
    output = torch.func.functional_call(model, parameters, (X,))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(parameters[name])
    torch.testing.assert_close(model(X), output)
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (X,)).sum())(dict(model.named_parameters()))
    model(X).sum().backward()
    torch.testing.assert_close(grads["blocks.0.attn.qkv.weight"], model.blocks[0].attn.qkv.weight.grad)


def test_inference_mode_and_eval_fast_path():
    layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True, dropout=0.0)
    wc.condition_(layer, "identity", lam=0.4)
    x = torch.randn(2, 5, 24)
    trained = layer(x)
    layer.eval()
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), trained, rtol=1e-4, atol=1e-5)
    wc.fold_(layer)
    torch.testing.assert_close(layer(x), trained, rtol=1e-4, atol=1e-5)


def test_a_projection_shared_by_two_attentions_is_corrected_once():
    a, b = XTransformersAttention(12), XTransformersAttention(12)
    b.to_q = a.to_q
    model = nn.Sequential(a, b)
    before = a.to_q.weight.detach().clone()
    sites = wc.find_attention(model)
    wc.condition_(model, "identity", lam=1.0, sites=[*sites, *sites])
    torch.testing.assert_close((effective_weight(a.to_q, "weight") - before).detach(), torch.eye(20, 12))


def test_sites_found_in_a_part_are_named_by_the_whole():
    def build():
        torch.manual_seed(3)
        return nn.Sequential(XTransformersAttention(12), nn.Sequential(*(XTransformersAttention(12) for _ in range(2))))

    model, twin = build(), build()
    wc.condition_(model, "polar", sites=[wc.find_attention(model[1])[0]])
    assert wc.conditioning_of(model)["sites"] == ["1.0"]
    wc.recondition_(twin, wc.conditioning_of(model))
    twin.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 12)
    assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("options", [{}, {"frozen": True}], ids=["following", "frozen"])
def test_plain_weights_in_a_conditioned_model_count_as_raw(options):
    """torch's distributed checkpoint fills in what is lacking, our marker and frozen corrections among it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    torch.manual_seed(1)
    source = vit().eval()
    plain = source.state_dict()
    expected = wc.condition_(source, "polar", **options)(X)
    for load in (
        lambda model: model.load_state_dict(plain),
        lambda model: set_model_state_dict(model, dict(plain), options=StateDictOptions(full_state_dict=True)),
    ):
        torch.manual_seed(0)
        model = wc.condition_(vit(), "polar", **options).eval()
        with pytest.warns(wc.CheckpointWarning, match="taken as raw weights"):
            load(model)
        torch.testing.assert_close(model(X), expected)
