"""The small parts of a run: clock, state, seeds, interrupts, provenance."""

import dataclasses
import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch

from wellcond.lab.seeding import derive, epoch_order, generator
from wellcond.lab.train import length as clock_module
from wellcond.lab.train.length import (
    RunClock,
    StopFlag,
    TrainState,
)
from wellcond.lab.train.run import (
    ALL_GPUS,
    describe_session,
    flat_settings,
    has_free_cores,
    has_room,
    num_cores,
)

pytestmark = pytest.mark.processes


def machine(**about):
    return SimpleNamespace(**{"device": torch.device("cpu"), "num_processes": 1, "mixed_precision": "no"} | about)


def test_the_clock_counts_each_activity(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now[0])
    clock = RunClock()
    now[0] = 1.0
    assert clock.switch("training") == "setup"
    now[0] = 3.0
    with pytest.raises(KeyError), clock.spent_on("evaluation"):
        now[0] = 7.0
        with clock.spent_on("measuring"):
            now[0] = 15.0
        raise KeyError
    now[0] = 16.0
    expected = {"setup": 1.0, "training": 3.0, "evaluation": 4.0, "measuring": 8.0, "checkpointing": 0.0}
    assert clock.now() == expected == clock.now()


def test_a_session_is_alone_where_its_threads_have_cores(monkeypatch):
    def alone(load, **options):
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
        return describe_session(machine(), 0, **options)["alone"]

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert alone(0.3) and alone(0.3, at_once=num_cores()) and not alone(0.3, at_once=num_cores() + 1)
    assert alone(float(os.cpu_count())) and not alone(os.cpu_count() + 1.0)
    monkeypatch.delattr(os, "getloadavg")
    assert not has_free_cores()


def test_a_gpu_is_shared_if_others_hold_memory_or_there_are_more_runs_than_gpus(monkeypatch):
    gpu, used = torch.device("cuda"), [0.6]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int((80 - used[0]) * 2**30), 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    assert has_room(gpu, 1) and not has_room(gpu, 2)
    monkeypatch.setenv(ALL_GPUS, "8")  # of which this process sees one
    assert has_room(gpu, 8) and not has_room(gpu, 16)
    used[0] = 20.0
    assert not has_room(gpu, 1)


def test_settings_of_a_tracker_are_flat_and_plain():
    settings = {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}, "seed": 3, "proxy": None}
    expected = {"optimizer.lr": 1e-3, "optimizer.betas": "[0.9, 0.95]", "seed": 3, "proxy": "None"}
    assert flat_settings(settings) == expected


def test_state_survives_json_exactly():
    state = TrainState()
    state.take([0.1, 1 / 3])
    state.step = 2
    again = TrainState(**json.loads(json.dumps(dataclasses.asdict(state))))
    assert again == state
    assert again.close_window() == pytest.approx((0.1 + 1 / 3) / 2) and again.first_loss == 0.1
    assert again.close_evaluation() == pytest.approx((0.1 + 1 / 3) / 2)
    assert again.close_evaluation() is None and again.window == []
    again.take([5.0])
    assert again.close_window() == 5.0 and again.first_loss == 0.1


def test_seeds_depend_on_every_argument():
    seeds = {
        derive(s, p, *q) for s in (0, 1, 11) for p in ("order", "model") for q in ((), (1,), (1, 1), (11,), (2, 1))
    }
    assert len(seeds) == 30 and all(0 <= seed < 2**63 for seed in seeds)
    assert torch.equal(epoch_order(9, 0, 1), epoch_order(9, 0, 1))
    assert sorted(epoch_order(9, 0, 1).tolist()) == list(range(9))
    assert torch.rand(1, generator=generator(0, "a")) == torch.rand(1, generator=generator(0, "a"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_the_stop_flag(number):
    former = signal.getsignal(number)
    with StopFlag().listening() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        else:
            signal.raise_signal(number)
    assert signal.getsignal(number) is former


def test_a_session_names_versions_and_no_person_or_place():
    session = describe_session(machine(num_processes=2, mixed_precision="bf16"), 5)
    assert session["torch"] == torch.__version__ and session["packages"]["timm"]
    assert (session["processes"], session["precision"], session["resumed_at_step"]) == (2, "bf16", 5)
    text = json.dumps(session)
    assert os.path.expanduser("~") not in text and os.uname().nodename not in text and os.getcwd() not in text
