"""A batch that grows to its full size."""

import pytest

from lab.small import assert_same_run, record, small_job, stop_after
from wellcond.lab.train.length import ramped_parts
from wellcond.lab.train.run import run_job

OPTIONS = ("training.length={steps: 20}", "training.accumulate=4", "training.batch_size=48", "training.batch_ramp=0.5")
PARTS = [1, 1, 2, 2, 2, 3, 3, 4, 4, 4] + [4] * 10
"""ceil(4 (step + 1) / 10), at most 4."""


@pytest.mark.parametrize("share", [0.1, 0.6, 1.0])
@pytest.mark.parametrize("parts", [1, 3, 64])
def test_the_batch_grows_in_a_straight_line(share, parts):
    found = [ramped_parts(share, parts, step, 1000) for step in range(1000)]
    assert found == sorted(found) and found[0] == 1 and found[-1] == parts
    full = found.index(parts)
    assert full + 1 == pytest.approx(share * 1000 * (parts - 1) / parts, abs=2)


def test_the_record_counts_what_was_seen(tmp_path):
    run_job(small_job(tmp_path / "run", "default", *OPTIONS))
    progress = record(tmp_path / "run")["progress"]
    assert progress["step"] == 20
    assert progress["epoch"] == pytest.approx(sum(PARTS) / 4 / progress["steps_per_epoch"], abs=1e-6)


def test_an_interrupted_run_resumes_with_the_same_samples(tmp_path):
    run_job(small_job(tmp_path / "whole", "default", *OPTIONS))
    job = small_job(tmp_path / "broken", "default", *OPTIONS)
    assert stop_after(job, 4)["status"] == "interrupted"
    run_job(job)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
