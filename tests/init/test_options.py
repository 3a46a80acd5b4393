"""Which weights an initialisation asks for and leaves alone, and which values its options may have."""

import inspect
import re

import pytest
import torch
from torch import nn

import wellcond as wc
from models import XTransformersAttention
from wellcond.init.apply import check_options
from wellcond.init.plan import METHODS
from wellcond.init.selection import exclusion


def decoder(width, heads):
    layer = nn.TransformerDecoderLayer(width, heads, 2 * width, batch_first=True)
    return nn.ModuleDict({"decoder": nn.TransformerDecoder(layer, 2), "head": nn.Linear(width, 5)})


def test_weight_selection_takes_the_cross_attention_of_a_decoder():
    teacher, student = decoder(16, 4), decoder(8, 2)
    classifier = student["head"].weight.clone()
    wc.init_(student, "weight_selection", teacher=teacher)
    expected = teacher.state_dict()
    for name, found in student.state_dict().items():
        if name.startswith("head."):
            continue
        picked = expected[name][
            tuple(slice(None, None, t // s) for t, s in zip(expected[name].shape, found.shape, strict=True))
        ]
        assert torch.equal(found, picked), name
    assert torch.equal(student["head"].weight, classifier)


class Named(nn.Module):
    """An attention whose own name ends in head."""

    def __init__(self):
        super().__init__()
        self.multi_head = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 3)


def test_what_the_classifier_is_called():
    is_excluded = exclusion(Named(), ("head",))
    kept = ["head.weight", "head.fc.bias", "head_dist.weight", "lm_head.weight", "heads.head.weight"]
    taken = ["multi_head.in_proj_weight", "multi_head.out_proj.bias", "decoder.multihead_attn.in_proj_weight",
             "multi_head_attention.q.weight", "headwise.weight", "overhead.weight"]  # fmt: skip
    assert all(map(is_excluded, kept)) and not any(map(is_excluded, taken))
    assert exclusion(Named(), ("multi_head",))("multi_head.in_proj_weight")
    one_block = exclusion(Named(), ("blocks.1",))
    assert one_block("blocks.1.mlp.fc1.weight") and not one_block("blocks.10.mlp.fc1.weight")


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


@pytest.mark.parametrize(
    ("method", "option", "value", "message"),
    [
        ("gaussian", "std", "abc", "std of 'gaussian': expected a finite number above 0 or None, got 'abc'"),
        ("gaussian", "std", float("nan"), "a finite number above 0 or None, got nan, which is not finite"),
        ("gaussian", "std", float("inf"), "got inf, which is not finite"),
        ("gaussian", "std", -0.02, "a finite number above 0 or None, got -0.02"),
        ("gaussian", "std", 0, "a finite number above 0"),
        ("gaussian", "std", True, "a finite number above 0"),
        ("gaussian", "std", [1.0], "a finite number above 0"),
        ("gaussian", "tokens", 1.5, "tokens of 'gaussian': expected a whole number, got 1.5"),
        ("gaussian", "value", "shared", "unknown value: got 'shared', expected one of 'gaussian', 'per_head', 'joint'"),
        ("gaussian", "projections", "qx", "unknown projection: got 'x'"),
        ("gaussian", "projections", 3, "projections of 'gaussian': expected text, got 3"),
        ("conditioned", "value_scale", "big", "expected a finite number or one of 'default', got 'big'"),
        ("conditioned", "orthogonal", "cayley", "unknown orthogonal: got 'cayley', expected one of 'svd', 'qr'"),
        ("conditioned", "match_norm", "yes", "expected True or False, got 'yes'"),
        ("conditioned", "output", "joint", "True or False or one of 'identity', 'orthogonal', got 'joint'"),
        ("mimetic", "qk_noise", float("nan"), "which is not finite"),
        ("mimetic", "qk_sign", 2, "unknown qk_sign: got 2, expected one of 1, -1"),
        ("mimetic", "position", "polar", "unknown position"),
        ("default", "rule", None, "rule of 'default': expected one of 'family', 'torch', got None"),
        ("weight_selection", "exclude", "head", "exclude of 'weight_selection': expected a list of text, got 'head'"),
        ("weight_selection", "teacher", "big", "teacher of 'weight_selection': expected a Module, got 'big'"),
    ],
)
def test_a_wrong_value_is_refused_before_the_model_is_looked_at(method, option, value, message):
    needed = {"teacher": nn.Linear(2, 2)} if method == "weight_selection" else {}
    for ask in (lambda options: check_options(method, options), lambda options: wc.init_(None, method, **options)):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            ask(needed | {option: value})
        assert isinstance(caught.value, wc.WellcondError)


def test_options_that_exclude_each_other_are_refused_without_a_model():
    with pytest.raises(wc.WeightError, match="sets q and k together"):
        check_options("gaussian", {"keys": "tied", "projections": "qv"})
    with pytest.raises(wc.WeightError, match="an own_token between"):
        check_options("conditioned", {"keys": "tied", "own_token": 1.5})


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_default_is_a_value_that_is_allowed(method):
    parameters = inspect.signature(METHODS[method]).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    check_options(method, options | ({"teacher": nn.Linear(2, 2)} if method == "weight_selection" else {}))
