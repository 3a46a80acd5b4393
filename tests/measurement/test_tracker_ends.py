"""First and last steps of a tracked training, what the budget allowed, and what a tracker shows."""

import dataclasses
import json
import math

import pytest
import torch

import wellcond as wc
from measurement.test_tracker import X, vit

# -- the ends of a training, and what the budget allowed


def slow_tracker(model, capsys, steps, **options):
    """Every call of the clock takes a second."""
    tracker = wc.ConditionTracker(model, X[:1], clock=iter(range(100_000)).__next__, **options)
    with tracker:
        for _ in range(steps):
            tracker.step()
    return tracker, capsys.readouterr().err


def test_the_last_step_is_measured_where_it_is_not_due(capsys):
    tracker, said = slow_tracker(vit(), capsys, 5, every=2, budget=None)
    assert sorted({p.step for p in tracker.points}) == [0, 2, 4, 5]
    assert said.startswith(
        "wellcond: measured at 4 of 4 steps that were due (5 trained), kappa(J) 8 times (2 of 2 heads)"
    )
    assert said.count("\n") == 1 and "budget=0.05 would limit that to 5 %" in said
    again, _ = slow_tracker(vit(), capsys, 4, every=2, budget=None, heads="all")
    assert [p.step for p in again.points] == [0] * 6 + [2] * 6 + [4] * 6, "not twice"


def test_listed_steps_are_the_steps(capsys):
    tracker, said = slow_tracker(vit(), capsys, 4, every={1, 3}, budget=None)
    assert {p.step for p in tracker.points} == {1, 3} and "at 2 of 2 steps" in said


def test_weights_are_measured_at_the_last_step_too(capsys):
    tracker, _ = slow_tracker(vit(), capsys, 5, every=(), weights_every=2, budget=None)
    assert sorted({p.step for p in tracker.points}) == [0, 2, 4, 5] and tracker.points[-1].condition_number is None


def test_batches_given_to_step_measure_the_ends(capsys):
    model = vit()
    with wc.ConditionTracker(model, every=10, budget=None) as tracker:
        for number in range(4):
            tracker.step(X[number : number + 1])
    assert sorted({p.step for p in tracker.points}) == [1, 4]
    last = wc.measure(model, X[3:4]).layers[0].heads[0].jacobian.condition_number
    assert tracker.points[2].condition_number == last and tracker.run["input"] == "given to step()"
    with wc.ConditionTracker(model, every=10, budget=None) as without:
        without.step()
    assert not without.points


def test_an_error_is_not_followed_by_a_measurement(capsys):
    with pytest.raises(RuntimeError, match="of the training"), wc.ConditionTracker(vit(), X[:1], every=5) as tracker:
        tracker.step()
        raise RuntimeError("of the training")
    assert {p.step for p in tracker.points} == {0} and not capsys.readouterr().err


def test_a_resumed_run_without_steps_measures_nothing(capsys):
    with wc.ConditionTracker(vit(), X[:1], first_step=7, budget=None) as tracker:
        pass
    assert not tracker.points and "at 0 of 0 steps" in capsys.readouterr().err


# -- lines, representations, plots


def test_lines_say_which_model_which_input_and_which_version():
    tracker = wc.ConditionTracker(vit(), X[:1], budget=None)
    line = json.loads(tracker.to_json().splitlines()[0])
    assert line["model"].startswith("VisionTransformer, ") and line["version"] == wc.__version__
    assert line["input"].startswith("float32 (1, 3, 16, 16), sha256 ")
    assert {key: line[key] for key in tracker.points[0].to_json_dict()} == tracker.points[0].to_json_dict()


def test_points_and_trackers_print_as_one_line():
    tracker = wc.ConditionTracker(vit(), X[:1], heads=[0], weights_every={1}, every={0}, budget=None)
    tracker.step()
    full, cheap = tracker.points[0], tracker.points[-1]
    assert repr(full) == f"TrackPoint(step 0, 'blocks.0.attn' head 0, kappa {full.condition_number:.4g}, exact)"
    assert repr(cheap).startswith("TrackPoint(step 1, 'blocks.1.attn' head 0, kappa of q, k, v: ")
    assert repr(tracker) == "ConditionTracker(step 1, 2 heads, 4 points, every={0}, budget=None)"
    failed = dataclasses.replace(full, status="failed", problem="NaN")
    assert repr(failed) == "TrackPoint(step 0, 'blocks.0.attn' head 0, failed: NaN)"


@pytest.fixture
def plotted():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    yield
    pyplot.close("all")


def test_a_plot_has_a_line_per_head(plotted, capsys):
    tracker, _ = slow_tracker(vit(), capsys, 3, every=1, budget=None, heads="all")
    ax = tracker.plot("kappa")
    lines = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in ax.lines]
    assert lines == [points for points in tracker.series().values()] and len(lines) == 6
    assert ax.get_ylabel() == "strict κ(J)" and ax.get_yscale() == "log" and ax.get_xlabel() == "step"
    legend = [text.get_text() for text in ax.figure.legends[0].get_texts()]
    assert legend == ["blocks.0.attn", "blocks.1.attn"]
    assert tracker.plot("normalised_entropy").get_yscale() == "linear"
    assert tracker.plot("kappa_q", ax=ax) is ax
    for wrong in ("kapa", "status", "layer", "dead"):
        with pytest.raises(ValueError, match=f"unknown quantity '{wrong}': expected kappa or one of"):
            tracker.plot(wrong)
    with pytest.raises(ValueError, match="kappa was not measured"):
        wc.ConditionTracker(vit(), every=(), weights_every=1).plot()


def test_a_plot_of_infinite_numbers_draws_the_pseudo_ones_and_says_so(plotted, capsys):
    tracker, _ = slow_tracker(vit(), capsys, 2, every=1, budget=None, convention="stack")
    assert all(point.condition_number == math.inf for point in tracker.points)
    ax = tracker.plot("kappa")
    shown = [list(line.get_ydata()) for line in ax.lines]
    assert shown == [[y for _, y in points] for points in tracker.series("pseudo_condition_number").values()]
    legend = [text.get_text() for text in ax.figure.legends[0].get_texts()]
    assert legend[-1] == "infinite: over the non-zero spectrum"


def test_a_plot_leaves_a_gap_where_a_measurement_failed(plotted):
    model = vit()
    tracker = wc.ConditionTracker(model, X[:1], every=1, budget=None)
    with torch.no_grad():
        model.pos_embed.fill_(math.nan)
    tracker.step()
    ax = tracker.plot()
    assert all(math.isnan(line.get_ydata()[1]) for line in ax.lines)
    assert "not finite, or the measurement failed" in [text.get_text() for text in ax.figure.legends[0].get_texts()]
