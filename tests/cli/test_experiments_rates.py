"""What a comparison says about learning rates, before it starts, in its record and in its report."""

import csv
import html
import json
import sys

import pytest

from wellcond.cli.app import read_tuned_fields
from wellcond.cli.main import main

pytestmark = pytest.mark.processes

QUICK = [
    "training.length={steps: 1}",
    "evaluation={every: {steps: 1}, batch_size: 500}",
    "tracking={weights_every: null, jacobian_points: 0}",
]


def quick(*more):
    changes = [part for change in (*QUICK, *more) for part in ("--set", change)]
    return [*changes, "--jobs", "1", "--seeds", "1"]


def rates(folder):
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*/seed*/run.json"))]
    return {run["method"]: run["config"]["optimizer"]["lr"] for run in runs}


def test_a_method_without_a_searched_value_is_said_first_and_kept(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    methods = ["--methods", "default,conditioned(value=joint)"]
    code, output = run("compare", "--recipe", "digits", *methods, *quick())
    folder = tmp_path / "runs/digits-tiny-untuned"  # runs of default at its searched rate are in another
    assert code == 0 and rates(folder) == {"default": 1e-3, "conditioned(value=joint)": 1e-3}
    said = "There is no searched value of optimizer.lr for conditioned(value=joint), so every method trains at"
    line = next(line for line in output.splitlines() if said in line)
    assert line.endswith("add --tune optimizer.lr=0.001,0.0055")
    assert json.loads((folder / "comparison.json").read_text())["rates"] == line
    report = (folder / "report/report.md").read_text()
    assert said in report and "| method | runs | learning rate |" in report
    page = html.unescape((folder / "report/report.html").read_text())
    assert said.replace("(value=joint)", " (value joint)") in page  # there names of methods are words
    with (folder / "report/tables/summary.csv").open() as file:
        assert [row["learning_rate"] for row in csv.DictReader(file)] == ["0.001", "0.001"]

    assert read_tuned_fields([line.split()[-1]]) == {"optimizer.lr": (0.001, 0.0055)}  # as --tune takes it


def test_searched_values_are_used_by_all_and_shown(run, tmp_path):
    chosen = ["--methods", "default,mimetic", "-o", tmp_path, "--no-report"]
    code, output = run("compare", "--recipe", "digits", *chosen, *quick())
    assert code == 0 and rates(tmp_path) == {"default": 0.0055, "mimetic": 0.003}
    assert "Each method trains at its searched value of optimizer.lr (results/evidence/digits" in output
    assert "learning rate" in run("report", tmp_path, "--no-pictures")[1]
    shown = [
        line.split("|")[1:4] for line in (tmp_path / "report/report.md").read_text().splitlines() if "0.00" in line
    ]
    assert [" mimetic ", " 1 ", " 0.003 "] in shown


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("default", "learning rate 0.0055, searched for this method (results/evidence/digits)"),
        ("conditioned(value=joint)", "learning rate 0.001, of the recipe; none was searched for this method"),
        ("default+set(optimizer.lr=0.02)", "learning rate 0.02, as the method sets it"),
    ],
)
def test_a_run_says_which_rate_it_trains_at(monkeypatch, capsys, tmp_path, method, words):
    arguments = ["train", "digits", "--method", method, "-o", tmp_path / "run", *quick()[:-4]]
    monkeypatch.setattr(sys, "argv", ["wellcond", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0 and f"{method}: {words}" in capsys.readouterr().err
