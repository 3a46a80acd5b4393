"""Folders of runs on their way between machines."""

import shutil

import pytest

from lab.small import assert_same_run, small_job, stop_after
from wellcond.errors import FolderInUse, RunError
from wellcond.lab.cluster import FileRelay, pack, unpack
from wellcond.lab.train.run import run_job
from wellcond.lab.train.run_folder import RunFolder


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def interrupted(tmp_path):
    job = small_job(tmp_path / "there")
    assert stop_after(job, 8)["status"] == "interrupted"
    return job.folder


def test_a_run_that_was_sent_resumes_to_the_same_end(interrupted, tmp_path):
    files = pack(interrupted)
    sent = {name: content for name, content in files_of(interrupted).items() if name != "lock"}
    run_job(small_job(interrupted))
    here = tmp_path / "here"
    unpack(files, here)
    assert files_of(here) == sent
    resumed = run_job(small_job(here))
    assert resumed["sessions"][1]["resumed_at_step"] == 8
    assert_same_run(here, interrupted)


def test_files_of_which_one_cannot_be_used_change_nothing(interrupted, tmp_path):
    here = tmp_path / "here"
    shutil.copytree(interrupted, here)
    run_job(small_job(interrupted))
    before, files = files_of(here), pack(interrupted)
    with pytest.raises(RunError, match="is outside the run's folder"):
        unpack(files | {"../last": b""}, here)
    assert {name: content for name, content in files_of(here).items() if ".partial" not in name} == before
    unpack(files, here)
    assert files_of(here) == files_of(interrupted)


def test_links_and_files_in_the_making_are_not_sent(interrupted, tmp_path):
    before = files_of(interrupted)
    (interrupted / "link").symlink_to("/etc/hostname")
    (interrupted / "run.json.partial").touch()
    (interrupted / "empty").touch()
    unpack(pack(interrupted), tmp_path / "sent")
    assert files_of(tmp_path / "sent") == {name: before[name] for name in before if name != "lock"} | {"empty": b""}


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "out/outside", "{}/outside"])
def test_nothing_is_written_outside_the_folder(tmp_path, name):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    with pytest.raises(RunError, match="outside the run's folder"):
        unpack({"run.json": b"", name.format(tmp_path): b""}, folder)
    assert not (tmp_path / "outside").exists() and not (folder / "run.json").exists()


def test_home_knows_which_runs_begin_again_and_keeps_others_out_of_their_folders(interrupted):
    home = FileRelay()
    assert home.begin(interrupted, away=True) == pack(interrupted) and home.take() == []
    with pytest.raises(FolderInUse), RunFolder(interrupted).opened():
        pass
    assert home.begin(interrupted, away=False) == {}  # on a machine that sees the folder
    with RunFolder(interrupted).opened():
        home.tell(interrupted, {"event": "start"})
    assert [event["event"] for _, event in home.take()] == ["lost", "start"] and home.take() == []
    home.end(interrupted, {})
    assert home.begin(interrupted, away=False) == {} and home.take() == []
