"""`ConditionTracker` on models that two processes hold together: all take part, none waits in vain."""

import functools

import pytest
import torch

import wellcond as wc
from distributed.models import TOKENS, WRAPPERS, blocks_of, build, gather, loss_of, probe_of
from distributed.processes import on_two, rank
from wellcond.attention.sharding import any_distributed, is_sharded

pytestmark = pytest.mark.processes


def train(model, steps, tracker=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        if tracker is not None:
            tracker.step()


def within_budget():
    """The clocks of processes differ, so that only one of them may decide."""
    model = WRAPPERS["fsdp"](build("vit"))
    now = [0.0]

    def clock():
        now[0] += 0.001 + 0.5 * rank()
        return now[0]

    tracker = wc.ConditionTracker(model, probe_of(model), every=3, budget=0.5, clock=clock)
    for _ in range(10):
        train(model, 1)
        now[0] += 0.1  # a hundred looks at the clock of the first process, none of the second's
        tracker.step()
    tracker.close()
    both = [None, None]
    measured = [(point.step, point.layer, point.condition_number) for point in tracker.points]
    torch.distributed.all_gather_object(both, measured)
    return {"same": both[0] == both[1], "steps": [step for step, _, _ in measured],
            "jacobians": [step for step, _, kappa in measured if kappa is not None]}  # fmt: skip


def undisturbed():
    states = []
    for tracked in (True, False):
        model = WRAPPERS["fsdp"](wc.condition_(build("vit"), "balanced"))
        tracker = wc.ConditionTracker(model, probe_of(model), every=1, budget=None) if tracked else None
        train(model, 3, tracker)
        states.append(gather(model))
    return {"tracked": states[0], "plain": states[1]}


def under_ddp():
    model = WRAPPERS["ddp"](build("vit"))
    tracker = wc.ConditionTracker(model, probe_of(model), every=1, budget=None)
    train(model, 1, tracker)
    counts = [None, None]
    torch.distributed.all_gather_object(counts, len(tracker.points))
    return {"counts": counts}


def hopeless():
    model = WRAPPERS["fsdp"](build("vit"))
    spoil(model)
    wc.ConditionTracker(model, probe_of(model), every=1, budget=None)


def diverged():
    model = WRAPPERS["fsdp"](build("vit"))
    tracker = wc.ConditionTracker(model, probe_of(model), every=1, budget=None)
    spoil(model)
    return {"status": [point.status for point in tracker.step()], "problem": tracker.points[-1].problem}


def spoil(model):
    with torch.no_grad():
        for parameter in blocks_of(model)[0].attn.parameters():
            parameter.fill_(float("nan"))


def own_heads():
    """A forward pass that was told to split into the heads of its own process."""
    model = WRAPPERS["tp"](build("llama"))
    blocks_of(model)[0].self_attn.num_heads = 2
    sites = wc.find_attention(model)
    blocks_of(model)[0].self_attn.num_heads = 3
    wc.ConditionTracker(model, probe_of(model), sites=sites, every=1, budget=None)


def own_batch():
    model = WRAPPERS["fsdp"](build("gpt2"))
    batch = {"input_ids": TOKENS[rank() : rank() + 1]}
    tracker = wc.ConditionTracker(model, batch, every=1, budget=None)
    both = [None, None]
    torch.distributed.all_gather_object(both, [point.entropy for point in tracker.points])
    return {"both": both}


def after_an_evaluation():
    """FSDP2 left whole weights, on which nothing shows that they are sharded."""
    model = WRAPPERS["fsdp at once"](build("vit"))
    with torch.no_grad():
        loss_of(model)
    held = [any_distributed(model), is_sharded(model)]
    tracker = wc.ConditionTracker(model, probe_of(model), every=1, budget=None)
    train(model, 2, tracker)
    return {"steps": sorted({point.step for point in tracker.points}), "held": held}


def in_bfloat16():
    model = WRAPPERS["fsdp in bfloat16"](build("vit"))
    tracker = wc.ConditionTracker(model, probe_of(model), every=1, budget=None)
    return {"kappas": [point.kappa_q for point in tracker.points]}


def evaluated_while_folded():
    losses = []
    for wrapper in ("fsdp", "fsdp at once"):
        model = wc.condition_(WRAPPERS[wrapper](build("vit")), "balanced")
        with torch.no_grad():
            before = loss_of(model).item()
            with wc.folded(model):
                inside = loss_of(model).item()
            losses += [before, inside, loss_of(model).item()]
        train(model, 1)
    return {"losses": losses}


def a_bad_part():
    """Only the second process holds the row that is spoilt; none folds."""
    model = wc.condition_(WRAPPERS["fsdp"](build("vit")), "identity", lam=0.5)
    weight = blocks_of(model)[0].attn.qkv._parameters["weight"]
    if rank() == 1:
        with torch.no_grad():
            weight.to_local()[0] = float("nan")
    try:
        wc.fold_(model)
    except wc.WeightError as error:
        assert wc.conditioning_of(model) is not None
        return {"said": str(error)}


@pytest.fixture
def two(tmp_path):
    return functools.partial(on_two, tmp_path)


def test_one_process_decides_what_the_budget_allows(two):
    found = two(within_budget)
    assert found["same"] and found["steps"] == [step for step in (0, 3, 6, 9, 10) for _ in range(2)]
    assert found["jacobians"] and 0 not in found["jacobians"]


def test_training_is_the_same_bit_for_bit(two):
    tracked, plain = two(undisturbed).values()
    assert all(torch.equal(tracked[name], plain[name]) for name in plain)


def test_under_ddp_the_first_process_measures(two):
    assert two(under_ddp)["counts"] == [4, 0]


def test_what_cannot_be_measured_raises_on_every_process(two):
    found = two(hopeless)
    assert found.startswith("WellcondError") and "NaN" in found


def test_a_training_that_diverged_is_recorded(two):
    found = two(diverged)
    assert set(found["status"]) == {"failed"} and "NaN" in found["problem"]


def test_a_module_with_its_own_count_of_heads_is_refused(two):
    found = two(own_heads)
    assert found.startswith("UnsupportedLayoutError") and "num_heads=3" in found


def test_every_process_has_the_points_of_the_first_ones_batch(two):
    ours, theirs = two(own_batch)["both"]
    assert ours == theirs
    model = build("gpt2")
    alone = wc.ConditionTracker(model, {"input_ids": TOKENS[:1]}, every=1, budget=None)
    assert ours == pytest.approx([point.entropy for point in alone.points], rel=1e-5)


def test_weights_that_an_evaluation_left_whole_are_sharded_all_the_same(two):
    assert two(after_an_evaluation) == {"steps": [0, 1, 2], "held": [False, True]}


def test_what_computes_in_bfloat16_is_measured_as_it_is_stored(two):
    alone = wc.ConditionTracker(build("vit"), probe_of(build("vit")), every=1, budget=None)
    assert two(in_bfloat16)["kappas"] == pytest.approx([point.kappa_q for point in alone.points], rel=1e-5)


def test_a_folded_model_may_be_evaluated(two):
    losses = two(evaluated_while_folded)["losses"]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-5)


def test_all_processes_fold_or_none(two):
    assert "nothing was folded" in two(a_bad_part)["said"]
