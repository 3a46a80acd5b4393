"""Two gloo processes against one, through torchrun, as a user would launch them."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from lab.small import (
    SETTINGS,
    TESTED,
    command,
    last_tensors,
    logs,
    record,
    run,
    small_job,
    stop_after,
    train_command,
)
from patience import PATIENCE, wait_until
from wellcond.lab.train.run import run_job

pytestmark = pytest.mark.processes

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
}
FSDP2_BERT = FSDP2 | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer"}
AVERAGED = "training.averaging={decay: 0.9}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    run_job(small_job(folder, "conditioned+balanced", AVERAGED))
    return folder


@pytest.fixture(scope="module")
def tested_alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tested_alone") / "run"
    assert run_job(small_job(folder, "conditioned", AVERAGED, *TESTED))["best"]["step"] < 24
    return folder


def assert_close(a, b):
    ours, theirs = logs(a), logs(b)
    for name in ("evaluations", "steps"):
        assert len(ours[name]) == len(theirs[name]) > 2
        for mine, other in zip(ours[name], theirs[name], strict=True):
            for key in (key for key in set(mine) & set(other) if mine[key] is not None):
                # An image or two may change sides: their logits are equal to rounding.
                allowed = 0.004 if key == "accuracy" else 1e-9
                assert other[key] == pytest.approx(mine[key], rel=2e-3, abs=allowed), (name, key)
    points = [[(row["step"], row["layer"], row["head"]) for row in rows["conditioning"]] for rows in (ours, theirs)]
    assert points[0] == points[1]
    for mine, other in zip(ours["conditioning"], theirs["conditioning"], strict=True):
        assert other["kappa_q"] == pytest.approx(mine["kappa_q"], rel=1e-3)
    mine, other = last_tensors(a), last_tensors(b)
    assert mine.keys() == other.keys()
    for kind, whole in mine.items():
        assert whole.keys() == other[kind].keys()
        for key in whole:
            assert (whole[key].double() - other[kind][key].double()).abs().max() < 2e-3, (kind, key)


@pytest.mark.parametrize("environment", [{}, FSDP2], ids=["ddp", "fsdp2"])
@pytest.mark.slow
def test_two_processes_compute_what_one_does(alone, tmp_path, environment):
    folder = tmp_path / "run"
    run(train_command(folder, "conditioned+balanced", AVERAGED, processes=2), **environment)
    assert record(folder)["status"] == "finished"
    assert record(folder)["sessions"][0]["processes"] == 2
    assert_close(alone, folder)


def kill_after_step(arguments, folder, step, **environment):
    """Kill a command and all its processes once a checkpoint of a step is there."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(arguments, env=os.environ | environment, **quiet)
    wait_until((folder / f"checkpoints/step-{step:08d}").exists, process=process)
    lists = Path(f"/proc/{process.pid}/task").glob("*/children")
    ranks = [int(number) for path in lists for number in path.read_text().split()]
    assert len(ranks) == 2
    for number in (process.pid, *ranks):
        os.kill(number, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_a_sharded_run_that_is_killed_resumes_bit_for_bit(tmp_path):
    """No rank ever holds the whole weights or the whole state of Adam, in memory or in its file."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    method = "conditioned+balanced"
    run(train_command(whole, method, AVERAGED, processes=2), **FSDP2)
    kill_after_step(train_command(broken, method, AVERAGED, processes=2), broken, 7, **FSDP2)
    run(train_command(broken, method, AVERAGED, processes=2), **FSDP2)
    assert [session["resumed_at_step"] for session in record(broken)["sessions"]][-1] >= 7
    assert logs(whole) == logs(broken)
    [place] = (broken / "checkpoints").iterdir()
    for kind in ("model", "optimizer", "average"):
        sizes = [path.stat().st_size for path in (place / kind).iterdir()]
        assert len(sizes) == 2 and max(sizes) < 0.7 * sum(sizes)
    for kind, tensors in last_tensors(whole).items():
        other = last_tensors(broken)[kind]
        assert tensors.keys() == other.keys() and all(torch.equal(tensors[name], other[name]) for name in tensors)


@pytest.mark.slow
def test_measuring_a_sharded_run_gathers_one_attention_at_a_time(tmp_path):
    launch = command(processes=2)
    done = run([*launch[:-1], "lab.gathered_weights", str(tmp_path / "run")], **FSDP2, PYTHONPATH=import_path())
    rows = logs(tmp_path / "run")["conditioning"]
    assert {row["layer"] for row in rows} == {"blocks.0.attn", "blocks.1.attn"}
    width = 16
    of_one_attention = 3 * width * (width + 1) + width * (width + 1)
    assert 0 < int(done.stdout.rpartition(":")[2]) <= of_one_attention


def import_path():
    """The tests' folder before what the environment has."""
    return os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))


@pytest.mark.slow
def test_a_sharded_run_resumes_in_one_process(alone, tmp_path):
    folder = tmp_path / "run"
    kill_after_step(train_command(folder, "conditioned+balanced", AVERAGED, processes=2), folder, 7, **FSDP2)
    run_job(small_job(folder, "conditioned+balanced", AVERAGED))
    assert [session["processes"] for session in record(folder)["sessions"]] == [2, 1]
    assert_close(alone, folder)


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, FSDP2_BERT], ids=["ddp", "fsdp2"])
def test_two_processes_test_the_best_weights_of_one(tested_alone, tmp_path, environment):
    folder = tmp_path / "run"
    run(train_command(folder, "conditioned", AVERAGED, *TESTED, processes=2), **environment)
    assert_same_test(tested_alone, folder)


@pytest.mark.slow
def test_best_weights_resume_sharded_over_two(tested_alone, tmp_path):
    """The best evaluation was before the stop: the second session only reads its weights."""
    folder, best = tmp_path / "run", record(tested_alone)["best"]["step"]
    stop_after(small_job(folder, "conditioned", AVERAGED, *TESTED), best)
    run(train_command(folder, "conditioned", AVERAGED, *TESTED, processes=2), **FSDP2_BERT)
    assert [session["processes"] for session in record(folder)["sessions"]] == [1, 2]
    assert_same_test(tested_alone, folder)


def assert_same_test(a, b):
    ours, theirs = record(a)["test"], record(b)["test"]
    assert theirs.pop("loss") == pytest.approx(ours.pop("loss"), rel=2e-3)
    assert theirs == ours  # fifty samples, none of which is on the edge
    mine, other = (last_tensors(folder)["best"] for folder in (a, b))
    assert mine.keys() == other.keys()
    # Adam turns the rounding of a small gradient into a share of the learning rate, here 0.05
    off = max(float((mine[key].double() - other[key].double()).abs().max()) for key in mine)
    assert off < 1e-2


@pytest.mark.slow
def test_a_comparison_runs_on_two_processes_and_is_not_repeated(tmp_path):
    changes = [part for override in SETTINGS for part in ("--set", override)]
    folder = tmp_path / "digits"
    arguments = [
        "compare",
        "--recipe",
        "digits",
        "-o",
        folder,
        "--seeds",
        "1",
        "--cpu",
        "--json",
        "--no-report",
        *changes,
    ]
    done = run(command(*arguments, processes=2))
    rows = json.loads(done.stdout)["runs"]
    assert [(row["method"], row["status"]) for row in rows] == [("default", "finished"), ("conditioned", "finished")]
    assert json.loads(run(command(*arguments, processes=2)).stdout)["runs"] == rows


@pytest.mark.slow
def test_a_folder_that_one_process_cannot_have_stops_both(tmp_path):
    """Going on with the next run on one process alone would mix two runs into one."""
    changes = [part for override in SETTINGS for part in ("--set", override)]
    folder = tmp_path / "digits/default/seed0"
    folder.mkdir(parents=True)
    (folder / "checkpoints").symlink_to(tmp_path)
    arguments = ["compare", "--recipe", "digits", "-o", tmp_path / "digits", "--cpu", "--no-report", *changes]
    done = subprocess.run(command(*arguments, processes=2), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode != 0 and "checkpoints is a link" in done.stderr
    assert not list((tmp_path / "digits").rglob("run.json"))
