"""`wellcond reproduce`, as a user runs it."""

import csv
import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

from wellcond.cli.main import main
from wellcond.errors import RunError
from wellcond.lab.plan import write_comparison
from wellcond.lab.pool import run_jobs
from wellcond.lab.reproduce.catalogue import Entry, catalogue, find_entry
from wellcond.lab.reproduce.compare_with_paper import _averaged, outcome_tables, write_outcome
from wellcond.lab.reproduce.computed import SIZES, count
from wellcond.lab.reproduce.plan import PlanOptions, make_plan
from wellcond.lab.reproduce.studies import Collection, find_study, may_be_paired
from wellcond.lab.train import glue

RESULTS = Path(__file__).parents[3] / "results"
ENTRIES = catalogue().entries
SHORT = ("training.length={steps: 3}", "evaluation.every={steps: 2}", "tracking.weights_every={steps: 3}")


def call(*arguments):
    """Exit code or message, and standard output."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["wellcond", *map(str, arguments)])
        try:
            main()
        except SystemExit as ended:
            _, said, message = err.getvalue().rpartition("error: ")
            return f"error: {message}" if said and ended.code == 2 else ended.code, out.getvalue()
    return 0, out.getvalue()


@pytest.fixture(scope="module")
def pets():
    """C-T2 without the column that needs images from elsewhere."""
    entry = ENTRIES["C-T2"]
    return entry.model_copy(update={"columns": {"Pets": entry.columns["Pets"]}})


@pytest.fixture(scope="module")
def ran(pets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reproduce")
    plan = make_plan("C-T2", pets, "tiny", PlanOptions(folder, overrides=SHORT, seeds=(0, 1, 2)))
    [study] = plan.studies
    ended = []
    write_comparison(study.folder, study.recipe, study.methods, study.seeds)
    run_jobs(study.jobs, num_workers=1, observer=lambda job, event: ended.append(event["event"]))
    assert ended.count("end") == len(study.jobs) == 12
    return plan, folder


def test_what_is_there_is_not_repeated(ran):
    plan, _ = ran
    assert plan.missing == 0
    told = []
    run_jobs(plan.studies[0].jobs, num_workers=1, observer=lambda job, event: told.append(event["event"]))
    assert told == ["end"] * 12


def test_the_papers_numbers_stand_beside_ours(ran, pets):
    _, folder = ran
    [table] = outcome_tables("C-T2", pets, "tiny", Collection(folder))
    rows = {row[1]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert (rows["default"]["paper"], rows["mimetic"]["paper"]) == ("26.7", "47.7")
    assert rows["conditioned"]["paper's gain"] == "+21" and rows["conditioned"]["n"] == "3"
    assert rows["gaussian (scale control)"]["paper"] == "–"
    assert rows["conditioned"]["agreement"] in ("within", "below", "above")
    assert any("digits" in note and "paper: 5.72 M" in note for note in table.notes)


def test_tables_are_written(ran, pets, tmp_path):
    _, folder = ran
    [table] = write_outcome("C-T2", pets, "tiny", Collection(folder), tmp_path)
    assert table.name == "c-t2" and {"C-T2.md", "c-t2.csv"} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("quantity", ["loss", "match", "kappa", "sigma_min"])
def test_figures_are_drawn_from_points(ran, quantity, tmp_path):
    _, folder = ran
    columns = {"Digits": {"study": "sets-pets", "quantity": quantity, "of": "both"}}
    rows = {"default": "default", "conditioned": "conditioned"}
    entry = Entry.model_validate({"title": "T", "rows": rows, "columns": columns})
    write_outcome("C-F0", entry, "tiny", Collection(folder), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"C-F0.md", "c-f0.csv", "c-f0-points.csv", "c-f0.svg"} <= names
    assert ("c-f0-linear.svg" in names) is (quantity in ("kappa", "sigma_min"))
    for row in csv.DictReader((tmp_path / "c-f0.csv").read_text().splitlines()):
        numbers = [float(text) for name, text in row.items() if name not in ("panel", "quantity", "series") and text]
        assert len(numbers) >= 3
    points = (tmp_path / "c-f0-points.csv").read_text().splitlines()
    assert points[0] == "figure,panel,series,seed,step,epoch,value,scale" and len(points) > 6


@pytest.mark.parametrize(("id", "words"), [("S-T8", "3Dd = 3072"), ("S-T9", "1 / (2D)"), ("S-F1", "activation")])
def test_what_is_computed_needs_no_runs(id, words, tmp_path):
    code, shown = call("reproduce", id, "--folder", tmp_path)
    assert code == 0 and words in shown
    assert words in (tmp_path / id / f"{id}.md").read_text().replace("\\", "")


def test_the_activation_form_adds_an_operation_for_each_entry():
    n, width, d = SIZES["paper"]
    found = count((n, width, d), "activation")
    assert found["matmul"] == 6 * n * width * d
    as_one = found["elementwise"] / 2  # a multiplication and an addition, which the paper counts as one operation
    assert as_one == 3 * n * d and as_one / found["matmul"] == pytest.approx(1 / (2 * width), rel=1e-9)


def test_a_plan_costs_nothing(tmp_path):
    code, shown = call("reproduce", "C-T1", "--dry-run", "--folder", tmp_path / "new", "--json")
    [plan] = json.loads(shown)
    assert code == 0 and not (tmp_path / "new").exists()
    assert [row["study"] for row in plan["rows"]] == ["vit", "deit", "swin", "xcit", "davit"]
    assert plan["notes"][-1] == "200 of 200 runs to do."  # five models, four methods, ten seeds: as the records


def test_committed_records_are_printed():
    code, shown = call("reproduce", "C-T1", "--records", RESULTS, "--json")
    rows = {(row["column"], row["method"]): row for row in json.loads(shown)[0]["rows"]}
    assert code == 0 and rows["ViT-B", "conditioned"]["our gain [95 % interval]"] == "+0.75 [+0.02, +1.48]"
    assert rows["ViT-B", "conditioned"]["agreement"] == "below"  # 1.1 % of the error, the paper's 6.1 %


def test_what_is_computed_has_a_dry_run_too():
    code, shown = call("reproduce", "S-T8", "--dry-run")
    assert code == 0 and "computed in a moment" in shown


def test_rows_under_other_settings_are_not_paired():
    evidence = RESULTS / "evidence"
    one_rate, tuned = find_study(evidence / "ablations/lra"), find_study(evidence / "listops")
    without = find_study(evidence / "ablations/lra-without-norm")
    assert may_be_paired(one_rate, without, catalogue().variants["without-norm"].settings)
    assert not may_be_paired(one_rate, without, ())  # the norms themselves differ
    assert not may_be_paired(
        tuned, without, catalogue().variants["without-norm"].settings
    )  # the methods have rates of their own
    _, shown = call("reproduce", "S-T12", "--records", RESULTS, "--json")
    [row] = [row for row in json.loads(shown)[0]["rows"] if row["method"] == "spectral - LayerNorm"]
    assert row["our gain [95 % interval]"] == "-1.54 [-3.32, +0.24]" and row["agreement"] == "within"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["C-T1", "--scale", "huge"], "huge"),
        (["C-T1", "--methods", "polar"], "expected some of default, mimetic"),
        (["C-T1", "--scale", "paper"], "expects a GPU, and there is none here"),
        (["D-T1"], "D-T1"),
    ],
)
def test_bad_requests_are_explained(arguments, message, tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _ = call("reproduce", *arguments, "--folder", tmp_path / "new")
    assert message in str(code) and not (tmp_path / "new").exists()


def test_what_cannot_be_written_is_explained(tmp_path):
    (tmp_path / "file").touch()
    code, _ = call("reproduce", "S-F1", "--folder", tmp_path / "file")
    assert "could not be written" in str(code) and len(list(tmp_path.rglob("*"))) == 1


def test_runs_under_other_settings_are_not_taken_for_these(ran, pets):
    _, folder = ran
    with pytest.raises(RunError, match="under other settings"):
        make_plan("C-T2", pets, "tiny", PlanOptions(folder, overrides=("optimizer.lr=0.5",)))


@pytest.mark.slow
def test_the_list_looks_where_runs_go(tmp_path):
    plan = make_plan("C-T2", ENTRIES["C-T2"], "tiny", PlanOptions(tmp_path))
    job = plan.studies[0].jobs[0]
    job.folder.mkdir(parents=True)
    metric = {"name": "accuracy", "higher_is_better": True, "percent": True}
    stored = {"schema": 1, "kind": "wellcond-run", "method": "default", "seed": 0, "status": "finished"}
    (job.folder / "run.json").write_text(json.dumps(stored | {"metric": metric, "final": {"accuracy": 0.5}}))
    _, shown = call("reproduce", "--list", "--json", "--folder", tmp_path)
    listed = {row["id"]: row["runs done"] for row in json.loads(shown)[0]["rows"]}
    assert listed["C-T2"].startswith("1/")


@pytest.mark.parametrize(
    ("id", "row"),
    [("S-T5", "lambda = 2"), ("S-T11", "lambda = 4"), ("A-partial", "only Q"), ("A-thm", "theorem 3.5 per head")],
)
def test_committed_ablations_are_found(id, row):
    _, shown = call("reproduce", id, "--records", RESULTS, "--json")
    assert {r["method"]: r["ours"] for r in json.loads(shown)[0]["rows"]}[row] != "–"


def test_an_average_of_some_tasks_has_the_papers_over_the_same():
    _, entry = find_entry("C-T5")
    some = SimpleNamespace(glue=SimpleNamespace(tasks=["sst2", "rte", "mrpc", "cola"]))  # no such records are committed
    tasks, [part] = _averaged(entry, "Avg.", some), entry.parts
    assert tasks == ("SST-2", "RTE", "MRPC", "CoLA") and _averaged(entry, "RTE", some) == ("RTE",)
    assert f"{part.mean('conditioned', tasks):.1f}" == "71.5" and part.gain("conditioned", "default", *tasks) == 1.2


def test_the_list_shows_every_id():
    code, shown = call("reproduce", "--list", "--json")
    listed = {row["id"]: row["runs done"] for row in json.loads(shown)[0]["rows"]}
    assert code == 0 and set(listed) == set(ENTRIES)
    assert listed["S-T9"] == "–" and listed["C-T1"] == "0/200"


KINDS = [f"C-T{number}" for number in range(1, 14)]
KINDS += [
    "C-F2",
    "C-F3",
    "C-F4",
    "S-T6",
    "S-T7",
    "S-T10",
    "S-T12",
    "S-F3",
    "S-F17",
    "A-norm",
    "A-qknorm",
    "A-roles",
    "A-ws",
]


def test_every_study_is_run_by_some_of_these():
    def runs(ids):
        plans = (make_plan(id, ENTRIES[id], "tiny", PlanOptions(Path("nowhere"))) for id in ids)
        return {study.name for plan in plans for study in plan.studies}

    assert runs(KINDS) == runs(ENTRIES)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("WELLCOND_DATA"), reason="WELLCOND_DATA names no mirror of the data sets")
@pytest.mark.parametrize("id", KINDS)
def test_every_kind_of_entry_runs(id, tmp_path, monkeypatch):
    changes = [part for change in SHORT for part in ("--set", change)]
    plan_glue = glue.plan_glue  # with few rows: each run is fine-tuned on eight tasks
    monkeypatch.setattr(glue, "plan_glue", lambda folder, **options: plan_glue(folder, **options | {"limit": 40}))
    code, _ = call("reproduce", id, "--folder", tmp_path, "--seeds", 1, "--jobs", 1, "--quiet", *changes)
    assert code == 0 and (tmp_path / id / f"{id}.md").is_file()
