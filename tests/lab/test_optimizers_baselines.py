"""Optimisers that a user would try instead: Muon for matrices, another learning rate for Q and K."""

import copy

import pytest
import torch
from torch import nn

from lab.helpers import tiny_bert, tiny_gpt2, tiny_vit
from lab.small import assert_same_run, logs, record, small_job, stop_after
from wellcond import condition_, find_attention
from wellcond.errors import RecipeError
from wellcond.lab.models.build import build_model
from wellcond.lab.optimizers import AdamW, Muon, Point, set_point
from wellcond.lab.train.run import run_job

CRAMMED = {"layers": 1, "width": 16, "heads": 2, "feed_forward": 16, "vocab_size": 20, "length": 16}
MODELS = {
    "vit": tiny_vit,
    "gpt2": lambda: tiny_gpt2(20, 16),
    "bert": lambda: tiny_bert(20),
    "crammed": lambda: build_model("wellcond:crammed_bert", CRAMMED),
}
MUON = "optimizer={name: muon, lr: 1e-3, weight_decay: 0.05}"


def stepped(model, settings, steps=3):
    """Weights after steps with gradients drawn at random, the same for every optimiser."""
    optimizer = settings.build(model)
    source = torch.Generator().manual_seed(0)
    for _ in range(steps):
        set_point(optimizer, Point(1.0), settings.lr)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=source)
        optimizer.step()
    return model


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("name", MODELS)
def test_weights_of_queries_and_keys_move_as_with_another_rate(name, decay):
    torch.manual_seed(0)
    start = MODELS[name]()
    settings = AdamW(lr=1e-2, weight_decay=decay)
    plain = stepped(copy.deepcopy(start), settings)
    faster = stepped(copy.deepcopy(start), settings.model_copy(update={"lr": 4e-2}))
    found = stepped(copy.deepcopy(start), settings.model_copy(update={"qk_lr_factor": 4.0}))
    expected = copy.deepcopy(plain)
    for site, other in zip(find_attention(expected), find_attention(faster), strict=True):
        for role in ("query", "key"):
            site.by_role(role).write_(other.by_role(role).read().detach())
    for key, value in expected.named_parameters():
        torch.testing.assert_close(found.get_parameter(key), value, rtol=1e-5, atol=1e-6, msg=key)
    assert not torch.allclose(find_attention(found)[0].q.read(), find_attention(plain)[0].q.read())


def muon_names(model):
    optimizer = Muon(lr=1e-3, weight_decay=0.1).build(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    listed = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    assert sorted(listed) == sorted(names.values())  # each once
    return {names[id(p)] for group in optimizer.param_groups if "ns_steps" in group for p in group["params"]}


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest():
    vit = {f"blocks.{i}.{part}.weight" for i in (0, 1) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert muon_names(tiny_vit()) == vit == muon_names(condition_(tiny_vit(), "balanced"))
    gpt2 = {f"transformer.h.0.{part}.weight" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert muon_names(tiny_gpt2()) == gpt2


def newton_schulz(gradient):
    """As torch.optim.Muon and the post that it is from, in float32."""
    x = gradient / gradient.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_both_move_as_their_own_optimisers_do():
    torch.manual_seed(0)
    start = tiny_vit(embed_dim=32)  # at this width products in bfloat16 were fatal on some processors
    found = stepped(copy.deepcopy(start), Muon(lr=1e-2, weight_decay=0.1), steps=1)
    adam = stepped(copy.deepcopy(start), AdamW(lr=1e-2, weight_decay=0.1), steps=1)
    matrices = muon_names(start)
    for name, value in found.named_parameters():
        if name not in matrices:
            assert torch.equal(value, adam.get_parameter(name)), name
            continue
        before, size = start.get_parameter(name).detach(), max(value.shape)
        step = 1e-2 * 0.2 * size**0.5 * newton_schulz(value.grad)  # of one step, momentum is a factor
        torch.testing.assert_close(value.detach(), before * (1 - 1e-2 * 0.1) - step, rtol=1e-3, atol=1e-5)


def test_rows_of_queries_and_keys_have_their_rate_under_muon_too():
    torch.manual_seed(0)
    start = tiny_vit()
    settings = Muon(lr=1e-3)
    once, four = (
        stepped(copy.deepcopy(start), settings.model_copy(update={"qk_lr_factor": factor}), steps=1)
        for factor in (1.0, 4.0)
    )
    sites = [find_attention(model)[0] for model in (start, once, four)]
    for role, factor in (("q", 4), ("k", 4), ("v", 1)):
        before, plain, scaled = (site.slots[role].read() for site in sites)
        torch.testing.assert_close(scaled - before, factor * (plain - before), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [Muon(lr=1e-2), Muon(lr=1e-2, qk_lr_factor=4.0), AdamW(lr=1e-2, qk_lr_factor=4.0)],
    ids=["muon", "muon, rows", "adamw, rows"],
)
def test_a_loaded_state_resumes_as_the_saved_one(settings):
    torch.manual_seed(0)
    model = tiny_vit()
    optimizer = settings.build(model)

    def step(model, optimizer, seed):
        source = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=source)
        optimizer.step()

    step(model, optimizer, 0)
    other = copy.deepcopy(model)
    restored = settings.build(other)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in (1, 2):
        step(model, optimizer, seed)
        step(other, restored, seed)
    for name, value in model.named_parameters():
        assert torch.equal(value, other.get_parameter(name)), name


def test_an_interrupted_run_resumes_to_the_same_files(tmp_path):
    whole, parts = (small_job(tmp_path / name, "conditioned+balanced", MUON) for name in ("whole", "parts"))
    assert run_job(whole)["status"] == "finished"
    assert stop_after(parts, 8)["status"] == "interrupted"
    assert run_job(parts)["status"] == "finished"
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_muon_trains_and_is_recorded(tmp_path):
    run_job(small_job(tmp_path, "default", MUON))
    done = record(tmp_path)
    assert done["status"] == "finished" and done["config"]["optimizer"]["name"] == "muon"
    losses = [row["loss"] for row in logs(tmp_path)["evaluations"]]
    assert losses[-1] < losses[0]


def test_models_without_blocks_are_refused():
    with pytest.raises(RecipeError, match="optimizer.name: muon, for the matrices of transformer blocks"):
        Muon(lr=1e-3).build(nn.Linear(2, 2))
    with pytest.raises(RecipeError, match="optimizer.qk_lr_factor"):
        AdamW(lr=1e-3, qk_lr_factor=2.0).build(nn.Linear(2, 2))
