"""`wellcond glue`, as a user runs it."""

import io
import json
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from lab.small import command, run
from lab.tasks.glue.helpers import edit_record, pretrain, write_glue
from wellcond.cli.main import main
from wellcond.lab.report.glue import load_glue, rebuild_glue

STILL = """
from wellcond.cli.main import main
from wellcond.lab.models.crammed_bert import CrammedBertClassifierOptions as Options

Options.model_fields["dropout"].default = 0.0
Options.model_rebuild(force=True)
main()
"""
"""The command, with a model that does not drop anything at random."""


@pytest.fixture(scope="module", autouse=True)
def own_caches(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets_cache")))
        patch.setenv("WELLCOND_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def call(*arguments):
    """Exit code or message, standard output and standard error of the command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["wellcond", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
    _, said, message = err.getvalue().rpartition("error: ")
    return f"error: {message}" if said and caught.value.code == 2 else caught.value.code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison of two methods with two seeds, of which the last did not finish; and tasks."""
    folder = tmp_path_factory.mktemp("comparison")
    for method in ("default", "identity"):
        for seed in (0, 1):
            pretrain(folder / method / f"seed{seed}", "crammed", method, seed, folder / "text.txt")
    edit_record(folder / "identity/seed1", lambda record: record.update(status="diverged"))
    methods = [{"label": name, "slug": name} for name in ("default", "identity")]
    described = {
        "schema": 1,
        "kind": "wellcond-comparison",
        "title": "Words",
        "methods": methods,
        "baseline": "default",
    }
    (folder / "comparison.json").write_text(json.dumps(described))
    data = write_glue(tmp_path_factory.mktemp("mirror") / "nyu-mll/glue")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WELLCOND_DATA", str(data.parents[1]))
        yield folder


@pytest.fixture(scope="module")
def scored(compared):
    return compared, *call("glue", compared, "--tasks", "cola,stsb", "--jobs", 1, "--cpu")


def test_a_comparison_is_scored_and_shown(scored):
    folder, code, out, err = scored
    assert code == 0 and "CoLA" in out and "Avg." in out and "glue.md" in out
    assert err.count(": finished, ") == 6
    scores = load_glue(folder)
    assert {task: c.metric.name for task, c in scores.tasks.items()} == {"stsb": "pearson", "cola": "matthews"}
    assert sum(len(comparison.runs) for comparison in scores.tasks.values()) == 6


def test_the_tables_follow_from_the_records_alone(scored, tmp_path):
    folder = scored[0]
    copy = shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "glue.*"))
    rebuild_glue(copy)
    for name in ("glue.md", "glue.csv"):
        assert (copy / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.slow
def test_two_processes_score_what_one_does(compared, tmp_path):
    folder, found, script = compared, [], str(tmp_path / "still.py")
    Path(script).write_text(STILL)
    for processes in (1, 2):
        copy = shutil.copytree(
            folder / "default/seed0", tmp_path / str(processes), ignore=shutil.ignore_patterns("glue")
        )
        *launch, _, _ = command(processes=processes)
        run([*launch, script, "glue", str(copy), "--tasks", "stsb,cola", "--jobs", "1", "--cpu", "-q"])
        scores = load_glue(copy)
        found.append({task: scores.values("default", task)[0] for task in scores.tasks})
    assert found[0] == pytest.approx(found[1], abs=1e-3)
