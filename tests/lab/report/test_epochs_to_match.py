"""Rules of epochs-to-match on curves made for them."""

import math

import pytest

from lab.report.fake_runs import PERPLEXITY, STEPS_PER_EPOCH, FakeMethod, write_comparison
from wellcond.lab.records import load_comparisons
from wellcond.lab.report.epochs_to_match import match_method, match_unit, show_match


def load(folder, base, other, *, statuses=None, **options):
    """Curves by seed of the baseline and of one method."""
    methods = [
        FakeMethod("default", {seed: curve[-1] for seed, curve in base.items()}, curves=base),
        FakeMethod("fast", {s: c[-1] for s, c in other.items()}, curves=other, statuses=statuses or {}),
    ]
    epochs = len(next(iter(base.values()))) - 1
    (comparison,) = load_comparisons(write_comparison(folder, methods, epochs=epochs, **options))
    return comparison


BASE = {0: [0.1, 0.3, 0.5, 0.7, 0.8], 1: [0.1, 0.2, 0.6, 0.9, 0.85]}


def test_first_evaluation_at_least_as_good_of_the_same_seed(tmp_path):
    other = {0: [0.1, 0.6, 0.8, 0.79, 0.9], 1: [0.1, 0.6, 0.8, 0.84, 0.86]}
    comparison = load(tmp_path, BASE, other)
    found = match_method(comparison, "fast")
    assert {seed: match.epoch for seed, match in found.by_seed.items()} == {0: 2.0, 1: 4.0}
    assert found.by_seed[0].step == 2 * STEPS_PER_EPOCH and found.by_seed[0].saving == pytest.approx(0.5)
    assert found.by_seed[0].seconds == pytest.approx(2 * STEPS_PER_EPOCH * 0.02)
    assert found.mean("epoch") == 3.0 and found.show("epoch") == "3" and found.censored == 0
    # mean curve 0.1 0.6 0.8 0.815 0.88 against the mean target 0.825
    assert found.of_means.epoch == 4.0


def test_the_baseline_reaches_its_own_noisy_end_early(tmp_path):
    found = match_method(load(tmp_path, BASE, BASE), "default")
    assert {seed: match.epoch for seed, match in found.by_seed.items()} == {0: 4.0, 1: 3.0}


def test_what_never_gets_there_is_counted_and_not_averaged(tmp_path):
    other = {0: [0.1, 0.6, 0.8, 0.8, 0.8], 1: [0.1, 0.2, 0.3, 0.4, 0.5]}
    found = match_method(load(tmp_path, BASE, other), "fast")
    assert found.censored == 1 and found.mean("epoch") == 2.0
    assert found.show("epoch") == "2 (1 of 2 never)" and show_match(found.by_seed[1], "epoch") == "> 4"
    assert math.isnan(found.by_seed[1].saving) and not found.of_means.reached
    none = match_method(load(tmp_path / "none", BASE, {0: [0.1] * 5, 1: [0.1] * 5}), "fast")
    assert none.show("epoch") == "> 4" and none.show("step") == f"> {4 * STEPS_PER_EPOCH}"
    assert math.isnan(none.mean("saving"))


def test_a_diverged_run_is_censored_and_an_unfinished_one_left_out(tmp_path):
    other = {0: [0.9] * 5, 1: [0.9] * 5}
    comparison = load(tmp_path, BASE, other, statuses={0: "diverged", 1: "interrupted"})
    found = match_method(comparison, "fast")
    assert list(found.by_seed) == [0] and found.censored == 1 and found.of_means is None


def test_perplexity_must_fall_to_the_target(tmp_path):
    base = {0: [90.0, 50.0, 40.0, 30.0]}
    other = {0: [90.0, 35.0, 30.0, 25.0]}
    found = match_method(load(tmp_path, base, other, metric=PERPLEXITY), "fast")
    assert found.by_seed[0].epoch == 2.0


def test_smoothing_takes_running_means_of_curve_and_target(tmp_path):
    base = {0: [0.0, 0.3, 0.6, 0.6, 0.6]}  # running mean of 3 at the end: 0.6
    other = {0: [0.0, 0.9, 0.3, 0.6, 0.9]}  # running means: -, -, 0.4, 0.6, 0.6
    comparison = load(tmp_path, base, other)
    assert match_method(comparison, "fast").by_seed[0].epoch == 1.0
    assert match_method(comparison, "fast", smooth=3).by_seed[0].epoch == 3.0
    assert match_method(comparison, "default", smooth=3).by_seed[0].epoch == 4.0


def test_seeds_without_a_partner_have_no_match(tmp_path):
    found = match_method(load(tmp_path, {0: BASE[0]}, {1: BASE[1]}), "fast")
    assert not found.by_seed and found.of_means is None and found.show("epoch") == "–"


def test_unit_is_steps_where_there_is_hardly_an_epoch(tmp_path):
    assert match_unit(load(tmp_path / "a", BASE, BASE)) == "epoch"
    assert match_unit(load(tmp_path / "b", {0: [0.1, 0.2]}, {0: [0.1, 0.2]})) == "step"
