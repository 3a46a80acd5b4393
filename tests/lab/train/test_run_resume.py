import os
import signal
import subprocess

import numpy as np
import pytest

from lab.held_runs import HELD
from lab.small import assert_same_run, kill_at_write, last_weights, record, small_job, stop_after, train_command
from wellcond.errors import RunError
from wellcond.lab.pool import run_jobs
from wellcond.lab.train.run import run_job
from wellcond.training.series import Series

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run_job(small_job(folder))
    return folder


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_files_bit_for_bit(unbroken, hold, tmp_path):
    folder = tmp_path / "run"
    started = [*train_command(folder, "conditioned+balanced", HELD), "--trust-local-code"]
    process = subprocess.Popen(started, env=os.environ | hold.environment, stderr=subprocess.PIPE)
    hold.wait_for(1, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert record(folder)["status"] == "running"
    run_job(small_job(folder, "conditioned+balanced", HELD, local_code=True))
    assert record(folder)["status"] == "finished"
    assert [session["resumed_at_step"] for session in record(folder)["sessions"]] == [0, 7]
    assert_same_run(unbroken, folder)


@pytest.mark.parametrize("moment", [pytest.param(n, marks=[pytest.mark.slow] * (n % 8 != 0)) for n in range(39)])
def test_a_run_stopped_at_any_write_resumes_to_the_same_files(unbroken, tmp_path, monkeypatch, moment):
    """Moments at which a file is about to be flushed or put in place."""
    folder = tmp_path / "run"
    kill_at_write(monkeypatch, moment, small_job(folder))
    run_job(small_job(folder))
    assert_same_run(unbroken, folder)


def test_a_monitor_changes_no_number_and_its_file_goes_on(unbroken, tmp_path):
    job = small_job(tmp_path / "run", "conditioned+balanced", "logging.monitor_every=5")
    stop_after(job, 12)
    assert Series.read(tmp_path / "run/monitor.jsonl").steps == [1, 5, 10, 15]
    run_job(job)
    assert_same_run(unbroken, tmp_path / "run")
    series = Series.read(tmp_path / "run/monitor.jsonl")
    assert series.steps == [1, 5, 10, 15, 17, 20]  # and the first one of each session
    assert not np.isnan(series.column("max_logit")).any()


def test_a_complete_run_is_not_repeated(unbroken):
    before = {path: path.stat().st_mtime_ns for path in unbroken.rglob("*") if path.is_file() and path.name != "lock"}
    events = []
    run_job(small_job(unbroken), events.append)
    assert [event["event"] for event in events] == ["end"]
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_another_run_in_the_same_folder_is_refused_with_the_difference(unbroken):
    with pytest.raises(RunError, match=r"optimizer\.lr: 0\.001 there, 0\.002 here"):
        run_job(small_job(unbroken, "conditioned+balanced", "optimizer.lr=0.002"))
    assert record(unbroken)["status"] == "finished"


def test_settings_without_effect_may_change_on_the_way(unbroken, tmp_path):
    folder = tmp_path / "run"
    job = small_job(folder, "conditioned+balanced", "checkpoint.every.steps=5")
    stop_after(job, 12)
    assert record(folder)["status"] == "interrupted"
    run_job(small_job(folder, "conditioned+balanced", "checkpoint.every.steps=11", "title=another"))
    assert_same_run(unbroken, folder)


def test_averages_resume_exactly(tmp_path):
    overrides = ("training.averaging={decay: 0.9}", "training.clip_norm=1.0", "training.accumulate=2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_job(small_job(whole, "polar", *overrides))
    stop_after(small_job(broken, "polar", *overrides), 8)
    run_job(small_job(broken, "polar", *overrides))
    assert_same_run(whole, broken)
    assert "average.safetensors" in last_weights(whole)


def test_ctrl_c_in_the_last_step_of_a_run_ends_the_comparison(tmp_path):
    jobs = [small_job(tmp_path / method, method) for method in ("default", "polar")]

    def observe(job, event):
        if event["event"] == "evaluation" and event["row"]["step"] == 24:
            signal.raise_signal(signal.SIGINT)

    outcome = run_jobs(jobs, num_workers=1, observer=observe)
    assert outcome.interrupted and [kept["status"] for kept in outcome.records] == ["finished"]
    assert not (tmp_path / "polar").exists()
