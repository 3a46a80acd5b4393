"""Ties, degenerate runs, lost runs, singular heads and shared cores: the report says only what is true."""

import json
import math

import pytest

from lab.report.fake_runs import (
    PERPLEXITY,
    FakeMethod,
    change_records,
    page_of,
    study,
    table_of,
    usual_methods,
    write_comparison,
)
from wellcond.lab.records import load_comparisons
from wellcond.lab.report.analysis import analyse, bottom_line, find_findings, step_ratios
from wellcond.lab.report.figures import build_figures
from wellcond.lab.report.page import gather, render_markdown, render_page
from wellcond.lab.report.tables import summary_table


def column(made, name):
    at = next(at for at, title in enumerate(made.header) if title.startswith(name))
    return {row[0]: row[at] for row in made.rows}


def perfect(seeds=3, **options):
    """Three methods at 100 %, of which default gets there first."""
    curves = {"default": [0.1, 1.0, 1.0, 1.0], "conditioned": [0.1, 0.9, 1.0, 1.0], "polar": [0.1, 0.9, 1.0, 1.0]}
    jacobians = {"default": 500.0, "conditioned": 20.0, "polar": 300.0}
    return [
        FakeMethod(label, dict.fromkeys(range(seeds), 1.0), curves=dict.fromkeys(range(seeds), curve),
                   jacobian=jacobians[label], init="conditioned" if label == "conditioned" else "default", **options)
        for label, curve in curves.items()
    ]  # fmt: skip


def test_all_methods_at_100_percent(tmp_path):
    analysis = study(tmp_path, perfect(), epochs=3)
    assert "2 are equal within the margin" in bottom_line(analysis)
    made = summary_table(analysis)
    assert column(made, "p (Holm)")["conditioned"] == "–"  # a t test of nothing but zeros is not defined
    assert column(made, "verdict")["conditioned"] == "equal: tied in every seed"


def test_an_exact_test_that_cannot_decide_has_no_p(tmp_path):
    analysis = study(tmp_path, perfect(seeds=5), epochs=3)
    assert analysis.matchings["conditioned"].p is None  # five times the same sign: 0.0625 at best
    assert column(table_of(analysis, "matching"), "p (exact, Holm)")["conditioned"] == "–"
    seven = study(tmp_path / "seven", perfect(seeds=7), epochs=3)
    assert column(table_of(seven, "matching"), "p (exact, Holm)")["conditioned"] == "0.0312"  # 2 / 2^7 and twice that


def test_what_is_undecided_is_not_called_better(tmp_path):
    methods = [FakeMethod("default", {0: 30.0, 1: 31.0, 2: 32.0}), FakeMethod("polar", {0: 29.0, 1: 32.0, 2: 30.5})]
    analysis = study(tmp_path, methods, metric=PERPLEXITY)
    said = "\n".join([bottom_line(analysis), *find_findings(analysis)])
    assert "Of 1 method against default, 1 is undecided; the largest gain is -0.5, of polar" in said
    assert "3 seeds can show a true difference of" in said and "better" not in said


def test_counts_have_an_exact_test(tmp_path):
    methods = perfect(seeds=7)
    late = methods[0].curves[0]
    methods[0].curves = dict.fromkeys(range(7), methods[1].curves[0])
    methods[1].curves = dict.fromkeys(range(6), late) | {6: [0.1, 0.2, 0.3, 0.4]}
    methods[1].finals = dict.fromkeys(range(6), 1.0) | {6: 0.4}
    analysis = study(tmp_path, methods, epochs=3)
    # default 2 by seed; conditioned 1 six times, and never: one later than the end, 4. Differences 1 x 6 and -2
    signs = [6 - 2 * k + s for k in range(7) for s in (2, -2) for _ in range(math.comb(6, k))]
    expected = sum(abs(total) >= 4 for total in signs) / len(signs)
    found = analysis.matchings["conditioned"]
    assert found.gains == dict.fromkeys(range(6), 1.0) | {6: -2.0} and found.p == pytest.approx(expected)
    made = table_of(analysis, "matching")
    assert column(made, "earlier than default itself")["conditioned"] == "– (1 of 7 never)"
    assert column(made, "p (exact, Holm)")["polar"] == "–"  # all differences are zero


def test_one_difference_has_one_p(tmp_path):
    analysis = study(tmp_path)
    [shared] = [d for d in analysis.required if d.baseline == "default"]
    assert shared is analysis.differences[shared.method]
    corrected = column(table_of(analysis, "required"), "p (Holm)")[f"{shared.method} − default"]
    assert corrected == column(summary_table(analysis), "p (Holm)")[shared.method]
    assert corrected == column(table_of(analysis, "statistics"), "p (Holm)")[shared.method]


def test_lost_runs_are_counted(tmp_path):
    methods = usual_methods()[:3]
    methods[1].statuses = {1: "diverged"}
    assert column(summary_table(study(tmp_path, methods)), "runs")["conditioned"] == "2 + 1 diverged (33 %)"


def test_lost_runs_limit_the_verdict(tmp_path):
    finals = {0: 0.95, 1: 0.962, 2: 0.97, 3: 0.981, 4: 0.9}
    methods = [FakeMethod("default", {s: 0.90 + s / 100 for s in range(5)})]
    methods.append(FakeMethod("polar", finals, statuses={4: "diverged"}))
    analysis = study(tmp_path, methods)
    verdict = analysis.judge(analysis.differences["polar"])
    assert verdict.kind == "undecided" and verdict.reason == "better in the runs that survived, but 1 diverged"


def singular(folder, method, share):
    """Give the first heads of a method infinite condition numbers."""
    for path in (folder / method).rglob("conditioning.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            if row["head"] < share * 4:
                row |= {"pseudo_condition_number": "inf", "kappa_q": "inf"}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_singular_heads_are_shown(tmp_path):
    write_comparison(tmp_path, usual_methods()[:3])
    singular(tmp_path, "conditioned", 0.25)  # the smallest of those that are finite
    analysis = analyse(load_comparisons(tmp_path)[0])
    assert "∞ in 25 %" in column(summary_table(analysis), "κ(J) at end")["conditioned"]
    made = table_of(analysis, "conditioning")
    assert "∞ in 25 %" in column(made, "κ(J) [")["conditioned"] and column(made, "factor")["conditioned"] == "–"
    assert "∞ in 25 %" in column(made, "κ of W_Q")["conditioned"] and "∞" not in column(made, "κ of W_K")["conditioned"]
    captions = {figure.name: figure.caption for figure in build_figures(analysis)}
    assert all("infinite values are in none" in captions[name] for name in ("jacobian", "weights"))


def test_step_times_need_cores_of_their_own(tmp_path):
    write_comparison(tmp_path, usual_methods())
    analysis = analyse(load_comparisons(tmp_path)[0])
    assert column(summary_table(analysis), "time of a step")["polar"] == "1.55 ×"

    def forget(record):
        for session in record["sessions"]:
            del session["alone"]

    change_records(tmp_path, forget)
    analysis = analyse(load_comparisons(tmp_path)[0])
    assert set(column(summary_table(analysis), "time of a step").values()) == {"–"}
    assert any("shared their cores" in note for note in summary_table(analysis).notes)
    cost = table_of(analysis, "cost")
    assert set(column(cost, "seconds per step").values()) == {"–"} and "shared their cores" in " ".join(cost.notes)
    assert set(column(cost, "samples per second").values()) == {"–"}
    assert set(column(table_of(analysis, "matching"), "seconds of training").values()) == {"–"}
    assert set(column(cost, "training, s").values()) == {"–"} and "–" not in column(cost, "peak memory").values()


def test_one_session_among_others_is_not_alone(tmp_path):
    write_comparison(tmp_path, usual_methods()[:2])
    analysis = analyse(load_comparisons(tmp_path)[0])
    change_records(
        tmp_path / "conditioned" / "seed1",
        lambda record: record["sessions"].append(record["sessions"][0] | {"alone": False}),
    )
    found = analyse(load_comparisons(tmp_path)[0])
    assert len(step_ratios(analysis.comparison, "conditioned")) == 3
    assert step_ratios(found.comparison, "conditioned") == pytest.approx({0: 1.0, 1: math.nan, 2: 1.0}, nan_ok=True)
    assert column(summary_table(found), "time of a step")["conditioned"] == "1.00 ×"
    assert any("conditioned, seed 1" in note for note in summary_table(found).notes)


def test_a_title_that_is_not_stored_is_made_of_what_ran(tmp_path):
    write_comparison(tmp_path, usual_methods()[:2], title="")
    (comparison,) = load_comparisons(tmp_path)
    assert comparison.title == "digits: vit_tiny on digits"
    page = page_of(comparison)
    assert "8 x 8 grey images" in page.partition("<script")[0]
    assert "8 x 8 grey images" in render_markdown(gather(analyse(comparison), figures=False))


def test_power_and_verdict_are_in_page_table_and_markdown(tmp_path):
    analysis = study(tmp_path)
    made = summary_table(analysis)
    assert column(made, "verdict")["conditioned"] == "better" and column(made, "verdict")["polar"] == "undecided"
    assert (
        column(made, "verdict")["identity(lam=10)"] == "worse" and column(made, "verdict")["default (baseline)"] == "–"
    )
    [power] = [line for line in find_findings(analysis) if line.startswith("3 seeds can show a true difference")]
    assert "points (power 80 %" in power
    assert power in render_markdown(gather(analysis, figures=False)) and power in render_page(gather(analysis))
    assert column(table_of(analysis, "statistics"), "can show")["conditioned"] != "–"


def test_equal_within_the_margin(tmp_path):
    base = {s: 0.80 + 0.02 * (s % 3) for s in range(6)}
    near = {s: value + 0.002 * (-1) ** s for s, value in base.items()}
    methods = [FakeMethod("default", base), FakeMethod("polar", near)]
    analysis = study(tmp_path, methods)
    assert analysis.judge(analysis.differences["polar"]).kind == "equal" and analysis.margin == pytest.approx(
        0.0178885, abs=1e-6
    )
    assert column(summary_table(analysis), "verdict")["polar"] == "equal within 1.79"
    assert "1 is equal within the margin" in bottom_line(analysis)


def test_rates_that_were_not_chosen_alike_are_named(tmp_path):
    finals = {0: 0.9, 1: 0.91, 2: 0.92}
    made = study(tmp_path, [FakeMethod("default", finals, set={"optimizer.lr": 0.5}), FakeMethod("small", finals)])

    def with_rates(record):
        method = {"label": record["method"], "set": record["method_spec"]["set"]}
        record["config"] |= {"method": method, "optimizer": {"lr": method["set"].get("optimizer.lr", 0.1)}}

    assert column(table_of(made, "summary"), "learning rate") == {
        "default (baseline)": "–",
        "small": "–",
    }  # not recorded
    change_records(tmp_path, with_rates)
    [comparison] = load_comparisons(tmp_path)
    shown = table_of(analyse(comparison), "summary")
    assert column(shown, "learning rate") == {"default (baseline)": "0.5", "small": "0.1"}
    assert any("default had one of their own, small that of the recipe" in note for note in shown.notes)
