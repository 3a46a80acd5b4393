"""Every finding: a model in which the fault was planted has it, the fixed one has not, healthy models have none."""

import math
import re
from pathlib import Path

import pytest
import timm
import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

import wellcond as wc
from wellcond.doctor.records import THRESHOLDS
from wellcond.init.recommended import CAUSAL, EVIDENCE_WITHOUT_TOKENS, RECORDED, TABLES

ROOT = Path(__file__).parents[2]
SMALL_VIT = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 64, "depth": 2, "num_heads": 4}


def digits(count):
    images = torch.tensor(load_digits().images[:count], dtype=torch.float32)[:, None]
    return (images - images.mean()) / images.std(), torch.tensor(load_digits().target[:count])


def vit(**changes):
    return timm.create_model("vit_tiny_patch16_224", num_classes=10, **(SMALL_VIT | changes))


def gpt2(width=64, depth=2, **changes):
    sizes = {"vocab_size": 200, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2Model(GPT2Config(n_embd=width, n_layer=depth, n_head=4, **(sizes | changes)))


def words(count=24):
    return {"input_ids": torch.randint(200, (4, count))}


def scale_(model, factors):
    for name, parameter in model.named_parameters():
        parameter.data.mul_(math.prod(factor for part, factor in factors.items() if part in name))
    return model


def healthy_vit():
    """The strong default of digits, at the scale of a ViT-B."""
    return wc.init_(scale_(vit(), {"pos_embed": 28}), "gaussian")


def healthy_gpt2():
    """The strong default of the records: matrices at the scale of GPT-2 small, embeddings x 3.46."""
    return scale_(gpt2(), {"c_": 768**0.5 / 8, "wte": 3.46})


def kinds(diagnosis):
    return [finding.kind for finding in diagnosis.findings]


def run_remedy(diagnosis, kind, model, batch):
    """Do what a finding says."""
    [finding] = [finding for finding in diagnosis.findings if finding.kind == kind]
    exec(finding.remedy, {"wc": wc, "torch": torch, "model": model, "batch": batch})
    return wc.diagnose(model, batch)


# Healthy models


@pytest.mark.parametrize(
    "build",
    [
        lambda: (healthy_vit(), digits(8)[0]),
        lambda: (healthy_gpt2(), words()),
        lambda: (scale_(gpt2(width=768), {"c_proj": (2 / 12) ** 0.5}), words()),
        lambda: (BertModel(BertConfig(num_hidden_layers=2, hidden_size=768, vocab_size=200)), words()),
        lambda: (nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.randn(2, 9, 64)),
        lambda: (nn.MultiheadAttention(64, 4), (torch.randn(9, 2, 64),) * 3),
    ],
    ids=["vit", "gpt2", "gpt2 of width 768 as if of depth 12", "bert", "a layer of torch", "an attention of torch"],
)
def test_nothing_to_fix(build):
    model, batch = build()
    found = wc.diagnose(model, batch, trained=False)
    assert kinds(found) == [] and found.fresh
    assert re.fullmatch(r"Diagnosis\(\d attention layers?, nothing to fix\)", repr(found))
    assert "Nothing to fix in" in str(found)


def test_a_model_that_was_trained_gives_no_false_alarm():
    model = vit()
    images, labels = digits(512)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = wc.diagnose(model, images[:8])
    assert kinds(found) == ["positions", "projection-scale"]
    for kind in kinds(found):
        fixed = run_remedy(found, kind, model, images[:8])
    assert kinds(fixed) == []
    for step in range(60):
        at = torch.arange(64) + 64 * (step % 8)
        loss = nn.functional.cross_entropy(model(images[at]), labels[at])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 1.5
    found = wc.diagnose(model, images[:8])
    assert not found.fresh and kinds(found) == []
    assert "rules for untrained models do not apply" in str(found)


def test_norms_tell_whether_a_model_was_trained():
    model, (images, _) = vit(), digits(4)
    assert wc.diagnose(model, images).fresh is True
    model.blocks[1].norm2.bias.data[3] = 1e-6
    assert wc.diagnose(model, images).fresh is False


# Planted faults


def test_small_positions():
    model, (images, _) = wc.init_(vit(), "gaussian"), digits(8)
    found = wc.diagnose(model, images)
    assert kinds(found) == ["positions"]
    [finding] = found.findings
    assert finding.severity == "warning" and finding.value == pytest.approx(0.034, abs=0.003)
    assert "kappa(X)" in finding.verdict and finding.layers == ()
    fixed = run_remedy(found, "positions", model, images)
    assert kinds(fixed) == []
    assert found.layers[0].kappa_tokens > 100 > 20 > fixed.layers[0].kappa_tokens
    assert fixed.tokens.position_ratio == pytest.approx(0.5, abs=0.05)


def test_zero_positions():
    model, (images, _) = wc.init_(vit(), "gaussian"), digits(8)
    model.pos_embed.data.zero_()
    assert kinds(run_remedy(wc.diagnose(model, images), "positions", model, images)) == []


def test_short_words():
    model, batch = gpt2(), words()
    found = wc.diagnose(model, batch)
    assert kinds(found) == ["words"] and found.findings[0].value == pytest.approx(0.16, abs=0.01)
    assert kinds(run_remedy(found, "words", model, batch)) == []


def test_blocks_that_drown_their_stream():
    model, batch = scale_(healthy_gpt2(), {"h.0.mlp.c_proj": 3}), words()
    found = wc.diagnose(model, batch)
    assert kinds(found) == ["stream"] and found.findings[0].layers == ("h.0.attn",)
    assert found.layers[0].mlp_share > 4
    assert "stream" not in kinds(run_remedy(found, "stream", model, batch))


def test_values_at_scale_one_under_a_causal_mask():
    model, batch = healthy_gpt2(), words()
    with pytest.warns(wc.EvidenceWarning):
        wc.init_(model, "conditioned")
    found = wc.diagnose(model, batch)
    assert kinds(found) == ["value-scale"] and found.findings[0].record == CAUSAL
    fixed = run_remedy(found, "value-scale", model, batch)
    assert "value-scale" not in kinds(fixed)
    assert fixed.layers[0].attention_share == pytest.approx(0.15, rel=0.05)


def test_values_at_scale_one_do_no_harm_if_nothing_is_added():
    model = wc.init_(healthy_gpt2(), "nanochat")
    assert kinds(wc.diagnose(model, words())) == []


def test_large_logits():
    model, (images, _) = scale_(healthy_vit(), {"attn.qkv": 2.5}), digits(8)
    found = wc.diagnose(model, images)
    assert "logits" in kinds(found) and found.layers[0].logit_spread > 3
    assert kinds(run_remedy(found, "logits", model, images)) == []


def test_logits_too_large_for_sixteen_bits():
    model, (images, _) = scale_(healthy_vit(), {"attn.qkv": 9}), digits(8)
    found = wc.diagnose(model, images, trained=True)
    assert "precision" in kinds(found)
    [finding] = [finding for finding in found.findings if finding.kind == "precision"]
    apart = float(re.search(r"bfloat16 are (\S+) apart", finding.verdict)[1])
    largest = torch.tensor(finding.value).bfloat16()
    assert float(torch.nextafter(largest, torch.tensor(math.inf).bfloat16()) - largest) == apart
    assert "precision" in kinds(wc.diagnose(model, images))
    assert kinds(run_remedy(wc.diagnose(model, images), "precision", model, images)) == []


def test_small_projections():
    model, (images, _) = scale_(vit(), {"pos_embed": 28}), digits(8)
    found = wc.diagnose(model, images)
    assert kinds(found) == ["projection-scale"] and len(found.findings[0].layers) == 2
    assert kinds(run_remedy(found, "projection-scale", model, images)) == []


def test_the_scale_of_normalised_queries_does_not_count():
    model = scale_(healthy_vit(), {"pos_embed": 1})
    site = wc.find_attention(model)[0]
    site.q.write_(0.01 * site.q.read())
    assert kinds(wc.diagnose(model, digits(8)[0])) == ["projection-scale"]
    normed = wc.init_(vit(qk_norm=True), "gaussian")
    scale_(normed, {"pos_embed": 28})
    site = wc.find_attention(normed)[0]
    site.q.write_(0.01 * site.q.read())
    assert kinds(wc.diagnose(normed, digits(8)[0])) == []
    found = wc.diagnose(scale_(normed, {"q_norm": 9}), digits(8)[0])
    assert found.layers[0].logit_spread > 3 and kinds(found) == []


def test_a_lambda_that_saturates():
    model, (images, _) = healthy_vit(), digits(8)
    with pytest.warns(wc.NumericalWarning):
        wc.condition_(model, "identity", lam=10.0)
    found = wc.diagnose(model, images)
    assert kinds(found) == ["lambda"] and found.findings[0].severity == "fault"
    assert found.findings[0].value == pytest.approx(0.25 * 100 * 16 / (math.log(17) + 5))
    assert kinds(run_remedy(found, "lambda", healthy_vit(), images)) == []
    gentle = wc.condition_(healthy_vit(), "identity", lam=0.5)
    assert "lambda" not in kinds(wc.diagnose(gentle, images))
    only_values = wc.condition_(healthy_vit(), "identity", lam={"v": 10.0})
    assert "lambda" not in kinds(wc.diagnose(only_values, images))


@pytest.mark.parametrize("roles", ["qk", "vo"])
def test_heads_whose_weights_are_both_zero(roles):
    model, (images, _) = healthy_vit(), digits(8)
    site = wc.find_attention(model)[1]
    for role in roles:
        heads = site.slots[role].read().detach().clone()
        heads[2] = 0
        site.slots[role].write_(heads)
    found = wc.diagnose(model, images)
    assert kinds(found) == ["dead-heads"] and found.findings[0].severity == "fault"
    assert found.layers[1].zero_heads == (2,) and found.layers[0].dead_heads == ()
    if roles == "qk":
        assert kinds(run_remedy(found, "dead-heads", model, images)) == []


def test_heads_that_have_collapsed():
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    batch = torch.randn(2, 9, 64)
    wc.init_(model, "gaussian", generator=torch.Generator().manual_seed(0))
    site = wc.find_attention(model)[0]
    for slot in (site.q, site.k):
        heads = site.q.read().detach().clone()
        heads[1] = 30 * torch.eye(16, 64)
        slot.write_(heads)
    for trained in (False, True):
        found = wc.diagnose(model, batch, trained=trained)
        assert "dead-heads" in kinds(found)
        assert found.layers[0].collapsed_heads == (1,)
        assert found.findings[0].severity == ("warning" if trained else "fault")
    assert kinds(run_remedy(wc.diagnose(model, batch), "dead-heads", model, batch)) == []


def test_duplicate_heads_whatever_the_factors_of_their_product():
    model, (images, _) = healthy_vit(), digits(8)
    site = wc.find_attention(model)[0]
    turn = torch.linalg.qr(torch.randn(16, 16)).Q
    for role in "qkv":
        heads = site.slots[role].read().detach().clone()
        heads[3] = heads[0] if role == "v" else turn @ heads[0]
        site.slots[role].write_(heads)
    found = wc.diagnose(model, images)
    assert kinds(found) == ["duplicate-heads"] and found.layers[0].duplicate_heads == ((0, 3),)
    assert kinds(run_remedy(found, "duplicate-heads", model, images)) == []


def test_values_of_the_rank_of_one_head():
    model, (images, _) = wc.init_(healthy_vit(), "conditioned"), digits(8)
    found = wc.diagnose(model, images)
    assert kinds(found) == ["shared-values"] and found.findings[0].severity == "note"
    assert kinds(run_remedy(found, "shared-values", model, images)) == []


def test_values_as_large_as_a_large_stream_do_no_harm():
    model = scale_(gpt2(), {"wte": 50})
    site = wc.find_attention(model)[0]
    site.v.write_(6 * site.v.read())
    found = wc.diagnose(model, words())
    assert found.layers[0].causal and found.layers[0].scale_v > 0.8 and "value-scale" not in kinds(found)


# The table of limits and the records


def test_numbers_that_findings_quote_are_in_the_record_that_they_name():
    texts = {TABLES: ROOT / TABLES, CAUSAL: ROOT / "results/evidence/README.md"}
    for evidence, record in (*RECORDED.values(), (EVIDENCE_WITHOUT_TOKENS, TABLES)):
        assert (ROOT / record).exists()
        for number in re.findall(r"\b\d+\.\d\b", evidence):
            assert f"| {number} ±" in texts[record].read_text("utf-8"), (number, evidence)


def test_the_page_of_the_documentation_has_every_limit_with_its_reason():
    page = (ROOT / "docs/doctor.md").read_text("utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| (\w+) \|.*\| (untrained|always) \| ([\d.]+) \| (.*) \|$", page, re.MULTILINE)
    assert {kind: float(limit) for kind, *_, limit, _ in rows} == THRESHOLDS
    assert all(len(reason) > 20 for *_, reason in rows)
