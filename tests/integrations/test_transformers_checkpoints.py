"""Checkpoints of the real Trainer: loaded in plain models, resumed from, exported."""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    Trainer,
)

import wellcond as wc
from integrations.trainer_runs import MODELS, bert, conditioned, gpt2, inputs, logits, losses, make_trainer, samples
from models import unchanged
from patience import PATIENCE
from wellcond.integrations.transformers import WellcondCallback, export, prepare, resume

AUTO = {
    "gpt2": AutoModelForCausalLM,
    "bert": AutoModelForSequenceClassification,
    "vit": AutoModelForImageClassification,
}
RAW = "wellcond_raw.safetensors"
EVERY = {"every": 2, "budget": None}
CONDITIONS = {
    "gpt2": {"method": "identity", "lam": 0.5},
    "bert": "balanced",
    "vit": {"method": "polar", "frozen": True},
}


def run(name, condition, folder, **how):
    """Four steps with a checkpoint after every second one, and one schedule whatever is left of them."""
    trainer = make_trainer(
        conditioned(name, condition), name, folder, lr_scheduler_type="constant", save_strategy="steps", save_steps=2
    )
    callback = WellcondCallback(**EVERY).add_to(trainer)
    trainer.train(**how)
    return trainer, callback


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of each model, made when it is first asked for; tests read it, and train and spoil copies of its folder."""

    @functools.cache
    def train(name):
        folder = tmp_path_factory.mktemp(name)
        return *run(name, CONDITIONS[name], folder), folder

    return train


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_load_in_plain_automodel_with_effective_weights(name, trained, tmp_path):
    trainer, _, folder = trained(name)
    model = trainer.model
    trainer.save_model(tmp_path / "saved")
    export(trainer, tmp_path / "plain")
    assert wc.conditioning_of(model) is not None, "an export leaves the model conditioned"
    expected = logits(model, name)
    for place in (folder / "checkpoint-4", tmp_path / "saved", tmp_path / "plain"):
        loaded, info = AUTO[name].from_pretrained(place, output_loading_info=True)
        assert not any(info.values()), info
        assert wc.conditioning_of(loaded) is None
        torch.testing.assert_close(logits(loaded, name), expected, rtol=0, atol=1e-6)
    base = AutoModel.from_pretrained(folder / "checkpoint-4").eval()
    hidden, own = (part(**inputs(name)).last_hidden_state for part in (base, model.base_model))
    torch.testing.assert_close(hidden, own, rtol=0, atol=1e-6)
    saved, plain = (load_file(tmp_path / place / "model.safetensors") for place in ("saved", "plain"))
    assert len(saved) == len(plain) and not any("wellcond" in key for key in (*saved, *plain))
    raw, own = load_file(tmp_path / "saved" / RAW), model.state_dict()
    assert not (tmp_path / "plain" / RAW).exists()
    assert all(torch.equal(value, own[key]) for key, value in raw.items())
    weights = [key for key in raw if key.endswith(".weight")]
    assert weights and not any(torch.allclose(saved[key], raw[key]) for key in weights)
    assert raw.keys() - set(weights) == own.keys() - set(MODELS[name]().state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_training_resumes_without_a_trainer(name, tmp_path):
    model = conditioned(name, CONDITIONS[name])
    model.save_pretrained(tmp_path)
    again = resume(AUTO[name].from_pretrained(tmp_path), tmp_path)
    assert wc.conditioning_of(again) == wc.conditioning_of(model)
    for (key, a), b in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert torch.equal(logits(again, name), logits(model, name))
    resume(again, tmp_path)  # a model that is conditioned in the same way stays so


def test_resuming_without_a_trainer_refuses_what_does_not_fit(tmp_path):
    model = conditioned("bert")
    model.save_pretrained(tmp_path)
    other, plain = conditioned("bert", "polar"), bert()
    for wrong, kind in ((other, wc.CheckpointMismatchError), (gpt2(), wc.WeightError)):
        with unchanged(wrong), pytest.raises(kind):
            resume(wrong, tmp_path)
    (tmp_path / RAW).write_bytes(b"{")
    with pytest.raises(wc.WeightError, match="damaged"):
        resume(plain, tmp_path)
    (tmp_path / RAW).unlink()
    with pytest.raises(wc.WeightError, match="no such file"):
        resume(plain, tmp_path)


def test_a_trainer_may_save_in_shards(tmp_path):
    model = conditioned("bert")
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    other = make_trainer(prepare(bert(), condition="balanced"), "bert", tmp_path)
    other._load_from_checkpoint(str(tmp_path))
    kept = model.state_dict()
    assert all(torch.equal(value, kept[key]) for key, value in other.model.state_dict().items())


def test_raw_weights_of_another_time_are_refused(trained, tmp_path):
    checkpoint = shutil.copytree(trained("bert")[2] / "checkpoint-2", tmp_path / "checkpoint-2")
    plain = bert()
    type(plain).save_pretrained(plain, checkpoint)  # knows nothing of the file beside
    with pytest.raises(wc.CheckpointMismatchError, match="effective weights"):
        make_trainer(conditioned("bert"), "bert", tmp_path).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("name", ["bert", pytest.param("gpt2", marks=pytest.mark.slow), "vit"])
def test_resuming_equals_not_stopping(name, trained, tmp_path):
    trainer, callback, folder = trained(name)
    shutil.copytree(folder / "checkpoint-2", tmp_path / "checkpoint-2")
    # What a crash leaves: lines of steps after the checkpoint, the last one cut off.
    (tmp_path / "wellcond.jsonl").write_text((folder / "wellcond.jsonl").read_text() + '{"step": 4, "lay')
    second, later = run(name, CONDITIONS[name], tmp_path, resume_from_checkpoint=True)

    assert losses(second) == losses(trainer)
    for (key, a), b in zip(trainer.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert {p.step for p in later.points} == {4}
    lines = [json.loads(line) for line in (tmp_path / "wellcond.jsonl").read_text().splitlines()]
    points = [p.to_json_dict() | {"seconds": 0} for p in callback.points]
    assert [row | {"seconds": 0} for row in lines] == [point | later.tracker.run for point in points]


def test_without_the_callback_condition_alone_resumes_too(trained, tmp_path):
    trainer, _, folder = trained("bert")
    model = wc.condition_(bert(), "balanced")
    second = make_trainer(model, "bert", tmp_path, lr_scheduler_type="constant")
    second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    kept = trainer.model.state_dict()
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("other", [None, "polar"])
@pytest.mark.parametrize("watched", [False, True])
def test_resuming_with_another_conditioning_is_refused(watched, other, trained, tmp_path):
    trainer = make_trainer(prepare(bert(), condition=other), "bert", tmp_path)
    if watched:
        WellcondCallback(**EVERY).add_to(trainer)
    with pytest.raises(wc.CheckpointMismatchError, match="another conditioning"):
        trainer.train(resume_from_checkpoint=str(trained("bert")[2] / "checkpoint-2"))


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    model = conditioned("gpt2")
    arguments = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    limits = {"save_total_limit": 1, "save_only_model": True, "load_best_model_at_end": True, "learning_rate": 3.0}
    trainer = make_trainer(model, "gpt2", tmp_path, **arguments, **limits)
    WellcondCallback(**EVERY, export="plain").add_to(trainer)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert Path(best).name == "checkpoint-1", "training at this rate gets worse"
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == [Path(best).name]
    for folder in (best, tmp_path / "plain"):
        loaded = AUTO["gpt2"].from_pretrained(folder)
        torch.testing.assert_close(logits(loaded, "gpt2"), logits(model, "gpt2"), rtol=0, atol=1e-6)
    raw, own = load_file(Path(best, RAW)), model.state_dict()
    assert all(torch.equal(value, own[key]) for key, value in raw.items())


def test_model_init_and_a_plain_model(tmp_path):
    trainer = Trainer(
        model_init=lambda: prepare(gpt2(), init="conditioned", condition="balanced"),
        args=make_trainer(bert(), "bert", tmp_path, max_steps=1).args,
        train_dataset=samples("gpt2"),
    )
    WellcondCallback(**EVERY).add_to(trainer)
    trainer.train()
    assert wc.conditioning_of(trainer.model)["method"] == "balanced"
    plain = bert()
    export(plain, tmp_path / "plain")
    assert set(load_file(tmp_path / "plain" / "model.safetensors")) == set(plain.state_dict())
    with pytest.raises(TypeError, match="expected a model of transformers"):
        export(torch.nn.MultiheadAttention(8, 2), tmp_path)


TWO_PROCESSES = """
import sys; sys.path.insert(0, {tests!r})
import torch; torch.set_num_threads(1)
from integrations.trainer_runs import conditioned, logits, make_trainer
from integrations.test_transformers_checkpoints import AUTO, EVERY, WellcondCallback
model = conditioned("bert")
trainer = make_trainer(model, "bert", {folder!r}, save_strategy="steps", save_steps=2)
callback = WellcondCallback(**EVERY, export="plain").add_to(trainer)
trainer.train()
assert trainer.args.world_size == 2
first = trainer.is_world_process_zero()
assert sorted({{p.step for p in callback.points}}) == ([0, 2, 4] if first else [])
torch.distributed.barrier()
for folder in ("checkpoint-4", "plain"):
    loaded = AUTO["bert"].from_pretrained({folder!r} + "/" + folder)
    torch.testing.assert_close(logits(loaded, "bert"), logits(model, "bert"), rtol=0, atol=1e-6)
print("done", trainer.args.process_index)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path / "run")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "done 0" in done.stdout and "done 1" in done.stdout, done.stderr
