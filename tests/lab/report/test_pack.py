"""Packed comparisons: one file, a line for each run, checked, and the same tables."""

import json
import math
import shutil
from pathlib import Path

import pandas
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
from lab.small import SETTINGS
from wellcond import lab
from wellcond.errors import RunError, RunRecordError
from wellcond.lab.comparison import LineWatch
from wellcond.lab.records import RUN, Run, load_comparisons, log_mark, merge, read_record, seal
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.figures import build_figures
from wellcond.lab.report.pack import MOST_POINTS, hashlib, pack, pack_steps, share, share_by_method, unpack
from wellcond.lab.report.page import gather, render_markdown
from wellcond.lab.report.tuning import find_tuning


def complete(methods):
    for method in methods:
        method.statuses = {seed: status for seed, status in method.statuses.items() if status != "running"}
    return methods


def page(folder):
    [comparison] = load_comparisons(folder)
    return render_markdown(gather(analyse(comparison), figures=False))


def rewrite(path, change):
    """Change lines of a packed comparison, with checksums that fit."""
    first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(first, lines)
    rest = "".join(f"{json.dumps(line)}\n" for line in lines)
    first = {key: value for key, value in first.items() if key != "checksum"}
    first["lines"] = log_mark(len(rest.encode()), hashlib.sha256(rest.encode()))
    path.write_text(f"{json.dumps(seal(first))}\n{rest}")


@pytest.fixture
def packed(tmp_path):
    [path] = pack(write_comparison(tmp_path / "full", complete(usual_methods())), tmp_path / "packed")
    return path


@pytest.mark.parametrize("metric", [None, PERPLEXITY], ids=["accuracy", "perplexity"])
def test_every_table_and_finding_is_the_same(tmp_path, metric):
    methods = complete(usual_methods())
    if metric:
        methods = [FakeMethod("default", {0: 33.1234567, 1: 34.9}), FakeMethod("polar", {0: 31 / 3, 1: 1e9 / 7})]
    full = write_comparison(tmp_path / "full" / "one", methods, **({"metric": metric} if metric else {}))
    [path] = pack(tmp_path / "full", tmp_path / "packed")
    assert path == tmp_path / "packed" / "one.jsonl"
    assert page(path) == page(tmp_path / "packed" / "one") == page(tmp_path / "packed") == page(full)
    runs = sum(len(method.finals) for method in methods)
    assert len(path.read_text().splitlines()) == runs + 1 and path.stat().st_size < 8000 * runs
    assert [file for file in (tmp_path / "packed").rglob("*") if file.is_file()] == [path]


def test_curves_are_close_enough_to_plot(tmp_path, packed):
    before, after = (build_figures(analyse(load_comparisons(path)[0])) for path in (tmp_path / "full", packed))
    assert [figure.name for figure in before] == [figure.name for figure in after] and len(before) == 6
    panels = [[panel for figure in figures for panel in figure.panels] for figures in (before, after)]
    for one, other in zip(*panels, strict=True):
        assert one.name == other.name
        for row, again in zip(one.rows, other.rows, strict=True):
            assert (row.series, row.seed) == (again.series, again.seed)
            assert math.isclose(row.value, again.value, rel_tol=6e-3, abs_tol=1e-4) or math.isnan(row.value)


def test_many_steps_are_thinned_to_means():
    rows = [{"step": at, "epoch": at / 10, "loss": float(at)} for at in range(1, 1001)]
    steps = Run(Path("a"), {"method": "a", "seed": 0, "status": "finished"}, {"steps": pack_steps(rows)}).steps
    assert len(steps) <= MOST_POINTS and steps[-1]["step"] == 1000
    assert steps[0]["loss"] == pytest.approx(sum(range(1, steps[0]["step"] + 1)) / steps[0]["step"])


def test_sharing_loses_nothing():
    records = [
        {"seed": 0, "config": {"lr": 1, "options": {}}},
        {"seed": 1, "config": {"lr": 1, "options": {"std": 2.5}}},
        {"seed": 2, "config": {"lr": 1, "options": {}, "late": None}},
        {"seed": 3, "config": {"lr": 1}},
    ]
    shared, rests = share(records)
    assert shared == {"config": {"lr": 1}}
    assert [merge(shared, rest) for rest in rests] == records


def test_sharing_by_method_loses_nothing_and_a_line_keeps_what_was_searched():
    def record(method, seed, rate, std):
        own = {"label": method, "options": {"std": std}, "set": {"optimizer.lr": rate}}
        config = {"optimizer": {"name": "adamw", "lr": rate}, "method": own}
        return {"method": method, "seed": seed, "config": config}

    records = [record("default", seed, 0.1, seed == 2) for seed in range(3)]
    records += [record("gaussian", seed, 0.3, 2.5) for seed in range(2)] + [record("alone", 0, 1.0, 0)]
    shared, rests = share_by_method(records)
    assert set(shared) == {"default", "gaussian"} and rests[-1] == records[-1]
    assert [merge(shared.get(rest["method"], {}), rest) for rest in rests] == records
    assert rests[0] == {
        "method": "default", "seed": 0, "config": {"optimizer": {"lr": 0.1}, "method": {"set": {"optimizer.lr": 0.1}}},
    }  # fmt: skip


def test_pandas_reads_it_without_our_code(packed):
    lines = pandas.read_json(packed, lines=True)
    runs = lines[lines.kind == "run"]
    means = runs[runs.status == "finished"].groupby("method").apply(lambda some: some.final.str["accuracy"].mean())
    [comparison] = load_comparisons(packed)
    for method in comparison.methods:
        assert means[method] == pytest.approx(analyse(comparison).summaries[method].mean)


def test_a_file_that_was_changed_or_cut_off_is_refused(packed):
    text = packed.read_text()
    for changed in (
        text.replace("0.945", "0.995"),
        text.replace("0.001", "0.002", 1),
        text[: len(text) // 2],
        text[5:],
    ):
        assert changed != text
        packed.write_text(changed)
        with pytest.raises(RunRecordError) as caught:
            load_comparisons(packed)
        assert caught.value.path == packed


@pytest.mark.parametrize(
    "change",
    [
        lambda first, lines: lines[0]["final"].update(accuracy=1.7),
        lambda first, lines: lines[0].update(seed="zero"),
        lambda first, lines: lines.append(lines[0]),
        lambda first, lines: lines.append([]),
        lambda first, lines: first.update(schema=2),
        lambda first, lines: first.update(shared=3),
        lambda first, lines: first.update(baseline="nobody"),
    ],
)
def test_records_that_cannot_be_are_refused(packed, change):
    rewrite(packed, change)
    with pytest.raises(RunRecordError) as caught:
        load_comparisons(packed)
    assert caught.value.path == packed


def test_what_cannot_be_packed(tmp_path):
    folder = write_comparison(tmp_path / "full", usual_methods())
    for wrong in (folder, folder / "deeper", tmp_path):
        with pytest.raises(RunRecordError, match="Give another folder"):
            pack(folder, wrong)
    assert not list(tmp_path.glob("*.jsonl"))
    pack(folder, tmp_path / "packed" / "one")
    with pytest.raises(RunRecordError, match="is packed already"):
        pack(tmp_path / "packed", tmp_path / "again")


def test_packing_again_replaces_the_file_whole_or_not_at_all(tmp_path, packed, monkeypatch):
    kept = packed.read_bytes()
    shutil.rmtree(tmp_path / "full" / "polar")

    def full_disk(path, content):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("wellcond.lab.report.pack.write_atomically", full_disk)
        with pytest.raises(OSError, match="No space left"):
            pack(tmp_path / "full", tmp_path / "packed")
    assert packed.read_bytes() == kept
    pack(tmp_path / "full", tmp_path / "packed")
    [comparison] = load_comparisons(packed)
    assert not comparison.of("polar") and comparison.of("default")


def test_runs_of_train_without_a_comparison(tmp_path):
    for label in ("default", "polar"):
        write_run(tmp_path / "teachers", FakeMethod(label, {0: 0.9}), 0)
    (tmp_path / "teachers" / "notes.jsonl").write_text("{}\n")  # another file is left alone
    [path] = pack(tmp_path / "teachers", tmp_path / "packed")
    [comparison] = load_comparisons(path)
    assert comparison.methods == ("default", "polar") and comparison.of("polar")[0].value == 0.9


def test_samples_of_one_seed_are_kept(tmp_path):
    methods = [FakeMethod(label, {0: 9.0, 1: 8.0}) for label in ("default", "polar")]
    said = [{"prompt": "Once", "text": "Once upon"}]
    write_with_samples(tmp_path / "full", methods, PERPLEXITY, lambda record: said)
    [path] = pack(tmp_path / "full", tmp_path / "packed")
    assert page(path) == page(tmp_path / "full") and "Once upon" in page(path)
    assert ["Once upon" in line for line in path.read_text().splitlines()] == [False, True, False, True, False]


def test_the_search_is_in_the_same_file_and_its_runs_in_no_comparison(tmp_path):
    full = write_comparison(tmp_path / "full", [FakeMethod("default", {5: 0.8, 6: 0.9})])
    for value in ("0.001", "0.003", "0.01"):
        write_run(full / "tuning", FakeMethod("default", {0: 0.7, 1: 0.75}, slug=f"default/optimizer.lr-{value}"), 0)
    points = [{"values": {"optimizer.lr": rate}, "scores": {"0": 0.7, "1": 0.75 + rate}} for rate in (0.001, 0.003)]
    method = {"label": "default", "slug": "default", "points": points, "best": points[1], "at_edge": {}}
    search = {
        "schema": 1, "kind": "wellcond-tuning", "metric": ACCURACY, "fields": ["optimizer.lr"], "seeds": [0, 1],
        "scored": "best", "test_data": "other seeds", "methods": [method], "settings_hash": "0123456789abcdef",
    }  # fmt: skip
    (full / "tuning.json").write_text(json.dumps(seal(search)))
    [comparison] = load_comparisons(full)
    assert comparison.seeds == (5, 6)
    [path] = pack(full, tmp_path / "packed")
    assert page(path) == page(full) and "0.003" in page(path)
    assert find_tuning(load_comparisons(path)[0]) == find_tuning(comparison) is not None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["comparison", "search", "tuning", "tuning", "tuning-run", "run", "run"]
    assert lines[4]["folder"] == "tuning/default/optimizer.lr-0.01/seed0"  # of a stage that did not end


# A comparison that goes on from its packed file, where its run folders are gone.

OF_TIME = ("seconds", "sessions", "peak_memory_bytes", "samples_per_second", "seconds_per_step", "checksum", "lines")


TRIAL = "tuning/gaussian/optimizer.lr-0.003/seed1000"


def compare(folder, *settings):
    short = ["training.length={steps: 4}", "evaluation.every={steps: 2}"]
    unmeasured = "tracking={weights_every: null, jacobian_points: 0}"
    tune = {"optimizer.lr": [1e-3, 3e-3]}
    return lab.compare(
        "digits", methods="default,gaussian", seeds=2, tune=tune, tuning_seeds=1, tune_growth=1, folder=folder,
        settings=[*SETTINGS[:3], *short, unmeasured, *settings], cpu=True, at_once=1, watch=LineWatch(quiet=True),
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A comparison that ran to its end without a break, and its table."""
    folder = tmp_path_factory.mktemp("whole") / "one"
    return folder, compare(folder).table()


def rows(path):
    def without_times(value):
        if not isinstance(value, dict):
            return value
        return {key: without_times(inner) for key, inner in value.items() if key not in OF_TIME}

    return [without_times(json.loads(line)) for line in path.read_text().splitlines()]


def broken_off(whole, home, *lost):
    """What is packed of a copy of a comparison without some of its runs, and without the record of its search."""
    shutil.copytree(whole, home / "one")
    (home / "one" / "tuning.json").unlink()
    for folder in lost:
        shutil.rmtree(home / "one" / folder)
    begun = home / "one" / lost[0] / "run.json"  # one was running when it broke off
    begun.parent.mkdir(parents=True)
    begun.write_text(json.dumps(seal(read_record(whole / lost[0] / "run.json", RUN) | {"status": "running"})))
    [(path, left_out)] = pack(home, home.with_suffix(".packed")).items()
    assert left_out == 1
    return path


@pytest.mark.parametrize(
    "lost",
    [("default/seed1", "gaussian/seed0", "gaussian/seed1"), (TRIAL, "default", "gaussian")],
    ids=["in the test", "in the search"],
)
def test_a_comparison_goes_on_from_its_packed_file(tmp_path, whole, lost):
    folder, table = whole
    packed = broken_off(folder, tmp_path / "half", *lost)
    assert unpack(packed, tmp_path / "later" / "one") == len(packed.read_text().splitlines()) - 1
    result = compare(tmp_path / "later" / "one")
    trained = [path.parent for path in (tmp_path / "later" / "one").rglob("steps.jsonl")]
    assert 0 < len(trained) < 6 and len(list((tmp_path / "later").rglob("run.json"))) == 10
    pandas.testing.assert_frame_equal(result.table(), table, check_exact=True)
    [whole_again] = pack(tmp_path / "later", tmp_path / "packed" / "later")
    [at_once] = pack(folder.parent, tmp_path / "packed" / "whole")
    assert rows(whole_again) == rows(at_once)
    assert page(whole_again).count("finished") == page(at_once).count("finished") > 0


def test_a_committed_file_unpacked_and_packed_again_has_the_same_rows(tmp_path):
    file = Path(__file__).parents[3] / "results" / "evidence" / "causal.jsonl"
    unpack(file, tmp_path / "runs" / "causal")
    [again] = pack(tmp_path / "runs", tmp_path / "packed")
    assert rows(again) == rows(file) and page(again) == page(file)


def test_other_settings_and_folders_in_use_are_refused(tmp_path, whole):
    [packed] = pack(whole[0].parent, tmp_path / "packed")
    unpack(packed, tmp_path / "runs")
    with pytest.raises(RunError, match="optimizer.weight_decay"):
        compare(tmp_path / "runs", "optimizer.weight_decay=0.3")
    with pytest.raises(RunRecordError, match="not empty") as caught:
        unpack(packed, tmp_path / "runs")
    assert caught.value.path == tmp_path / "runs"


@pytest.mark.parametrize("outside", ["../../elsewhere", "/tmp/elsewhere"])
def test_a_row_cannot_name_a_folder_outside(tmp_path, whole, outside):
    packed = broken_off(whole[0], tmp_path / "half", "gaussian/seed0")
    rewrite(packed, lambda first, lines: [line.update(folder=outside) for line in lines if "folder" in line])
    with pytest.raises(RunRecordError, match="leads out of"):
        unpack(packed, tmp_path / "runs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half", "half.packed"]


def test_runs_of_a_search_alone_are_no_comparison_yet(tmp_path, whole):
    packed = broken_off(whole[0], tmp_path / "half", TRIAL, "default", "gaussian")
    shutil.copyfile(packed, tmp_path / "copy.jsonl")
    assert load_comparisons(tmp_path / "half.packed", needed=False) == []
    with pytest.raises(RunRecordError) as caught:
        load_comparisons(tmp_path / "copy.jsonl")
    assert caught.value.path == tmp_path / "copy.jsonl"
