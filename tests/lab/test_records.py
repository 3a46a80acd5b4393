"""What is read, and what is refused with a message that helps."""

import json
from pathlib import Path

import pytest

from lab.report.fake_runs import PERPLEXITY, FakeMethod, usual_methods, write_comparison, write_run
from wellcond.errors import RunRecordError, WellcondError
from wellcond.lab.records import load_comparisons


@pytest.fixture
def folder(tmp_path):
    return write_comparison(tmp_path / "digits", usual_methods())


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_comparison_and_runs_are_read(folder):
    (comparison,) = load_comparisons(folder)
    assert comparison.methods == ("default", "conditioned", "gaussian", "identity(lam=10)", "polar")
    assert (comparison.name, comparison.recipe, comparison.scale) == ("digits", "digits", "tiny")
    assert comparison.baseline == "default" and comparison.seeds == (0, 1, 2) and len(comparison.runs) == 15
    run = comparison.of("default")[0]
    assert len(run.evaluations) == 13 and len(run.conditioning) == 5 * 3 * 4 and run.steps[0]["step"] == 10


def test_runs_without_a_comparison_are_in_order_of_name_default_first(tmp_path):
    for label in ("polar", "default", "a"):
        write_run(tmp_path, FakeMethod(label, {0: 0.9}), 0)
    (comparison,) = load_comparisons(tmp_path)
    assert comparison.methods == ("default", "a", "polar") and comparison.baseline == "default"
    assert comparison.folder == tmp_path
    (single,) = load_comparisons(tmp_path / "polar" / "seed0")
    assert single.methods == ("polar",) and single.baseline == "polar"


def test_a_run_in_the_very_folder_that_is_given_is_read(tmp_path, monkeypatch):
    write_run(tmp_path, FakeMethod("polar", {0: 0.9}), 0)
    monkeypatch.chdir(tmp_path / "polar" / "seed0")
    (single,) = load_comparisons(Path("."))  # a relative path has few parents
    assert single.methods == ("polar",)


def test_half_a_last_line_of_a_killed_run_is_ignored(folder):
    killed = next(run for run in load_comparisons(folder)[0].runs if run.status == "running")
    assert killed.outcome == "partial" and killed.steps[-1]["step"] == 100


def test_half_a_line_of_a_finished_run_is_an_error(folder):
    path = folder / "default" / "seed0" / "evaluations.jsonl"
    path.write_text(path.read_text() + '{"step": 1')
    run = load_comparisons(folder)[0].of("default")[0]
    with pytest.raises(RunRecordError, match=r"evaluations.jsonl: row 14 of 14 is not JSON"):
        _ = run.evaluations


def test_a_step_written_twice_counts_once_the_later_one(folder):
    path = folder / "default" / "seed0" / "evaluations.jsonl"
    path.write_text(path.read_text() + json.dumps({"step": 20, "epoch": 1.0, "accuracy": 0.77}) + "\n")
    rows = load_comparisons(folder)[0].of("default")[0].evaluations
    assert len(rows) == 13 and rows[1]["accuracy"] == 0.77


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"schema": 2}, "expected schema 1, found 2"),
        ({"kind": "other"}, "expected a record of kind 'wellcond-run'"),
        ({"status": "asleep"}, "expected a status of running"),
        ({"seed": "zero"}, "expected 'seed' to be int"),
        ({"metric": {}}, "expected 'metric' to have name"),
        ({"final": 3}, "expected 'final' to be a mapping"),
        ({"sessions": ["first"]}, "expected 'sessions' to be a list of mappings"),
    ],
)
def test_bad_records_name_file_and_problem(folder, values, said):
    change(folder / "default" / "seed0" / "run.json", **values)
    with pytest.raises(WellcondError, match=said) as caught:
        load_comparisons(folder)
    assert "run.json" in str(caught.value)


def test_bad_comparisons(folder):
    change(folder / "comparison.json", baseline="nobody")
    with pytest.raises(RunRecordError, match="'nobody' as baseline"):
        load_comparisons(folder)
    change(folder / "comparison.json", baseline="default", methods=["default"])
    with pytest.raises(RunRecordError, match="list of {label, slug}"):
        load_comparisons(folder)


def test_folder_without_runs(tmp_path):
    with pytest.raises(RunRecordError, match=r"holds no run.json.*\n.*wellcond compare"):
        load_comparisons(tmp_path)
    with pytest.raises(RunRecordError, match=r"nowhere: holds no run.json"):
        load_comparisons(tmp_path / "nowhere")


def test_runs_that_cannot_be_compared(folder):
    change(folder / "polar" / "seed0" / "run.json", recipe="other")
    with pytest.raises(RunRecordError, match="recipe: 'digits' and 'other'"):
        load_comparisons(folder)
    change(folder / "polar" / "seed0" / "run.json", recipe="digits", method="default")
    with pytest.raises(RunRecordError, match="second run of 'default' with seed 0"):
        load_comparisons(folder)


def test_a_finished_run_with_an_infinite_metric_has_diverged(tmp_path):
    methods = [FakeMethod("default", {0: 30.0, 1: float("inf")}, curves={1: [90.0, float("inf")]})]
    (comparison,) = load_comparisons(write_comparison(tmp_path, methods, metric=PERPLEXITY))
    assert comparison.of("default")[1].outcome == "diverged" and set(comparison.finished("default")) == {0}
    assert comparison.of("default")[1].evaluations[-1]["perplexity"] == "inf"


@pytest.mark.parametrize("value", [1.7, -0.1, "0.9", "inf", True])
@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_a_score_that_cannot_be_is_refused(folder, value, status):
    change(folder / "default" / "seed0" / "run.json", final={"step": 1, "accuracy": value}, status=status)
    with pytest.raises(RunRecordError, match=r"run\.json: expected 'final\.accuracy' to be a number from 0"):
        load_comparisons(folder)


@pytest.mark.parametrize("final", [None, {"step": 1}])
def test_a_finished_run_without_a_score_is_refused(folder, final):
    change(folder / "default" / "seed0" / "run.json", final=final)
    with pytest.raises(RunRecordError, match=r"run\.json: expected 'final.*\n.*delete .*/default/seed0 and repeat"):
        load_comparisons(folder)


def test_a_correlation_may_be_negative_and_a_perplexity_large(tmp_path):
    matthews = {"name": "matthews", "higher_is_better": True, "percent": True}
    write_comparison(tmp_path / "a", [FakeMethod("default", {0: -0.03})], metric=matthews)
    write_comparison(tmp_path / "b", [FakeMethod("default", {0: 3e5})], metric=PERPLEXITY)
    assert [comparison.runs[0].value for comparison in load_comparisons(tmp_path)] == [-0.03, 3e5]


def test_runs_under_different_settings_are_not_pooled(folder):
    path = folder / "polar/seed1/run.json"
    config = json.loads(path.read_text())["config"]
    change(path, config=config | {"optimiser": {"lr": 0.1, "weight_decay": 0.05}})
    with pytest.raises(RunRecordError, match=r"other settings than .*: optimiser\.lr: 0\.001 and 0\.1"):
        load_comparisons(folder)


def test_a_run_that_failed_before_it_knew_its_metric_is_counted(folder):
    path = folder / "polar/seed1/run.json"
    change(path, status="failed", reason="no teacher", metric=None, final=None)
    (comparison,) = load_comparisons(folder)
    assert [run.status for run in comparison.of("polar")].count("failed") == 1
    assert comparison.metric.name == "accuracy"


def test_a_comparison_in_which_nothing_trained_says_why(tmp_path):
    write_run(tmp_path, FakeMethod("default", {0: 0.9}), 0)
    [path] = tmp_path.rglob("run.json")
    change(path, status="failed", reason="no data", metric=None, final=None)
    with pytest.raises(RunRecordError, match="no run got as far as training: no data"):
        load_comparisons(tmp_path)
