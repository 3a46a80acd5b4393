"""`wellcond train`, `compare`, `demo`, `report` and `recipes`, as a user runs them."""

import io
import json
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from lab.report.fake_runs import FakeMethod, write_comparison
from lab.small import SETTINGS, record
from wellcond.cli.experiments import describe_demo
from wellcond.cli.main import main
from wellcond.errors import WellcondError
from wellcond.init.apply import METHODS
from wellcond.lab.comparison import Todo
from wellcond.lab.recipe import load_recipe
from wellcond.lab.report.page import build_report

pytestmark = pytest.mark.processes

CHANGES = [part for override in SETTINGS for part in ("--set", override)]


@pytest.fixture
def wellcond(run):
    """The command in this process, where torch is imported: (exit code or message, standard output)."""
    return run


@pytest.fixture
def fails(wellcond):
    """The message of a command that must fail."""

    def call(*arguments):
        message, _ = wellcond(*arguments)
        assert isinstance(message, str) and "Traceback" not in message
        return message

    return call


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder of a comparison, and what the command printed; pools of processes have tests/lab/test_pool.py."""
    folder, out, err = tmp_path_factory.mktemp("compared") / "digits", io.StringIO(), io.StringIO()
    arguments = ["compare", "--recipe", "digits", "-o", folder, "--jobs", 1, *CHANGES]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["wellcond", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 0, err.getvalue()
    return folder, out.getvalue(), err.getvalue()


def test_a_comparison_runs_everything_and_reports(compared):
    folder, output, errors = compared
    assert {path.parent.name for path in folder.glob("*/seed*/run.json")} == {"seed0", "seed1"}
    for method in ("default", "conditioned"):
        for seed in (0, 1):
            assert record(folder / method / f"seed{seed}")["status"] == "finished"
            assert f"{method}, seed {seed}: finished, accuracy" in errors
    assert "conditioned" in output and "report.html" in output
    assert "<svg" in (folder / "report/report.html").read_text("utf-8")
    assert "conditioned" in (folder / "report/report.md").read_text()


def test_a_comparison_says_first_what_its_seeds_can_show(tmp_path):
    finals = {"default": {0: 0.9, 1: 0.91, 2: 0.92}, "conditioned": {0: 0.93, 1: 0.945, 2: 0.95}}
    write_comparison(tmp_path, [FakeMethod(label, values) for label, values in finals.items()], conditioning=False)
    recipe, _ = load_recipe("digits")
    [line] = Todo(recipe, recipe.methods, tuple(range(10)), tmp_path).foresee_power()
    assert line.startswith("10 seeds can show a true difference of 0.29 points (power 80 %") and "over 3 seeds" in line
    assert Todo(recipe, recipe.methods, (0, 1, 2), tmp_path / "nothing").foresee_power() == []


def test_a_comparison_picks_up_where_it_stopped(compared, tmp_path, monkeypatch, capfd):
    folder = shutil.copytree(compared[0], tmp_path / "digits")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/seed*/run.json")}
    more = ["--methods", "default,polar", "--seeds", "0,1", "--jobs", "1", "--json", "--no-report"]
    monkeypatch.setattr(sys, "argv", ["wellcond", "compare", "--recipe", "digits", "-o", str(folder), *more, *CHANGES])
    with pytest.raises(SystemExit) as end:
        main()
    output, errors = capfd.readouterr()
    assert end.value.code == 0 and errors == ""
    rows = json.loads(output)["runs"]
    assert sorted((row["method"], row["seed"]) for row in rows) == [
        ("default", 0), ("default", 1), ("polar", 0), ("polar", 1)
    ]  # fmt: skip
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())
    listed = json.loads((folder / "comparison.json").read_text())
    assert [row["label"] for row in listed["methods"]] == ["default", "conditioned", "polar"]


def test_runs_of_train_are_those_of_a_comparison(wellcond, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # as in the job array of docs/cluster.md
    assert wellcond("train", "digits", "--method", "identity(lam=2)", "-q", *CHANGES)[0] == 0
    trained = tmp_path / "runs/digits-tiny/identity-lam-2/seed0/run.json"
    before = trained.stat().st_mtime_ns
    chosen = ["--methods", "default,identity(lam=2)", "--seeds", "1", "--jobs", "1", "--no-report"]
    assert wellcond("compare", "--recipe", "digits", *chosen, *CHANGES)[0] == 0
    assert trained.stat().st_mtime_ns == before and record(trained.parents[2] / "default/seed0")["status"] == "finished"
    assert wellcond("report", tmp_path / "runs/digits-tiny", "--no-pictures")[0] == 0


def test_train_takes_the_label_of_a_method_of_the_recipe(wellcond, tmp_path):
    mine = [*CHANGES, "--set", "methods=[default, {label: mine, init: conditioned}]"]
    assert wellcond("train", "digits", "--method", "mine", "-q", "-o", tmp_path / "run", *mine)[0] == 0
    assert record(tmp_path / "run")["method"] == "mine"


def test_report_rebuilds_the_same_bytes(compared, wellcond):
    folder, *_ = compared
    before = {path: path.read_bytes() for path in (folder / "report").rglob("*") if path.is_file()}
    code, output = wellcond("report", folder)
    assert code == 0 and "report.html" in output
    assert len(before) > 10 and all(path.read_bytes() == content for path, content in before.items())


def test_other_settings_in_the_same_comparison_are_refused(compared, fails):
    folder, *_ = compared
    before = (folder / "comparison.json").read_bytes()
    told = fails("compare", "--recipe", "digits", "-o", folder, "--seeds", "2,3", *CHANGES, "--set", "optimizer.lr=0.1")
    lr = record(folder / "default/seed0")["config"]["optimizer"]["lr"]
    assert f"under other settings (optimizer.lr: {lr} there, 0.1 here)" in " ".join(told.split())
    assert (folder / "comparison.json").read_bytes() == before


def test_a_run_that_fails_early_is_reported_beside_the_others(wellcond, tmp_path, monkeypatch):
    def fails(context):
        raise WellcondError("no memory for so many heads")

    monkeypatch.setitem(METHODS, "mimetic", fails)
    chosen = ["--methods", "default,mimetic", "--seeds", "1", "--jobs", "1", "--json"]
    code, output = wellcond("compare", "--recipe", "digits", "-o", tmp_path, *chosen, "--no-report", *CHANGES)
    rows = {row["status"]: row for row in json.loads(output)["runs"]}
    assert code == 1 and set(rows) == {"finished", "failed"}
    assert "no memory for so many heads" in rows["failed"]["reason"]
    build_report(tmp_path, pictures=False)
    assert "failed" in (tmp_path / "report/report.md").read_text()


def test_the_demo_ends_in_plain_words_and_the_next_command():
    scores = {"default(library=true)": 0.8, "default": 0.91, "conditioned": 0.93, "gaussian": 0.925, "calibrated": 0.97}
    records = [{"status": "finished", "method": name, "test": {"accuracy": score}} for name, score in scores.items()]
    records.append({"status": "diverged", "method": "tokens(embeddings=3, positions=50)", "test": None})
    first, scale, control, following = describe_demo(records)
    assert "know whether it helped" in first and following.endswith("--data FOLDER_OF_IMAGES")
    assert "80.0 %" in scale and "91.0 %" in scale and scale.startswith("1. ")
    assert "93.0 %" in control and "92.5 %" in control and control.startswith("2. ")  # no sentence without its numbers
