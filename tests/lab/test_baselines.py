"""The optimiser that a user would try instead: Muon for matrices."""

import copy

import pytest
import torch
from torch import nn

from lab.helpers import tiny_bert, tiny_gpt2, tiny_vit
from lab.small import assert_same_run, logs, record, small_job, stop_after
from wellcond import condition_
from wellcond.lab.settings import RecipeError
from wellcond.lab.train.optimizers import AdamW, Muon, Point, set_point
from wellcond.lab.train.run import run_job
from wellcond.models import build_model

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


def test_a_loaded_state_resumes_as_the_saved_one():
    settings = Muon(lr=1e-2)
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
