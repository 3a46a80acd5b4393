"""What the doctor advises: the one recommendation, which clears its finding and never overwrites a trained model."""

import pytest
import timm
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
)

import wellcond as wc
from models import changes
from wellcond.init import recommended

LLAMA = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
WORDS = {"vocab_size": 200, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def image_model(name, **sizes):
    return timm.create_model(name, img_size=32, num_classes=10, **sizes)


def vit(name="vit_tiny_patch16_224"):
    return image_model(name, patch_size=8, embed_dim=64, depth=2, num_heads=4)


FAMILIES = {
    "vit": vit,
    "vit with LayerScale": lambda: vit("deit3_small_patch16_224"),
    "swin": lambda: image_model(
        "swin_tiny_patch4_window7_224", patch_size=2, window_size=4, embed_dim=32, depths=(2, 2), num_heads=(2, 4)
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **WORDS)),
    "bert": lambda: BertModel(
        BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, **WORDS)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **LLAMA, **WORDS)),
}


def batch_for(family):
    images = family in ("vit", "vit with LayerScale", "swin", "xcit")
    return torch.randn(8, 3, 32, 32) if images else {"input_ids": torch.randint(200, (4, 24))}


def kinds(diagnosis):
    return [finding.kind for finding in diagnosis.findings]


def follow(line, model, batch):
    """Run a line of the doctor as it is printed."""
    exec(line, {"wc": wc, "torch": torch, "model": model, "batch": batch})


# One recommendation


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untrained_model_is_advised_the_recommendation_which_clears_the_finding(family):
    torch.manual_seed(0)
    found = wc.diagnose(FAMILIES[family](), batch_for(family))
    assert kinds(found)
    line = recommended.LINE_WITHOUT_TOKENS if family == "swin" else recommended.LINE
    assert {finding.remedy for finding in found.findings} == {line}
    for advised in {line, recommended.LINE}:
        model, batch = FAMILIES[family](), batch_for(family)
        follow(advised, model, batch)
        assert kinds(wc.diagnose(model, batch)) == []


FAULTS = {
    "logits": (("q", "k"), 6.0),
    "value-scale": (("v",), 60.0),
    "stream": (("o",), 300.0),
    "duplicate-heads": ((), 1.0),
    "dead-heads": (("q", "k"), 0.0),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_the_line_for_a_fault_planted_in_grouped_queries_clears_it(kind):
    torch.manual_seed(0)
    batch = batch_for("llama")
    model = wc.init_(FAMILIES["llama"](), "calibrated", batch=batch)
    site = wc.find_attention(model)[0]
    roles, factor = FAULTS[kind]
    for role in roles:
        site.slots[role].write_(factor * site.slots[role].read_raw())
    if kind == "duplicate-heads":
        for slot in (site.q, site.k, site.v):
            slot.write_(slot.read_raw()[:1].expand(slot.heads_shape))
    found = wc.diagnose(model, batch)
    [finding] = [finding for finding in found.findings if finding.kind == kind]
    assert recommended.LINE.removesuffix(")") in finding.remedy
    follow(finding.remedy, model, batch)
    assert kind not in kinds(wc.diagnose(model, batch))


# Trained, untrained, unknown


def olmo():
    return OlmoForCausalLM(OlmoConfig(**LLAMA, **WORDS))


def test_norms_without_parameters_do_not_say_whether_a_model_is_trained():
    model, batch = olmo(), {"input_ids": torch.randint(200, (4, 24))}
    site = wc.find_attention(model)[0]
    for slot in (site.q, site.k):
        slot.write_(0 * slot.read_raw())
    found = wc.diagnose(model, batch)
    assert found.fresh is None and kinds(found) == ["dead-heads"]
    assert not any("init_" in finding.remedy for finding in found.findings)
    assert "cannot tell whether this model is trained" in " ".join(str(found).split())
    assert "cannot tell whether" in found.to_html() and "trained=False" in str(found)
    assert wc.Diagnosis.from_json(found.to_json()).fresh is None
    certain = wc.diagnose(model, batch, trained=False)
    assert {"dead-heads", "words"} <= set(kinds(certain)) and "init_" in certain.findings[0].remedy
    assert "init_" not in str(wc.diagnose(model, batch, trained=True))


# Two towers


class Residual(nn.Module):
    """A block as open_clip writes it."""

    def __init__(self, width, causal):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.causal = nn.MultiheadAttention(width, 4, batch_first=True), causal
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        y, n = self.ln_1(x), x.shape[1]
        mask = torch.full((n, n), -torch.inf).triu(1) if self.causal else None
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Tower(nn.Module):
    def __init__(self, width, causal):
        super().__init__()
        self.resblocks = nn.ModuleList([Residual(width, causal) for _ in range(2)])

    def forward(self, x):
        for block in self.resblocks:
            x = block(x)
        return x.mean(1)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.transformer = Tower(32, causal=False), Tower(48, causal=True)

    def forward(self, image, text):
        return self.visual(image), self.transformer(text)


@pytest.mark.parametrize(
    ("kind", "role", "factor"), [("value-scale", "v", 30.0), ("stream", "o", 300.0), ("logits", "q", 30.0)]
)
def test_a_fix_for_one_tower_leaves_the_other_as_it_is(kind, role, factor):
    torch.manual_seed(0)
    model, batch = TwoTowers(), (torch.randn(4, 9, 32), torch.randn(4, 7, 48))
    site = wc.find_attention(model)["transformer.resblocks.0"]
    site.slots[role].write_(factor * site.slots[role].read_raw())
    found = wc.diagnose(model, batch)
    [finding] = [finding for finding in found.findings if finding.kind == kind]
    assert all(name.startswith("transformer.") for name in finding.layers)
    with changes(model) as changed:
        follow(finding.remedy, model, batch)
    assert kind not in kinds(wc.diagnose(model, batch))
    assert changed and all(name.startswith("transformer.") for name in changed)


def test_a_fix_for_given_sites_leaves_the_others_as_they_are():
    torch.manual_seed(0)
    model, batch = TwoTowers(), (torch.randn(4, 9, 32), torch.randn(4, 7, 48))
    sites = [site for site in wc.find_attention(model) if site.name.startswith("visual")]
    for site in sites:
        site.q.write_(30 * site.q.read_raw())
    [finding] = wc.diagnose(model, batch, sites=sites).findings
    with changes(model) as changed:
        follow(finding.remedy, model, batch)
    assert changed and all(name.startswith("visual.") for name in changed)


# Numbers that are not finite


@pytest.mark.parametrize(
    ("wrap", "place", "value"),
    [
        (lambda x: x, "argument 0[1, 2, 3, 4]", torch.inf),
        (lambda x: {"x": x}, "x[1, 2, 3, 4]", torch.nan),
        (lambda x: lambda model: model(x), "argument 0[1, 2, 3, 4]", torch.nan),
    ],
    ids=["tensor", "mapping", "function"],
)
def test_a_batch_that_is_not_finite_is_no_diverged_model(wrap, place, value):
    images = torch.randn(2, 3, 32, 32)
    images[1, 2, 3, 4] = value
    found = wc.diagnose(vit(), wrap(images))
    [finding] = [finding for finding in found.findings if finding.kind == "not-finite"]
    assert finding.verdict.startswith("The batch is not finite") and place in finding.verdict
    assert "the first of 1 such entries of 6,144" in finding.verdict
    assert "diverged" not in finding.verdict and "checkpoint" not in finding.remedy
    assert place in found.not_finite.batch and found.not_finite.weights == ""
    assert wc.Diagnosis.from_json(found.to_json()).not_finite == found.not_finite
    assert kinds(found) == ["not-finite"]


def test_weights_that_are_not_finite():
    model = vit()
    model.blocks[0].mlp.fc2.weight.data[3, 5] = torch.nan
    found = wc.diagnose(model, torch.randn(2, 3, 32, 32))
    [finding] = [finding for finding in found.findings if finding.kind == "not-finite"]
    assert "blocks.0.mlp.fc2.weight[3, 5]" in finding.verdict and "diverged" in finding.verdict
    assert found.not_finite.batch == "" and finding.layers == ("blocks.1.attn",)
    assert wc.Diagnosis.from_json(found.to_json()).findings[0].severity == "fault"


def test_activations_that_overflow():
    model = vit()
    model.blocks[0].mlp.fc1.weight.data.mul_(1e30)
    model.blocks[0].mlp.fc2.weight.data.mul_(1e30)
    found = wc.diagnose(model, torch.randn(2, 3, 32, 32))
    [finding] = [finding for finding in found.findings if finding.kind == "not-finite"]
    assert finding.verdict.startswith("Batch and weights are finite, and blocks.0.mlp.fc2 (Linear) puts out")
    assert found.not_finite.batch == found.not_finite.weights == ""


def test_a_mask_of_minus_infinity_is_no_fault():
    model, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 6, 32)
    mask = torch.full((6, 6), -torch.inf).triu(1)
    found = wc.diagnose(model, {"query": x, "key": x, "value": x, "attn_mask": mask})
    assert found.not_finite is None and kinds(found) == []
