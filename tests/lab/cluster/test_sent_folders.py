"""Folders of runs on their way between machines."""

import io
import shutil
import tarfile

import pytest

from lab.small import assert_same_run, small_job, stop_after
from wellcond.lab.cluster import worker
from wellcond.lab.cluster.worker import Mailbox, pack, receive, unpack
from wellcond.lab.train.run import run_job
from wellcond.lab.train.run_folder import RunError


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(worker, "CHUNK", 1000)


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def interrupted(tmp_path):
    job = small_job(tmp_path / "there")
    assert stop_after(job, 8)["status"] == "interrupted"
    return job.folder


def test_a_run_that_was_sent_resumes_to_the_same_end(interrupted, tmp_path):
    chunks = pack(interrupted, bytes)
    assert len(chunks) > 1 and max(map(len, chunks)) == 1000
    sent = {name: content for name, content in files_of(interrupted).items() if name != "lock"}
    run_job(small_job(interrupted))
    here = tmp_path / "here"
    receive(chunks, here)
    assert files_of(here) == sent
    resumed = run_job(small_job(here))
    assert resumed["sessions"][1]["resumed_at_step"] == 8
    assert_same_run(here, interrupted)


def test_files_that_break_off_change_nothing(interrupted, tmp_path):
    here = tmp_path / "here"
    shutil.copytree(interrupted, here)
    run_job(small_job(interrupted))
    before, chunks = files_of(here), pack(interrupted, bytes)
    with pytest.raises(RunError, match="the files that a worker sent for .* cannot be used"):
        receive(chunks[: len(chunks) // 2], here)
    assert {name: content for name, content in files_of(here).items() if ".partial" not in name} == before
    receive(chunks, here)
    assert files_of(here) == files_of(interrupted)


def test_links_and_files_in_the_making_are_not_sent(interrupted, tmp_path):
    before = files_of(interrupted)
    (interrupted / "link").symlink_to("/etc/hostname")
    (interrupted / "run.json.partial").touch()
    (interrupted / "empty").touch()
    unpack(pack(interrupted, bytes), tmp_path / "sent")
    assert files_of(tmp_path / "sent") == {name: before[name] for name in before if name != "lock"} | {"empty": b""}


def archive(*members):
    """Chunks of an archive that no worker of ours writes."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as file:
        for member in members:
            file.addfile(member, io.BytesIO(bytes(member.size)))
    return [made.getvalue()]


def member(name, **fields):
    made = tarfile.TarInfo(name)
    for field, value in ({"size": 1} | fields).items():
        setattr(made, field, value)
    return made


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "out/outside"])
def test_nothing_is_written_outside_the_folder(tmp_path, name):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    with pytest.raises(RunError, match=r"cannot be used|outside the run's folder"):
        receive(archive(member("run.json"), member(name)), folder)
    assert not (tmp_path / "outside").exists() and not (folder / "run.json").exists()


def test_links_that_arrive_are_left_out(tmp_path):
    link = member("checkpoints", type=tarfile.SYMTYPE, linkname="..", size=0)
    receive(archive(link, member("/absolute")), tmp_path / "run")
    assert set(files_of(tmp_path / "run")) == {"absolute"}


def test_a_mailbox_knows_which_files_are_on_their_way():
    mailbox = Mailbox()
    mailbox.put(1, ("files", []))
    mailbox.put(2, ("event", {}))
    assert mailbox.holds_files(1) and not mailbox.holds_files(2)
    assert mailbox.take() == [(1, ("files", [])), (2, ("event", {}))]
    assert mailbox.holds_files(1)  # the command deals with them
    assert mailbox.take() == [] and not mailbox.holds_files(1)
