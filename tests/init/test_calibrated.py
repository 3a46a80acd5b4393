"""`calibrated`: what it promises of tokens, logits and blocks, in models of every library; all or nothing."""

import math

import pytest
import timm
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import wellcond as wc
from lab.small import assert_same_run, small_job, stop_after
from models import changes, unchanged
from wellcond.attention.record import logit_spread, record, root_mean_square
from wellcond.attention.site import find_blocks
from wellcond.errors import WeightError
from wellcond.lab.train.run import run_job

IMAGES = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(1, 90, (4, 20), generator=torch.Generator().manual_seed(1))
SMALL = {"img_size": 32, "num_classes": 10}
VIT = {**SMALL, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
SWIN = {**SMALL, "patch_size": 4, "window_size": 4, "embed_dim": 32, "depths": [2, 1], "num_heads": [2, 4]}
TEXT = {"vocab_size": 90, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HIDDEN = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


T5_SIZES = {"d_model": 48, "d_kv": 12, "num_layers": 2, "num_heads": 4, "d_ff": 64, "decoder_start_token_id": 0}
MODELS = {
    "vit": (lambda: timm.create_model("vit_tiny_patch16_224", **VIT), IMAGES),
    "swin": (lambda: timm.create_model("swin_tiny_patch4_window7_224", **SWIN), IMAGES),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, **TEXT)), {"input_ids": IDS}),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **HIDDEN, **TEXT)), {"input_ids": IDS}),
    "bert": (lambda: BertForMaskedLM(BertConfig(**HIDDEN, **TEXT)), {"input_ids": IDS}),
    "t5": (lambda: T5ForConditionalGeneration(T5Config(**T5_SIZES, **TEXT)), {"input_ids": IDS, "labels": IDS}),
    "torch": (encoder, torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(1))),
}


def built(name):
    torch.manual_seed(0)
    build, batch = MODELS[name]
    return build(), batch


def calibrated(model, batch, seed=0, **options):
    return wc.init_(model, "calibrated", batch=batch, generator=torch.Generator().manual_seed(seed), **options)


def same(model, state):
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_shares_are_what_was_asked_for(name):
    model, batch = built(name)
    training = model.training
    calibrated(model, batch, logits=0.7, share=0.2)
    sites = wc.find_attention(model)
    found = record(model, batch, sites, ("spread", "stream"))
    blocks = found.blocks
    assert model.training == training
    for spread in (one.spread for one in found.sites if one.spread is not None):
        torch.testing.assert_close(spread, torch.full_like(spread, 0.7), rtol=0.05, atol=0)
    count = 0
    for block in blocks:
        for added in (*block.attention.values(), block.mlp_added):
            assert float(added / block.stream) == pytest.approx(0.2, rel=0.05)
            count += 1
    assert count == len(sites) + len(blocks) and {s for b in blocks for s in b.sites} == set(sites)


@pytest.mark.parametrize("name, table, layer", [
    ("vit", "pos_embed", "patch_embed.proj"), ("gpt2", "transformer.wpe.weight", "transformer.wte"),
    ("bert", "bert.embeddings.position_embeddings.weight", "bert.embeddings.word_embeddings"),
])  # fmt: skip
def test_positions_are_as_large_as_the_embeddings_spread(name, table, layer):
    model, batch = built(name)
    calibrated(model, batch, positions=0.5, words=0.8)
    [out] = record(model, batch, (), (), outputs=[layer]).outputs.values()
    rows = out.movedim(1, -1).flatten(0, -2) if out.dim() == 4 else out.flatten(0, -2)
    spread = root_mean_square(rows - rows.mean(0))
    assert root_mean_square(dict(model.named_parameters())[table]) == pytest.approx(0.5 * spread, rel=1e-4)
    if name != "vit":
        words = model.get_submodule(layer).weight
        assert root_mean_square(words) == pytest.approx(0.8 / math.sqrt(words.shape[1]), rel=1e-4)


def test_nothing_else_changes_and_a_seed_gives_the_same_weights():
    model, batch = built("vit")
    values = model.blocks[0].attn.qkv.weight[96:].clone()
    with changes(model) as changed:
        calibrated(model, batch)
    per_block = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc2.weight")
    assert changed == {"pos_embed", *(f"blocks.{i}.{name}" for i in range(3) for name in per_block)}
    assert torch.equal(model.blocks[0].attn.qkv.weight[96:], values)
    again, _ = built("vit")
    calibrated(again, batch)
    assert same(again, model.state_dict())
    other, _ = built("vit")
    calibrated(other, batch, seed=1)
    assert not same(other, model.state_dict())


@pytest.mark.parametrize("start", ["semi_orthogonal", "keep"])
def test_directions_of_queries_and_keys(start):
    model, batch = built("vit")
    before = wc.find_attention(model)[0].q.read().detach().clone()
    calibrated(model, batch, start=start)
    after = wc.find_attention(model)[0].q.read().detach()
    if start == "keep":
        ratio = after / before
        torch.testing.assert_close(ratio, ratio[:, :1, :1].expand_as(ratio), rtol=1e-4, atol=0)
    else:
        gram = after @ after.mT
        torch.testing.assert_close(gram / gram[:, :1, :1], torch.eye(16).expand(3, 16, 16), atol=1e-5, rtol=0)


def test_parts_can_be_left_as_they_are():
    model, batch = built("gpt2")
    with changes(model) as changed:
        calibrated(model, batch, words=None, positions=None, share=None)
    assert changed == {f"transformer.h.{i}.attn.c_attn.weight" for i in range(2)}


def test_sinusoidal_positions():
    model, batch = built("gpt2")
    calibrated(model, batch, position="sincos1d", positions=1.0)
    table = model.transformer.wpe.weight
    assert torch.equal(table[0, :24], torch.zeros(24)) and table[1, 0] > 0


def test_blocks_that_scale_themselves_and_normalised_queries_are_left_alone():
    sizes = {**SMALL, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 4, "cls_attn_layers": 1}
    torch.manual_seed(0)
    xcit = timm.create_model("xcit_nano_12_p8_224", **sizes)
    with changes(xcit) as changed:
        calibrated(xcit, IMAGES)
    assert changed == {"cls_attn_blocks.0.attn.q.weight", "cls_attn_blocks.0.attn.k.weight"}


def test_a_function_may_call_the_model():
    model, batch = built("vit")
    other, _ = built("vit")
    calibrated(model, batch)
    calibrated(other, lambda m: m(batch))
    assert same(other, model.state_dict())


@pytest.mark.parametrize("batch, error", [
    (None, "needs batch="), (torch.randn(2, 3, 20, 20), "20"), (IMAGES * math.nan, "not finite|NaN"),
])  # fmt: skip
def test_a_batch_that_fails_leaves_the_model_as_it_was(batch, error):
    model, _ = built("vit")
    with unchanged(model), pytest.raises((ValueError, AssertionError, WeightError), match=error):
        calibrated(model, batch)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_frozen_weight_is_named_and_nothing_changes():
    model, batch = built("gpt2")
    model.transformer.h[1].mlp.c_proj.weight.requires_grad_(False)
    with unchanged(model), pytest.raises(WeightError, match=r"h.1.mlp.c_proj.weight is frozen"):
        calibrated(model, batch)


def test_masked_keys_do_not_count():
    logits = torch.tensor([[1.0, 3.0, 5.0], [2.0, 4.0, 100.0]])[None, None]
    masked = logits.clone()
    masked[0, 0, 1, 2] = -100.0 + 4.0  # as Swin masks
    masked[0, 0, 0, 2] = -math.inf
    assert logit_spread(masked, 1).tolist() == [1.0]


def test_blocks_are_the_nearest_modules_that_hold_an_mlp():
    model, _ = built("t5")
    blocks = find_blocks(model, wc.find_attention(model))
    assert [block.name for block in blocks] == [f"{part}.block.{i}" for part in ("encoder", "decoder") for i in (0, 1)]
    assert [len(block.sites) for block in blocks] == [1, 1, 2, 2]


def test_the_command_needs_an_input(tmp_path, run):
    sizes = ("img_size=16", "patch_size=8", "embed_dim=24", "depth=1", "num_heads=3")
    spec = ("timm:vit_tiny_patch16_224", *(f"--model-arg={size}" for size in sizes))
    arguments = ("init", *spec, "-o", tmp_path / "start.safetensors")
    assert run(*arguments)[0] == run(*arguments, "--method", "gaussian", "--data", "random")[0] == 2
    assert not (tmp_path / "start.safetensors").exists()
    code, out = run(*arguments, "--data", "random")
    assert code == 0 and "initialised as 'calibrated'" in out and (tmp_path / "start.safetensors").is_file()


def test_a_recipe_calibrates_on_its_training_set_and_resumes_to_the_same_weights(tmp_path):
    whole, part = (small_job(tmp_path / name, "calibrated") for name in ("whole", "part"))
    assert run_job(whole)["status"] == "finished"
    stop_after(part, 3)
    assert run_job(part)["status"] == "finished"
    assert_same_run(whole.folder, part.folder)
