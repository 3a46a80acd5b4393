import json

import pytest
import timm
import torch
from torch import nn

import wellcond as wc
from wellcond.attention.wrappers import unwrap
from wellcond.tracking import Allowance

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


def test_losses_are_the_same_bit_for_bit():
    plain = train(vit().train(), 6)
    model = vit().train()
    tracker = wc.ConditionTracker(model, X[:1], every=1, budget=1.0)
    assert train(model, 6, tracker) == plain
    assert tracker.points and model.training


def test_points_are_what_measure_says():
    model = vit()
    tracker = wc.ConditionTracker(model, X[:1], heads=[1], budget=1.0)
    report = wc.measure(model, X[:1], heads=[1])
    assert [p.layer for p in tracker.points] == ["blocks.0.attn", "blocks.1.attn"]
    for point, layer in zip(tracker.points, report.layers, strict=True):
        assert point.condition_number == layer.heads[0].jacobian.condition_number
        assert point.kappa_v == layer.heads[0].weights["v"].condition_number
        assert point.entropy == layer.heads[0].diagnosis.attention.entropy and point.dead is False
    assert json.loads(tracker.to_json().splitlines()[0])["layer"] == "blocks.0.attn"
    assert set(tracker.series("entropy")) == {("blocks.0.attn", 1), ("blocks.1.attn", 1)}
    with pytest.raises(ValueError, match="unknown quantity"):
        tracker.series("kappa")


def test_the_allowance_never_exceeds_its_share():
    allowance = Allowance(0.05)
    allowance.record("head", 2.0, charged=False)
    spent = []
    for _ in range(1000):
        allowance.training += 1.0
        if allowance.permits("head"):
            allowance.record("head", 2.0)
        spent.append(allowance.spent / allowance.training)
    assert max(spent) <= 0.05 and spent[-1] > 0.045


def test_the_budget_holds_with_a_clock_of_our_own(monkeypatch):
    now = [0.0]
    model = vit()
    import wellcond.tracking as tracking

    original = tracking.measure

    def slow(*args, **kwargs):
        now[0] += 3.0  # every probe takes three seconds
        return original(*args, **kwargs)

    monkeypatch.setattr(tracking, "measure", slow)
    tracker = wc.ConditionTracker(model, X[:1], budget=0.1, clock=lambda: now[0])
    assert tracker.overhead == 0.0 and len(tracker.points) == 6
    for _ in range(400):
        now[0] += 1.0  # every training step one
        tracker.step()
        assert tracker.overhead <= 0.1
    assert tracker.overhead > 0.09
    probed = {(p.layer, p.head) for p in tracker.points if p.step > 0}
    assert len(probed) == 6, "heads take turns"


def test_every_and_step_batches():
    model = vit()
    tracker = wc.ConditionTracker(model, every=3, budget=1.0, clock=iter(range(100_000)).__next__)
    with pytest.raises(ValueError, match="give a batch"):
        for _ in range(3):
            tracker.step()
    tracker = wc.ConditionTracker(model, every=3, budget=1.0, clock=iter(range(100_000)).__next__)
    steps = [bool(tracker.step(X[:1])) for _ in range(9)]
    assert steps == [False, False, True] * 3


def test_it_follows_a_conditioned_and_a_compiled_model():
    model = vit()
    wc.condition_(model, "balanced")
    compiled = torch.compile(model, backend="eager")
    tracker = wc.ConditionTracker(compiled, X[:1], every=1, budget=1.0, heads=[0])
    train(compiled, 2, tracker)
    assert all(p.kappa_q <= 2 + 1e-6 for p in tracker.points)


def test_a_probe_inside_autocast_is_not_rounded():
    model = vit().eval()
    outside = wc.ConditionTracker(model, X[:1], heads=[0]).points
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = wc.ConditionTracker(model, X[:1], heads=[0]).points
    assert [p.condition_number for p in inside] == [p.condition_number for p in outside]


def test_bad_options():
    with pytest.raises(ValueError, match="every: expected"):
        wc.ConditionTracker(vit(), X[:1], every=0)
    with pytest.raises(ValueError, match="budget: expected"):
        wc.ConditionTracker(vit(), X[:1], budget=0)
    with pytest.raises(ValueError, match="none of the attentions"):
        wc.ConditionTracker(vit(), X[:1], heads=[9])


def test_ddp_probes_on_the_first_rank_only(tmp_path):
    torch.multiprocessing.spawn(_ddp_worker, args=(str(tmp_path),), nprocs=2)
    counts = [int((tmp_path / f"points{rank}").read_text()) for rank in range(2)]
    assert counts[0] > 0 and counts[1] == 0


def _ddp_worker(rank, path):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(vit())
    tracker = wc.ConditionTracker(model, X[:1], every=1, budget=1.0, heads=[0])
    train(model, 2, tracker)
    with open(f"{path}/points{rank}", "w") as file:
        file.write(str(len(tracker.points)))
    torch.distributed.destroy_process_group()
