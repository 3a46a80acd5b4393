"""Numbers against hand computations and scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from lab.report.fake_runs import FakeMethod, study
from wellcond.lab.report.analysis import required_pairs
from wellcond.lab.report.statistics import (
    Summary,
    compare_paired,
    holm,
    summarise_logs,
)


def differing_by(*values):
    return compare_paired("a", dict(enumerate(values)), "b", dict.fromkeys(range(5), 0.0), higher_is_better=True)


def test_summary_of_known_values():
    summary = Summary({0: 1.0, 1: 2.0, 2: 6.0})
    assert (summary.count, summary.mean) == (3, 3.0)
    assert summary.std == pytest.approx(math.sqrt((4 + 1 + 9) / 2))  # n - 1
    empty = Summary({})
    assert math.isnan(empty.mean) and math.isnan(empty.std) and math.isnan(Summary({0: 1.0}).std)


def test_paired_difference_agrees_with_scipy():
    values, base = {0: 0.93, 1: 0.945, 2: 0.95, 7: 0.1}, {0: 0.90, 1: 0.91, 2: 0.92, 9: 0.5}
    found = compare_paired("a", values, "b", base, higher_is_better=True)
    expected = stats.ttest_rel([0.93, 0.945, 0.95], [0.90, 0.91, 0.92])
    assert list(found.values) == [0, 1, 2]  # only the seeds both have
    assert found.p == pytest.approx(expected.pvalue, rel=1e-10)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.95)), rel=1e-10)
    assert found.mean == pytest.approx(0.095 / 3) and found.relative == pytest.approx(0.095 / 2.73)
    assert found.bootstrap is None


@pytest.mark.parametrize("count", [1, 2])
def test_below_three_seeds_there_is_no_interval_and_no_p(count):
    values = {seed: 1.0 + seed**2 for seed in range(count)}
    found = compare_paired("a", values, "b", dict.fromkeys(range(count), 0.0), higher_is_better=True)
    assert found.interval is None and found.p is None and found.bootstrap is None


def test_differences_without_spread_make_no_claim():
    # equal but for rounding: 0.93 - 0.90, 0.53 - 0.50 and 0.13 - 0.10 are three different floats
    found = compare_paired(
        "a", {0: 0.93, 1: 0.53, 2: 0.13}, "b", {0: 0.90, 1: 0.50, 2: 0.10}, higher_is_better=True
    )  # fmt: skip
    assert len(set(found.values.values())) > 1 and found.std == 0
    assert found.p is None
    assert found.interval == pytest.approx((0.03, 0.03))
    assert differing_by(0.0, 0.0, 0.0).p is None


def test_bootstrap_from_five_seeds_on_and_always_the_same():
    values = [1.0, 2.0, 3.0, 4.0, 10.0]
    low, high = differing_by(*values).bootstrap
    assert differing_by(*values[:4]).bootstrap is None and (low, high) == differing_by(*values).bootstrap
    reference = stats.bootstrap(
        (values,), np.mean, n_resamples=20000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval  # fmt: skip
    assert low == pytest.approx(reference.low, abs=0.25) and high == pytest.approx(reference.high, abs=0.25)


def test_holm_by_hand():
    # sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1 = 0.04, 0.06, 0.06, 0.04 -> running maximum
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert holm([None, 0.02]) == [None, 0.02] and holm([]) == []


def test_log_summary_counts_what_is_not_finite():
    found = summarise_logs([1.0, 10.0, 100.0, math.inf, math.nan])
    assert found.geometric_mean == pytest.approx(10.0) and (found.finite, found.total) == (3, 5)
    half = stats.t.ppf(0.975, 2) / math.sqrt(3)
    assert found.interval == pytest.approx((10 ** (1 - half), 10 ** (1 + half)))
    assert summarise_logs([math.inf]).geometric_mean == math.inf and math.isnan(summarise_logs([]).geometric_mean)


def test_diverged_and_unfinished_runs_are_in_no_mean(tmp_path):
    analysis = study(tmp_path)
    comparison = analysis.comparison
    assert comparison.results("polar") == {0: 0.915}
    outcomes = [run.outcome for run in comparison.of("polar")]
    assert outcomes == ["finished", "diverged", "partial"]
    assert list(analysis.differences["polar"].values) == [0]


def test_required_pairs_need_both_methods(tmp_path):
    assert required_pairs(study(tmp_path).comparison) == [
        ("conditioned", "gaussian"), ("identity(lam=10)", "default"), ("polar", "identity(lam=10)"),
    ]  # fmt: skip


def test_required_pairs_differ_in_their_attention_alone(tmp_path):
    finals = {0: 0.9, 1: 0.8, 2: 0.7}
    methods = [FakeMethod("default", finals), FakeMethod("library", finals, init_options={"library": True})]
    for init, rate in (("conditioned", 1e-3), ("gaussian", 1e-2)):
        methods.append(FakeMethod(init, finals, init=init, set={"optimizer.lr": rate}))
        methods.append(FakeMethod(f"strong {init}", finals, init=init, tokens={"positions": 25}))
        methods.append(FakeMethod(f"normed {init}", finals, init=init, set={"model.qk_norm": True}))
    assert required_pairs(study(tmp_path, methods).comparison) == [
        (f"{name}conditioned", f"{name}gaussian") for name in ("", "strong ", "normed ")
    ]


def test_tied_keys_are_compared_with_plain_ones(tmp_path):
    finals = {0: 0.9, 1: 0.8, 2: 0.7}
    methods = [FakeMethod("default", finals), FakeMethod("conditioned", finals, init="conditioned")]
    for init in ("conditioned", "gaussian"):
        methods.append(FakeMethod(f"{init}(keys=tied)", finals, init=init, init_options={"keys": "tied"}))
    found = required_pairs(study(tmp_path, methods).comparison)
    assert ("conditioned(keys=tied)", "conditioned") in found
    assert not [pair for pair in found if pair[0] == "gaussian(keys=tied)"]
