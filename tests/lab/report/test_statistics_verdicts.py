"""Power, verdicts and exact tests against simulation, scipy and hand counts."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from wellcond.lab.records import Metric
from wellcond.lab.report.statistics import (
    compare_paired,
    correct,
    describe_power,
    judge,
    sign_flip_equality_p,
    sign_flip_p,
    smallest_detectable,
)


def difference(values):
    """One corrected difference, alone in its question."""
    zeros = dict.fromkeys(range(len(values)), 0.0)
    [found] = correct([compare_paired("a", dict(enumerate(values)), "b", zeros, higher_is_better=True)])
    return found


@pytest.mark.parametrize("n", [3, 5, 10, 30])
def test_smallest_detectable_is_shown_four_times_of_five(n):
    found, power = smallest_detectable(2.0, n), 0.8
    effect, critical = found / 2.0 * math.sqrt(n), stats.t.ppf(0.975, n - 1)
    assert stats.nct.sf(critical, n - 1, effect) + stats.nct.cdf(-critical, n - 1, effect) == pytest.approx(power, 1e-6)


def test_what_cannot_be_detected():
    assert math.isnan(smallest_detectable(1.0, 2)) and math.isnan(smallest_detectable(0.0, 10))
    assert math.isnan(smallest_detectable(math.nan, 10))


def test_equality_is_two_one_sided_tests():
    values = [0.1, -0.2, 0.3, 0.0, -0.1]
    low = stats.ttest_1samp(values, -0.5, alternative="greater").pvalue
    high = stats.ttest_1samp(values, 0.5, alternative="less").pvalue
    found = difference(values)
    assert found.p_equal(0.5) == pytest.approx(max(low, high), 1e-10)
    assert math.isnan(difference(values[:2]).p_equal(0.5)) and math.isnan(difference([0.1] * 5).p_equal(0.5))
    assert math.isnan(found.p_equal(math.nan)) and math.isnan(found.p_equal(0.0))


@pytest.mark.parametrize("values", [[1, 1, 2], [3, -1, 2, 2], [1.5, 0, -0.5, 2, 2, 1], [1, -1], [0.1, 0.2, 0.3, -0.3]])
def test_sign_flips_are_all_counted(values):
    observed = abs(sum(values))
    sums = [abs(sum(s * v for s, v in zip(signs, values, strict=True)))
            for signs in itertools.product((1, -1), repeat=len(values))]  # fmt: skip
    assert sign_flip_p(values) == pytest.approx(np.mean([s >= observed - 1e-9 for s in sums]), abs=1e-12)


def test_sign_flips_of_many_seeds_and_of_nothing():
    counts = [1, 2, 1, 0, 3, 1, 1, 2] * 5  # quantised: 2^35 flips, few different sums
    assert sign_flip_p(counts) == pytest.approx(2.0**-34)
    assert sign_flip_p([]) is None and sign_flip_p([0, 0, 0]) is None
    with pytest.raises(ValueError, match="different sums"):
        sign_flip_p(list(np.random.default_rng(0).normal(size=24)))


@pytest.mark.parametrize("margin", [0.5, 1, 3])
@pytest.mark.parametrize("values", [[1, 1, 2], [0, 0, 0, 0, 0], [3, -1, 2, 2], [0.1, -0.2, 0.3, 0, 0, -0.1]])
def test_equality_of_counts_flips_the_distances_to_both_ends_of_the_margin(values, margin):
    def one_sided(shifted):  # how often flips come as far below zero
        sums = [sum(s * v for s, v in zip(signs, shifted, strict=True))
                for signs in itertools.product((1, -1), repeat=len(shifted))]  # fmt: skip
        return np.mean([s <= sum(shifted) + 1e-9 for s in sums])

    expected = max(one_sided([v - margin for v in values]), one_sided([-v - margin for v in values]))
    assert sign_flip_equality_p(values, margin) == pytest.approx(expected, abs=1e-12)


def test_verdicts():
    better = difference([1.0, 1.2, 0.9, 1.1])
    assert judge(better, 0.5).kind == "better" and better.p_equal(0.5) > 0.05
    assert judge(difference([-1.0, -1.2, -0.9, -1.1]), 0.5).kind == "worse"
    none = difference([0.1, -0.2, 0.15, 0.0, -0.1])
    assert judge(none, 0.5).kind == "equal" and judge(none, 0.05).kind == "undecided"
    assert judge(none).kind == "undecided"  # nothing is equal without a margin
    assert judge(better, 3.0).kind == "better" and better.p_equal(3.0) < 0.05


def test_verdicts_of_ties_and_of_equal_differences():
    tied = judge(difference([0.0, 0.0, 0.0]), 0.0)
    assert tied.kind == "equal" and tied.reason == "tied in every seed"
    flat = judge(difference([0.5, 0.5, 0.5]), 1.0)
    assert flat.kind == "undecided" and "not defined" in flat.reason
    assert judge(difference([5.0, 5.1]), 1.0).reason == "fewer than 3 pairs"


def test_a_side_that_lost_runs_is_not_called_better():
    better, worse, none = difference([1.0, 1.2, 0.9]), difference([-1.0, -1.2, -0.9]), difference([0.1, -0.1, 0.0, 0.1])
    assert judge(better, diverged=1).kind == "undecided" and "1 diverged" in judge(better, diverged=1).reason
    assert judge(worse, diverged=1).kind == "worse" and judge(none, 2.0, diverged=1).kind == "undecided"
    assert judge(better, baseline_diverged=1).kind == "better"
    assert judge(worse, baseline_diverged=1).kind == judge(none, 2.0, baseline_diverged=2).kind == "undecided"


def test_pooled_spread():
    known = [difference([1.0, 3.0]), difference([0.0, 0.0, 0.0]), difference([0.0, 1.0, 2.0])]
    [said] = describe_power(Metric("score"), known)
    assert f"a standard deviation of {math.sqrt((2.0 * 1 + 1.0 * 2) / 3):.4g} over 3 seeds" in said
    assert describe_power(Metric("score"), []) == describe_power(Metric("score"), known[1:2]) == []
