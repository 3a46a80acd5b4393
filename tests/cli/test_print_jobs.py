"""`wellcond compare --print-jobs`: lines for a shell that do what compare would do."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
import typer

from lab.held_runs import HELD
from lab.small import SETTINGS, assert_same_run, logs, record, run
from patience import PATIENCE
from wellcond.cli.experiments import compare, job_command, train
from wellcond.cli.main import main
from wellcond.cli.report import report
from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.methods import MethodSettings
from wellcond.lab.train.run import Job

pytestmark = pytest.mark.processes

CHANGES = [part for override in SETTINGS for part in ("--set", override)]
ENVIRONMENT = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
METHODS = "default,identity(lam=2)+conditioned"


@pytest.fixture
def printed(monkeypatch, capsys):
    """The lines for a comparison, and what is said about them."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["wellcond", "compare", *map(str, arguments), "--print-jobs"])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
        return capsys.readouterr()

    return call


@pytest.mark.slow
def test_the_lines_make_the_comparison_that_compare_makes(printed, tmp_path, capsys):
    folder, other = tmp_path / "it's a folder", tmp_path / "other"
    chosen = ["--methods", METHODS, "--seeds", "1", "--cpu", "--set", "optimizer.lr=5e-4"]
    output, told = printed("--recipe", "digits", "-o", folder, *CHANGES, *chosen)
    lines = output.splitlines()
    assert len(lines) == 2 and told == f"2 runs; when they are done: wellcond report {shlex.quote(str(folder))}\n"
    assert list(folder.iterdir()) == [folder / "comparison.json"]  # nothing has run
    for line in lines:  # each in a shell of its own, somewhere else, as a batch system does
        done = subprocess.run(["bash", "-c", line], cwd="/", env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    report(folder, pictures=False)
    assert "conditioned" in (folder / "report/report.md").read_text()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("run.json")}
    capsys.readouterr()
    for place in (folder, other):
        with pytest.raises(typer.Exit) as end:
            compare("digits", methods=METHODS, seeds="1", cpu=True, set=[*SETTINGS, "optimizer.lr=5e-4"], folder=place,
                    json=True, report=False, jobs="1")  # fmt: skip
        assert end.value.exit_code == 0
        rows = json.loads(capsys.readouterr().out)["runs"]
        assert [row["status"] for row in rows] == ["finished", "finished"]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("run.json")} == before and len(before) == 2
    for path in before:
        assert_same_run(path.parent, other / path.parent.relative_to(folder))
        assert record(path.parent)["config"] == record(other / path.parent.relative_to(folder))["config"]


@pytest.mark.slow
def test_a_preempted_line_goes_on_when_it_is_repeated(printed, hold, tmp_path):
    chosen = ["--seeds", "1", "--cpu", "--set", HELD, "--trust-local-code"]
    [line, _] = printed("--recipe", "digits", "-o", tmp_path, *CHANGES, *chosen).out.splitlines()
    shell = ["bash", "-c", f"trap '' TERM; {line}"]  # as docs/cluster.md says
    process = subprocess.Popen(shell, env=ENVIRONMENT | hold.environment, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, process_group=0)  # fmt: skip
    hold.wait_for(1, process)
    os.killpg(process.pid, signal.SIGTERM)  # what Slurm sends first, to every process of the step
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and record(tmp_path / "default/seed0")["status"] == "interrupted"
    run(shell, **ENVIRONMENT)
    assert record(tmp_path / "default/seed0")["status"] == "finished"
    assert logs(tmp_path / "default/seed0")["steps"][-1]["step"] == 24


def test_own_data_scale_and_json(printed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my rows.csv").write_text("review,liked\n" + "good,yes\nbad,no\n" * 20)
    data = ["--data", "my rows.csv", "--input", "review", "--label", "liked"]
    chosen = ["--seeds", "3,4", "--json", "--methods", "default", "-o", "runs"]
    output, errors = printed("--recipe", "lra-text", "--scale", "tiny", *data, *chosen)
    lines = json.loads(output)["jobs"]
    assert errors == "" and len(lines) == 2
    words = shlex.split(lines[1])
    assert words[:3] == ["cd", str(tmp_path), "&&"] and words[words.index("--seed") + 1] == "4"
    assert words[words.index("--scale") + 1] == "tiny" and str(tmp_path / "runs/default/seed4") in words
    assert any(word.startswith("data={") and str(tmp_path / "my rows.csv") in word for word in words)


METHOD_FIELDS = [
    {"label": "it's mine; rm -rf $HOME", "condition": "identity", "condition_options": {"lam": 1e-05}},
    {"label": "two\nlines", "init": "conditioned"},
    {"label": "polar", "init": "default", "condition": "balanced", "projections": "qk"},
]


@pytest.mark.parametrize("fields", METHOD_FIELDS, ids=lambda fields: fields["label"].split()[0])
def test_a_method_of_any_label_arrives_as_it_is(tmp_path, monkeypatch, fields):
    recipe, base = load_recipe("digits", overrides=SETTINGS)
    method = recipe.at_tuned(MethodSettings.model_validate(fields))
    job = Job(recipe, method, 5, tmp_path / "run", base=base, cpu=True, local_code=True)
    words = shlex.split(job_command(job, "digits", scale=None, overrides=SETTINGS).partition(" && ")[2])
    words = words[words.index("train") + 1 :]
    assert words[0] == "digits" and words[-2:] == ["--cpu", "--trust-local-code"]
    changes = [words[number + 1] for number, word in enumerate(words) if word == "--set"]
    found = []
    monkeypatch.setattr("wellcond.cli.runs.run_jobs", lambda jobs, *rest, **options: found.extend(jobs) or _Nothing())
    with pytest.raises(typer.Exit):
        train("digits", None, 5, set=changes, folder=tmp_path / "run", cpu=True, trust_local_code=True, quiet=True)
    [made] = found
    assert made.method == method and made.recipe.config(method, 5) == job.recipe.config(method, 5)


class _Nothing:
    failures, records, interrupted = (), (), False
