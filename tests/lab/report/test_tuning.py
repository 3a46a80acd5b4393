"""The search in the report: curves over the tuned value, the best, and the range of good values."""

import json
import math

import pytest

from lab.report.fake_runs import FakeMethod, write_comparison
from wellcond.errors import RunRecordError
from wellcond.lab.records import load_comparisons, seal
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.draw import draw_panels
from wellcond.lab.report.page import build_report, gather
from wellcond.lab.report.tuning import find_tuning, tuning_figure, tuning_table

RATES = (1e-4, 1e-3, 1e-2, 1e-1)


def point(values, *scores):
    known = [score for score in scores if score is not None]
    return {
        "values": values, "scores": {str(1000 + at): score for at, score in enumerate(scores)},
        "diverged": [1000 + at for at, score in enumerate(scores) if score is None],
        "mean": sum(known) / len(known) if known else None, "std": None,
    }  # fmt: skip


def method(label, points, best, at_edge=()):
    return {
        "label": label,
        "slug": label,
        "points": points,
        "best": points[best],
        "at_edge": dict.fromkeys(at_edge, "above"),
    }


def curve(label, scores, best, **options):
    points = [point({"optimizer.lr": rate}, *pair) for rate, pair in zip(RATES, scores, strict=True)]
    return method(label, points, best, **options)


DEFAULT = curve("default", [(0.50, 0.52), (0.80, 0.82), (0.70, 0.72), (None, 0.3)], 1)
CONDITIONED = curve("conditioned", [(0.70, 0.72), (0.80, 0.80), (0.82, 0.82), (0.81, 0.82)], 2)


ACCURACY = {"name": "accuracy", "higher_is_better": True, "percent": True}


def write(folder, *methods, fields=("optimizer.lr",), metric=ACCURACY):
    names = [row["label"] for row in methods]
    write_comparison(folder, [FakeMethod(name, {0: 0.8, 1: 0.9, 2: 0.85}) for name in names])
    record = {
        "schema": 1, "kind": "wellcond-tuning", "recipe": "digits", "scale": "tiny", "settings_hash": "x",
        "metric": metric, "fields": list(fields),
        "grid": {}, "seeds": [1000, 1001], "growth": 3, "scored": "final evaluation on the evaluation split",
        "test_seeds": [0, 1, 2], "test_data": "the test split, which the search does not see", "methods": list(methods),
    }  # fmt: skip
    (folder / "tuning.json").write_text(json.dumps(seal(record)))
    [comparison] = load_comparisons(folder)
    return comparison


def cells(tuning):
    return {row[0]: row for row in tuning_table(tuning).rows}


def test_the_tolerance_of_a_perplexity_is_a_share_of_the_best(tmp_path):
    perplexity = {"name": "perplexity", "higher_is_better": False, "percent": False}
    best = find_tuning(
        write(
            tmp_path, curve("default", [(50.0, 52.0), (40.0, 42.0), (60.0, 60.0), (70.0, 70.0)], 1), metric=perplexity
        )
    )
    assert best.tolerance == pytest.approx(0.02 * 41)


def test_the_range_is_interpolated_ends_before_divergence_and_says_where_it_is_open(tmp_path):
    tuning = find_tuning(write(tmp_path, DEFAULT, CONDITIONED))
    default, conditioned = tuning.methods
    # 2 of the 30 points lost from 1e-3 to 1e-4, and of the 10 from 1e-3 to 1e-2.
    good = tuning.good_range(default, "optimizer.lr")
    assert good.low == pytest.approx(10 ** (-3 - 2 / 30)) and good.high == pytest.approx(10 ** (-3 + 2 / 10))
    assert (good.open_below, good.open_above) == (False, False)
    assert f"({good.high / good.low:.1f}x wide)" in cells(tuning)["default"][-1]
    wide = tuning.good_range(conditioned, "optimizer.lr")
    assert wide.high == 0.1 and wide.open_above and "at least" in cells(tuning)["conditioned"][-1]
    flat = curve("default", [(0.80, 0.81), (0.80, 0.82), (0.80, 0.81), (None, 0.8)], 1)
    whole = find_tuning(write(tmp_path, flat, CONDITIONED))
    assert whole.good_range(whole.methods[0], "optimizer.lr").high == 0.01  # a run diverged at 0.1


def test_a_method_that_diverges_at_its_best_has_no_range(tmp_path):
    lost = curve("default", [(None, 0.5)] * 4, 0)
    tuning = find_tuning(write(tmp_path, lost, CONDITIONED))
    assert tuning.good_range(tuning.methods[0], "optimizer.lr") is None
    assert cells(tuning)["default"][3] == "–" and cells(tuning)["default"][6] == "4"


def test_rows_have_every_seed_the_mean_and_no_mean_where_a_run_diverged(tmp_path):
    comparison = write(tmp_path, DEFAULT, CONDITIONED)
    figure = tuning_figure(comparison, find_tuning(comparison))
    means = {
        name: [(row.step, row.value) for row in seeds["mean"]] for name, seeds in figure.panels[0].by_series().items()
    }
    assert [step for step, _ in means["default"]] == list(RATES) and math.isnan(means["default"][-1][1])  # it diverged
    assert means["default"][1][1] == pytest.approx(81.0)
    assert all(math.isfinite(value) for _, value in means["conditioned"])
    assert {row.seed for row in figure.panels[0].rows} == {"1000", "1001", "mean", "mean-std", "mean+std"}
    [(_, svg, places)] = draw_panels(figure)
    assert places == [0, 1] and all(f">{text}</text>" in svg for text in ("learning rate", "0.0001", "0.1"))


def test_of_two_fields_each_panel_is_the_best_over_the_other(tmp_path):
    grid = [(rate, lam) for rate in (1e-3, 1e-2) for lam in (1, 3)]
    points = [point({"optimizer.lr": rate, "identity.lam": lam}, 0.5 + rate * lam, 0.5) for rate, lam in grid]
    rows = write(
        tmp_path,
        DEFAULT,
        method("identity", points, 3, at_edge=["optimizer.lr"]),
        fields=("optimizer.lr", "identity.lam"),
    )
    tuning = find_tuning(rows)
    identity = tuning.methods[1]
    assert [p.values["identity.lam"] for p in identity.profile("optimizer.lr")] == [3, 3]
    figure = tuning_figure(rows, tuning)
    assert [panel.name for panel in figure.panels] == ["optimizer.lr", "identity.lam"]
    assert any("perhaps not the best" in note and "identity" in note for note in tuning_table(tuning).notes)


def test_page_files_and_tables_have_the_search(tmp_path):
    write(tmp_path, DEFAULT, CONDITIONED)
    [page] = build_report(tmp_path)
    text = page.read_text()
    assert 'href="#tuning"' in text and "Accuracy over learning rate" in text and "x wide" in text
    made = {path.name for path in (tmp_path / "report").rglob("tuning.*")}
    assert made == {"tuning.csv", "tuning.svg"}
    assert "Tolerance: 2.00 points" in (tmp_path / "report/report.md").read_text()
    rows = (tmp_path / "report/figures/tuning.csv").read_text().splitlines()
    assert "tuning,optimizer.lr,default,1000,0.1,,,tiny" in rows


@pytest.mark.parametrize("change", [{"methods": [{"label": "default"}]}, {"metric": None}, {"fields": 3}])
def test_a_broken_record_is_named(tmp_path, change):
    write(tmp_path, DEFAULT)
    stored = json.loads((tmp_path / "tuning.json").read_text())
    stored.pop("checksum")
    (tmp_path / "tuning.json").write_text(json.dumps(seal(stored | change)))
    [comparison] = load_comparisons(tmp_path)
    with pytest.raises(RunRecordError) as caught:
        find_tuning(comparison)
    assert caught.value.path == tmp_path


def test_a_search_in_which_every_run_diverged_is_reported_without_a_figure(tmp_path):
    content = gather(analyse(write(tmp_path, curve("default", [(None, None)] * 4, 0))))
    assert "tuning" in [table.name for table in content.tables]
    assert content.figures and all(figure.panels for figure in content.figures)
