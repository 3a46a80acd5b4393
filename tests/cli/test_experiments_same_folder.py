"""Commands that share a folder or are stopped, and folders that are deleted under a command."""

import os
import shutil
import signal
import subprocess

import pytest

from lab.held_runs import HELD
from lab.small import logs, record, run, small_job, train_command
from patience import PATIENCE
from wellcond.errors import RunError
from wellcond.lab.train.run import run_job

METHOD = "conditioned+balanced"


@pytest.mark.slow
def test_of_two_identical_commands_one_trains_and_the_other_says_so(tmp_path):
    folder, second = tmp_path / "run", []

    def observe(event):
        if event["event"] == "saved" and not second:
            second.append(subprocess.run(train_command(folder, METHOD), capture_output=True, text=True))

    ours = run_job(small_job(folder, METHOD), observe)
    assert second[0].returncode == 2 and "another process is writing this run; wait for it" in second[0].stderr
    assert record(folder)["final"] == ours["final"] and len(record(folder)["sessions"]) == 1


def test_a_folder_deleted_during_its_run_is_an_error_and_is_not_made_again(tmp_path):
    def observe(event):
        if event["event"] == "saved" and event["step"] == 7:
            shutil.rmtree(tmp_path / "run")

    with pytest.raises(RunError, match=r"run.* could not be written: No such file or directory.*same command"):
        run_job(small_job(tmp_path / "run"), observe)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.processes
def test_a_preempted_command_resumes(hold, tmp_path):
    command = [*train_command(tmp_path / "run", "default", HELD), "--trust-local-code"]
    process = subprocess.Popen(command, env=os.environ | hold.environment, stderr=subprocess.PIPE)
    hold.wait_for(1, process)
    process.send_signal(signal.SIGTERM)  # what Slurm sends first
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and record(tmp_path / "run")["status"] == "interrupted"
    run(command)
    assert record(tmp_path / "run")["status"] == "finished"
    assert logs(tmp_path / "run")["steps"][-1]["step"] == 24
