"""Where runs are done: the queue, and processes that may die."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from lab import counted_updates
from lab.held_runs import HELD
from lab.small import logs, record, small_job
from wellcond.errors import OptionError
from wellcond.lab import pool
from wellcond.lab.pool import Dispatch, Processes, choose_workers, local_pool, run_jobs
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
    dispatch = Dispatch([small_job(tmp_path / "a"), small_job(tmp_path / "b")], lambda *events: None)
    running = dispatch.waiting.popleft()
    dispatch.stop()
    dispatch.handle(running, ("lost", "its worker was lost"))
    assert not dispatch.waiting and dispatch.outcome.interrupted and not dispatch.outcome.failures


def test_a_run_that_fails_because_it_was_stopped_leaves_an_interrupted_comparison(tmp_path):
    dispatch = Dispatch([small_job(tmp_path)], lambda *events: None)
    running = dispatch.waiting.popleft()
    dispatch.stop()
    assert not dispatch.outcome.interrupted  # it may still finish
    dispatch.handle(running, ("error", "its worker was lost"))
    assert dispatch.outcome.interrupted and dispatch.outcome.failures


def test_complete_runs_need_no_worker_and_wrong_ones_are_told_at_once(tmp_path):
    done, other = small_job(tmp_path / "a"), small_job(tmp_path / "a", "polar")
    run_job(done)
    events = []
    dispatch = Dispatch([done, other], lambda job, event: events.append(event["event"]))
    dispatch.skip_complete()
    assert not dispatch.waiting and events == ["end", "failed"] and len(dispatch.outcome.records) == 1
    assert f"{tmp_path / 'a'} holds a run under other settings" in dispatch.outcome.failures[0][1]
    without = replace(done, keep_checkpoints=False)
    dispatch = Dispatch([without], lambda *events: None)
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


@pytest.fixture
def eight_gpus(monkeypatch):
    """A machine that says it has eight, and no process that would use them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pool.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(pool.torch.cuda, "device_count", lambda: 8)


def gpus_of(found):
    return [
        [found._environment(place, rank, "1").get("CUDA_VISIBLE_DEVICES") for rank in range(found.ranks)]
        for place in range(found.size)
    ]


def test_every_run_has_gpus_of_its_own(eight_gpus, tmp_path, monkeypatch):
    jobs = [replace(small_job(tmp_path / str(number)), cpu=False) for number in range(20)]
    assert gpus_of(local_pool(jobs, None)) == [[str(number)] for number in range(8)]
    assert gpus_of(local_pool(jobs, None, ranks=4)) == [["0,1,2,3"] * 4, ["4,5,6,7"] * 4]
    assert gpus_of(local_pool(jobs[:1], None, ranks=8)) == [["0,1,2,3,4,5,6,7"] * 8]
    with pytest.raises(OptionError) as raised:
        local_pool(jobs, 3, ranks=4)
    assert raised.value.found == 12
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert gpus_of(local_pool(jobs, 2)) == [["5"], ["7"]]


def test_ranks_find_each_other_as_under_torchrun():
    first, second = (Processes(1, ranks=2)._environment(0, rank, "29400") for rank in (0, 1))
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("0", "1", "1", "2")
    assert first["MASTER_PORT"] == second["MASTER_PORT"] == "29400" and "CUDA_VISIBLE_DEVICES" not in first


@pytest.mark.processes
def test_a_run_on_two_ranks_is_the_run_of_one(tmp_path, monkeypatch):
    """Each rank measures one of the two layers, on its own device and while the other measures, without rounding.

    An update reads no number of the device, and ranks exchange gradients in it and nothing else.
    """
    monkeypatch.setenv(counted_updates.FOLDER, str(tmp_path))
    measured = "tracking={weights_every: null, jacobian_points: 2, heads: all, budget: null}"
    # Not fused, AdamW reads the count of its steps, which is on the CPU whatever the device.
    changes = ("precision.mixed=bf16", measured, "training.length={steps: 6}", "optimizer.fused=true")
    events = []
    job = small_job(tmp_path / "two", "conditioned+balanced", *changes)
    job = replace(job, user_code=UserCode((Path(counted_updates.__file__),)))
    outcome = run_jobs([job], ranks=2, observer=lambda job, event: events.append(event["event"]))
    assert [kept["status"] for kept in outcome.records] == ["finished"] and not outcome.failures
    assert events.count("start") == events.count("end") == 1  # rank 0 speaks for both
    run_job(small_job(tmp_path / "one", "conditioned+balanced", *changes))
    assert record(tmp_path / "two")["sessions"][0]["processes"] == 2
    gradients = f"allreduce_ {record(tmp_path / 'two')['model']['parameters']}"
    for rank in ("0", "1"):  # without logged updates, which read norms; DDP arranges its buckets in the first ones
        noted = (tmp_path / rank).read_text().splitlines()
        assert noted.count("update") == 4 and "item" not in noted and noted[-4:] == ["update", gradients] * 2
    one, two = logs(tmp_path / "one"), logs(tmp_path / "two")
    assert [(row["step"], row["layer"], row["head"]) for row in two["conditioning"]] == [
        (step, layer, head) for step in (0, 6) for layer in ("blocks.0.attn", "blocks.1.attn") for head in (0, 1)
    ]
    for mine, other in zip(one["conditioning"], two["conditioning"], strict=True):
        assert other["kappa_q"] == pytest.approx(mine["kappa_q"], rel=2e-2)
        exact = mine["step"] == 0  # the same weights; later ones differ by the rounding of gradients
        assert other["sigma_max"] == pytest.approx(mine["sigma_max"], rel=1e-9 if exact else 2e-2)


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_whose_rank_is_killed_is_taken_up_again_by_new_ones(hold, tmp_path, monkeypatch):
    for name, value in hold.environment.items():
        monkeypatch.setenv(name, value)
    job, lost = small_job(tmp_path / "run", "default", HELD, local_code=True), []

    def kill_one():
        os.kill(max(hold.wait_for(2)), signal.SIGKILL)
        hold.end()

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    outcome = run_jobs(
        [job], ranks=2, observer=lambda job, event: event["event"] == "lost" and lost.append(event["problem"])
    )
    killer.join()
    assert ["code -9" in problem for problem in lost] == [True]
    assert [kept["status"] for kept in outcome.records] == ["finished"]
    assert [session["resumed_at_step"] for session in record(job.folder)["sessions"]] == [0, 7]


@pytest.mark.slow
@pytest.mark.processes
def test_a_recipe_that_says_so_is_sharded_over_its_ranks(tmp_path):
    """The shipped configuration of the largest models: blocks sharded one by one, activations computed again."""
    changes = ("training.shard=true", "training.recompute=true", "tracking.jacobian_points=0")
    outcome = run_jobs([small_job(tmp_path / "two", "conditioned", *changes)], ranks=2)
    assert [kept["status"] for kept in outcome.records] == ["finished"], outcome.failures
    run_job(small_job(tmp_path / "one", "conditioned", *changes))
    one, two = logs(tmp_path / "one"), logs(tmp_path / "two")
    for mine, other in zip(one["steps"], two["steps"], strict=True):
        assert other["loss"] == pytest.approx(mine["loss"], rel=2e-3)
    [place] = (tmp_path / "two/checkpoints").iterdir()
    assert len(list((place / "model").iterdir())) == 2
