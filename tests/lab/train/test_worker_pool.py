"""Several runs at once, each in a process that may die."""

import os
import signal
import threading

import pytest

from lab.held_runs import HELD
from lab.small import record, small_job
from wellcond.lab.train.compare import run_comparison

pytestmark = pytest.mark.processes


def test_a_killed_worker_is_replaced_and_its_run_taken_up_again(hold, tmp_path, monkeypatch):
    for name, value in hold.environment.items():
        monkeypatch.setenv(name, value)
    jobs = [small_job(tmp_path / method, method, HELD, local_code=True) for method in ("default", "conditioned")]
    lost = []

    def kill_one():
        os.kill(hold.wait_for(2)[0], signal.SIGKILL)
        hold.end()

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    outcome = run_comparison(
        jobs, num_workers=2, observer=lambda job, event: event["event"] == "lost" and lost.append((job, event))
    )
    killer.join()
    [(job, event)] = lost
    assert "its process ended with code -9; out of memory?" in event["problem"]
    assert [kept["status"] for kept in outcome.records] == ["finished"] * 2 and not outcome.failures
    starts = {each.folder: [s["resumed_at_step"] for s in record(each.folder)["sessions"]] for each in jobs}
    assert starts.pop(job.folder) == [0, 7] and list(starts.values()) == [[0]]
