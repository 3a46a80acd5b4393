import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from wellcond.lab.optimizers import ScheduleSettings

PARSED = TypeAdapter(ScheduleSettings)


def curve(num_steps, per_epoch=10, **fields):
    """Points of all updates."""
    schedule = PARSED.validate_python(fields)
    return [schedule.point(t, num_steps, per_epoch) for t in range(num_steps)]


def factors(num_steps, per_epoch=10, **fields):
    return [point.factor for point in curve(num_steps, per_epoch, **fields)]


@pytest.mark.parametrize("anneal", ["cos", "linear"])
@pytest.mark.parametrize(("num_steps", "rise"), [(100, 0.3), (37, 0.1), (5, 0.25), (10, 0.05), (2, 0.3)])
def test_one_cycle_equals_torch(anneal, num_steps, rise):
    peak = 0.02
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak, total_steps=num_steps, pct_start=rise, anneal_strategy=anneal
    )
    for point in curve(num_steps, name="one_cycle", rise=rise, anneal=anneal):
        group = optimizer.param_groups[0]
        assert peak * point.factor == pytest.approx(group["lr"], rel=1e-12, abs=1e-15)
        assert point.beta1 == pytest.approx(group["betas"][0], rel=1e-12)
        optimizer.step()
        if scheduler.last_epoch + 1 < num_steps:
            scheduler.step()


@pytest.mark.parametrize("warmup", [0, 7])
def test_cosine_equals_timm(warmup):
    from timm.scheduler import CosineLRScheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = CosineLRScheduler(
        optimizer, t_initial=40 - warmup, lr_min=0.01, warmup_t=warmup, warmup_lr_init=0.05, warmup_prefix=True,
        t_in_epochs=False,
    )  # fmt: skip
    given = {"warmup": {"steps": warmup}} if warmup else {}
    for t, factor in enumerate(factors(40, name="cosine", start=0.05, end=0.01, **given)):
        scheduler.step_update(t)
        assert factor == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)


@pytest.mark.parametrize("rate_of", ["epoch", "former_epoch"])
@pytest.mark.parametrize(("epochs", "warmup", "cooldown"), [(12, 3, 2), (9, 0, 0), (7, 5, 0)])
def test_a_rate_per_epoch_over_the_warm_up_is_that_of_the_releases(rate_of, epochs, warmup, cooldown):
    """timm's loop steps to epoch + 1 behind an epoch, those of DeiT and XCiT to the epoch that has just ended."""
    from timm.scheduler import CosineLRScheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = CosineLRScheduler(optimizer, t_initial=epochs, lr_min=0.01, warmup_t=warmup, warmup_lr_init=0.05)
    expected = []
    for epoch in range(epochs + cooldown):
        expected += [optimizer.param_groups[0]["lr"]] * 4
        scheduler.step(epoch + 1 if rate_of == "epoch" else epoch)
    fields = {"name": "cosine", "start": 0.05, "end": 0.01, "over_warmup": True, "rate_of": rate_of}
    fields |= {"warmup": {"epochs": warmup}} if warmup else {}
    fields |= {"cooldown": {"epochs": cooldown}} if cooldown else {}
    assert factors(len(expected), per_epoch=4, **fields) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("num_steps", "peak"), [(10, 0.5), (100, 0.2), (50, 0.9), (1000, 0.15)])
def test_triangular_reaches_the_peak_and_ends_near_zero(num_steps, peak):
    found = factors(num_steps, name="triangular", peak=peak)
    top = round(peak * num_steps)
    assert found[top - 1] == max(found) and max(found) == pytest.approx(1, abs=1 / (num_steps - top))
    assert 0 < found[-1] <= 1 / (num_steps - top) + 1e-12 and found[0] == pytest.approx(1 / top)
    assert found[:top] == sorted(found[:top]) and found[top:] == sorted(found[top:], reverse=True)


def test_steps_falls_at_each_milestone():
    found = factors(8, name="steps", milestones=[{"steps": 3}, {"epochs": 0.6}], factor=0.5, warmup={"steps": 1})
    assert found == [0, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("num_steps", [1, 2, 40])
@pytest.mark.parametrize(
    "fields",
    [
        {"name": "constant", "warmup": {"steps": 80}, "start": 1},
        {"name": "cosine", "warmup": {"steps": 1}, "start": 0.3},
        {"name": "one_cycle", "rise": 0.01},
        {"name": "one_cycle", "rise": 0.99},
        {"name": "triangular", "peak": 0.01},
        {"name": "triangular", "peak": 0.99},
        {"name": "steps", "milestones": [{"steps": 1}, {"steps": 1}, {"steps": 60}]},
    ],
)
def test_no_schedule_leaves_the_range_from_zero_to_the_peak(fields, num_steps):
    assert all(-1e-12 <= factor <= 1 + 1e-12 for factor in factors(num_steps, **fields))


@pytest.mark.parametrize("name", ["constant", "cosine", "steps"])
def test_a_warm_up_longer_than_the_run_only_rises(name):
    needed = {"milestones": [{"steps": 500}]} if name == "steps" else {}
    found = factors(4, name=name, warmup={"steps": 10}, **needed)
    assert found == pytest.approx([0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "cosine", "start": 1.5},
        {"name": "cosine", "warmup": {"epochs": 1, "steps": 2}},
        {"name": "cosine", "warmup": {}},
        {"name": "steps", "milestones": [], "factor": 2},
    ],
)
def test_values_that_make_no_sense_are_refused(fields):
    with pytest.raises(ValidationError):
        PARSED.validate_python(fields)
