import json
from pathlib import Path

import pytest
import torch

from lab.helpers import same_state, tiny_gpt2, tiny_vit
from wellcond import condition_
from wellcond.errors import RunError
from wellcond.lab.models.weights import read_state_dict
from wellcond.lab.optimizers import AdamW, Muon
from wellcond.lab.train import run_folder
from wellcond.lab.train.run_folder import (
    group_options,
    last_checkpoint,
    load_model_,
    load_optimizer_,
    model_tensors,
    optimizer_tensors,
    read_checkpoint,
    read_finished_run,
    read_tensors,
    save_checkpoint,
)


def vit_loss(model):
    return model(torch.linspace(-1, 1, 128).view(2, 1, 8, 8)).square().mean()


def gpt_loss(model):
    return model(input_ids=torch.arange(12).view(2, 6)).logits.square().mean()


MODELS = {
    "vit": (tiny_vit, vit_loss),
    "balanced": (lambda: condition_(tiny_vit(), "balanced"), vit_loss),
    "frozen": (lambda: condition_(tiny_vit(), "polar", frozen=True), vit_loss),
    "tied": (tiny_gpt2, gpt_loss),
}
SHARDED = pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
OPTIMIZERS = {
    "adamw": AdamW(lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1),
    "muon": Muon(lr=1e-2, weight_decay=0.1),
}


def trained(model, optimizer, loss, steps):
    model.eval()
    for _ in range(steps):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors_of(model, optimizer, **more):
    return {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer), **more}


def save(folder, model, optimizer, step=3, *, sharded=False, **changes):
    state = {"train": {"step": step, "window": [0.1]}, "groups": group_options(optimizer)} | changes
    return save_checkpoint(folder, step, tensors_of(model, optimizer), state, sharded=sharded)


def restore(place, model, optimizer):
    state = read_checkpoint(place)
    load_model_(model, read_tensors(place, "model", model_tensors(model).get))
    load_optimizer_(model, optimizer, place, state["groups"])
    return state


@SHARDED
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training_resumes_as_if_it_had_not_stopped(tmp_path, name, optimizer_name, sharded):
    make, loss = MODELS[name]
    torch.manual_seed(0)
    model = make()
    optimizer = OPTIMIZERS[optimizer_name].build(model)
    trained(model, optimizer, loss, 3)
    optimizer.param_groups[0]["lr"] = 0.005
    place = save(tmp_path, model, optimizer, sharded=sharded)
    torch.manual_seed(1)
    other = make()
    second = OPTIMIZERS[optimizer_name].build(other)
    state = restore(place, other, second)
    assert (state["step"], state["train"]) == (3, {"step": 3, "window": [0.1]})
    assert same_state(model.state_dict(), other.state_dict())
    assert [{k: v for k, v in g.items() if k != "params"} for g in second.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
    ]
    for a, b in ((model, optimizer), (other, second)):
        trained(a, b, loss, 3)
    assert same_state(model.state_dict(), other.state_dict())


def test_parameters_without_gradients_do_not_hinder_resuming(tmp_path):
    def make():
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("used", "unused", "frozen")})
        model["frozen"].requires_grad_(False)
        return model

    def loss(model):
        return model["used"](torch.ones(1, 2)).square().sum()

    model, other = make(), make()
    optimizer, second = (OPTIMIZERS["adamw"].build(each) for each in (model, other))
    trained(model, optimizer, loss, 2)
    restore(save(tmp_path, model, optimizer), other, second)
    for a, b in ((model, optimizer), (other, second)):
        trained(a, b, lambda model: loss(model) + model["unused"](torch.ones(1, 2)).square().sum(), 2)
    assert same_state(model.state_dict(), other.state_dict())


def test_optimiser_state_is_stored_by_name(tmp_path):
    from safetensors.torch import load_file

    model = tiny_vit()
    optimizer = OPTIMIZERS["adamw"].build(model)
    trained(model, optimizer, vit_loss, 2)
    tensors = load_file(save(tmp_path, model, optimizer) / "optimizer.safetensors")
    weight = model.blocks[1].attn.qkv.weight
    assert torch.equal(tensors["blocks.1.attn.qkv.weight//exp_avg"], optimizer.state[weight]["exp_avg"])
    assert {name.split("//")[0] for name in tensors} == {name for name, _ in model.named_parameters()}


@SHARDED
def test_nothing_is_pickled(tmp_path, sharded):
    model = tiny_vit()
    optimizer = OPTIMIZERS["adamw"].build(model)
    trained(model, optimizer, vit_loss, 1)
    average = {name: value.detach() for name, value in model.named_parameters()}
    place = save_checkpoint(tmp_path, 1, tensors_of(model, optimizer, average=average), {}, sharded=sharded)
    names = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
    kinds = [f"{kind}{'/shard-00001-model-00001-of-00001' * sharded}" for kind in ("average", "model", "optimizer")]
    assert names == [*(f"{kind}.safetensors" for kind in kinds), "state.json"]
    json.loads((place / "state.json").read_text())
    for path in place.rglob("*.safetensors"):
        content = path.read_bytes()
        json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    found = read_tensors(place, "average")
    assert found.keys() == average.keys() and all(torch.equal(found[name], average[name]) for name in average)


@pytest.fixture
def small(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = OPTIMIZERS["adamw"].build(model)
    trained(model, optimizer, lambda model: model(torch.ones(1, 2)).sum(), 1)
    return tmp_path / "checkpoints", model, optimizer


def test_a_new_checkpoint_replaces_the_older_ones(small):
    folder, model, optimizer = small
    assert last_checkpoint(folder) is None
    save(folder, model, optimizer, step=1)
    (folder / ".step-00000001.partial").mkdir()
    (folder / "mine").mkdir()
    (folder / "note.txt").write_text("kept")
    place = save(folder, model, optimizer, step=120)
    assert place.name == "step-00000120" == last_checkpoint(folder).name
    assert sorted(path.name for path in folder.iterdir()) == ["mine", "note.txt", "step-00000120"]


@pytest.mark.parametrize("problem", [KeyboardInterrupt, OSError(28, "No space left on device"), RuntimeError])
@pytest.mark.parametrize("when", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 2])
def test_a_save_that_breaks_keeps_the_old_checkpoint(small, monkeypatch, problem, when, step):
    folder, model, optimizer = small
    before = model.weight.detach().clone()
    save(folder, model, optimizer, step=1)
    trained(model, optimizer, lambda model: model(torch.ones(1, 2)).sum(), 1)
    calls = []

    def breaking(write):
        def broken(first, second):  # a path and its content, or tensors and their path
            calls.append(first)
            if len(calls) == when:
                Path(next(one for one in (first, second) if isinstance(one, (str, Path)))).write_text("half")
                raise problem
            write(first, second)

        return broken

    monkeypatch.setattr(run_folder, "write_atomically", breaking(run_folder.write_atomically))
    monkeypatch.setattr(run_folder.safetensors.torch, "save_file", breaking(run_folder.safetensors.torch.save_file))
    raised, message = (RunError, "No space left") if isinstance(problem, OSError) else (problem, None)
    with pytest.raises(raised, match=message):
        save(folder, model, optimizer, step=step)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert torch.equal(read_tensors(last_checkpoint(folder), "model")["weight"], before)


@SHARDED
def test_best_weights_are_there_where_they_are_asked_for(small, sharded):
    folder, model, optimizer = small
    best = {"weight": torch.full((2, 2), 7.0)}
    first = save_checkpoint(folder, 1, tensors_of(model, optimizer, best=best), {}, sharded=sharded)
    assert same_state(read_tensors(first, "best"), best)
    second = save_checkpoint(folder, 2, tensors_of(model, optimizer, best=None), {}, sharded=sharded)
    assert not list(second.glob("best*"))
    with pytest.raises(RunError, match="step-00000002 .*best"):
        read_tensors(second, "best")


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "missing", "noise", "other"])
def test_a_damaged_checkpoint_is_named(small, file, damage):
    place = save(*small)
    path = place / file
    if damage == "missing":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes({"cut": content[:-3], "noise": b"\xff" * 64, "other": b"{}"}[damage])
    with pytest.raises(RunError, match="step-00000003 .*delete it"):
        read_checkpoint(place)


@pytest.mark.parametrize("kept", [0, -3])
def test_a_damaged_shard_is_named(small, kept):
    place = save(*small, sharded=True)
    [path] = (place / "optimizer").iterdir()
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(RunError, match="optimizer/shard-00001.*delete it"):
        read_checkpoint(place)


def test_weights_of_a_finished_sharded_run_are_one_file(small, monkeypatch):
    folder, model, optimizer = small
    place = save(folder, model, optimizer, sharded=True, logs={})

    def weights(**record):
        monkeypatch.setattr(run_folder.RunFolder, "read_record", lambda run: {"status": "finished", **record})
        return read_finished_run(folder.parent, "teacher", "a file")[1]

    assert weights(logs={}) == place / "model.safetensors" == weights()
    found = read_state_dict(weights())
    assert found.keys() == {"weight", "bias"} and all(torch.equal(found[name], getattr(model, name)) for name in found)
    with pytest.raises(RunError, match="of another run"):
        weights(logs={"steps.jsonl": {}})
