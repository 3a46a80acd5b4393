"""`calibrated` of normalised queries and keys: their gains set the logits; without gains nothing changes."""

import copy

import pytest
import timm
import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import wellcond as wc
from wellcond.attention.gains import find_gains
from wellcond.attention.record import record
from wellcond.lab.models.changes import add_qk_norm_

IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(1, 40, (3, 12), generator=torch.Generator().manual_seed(1))
TEXT = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "intermediate_size": 32, "pad_token_id": 0}  # fmt: skip


def vit(**options):
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 4}
    return timm.models.VisionTransformer(**sizes, **options)


def normed(gain):
    model = vit()
    add_qk_norm_(model, lambda: model(IMAGES), gain=gain)
    return model


MODELS = {
    "layer norm with bias, shared": (lambda: vit(qk_norm=True), IMAGES),
    "ours": (lambda: normed(True), IMAGES),
    "qwen3, shared": (lambda: Qwen3ForCausalLM(Qwen3Config(**TEXT)), IDS),
    "olmo2, of each head": (lambda: Olmo2ForCausalLM(Olmo2Config(**TEXT)), IDS),
    "gemma3, from zero": (lambda: Gemma3ForCausalLM(Gemma3TextConfig(**TEXT)), IDS),
}


def built(name):
    torch.manual_seed(0)
    build, batch = MODELS[name]
    return build().eval(), batch


def calibrate(model, batch, **options):
    return wc.init_(model, "calibrated", batch=batch, generator=torch.Generator().manual_seed(0), **options)


@pytest.mark.filterwarnings("ignore::wellcond.EvidenceWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_gains_give_logits_their_standard_deviation(name):
    model, batch = built(name)
    site = wc.find_attention(model)[0]
    before = {role: site.by_role(role).read().detach().clone() for role in ("query", "key")}
    gains, _ = find_gains(site)
    calibrate(model, batch, logits=2.0)
    spread = record(model, batch, [site], ("spread",)).sites[0].spread
    if gains["query"].num_heads > 1:
        torch.testing.assert_close(spread, torch.full_like(spread, 2.0), rtol=0.03, atol=0)
    assert float(spread.log().mean().exp()) == pytest.approx(2.0, rel=0.03)
    for role in ("query", "key"):
        assert torch.equal(site.by_role(role).read(), before[role])  # whose size the norm takes away
    ratios = [(gain.weight.detach() + gain.offset).abs().mean() for gain in gains.values()]
    assert 0.2 < float(ratios[0] / ratios[1]) < 5


@pytest.mark.filterwarnings("ignore::wellcond.EvidenceWarning")
def test_what_is_left_alone():
    model = normed(False)
    assert find_gains(wc.find_attention(model)[0])[0] == {}
    before = copy.deepcopy(model.state_dict())
    calibrate(model, IMAGES)
    assert all(torch.equal(before[f"blocks.0.attn.qkv.{name}"], value)
               for name, value in model.blocks[0].attn.qkv.state_dict().items())  # fmt: skip
    other, batch = built("layer norm with bias, shared")
    other.blocks[0].attn.q_norm.forward = lambda x: x / x.norm(dim=-1, keepdim=True)  # its gain does nothing
    before = other.blocks[0].attn.q_norm.weight.detach().clone()
    calibrate(other, batch, logits=None)
    assert torch.equal(other.blocks[0].attn.q_norm.weight, before)
    kept, batch = built("qwen3, shared")
    with pytest.raises(wc.WeightError):
        calibrate(kept, {"inputs_embeds": torch.full((1, 4, 32), torch.nan)})
    assert bool((kept.model.layers[0].self_attn.q_norm.weight == 1).all())


def test_doubling_must_double():
    class Odd(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) + 1

    model, _ = built("layer norm with bias, shared")
    model.blocks[0].attn.q_norm = Odd(8)
    found, why = find_gains(wc.find_attention(model)[0])
    assert found == {} and "does not multiply" in why
