"""The whole report: tables, findings, figures, page, markdown, files."""

import csv
import io
import json
import math
import re
import sys
from html.parser import HTMLParser

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
    write_run,
)
from wellcond.errors import MissingExtraError
from wellcond.lab.records import load_comparisons
from wellcond.lab.report.analysis import analyse, bottom_line, find_findings
from wellcond.lab.report.draw import draw_panels, draw_static, log_range
from wellcond.lab.report.figures import COLUMNS, build_figures, write_csv
from wellcond.lab.report.names import readable
from wellcond.lab.report.page import build_report, gather, render_markdown, render_page
from wellcond.lab.report.table import table_csv
from wellcond.lab.report.tables import build_tables

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return study(tmp_path_factory.mktemp("usual"))


@pytest.fixture(scope="module")
def usual_page(usual):
    return render_page(gather(usual))


class Reader(HTMLParser):
    """Elements that open and close, ids, and what a page would load."""

    def __init__(self):
        super().__init__()
        self.ids, self.names, self.loads, self.handlers = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        for key, value in attrs:
            if key == "id":
                self.ids.append(value)
            if key in ("src", "href") and not value.startswith("#"):
                self.loads.append(value)
            if key.startswith("on"):
                self.handlers.append(key)


def read(page):
    reader = Reader()
    reader.feed(page)
    return reader


def test_summary_table_holds_the_statistics(usual):
    table = build_tables(usual)[0]
    rows = {row[0]: row for row in table.rows}
    assert rows["conditioned"][1:6] == ("3", "–", "94.17 ± 1.04", "+3.17 [+2.45, +3.88]", "0.0055")
    assert rows["polar"][1] == "1 + 1 diverged (50 %) + 1 partial" and rows["polar"][5] == "–"
    assert rows["identity(lam=10)"][6:8] == ("worse", "> 12") and rows["polar"][10] == "1.55 ×"
    notes = " ".join(table.notes)
    assert "polar, seed 1 diverged" in notes and "paired difference is left out" in notes and "1 unfinished" in notes


def test_statistics_in_full(tmp_path):
    methods = [FakeMethod("default", {s: 0.90 + s / 100 for s in range(5)}),
               FakeMethod("polar", {0: 0.93, 1: 0.92, 2: 0.96, 3: 0.94, 4: 0.95})]  # fmt: skip
    analysis = study(tmp_path, methods, conditioning=False)
    table = table_of(analysis, "statistics")
    # differences 3, 1, 4, 1, 1: mean 2, std sqrt(8 / 4)
    row = table.rows[1]
    assert row[:10] == ("polar", "5", "94.00", "1.58", "92.00", "96.00", "5", "+2.00", "1.41", "+2.2%")
    low, high = analysis.differences["polar"].bootstrap
    assert row[11] == f"[{100 * low:+.2f}, {100 * high:+.2f}]"


def test_every_number_of_the_markdown_is_in_the_tables(usual):
    text = render_markdown(gather(usual))
    for method, difference in usual.differences.items():
        line = next(line for line in text.splitlines() if line.startswith(f"| {method}"))
        assert f"{100 * difference.mean:+.2f}" in line
        assert f"{100 * usual.summaries[method].mean:.2f}" in line
    for figure in build_figures(usual):
        assert f"figures/{figure.name}.svg" in text and f"figures/{figure.name}.csv" in text
    assert "(/" not in text and "http" not in text


def test_every_table_is_numbers_for_programs(usual):
    words = {"method", "metric", "verdict", "status", "reason", "unit", "baseline", "field", "at_edge"}
    for table in build_tables(usual):
        rows = list(csv.DictReader(io.StringIO(table_csv(table))))
        assert len(rows) == len(table.rows), table.name
        for row in rows:
            for name in row.keys() - words:
                assert row[name] == "" or isinstance(float(row[name]), float), (table.name, name, row[name])
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(table_csv(build_tables(usual)[0])))}
    found, difference = rows["conditioned"], usual.differences["conditioned"]
    assert float(found["mean"]) == 100 * usual.summaries["conditioned"].mean
    assert float(found["sd"]) == 100 * usual.summaries["conditioned"].std
    assert [float(found[end]) for end in ("low", "high")] == [100 * end for end in difference.interval]
    assert rows["polar"]["diverged"] == "1" and rows["polar"]["low"] == "" and rows["default"]["difference"] == ""


def test_the_bottom_line_is_one_sentence_of_the_verdicts(usual, tmp_path):
    assert bottom_line(usual) == (
        "Of 4 methods against default, 2 are better, 1 is worse, 1 is undecided; the largest gain is +3.17 points, of "
        "conditioned (95 % interval [+2.45, +3.88], 3 seeds, better)."
    )
    worse = [FakeMethod("default", {0: 0.9, 1: 0.91, 2: 0.92}), FakeMethod("polar", {0: 0.5, 1: 0.52, 2: 0.51})]
    said = bottom_line(study(tmp_path / "worse", worse, conditioning=False))
    assert said.startswith("Of 1 method against default, 1 is worse; the smallest loss is -40.00 points, of polar")
    few = bottom_line(study(tmp_path / "few", usual_methods()[:1], conditioning=False))
    assert few == "Only default has finished runs, so there is nothing to compare."


def test_a_page_opens_with_the_bottom_line_and_one_figure(usual, usual_page):
    page = usual_page
    line, figure, table = (page.index(text) for text in (
        '<p class="bottom-line">', 'id="differences-0"', "<caption>Summary by method"))  # fmt: skip
    assert line < figure < table


def test_every_figure_of_lines_has_its_legend(usual, usual_page):
    page = usual_page
    for figure in build_figures(usual):
        if not figure.bars:
            start = page.index(f'id="figure-{figure.name.replace("_", "-")}"')
            section = page[start : page.index("</section>", start)]
            assert len(figure.panels) <= 3
            assert [f">{readable(method)}</button>" in section for method in usual.comparison.methods] == [True] * 5


def test_findings_say_what_the_numbers_say(usual):
    said = "\n".join(find_findings(usual))
    assert "these runs do not show that the gain is due to conditioning" in said
    [saturated] = [line for line in said.splitlines() if line.startswith("Attention is saturated")]
    assert "of identity(lam=10): there a small κ(J) is not meaningful" in saturated


def test_findings_follow_the_numbers(tmp_path):
    methods = usual_methods()[:3]
    methods[1].finals = {0: 0.95, 1: 0.96, 2: 0.98}  # conditioned: clearly beyond the control
    methods[2].finals = {0: 0.90, 1: 0.90, 2: 0.93}  # gaussian: nothing
    said = "\n".join(find_findings(study(tmp_path / "a", methods)))
    assert "scale alone does not explain the gain" in said
    assert "saturated" not in said


def test_one_seed_is_said_and_not_tested(tmp_path):
    methods = [FakeMethod("default", {0: 0.9}), FakeMethod("conditioned", {0: 0.95}, init="conditioned")]
    analysis = study(tmp_path, methods)
    assert bottom_line(analysis) == (
        "Against default, the largest gain is +5.00 points, of conditioned; with only one seed no difference can be "
        "told from the luck of a seed."
    )
    assert build_tables(analysis)[0].rows[1][4:6] == ("+5.00", "–")
    assert "<svg" in render_page(gather(analysis))


def test_perplexity(tmp_path):
    methods = [FakeMethod("default", {0: 30.0, 1: 31.0, 2: 32.5}), FakeMethod("polar", {0: 28.0, 1: 29.5, 2: 29.0})]
    analysis = study(tmp_path, methods, metric=PERPLEXITY)
    assert "1 is undecided; the largest gain is -2.333, of polar" in bottom_line(analysis)
    assert build_tables(analysis)[0].rows[1][3] == "28.83 ± 0.7638"
    assert "a fall of perplexity is negative and better" in build_tables(analysis)[0].notes[0]
    assert "lower is better" in render_page(gather(analysis))


def test_a_fall_of_perplexity_has_a_minus_for_people_and_is_a_gain_in_files(tmp_path):
    methods = [FakeMethod("default", {0: 30.0, 1: 31.0, 2: 32.5}), FakeMethod("polar", {0: 28.0, 1: 29.5, 2: 29.0})]
    analysis = study(tmp_path, methods, metric=PERPLEXITY)
    summary = build_tables(analysis)[0]
    assert summary.rows[1][4].startswith("-2.333 [") and summary.values[1]["difference"] == pytest.approx(7 / 3)
    [differences] = [figure for figure in build_figures(analysis) if figure.name == "differences"]
    assert differences.panels[0].by_series()["polar"]["mean"][0].value == pytest.approx(-7 / 3)
    assert "To the left of the dotted line is better" in differences.caption


def test_methods_stand_in_the_order_of_the_figure_and_under_their_names(tmp_path):
    larger = "tokens(embeddings=1, positions=30)"
    methods = [FakeMethod("default", {0: 0.8, 1: 0.81}), FakeMethod("polar", {0: 0.7, 1: 0.72}),
               FakeMethod(larger, {0: 0.9, 1: 0.91})]  # fmt: skip
    content = gather(study(tmp_path, methods))
    assert [row[0] for row in content.shown_tables[0].rows] == [larger, "default (baseline)", "polar"]
    page = render_page(content)
    assert page.index("larger positions (x 30)") < page.index("default (baseline)")
    assert page.count(f'<td class="t">{larger}</td>') == 1  # what to type for it


def test_without_conditioning_rows(tmp_path):
    analysis = study(tmp_path, conditioning=False)
    page = render_page(gather(analysis))
    assert 'href="#learning"' in page and 'href="#attention"' not in page and 'href="#conditioning"' not in page
    assert {figure.section for figure in build_figures(analysis)} == {"Summary", "Learning"}
    assert build_tables(analysis)[0].rows[0][8:10] == ("–", "–")


def test_no_finished_run_at_all(tmp_path):
    methods = [FakeMethod("default", {0: 0.9}, statuses={0: "failed"}),
               FakeMethod("polar", {0: 0.9}, statuses={0: "running"})]  # fmt: skip
    write_comparison(tmp_path, methods)
    (comparison,) = load_comparisons(tmp_path)
    text = page_of(comparison)
    assert "No run is finished" in text and "default, seed 0: failed" in text
    assert all(f"<title>{name}, not in any mean</title>" in text for name in (
        "default, seed 0 (failed)", "polar, seed 0 (partial)"))  # fmt: skip


def test_different_seed_sets_are_paired_where_they_meet(tmp_path):
    methods = [FakeMethod("default", {0: 0.9, 1: 0.91}), FakeMethod("polar", {1: 0.93, 2: 0.94})]
    analysis = study(tmp_path, methods)
    assert list(analysis.differences["polar"].values) == [1]
    assert build_tables(analysis)[0].rows[1][1] == "2"


@pytest.mark.slow
def test_infinite_and_missing_condition_numbers(tmp_path):
    methods = usual_methods()[:2]
    methods[0].jacobian, methods[0].kappa, methods[1].jacobian = math.inf, math.inf, math.nan
    write_comparison(tmp_path, methods)
    (page,) = build_report(tmp_path)
    (comparison,) = load_comparisons(tmp_path)
    table = table_of(analyse(comparison), "conditioning")
    assert [row[1] for row in table.rows] == ["∞", "–"] and [row[4] for row in table.rows] == ["0/36", "0/0"]
    assert not re.search(r"\b(nan|inf)\b", " ".join(re.findall(r'\bd="([^"]*)"', page.read_text())))


def test_curves_of_means_are_right(usual):
    (figure,) = (f for f in build_figures(usual) if f.name == "learning")
    seeds = points_of(figure, "metric")["conditioned"]
    assert seeds["mean"][-1].value == pytest.approx((93 + 94.5 + 95) / 3)
    assert seeds["mean+std"][-1].value - seeds["mean"][-1].value == pytest.approx(1.0408, abs=1e-4)
    assert "polar, seed 1 (diverged)" in points_of(figure, "metric") and set(points_of(figure, "metric")["polar"]) == {
        "0", "mean", "mean-std", "mean+std",
    }  # fmt: skip


def test_condition_numbers_are_geometric_means(usual):
    (figure,) = (f for f in build_figures(usual) if f.name == "jacobian")
    gaussian = table_of(usual, "conditioning").rows[2]
    assert gaussian[0] == "gaussian" and gaussian[3:5] == ("36/36", "27/36")
    table = usual.tables("default")[0]
    values = table.at("pseudo_condition_number", 0)
    row = points_of(figure, "kappa")["default"]["0"][0]
    assert row.step == 0 and row.value == pytest.approx(math.exp(sum(map(math.log, values)) / len(values)))
    papers = points_of(figure, "papers_bound")["default"]["0"][0].value
    assert papers == pytest.approx(row.value * 10**-0.3)


def test_conditioning_table_is_on_log10_over_seeds(usual):
    table = table_of(usual, "conditioning")
    row = next(row for row in table.rows if row[0] == "conditioned")
    seeds = [
        math.fsum(map(math.log10, t.at("pseudo_condition_number", 240))) / 12 for t in usual.tables("conditioned")
    ]  # fmt: skip
    mean = math.fsum(seeds) / 3
    assert row[1].startswith(f"{10**mean:.3g} [") and row[2].startswith("0.04")
    assert row[3:5] == ("36/36", "36/36") and row[6] == f"{mean - 0.3:.2f}" and row[10] == "0.83 → 0.83"


def test_bounds_beyond_all_numbers_are_told(tmp_path):
    write_comparison(tmp_path, usual_methods()[:2])
    path = tmp_path / "default" / "seed0" / "conditioning.jsonl"
    rows = [
        json.loads(line) | {"papers_bound_log10": 400.0, "status": "estimate"} for line in path.read_text().splitlines()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = build_figures(analyse(load_comparisons(tmp_path)[0]))
    (figure,) = (f for f in figures if f.name == "jacobian")
    assert "beyond 10³⁰⁰ are not drawn" in figure.caption and "; 60 are not exact" in figure.caption


def test_csv_has_the_columns_and_every_row(usual):
    for figure in build_figures(usual):
        rows = list(csv.reader(io.StringIO(write_csv(figure))))
        assert tuple(rows[0]) == COLUMNS == ("figure", "panel", "series", "seed", "step", "epoch", "value", "scale")
        assert len(rows) == sum(len(panel.rows) for panel in figure.panels) + 1 and {row[-1] for row in rows[1:]} == {
            "tiny"
        }


def test_long_logs_are_thinned(tmp_path):
    write_run(tmp_path, FakeMethod("default", {0: 0.9}), 0)
    path = tmp_path / "default" / "seed0" / "steps.jsonl"
    path.write_text("".join(json.dumps({"step": s, "epoch": s / 10, "loss": s % 2}) + "\n" for s in range(1, 20001)))
    (figure,) = (f for f in build_figures(analyse(load_comparisons(tmp_path)[0])) if f.name == "learning")
    points = points_of(figure, "training_loss")["default"]["mean"]
    assert len(points) <= 300 and points[-1].step == 20000
    assert all(point.value == pytest.approx(0.5, abs=0.01) for point in points)


def test_page_loads_nothing_and_names_its_parts(usual, usual_page):
    page = usual_page
    found = read(page)
    assert page.startswith("<!DOCTYPE html>") and not found.loads and not found.handlers
    assert len(found.ids) == len(set(found.ids)) and "prefers-color-scheme:dark" in page
    panels = [f"{figure.name}-{at}" for figure in build_figures(usual) for at in range(len(figure.panels))]
    assert set(panels) <= set(found.ids) and str(usual.comparison.folder) not in page
    assert "papers&#39; bound (not a bound)" in page


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_files_of_an_older_report_go_and_others_stay(tmp_path):
    write_comparison(tmp_path, usual_methods()[:2], conditioning=False)
    figures = tmp_path / "report" / "figures"
    figures.mkdir(parents=True)
    (figures / "jacobian.png").write_bytes(b"old")
    (figures / "mine.txt").write_text("keep")
    (page,) = build_report(tmp_path)
    assert page == tmp_path / "report" / "report.html" and page.is_file()
    assert not (figures / "jacobian.png").exists() and (figures / "mine.txt").exists()
    assert not list(tmp_path.rglob(".*"))
    assert (tmp_path / "report" / "tables" / "summary.csv").is_file()


def test_several_comparisons_each_get_a_report(tmp_path):
    for name in ("a", "b"):
        write_comparison(tmp_path / name, [FakeMethod("default", {0: 0.9})], conditioning=False)
    made = build_report(tmp_path, pictures=False)
    assert made == [tmp_path / name / "report" / "report.md" for name in ("a", "b")]
    assert len(load_comparisons(tmp_path)) == 2  # a report is no run


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_names_its_install_line(usual, monkeypatch, package):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package}.*wellcond\[report\]"):
        if package == "matplotlib":
            draw_static(build_figures(usual)[0])
        else:
            render_page(gather(usual))


def test_machines_that_differ_are_in_the_provenance(tmp_path):
    write_comparison(tmp_path, usual_methods()[:2])
    change_records(tmp_path / "default" / "seed1", lambda record: record["sessions"][0].update(threads=8))
    provenance = gather(analyse(load_comparisons(tmp_path)[0]), figures=False).provenance
    assert ("session: threads", "differs between runs: 1; 8") in provenance.rows


def test_a_baseline_that_did_not_finish(tmp_path):
    methods = [FakeMethod("default", {0: 0.9, 1: 0.9}, statuses={0: "diverged", 1: "running"}),
               FakeMethod("polar", {0: 0.92, 1: 0.93})]  # fmt: skip
    analysis = study(tmp_path, methods)
    assert bottom_line(analysis) == "Only polar has finished runs, so there is nothing to compare."
    assert build_tables(analysis)[0].rows[0][1] == "0 + 1 diverged (100 %) + 1 partial"
    assert build_tables(analysis)[0].rows[1][4:7] == ("–", "–", "–")
    render_page(gather(analysis))


def test_paths_in_settings_lose_their_folders(tmp_path):
    write_comparison(tmp_path, [FakeMethod("default", {0: 0.9})], conditioning=False)
    change_records(tmp_path, lambda record: record["config"].update(data={"path": "/home/somebody/sets/digits.npz"}))
    page = page_of(load_comparisons(tmp_path)[0])
    assert "…/digits.npz" in page and "somebody" not in page


def test_an_eleventh_method_repeats_a_colour_with_another_dash(tmp_path):
    methods = [FakeMethod(f"m{at}", {0: 0.5 + at / 100}) for at in range(11)]
    [figure] = [
        found for found in build_figures(study(tmp_path, methods, conditioning=False)) if found.name == "learning"
    ]
    (_, svg, places), *_ = draw_panels(figure)
    looks = {at: re.findall(rf'data-method="{at}".*?<path[^>]*style="([^"]*)"', svg, re.S)[0] for at in (0, 1, 10)}
    assert places == list(range(11)) and all("var(--c0)" in looks[at] for at in (0, 10)) and "var(--c1)" in looks[1]
    assert "dasharray" in looks[10] and "dasharray" not in looks[0]


def test_a_logarithmic_axis_may_come_near_the_largest_number():
    low, high = log_range([1e-290, 1e300, 1e-300, 1e290, 1e-280, 1e308])
    assert -308 < low <= -300 and 300 <= high < 308
    low, high = log_range([2.0])
    assert high - low == pytest.approx(0.5)
