import pytest
import torch
from torch import nn

import wellcond as wc
from init.test_init import first, generator, tiny_vit
from wellcond.errors import UnsupportedLayoutError


@pytest.mark.parametrize(("distribution", "largest"), [("uniform", (3 / 24) ** 0.5), ("normal", None)])
def test_queries_keys_and_values_have_unit_scale_and_the_output_is_zero(distribution, largest):
    model = tiny_vit()
    others = {
        name: value.clone()
        for name, value in model.named_parameters()
        if not name.endswith(("attn.qkv.weight", "attn.proj.weight"))
    }
    wc.init_(model, "nanochat", distribution=distribution, generator=generator())
    for site in wc.find_attention(model):
        for role in "qkv":
            heads = site.slots[role].read().detach()
            assert float(heads.std()) == pytest.approx(24**-0.5, rel=0.1)
            assert largest is None or float(heads.abs().max()) <= largest * (1 + 1e-6)
        assert not torch.equal(site.q.read(), site.k.read())
        assert not site.o.read().any()
    assert all(torch.equal(value, others[name]) for name, value in model.named_parameters() if name in others)


def test_the_attention_adds_nothing_at_step_0_but_learns():
    model = wc.init_(tiny_vit(), "nanochat", generator=generator())
    attention = model.blocks[0].attn
    tokens = torch.randn(2, 5, 24)
    attention(tokens).sum().backward()
    assert torch.equal(attention(tokens), attention.proj.bias.expand(2, 5, 24))
    assert attention.proj.weight.grad.norm() > 0


def test_an_attention_without_an_output_projection_is_refused_and_nothing_changes():
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertSelfAttention

    config = BertConfig(hidden_size=24, num_attention_heads=3)
    model = nn.ModuleList([tiny_vit(), BertSelfAttention(config)])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UnsupportedLayoutError, match="W_O to zero, but this attention has none"):
        wc.init_(model, "nanochat")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_distribution_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="uniform"):
        wc.init_(tiny_vit(), "nanochat", distribution="cauchy")


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


def test_a_word_other_than_default_is_no_scale():
    with pytest.raises(ValueError, match=r"value_scale of 'conditioned': expected a finite number or one of 'default'"):
        wc.init_(tiny_vit(), "conditioned", value_scale="paper")
