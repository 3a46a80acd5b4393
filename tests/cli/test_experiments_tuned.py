"""`wellcond compare --tune`, as a user runs it."""

import json
import os
import signal
import subprocess

import pytest

from lab.held_runs import HELD
from lab.small import SETTINGS, command, record
from patience import PATIENCE

pytestmark = pytest.mark.processes

CHANGES = [part for override in SETTINGS for part in ("--set", override)]
TESTED = ["--set", "evaluation={every: {steps: 8}, batch_size: 250, test: last}"]
QUICK = ["--set", "training.length={steps: 8}", "--set", "tracking={weights_every: null, jacobian_points: 0}"]
RATES = ["--tune", "optimizer.lr=1e-3,1e-2", "--tune-growth", "1", "--seeds", "3"]


def compare(folder, *more):
    return ["compare", "--recipe", "digits", "-o", folder, *CHANGES, *TESTED, *RATES, "--no-report", *more]


def tuning_runs(folder):
    """Metric of every run of the search by method, rate and seed."""
    return {
        tuple(path.parts[-4:-1]): record(path.parent)["final"]["accuracy"]
        for path in folder.glob("tuning/*/*/*/run.json")
    }


@pytest.mark.slow
def test_an_interrupted_search_resumes_with_the_same_command(run, hold, tmp_path):
    held = ["--set", HELD, "--trust-local-code"]
    arguments = compare(tmp_path, *held)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command(*arguments, "--jobs", 2), env=os.environ | hold.environment, **pipes)
    hold.wait_for(2, process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "the same command resumes from here" in output, (output, errors)
    begun = list(tmp_path.glob("tuning/*/*/*/run.json"))
    assert [record(path.parent)["status"] for path in begun] == ["interrupted"] * 2
    assert not list(tmp_path.glob("*/seed*"))
    assert run(*arguments, "--jobs", 2)[0] == 0
    assert all(len(record(path.parent)["sessions"]) == 2 for path in begun)


def test_search_growth_and_test(run, tmp_path):
    arguments = [*compare(tmp_path), "--jobs", 1, *QUICK]
    code, output = run(*arguments)
    assert code == 0 and "conditioned: optimizer.lr=0." in output

    stored = json.loads((tmp_path / "tuning.json").read_text())
    scores = tuning_runs(tmp_path)
    assert stored["seeds"] == [1000, 1001] and stored["test_seeds"] == [0, 1, 2]
    assert "does not see" in stored["test_data"]
    for row in stored["methods"]:
        means = {}
        for point in row["points"]:
            rate = point["values"]["optimizer.lr"]
            place = f"optimizer.lr-{rate!r}"
            assert point["scores"] == {s: scores[row["slug"], place, f"seed{s}"] for s in ("1000", "1001")}
            means[rate] = sum(point["scores"].values()) / 2
        assert len(means) == 3 and row["grown"]["optimizer.lr"] == {"below": 0, "above": 1}  # 1e-2 beats 1e-3
        best = max(means, key=means.get)
        assert row["best"]["values"] == {"optimizer.lr": best}
        for seed in (0, 1, 2):
            tested = record(tmp_path / row["slug"] / f"seed{seed}")
            assert tested["config"]["optimizer"]["lr"] == best and tested["method"] == row["label"]
            assert tested["method_spec"]["set"] == {"optimizer.lr": best} and "accuracy" in tested["test"]
    assert all("test" not in record(path.parent) for path in tmp_path.glob("tuning/*/*/*/run.json"))

    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert run(*arguments)[0] == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before
