"""`lab.try_`: the budget, and the answer in words."""

import json

import numpy as np
import pytest

from lab.report.fake_runs import FakeMethod, write_comparison
from lab.small import small_job
from wellcond import lab
from wellcond.lab import trial
from wellcond.lab.comparison import LineWatch, Result
from wellcond.lab.pool import Outcome


def answered(folder, finals, chance=0.1, count=1000):
    write_comparison(folder, [FakeMethod(label, dict(enumerate(values))) for label, values in finals.items()])
    return trial.answer(Result(folder, Outcome()), chance, count)


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ((0.94, 0.951, 0.96, 0.949), "helps"),
        ((0.85, 0.861, 0.87, 0.859), "hurts"),
        ((0.9001, 0.9102, 0.92, 0.91), "no help"),
        ((0.93, 0.87, 0.95, 0.92), "undecided"),
    ],
)
def test_the_answer_says_what_the_interval_says(tmp_path, other, verdict):
    found = answered(tmp_path, {"default": (0.90, 0.91, 0.92, 0.91), "mine": other})
    assert found.verdicts == {"mine": verdict}
    assert ("seeds" in found.lines[1] and "[" in found.lines[1]) and found.lines[0].startswith("default: ")
    assert (found.seeds_needed.get("mine", 0) > 4) == (verdict == "undecided")


def test_what_did_not_leave_chance_has_no_winner(tmp_path):
    found = answered(tmp_path, {"default": (0.36, 0.40, 0.41), "mine": (0.41, 0.40, 0.42)}, chance=1 / 3, count=100)
    assert set(found.verdicts.values()) == {"not learned"}
    assert found.lines[0].startswith("no method learned: 41 % at chance 33 %")


def test_more_seeds_show_smaller_differences():
    assert trial.find_seeds(0.01, 0.01, 3) < trial.find_seeds(0.01, 0.005, 3) < trial.MOST_SEEDS
    assert trial.find_seeds(1.0, 0.001, 3) == trial.MOST_SEEDS


def test_the_budget_fills_the_time_and_is_kept_for_the_folder(tmp_path, monkeypatch):
    job = small_job(tmp_path)
    monkeypatch.setattr(trial, "time_updates", lambda job: (0.05, 1.0))
    first = trial.find_budget(tmp_path / "a", job, 2, workers=2, minutes=5.0, seeds=None)
    assert trial.FEWEST < first.updates < trial.MOST and first.seeds == 5 and first.minutes == pytest.approx(5, rel=0.1)
    monkeypatch.setattr(trial, "time_updates", lambda job: (5.0, 1.0))
    assert trial.find_budget(tmp_path / "a", job, 2, 2, 5.0, None).updates == first.updates  # another speed today
    assert trial.find_budget(tmp_path / "a", job, 2, 2, 5.0, 9).seeds == 9
    slow = trial.find_budget(tmp_path / "b", job, 2, 2, 5.0, None)
    assert slow.updates == trial.FEWEST and slow.seeds == 3 and slow.minutes > 60  # which is said


def test_chance_is_the_most_frequent_class(tmp_path):
    from wellcond.lab.train.prepare import prepare_task

    task = prepare_task(small_job(tmp_path).recipe, seed=0, base=None)
    share, count = trial.find_chance(task)
    assert count == len(task.evaluation) and 0.1 <= share < 0.15


@pytest.mark.slow
@pytest.mark.processes
def test_a_model_is_tried_and_the_same_call_resumes(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for number, name in enumerate(("cat", "owl")):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for index in range(40):
            pixels = (rng.random((16, 16, 3)) * 60 + 120 * number).astype(np.uint8)
            image.fromarray(pixels).save(tmp_path / "pets" / name / f"{index}.png")
    monkeypatch.setattr(trial, "FEWEST", 20)
    monkeypatch.setattr(trial, "MOST", 20)
    monkeypatch.chdir(tmp_path)
    from lab.test_comparison import small_vit

    given = {"methods": "default,gaussian", "minutes": 0.1, "watch": LineWatch(quiet=True), "cpu": True, "at_once": 1}
    found = lab.try_(small_vit, "pets", **given)
    assert set(found.verdicts) == {"default", "gaussian"} or set(found.verdicts) == {"gaussian"}
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("images-tiny-small-vit-pets-") and folder.name.endswith("-try")
    budget = json.loads((folder / "try.json").read_text())
    assert budget["updates"] == 20 and len(list(folder.glob("*/seed*/run.json"))) == 2 * budget["seeds"]
    before = {path: path.read_bytes() for path in folder.rglob("run.json")}
    again = lab.try_(small_vit, "pets", **given)
    assert again.lines == found.lines and {path: path.read_bytes() for path in folder.rglob("run.json")} == before
