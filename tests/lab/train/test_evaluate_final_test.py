"""The score on the test split after training: of the right weights, the same after any interruption."""

import sys

import pytest
import torch
from safetensors.torch import load_file

from lab.small import (
    TESTED,
    Killed,
    assert_same_run,
    kill_at_write,
    last_weights,
    logs,
    record,
    small_job,
    train_command,
)
from wellcond.cli.main import main
from wellcond.errors import RecipeError
from wellcond.lab.tasks.base import Samples
from wellcond.lab.train import evaluate
from wellcond.lab.train.prepare import prepare_task
from wellcond.lab.train.run import run_job

AVERAGED = "training.averaging={decay: 0.5}"
BESIDE = "training.averaging={decay: 0.5, evaluate: false}"
METHOD = "conditioned+balanced"


def job_with_test(folder, *overrides):
    return small_job(folder, METHOD, *TESTED, *overrides)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run_job(job_with_test(folder))
    return folder


def best_file(folder):
    [path] = folder.rglob("best.safetensors")
    return path


@pytest.mark.parametrize(
    ("overrides", "file"),
    [
        ((), "model"),
        pytest.param((AVERAGED,), "average", marks=pytest.mark.slow),
        pytest.param((BESIDE,), "model", marks=pytest.mark.slow),
    ],
    ids=["plain", "avg", "beside"],
)
def test_what_is_tested_is_what_was_best(tmp_path, overrides, file):
    """A second run that ends at the best step has these weights last, and the same score."""
    folder, short = tmp_path / "run", tmp_path / "short"
    found = run_job(job_with_test(folder, *overrides))
    step = found["best"]["step"]
    assert 0 < step < 24 and found["test"]["step"] == step and found["test"]["weights"] == "best"
    assert found["best"]["accuracy"] > found["final"]["accuracy"] and found["data"]["test"] == 50
    shorter = run_job(job_with_test(short, *overrides, f"training.length.steps={step}", "evaluation.test=last"))
    assert shorter["test"] == found["test"] | {"weights": "last"}
    assert not list(short.rglob("best.safetensors"))
    best, last = load_file(best_file(folder)), load_file(short / f"checkpoints/step-{step:08d}/{file}.safetensors")
    assert last.keys() <= best.keys() and all(torch.equal(best[name], value) for name, value in last.items())


@pytest.mark.parametrize("moment", [pytest.param(n, marks=[pytest.mark.slow] * (n % 24 != 13)) for n in range(1, 48)])
def test_a_run_stopped_at_any_write_ends_with_the_same_test(unbroken, tmp_path, monkeypatch, moment):
    folder = tmp_path / "run"
    kill_at_write(monkeypatch, moment, job_with_test(folder))
    run_job(job_with_test(folder))
    assert_same_run(unbroken, folder)
    assert "best.safetensors" in last_weights(folder)


def test_a_run_stopped_while_it_is_tested_is_tested_again(unbroken, tmp_path, monkeypatch):
    folder, real = tmp_path / "run", evaluate.score

    def score(recipe, task, model, accelerator, samples, *most):
        if samples is task.test:
            raise Killed
        return real(recipe, task, model, accelerator, samples, *most)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "score", score)
        with pytest.raises(Killed):
            run_job(job_with_test(folder))
    assert record(folder)["status"] == "running" and "test" not in record(folder)
    run_job(job_with_test(folder))
    assert record(folder)["sessions"][-1]["resumed_at_step"] == 24
    assert_same_run(unbroken, folder)


@pytest.mark.parametrize("weights", ["best", "last"])
def test_a_missing_test_split_is_an_error_before_training(tmp_path, weights):
    folder = tmp_path / "run"
    with pytest.raises(RecipeError, match=rf"evaluation\.test: {weights}"):
        run_job(job_with_test(folder, "data.num_test=0", f"evaluation.test={weights}"))
    assert not (folder / "evaluations.jsonl").exists() and record(folder)["status"] == "failed"


def test_without_being_asked_nothing_is_tested_or_kept(tmp_path, unbroken):
    folder, phases = tmp_path / "run", []
    found = run_job(job_with_test(folder, "evaluation.test=null"), lambda event: phases.append(event.get("phase")))
    assert "test" not in found and "test" not in found["data"] and "testing" not in phases
    assert not list(folder.rglob("best.safetensors"))
    assert logs(folder) == logs(unbroken)


def test_evaluations_may_use_the_first_samples_only(tmp_path):
    asked = {"evaluation": set(), "test": set()}

    class Watched(Samples):
        def __init__(self, samples, seen):
            self.samples, self.seen = samples, seen

        def __len__(self):
            return len(self.samples)

        def fetch(self, keys):
            self.seen |= {index for index, _ in keys}
            return self.samples.fetch(keys)

    # Data of its own, since the task is kept for the next run.
    job = job_with_test(tmp_path / "run", "evaluation.samples=17", "data.num_train=201")
    task = prepare_task(job.recipe, seed=0, base=None)
    for name, seen in asked.items():
        setattr(task, name, Watched(getattr(task, name), seen))
    found = run_job(job)
    assert asked["test"] == set(range(50))
    assert asked["evaluation"] == set(range(17))
    # 17 samples: every accuracy is a number of seventeenths, the final one too
    for row in [*logs(tmp_path / "run")["evaluations"], found["final"]]:
        assert row["accuracy"] * 17 == pytest.approx(round(row["accuracy"] * 17), abs=1e-9)


def test_the_command_line_tells_the_score(tmp_path, unbroken, monkeypatch, capsys):
    command = train_command(tmp_path / "run", METHOD, *TESTED)
    monkeypatch.setattr(sys, "argv", [part for part in command[command.index("-m") + 1 :] if part != "-q"])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 0
    kept = record(unbroken)["test"]
    assert f"test accuracy {100 * kept['accuracy']:.1f} % (best weights, step {kept['step']})" in said
