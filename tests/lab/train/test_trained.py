"""Weight selection from a recipe: teachers out of run folders and files."""

import json
import shutil

import pytest
import timm
import torch
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import save_file

import wellcond
from lab.helpers import same_state
from lab.small import small_job
from wellcond.errors import RecipeError
from wellcond.lab.methods import MethodSettings, parse_methods
from wellcond.lab.models.build import build_model
from wellcond.lab.models.weights import load_weights
from wellcond.lab.records import seal
from wellcond.lab.train.prepare import prepare_model, prepare_task
from wellcond.lab.train.run import run_job
from wellcond.lab.train.trained import load_teacher

LARGE = {"img_size": 8, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4, "mlp_ratio": 1.0}
STEPS = "training={length: {steps: 3}, batch_size: 32, threads: 1, log_every: 5}"
QUIET = "tracking={weights_every: null, jacobian_points: 0}"
CONDITION = "conditioned+balanced"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs of a teacher twice as wide, plain and conditioned."""
    folder = tmp_path_factory.mktemp("teachers")
    for name, method in (("plain", "conditioned"), ("raw", CONDITION)):
        run_job(small_job(folder / name, method, f"model.arguments={json.dumps(LARGE)}", STEPS, QUIET))
    return folder


def checkpoint(run):
    [place] = (run / "checkpoints").glob("step-*")
    return place / "model.safetensors"


def large(**changes):
    return build_model("timm:vit_tiny_patch16_224", LARGE | {"in_chans": 1, "num_classes": 10} | changes)


def trained(run, method):
    """The teacher, built by hand."""
    model = large()
    if method == CONDITION:
        wellcond.condition_(model, "balanced")
    load_weights(model, checkpoint(run))
    return wellcond.fold_(model) if method == CONDITION else model


def student(method, base, *overrides):
    job = small_job("unused", method, *overrides)
    task = prepare_task(job.recipe, seed=0, base=None)
    return prepare_model(job.recipe, job.method, task, seed=0, base=base)


@pytest.mark.parametrize("layout", ["blind", "heads"])
@pytest.mark.parametrize(("name", "method"), [("plain", "conditioned"), ("raw", CONDITION)])
def test_a_run_teaches_what_init_does_by_hand(runs, name, method, layout):
    state = torch.get_rng_state()
    found = student(f"weight_selection(teacher={name}, layout={layout})", runs).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    by_hand, before = student("default", None), student("default", None).state_dict()
    wellcond.init_(by_hand, "weight_selection", teacher=trained(runs / name, method), layout=layout)
    assert same_state(found, by_hand.state_dict())
    assert torch.equal(found["head.weight"], before["head.weight"])
    assert not torch.equal(found["blocks.0.attn.qkv.weight"], before["blocks.0.attn.qkv.weight"])
    assert torch.equal(found["norm.weight"], trained(runs / name, method).norm.weight[::2])


def test_a_published_model_teaches_from_a_mirror(tmp_path, monkeypatch):
    """Its weights are of 224 pixels and 1,000 classes; the student's data have 32 pixels and two."""
    for place in range(8):
        folder = tmp_path / "images" / f"class{place % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40), (20 * place, 0, 0)).save(folder / f"{place}.png")
    name = "vit_tiny_patch16_224.augreg_in21k"
    published = timm.create_model(name)
    file = tmp_path / "timm" / name / "model.safetensors"
    file.parent.mkdir(parents=True)
    save_file(published.state_dict(), file)
    monkeypatch.setenv("WELLCOND_DATA", str(tmp_path))
    small = {"img_size": 32, "embed_dim": 96, "depth": 2, "num_heads": 3}
    data = f"data={{source: image_folder, path: '{tmp_path / 'images'}', evaluation_fraction: 0.25}}"
    changes = (f"model.arguments={json.dumps(small)}", "task.image_size=32", data)
    found = student(f"weight_selection(teacher=timm:{name})", None, *changes).state_dict()
    before = student("default", None, *changes).state_dict()
    assert torch.equal(found["norm.weight"], published.norm.weight[::2])
    assert torch.equal(found["blocks.1.mlp.fc1.bias"], published.blocks[1].mlp.fc1.bias[::2])
    assert torch.equal(found["head.weight"], before["head.weight"])


@pytest.mark.parametrize(
    ("name", "field"), [("vit_nano", "no model"), ("vit_tiny_patch16_224.augreg_in21k", "WELLCOND_DATA")]
)
def test_a_published_model_that_is_not_there_is_an_error(monkeypatch, tmp_path, name, field):
    monkeypatch.setenv("WELLCOND_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RecipeError, match=field):
        student(f"weight_selection(teacher=timm:{name})", None)


def test_a_run_from_a_teacher(runs, tmp_path):
    job = small_job(
        tmp_path / "run", f"weight_selection(teacher={runs / 'plain'}, layout=heads)+balanced", STEPS, QUIET
    )
    done = run_job(job)
    assert done["status"] == "finished"
    assert done["config"]["method"]["init_options"]["teacher"] == str(runs / "plain")
    assert run_job(job) == done


def rewritten(runs, tmp_path, change):
    """A copy of a run whose record was changed."""
    shutil.copytree(runs / "plain", tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(seal(record)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(status="interrupted"), "the run in .*run is not finished but interrupted"),
        (lambda record: record["config"]["model"].update(name="evil.py:build"), "is code in a file .evil.py:build."),
        (
            lambda record: record["config"]["model"]["arguments"].update(embed_dim=24),
            r"model.safetensors does not fit this model: .*\(32,\) in the file, \(24,\) in the model",
        ),
    ],
)
def test_a_run_that_cannot_teach_is_named(runs, tmp_path, change, message):
    rewritten(runs, tmp_path, change)
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(wellcond.WellcondError, match=message):
        student("weight_selection(teacher=run)", tmp_path)


def test_missing_parts_of_a_run_are_named(runs, tmp_path):
    with pytest.raises(RecipeError, match="nowhere"):
        student("weight_selection(teacher=nowhere)", tmp_path)
    rewritten(runs, tmp_path, lambda record: None)
    checkpoint(tmp_path / "run").with_name("optimizer.safetensors").unlink()  # which only resuming needs
    student("weight_selection(teacher=run)", tmp_path)
    checkpoint(tmp_path / "run").write_bytes(b"damaged")
    with pytest.raises(wellcond.WellcondError, match="is damaged .model.safetensors"):
        student("weight_selection(teacher=run)", tmp_path)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(RecipeError, match="no checkpoint"):
        student("weight_selection(teacher=run)", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("teacher=3", "teacher: expected the folder of a finished run, found 3"),
        ("teacher=a, teachers=b", "unknown option of 'weight_selection'"),
    ],
)
def test_options_are_checked_before_anything_starts(text, message):
    with pytest.raises(RecipeError, match=message):
        parse_methods(f"weight_selection({text})")
    with pytest.raises(ValidationError, match="unknown option of 'gaussian'"):
        MethodSettings(init="gaussian", init_options={"teacher": "a"})


def test_a_teacher_is_loaded_without_a_task(runs):
    found = load_teacher({"teacher": "plain"}, runs, lambda name, arguments: large(num_classes=5))
    assert found.head.out_features == 5 and torch.equal(found.norm.weight, trained(runs / "plain", "").norm.weight)
