"""The record of a diagnosis: JSON, text, page; which models it reads; and what it leaves as it was."""

import dataclasses
import re

import pytest
import timm
import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel

import wellcond as wc
from models import unchanged
from wellcond.attention.record import SiteRecord


class OwnAttention(nn.Module):
    """Separate projections and a causal mask, as people write it."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (self.num_heads, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class OwnBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(32), OwnAttention(), nn.Linear(32, 32)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(self.norm(x))


def small_vit():
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=4
    )


@pytest.fixture(scope="module")
def found():
    torch.manual_seed(0)
    return wc.diagnose(small_vit(), torch.randn(4, 3, 32, 32))


def test_json_there_and_back(found):
    assert wc.Diagnosis.from_json(found.to_json()) == found
    assert isinstance(found, wc.Diagnosis) and isinstance(found.findings[0], wc.Finding)
    assert isinstance(found.layers[0], wc.LayerFacts) and isinstance(found.tokens, wc.TokenFacts)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.fresh = False


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 2}', "[" * 100_000])
def test_other_json_is_refused(text):
    with pytest.raises(wc.DiagnosisError, match="diagnose again"):
        wc.Diagnosis.from_json(text)


def test_the_text_fits(found):
    for width in (72, 100, 140):
        assert max(map(len, found.to_text(width=width).splitlines())) <= width
    long = dataclasses.replace(
        found.layers[0],
        name="a.very.long.name.of.a.module." * 5 + "attn",
        kappa_tokens=1e300,
        kappa_jacobian=1e300,
        collapsed_heads=(0,),
    )
    shown = dataclasses.replace(found, layers=(long, *found.layers))
    assert max(map(len, shown.to_text().splitlines())) <= 100
    assert re.search(r"^a\.v\S*\.\.\S*le\.attn ", shown.to_text(), re.MULTILINE)


def test_the_text_says_what_to_type(found):
    text = str(found)
    assert text == found.to_text()
    for finding in found.findings:
        assert f"{finding.severity}: " in text and finding.remedy in text and finding.record in text
    assert "VisionTransformer" in text and "before training" in text


def test_the_page(found):
    odd = dataclasses.replace(found.layers[0], name="<script>alert(1)</script>")
    page = dataclasses.replace(found, layers=(odd, *found.layers)).to_html()
    assert page.startswith("<!DOCTYPE html>") and "<script>" not in page and "http" not in page
    assert "2 findings in 3 attention layers." in page and "κ(X)" in page
    assert page.count("<article") == len(found.findings)
    assert "Findings" not in dataclasses.replace(found, findings=()).to_html()


def test_own_modules():
    model = nn.Sequential(OwnBlock(), OwnBlock())
    found = wc.diagnose(model, torch.randn(2, 6, 32))
    first = found.layers[0]
    assert [layer.name for layer in found.layers] == ["0.attn", "1.attn"]
    assert first.causal and first.num_tokens == 6 and first.attention_share > 0 and first.mlp_share > 0
    assert found.tokens.kind == "unknown" and found.findings == ()


def test_models_of_several_inputs():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    text = sizes | {"vocab_size": 50, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 0}
    config = CLIPConfig(text_config=text, vision_config=sizes | {"image_size": 16, "patch_size": 8}, projection_dim=16)
    batch = {"input_ids": torch.randint(3, 50, (2, 8)), "pixel_values": torch.randn(2, 3, 16, 16)}
    found = wc.diagnose(CLIPModel(config), batch)
    assert [layer.num_tokens for layer in found.layers] == [8, 5]
    assert [layer.causal for layer in found.layers] == [True, False]


def test_masks_are_seen():
    model = nn.MultiheadAttention(32, 4, batch_first=True)
    x, mask = torch.randn(2, 6, 32), nn.Transformer.generate_square_subsequent_mask(6)
    [causal] = wc.diagnose(model, lambda module: module(x, x, x, attn_mask=mask)).layers
    [plain] = wc.diagnose(model, (x, x, x)).layers
    assert causal.causal and not plain.causal
    assert causal.entropy == pytest.approx(1, abs=0.2) and causal.largest_logit < 10
    assert causal.attention_share is None


@pytest.mark.parametrize("batch_first", [True, False])
def test_samples_are_told_from_tokens(batch_first):
    model = nn.MultiheadAttention(32, 4, batch_first=batch_first)
    x = torch.randn(2, 7, 32)
    given = x if batch_first else x.transpose(0, 1)
    [layer] = wc.diagnose(model, (given, given, given)).layers
    assert layer.num_tokens == 7
    assert layer.kappa_tokens == pytest.approx(
        float(torch.linalg.cond(x[0].double()) * torch.linalg.cond(x[1].double())) ** 0.5, rel=1e-4
    )


def test_images_before_a_convolution_and_rows_of_tokens():
    site = wc.find_attention(nn.MultiheadAttention(32, 4))[0]
    shapes = {(2, 32, 3, 5): (2, 15, 32), (2, 3, 5, 32): (2, 15, 32), (7, 32): (1, 7, 32)}
    for given, expected in shapes.items():
        assert SiteRecord(site, argument=torch.zeros(given)).samples().shape == expected
    assert SiteRecord(site, argument=torch.zeros(7, 31)).samples() is None


def test_nothing_is_changed():
    model = small_vit().train()
    model.blocks[0].eval()
    state = torch.get_rng_state()
    with unchanged(model):
        wc.diagnose(model, torch.zeros(2, 3, 32, 32))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and not model.blocks[0].training and not model.blocks[1].attn._forward_hooks


def test_jacobians_only_if_asked_for(found):
    assert found.layers[0].kappa_jacobian is None and "kappa(J)" not in str(found)
    model, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(1, 5, 16)
    [layer] = wc.diagnose(model, x, jacobian=True).layers
    heads = wc.measure(model, x, kappa="pseudo").layers[0].heads
    assert layer.kappa_jacobian == pytest.approx(max(head.mean_kappa() for head in heads))


def test_models_without_values_or_attention():
    with torch.device("meta"):
        model = nn.MultiheadAttention(8, 2)
    with pytest.raises(wc.DiagnosisError, match="meta"):
        wc.diagnose(model, torch.zeros(1, 8))
    with pytest.raises(wc.AttentionNotFoundError):
        wc.diagnose(nn.Linear(2, 2), torch.zeros(1, 2))
