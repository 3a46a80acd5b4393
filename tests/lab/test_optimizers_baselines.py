"""Optimisers that a user would try instead: Muon for matrices, another learning rate for Q and K."""

import copy

import pytest
import torch
from torch import nn

from lab.helpers import tiny_gpt2, tiny_vit
from lab.small import logs, record, small_job
from wellcond import condition_, find_attention
from wellcond.errors import RecipeError
from wellcond.lab.optimizers import AdamW, Muon, Point, set_point
from wellcond.lab.train.run import run_job

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


def test_muon_trains_and_is_recorded(tmp_path):
    run_job(small_job(tmp_path, "default", MUON))
    done = record(tmp_path)
    assert done["status"] == "finished" and done["config"]["optimizer"]["name"] == "muon"
    losses = [row["loss"] for row in logs(tmp_path)["evaluations"]]
    assert losses[-1] < losses[0]


def test_models_without_blocks_are_refused():
    with pytest.raises(RecipeError, match="optimizer.name"):
        Muon(lr=1e-3).build(nn.Linear(2, 2))
    with pytest.raises(RecipeError, match="optimizer.qk_lr_factor"):
        AdamW(lr=1e-3, qk_lr_factor=2.0).build(nn.Linear(2, 2))
