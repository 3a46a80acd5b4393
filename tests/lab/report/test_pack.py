"""Packed runs: small, sealed, and the same tables."""

import json
import math
import shutil
from pathlib import Path

import pytest

from lab.report.fake_runs import (
    ACCURACY,
    PERPLEXITY,
    FakeMethod,
    usual_methods,
    write_comparison,
    write_run,
    write_with_samples,
)
from wellcond.errors import RunError, RunRecordError
from wellcond.lab.load_recipe import load_recipe
from wellcond.lab.plan import write_comparison as write_run_list
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.figures import build_figures
from wellcond.lab.report.load_runs import load_comparisons
from wellcond.lab.report.pack import MOST_POINTS, pack, pack_steps, share
from wellcond.lab.report.page import gather, render_markdown
from wellcond.lab.report.records import Run, merge
from wellcond.lab.report.tuning import find_tuning
from wellcond.lab.run_records import seal


def complete(methods):
    for method in methods:
        method.statuses = {seed: status for seed, status in method.statuses.items() if status != "running"}
    return methods


def page(folder):
    [comparison] = load_comparisons(folder)
    analysis = analyse(comparison)
    return render_markdown(gather(analysis))


@pytest.mark.parametrize("metric", [None, PERPLEXITY], ids=["accuracy", "perplexity"])
def test_every_table_finding_and_caption_is_the_same(tmp_path, metric):
    methods = complete(usual_methods())
    if metric:
        methods = [FakeMethod("default", {0: 33.1234567, 1: 34.9}), FakeMethod("polar", {0: 31 / 3, 1: 1e9 / 7})]
    full = write_comparison(tmp_path / "full" / "one", methods, **({"metric": metric} if metric else {}))
    [home] = pack(tmp_path / "full", tmp_path / "packed")
    assert home == tmp_path / "packed" / "one" and page(home) == page(full)
    files = sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())
    runs = sum(len(method.finals) for method in methods)
    assert len([name for name in files if "/seed" in name]) == runs and len(files) == runs + 2
    assert {"comparison.json", "report/report.md"} <= set(files)
    assert sum(path.stat().st_size for path in home.rglob("seed*.json")) < 7000 * runs
    assert "](" not in (home / "report" / "report.md").read_text()  # no link to what is not there


def test_curves_are_close_enough_to_plot(tmp_path):
    full = write_comparison(tmp_path / "full", complete(usual_methods()))
    [home] = pack(full, tmp_path / "packed")
    before, after = (build_figures(analyse(load_comparisons(folder)[0])) for folder in (full, home))
    assert [figure.name for figure in before] == [figure.name for figure in after] and len(before) == 6
    panels = [[panel for figure in figures for panel in figure.panels] for figures in (before, after)]
    for one, other in zip(*panels, strict=True):
        assert one.name == other.name
        for row, packed in zip(one.rows, other.rows, strict=True):
            assert (row.series, row.seed) == (packed.series, packed.seed)
            assert math.isclose(row.value, packed.value, rel_tol=5e-3, abs_tol=1e-4) or str(row.value) == str(
                packed.value
            )


def test_many_steps_are_thinned_to_means():
    rows = [{"step": at, "epoch": at / 10, "loss": float(at)} for at in range(1, 1001)]
    packed = Run(Path("seed0"), {"method": "a", "seed": 0, "status": "finished"}, {"steps": pack_steps(rows)}).steps
    assert len(packed) <= MOST_POINTS and packed[-1]["step"] == 1000
    assert packed[0]["loss"] == pytest.approx(sum(range(1, packed[0]["step"] + 1)) / packed[0]["step"])


def test_sharing_loses_nothing():
    records = [
        {"config": {"lr": 1, "options": {}}, "seed": 0},
        {"config": {"lr": 1, "options": {"std": 2.5}}, "seed": 1},
        {"config": {"lr": 1, "options": {}, "late": None}, "seed": 2},
        {"config": {"lr": 1}, "seed": 3},
    ]
    shared, rests = share(records)
    assert shared == {"config": {"lr": 1}}
    assert [merge(shared, rest) for rest in rests] == records
    older = {"absent": [["config", "lr"]], "config": {"late": 2}}  # what most shared, but this one did not have
    assert merge(shared, older) == {"config": {"late": 2}}


def test_a_changed_run_or_comparison_is_refused(tmp_path):
    pack(write_comparison(tmp_path / "full", complete(usual_methods())), tmp_path / "packed")
    path = tmp_path / "packed" / "default" / "seed0.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"final": stored["final"] | {"accuracy": 0.99}}))
    with pytest.raises(RunRecordError, match=r"seed0.json: was changed after it was written"):
        load_comparisons(tmp_path / "packed")
    path.write_text(json.dumps(stored))
    described = json.loads((tmp_path / "packed" / "comparison.json").read_text())
    described.pop("checksum")
    described["shared"]["config"]["optimiser"]["lr"] = 1.0
    (tmp_path / "packed" / "comparison.json").write_text(json.dumps(seal(described)))
    with pytest.raises(RunRecordError, match="was packed with another comparison.json"):
        load_comparisons(tmp_path / "packed")


def test_impossible_scores_are_refused_in_packed_runs_too(tmp_path):
    pack(write_comparison(tmp_path / "full", complete(usual_methods())), tmp_path / "packed")
    path = tmp_path / "packed" / "default" / "seed0.json"
    stored = json.loads(path.read_text())
    stored.pop("checksum")
    stored["final"]["accuracy"] = 1.7
    path.write_text(json.dumps(seal(stored)))
    with pytest.raises(RunRecordError, match=r"expected 'final.accuracy' to be a number from 0 to 1"):
        load_comparisons(tmp_path / "packed")


def test_what_cannot_be_packed(tmp_path):
    methods = usual_methods()
    folder = write_comparison(tmp_path / "full", methods)
    assert any("running" in method.statuses.values() for method in methods)
    with pytest.raises(RunRecordError, match="is of a run that is running"):
        pack(folder, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    folder = write_comparison(tmp_path / "whole", complete(usual_methods()))
    for wrong in (folder, folder / "deeper", tmp_path):
        with pytest.raises(RunRecordError, match="Give another folder"):
            pack(folder, wrong)
    [home] = pack(folder, tmp_path / "packed")
    with pytest.raises(RunRecordError, match="is packed already"):
        pack(home, tmp_path / "again")
    with pytest.raises(RunRecordError, match="holds a comparison that is not packed"):
        pack(folder, write_comparison(tmp_path / "other", complete(usual_methods())))


def test_packing_again_replaces_runs_and_keeps_what_is_not_its_own(tmp_path):
    full = write_comparison(tmp_path / "full", complete(usual_methods()))
    [home] = pack(full, tmp_path / "packed")
    (home / "README.md").write_text("mine")
    pack(write_comparison(tmp_path / "inner", complete(usual_methods()[:2])), home / "inner")
    shutil.rmtree(full / "polar")
    pack(full, home)
    assert not (home / "polar" / "seed0.json").exists() and (home / "default" / "seed0.json").exists()
    assert (home / "README.md").read_text() == "mine" and len(load_comparisons(home)) == 2


def test_what_was_packed_stays_if_it_cannot_be_replaced(tmp_path, monkeypatch):
    full = write_comparison(tmp_path / "full", complete([FakeMethod("default", {0: 0.9, 1: 0.8})]))
    [home] = pack(full, tmp_path / "packed")
    kept = sorted(home.rglob("seed*.json"))

    def full_disk(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("wellcond.lab.report.pack.write_atomically", full_disk)
    with pytest.raises(OSError, match="No space left"):
        pack(full, tmp_path / "packed")
    assert sorted(home.rglob("seed*.json")) == kept and len(kept) == 2


def test_other_files_named_like_packed_runs_are_left_alone(tmp_path):
    full = write_comparison(tmp_path / "full", complete([FakeMethod("default", {0: 0.9, 1: 0.8})]))
    for folder in (full, tmp_path / "packed"):
        (folder / "notes").mkdir(parents=True)
        (folder / "notes" / "seeds.json").write_text("{}")
    assert len(load_comparisons(full)[0].runs) == 2
    pack(str(full), tmp_path / "packed")
    assert (tmp_path / "packed" / "notes" / "seeds.json").exists()


def test_runs_of_train_in_folders_of_any_name(tmp_path):
    for label, value in (("default", 0.8), ("polar", 0.9)):
        made = write_comparison(tmp_path / label, [FakeMethod(label, {0: value})])
        (made / "comparison.json").unlink()
        shutil.move(made / label / "seed0", tmp_path / "full" / f"my {label}")
    pack(tmp_path / "full", tmp_path / "packed")
    [comparison] = load_comparisons(str(tmp_path / "packed"))
    assert comparison.methods == ("default", "polar") and comparison.of("polar")[0].value == 0.9


def test_runs_of_train_without_a_comparison(tmp_path):
    for label in ("default", "polar"):
        write_run(tmp_path / "teachers", FakeMethod(label, {0: 0.9}), 0)
    pack(tmp_path / "teachers", tmp_path / "packed")
    [comparison] = load_comparisons(tmp_path / "packed")
    assert comparison.methods == ("default", "polar") and comparison.of("polar")[0].value == 0.9


def test_the_slug_of_a_record_leads_nowhere_else(tmp_path):
    folder = write_comparison(tmp_path / "full", [FakeMethod("default", {0: 0.9})])
    path = folder / "default" / "seed0" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"slug": "../../../out"}))
    with pytest.raises(RunRecordError, match=r"would be written to ../../../out/seed0.json"):
        pack(folder, tmp_path / "packed")
    assert not (tmp_path / "out").exists() and not list(tmp_path.rglob("seed0.json"))


def test_samples_of_one_seed_are_kept(tmp_path):
    methods = [FakeMethod(label, {0: 9.0, 1: 8.0}) for label in ("default", "polar")]
    said = [{"prompt": "Once", "text": "Once upon"}]
    write_with_samples(tmp_path / "full", methods, PERPLEXITY, lambda record: said)
    [home] = pack(tmp_path / "full", tmp_path / "packed")
    assert page(home) == page(tmp_path / "full") and "Once upon" in page(home)
    assert "Once upon" not in (home / "default" / "seed1.json").read_text()


def test_the_runs_of_a_search_are_in_one_file_and_in_no_comparison(tmp_path):
    full = write_comparison(tmp_path / "full", [FakeMethod("default", {5: 0.8, 6: 0.9})])
    for value in ("0.001", "0.003"):
        write_run(full / "tuning", FakeMethod("default", {0: 0.7, 1: 0.75}, slug=f"default/{value}"), 0)
    points = [{"values": {"optimizer.lr": rate}, "scores": {"0": 0.7, "1": 0.75 + rate}} for rate in (0.001, 0.003)]
    method = {"label": "default", "points": points, "best": points[1], "at_edge": {}}
    search = {
        "schema": 1, "kind": "wellcond-tuning", "metric": ACCURACY, "fields": ["optimizer.lr"], "seeds": [0, 1],
        "scored": "best", "test_data": "other seeds", "methods": [method],
    }  # fmt: skip
    (full / "tuning.json").write_text(json.dumps(seal(search)))
    [comparison] = load_comparisons(full)
    assert comparison.seeds == (5, 6)
    [home] = pack(full, tmp_path / "packed")
    assert not (home / "tuning").exists() and [c.seeds for c in load_comparisons(home)] == [(5, 6)]
    assert page(home) == page(full) and "0.003" in page(home)
    assert find_tuning(load_comparisons(home)[0]) == find_tuning(comparison) is not None
    stored = json.loads((home / "tuning.json").read_text())
    assert stored == seal(search)


def test_a_comparison_is_not_resumed_in_a_folder_of_packed_records(tmp_path):
    [home] = pack(write_comparison(tmp_path / "full", complete(usual_methods())), tmp_path / "packed")
    before = (home / "comparison.json").read_bytes()
    recipe, _ = load_recipe("digits", scale="tiny")
    with pytest.raises(RunError, match="holds packed records, which cannot be resumed"):
        write_run_list(home, recipe, recipe.methods, (0,))
    assert (home / "comparison.json").read_bytes() == before
