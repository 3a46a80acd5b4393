"""Plots of reports and of tracked trainings: what is drawn, and what the legend says."""

import dataclasses
import math

import pytest
import torch
from matplotlib import pyplot

import wellcond as wc
from measurement.test_measure import X, vit

pyplot.switch_backend("Agg")


@pytest.fixture(autouse=True)
def _figures_are_closed():
    yield
    pyplot.close("all")


@pytest.fixture(scope="module")
def report():
    return wc.measure(vit(), X[:2], samples=2)


@pytest.fixture(scope="module")
def infinite():
    """The stacked matrix of five tokens in 24 dimensions has no full rank."""
    return wc.measure(vit(), X[:1], convention="stack")


def tracked(steps, **options):
    with wc.ConditionTracker(vit(), X[:1], every=1, budget=None, **options) as tracker:
        for _ in range(steps):
            tracker.step()
    return tracker


def drawn(ax):
    """Legend entries, and points by legend entry."""
    points = {found.get_label(): found.get_offsets().tolist() for found in ax.collections}
    legend = ax.get_legend() or ax.figure.legends[0]
    return [text.get_text() for text in legend.get_texts()], points


def test_a_plot_of_a_report_shows_every_head(report):
    ax = report.plot()
    _, points = drawn(ax)
    kappas = [head.mean_kappa() for layer in report.layers for head in layer.heads]
    assert [y for _, y in points["head"]] == kappas and ax.get_yscale() == "log"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0", "1"]
    assert any(text.get_text() == report.run["model"] for text in ax.texts)


def test_dead_heads_and_unknown_ones_are_marked_and_in_no_mean(report):
    def head(kappa, **fields):
        both = {"strict": (kappa,), "pseudo": (kappa,)}
        return dataclasses.replace(report.layers[0].heads[0], samples=(kappa,), both_samples=both, **fields)

    layers = [[head(100.0), head(1.0, dead=True)], [head(math.inf)]]
    layers = tuple(dataclasses.replace(a, heads=tuple(b)) for a, b in zip(report.layers, layers, strict=True))
    ax = dataclasses.replace(report, layers=layers).plot()
    legend, points = drawn(ax)
    assert len(points) == 3 and any("dead" in text for text in legend) and any("either" in text for text in legend)
    assert list(ax.lines[0].get_ydata())[0] == pytest.approx(100.0)


def test_a_plot_has_a_line_per_head():
    tracker = tracked(3, heads="all")
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


def test_a_plot_of_infinite_numbers_draws_the_pseudo_ones_and_says_so():
    tracker = tracked(2, convention="stack")
    assert all(point.condition_number == math.inf for point in tracker.points)
    ax = tracker.plot("kappa")
    shown = [list(line.get_ydata()) for line in ax.lines]
    assert shown == [[y for _, y in points] for points in tracker.series("pseudo_condition_number").values()]
    legend = [text.get_text() for text in ax.figure.legends[0].get_texts()]
    assert legend[-1] == "infinite: over the non-zero spectrum"


def test_a_plot_leaves_a_gap_where_a_measurement_failed():
    model = vit()
    tracker = wc.ConditionTracker(model, X[:1], every=1, budget=None)
    with torch.no_grad():
        model.pos_embed.fill_(math.nan)
    tracker.step()
    ax = tracker.plot()
    assert all(math.isnan(line.get_ydata()[1]) for line in ax.lines)
    assert "not finite, or the measurement failed" in [text.get_text() for text in ax.figure.legends[0].get_texts()]
