"""Two gloo ranks of which one is asked to stop: both do, at the same step, wherever the logged steps are."""

import os
import signal
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch

from distributed.processes import rank, run_on_two
from lab.held_runs import HELD
from lab.small import assert_same_run, record, run, small_job, stop_after, train_command
from patience import PATIENCE
from wellcond.lab.train.run import run_job

pytestmark = pytest.mark.processes

METHOD = "conditioned+balanced"
SELDOM = (
    "training.log_every=50",
    "checkpoint.every.steps=100",
    "tracking={weights_every: {steps: 10}, jacobian_points: 0}",
)
"""No step is logged, and none is saved, before the end."""


def train_both(folder, how):
    """In each of two processes: a run; how it ended, and after which step."""
    from accelerate.state import AcceleratorState

    launched = {"RANK": str(rank()), "LOCAL_RANK": str(rank()), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2"}
    job = small_job(Path(folder), METHOD, *SELDOM)
    try:
        with mock.patch.dict(os.environ, launched):
            kept = stop_after(job, 8) if how == "stopped" and rank() == 1 else run_job(job)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert torch.distributed.get_world_size() == 2
    return {"status": kept["status"], "step": kept["progress"]["step"], "ranks": kept["sessions"][-1]["processes"]}


def test_a_stop_of_one_rank_stops_both_at_once_and_the_run_resumes_exactly(tmp_path):
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    found = run_on_two(tmp_path, train_both, [(whole, ""), (broken, "stopped"), (broken, "")])
    finished = {"status": "finished", "step": 24, "ranks": 2}
    assert found[whole, ""] == finished and found[broken, ""] == finished
    # asked after the eighth step, known to both after the ninth, read after the tenth
    assert found[broken, "stopped"] == {"status": "interrupted", "step": 10, "ranks": 2}
    assert [session["resumed_at_step"] for session in record(broken)["sessions"]] == [0, 10]
    assert_same_run(whole, broken)


@pytest.mark.slow
def test_torchrun_that_is_asked_to_stop_ends_a_saved_run(hold, tmp_path):
    """torchrun sends its signal to the process group of every rank, and kills what is left after 30 seconds."""
    folder = tmp_path / "run"
    arguments = [*train_command(folder, METHOD, HELD, *SELDOM, processes=2), "--trust-local-code"]
    process = subprocess.Popen(arguments, env=os.environ | hold.environment, stderr=subprocess.PIPE, text=True)
    hold.wait_for(2, process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    kept = record(folder)
    assert (kept["status"], kept["progress"]["step"]) == ("interrupted", 12), errors[-3000:]
    run(arguments)
    assert record(folder)["status"] == "finished"
    assert [session["resumed_at_step"] for session in record(folder)["sessions"]] == [0, 12]
