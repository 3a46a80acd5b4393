import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from wellcond.errors import DataError
from wellcond.lab.data.base import progress_to
from wellcond.lab.data.disk import cache_root, cached_folder

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WELLCOND_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/wellcond"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/wellcond"),
        ({}, "/home/me/.cache/wellcond"),
    ],
)
def test_the_root_follows_the_environment(monkeypatch, variables, expected):
    for name in ("WELLCOND_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | variables).items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)


MADE_FROM = {"version": 1, "name": "é"}


@pytest.fixture
def cached(monkeypatch, tmp_path):
    monkeypatch.setenv("WELLCOND_CACHE", str(tmp_path))
    return lambda make, made_from=MADE_FROM: cached_folder("things", made_from, make, "things")


def write_one(folder):
    (folder / "a").write_bytes(b"one")


def test_a_folder_is_made_once_and_named_by_what_it_is_made_from(cached):
    folder = cached(write_one, {"a": 1, "b": 2})
    assert (folder / "a").read_bytes() == b"one"
    assert cached(lambda into: pytest.fail("made again"), {"b": 2, "a": 1}) == folder
    assert cached(write_one, {"a": 1, "b": 3}) != folder


def test_an_error_while_a_folder_is_made_leaves_nothing_that_is_taken_for_it(cached):
    def fail(folder):
        write_one(folder)
        (folder / "b").write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cached(fail)
    assert sorted(path.name for path in cached(write_one).iterdir()) == ["a"]


def test_a_root_that_cannot_be_written_is_an_error_that_names_it(cached, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WELLCOND_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="WELLCOND_CACHE"):
        cached(write_one)


HOLD = """
import os
from wellcond.lab.data.disk import cached_folder
def make(folder):
    (folder / "left").write_bytes(b"")
    print("held", flush=True)
    os.read(0, 1)
cached_folder("things", {"version": 1, "name": "é"}, make, "things")
"""


def test_a_killed_holder_does_not_block_and_its_leftovers_go(cached):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holder = subprocess.Popen([sys.executable, "-c", HOLD], **pipes)
    told = []

    def waiting(what, done, total):
        told.append(what)
        threading.Timer(0.3, os.kill, (holder.pid, signal.SIGKILL)).start()

    try:
        assert holder.stdout.readline() == "held\n"
        with progress_to(waiting):
            folder = cached(write_one)
        assert told == ["things, here or in another process"]
        assert sorted(path.name for path in folder.iterdir()) == ["a"]
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
