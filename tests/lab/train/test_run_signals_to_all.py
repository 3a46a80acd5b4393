"""Signals that reach every process of a run, as torchrun, Slurm and a terminal send them."""

import multiprocessing
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lab.held_runs import HELD
from lab.small import CHANGES_IN_WORDS, assert_same_run, command, record, run, small_job, train_command
from patience import PATIENCE
from wellcond.lab.tasks.base import Samples
from wellcond.lab.train.batches import fetch_batches
from wellcond.lab.train.run import run_job

pytestmark = pytest.mark.processes

METHOD = "conditioned+balanced"
STOPS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Of a run whose images are decoded one by one, by workers."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("ant", "cat"):
            (folder / split / label).mkdir(parents=True)
            for number in range(16):
                pixels = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{number}.png")
    data = f"data={{source: image_folder, path: {folder}}}"
    return HELD, data, "evaluation.test=null", "augmentation.resized_crop=[0.5, 1.0]", "training.batch_size=8"


@pytest.fixture(scope="module")
def unbroken(settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    assert run_job(small_job(folder, METHOD, *settings, local_code=True))["status"] == "finished"
    return folder


def children(process):
    lists = Path(f"/proc/{process}/task").glob("*/children")
    return [int(number) for path in lists for number in path.read_text().split()]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="asks Linux for the processes of a process")
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_run_with_workers_is_saved_and_resumes_to_the_same_end(settings, unbroken, hold, tmp_path, number):
    folder = tmp_path / "run"
    arguments = [*train_command(folder, METHOD, *settings, "training.workers=2"), "--trust-local-code"]
    pipes = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(arguments, env=os.environ | hold.environment, **pipes)
    hold.wait_for(1, process)
    assert len(children(process.pid)) == 2
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    kept = record(folder)
    assert (kept["status"], kept["progress"]["step"]) == ("interrupted", 10), kept["reason"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000010"]
    assert run_job(small_job(folder, METHOD, *settings, local_code=True))["status"] == "finished"
    assert [session["resumed_at_step"] for session in record(folder)["sessions"]] == [0, 10]
    assert_same_run(unbroken, folder)


@pytest.mark.slow
def test_a_comparison_in_several_processes_is_saved_and_resumes(settings, hold, tmp_path):
    changes = [part for change in (*settings, "training.workers=1") for part in ("--set", change)]
    arguments = ["compare", "--recipe", "digits", "-o", tmp_path, *CHANGES_IN_WORDS, *changes, "--trust-local-code"]
    arguments = command(*arguments, "--seeds", 1, "--jobs", 2, "--no-report", "--cpu")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(arguments, env=os.environ | hold.environment, **pipes)
    hold.wait_for(2, process)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Traceback" not in errors and "starting again" not in errors, errors

    def ends():
        records = [record(tmp_path / method / "seed0") for method in ("default", "conditioned")]
        return [(kept["status"], kept["progress"]["step"]) for kept in records]

    assert ends() == [("interrupted", 10)] * 2
    run(arguments)
    assert ends() == [("finished", 24)] * 2


class Numbers(Samples):
    """Samples that workers fetch."""

    in_memory = False

    def __len__(self):
        return 40

    def fetch(self, keys):
        return {"index": torch.tensor([index for index, _ in keys])}


def starting_then_signalled(self, start=multiprocessing.process.BaseProcess.start):
    start(self)
    for number in STOPS:
        os.kill(self.pid, number)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
def test_workers_leave_stop_signals_to_their_parent_from_the_first_moment(monkeypatch):
    parts = [[(2 * number, 0), (2 * number + 1, 0)] for number in range(20)]
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", starting_then_signalled)
    found = list(fetch_batches(Numbers(), parts, workers=2, device=torch.device("cpu")))
    assert torch.cat([batch["index"] for batch in found]).tolist() == list(range(40))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()).intersection(STOPS)
