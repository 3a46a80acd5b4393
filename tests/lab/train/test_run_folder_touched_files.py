"""Files of runs that somebody or a disk has changed: a run comes to the same numbers, or says which file is damaged."""

import json
import shutil

import pytest

from lab.small import TESTED, kill_at_write, record, small_job, stop_after
from wellcond.errors import RunError, WellcondError
from wellcond.lab.records import load_comparisons
from wellcond.lab.report.page import build_report
from wellcond.lab.train import evaluate
from wellcond.lab.train.run import run_job
from wellcond.lab.train.run_folder import read_finished_run

LOGS = ("steps.jsonl", "evaluations.jsonl", "conditioning.jsonl")
TENSORS = ("model.safetensors", "optimizer.safetensors", "best.safetensors", "average.safetensors")
FILES = ("run.json", *LOGS, "state.json", *TENSORS)
CHANGES = (*TESTED, "training.averaging={decay: 0.9}", "training.log_every=2")


def job_in(folder, seed=0):
    return small_job(folder, "conditioned", *CHANGES, seed=seed)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "digits/conditioned/seed0"
    assert run_job(job_in(folder))["status"] == "finished"
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    assert stop_after(job_in(folder), 9)["status"] == "interrupted"
    return folder


def find(folder, name):
    [path] = [path for path in folder.rglob(name) if "report" not in path.parts]
    return path


def refusal(error, path):
    """What the user reads names the file, or the checkpoint that it is part of, and says what to delete."""
    text = str(error)
    place = path.parent if path.parent.name.startswith("step-") else path
    assert str(place) in text and "elete" in text and "Traceback" not in text, text
    return text


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0.5])
def test_truncated_files_of_an_interrupted_run(interrupted, tmp_path, name, kept):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    path = find(folder, name)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * (len(content) - 1))])
    with pytest.raises(RunError) as caught:
        run_job(job_in(folder))
    refusal(caught.value, path)


def test_checkpoints_of_two_runs_that_were_swapped_are_refused(interrupted, tmp_path):
    ours = shutil.copytree(interrupted, tmp_path / "ours")
    theirs = tmp_path / "theirs"
    stop_after(job_in(theirs, seed=1), 9)
    (ours / "checkpoints").rename(tmp_path / "kept")
    (theirs / "checkpoints").rename(ours / "checkpoints")
    (tmp_path / "kept").rename(theirs / "checkpoints")
    for folder, seed in ((ours, 0), (theirs, 1)):
        with pytest.raises(RunError, match="another run") as caught:
            run_job(job_in(folder, seed))
        refusal(caught.value, folder / "checkpoints")


def test_a_checkpoint_under_the_name_of_another_step_is_refused(interrupted, tmp_path):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    (folder / "checkpoints/step-00000009").rename(folder / "checkpoints/step-00000010")
    with pytest.raises(RunError, match="step 9") as caught:
        run_job(job_in(folder))
    refusal(caught.value, folder / "checkpoints/step-00000010/state.json")


@pytest.mark.parametrize("value", [1.7, None, "nan"])
@pytest.mark.parametrize("entry", ["final", "test"])
@pytest.mark.parametrize("checksum", [True, False], ids=["with checksum", "without"])
def test_an_edited_score_is_refused_everywhere(finished, tmp_path, entry, value, checksum):
    root = shutil.copytree(finished.parents[1], tmp_path / "digits")
    path = root / "conditioned/seed0/run.json"
    stored = json.loads(path.read_text())
    stored[entry]["accuracy"] = value
    if not checksum:
        del stored["checksum"]
    path.write_text(json.dumps(stored))
    for use in (lambda: run_job(job_in(path.parent)), lambda: build_report(root, pictures=False)):
        with pytest.raises(WellcondError) as caught:
            use()
        text = refusal(caught.value, path)
        assert checksum or f"{entry}.accuracy" in text


def test_a_checkpoint_that_lists_files_elsewhere_is_refused(interrupted, tmp_path):
    """A manifest names files of its own folder; nothing else is opened."""
    folder = shutil.copytree(interrupted, tmp_path / "run")
    path = find(folder, "state.json")
    stored = json.loads(path.read_text())
    del stored["checksum"]
    stored["files"]["../../../outside.safetensors"] = stored["files"].pop("model.safetensors")
    path.write_text(json.dumps(stored))
    with pytest.raises(RunError, match="outside") as caught:
        run_job(job_in(folder))
    refusal(caught.value, path)


def shown(folder):
    """What a report takes from a run."""
    [run] = load_comparisons(folder)[0].runs
    kept = {name: run.record.get(name) for name in ("status", "reason", "final", "best", "seconds", "config")}
    return kept, run.steps, run.evaluations, run.conditioning


@pytest.mark.parametrize("moment", [pytest.param(n, marks=[pytest.mark.slow] * (n != 3)) for n in range(6)])
def test_a_run_killed_while_it_resumes_can_still_be_reported(tmp_path, monkeypatch, moment):
    """Its record may speak of more lines than the checkpoint, which resuming cuts off."""
    job = small_job(tmp_path / "run", "conditioned")

    def fail(event):
        if event["event"] == "evaluation" and event["row"]["step"] == 16:
            raise ValueError("as if something had broken")

    with pytest.raises(RunError, match="as if something had broken"):
        run_job(job, fail)
    kill_at_write(monkeypatch, moment, job)
    kept, steps, _, _ = shown(tmp_path / "run")
    assert kept["status"] in ("failed", "running") and steps


def test_a_test_score_that_is_not_finite_is_a_divergence(tmp_path, monkeypatch):
    score = evaluate.score

    def nan(*arguments):
        return score(*arguments) | {"loss": float("nan")}

    def observe(event):
        if event["event"] == "phase" and event["phase"] == "testing":
            monkeypatch.setattr(evaluate, "score", nan)

    ended = run_job(job_in(tmp_path / "run"), observe)
    assert (
        ended["status"] == "diverged"
        and "the loss on the test split is nan with the weights of step" in ended["reason"]
    )
    assert "test" not in record(tmp_path / "run")


def test_weights_of_another_run_are_not_taken_for_those_of_a_finished_run(finished, tmp_path):
    ours = shutil.copytree(finished, tmp_path / "ours")
    assert read_finished_run(ours, "teacher", "a file")[1] == ours / "checkpoints/step-00000024/model.safetensors"
    run_job(job_in(tmp_path / "theirs", seed=1))
    shutil.rmtree(ours / "checkpoints")
    shutil.copytree(tmp_path / "theirs" / "checkpoints", ours / "checkpoints")
    with pytest.raises(RunError, match="step-00000024 .*another run"):
        read_finished_run(ours, "teacher", "a file")
