"""A folder that is deleted under its run."""

import shutil

import pytest

from lab.small import small_job
from wellcond.errors import RunError
from wellcond.lab.train.run import run_job


def test_a_folder_deleted_during_its_run_is_an_error_and_is_not_made_again(tmp_path):
    def observe(event):
        if event["event"] == "saved" and event["step"] == 7:
            shutil.rmtree(tmp_path / "run")

    with pytest.raises(RunError, match=r"run.* could not be written: No such file or directory.*same command"):
        run_job(small_job(tmp_path / "run"), observe)
    assert not (tmp_path / "run").exists()
