"""What engines that run several jobs at once share."""

from dataclasses import replace

from lab.small import small_job
from wellcond.lab.train.compare import Dispatch
from wellcond.lab.train.run import run_job


def test_a_job_that_loses_its_worker_twice_has_failed(tmp_path):
    jobs, events = [small_job(tmp_path / name) for name in ("a", "b")], []
    dispatch = Dispatch(jobs, lambda job, event: events.append(event["event"]))
    for _ in range(2):
        assert dispatch.waiting[0] is jobs[0]
        dispatch.lose(dispatch.waiting.popleft(), "its worker was lost")
    assert list(dispatch.waiting) == jobs[1:] and events == ["lost", "failed"]
    [(job, problem)] = dispatch.outcome.failures
    assert job is jobs[0] and problem == "conditioned+balanced, seed 0: its worker was lost"


def test_nothing_is_handed_out_or_repeated_after_a_stop(tmp_path):
    dispatch = Dispatch([small_job(tmp_path / "a"), small_job(tmp_path / "b")], lambda *told: None)
    running = dispatch.waiting.popleft()
    dispatch.stop()
    dispatch.lose(running, "its worker was lost")
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
