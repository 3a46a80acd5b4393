"""The points of a tracked training, its first and last steps, and what a tracker says."""

import dataclasses
import json
import math

import pytest
import timm
import torch
from torch import nn

import wellcond as wc
import wellcond.attention.record as capture_watch
from wellcond.attention.sharding import unwrap

X = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 5


def vit():
    torch.manual_seed(0)
    return timm.models.VisionTransformer(
        img_size=16,
        patch_size=8,
        embed_dim=24,
        depth=2,
        num_heads=3,
        num_classes=5,
        proj_drop_rate=0.2,
        attn_drop_rate=0.1,
    )


def train(model, steps, tracker=None):
    optimizer = torch.optim.AdamW(unwrap(model).parameters(), lr=1e-2)
    losses = []
    torch.manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if tracker is not None:
            tracker.step()
    return losses


def state_of(model):
    """Everything that a measurement must leave alone."""
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    flags = [module.training for module in model.modules()]
    return tensors, gradients, flags, torch.get_rng_state()


def assert_same_state(before, after):
    for old, new in zip(before[:2], after[:2], strict=True):
        assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    assert before[2] == after[2] and torch.equal(before[3], after[3])


OPTIONS = {
    "within a budget": {"every": 1, "budget": 1.0},
    "all at once": {"every": 2, "budget": None, "samples": 2},
    "weights only": {"every": (), "weights_every": 1, "budget": None},
}


@pytest.mark.parametrize(
    "options, method", [("within a budget", "balanced"), ("all at once", None), ("weights only", "identity")]
)
@pytest.mark.filterwarnings("ignore::wellcond.NumericalWarning")
def test_losses_are_the_same_bit_for_bit(options, method):
    def build():
        return vit().train() if method is None else wc.condition_(vit().train(), method)

    options, plain = OPTIONS[options], train(build(), 4)
    model = build()
    tracker = wc.ConditionTracker(model, X[:2], **options)
    assert train(model, 4, tracker) == plain
    assert tracker.points and model.training
    if options["budget"] is None:
        assert tracker.points[-1].step == 4


@pytest.mark.parametrize("jacobian", [True, False])
def test_a_measurement_leaves_no_trace(jacobian):
    model = wc.condition_(vit().train(), "polar", frozen=True)
    model.blocks[0].eval()
    tracker = wc.ConditionTracker(model, X[:2], every=(), budget=None, heads="all")
    nn.functional.cross_entropy(model(X), Y).backward()
    before = state_of(model)
    assert len(tracker.measure_now(jacobian=jacobian)) == 6
    assert_same_state(before, state_of(model))


def test_points_are_what_measure_says_in_one_forward_pass(monkeypatch):
    passes, run, model = [], capture_watch.run, vit()
    monkeypatch.setattr(capture_watch, "run", lambda model, batch: passes.append(1) or run(model, batch))
    tracker = wc.ConditionTracker(model, X[:3], every=2, heads=[1], budget=None, samples=3)
    assert len(passes) == 1 and [p.layer for p in tracker.points] == ["blocks.0.attn", "blocks.1.attn"]
    assert [len(tracker.step()) for _ in range(4)] == [0, 2, 0, 2] and len(passes) == 3
    report = wc.measure(model, X[:3], heads=[1], samples=3)
    for point, layer in zip(tracker.points[-2:], report.layers, strict=True):
        [head] = layer.heads
        assert point.condition_number == head.mean_kappa() and point.sigma_max == head.jacobian.sigma_max
        assert point.bound_log10 == head.bound_log10 and point.kappa_v == head.weights["v"].condition_number
        assert point.entropy == head.diagnosis.attention.entropy and point.dead is False
    assert json.loads(tracker.to_json().splitlines()[0])["layer"] == "blocks.0.attn"
    assert set(tracker.series("entropy")) == {("blocks.0.attn", 1), ("blocks.1.attn", 1)}
    with pytest.raises(ValueError, match="unknown quantity"):
        tracker.series("kappa")


def test_every_and_step_batches():
    model = vit()
    tracker = wc.ConditionTracker(model, every=3, budget=None)
    with pytest.raises(ValueError, match="give a batch"):
        for _ in range(3):
            tracker.step()
    tracker = wc.ConditionTracker(model, every=3, budget=None)
    steps = [bool(tracker.step(X[:1])) for _ in range(9)]
    assert steps == [True, False, True, *[False, False, True] * 2]  # the first that has a batch, and what is due


@pytest.mark.slow
def test_it_follows_a_conditioned_and_a_compiled_model():
    compiled = torch.compile(wc.condition_(vit(), "balanced"), backend="eager")
    tracker = wc.ConditionTracker(compiled, X[:1], every=1, budget=None, heads=[0])
    train(compiled, 2, tracker)
    assert tracker.points and all(p.kappa_q <= 2 + 1e-6 for p in tracker.points)


def test_a_probe_inside_autocast_is_not_rounded():
    model = vit().eval()
    outside = wc.ConditionTracker(model, X[:1], budget=None).points
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = wc.ConditionTracker(model, X[:1], budget=None).points
    assert None not in [p.condition_number for p in inside]
    assert [p.condition_number for p in inside] == [p.condition_number for p in outside]


def undated(point):
    return dataclasses.replace(point, seconds=0.0)


def test_steps_may_be_listed_and_weights_have_steps_of_their_own():
    tracker = wc.ConditionTracker(vit(), X[:1], every={2, 5}, weights_every=2, budget=None, heads=[0])
    for _ in range(6):
        tracker.step()
    found = {step: {p.condition_number is not None for p in tracker.points if p.step == step} for step in range(7)}
    assert found == {0: {False}, 1: set(), 2: {True}, 3: set(), 4: {False}, 5: {True}, 6: {False}}


def test_a_point_without_a_jacobian_has_the_same_weights_and_attention():
    model = wc.condition_(vit(), "balanced")
    cheap, full = (wc.ConditionTracker(model, X[:1], every=every, weights_every={0}, budget=None).points[0]
                   for every in ((), {0}))  # fmt: skip
    missing = {name for name, value in cheap.to_dict().items() if value is None}
    assert missing == {
        "condition_number", "pseudo_condition_number", "sigma_max", "sigma_rank", "rank", "nullity", "status",
        "norm_q", "norm_k", "norm_v", "papers_bound_log10", "bound_log10",
    }  # fmt: skip
    assert None not in full.to_dict().values()
    same = set(full.to_dict()) - missing - {"seconds"}
    assert {name: getattr(cheap, name) for name in same} == {name: getattr(full, name) for name in same}


def test_raw_weights_are_the_stored_ones():
    model = wc.condition_(vit(), "polar")
    point = wc.ConditionTracker(model, X[:1], every={0}, budget=None, heads=[1]).points[0]
    stored = model.blocks[0].attn.qkv._parameters["weight"].detach().double().view(3, 3, 8, 24)[:, 1]
    for role, weight in zip("qkv", stored, strict=True):
        sigma = torch.linalg.svdvals(weight)
        assert getattr(point, f"raw_sigma_max_{role}") == pytest.approx(float(sigma[0]))
        assert getattr(point, f"raw_sigma_min_{role}") == pytest.approx(float(sigma[-1]))
        assert getattr(point, f"raw_kappa_{role}") > 2 >= getattr(point, f"kappa_{role}") - 1e-6
        # polar adds sigma_1 times the orthogonal factor
        assert getattr(point, f"sigma_max_{role}") == pytest.approx(2 * float(sigma[0]), rel=1e-4)


def test_resuming_counts_on_and_repeats_nothing():
    tracker = wc.ConditionTracker(vit(), X[:1], every=5, budget=None, first_step=10)
    assert tracker.num_steps == 10 and not tracker.points
    steps = [bool(tracker.step()) for _ in range(5)]
    assert steps == [False] * 4 + [True] and {p.step for p in tracker.points} == {15}


@pytest.mark.parametrize(
    "poison, where, jacobian",
    [
        (math.nan, "blocks.0.attn.qkv.weight", True),
        (math.inf, "blocks.1.attn.qkv.weight", False),
        (math.inf, "blocks.1.attn.qkv.weight", True),
        (math.nan, "pos_embed", False),
    ],
)
def test_a_model_that_diverges_goes_on_and_is_said_to(poison, where, jacobian):
    model = vit()
    steps = {"every": 1} if jacobian else {"every": (), "weights_every": 1}
    tracker = wc.ConditionTracker(model, X[:1], budget=None, heads="all", **steps)
    with torch.no_grad():
        model.get_parameter(where).flatten()[-1] = poison  # the last row of the values, or the last token
    points = tracker.step()
    assert len(points) == 6
    failed = [point for point in points if point.status == "failed"]
    assert failed and all(point.problem and math.isnan(point.kappa_q) for point in failed)
    assert all(math.isnan(p.condition_number) if jacobian else p.condition_number is None for p in failed)
    lines = [json.loads(line) for line in tracker.to_json().splitlines()]
    assert lines[-1]["status"] == "failed" and lines[-1]["kappa_q"] == "nan"
    model.load_state_dict(vit().state_dict())
    assert [undated(p) for p in tracker.step()] == [dataclasses.replace(undated(p), step=2) for p in tracker.points[:6]]


def test_what_cannot_be_measured_at_all_raises():
    with pytest.raises(wc.WeightError):
        wc.ConditionTracker(vit(), X[:1] * math.nan, budget=None)
    late = wc.ConditionTracker(vit(), every=1, budget=None)
    with pytest.raises(wc.WeightError):
        late.step(X[:1] * math.nan)


BAD_OPTIONS = {
    "every": [0, [-1], "often", 1.5, ["2"], True],
    "weights_every": [-1, "auto"],
    "budget": [0, 1.5, math.nan, True, "a tenth"],
    "heads": [[], [-1], ["0"], [True], 0, "first"],
    "samples": [0, True, 1.0],
    "sites": [0],
    "first_step": [-1, True, "2"],
    "method": ["x"],
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_named_before_anything_runs(name):
    def never(*_):
        raise AssertionError("the model ran")

    model = vit()
    model.register_forward_pre_hook(never)
    for value in BAD_OPTIONS[name]:
        with pytest.raises((TypeError, ValueError), match=f"{name}: "):
            wc.ConditionTracker(model, X[:1], **{name: value})


# -- the ends of a training, and what the budget allowed


def slow_tracker(model, caplog, steps, **options):
    """Every call of the clock takes a second."""
    caplog.set_level("INFO", "wellcond")
    caplog.clear()
    tracker = wc.ConditionTracker(model, X[:1], clock=iter(range(100_000)).__next__, **options)
    with tracker:
        for _ in range(steps):
            tracker.step()
    return tracker, "\n".join(caplog.messages)


def test_the_last_step_is_measured_where_it_is_not_due(caplog):
    tracker, said = slow_tracker(vit(), caplog, 5, every=2, budget=None)
    assert sorted({p.step for p in tracker.points}) == [0, 2, 4, 5]
    assert said.startswith(
        "wellcond: measured at 4 of 4 steps that were due (5 trained), kappa(J) 8 times (2 of 2 heads)"
    )
    assert len(caplog.messages) == 1 and "budget=0.05 would limit that to 5 %" in said
    again, _ = slow_tracker(vit(), caplog, 4, every=2, budget=None, heads="all")
    assert [p.step for p in again.points] == [0] * 6 + [2] * 6 + [4] * 6, "not twice"


def test_batches_given_to_step_measure_the_ends(caplog):
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


# -- lines and representations
