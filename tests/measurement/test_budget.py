"""What a tracker may spend: a clock that the test holds decides, so the machine's speed does not matter."""

import logging
import math

import pytest
import timm
import torch

import wellcond as wc


class Clock:
    """Seconds that the test lets pass."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Ticks(Clock):
    """Every look at the clock takes a second, so that whatever the tracker does has a cost."""

    def __call__(self):
        self.now += 1.0
        return self.now


def vit(tokens=2, depth=2, **options):
    """A model with `tokens` times `tokens` patches and three heads a layer."""
    torch.manual_seed(0)
    sizes = {"embed_dim": 24, "num_heads": 3, "num_classes": 5} | options
    return timm.models.VisionTransformer(img_size=8 * tokens, patch_size=8, depth=depth, **sizes)


def images(tokens=2):
    return torch.randn(1, 3, 8 * tokens, 8 * tokens, generator=torch.Generator().manual_seed(0))


def forward_passes(model, clock, seconds):
    """Every forward pass of the model takes so many seconds; returns the list that counts them."""
    passes = []

    def hook(*_):
        passes.append(clock.now)
        clock.now += seconds

    model.register_forward_pre_hook(hook)
    return passes


def jacobians(points):
    return [(p.step, p.layer, p.head) for p in points if p.condition_number is not None]


def test_one_head_a_layer_by_default_and_all_if_asked():
    heads = {
        asked: [point.head for point in wc.ConditionTracker(vit(), images(), heads=asked).points]
        for asked in (None, "all", (1, 2))
    }
    assert heads == {None: [0, 0], "all": [0, 1, 2] * 2, (1, 2): [1, 2] * 2}


def test_first_and_last_step_are_in_the_budget_and_in_the_overhead(caplog):
    clock, model = Clock(), vit()
    passes = forward_passes(model, clock, 0.5)
    with wc.ConditionTracker(model, images(), clock=clock) as tracker:
        assert math.isnan(tracker.overhead), "nothing was trained yet"
        for _ in range(10):
            clock.now += 1.0
            assert tracker.step() == []  # 5 % of 10 s is what the first one cost
            assert tracker.overhead == pytest.approx(0.5 / tracker.num_steps)
    assert len(passes) == 2 and {p.step for p in tracker.points} == {0, 10}
    assert tracker.overhead == pytest.approx(1.0 / 10)
    [record] = caplog.records
    for words in ("2 of 11 steps that were due (10 trained)", "10.0%", "2 heads was not measured", "budget=None"):
        assert words in record.getMessage() and record.levelname == "WARNING"
    assert tracker.close() == [] and len(caplog.records) == 1, "once"


@pytest.mark.parametrize(("every", "budget"), [pytest.param("auto", 0.05, marks=pytest.mark.slow), (3, 0.1)])
def test_nothing_exceeds_the_budget(every, budget):
    clock, model = Ticks(), vit()
    with wc.ConditionTracker(model, images(), every=every, budget=budget, clock=clock) as tracker:
        for _ in range(90):
            clock.now += 10.0
            tracker.step()
            if tracker.num_steps > 60:
                assert tracker.overhead <= budget
    assert tracker.overhead <= budget, "the last step too"
    assert tracker.overhead > 0.5 * budget, "and what is allowed is used"
    measured = jacobians(tracker.points)
    counts = [sum(layer == name for _, layer, _ in measured) for name in ("blocks.0.attn", "blocks.1.attn")]
    assert min(counts) >= 2 and max(counts) - min(counts) <= 1, "heads take turns"
    cheap = [p for p in tracker.points if p.condition_number is None]
    assert cheap and all(p.kappa_q > 0 and p.entropy > 0 and p.logit_std > 0 for p in tracker.points)


def test_a_jacobian_that_is_expected_not_to_fit_is_not_begun():
    """On this clock measuring takes no time; only what its size lets expect counts, until it was measured once."""
    clock, model = Clock(), vit(tokens=6, depth=1, embed_dim=48)  # 37 x 16 outputs: expected to take up to 0.17 s
    tracker = wc.ConditionTracker(model, images(6), clock=clock)
    for _ in range(5):
        clock.now += 1.0  # 0.05 s are earned in every step
        measured = tracker.step()
        assert bool(jacobians(measured)) == (tracker.num_steps >= 4)
    assert all(p.rank is None and p.status is None for p in tracker.points if p.step < 4), "never zero"
    clock.now += 0.001
    assert jacobians(tracker.step()), "it took nothing on this clock, so it may be measured at every step"


def test_cheap_heads_do_not_wait_for_ever_for_dear_ones():
    swin = timm.models.SwinTransformer(
        img_size=32, patch_size=2, window_size=4, embed_dim=16, depths=(1, 1), num_heads=(1, 4), num_classes=2
    )
    clock = Clock()
    tracker = wc.ConditionTracker(swin, torch.randn(1, 3, 32, 32), clock=clock, budget=0.01)
    for _ in range(200):
        clock.now += 1.0
        tracker.step()
        if len(seen := {layer for _, layer, _ in jacobians(tracker.points)}) == 2:
            break
    assert len(seen) == 2


def test_without_a_budget_everything_that_is_due_is_measured_and_said(caplog):
    caplog.set_level("INFO", "wellcond")
    clock, model = Clock(), vit()
    forward_passes(model, clock, 2.0)
    with wc.ConditionTracker(model, images(), every=2, budget=None, clock=clock) as tracker:
        for _ in range(3):
            clock.now += 1.0
            tracker.step()
    assert [step for step, _, _ in jacobians(tracker.points)] == [0, 0, 2, 2, 3, 3]
    assert tracker.overhead == pytest.approx(2.0)
    assert "which took 200.0% of the training time; budget=0.05 would limit that" in caplog.messages[-1]


def test_listed_steps_are_measured_within_the_budget_too():
    clock, model = Clock(), vit()
    passes = forward_passes(model, clock, 1.0)
    with wc.ConditionTracker(model, images(), every={2, 10, 80}, budget=0.05, clock=clock) as tracker:
        for _ in range(90):
            clock.now += 1.0
            tracker.step()
    assert {p.step for p in tracker.points} == {2, 80} and len(passes) == 2, "the first shows what one costs"


def test_time_that_others_spend_for_the_tracker_counts():
    clock = Clock()
    tracker = wc.ConditionTracker(vit(), images(), clock=clock)
    clock.now += 10.0
    tracker.step()
    before = tracker.overhead
    tracker.charge(1.0)
    assert tracker.overhead == pytest.approx(before + 0.1)


# -- what takes long is announced before it begins


class Announced(Exception):
    """Instead of the measurement that would follow."""


@pytest.fixture
def stop_at_announcement():
    """The log of wellcond raises Announced with its text."""

    def stop(record):
        raise Announced(record.getMessage())

    logger = logging.getLogger("wellcond")
    logger.addFilter(stop)
    yield
    logger.removeFilter(stop)


LARGE = {"tokens": 14, "depth": 1, "embed_dim": 192}  # 197 x 64 outputs, which take half a minute


def test_who_calls_may_announce_it(caplog):
    def stop(seconds):
        raise Announced(seconds)

    with pytest.raises(Announced) as one:
        wc.measure(vit(**LARGE), images(14), heads=[0], on_slow=stop)
    with pytest.raises(Announced) as all_three:
        wc.measure(vit(**LARGE), images(14), on_slow=stop)
    assert all_three.value.args[0] == pytest.approx(3 * one.value.args[0]) and one.value.args[0] > 10
    assert not caplog.records


def test_a_tracker_announces_what_training_waits_for(stop_at_announcement):
    with pytest.raises(Announced, match="training waits for a measurement .* budget="):
        wc.ConditionTracker(vit(**LARGE), images(14), budget=None)
    clock = Clock()
    tracker = wc.ConditionTracker(vit(**LARGE), images(14), budget=0.5, clock=clock)
    clock.now += 20.0
    assert not jacobians(tracker.step()), "not begun, so nothing to announce"
    clock.now += 1000.0
    with pytest.raises(Announced, match="training waits for a measurement .* heads="):
        tracker.step()


def test_a_refused_jacobian_leaves_weights_and_attention():
    asked = []

    def admit(layer, head, seconds):
        asked.append((head, seconds))
        return head != 0 and (seconds is None or head != 1)

    report = wc.measure(vit(depth=1), images(), admit=admit)
    heads = report.layers[0].heads
    assert [head.jacobian is None for head in heads] == [True, True, False]
    assert [(head, seconds is None) for head, seconds in asked] == [
        (0, True),
        *((h, u) for h in (1, 2) for u in (True, False)),
    ]
    full = wc.measure(vit(depth=1), images()).layers[0].heads
    for one, other in zip(heads, full, strict=True):
        assert one.weights == other.weights and one.attention == other.attention
    assert "not measured" in heads[1].how and heads[2].jacobian == full[2].jacobian


def test_entropy_is_known_without_a_jacobian_where_attention_is_not_plain():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaModel(config)
    tokens = torch.randint(64, (1, 8), generator=torch.Generator().manual_seed(0))
    cheap, full = (wc.measure(model, tokens, jacobian=jacobian).layers[0].heads for jacobian in (False, True))
    for one, other in zip(cheap, full, strict=True):
        for name in ("entropy", "normalised_entropy", "max_probability", "diagonal_mass", "logit_std"):
            assert getattr(one.attention, name) == pytest.approx(getattr(other.attention, name), rel=1e-3)
