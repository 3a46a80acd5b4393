"""Commands that share a folder, and folders that are deleted under a command."""

import json
import shutil
import signal
import subprocess
import threading

import pytest

from lab.small import SETTINGS, command, record, small_job, train_command
from patience import PATIENCE
from wellcond.lab.train.run import run_job
from wellcond.lab.train.run_folder import RunError, RunFolder

METHOD = "conditioned+balanced"
CHANGES = [part for override in SETTINGS for part in ("--set", override)]
WAITS = "another process is running it"


def start(arguments):
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until_it_waits(process):
    """Read what a command says until it says that it waits."""
    seen = []
    while WAITS not in (line := process.stderr.readline()):
        assert line, f"it ended: {seen}"
        seen.append(line)
    assert process.poll() is None


def ended(process):
    output, errors = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in errors, errors
    return process.returncode, output, errors


def loud(folder):
    return [part for part in train_command(folder, METHOD) if part != "-q"]


def test_of_two_identical_commands_one_trains_and_the_other_waits(tmp_path):
    folder, second = tmp_path / "run", []

    def observe(event):
        if event["event"] == "saved" and not second:
            second.append(start(loud(folder)))
            until_it_waits(second[0])

    ours = run_job(small_job(folder, METHOD), observe)
    code, _, errors = ended(second[0])
    assert code == 0 and "finished, accuracy" in errors
    assert record(folder)["final"] == ours["final"] and len(record(folder)["sessions"]) == 1


@pytest.mark.slow
def test_a_waiting_command_takes_over_when_the_other_one_is_gone(tmp_path):
    with RunFolder(tmp_path / "run").opened():
        process = start(loud(tmp_path / "run"))
        until_it_waits(process)
        assert not (tmp_path / "run" / "run.json").exists()
    assert ended(process)[0] == 0
    assert record(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_waiting_command_can_be_stopped(tmp_path, number):
    with RunFolder(tmp_path / "run").opened():
        process = start(loud(tmp_path / "run"))
        until_it_waits(process)
        process.send_signal(number)
        code, output, _ = ended(process)
    assert code == 130 and "stopped with 1 of 1 runs to go" in output
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_two_identical_comparisons_make_every_run_once(tmp_path, workers):
    folder = tmp_path / "digits"
    arguments = command("compare", "--recipe", "digits", "-o", folder, "--jobs", workers, "--json", *CHANGES)
    both = [start([*arguments, "--no-report"]) for _ in range(2)]
    results = [None, None]

    def wait_for(at):
        results[at] = ended(both[at])

    threads = [threading.Thread(target=wait_for, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [code for code, _, _ in results] == [0, 0], results
    ours, theirs = (
        sorted(json.loads(output)["runs"], key=lambda row: (row["method"], row["seed"])) for _, output, _ in results
    )
    assert ours == theirs and [row["status"] for row in ours] == ["finished"] * 4
    assert [len(record(path.parent)["sessions"]) for path in folder.glob("*/seed*/run.json")] == [1] * 4


def test_a_folder_deleted_during_its_run_is_an_error_and_is_not_made_again(tmp_path):
    def observe(event):
        if event["event"] == "saved" and event["step"] == 7:
            shutil.rmtree(tmp_path / "run")

    with pytest.raises(RunError, match=r"run or its file `lock` was deleted during the run.*same command"):
        run_job(small_job(tmp_path / "run"), observe)
    assert not (tmp_path / "run").exists()
