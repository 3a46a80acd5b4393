"""Links in the folder of a run: nothing outside of the folder is written or deleted."""

import shutil

import pytest

from lab.small import assert_same_run, small_job, stop_after
from wellcond.errors import RunError
from wellcond.lab.train.run import run_job


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    assert stop_after(small_job(folder), 8)["status"] == "interrupted"
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run_job(small_job(folder))["status"] == "finished"
    return folder


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def move_out(path, outside):
    """Put a file or folder elsewhere, with a link in its place, as if the disk had been full."""
    outside.mkdir()
    (outside / "step-00000001").mkdir()
    (outside / "step-00000001" / "precious").write_text("keep")
    target = outside / path.name
    if path.exists():
        path.rename(target)
    elif path.suffix == ".partial":
        target.mkdir()
    else:
        target.write_text("keep")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


NAMES = ["checkpoints", "checkpoints/step-00000008", "checkpoints/step-00000008/model.safetensors",
         "checkpoints/.step-00000014.partial", "steps.jsonl", "run.json", "lock", ".incoming.partial",
         "tensorboard/events"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_not_resumed_through_a_link(interrupted, tmp_path, name):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    move_out(folder / name, tmp_path / "outside")
    before = contents(tmp_path / "outside")
    with pytest.raises(RunError) as caught:
        run_job(small_job(folder))
    assert f"{folder / name} is a link to {tmp_path / 'outside'}" in str(caught.value)
    assert "remove the link" in str(caught.value)
    assert contents(tmp_path / "outside") == before


def test_links_that_stay_inside_do_not_hinder(interrupted, finished, tmp_path):
    folder = shutil.copytree(interrupted, tmp_path / "real")
    (folder / "latest").symlink_to("checkpoints/step-00000008")
    (folder / "loop").symlink_to("loop")
    (tmp_path / "run").symlink_to(folder)  # the folder itself may be anywhere
    run_job(small_job(tmp_path / "run"))
    assert_same_run(finished, folder)
