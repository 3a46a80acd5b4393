"""The verb `init_`: seeds, storage, dtypes, what it refuses, and what a failure leaves."""

import pytest
import timm
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

import wellcond as wc
from init.helpers import assert_semi_orthogonal, first, generator, tiny_vit
from models import NanoGPTAttention, XTransformersAttention, stack
from wellcond.init.plan import METHODS

EVERY_METHOD = sorted(set(METHODS) - {"weight_selection", "calibrated"})  # these need more than a model


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_the_seed_decides_whatever_the_global_state(method):
    one, two = tiny_vit(), tiny_vit()
    two.load_state_dict(one.state_dict())
    wc.init_(one, method, generator=generator(3))
    torch.manual_seed(77)
    state = torch.get_rng_state()
    wc.init_(two, method, generator=generator(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    wc.init_(two, method, generator=generator(4))
    assert not torch.equal(one.blocks[0].attn.qkv.weight, two.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize("method", ["conditioned", "orthogonal", "gaussian", "mimetic"])
def test_the_same_seed_gives_the_same_weights_whatever_the_storage(method):
    storages = [
        timm.models.VisionTransformer(img_size=8, patch_size=4, embed_dim=24, depth=1, num_heads=3, num_classes=0),
        NanoGPTAttention(24, 3),
        XTransformersAttention(24, heads=3, dim_head=8),
        nn.MultiheadAttention(24, 3),
        GPT2Model(GPT2Config(n_embd=24, n_head=3, n_layer=1, vocab_size=11, n_positions=16)),
    ]
    sites = [first(wc.init_(model, method, generator=generator(5))) for model in storages]
    for site in sites[1:]:
        for role in "qkv":
            assert torch.equal(site.slots[role].read(), sites[0].slots[role].read())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_the_float32_result_cast(dtype):
    plain = first(wc.init_(tiny_vit(), "conditioned", generator=generator()))
    other = first(wc.init_(tiny_vit().to(dtype), "conditioned", generator=generator()))
    assert other.q.read().dtype == dtype
    assert torch.equal(other.q.read(), plain.q.read().to(dtype))


def test_sites_restrict():
    model = stack(depth=2)
    before = model[0].attn.c_attn.weight.clone()
    wc.init_(model, "conditioned", sites=wc.find_attention(model)[1:])
    assert torch.equal(model[0].attn.c_attn.weight, before)
    with pytest.raises(ValueError, match="not a part of this model"):
        wc.init_(model, "conditioned", sites=wc.find_attention(stack()))
    with pytest.raises(ValueError, match="empty list"):
        wc.init_(model, "conditioned", sites=[])


def test_unknown_methods_and_options_list_the_choices():
    model = stack()
    with pytest.raises(
        wc.UnknownChoiceError, match=r"'balanced' is a correction.*: use wellcond.condition_\(model, \"balanced\"\)"
    ):
        wc.init_(nn.MultiheadAttention(8, 2), "balanced")
    with pytest.raises(wc.UnknownChoiceError, match="Did you mean 'conditioned'"):
        wc.init_(nn.MultiheadAttention(8, 2), "conditoned")
    with pytest.raises(wc.UnknownChoiceError, match="'conditioned', 'default', 'gaussian', 'mimetic'"):
        wc.init_(model, "condtioned")
    with pytest.raises(wc.UnknownChoiceError, match="expected one of 'orthogonal', 'heads', 'value'"):
        wc.init_(model, "conditioned", values="joint")
    with pytest.raises(wc.UnknownChoiceError, match="'per_head', 'joint', 'orthogonal'"):
        wc.init_(model, "conditioned", value="shared")
    with pytest.raises(ValueError, match="subset of 'qkv'"):
        wc.init_(model, "conditioned", projections="")
    with pytest.raises(wc.UnknownChoiceError, match="unknown projection"):
        wc.init_(model, "conditioned", projections="qo")


def test_meta_and_frozen_parameters_are_refused():
    with torch.device("meta"):
        on_meta = stack()
    with pytest.raises(wc.WeightError, match=r"after the model is materialised: model.to_empty"):
        wc.init_(on_meta, "conditioned")
    frozen = stack()
    frozen[1].attn.c_attn.weight.requires_grad_(False)
    before = frozen[0].attn.c_attn.weight.clone()
    with pytest.raises(wc.WeightError, match=r"1.attn \(q\) is frozen"):
        wc.init_(frozen, "conditioned")
    assert torch.equal(frozen[0].attn.c_attn.weight, before)


def test_tied_weights_are_refused_unless_every_holder_is_rewritten_alike():
    model = stack(XTransformersAttention, depth=2)
    model[1].attn.to_q.weight = model[0].attn.to_q.weight
    wc.init_(model, "conditioned")  # both holders are queries of the same shape
    assert_semi_orthogonal(first(model).q.read())
    with pytest.raises(wc.WeightError, match="is tied: the same parameter is used as 0.attn.to_q.weight, 1.attn"):
        wc.init_(model, "conditioned", sites=wc.find_attention(model)[:1])
    model[0].attn.to_k.weight = model[0].attn.to_q.weight
    with pytest.raises(wc.WeightError, match="tied"):
        wc.init_(model, "conditioned")


def test_a_failure_while_planning_leaves_the_model_as_it_was(monkeypatch):
    model = stack()
    before = [p.clone() for p in model.parameters()]
    original, calls = METHODS["gaussian"], []

    def breaks(context, **options):
        for write in original(context, **options):
            calls.append(write)
            if len(calls) == 4:
                raise RuntimeError("out of memory")
            yield write

    monkeypatch.setitem(METHODS, "gaussian", breaks)
    with pytest.raises(RuntimeError, match="out of memory"):
        wc.init_(model, "gaussian")
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    monkeypatch.setitem(METHODS, "gaussian", original)
    with pytest.raises(wc.OptionError, match="not finite"):
        wc.init_(model, "gaussian", std=float("inf"))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_values_that_overflow_the_stored_dtype_are_refused():
    with pytest.raises(wc.WeightError, match="not finite"):
        wc.init_(tiny_vit().half(), "conditioned", value_scale=1e6)


@pytest.mark.parametrize(
    ("method", "options", "free"),
    [
        ("conditioned", {}, "o"),
        ("conditioned", {"projections": "qk"}, "vo"),
        ("orthogonal", {"projections": "v"}, "qko"),
        ("gaussian", {"projections": "q"}, "kvo"),
        ("default", {"output": False}, "o"),
        ("default", {"output": False, "rule": "torch"}, "o"),
    ],
)
def test_only_what_is_written_must_be_writable(method, options, free):
    model = XTransformersAttention(12, heads=3, dim_head=4)
    [site] = wc.find_attention(model)
    for role in free:
        site.slots[role].parameter.requires_grad_(False)
    before = {role: slot.read().clone() for role, slot in site.slots.items()}
    wc.init_(model, method, **options)
    for role, slot in site.slots.items():
        assert torch.equal(slot.read(), before[role]) is (role in free)


@pytest.mark.parametrize(
    ("method", "options"), [("conditioned", {"output": True}), ("default", {}), ("mimetic", {})], ids=str
)
def test_an_output_projection_that_is_written_must_be_writable(method, options):
    model = XTransformersAttention(12, heads=3, dim_head=4)
    wc.find_attention(model)[0].o.parameter.requires_grad_(False)
    with pytest.raises(wc.WeightError, match=r"\(o\) is frozen"):
        wc.init_(model, method, **options)


def test_one_line_says_what_was_done(caplog):
    with caplog.at_level("INFO", logger="wellcond"):
        wc.init_(tiny_vit(), "conditioned")
        wc.init_(nn.MultiheadAttention(256, 4), "default")
    assert [record.getMessage() for record in caplog.records] == [
        "conditioned: 2 attention layers, 6 heads, 2 parameters (3,456 values) initialised",
        "default: 1 attention layer, 4 heads, 4 parameters (0.3 M values) initialised",
    ]
