"""The tables of GLUE, from records with numbers that are known beforehand."""

import csv
import json

import pytest
from scipy import stats

from lab.report.fake_runs import FakeMethod, write_comparison
from wellcond.errors import RunRecordError
from wellcond.lab.report.glue import find_differences, load_glue, rebuild_glue, scores_table
from wellcond.lab.report.page import build_report
from wellcond.lab.report.statistics import compare_paired, holm

METRICS = {"cola": "matthews", "sst2": "accuracy", "stsb": "pearson", "mrpc": "f1"}
VALUES = {"default": (0.10, 0.14, 0.12), "gaussian": (0.2, 0.2, 0.3), "conditioned": (0.30, 0.38, 0.31)}


def write_score(run, task, seed, value, *, status="finished", **final):
    name = METRICS[task]
    config = {"optimizer": {"lr": 4e-5}, "schedule": {}, "training": {}, "task": {"name": "glue", "task": task}}
    config |= {"seed": seed, "model": {"encoder": f"encoder-{run.name}.safetensors"}}
    record = {
        "schema": 1, "kind": "wellcond-run", "recipe": f"glue-{task}", "scale": "tiny", "method": "x", "seed": seed,
        "status": status, "config": config, "config_hash": "0", "data": {"train": 1000, "evaluation": 500},
        "metric": {"name": name, "higher_is_better": True, "percent": True},
        "final": {"step": 9, "epoch": 1.0, "loss": 0.5, name: value, "constant": 0.0, "train_loss": 1, "seconds": 2.0}
        | final,
    }  # fmt: skip
    folder = run / "glue" / task / f"seed-{seed}"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(record))


@pytest.fixture
def comparison(tmp_path):
    """Two tasks; the second is 0.5 above the first."""
    methods = [FakeMethod(label, dict.fromkeys(range(3), 0.9), init=label) for label in VALUES]
    folder = write_comparison(tmp_path / "words", methods, title="Words")
    for label, values in VALUES.items():
        for seed, value in enumerate(values):
            write_score(folder / label / f"seed{seed}", "cola", 0, value, accuracy=0.7)
            write_score(folder / label / f"seed{seed}", "sst2", 0, value + 0.5)
    return folder


def test_a_comparison_has_means_deviations_and_the_average_of_its_tasks(comparison):
    table = scores_table(load_glue(comparison))
    assert table.header == ("method", "SST-2", "CoLA", "Avg.")
    assert table.rows[0] == ("default", "62.00 ± 2.00", "12.00 ± 2.00", "37.00 ± 2.00")
    assert [row[0] for row in table.rows] == list(VALUES)
    notes = " ".join(table.notes)
    assert "mean of 2 tasks of eight; not run: MNLI, STS-B, RTE, QNLI, QQP, MRPC" in notes
    assert "CoLA Matthews" in notes and "CoLA 1,000/500" in notes and "scale tiny" in notes


def test_differences_are_paired_by_seed_and_corrected(comparison):
    rows = find_differences(load_glue(comparison))
    pairs = [("gaussian", "default"), ("conditioned", "default"), ("conditioned", "gaussian")]
    found = {(task, (row.method, row.baseline)) for (task, _), of_method in rows.items() for row in of_method}
    assert found == {(task, pair) for task in ("cola", "sst2", "average") for pair in pairs}
    plain = {label: dict(enumerate(values)) for label, values in VALUES.items()}
    a, b = plain["conditioned"], plain["default"]
    expected = compare_paired("conditioned", a, "default", b, higher_is_better=True)
    row = rows["cola", "conditioned"][0]
    assert row.mean == pytest.approx(expected.mean) and row.interval == pytest.approx(expected.interval)
    assert row.p == pytest.approx(stats.ttest_rel([a[seed] for seed in a], [b[seed] for seed in a]).pvalue)
    for tasks in (("sst2", "cola"), ("average",)):
        ours = [row for (task, _), of_method in rows.items() if task in tasks for row in of_method]
        assert [row.p_holm for row in ours] == pytest.approx(holm([row.p for row in ours]))
    averages = load_glue(comparison).values("conditioned", "average")
    assert averages == pytest.approx({0: 0.55, 1: 0.63, 2: 0.56})


def test_every_statistic_is_in_the_csv(comparison):
    rebuild_glue(comparison)
    rows = list(csv.DictReader((comparison / "glue.csv").read_text().splitlines()))
    assert len(rows) == 3 * (1 + 1 + 2)  # columns x pairs of a method, the baseline without one
    row = next(row for row in rows if (row["task"], row["method"], row["minus"]) == ("CoLA", "conditioned", "default"))
    assert (row["metric"], row["n"], row["pairs"]) == ("Matthews", "3", "3")
    assert (row["mean"], row["std"], row["difference"]) == ("33.00", "4.36", "+21.00")


def test_the_report_of_a_comparison_leaves_fine_tuning_out(comparison, tmp_path):
    with_scores = build_report(comparison, pictures=False)[0].read_bytes()
    for path in comparison.glob("*/seed*/glue"):
        path.rename(tmp_path / f"{path.parent.parent.name}-{path.parent.name}")
    assert build_report(comparison, pictures=False)[0].read_bytes() == with_scores


def test_a_single_run_has_its_own_table(comparison):
    run = comparison / "default/seed0"
    assert rebuild_glue(run) == run / "glue/glue.md"
    assert scores_table(load_glue(run)).rows == (("default", "60.00", "10.00", "35.00"),)
    assert find_differences(load_glue(run)) == {} and load_glue(run).values("default", "cola") == {0: 0.1}
    assert "CoLA accuracy" in (run / "glue/glue.md").read_text()


def test_what_did_not_finish_is_told_and_in_no_mean(comparison):
    (comparison / "default/seed0/glue/cola/seed-0/run.json").unlink()
    (comparison / "default/seed0/glue/cola/seed-0").rmdir()
    write_score(comparison / "default/seed0", "cola", 0, 0.9, status="diverged")
    scores = load_glue(comparison)
    assert scores.values("default", "cola") == {1: 0.14, 2: 0.12}
    assert set(scores.values("default", "average")) == {1, 2}  # an average of fewer tasks would be no pair
    notes = " ".join(scores_table(scores).notes)
    assert "CoLA: of 9 runs 1 diverged; they are in no mean" in notes


def test_a_folder_without_scores_is_refused(tmp_path):
    folder = write_comparison(tmp_path / "words", [FakeMethod("default", {0: 0.9})])
    for place in (folder, folder / "default/seed0", tmp_path):
        with pytest.raises(RunRecordError, match="wellcond glue first"):
            rebuild_glue(place)
