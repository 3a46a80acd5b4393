import json
import os
import signal
import subprocess
import sys

import pytest

from patience import PATIENCE
from wellcond.errors import FolderInUse, RunError
from wellcond.lab.records import SCHEMA
from wellcond.lab.train.run_folder import RunFolder

pytestmark = pytest.mark.processes

RECORD = {"kind": "wellcond-run", "schema": SCHEMA, "method": "default", "seed": 0, "status": "running"}
HOLD = """
import os, sys
from pathlib import Path
from wellcond.lab.train.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).opened():
    if not os.fork():
        print(os.getpid(), flush=True)  # said by the child, which has let go of the lock by then
    os.read(0, 1)
"""


def rows(first, last):
    return [{"step": step, "loss": 1 / step} for step in range(first, last + 1)]


def read_log(folder, name):
    path = folder.path / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line] if path.exists() else []


def test_logs_grow_and_read_back(tmp_path):
    with RunFolder(tmp_path / "a" / "b").opened() as folder:
        folder.append("steps.jsonl", rows(1, 2))
        folder.append("steps.jsonl", rows(3, 3))
        assert read_log(folder, "steps") == rows(1, 3) and read_log(folder, "evaluations") == []
    with RunFolder(tmp_path / "a" / "b").opened() as folder:
        folder.append("steps.jsonl", rows(4, 4))
        assert read_log(folder, "steps") == rows(1, 4)


def test_resuming_cuts_the_logs_back(tmp_path):
    with RunFolder(tmp_path).opened() as folder:
        folder.append("steps.jsonl", rows(1, 3))
        marks = folder.log_marks()
        folder.append("steps.jsonl", rows(4, 9))
        folder.append("evaluations.jsonl", rows(4, 4))
        with (tmp_path / "steps.jsonl").open("ab") as file:
            file.write(b'{"step": 1')  # a line cut short by a kill
    with RunFolder(tmp_path).opened() as folder:
        folder.cut_logs(marks)
        folder.append("steps.jsonl", rows(4, 4))
        assert read_log(folder, "steps") == rows(1, 4)
        assert read_log(folder, "evaluations") == [] and folder.log_marks()["evaluations.jsonl"]["bytes"] == 0


def test_lost_lines_are_noticed(tmp_path):
    with RunFolder(tmp_path).opened() as folder:
        folder.append("steps.jsonl", rows(1, 3))
        marks = folder.log_marks()
        os.truncate(tmp_path / "steps.jsonl", 5)
        with pytest.raises(RunError, match=r"steps.jsonl.*Delete .*checkpoints"):
            folder.cut_logs(marks)
        assert (tmp_path / "steps.jsonl").stat().st_size == 5


def test_the_record_reads_back(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.read_record() is None
    folder.write_record(RECORD | {"best": float("inf")})
    assert folder.read_record() == RECORD | {"best": "inf"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"kind": ', r"is not readable JSON .*\n.*delete .* to restart this run"),
        (b"[]", "expected a record of kind 'wellcond-run'"),
        (b'{"kind": "wellcond-run", "schema": 99}', "expected schema 1, found 99: it is of another version"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, content, message):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(RunError, match=rf"run.json.*{message}"):
        RunFolder(tmp_path).read_record()


def test_a_folder_is_held_by_one_process_and_freed_by_its_death(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], **pipes)
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(FolderInUse):
            with RunFolder(tmp_path).opened():
                raise AssertionError("two processes in one folder")
        holder.send_signal(signal.SIGKILL)
        holder.wait(PATIENCE)
        os.kill(child, 0)  # its child lives on, and does not hold the folder
        with RunFolder(tmp_path).opened() as folder:
            folder.append("steps.jsonl", rows(1, 1))
    finally:
        os.kill(child, signal.SIGKILL)
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
