"""Exit codes: 0 only for a command that did what it was asked for."""

import json

import pytest

from lab.report.fake_runs import usual_methods, write_comparison
from lab.small import CHANGES_IN_WORDS, record

DIVERGING = [*CHANGES_IN_WORDS, "--cpu", "--set", "optimizer.lr=30", "--set", "schedule={name: constant}"]


def test_a_run_that_diverges_ends_with_1_and_says_why(run, tmp_path):
    code, out = run("train", "digits", "--method", "default", "-q", "-o", tmp_path / "run", *DIVERGING)
    assert code == 1 and record(tmp_path / "run")["status"] == "diverged"
    assert "no result: default, seed 0: diverged, the " in out and "optimizer.lr" in out
    again = run("train", "digits", "--method", "default", "-o", tmp_path / "run", "--json", *DIVERGING)
    assert again[0] == 1 and json.loads(again[1])["runs"][0]["status"] == "diverged"


def test_a_comparison_in_which_every_run_diverges_ends_with_1(run, tmp_path):
    asked = ["--methods", "default", "--seeds", 1, "--jobs", 1, "--no-report", "-q"]
    code, out = run("compare", "--recipe", "digits", *asked, "-o", tmp_path / "all", *DIVERGING)
    assert code == 1 and "no result: default, seed 0" in out


def test_a_comparison_in_which_one_method_diverges_has_a_result(run, tmp_path):
    methods = "methods=[default, {init: default, label: slow, set: {optimizer.lr: 1.0e-3}}]"
    asked = ["--seeds", 1, "--jobs", 1, "--no-report", "--json", "--set", methods, "--set", "tuned=null"]
    code, out = run("compare", "--recipe", "digits", "-o", tmp_path / "some", *DIVERGING, *asked)
    assert code == 0 and {row["status"] for row in json.loads(out)["runs"]} == {"finished", "diverged"}


@pytest.mark.parametrize(
    "command",
    [("claims",), ("report",), ("glue",), ("pack", "-o", "packed"), ("reproduce", "C-T1", "--records")],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("place", ["empty", "/dev/null"])
def test_a_folder_without_records_is_an_error_and_stays_as_it_was(monkeypatch, run, tmp_path, command, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    told, out = run(*command, place)
    assert told == 2 or "no run" in told or "no records" in told
    assert not out and [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_reproduce_says_which_records_are_missing(run, tmp_path):
    write_comparison(tmp_path / "somewhere", usual_methods())
    told, _ = run("reproduce", "C-T1", "--records", tmp_path)
    assert "holds no records of C-T1" in told and "results/" in told
