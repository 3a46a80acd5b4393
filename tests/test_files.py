import json
import math
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patience import PATIENCE
from wellcond import files
from wellcond.files import json_ready, to_json, write_atomically


@pytest.mark.parametrize("content", ["text é\r\n", b"\x00\xff", ""])
def test_content_is_written_as_given(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_text("old, and longer than the new one")
    write_atomically(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "function, problem", [("fsync", OSError), ("replace", KeyboardInterrupt), (None, UnicodeError)]
)
def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch, function, problem):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(*arguments):
        raise problem

    if function is not None:
        monkeypatch.setattr(files.os, function, fail)
    with pytest.raises(problem):
        write_atomically(path, "\ud800" if function is None else "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_the_new_file_is_whole_before_it_takes_the_place(tmp_path, monkeypatch):
    path, replace, seen = tmp_path / "a.txt", os.replace, []
    monkeypatch.setattr(files.os, "replace", lambda a, b: (seen.append(a.read_text()), replace(a, b)))
    write_atomically(path, "new")
    assert seen == ["new"] and path.read_text() == "new"


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec="utf-8")))


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_is_strict_and_keeps_every_number(value):
    def refuse(name):
        raise AssertionError(name)

    again = json.loads(to_json(value), parse_constant=refuse)
    assert again == json_ready(value)


def test_numbers_without_a_json_form_become_text():
    value = {"a": [math.inf, -math.inf, math.nan, 1.5], "b": (math.inf, True)}
    assert json_ready(value) == {"a": ["inf", "-inf", "nan", 1.5], "b": ["inf", True]}
    assert to_json({"a": math.nan}, indent=1) == '{\n "a": "nan"\n}'


WRITER = """
import sys
from pathlib import Path
from wellcond.files import opened_atomically
with opened_atomically(Path(sys.argv[1])) as file:
    file.write(b"half of it")
    file.flush()
    print("writing", flush=True)
    sys.stdin.readline()
"""
SAVER = """
import sys, torch
from pathlib import Path
from wellcond.conditioning.checkpoint import save_weights
class Held(torch.nn.Linear):
    def state_dict(self, *arguments, **options):
        print("writing", flush=True)
        sys.stdin.readline()
        return super().state_dict(*arguments, **options)
save_weights(Held(4, 4), Path(sys.argv[1]))
"""


def held_at_writing(script, *paths):
    """Processes that are in the middle of writing a file each, and stay there until they get a line."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for path in paths
    ]
    assert [process.stdout.readline() for process in processes] == ["writing\n"] * len(paths)
    return processes


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "name"),
    [(WRITER, "run.json"), pytest.param(SAVER, "model.safetensors", marks=pytest.mark.slow)],
    ids=["files", "weights"],
)
def test_what_a_killed_process_left_is_removed_by_the_next_one_that_writes_there(tmp_path, script, name):
    killed, alive = held_at_writing(script, tmp_path / name, tmp_path / f"other-{name}")
    try:
        assert len(names(tmp_path)) == 2
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=PATIENCE)
        assert len(names(tmp_path)) == 2  # nobody tidied up after it
        write_atomically(tmp_path / "record.json", "new")
        [left] = set(names(tmp_path)) - {"record.json"}
        assert f"other-{name}" in left  # of a process that lives: it is not touched
        alive.communicate("on\n", timeout=PATIENCE)
        assert alive.returncode == 0 and names(tmp_path) == sorted(["record.json", f"other-{name}"])
    finally:
        for process in (killed, alive):
            process.kill()
            process.wait()


def test_only_own_leftovers_of_this_machine_are_removed(tmp_path, monkeypatch):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    others = [".notes.partial", "tmpabc.partial", ".run.json.12.partial"]
    for name in others:
        (tmp_path / name).touch()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(files, "HOST", "0" * 8)
        with files.temporary_beside(tmp_path / "run.json") as file:
            others.append(os.path.basename(file.name))
            os.link(file.name, tmp_path / "keep")
    os.rename(tmp_path / "keep", tmp_path / others[-1])
    with files.temporary_beside(tmp_path / "run.json") as file:
        ours = os.path.basename(file.name)
    (tmp_path / ours).symlink_to(precious)
    others.append(ours)
    write_atomically(tmp_path / "run.json", "new")
    assert names(tmp_path) == sorted([*others, "precious", "run.json"]) and precious.read_text() == "kept"


def test_a_file_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    """Another process may see a temporary file in the moment between its creation and its lock."""
    real, calls = files.fcntl.flock, []

    def flock(handle, operation):
        calls.append(handle)
        if len(calls) == 1:
            [path] = tmp_path.iterdir()
            path.unlink()
        return real(handle, operation)

    monkeypatch.setattr(files.fcntl, "flock", flock)
    write_atomically(tmp_path / "a.txt", "new")
    assert len(calls) == 2 and names(tmp_path) == ["a.txt"] and (tmp_path / "a.txt").read_text() == "new"
