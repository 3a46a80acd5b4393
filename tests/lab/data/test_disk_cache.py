import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from wellcond.lab.data.disk import CacheEntry, CacheError, cache_root

pytestmark = pytest.mark.processes


@pytest.fixture
def entry(tmp_path):
    return CacheEntry("things", {"version": 1, "name": "é"}, root=tmp_path)


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


def test_an_entry_is_named_by_what_it_is_made_from(tmp_path):
    def folder(**made_from):
        return CacheEntry("things", made_from, root=tmp_path).folder

    assert folder(a=1, b=2) == folder(b=2, a=1) != folder(a=1, b=3)


def test_files_are_read_as_written(entry):
    assert entry.read("a") is None and entry.find("a") is None and entry.count() == 0
    entry.write("a", b"one")
    with entry.adding("b") as file:
        file.write(b"two")
        file.write(b"three")
    assert entry.read("a") == b"one" and entry.find("b").read_bytes() == b"twothree" and entry.count() == 2
    entry.write("a", b"other")
    assert entry.read("a") == b"other"


def test_an_error_while_a_file_is_written_leaves_nothing(entry):
    with pytest.raises(ZeroDivisionError), entry.adding("a") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert entry.read("a") is None and not list(entry.folder.iterdir())


def test_a_root_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    entry = CacheEntry("things", {}, root=tmp_path / "file")
    assert entry.read("a") is None
    with pytest.raises(CacheError, match=r"file/things.*cannot be written: Not a directory.*WELLCOND_CACHE"):
        entry.write("a", b"")
    with pytest.raises(CacheError, match="cannot be written"), entry.locked(lambda: None):
        pass


def test_a_full_disk_leaves_the_old_file(entry):
    import resource

    entry.write("a", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        with pytest.raises(CacheError, match="cannot be written: File too large"):
            entry.write("a", bytes(20_000))
        with pytest.raises(CacheError, match="File too large"), entry.adding("b") as file:
            file.write(bytes(20_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert entry.read("a") == b"old" and entry.read("b") is None
    assert not list(entry.folder.glob(".*"))


HOLD = """
import os, sys
from pathlib import Path
from wellcond.lab.data.disk import CacheEntry
entry = CacheEntry("things", {"version": 1, "name": "é"}, root=Path(sys.argv[1]))
with entry.locked(lambda: None):
    (entry.folder / ".left.1.partial").write_bytes(b"")
    print("held", flush=True)
    os.read(0, 1)
"""


def test_a_killed_holder_does_not_block_and_its_leftovers_go(entry, tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], **pipes)
    waits = []

    def waiting():
        waits.append("another process holds it")
        if len(waits) == 2:
            os.kill(holder.pid, signal.SIGKILL)

    try:
        assert holder.stdout.readline() == "held\n"
        with entry.locked(waiting):
            assert len(waits) >= 2 and not list(entry.folder.glob(".*.partial"))
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
