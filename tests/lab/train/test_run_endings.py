"""How runs end: diverged, failed, with odd precision, and what they leave behind."""

import gc
import json
import resource
import shutil
import weakref

import pytest
import torch
from PIL import Image

from lab.small import logs, record, small_job, stop_after
from wellcond.errors import RecipeError, RunError
from wellcond.lab.pool import run_jobs
from wellcond.lab.train import prepare
from wellcond.lab.train.engine import Engine
from wellcond.lab.train.length import RunClock
from wellcond.lab.train.prepare import prepare_model, prepare_task
from wellcond.lab.train.run import run_job


def test_a_loss_that_is_not_finite_ends_the_run_as_diverged(tmp_path, monkeypatch):
    real = Engine.update

    def update(self, step, batches, **options):
        loss, norms = real(self, step, batches, **options)
        return (loss * float("nan"), norms) if step == 11 else (loss, norms)

    monkeypatch.setattr(Engine, "update", update)
    ended = run_job(small_job(tmp_path / "run", "polar", "training.log_every=1"))
    assert ended["status"] == "diverged" and ended["reason"] == "the loss is nan at step 12"
    assert ended["final"]["step"] == 8
    assert logs(tmp_path / "run")["steps"][-1]["loss"] == "nan"
    again = run_job(small_job(tmp_path / "run", "polar", "training.log_every=1"))
    assert again["status"] == "diverged" and len(again["sessions"]) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.batch_size=5000", "training.batch_size: expected at most the 1038 training samples, found 5000"),
        ("training.accumulate=5", "expected a multiple of 5"),
        ("model.arguments={num_classes: 3}", "the data need 10, found 3"),
        ("model.name=timm:vit_tinny", "timm has no model 'vit_tinny'"),
    ],
)
def test_what_cannot_run_says_why_and_is_recorded(tmp_path, override, message):
    with pytest.raises(Exception, match=message) as caught:
        run_job(small_job(tmp_path / "run", "default", override))
    assert isinstance(caught.value, ValueError | RuntimeError)


NO_WEIGHTS = "tracking={weights_every: null, jacobian_points: 2}"


def test_the_device_is_waited_for_at_boundaries_and_not_at_every_step(tmp_path, monkeypatch):
    waits, steps = [], 48
    monkeypatch.setattr(RunClock, "synchronize", lambda clock: waits.append(clock.device.type))
    often = f"training={{length: {{steps: {steps}}}, batch_size: 32, threads: 1, log_every: 1, hours: 10}}"
    rare = ["evaluation={every: {steps: 1000}}", "checkpoint={every: {steps: 1000}}", NO_WEIGHTS]
    ended = run_job(small_job(tmp_path / "run", "default", often, *rare))
    assert ended["status"] == "finished" and ended["progress"]["step"] == steps
    # into and out of: measuring, evaluation; training; measuring, evaluation, checkpointing; evaluation
    assert len(waits) == 2 + 2 + 1 + 6 + 1


def test_the_record_says_what_was_run_on_what(tmp_path):
    folder = tmp_path / "run"
    run_job(small_job(folder))
    kept = record(folder)
    assert kept["status"] == "finished" and kept["progress"]["step"] == 24
    assert kept["config"]["optimizer"]["lr"] == 0.001 and len(kept["config_hash"]) == 16
    assert kept["data"]["train"] == 1038 and kept["data"]["evaluation"] == 259
    assert kept["model"]["attentions"] == 2 and kept["model"]["parameters"] > 1000
    assert set(kept["seconds"]) == {"setup", "training", "evaluation", "measuring", "checkpointing"}
    assert kept["seconds_per_step"] == pytest.approx(kept["seconds"]["training"] / 24)
    assert kept["peak_memory_bytes"] > 1e7
    session = kept["sessions"][0]
    assert session["torch"] == torch.__version__ and session["device"] == "cpu" and session["threads"] == 1
    assert session["runs_at_once"] == 1 and session["cores"] >= 1 and isinstance(session["alone"], bool)
    rows = logs(folder)
    assert [row["step"] for row in rows["evaluations"]] == [0, 8, 16, 24]
    assert [row["step"] for row in rows["steps"]] == [5, 10, 15, 20, 24]
    assert sorted({row["step"] for row in rows["conditioning"]}) == [0, 1, 10, 20, 24]
    assert {row["step"] for row in rows["conditioning"] if row["condition_number"] is not None} == {0, 1, 24}
    assert json.dumps(kept, allow_nan=False)


def test_a_run_that_ended_leaves_no_model_in_memory(tmp_path):
    """Tasks are kept for the next run; the first run's model must not stay with them."""
    ended = []

    def observe(event):
        if event["event"] == "end":
            ended.extend(weakref.ref(thing) for thing in gc.get_objects() if type(thing) is Engine)

    prepare._KEPT.clear()
    run_job(small_job(tmp_path / "run", "conditioned+balanced"), observe)
    gc.collect()
    assert ended and all(engine() is None for engine in ended)


def test_measuring_changes_nothing(tmp_path):
    tracked, blind = tmp_path / "tracked", tmp_path / "blind"
    run_job(small_job(tracked, "polar", "model.arguments.proj_drop_rate=0.1"))
    overrides = ("model.arguments.proj_drop_rate=0.1", "tracking={weights_every: null, jacobian_points: 0}")
    run_job(small_job(blind, "polar", *overrides))
    assert logs(tracked)["steps"] == logs(blind)["steps"]
    assert logs(tracked)["evaluations"] == logs(blind)["evaluations"]
    assert logs(blind)["conditioning"] == []


@pytest.mark.parametrize(
    "change",
    [
        "precision.mixed=bf16",
        pytest.param("precision.compile=aot_eager", marks=pytest.mark.slow),
        pytest.param("precision.compile=inductor", marks=pytest.mark.slow),
    ],
)
def test_other_precisions_and_compilation_train(tmp_path, change):
    folder = tmp_path / "run"
    run_job(small_job(folder, "balanced", change))
    plain = tmp_path / "plain"
    run_job(small_job(plain, "balanced"))
    ours, theirs = record(folder)["final"]["loss"], record(plain)["final"]["loss"]
    assert ours == pytest.approx(theirs, rel=0.02)
    assert ours != theirs or "compile" in change


def test_trackers_of_accelerate_receive_the_metrics(tmp_path):
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "run"
    job = small_job(folder, "default", "logging.trackers=[tensorboard]")
    stop_after(job, 8)
    name = record(folder)["run_id"]
    run_job(job)
    assert record(folder)["run_id"] == name  # by which a tracker goes on with the curve
    events = min(folder.rglob("events.out.tfevents.*"), key=lambda path: len(path.parts))
    reader = tensorboard.EventAccumulator(str(events.parent))
    reader.Reload()
    assert "evaluation/accuracy" in reader.Tags()["scalars"] and "train/loss" in reader.Tags()["scalars"]
    assert [row.step for row in reader.Scalars("train/loss")] == [5, 10, 15, 20, 24]
    assert reader.Scalars("evaluation/accuracy")[-1].value == pytest.approx(record(folder)["final"]["accuracy"])
    layers = {tag.split("/")[1] for tag in reader.Tags()["scalars"] if tag.startswith("conditioning/")}
    for layer in layers:
        names = ("kappa_J", "kappa_W_Q", "kappa_W_K", "kappa_W_V", "entropy", "dead_heads")
        assert {f"conditioning/{layer}/{name}" for name in names} <= set(reader.Tags()["scalars"])
    assert layers


def test_a_full_disk_names_the_file_and_leaves_a_run_that_resumes(tmp_path):
    """A limit on the size of files stands for a disk without room: the checkpoint no longer fits."""
    folder, tracking = tmp_path / "run", "tracking={weights_every: null, jacobian_points: 0}"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        with pytest.raises(RunError, match="step-00000007"):
            run_job(small_job(folder, "default", tracking))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert record(folder)["status"] == "failed"
    assert run_job(small_job(folder, "default", tracking))["status"] == "finished"


@pytest.mark.slow
@pytest.mark.processes
def test_data_workers_run_inside_the_pool(tmp_path):
    folder = tmp_path / "images"
    for split, count in (("train", 24), ("val", 8)):
        for number in range(count):
            place = folder / split / "ab"[number % 2]
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 20), (number * 9, 10, 250 - number * 9)).save(place / f"{number}.png")
    overrides = (
        f"data={{source: image_folder, path: {folder}}}",
        "task={name: image_classification, image_size: 8}",
        "augmentation={resized_crop: [0.5, 1.0], flip: 0.5}",
        "training={length: {steps: 4}, batch_size: 8, threads: 1, workers: 1}",
    )
    jobs = [small_job(tmp_path / method, method, *overrides) for method in ("default", "polar")]
    outcome = run_jobs(jobs, num_workers=2, observer=lambda job, event: None)
    assert not outcome.failures
    assert [kept["status"] for kept in outcome.records] == ["finished"] * 2


def test_a_folder_deleted_during_its_run_is_an_error_and_is_not_made_again(tmp_path):
    def observe(event):
        if event["event"] == "saved" and event["step"] == 7:
            shutil.rmtree(tmp_path / "run")

    with pytest.raises(RunError, match="could not be written"):
        run_job(small_job(tmp_path / "run"), observe)
    assert not (tmp_path / "run").exists()


def test_norms_of_projections_are_taken_before_clipping(tmp_path):
    whole, clipped = tmp_path / "whole", tmp_path / "clipped"
    run_job(small_job(whole, "conditioned", "training.log_every=1"))
    run_job(small_job(clipped, "conditioned", "training.log_every=1", "training.clip_norm=0.001"))
    ours, theirs = (logs(folder)["steps"][0] for folder in (whole, clipped))
    for name in ("grad_norm", "grad_norm_q", "grad_norm_k", "grad_norm_v"):
        assert theirs[name] == pytest.approx(ours[name], rel=1e-5) and ours[name] > 0.001


def test_a_failed_resume_keeps_what_was_known(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    known = stop_after(small_job(folder), 8)

    def refuse(*arguments, **options):
        raise RecipeError("no data today")

    with monkeypatch.context() as patch:
        patch.setattr("wellcond.lab.train.run.prepare_task", refuse)
        with pytest.raises(RecipeError):
            run_job(small_job(folder))
    kept = record(folder)
    assert kept["status"] == "failed" and kept["reason"] == "no data today"
    assert kept["final"] == known["final"] and kept["metric"] == known["metric"] and kept["progress"]["step"] == 8
    assert run_job(small_job(folder))["status"] == "finished"


def test_methods_with_the_same_seed_are_paired(tmp_path):
    """All weights but Q, K and V, the order of the samples, and so the first loss of two defaults, are the same."""
    job = small_job(tmp_path, "conditioned")
    task = prepare_task(job.recipe, seed=3, base=None)
    weights = []
    for method in ("default", "conditioned"):
        job = small_job(tmp_path, method)
        weights.append(dict(prepare_model(job.recipe, job.method, task, seed=3, base=None).named_parameters()))
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]) == ("qkv.weight" not in name), name
