"""A run that is given time instead of updates."""

import itertools
import json
from types import SimpleNamespace

import pytest

from lab.small import record, small_job, small_recipe, stop_after
from wellcond.lab.records import seal
from wellcond.lab.train.length import RunClock, TimeBudget
from wellcond.lab.train.run import run_job

pytestmark = pytest.mark.processes

SECONDS = 0.8
TICK = 0.01
PER_UPDATE = TICK * (1 + 1 / 7)
"""The clock is read after every update, and before a checkpoint after every seventh."""
TIMED = (
    f"training={{length: {{steps: 100000}}, hours: {SECONDS / 3600}, batch_size: 32, threads: 1, log_every: 1}}",
    "schedule={name: triangular, peak: 0.75, begin: 0.25}",
    "evaluation={every: {steps: 100000}, batch_size: 250}",
    "tracking={weights_every: null, jacobian_points: 2, heads: [0]}",
)


def rows(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def timed_job(folder, *overrides):
    return small_job(folder, "default", *TIMED, *overrides)


class Alone:
    num_processes = 1


class SlowClock(RunClock):
    """Says what it is told."""

    training = 0.0

    def now(self):
        return {"training": self.training}


@pytest.fixture
def ticking(monkeypatch):
    """A clock that goes on by a tick whenever it is read."""
    ticks = itertools.count()
    monkeypatch.setattr("wellcond.lab.train.length.time", SimpleNamespace(perf_counter=lambda: TICK * next(ticks)))


def test_schedule_follows_the_time_or_the_updates_whichever_is_further():
    clock = SlowClock()
    budget = TimeBudget(2.0, clock, Alone())
    found = []
    for hours, step in ((0, 0), (0, 30), (0.5, 30), (1, 30), (1.999, 30), (2, 30), (3, 99)):
        clock.training = hours * 3600
        budget.look()
        found.append((budget.point(step, 100), budget.used >= 1))
    assert found == [(0, False), (30, False), (30, False), (50, False), (99, False), (99, True), (99, True)]
    clock.training = 1800
    budget.look()
    assert budget.steps_expected(10, 100) == 40 and budget.steps_expected(30, 100) == 100


def test_training_ends_with_the_time(tmp_path, ticking):
    done = run_job(timed_job(tmp_path / "run"))
    assert done["status"] == "finished" and done["reproducible"] is False
    steps = done["progress"]["step"]
    assert done["progress"]["num_steps"] == steps
    assert abs(steps - SECONDS / PER_UPDATE) <= 3
    assert SECONDS <= done["seconds"]["training"] <= SECONDS + 6 * TICK
    rates = [row["lr"] for row in rows(tmp_path / "run", "steps")]
    peak = small_recipe().optimizer.lr
    assert rates[0] == pytest.approx(peak / 4, rel=0.1) and max(rates) == pytest.approx(peak, rel=0.1)
    assert rates[-1] < 0.2 * peak and rates.index(max(rates)) / len(rates) == pytest.approx(0.75, abs=0.1)
    assert [row["step"] for row in rows(tmp_path / "run", "evaluations")] == [0, steps]
    assert {row["step"] for row in rows(tmp_path / "run", "conditioning")} == {0, steps}
    assert seal(run_job(timed_job(tmp_path / "run"))) == record(tmp_path / "run")


def test_resuming_resumes_with_the_time_that_is_left(tmp_path, ticking):
    fewer = "evaluation={every: {steps: 5}, batch_size: 250}"
    stopped = stop_after(timed_job(tmp_path / "run", fewer), 10)
    assert stopped["status"] == "interrupted"
    before = stopped["seconds"]["training"]
    done = run_job(timed_job(tmp_path / "run", fewer))
    assert done["status"] == "finished" and len(done["sessions"]) == 2
    assert 10 * TICK <= before < SECONDS <= done["seconds"]["training"] <= SECONDS + 6 * TICK
    assert 10 < done["progress"]["step"] <= SECONDS / TICK
    written = rows(tmp_path / "run", "steps")
    assert [row["step"] for row in written] == list(range(1, written[-1]["step"] + 1))
    rates = [row["lr"] for row in written]
    assert max(abs(a - b) for a, b in itertools.pairwise(rates)) < 0.15 * max(rates)  # no jump where it went on


def test_a_run_killed_behind_its_last_update_does_not_train_again(tmp_path, ticking):
    done = run_job(timed_job(tmp_path / "run"))
    path = tmp_path / "run" / "run.json"
    path.write_text(json.dumps(done | {"status": "running"}))
    again = run_job(timed_job(tmp_path / "run"))
    assert again["status"] == "finished" and again["progress"]["step"] == done["progress"]["step"]
    assert again["final"] == done["final"]
    assert {row["step"] for row in rows(tmp_path / "run", "conditioning")} == {0, done["progress"]["step"]}


def test_updates_are_an_upper_limit(tmp_path):
    job = small_job(tmp_path / "run", "default", "training.hours=1", "schedule={name: triangular}")
    done = run_job(job)
    assert done["status"] == "finished" and done["progress"]["step"] == 24
    rates = [row["lr"] for row in rows(tmp_path / "run", "steps")]
    assert rates[-1] == pytest.approx(small_recipe().optimizer.lr / 12)
