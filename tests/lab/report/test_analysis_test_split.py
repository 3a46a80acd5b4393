"""Reports on runs that were scored on a test split: results are those, curves are of the evaluation set."""

import csv

import pytest

from lab.report.fake_runs import (
    PERPLEXITY,
    FakeMethod,
    change_records,
    page_of,
    points_of,
    study,
    table_of,
    usual_methods,
    write_comparison,
)
from wellcond.errors import RunRecordError
from wellcond.lab.records import load_comparisons
from wellcond.lab.report.analysis import analyse, bottom_line
from wellcond.lab.report.figures import build_figures
from wellcond.lab.report.page import build_report
from wellcond.lab.report.statistics import compare_paired, holm


def methods_with_test():
    """On the evaluation set conditioned is ahead, on the test split gaussian is."""
    default, conditioned, gaussian = usual_methods()[:3]
    default.tested = {0: 0.80, 1: 0.82, 2: 0.81}
    conditioned.tested = {0: 0.81, 1: 0.80, 2: 0.83}
    gaussian.tested = {0: 0.86, 1: 0.875, 2: 0.88}
    return [default, conditioned, gaussian]


@pytest.fixture
def analysis(tmp_path):
    return study(tmp_path, methods_with_test())


def test_the_summary_is_of_the_test_split(analysis):
    summary = table_of(analysis, "summary")
    assert summary.header[3] == "test accuracy (%), mean ± std"
    rows = {row[0]: row for row in summary.rows}
    assert rows["gaussian"][3] == "87.17 ± 1.04" and rows["default (baseline)"][3] == "81.00 ± 1.00"
    assert rows["gaussian"][4].startswith("+6.17 [")
    assert "Test accuracy is that with the weights of the best evaluation" in " ".join(summary.notes)


def test_paired_statistics_and_holm_are_those_of_the_test_values(analysis):
    values = {method.label: method.tested for method in methods_with_test()}
    expected = [
        compare_paired(name, values[name], "default", values["default"], higher_is_better=True)
        for name in ("conditioned", "gaussian")
    ]
    corrected = holm([difference.p for difference in expected])
    for difference, p in zip(expected, corrected, strict=True):
        found = analysis.differences[difference.method]
        assert found.values == difference.values and found.interval == difference.interval and found.p_holm == p


def test_every_seed_shows_both_values_and_the_tested_step(analysis):
    seeds = table_of(analysis, "seeds")
    row = dict(zip(seeds.header, next(row for row in seeds.rows if row[:2] == ("gaussian", "1")), strict=True))
    assert row["test accuracy (%)"] == "87.50" and row["tested step"] == "220" and row["difference"] == "+5.50"
    assert row["last accuracy (%)"] == "95.00"


def test_the_bottom_line_is_about_the_test_split_and_curves_are_not(analysis):
    assert "the largest gain is +6.17 points, of gaussian" in bottom_line(analysis)
    figures = {figure.name: figure for figure in build_figures(analysis)}
    assert figures["differences"].panels[0].y_label == "gain in test accuracy (points)"
    assert points_of(figures["learning"], "metric")["gaussian"]["1"][-1].value == pytest.approx(95.0)


def test_page_markdown_and_csv_say_what_was_tested(tmp_path):
    write_comparison(tmp_path, methods_with_test())
    (page,) = build_report(tmp_path, pictures=False)
    said = "with the weights of the best evaluation; curves and matching are of the evaluation set"
    (comparison,) = load_comparisons(tmp_path)
    assert f"test accuracy (higher is better), {said}" in page_of(comparison)
    assert said in page.read_text() and "test accuracy (%)" in page.read_text()
    with open(page.parent / "tables/summary.csv", newline="") as file:
        assert next(csv.DictReader(file))["metric"] == "test accuracy (%)"


def test_a_finished_run_without_a_test_value_is_named_and_in_no_mean(tmp_path):
    methods = methods_with_test()
    del methods[1].tested[2]
    del methods[2].tested[0]
    analysis = study(tmp_path, methods)
    assert analysis.summaries["conditioned"].values == {0: 0.81, 1: 0.80}
    assert analysis.summaries["gaussian"].values == {1: 0.875, 2: 0.88}
    notes = " ".join(table_of(analysis, "summary").notes)
    assert "conditioned, seed 2 has no finite test score" in notes and "gaussian, seed 0 has no finite" in notes


def test_last_weights_and_perplexity(tmp_path):
    methods = [FakeMethod("default", {0: 30.0, 1: 31.0}, tested={0: 40.0, 1: 41.0}),
               FakeMethod("polar", {0: 28.0, 1: 29.5}, tested={0: 37.0, 1: 39.0})]  # fmt: skip
    write_comparison(tmp_path, methods, metric=PERPLEXITY)
    change_records(tmp_path, lambda record: record["test"].update(weights="last"))
    (comparison,) = load_comparisons(tmp_path)
    analysis = analyse(comparison)
    assert analysis.differences["polar"].mean == pytest.approx(2.5)
    assert "Test perplexity is that with the last weights" in " ".join(table_of(analysis, "summary").notes)


def test_a_test_entry_that_is_no_mapping_is_named(tmp_path):
    write_comparison(tmp_path, methods_with_test())
    change_records(tmp_path / "default" / "seed0", {"test": 0.9})
    with pytest.raises(RunRecordError, match="expected 'test' to be a mapping, found 0.9"):
        load_comparisons(tmp_path)
