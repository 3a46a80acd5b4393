"""Readings of weights that the module's own output confirms, and wrong ones that it refutes, whatever the kernel."""

import dataclasses

import pytest
import torch
from torch import nn

import wellcond as wc
from attention.modern import (
    Grouped,
    HeldElsewhere,
    Nanochat,
    NormInside,
    PerHead,
    Stack,
    TalkingHeads,
    TwoStreams,
)
from wellcond.attention import trial
from wellcond.attention.proof import prove
from wellcond.attention.site import ModuleContext

KINDS = {
    "plain": {"rotary": False},
    "rotary": {},
    "no mask": {"causal": False},
    "QK-norm in each head": {"norm": "head"},
    "QK-norm over all heads": {"norm": "all heads"},
    "gated output": {"gate": True},
    "capped logits": {"cap": True},
    "normed output": {"out_norm": True},
    "both normed": {"out_norm": True, "norm": "head"},
    "no bias": {"bias": False},
    "opaque kernel": {"kernel": "opaque"},
    "strided groups": {"strided": True},
}


def judged(module, describe):
    """The proof of one reading of a module."""
    first = next(iter(trial.trials(ModuleContext("", module, module), [32])))
    with trial.healthy([describe(first.module)]) as streams:
        return prove(streams, first.run, local=first.local)


def reading(heads, kv_heads, roles="qkvo"):
    def describe(on):
        parts = {"q": on.q_proj, "k": on.k_proj, "v": on.v_proj}
        q, k, v = (parts[letter] for letter in roles[:3])
        place = ModuleContext("", on, on)
        counts = {"num_heads": heads, "num_kv_heads": kv_heads}
        return wc.build_site(place, {"q": q, "k": k, "v": v}, output=on.o_proj, **counts)

    return describe


def without_output(describe):
    return lambda on: dataclasses.replace(describe(on), o=None)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_the_right_reading_is_found_and_proven(options):
    module = Grouped(**options)
    [site] = wc.find_attention(module)
    assert site.evidence == "forward" and (site.num_heads, site.num_kv_heads, site.head_dim) == (4, 2, 8)
    strided = options.get("strided", False)
    assert site.q.rows[1, 0] == (16 if strided else 8)
    causal = options.get("causal", True) and not options.get("cap") and options.get("kernel") != "opaque"
    assert site.causal is causal


WRONG = {
    "heads cut in two": reading(8, 4),
    "pairs of heads as one": reading(2, 1),
    "keys for values": reading(4, 2, "qvk"),
}


WRONG |= {f"{name}, no output declared": without_output(describe) for name, describe in list(WRONG.items())[:2]}


@pytest.mark.parametrize("describe", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_a_wrong_reading_is_refuted(options, describe):
    assert not judged(Grouped(**options), describe).holds


def test_queries_are_told_from_keys():
    module = Grouped(num_kv_heads=4)
    assert judged(module, reading(4, 4)).holds
    assert "reaches other tokens" in judged(module, reading(4, 4, "kqv")).reason


def test_what_may_move_says_what_modifies_the_attention():
    gated = {"rotary": True, "modifiers": ("gated output",)}
    for name, expected in {"plain": {}, "rotary": {"rotary": True}, "gated output": gated}.items():
        facts = judged(Grouped(**KINDS[name]), reading(4, 2)).facts
        assert {key: value for key, value in facts.items() if key != "causal"} == expected


@pytest.mark.parametrize("arrangement", ["blocks", "groups"])
@pytest.mark.parametrize("order", ["qkv", "vkq", "kqv"])
def test_a_fused_weight_is_read_in_the_order_that_its_forward_uses(order, arrangement):
    [site] = wc.find_attention(NormInside(order, arrangement))
    unit = 8 if arrangement == "groups" else 24
    assert site.k.rows[0, 0] == unit * order.index("k") and site.v.rows[0, 0] == unit * order.index("v")


def test_talking_heads_are_heads():
    [site] = wc.find_attention(TalkingHeads())
    assert site.talking_heads and site.evidence == "forward"


def test_flex_attention_with_a_score_mod_and_a_block_mask():
    [site] = wc.find_attention(Grouped(kernel="flex"))
    assert site.evidence == "forward" and site.causal and site.rotary


def test_projections_in_a_part_of_their_own_behind_a_block_mask():
    [site] = wc.find_attention(HeldElsewhere())
    assert (site.num_heads, site.num_kv_heads) == (4, 2) and site.k.rows[:, 0].tolist() == [16, 48]
    assert site.evidence == "forward" and site.causal is None  # the caller's mask decides


def test_nanochat_with_tables_from_the_model():
    sites = wc.find_attention(Nanochat())
    assert [site.evidence for site in sites] == ["forward", "forward"]
    assert sites[0].qk_norm == "other" and sites[0].num_kv_heads == 2 and sites[0].causal


@pytest.mark.parametrize("output", ["(out, in)", "(in, out)"])
@pytest.mark.parametrize("shape", [(4, 32, 32), (128, 32), (32, 128)], ids=str)
def test_a_stack_of_four_matrices(shape, output):
    module = Stack(shape, output)
    [site] = wc.find_attention(module)
    assert site.evidence == "forward" and site.o is not None
    with torch.no_grad():
        module.qkvo_w.copy_(torch.randn(shape))
    stacked = module.qkvo_w.detach().view(4, 4, 8, 32)
    for index, slot in enumerate((site.q, site.k, site.v)):
        assert torch.equal(slot.read_raw(), stacked[index])
    stored = module.qkvo_w.detach().view(4, 32, 32)[3]
    matrix = stored if output == "(out, in)" else stored.T
    assert torch.equal(site.o.read_raw()[1], matrix[:, 8:16])


def test_one_matrix_per_head():
    module = PerHead()
    [site] = wc.find_attention(module)
    assert torch.equal(site.q.read_raw()[2], module.W_Q.detach()[2].T)
    assert torch.equal(site.o.read_raw()[2], module.W_O.detach()[2].T)
    assert torch.equal(site.k.read_bias(), module.b_K)


@pytest.mark.parametrize("make", [Stack, PerHead], ids=["stack", "per head"])
def test_stacks_are_initialised_measured_conditioned_and_folded(make):
    module = nn.Sequential(make())
    keys = list(module.state_dict())
    wc.init_(module, "conditioned")
    [site] = wc.find_attention(module)
    gram = site.q.read_raw() @ site.q.read_raw().mT
    assert torch.allclose(gram, gram[0, 0, 0] * torch.eye(8).expand(4, 8, 8), atol=1e-5)
    wc.init_(module, "gaussian", projections="qkv")
    if make is Stack:
        torch.nn.init.normal_(module[0].qkvo_w, std=32**-0.5)
    report = wc.measure(module, torch.randn(1, 6, 32), heads=[0])
    assert report.layers[0].heads[0].jacobian.kappa() > 1
    for method, options in (("balanced", {}), ("identity", {"lam": 0.1})):
        wc.fold_(wc.condition_(module, method, **options))
        assert list(module.state_dict()) == keys


def test_two_streams_are_two_sites():
    sites = wc.find_attention(nn.ModuleDict({"attn": TwoStreams()}))
    assert [site.name for site in sites] == ["attn", "attn.added"]
    assert sites[1].in_features == 24 and sites[1].o is not None
    wc.init_(nn.ModuleDict({"attn": sites[0].module}), "conditioned")
    gram = sites[1].q.read_raw()[0] @ sites[1].q.read_raw()[0].T
    assert torch.allclose(gram, gram[0, 0] * torch.eye(8), atol=1e-5)


def test_what_the_second_stream_does_not_show_is_said():
    model, batch = TwoStreams(), (torch.randn(1, 5, 32), torch.randn(1, 4, 24))
    first, second = wc.measure(model, batch, heads=[0]).layers
    assert first.heads and not second.heads and "second stream" in second.problem
    with pytest.raises(wc.WeightError, match="second stream .*logits=None"):
        wc.init_(model, "calibrated", batch=batch)
    wc.init_(model, "calibrated", batch=batch, logits=None)
    wc.fold_(wc.condition_(model, "balanced"))


def test_a_head_count_that_nobody_declares_is_found():
    module = NormInside()
    del module.heads
    [site] = wc.find_attention(module)
    assert site.num_heads == 3
