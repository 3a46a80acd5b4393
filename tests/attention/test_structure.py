"""Families that nobody named: confirmed by their own forward pass, or refused."""

import textwrap
import threading

import pytest
import torch
from torch import nn

import wellcond as wc
from attention.modern import NormInside, PerHead, Stack
from contracts.harness import randomise_
from models import (
    Block,
    FusedWithMask,
    HeadsFastest,
    NanoGPTAttention,
    StrangeAttention,
    XTransformersAttention,
    stack,
)
from wellcond.attention import find


@pytest.mark.parametrize("flash", [True, False])  # with a causal buffer
def test_nanogpt_is_found_with_its_facts(flash):
    sites = wc.find_attention(stack(NanoGPTAttention, num_heads=3, flash=flash))
    assert [site.name for site in sites] == ["0.attn", "1.attn"]
    site = sites[0]
    assert (site.num_heads, site.head_dim) == (3, 4) and site.k.rows[:, 0].tolist() == [12, 16, 20]
    assert site.scale == pytest.approx(0.5, rel=1e-6) and site.causal is True and not site.rotary


def test_a_module_that_cannot_be_copied_is_not_tried():
    module = XTransformersAttention(width=26, dim_head=7)  # sizes of no other test: what is proven is kept
    module.lock = threading.Lock()
    [site] = wc.find_attention(module)
    assert site.evidence == "structure"
    fused = NanoGPTAttention(width=39)
    fused.lock = threading.Lock()
    with pytest.raises(wc.UnsupportedLayoutError, match="cannot pickle '_thread.lock' object"):
        wc.find_attention(fused)


def test_what_no_reading_fits_is_refused_with_an_adapter_to_paste():
    with pytest.raises(wc.UnsupportedLayoutError, match="contradicts every reading") as error:
        wc.find_attention(Block(HeadsFastest()))
    code = str(error.value).partition("    @wellcond")[2]
    assert "register_adapter(HeadsFastest)" in code and 'place, {"qkv": m.c_attn}, num_heads=m.n_head' in code
    assert "output=m.c_proj" in code and "strict=False" in str(error.value)


def test_a_forward_that_cannot_be_tried_is_refused():
    with pytest.raises(wc.UnsupportedLayoutError, match="needs the arguments x, table, position"):
        wc.find_attention(FusedWithMask())


def test_x_transformers_style_with_grouped_queries():
    module = XTransformersAttention(heads=4, kv_heads=2)
    site = wc.find_attention(module)[0]
    assert (site.num_heads, site.num_kv_heads, site.head_dim) == (4, 2, 5)
    assert site.o is not None and site.o.read().shape == (4, 12, 5)
    del module.heads, module.kv_heads
    assert wc.find_attention(module)[0].num_heads == 4  # of the width that it declares


def test_rows_that_heads_do_not_divide_are_refused():
    module = XTransformersAttention()
    module.dim_head = 7
    with pytest.raises(wc.UnsupportedLayoutError, match=r"expected rows: 28 = 4\*7     got: 20"):
        wc.find_attention(module)


def test_strict_false_leaves_the_unknown_out():
    model = nn.Sequential(Block(NanoGPTAttention()), Block(HeadsFastest()))
    with pytest.raises(wc.UnsupportedLayoutError):
        wc.find_attention(model)
    assert [site.name for site in wc.find_attention(model, strict=False)] == ["0.attn"]


def test_no_attention_says_what_to_do_and_then_what_was_seen():
    advice = r"register_adapter\(ThatClass\): see docs/layouts.md.\n  Classes in the model: Linear, ReLU, Sequential\n"
    with pytest.raises(wc.AttentionNotFoundError, match=advice):
        wc.find_attention(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def test_a_registered_adapter_decides_and_is_inherited_only_with_the_forward():
    class Mine(StrangeAttention):
        pass

    @wc.register_adapter(Mine)
    def mine(place):
        module = place.module
        return wc.build_site(place, {"vkq": module.c_attn}, num_heads=module.n_head)

    class Heir(Mine):
        pass

    class Rebel(Mine):
        def forward(self, x):
            return x

    assert wc.find_attention(Mine())[0].q.rows[0].tolist() == [24, 25, 26, 27]
    assert wc.find_attention(Mine())[0].evidence == "forward"
    assert wc.find_attention(Heir())[0].q.rows[0].tolist() == [24, 25, 26, 27]
    with pytest.raises(wc.UnsupportedLayoutError):
        wc.find_attention(Rebel())


def test_finding_changes_nothing():
    model = stack()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    calls = []
    model[0].attn.register_forward_hook(lambda *_: calls.append(1))
    wc.find_attention(model)
    assert not calls and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_meta_device_models_are_described():
    with torch.device("meta"):
        model = stack()
    assert len(wc.find_attention(model)) == 2


def test_shared_modules_are_listed_once():
    block = Block(NanoGPTAttention())
    assert len(wc.find_attention(nn.Sequential(block, block))) == 1


@pytest.mark.parametrize(
    "module",
    [NanoGPTAttention(), NanoGPTAttention(flash=False), XTransformersAttention(kv_heads=2)],
    ids=lambda module: type(module).__name__,
)
def test_heads_reproduce_the_forward(module):
    randomise_(module)
    site = wc.find_attention(module)[0]
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    output = module(x) * 0
    for h in range(site.num_heads):
        kv = h // (site.num_heads // site.num_kv_heads)
        q, k, v = (
            x @ slot.read()[at].T + (0 if slot.read_bias() is None else slot.read_bias()[at])
            for slot, at in ((site.q, h), (site.k, kv), (site.v, kv))
        )
        logits = site.scale * q @ k.mT
        if site.causal:
            logits = logits.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        output = output + logits.softmax(-1) @ v @ site.o.read()[h].T
    bias = site.o.read_bias()
    torch.testing.assert_close(output + (0 if bias is None else bias), module(x))


@pytest.mark.filterwarnings("ignore")  # torch.ao announces its end
def test_quantised_modules_are_refused_by_name():
    import timm

    model = timm.models.VisionTransformer(img_size=8, patch_size=4, embed_dim=24, depth=1, num_heads=3)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    with pytest.raises(wc.WeightError, match=r"dynamic.*holds no weight tensor \(quantised\?\)"):
        wc.find_attention(quantised)
    stored_as_integers = nn.MultiheadAttention(8, 2)
    stored_as_integers.in_proj_weight = nn.Parameter(torch.zeros(24, 8, dtype=torch.int8), requires_grad=False)
    for verb in (wc.init_, wc.condition_):
        with pytest.raises(wc.WeightError, match=r"stored as torch.int8 \(quantised\?\)"):
            verb(stored_as_integers)


class TableNeeded:
    """A forward pass with arguments that wellcond cannot invent."""

    def forward(self, x, table, position):
        return super().forward(x + table["shift"][position])


class FusedBehindNorm(TableNeeded, NormInside):
    pass


class HeadByHead(TableNeeded, PerHead):
    pass


class Bank(TableNeeded, Stack):
    pass


PASTED = {
    "a fused projection": (FusedBehindNorm, 24),
    "one matrix per head": (HeadByHead, 32),
    "a stack of matrices": (Bank, 32),
    "a fused projection of a model": (FusedWithMask, 12),
}


@pytest.mark.parametrize("case", PASTED)
def test_the_adapter_of_a_refusal_works_when_it_is_pasted(case, monkeypatch):
    cls, width = PASTED[case]
    monkeypatch.setattr(find, "ADAPTERS", dict(find.ADAPTERS))
    with pytest.raises(wc.UnsupportedLayoutError, match="needs the arguments x, table, position") as refusal:
        wc.find_attention(cls())
    _, _, text = str(refusal.value).partition("docs/extend/adapter.md):\n")
    exec(textwrap.dedent(text), {})
    with pytest.warns(wc.LayoutWarning, match="example="):
        [site] = wc.find_attention(cls())
    assert site.evidence == "declared" and site.o is not None

    def example(module):
        return torch.randn(1, 5, width), {"shift": torch.randn(3, width)}, 1

    wc.register_adapter(cls, example=example)(find.find_adapter(cls()))
    assert wc.find_attention(cls())[0].evidence == "forward"
