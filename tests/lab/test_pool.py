"""Where runs are done: the queue, and processes that may die."""

import os
import signal
import threading
from dataclasses import replace

import pytest

from lab.held_runs import HELD
from lab.small import logs, record, small_job
from wellcond.lab.pool import Dispatch, Processes, choose_workers, run_jobs
from wellcond.lab.train.run import run_job
from wellcond.lab.user_code import METHODS, UserCode


def test_a_job_that_loses_its_worker_twice_has_failed(tmp_path):
    jobs, events = [small_job(tmp_path / name) for name in ("a", "b")], []
    dispatch = Dispatch(jobs, lambda job, event: events.append(event["event"]))
    for _ in range(2):
        assert dispatch.waiting[0] is jobs[0]
        dispatch.handle(dispatch.waiting.popleft(), ("lost", "its worker was lost"))
    assert list(dispatch.waiting) == jobs[1:] and events == ["lost", "failed"]
    [(job, problem)] = dispatch.outcome.failures
    assert job is jobs[0] and problem == "conditioned+balanced, seed 0: its worker was lost"


def test_nothing_is_handed_out_or_repeated_after_a_stop(tmp_path):
    dispatch = Dispatch([small_job(tmp_path / "a"), small_job(tmp_path / "b")], lambda *told: None)
    running = dispatch.waiting.popleft()
    dispatch.stop()
    dispatch.handle(running, ("lost", "its worker was lost"))
    assert not dispatch.waiting and dispatch.outcome.interrupted and not dispatch.outcome.failures


def test_complete_runs_need_no_worker_and_wrong_ones_are_told_at_once(tmp_path):
    done, other = small_job(tmp_path / "a"), small_job(tmp_path / "a", "polar")
    run_job(done)
    events = []
    dispatch = Dispatch([done, other], lambda job, event: events.append(event["event"]))
    dispatch.skip_complete()
    assert not dispatch.waiting and events == ["end", "failed"] and len(dispatch.outcome.records) == 1
    assert f"{tmp_path / 'a'} holds a run under other settings" in dispatch.outcome.failures[0][1]
    without = replace(done, keep_checkpoints=False)
    dispatch = Dispatch([without], lambda *told: None)
    dispatch.skip_complete()
    assert list(dispatch.waiting) == [without]  # its checkpoints are still there
    run_job(without)
    dispatch.skip_complete()
    assert not dispatch.waiting and not (tmp_path / "a" / "checkpoints").exists()


def halved(model, *, factor: float = 0.5):
    model.blocks[0].attn.qkv.weight.data.mul_(factor)


@pytest.mark.processes
def test_a_killed_worker_is_replaced_its_run_taken_up_again_and_functions_of_a_user_are_there(
    hold, tmp_path, monkeypatch
):
    for name, value in hold.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(METHODS, "halved", halved)
    code = UserCode(methods={"halved": halved})
    changes = HELD, "tracking={weights_every: null, jacobian_points: 0}"
    killed, other = (
        small_job(tmp_path / method, method, *changes, local_code=True) for method in ("default", "halved")
    )
    lost = []

    def kill_one():
        os.kill(hold.wait_for(1)[0], signal.SIGKILL)
        hold.end()

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    outcome = run_jobs(
        [killed, replace(other, user_code=code)],
        pool=Processes(1),
        observer=lambda job, event: event["event"] == "lost" and lost.append((job, event)),
    )
    killer.join()
    [(job, event)] = lost
    assert job.folder == killed.folder and "ended with code -9" in event["problem"]
    assert [kept["status"] for kept in outcome.records] == ["finished"] * 2 and not outcome.failures
    starts = [[s["resumed_at_step"] for s in record(each.folder)["sessions"]] for each in (killed, other)]
    assert starts == [[0, 7], [0]]
    assert logs(killed.folder)["steps"] != logs(other.folder)["steps"]


def test_runs_at_once_are_those_asked_for_or_one_a_core(tmp_path):
    job = replace(small_job(tmp_path), cpu=True)
    assert choose_workers(3, job) == 3
    assert choose_workers(None, job) == len(os.sched_getaffinity(0))
    assert choose_workers(None, replace(small_job(tmp_path, "polar", "training.threads=null"), cpu=True)) == 1
