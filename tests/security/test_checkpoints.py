"""Checkpoints that carry code: nothing of it is run, and the message says what was expected."""

import io
import json
import pickle

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import wellcond as wc
from lab.small import small_job, stop_after
from wellcond.errors import ModelSpecError, RunError, WeightError
from wellcond.lab.models.build import build_model
from wellcond.lab.models.weights import read_state_dict
from wellcond.lab.train.run import run_job
from wellcond.lab.train.run_folder import read_checkpoint, read_tensors, save_checkpoint

SUFFIXES = (".pt", ".pth", ".pth.tar", ".bin", ".ckpt", ".safetensors")
VIT = "timm:vit_tiny_patch16_224"
SMALL = ["--model-arg", "depth=1", "--model-arg", "embed_dim=24", "--model-arg", "num_heads=3"]
pytestmark = pytest.mark.filterwarnings("ignore:.*pickle protocol:UserWarning")


def saved(payload, form):
    """Bytes of a checkpoint with a payload where a reader might look for tensors."""
    content = io.BytesIO()
    if form == "zip":
        torch.save({"state_dict": {"weight": torch.ones(2), "bias": payload}}, content)
    elif form == "legacy":
        torch.save({"weight": payload}, content, _use_new_zipfile_serialization=False)
    else:
        pickle.dump(payload, content, protocol=int(form))
    return content.getvalue()


@pytest.mark.parametrize("form", ["zip", "legacy", "2", "4"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_pickle_of_code_is_refused_under_every_name(suffix, form, canary, tmp_path):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(saved(canary.payload, form))
    with pytest.raises(WeightError, match=r"expected a state dict|not a readable") as caught:
        read_state_dict(path)
    message = str(caught.value)
    assert str(path) in message and "safetensors.torch.save_file" in message
    assert "weights_only` set to `False" not in message  # torch's advice


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("command", ["inspect", "fold", "init", "measure"])
def test_commands_refuse_a_pickle_of_code(command, suffix, canary, tmp_path, run):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(saved(canary.payload, "zip"))
    outputs = {"fold": ["-o", tmp_path / "out.safetensors"], "init": ["-o", tmp_path / "out.safetensors"]}
    outputs["init"] += ["--data", "random"]
    code, _ = run(command, VIT, *SMALL, "--weights", path, *outputs.get(command, []))
    assert str(code).startswith(f"error: {path}")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*TorchScript:UserWarning")
def test_a_program_of_torchscript_is_refused(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "model.pt")
    with pytest.raises(WeightError, match="not a readable checkpoint"):
        read_state_dict(tmp_path / "model.pt")


def test_a_name_in_a_checkpoint_is_never_evaluated(canary, tmp_path, run):
    """A marker's value names a method."""
    state = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=3).state_dict()
    settings = {"method": canary.command, "projections": "qkv", "sites": ["blocks.0.attn"]}
    marker = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
    path = tmp_path / "model.safetensors"
    state["wellcond_conditioning"] = marker
    save_file(state, path, metadata={"format": "pt", "code": canary.code})
    for arguments in (["inspect"], ["fold", "-o", tmp_path / "out.safetensors"]):
        code, _ = run(arguments[0], VIT, *SMALL, "--weights", path, *arguments[1:])
        assert "unknown conditioning method" in str(code)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_of_transformers_with_a_pickle_of_code_is_refused(name, canary, tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **sizes}))
    (tmp_path / name).write_bytes(saved(canary.payload, "zip"))
    with pytest.raises(WeightError, match=name):
        build_model(f"hf:{tmp_path}")


@pytest.mark.parametrize("argument", ["checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"])
def test_arguments_that_make_timm_load_a_file_are_refused(argument, canary, tmp_path):
    (tmp_path / "evil.pth").write_bytes(saved(canary.payload, "zip"))
    with pytest.raises(ModelSpecError, match=rf"{argument}.*remove it"):
        build_model("timm:vit_tiny_patch16_224", {"depth": 1, argument: str(tmp_path / "evil.pth")})


def test_a_file_that_a_configuration_of_transformers_has_timm_load_is_not_unpickled(canary, tmp_path, monkeypatch):
    """`timm_wrapper` hands its `model_args` to timm, whose older versions unpickle."""
    import timm.models._helpers as helpers

    (tmp_path / "evil.pth").write_bytes(saved(canary.payload, "zip"))
    monkeypatch.setattr(helpers, "_torch_load", lambda path, **_: torch.load(path, weights_only=False))
    arguments = {"architecture": "vit_tiny_patch16_224", "model_args": {"checkpoint_path": str(tmp_path / "evil.pth")}}
    with pytest.raises(ModelSpecError, match="pickle"):
        build_model("hf:timm_wrapper", arguments)


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_a_run_does_not_go_on_from_a_pickle_of_code(name, canary, tmp_path):
    job = small_job(tmp_path / "run")
    stop_after(job, 8)
    [place] = (tmp_path / "run" / "checkpoints").glob("step-*")
    (place / f"{name}.safetensors").write_bytes(saved(canary.payload, "zip"))
    with pytest.raises(RunError, match="is damaged"):
        run_job(job)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_shards_of_a_checkpoint_are_never_unpickled(canary, tmp_path):
    """torch's own distributed checkpoints have pickled metadata; ours have none, and no such file is read."""
    place = save_checkpoint(tmp_path, 1, {"model": {"weight": torch.ones(2)}}, {}, sharded=True)
    (place / "model" / ".metadata").write_bytes(saved(canary.payload, "4"))
    assert torch.equal(read_tensors(place, "model")["weight"], torch.ones(2))
    [shard] = (place / "model").glob("*.safetensors")
    shard.write_bytes(saved(canary.payload, "zip"))
    for read in (lambda: read_checkpoint(place), lambda: read_tensors(place, "model")):
        with pytest.raises(RunError, match="is damaged"):
            read()


@pytest.mark.parametrize("field", ["model.weights", "model.encoder"])
def test_weights_that_a_recipe_names_may_not_be_code(field, canary, tmp_path):
    (tmp_path / "evil.pt").write_bytes(saved(canary.payload, "zip"))
    with pytest.raises(WeightError, match="never unpickles code"):
        run_job(small_job(tmp_path / "run", "default", f"{field}={tmp_path / 'evil.pt'}"))


def test_the_run_of_a_teacher_may_not_name_code(canary, tmp_path):
    (tmp_path / "evil.py").write_text(canary.code)
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    save_checkpoint(teacher / "checkpoints", 1, {"model": {"w": torch.ones(1)}}, {"logs": {}})
    config = {"model": {"name": f"{tmp_path / 'evil.py'}:build", "arguments": {}}, "task": {}}
    metric = {"name": "accuracy", "higher_is_better": True, "percent": True}
    record = {"kind": "wellcond-run", "schema": 1, "method": "default", "seed": 0, "status": "finished"}
    record |= {"config": config, "metric": metric, "final": {"accuracy": 0.5}}
    (teacher / "run.json").write_text(json.dumps(record))
    method = {"init": "weight_selection", "init_options": {"teacher": str(teacher)}}
    with pytest.raises(wc.WellcondError, match="is code in a file .*not run here"):
        run_job(small_job(tmp_path / "run", method))


def test_an_array_of_objects_is_refused_as_input(canary, tmp_path, run):
    np.save(tmp_path / "evil.npy", np.array([canary.payload], dtype=object), allow_pickle=True)
    code, _ = run("measure", VIT, *SMALL, "--data", tmp_path / "evil.npy")
    assert "pickles are not loaded" in str(code)
