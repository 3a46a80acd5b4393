"""Folders of runs on their way between machines."""

import shutil

import pytest

from lab.small import assert_same_run, small_job, stop_after
from wellcond.lab.cluster import folder_copy
from wellcond.lab.cluster.folder_copy import (
    Incoming,
    chunks_of,
    list_files,
    read_chunk,
    safe_path,
    take_snapshot,
    write_chunk,
)
from wellcond.lab.train.run import run_job
from wellcond.lab.train.run_folder import RunError


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(folder_copy, "CHUNK", 1000)


def receive(incoming, place, count=None):
    """As the driver does; returns whether all has come."""
    while incoming.wanted is not None and count != 0:
        name, offset, size = incoming.wanted
        incoming.take(read_chunk(place / name, offset, size))
        count = None if count is None else count - 1
    return incoming.wanted is None


@pytest.fixture
def interrupted(tmp_path):
    job = small_job(tmp_path / "there")
    assert stop_after(job, 8)["status"] == "interrupted"
    return job.folder


def test_a_copied_run_goes_on_to_the_same_end(interrupted, tmp_path):
    sizes = take_snapshot(interrupted, tmp_path / "snapshot")
    run_job(small_job(interrupted))  # goes on meanwhile: the snapshot stays what it was
    here = tmp_path / "here"
    incoming = Incoming(here, sizes)
    assert receive(incoming, tmp_path / "snapshot")
    incoming.put_in_place()
    assert list_files(here) == sizes and "lock" not in sizes
    resumed = run_job(small_job(here))
    assert resumed["sessions"][1]["resumed_at_step"] == 8
    assert_same_run(here, interrupted)


def test_a_copy_that_breaks_off_changes_nothing(interrupted, tmp_path):
    here = tmp_path / "here"
    shutil.copytree(interrupted, here)
    run_job(small_job(interrupted))
    before = list_files(here)
    assert not receive(Incoming(here, list_files(interrupted)), interrupted, count=5)
    assert list_files(here) == before
    incoming = Incoming(here, list_files(interrupted))
    assert receive(incoming, interrupted)
    incoming.put_in_place()
    assert list_files(here) == list_files(interrupted) and not list(here.glob("*.partial"))


def test_a_folder_is_sent_in_pieces(interrupted, tmp_path):
    (interrupted / "empty").touch()
    (interrupted / "link").symlink_to("/etc/hostname")
    for piece in chunks_of(interrupted):
        assert len(piece[2]) <= 1000
        write_chunk(tmp_path / "sent", *piece)
    assert list_files(tmp_path / "sent") == list_files(interrupted)
    for name in list_files(interrupted):
        assert (tmp_path / "sent" / name).read_bytes() == (interrupted / name).read_bytes()


@pytest.mark.parametrize(
    "name", ["../run.json", "/etc/passwd", "a/../../b", "", "a//b", ".", "a/.", "a\0b", "out/file"]
)
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path, name):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    for refuse in (
        lambda: safe_path(folder, name),
        lambda: Incoming(folder, {"run.json": 1, name: 1}),
        lambda: write_chunk(folder, name, 0, b"x"),
    ):
        with pytest.raises(RunError, match="not inside the run's folder"):
            refuse()
    assert [path.name for path in tmp_path.iterdir()] == ["run"] and [p.name for p in folder.iterdir()] == ["out"]


def test_a_piece_that_is_cut_off_is_refused(tmp_path):
    incoming = Incoming(tmp_path / "run", {"run.json": 10})
    with pytest.raises(RunError, match="expected 10 bytes at 0 from the worker, found 3"):
        incoming.take(b"abc")
