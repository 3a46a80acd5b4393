import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.helpers import pil_images
from wellcond.errors import RecipeError
from wellcond.lab.tasks.base import EVALUATION, AugmentationSettings, Samples
from wellcond.lab.tasks.image_classification import Pictures, picture_transform
from wellcond.lab.train.batches import UpdatePlan, evaluation_parts, fetch_batches


def updates(plan, start=0, stop=12):
    """Parts of every update."""
    parts = list(plan.parts(start, stop))
    return [parts[k : k + plan.accumulate] for k in range(0, len(parts), plan.accumulate)]


def test_an_epoch_shows_every_sample_at_most_once():
    plan = UpdatePlan(num_samples=25, batch_size=6, accumulate=1, seed=3)
    assert plan.steps_per_epoch == 4
    for epoch in range(3):
        keys = [key for (part,) in updates(plan, start=4 * epoch, stop=4 * epoch + 4) for key in part]
        assert len(keys) == 24 == len({index for index, _ in keys}) and {of for _, of in keys} == {epoch}
        assert all(0 <= index < 25 for index, _ in keys)


def test_orders_differ_between_epochs_and_seeds():
    plans = [UpdatePlan(24, 24, 1, seed) for seed in (0, 1)]
    orders = [[index for index, _ in part] for plan in plans for (part,) in updates(plan, stop=2)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


@pytest.mark.parametrize(("processes", "accumulate"), [(1, 2), (2, 1), (3, 1), (2, 3), (4, 3), (1, 12)])
def test_processes_and_accumulation_share_the_same_update(processes, accumulate):
    single = updates(UpdatePlan(30, 12, 1, seed=5), stop=5)
    plan = UpdatePlan(30, 12, accumulate, seed=5, processes=processes)
    shared = [updates(replace(plan, rank=rank), stop=5) for rank in range(processes)]
    for step, (whole,) in enumerate(single):
        # Part by part, the processes one after the other: also the order is that of the whole.
        joined = [key for part in range(accumulate) for rank in range(processes) for key in shared[rank][step][part]]
        assert joined == whole


@pytest.mark.parametrize("start", [1, 3, 4, 9])
def test_resuming_continues_the_sequence(start):
    plan = UpdatePlan(20, 6, 2, seed=1, rank=1, processes=3)
    assert updates(plan, start) == updates(plan)[start:]


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from([(1, 1), (2, 1), (1, 3)]),
)
def test_repeats_show_fewer_samples_more_often(num_samples, batch_size, repeats, epoch, shares):
    processes, accumulate = shares
    if num_samples < batch_size or batch_size % (processes * accumulate):
        return
    once = UpdatePlan(num_samples, batch_size, accumulate, seed=2)
    plan = UpdatePlan(num_samples, batch_size, accumulate, seed=2, repeats=repeats, processes=processes)
    steps = plan.steps_per_epoch
    assert steps == once.steps_per_epoch
    ranks = [updates(replace(plan, rank=rank), epoch * steps, epoch * steps + steps) for rank in range(processes)]
    keys = [
        key
        for step in range(steps)
        for part in range(accumulate)
        for rank in range(processes)
        for key in ranks[rank][step][part]
    ]
    assert len(keys) == steps * batch_size and len(set(keys)) == len(keys)  # no augmentation twice
    runs = [[draw for _, draw in run] for _, run in itertools.groupby(keys, key=lambda key: key[0])]
    whole = list(range(epoch * repeats, (epoch + 1) * repeats))
    assert all(run == whole for run in runs[:-1]) and runs[-1] == whole[: len(runs[-1])]
    distinct = list(dict.fromkeys(index for index, _ in keys))
    order = [
        key
        for (part,) in updates(
            UpdatePlan(num_samples, batch_size, 1, 2), start=epoch * steps, stop=epoch * steps + steps
        )
        for key, _ in part
    ]
    assert distinct == order[: -(-len(order) // repeats)]


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(RecipeError, match="for instance 12"):
        UpdatePlan(20, 10, 2, 0, processes=2)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 8))
def test_evaluation_covers_every_sample_once(num_samples, batch_size, processes):
    if num_samples < processes:
        with pytest.raises(RecipeError, match="each process"):
            evaluation_parts(num_samples, batch_size, 0, processes)
        return
    shares = [evaluation_parts(num_samples, batch_size, rank, processes) for rank in range(processes)]
    keys = [key for parts in shares for part in parts for key in part]
    assert sorted(keys) == [(index, EVALUATION) for index in range(num_samples)]
    assert len({len(parts) for parts in shares}) == 1
    sizes = [len(part) for parts in shares for part in parts]
    # One more only where a process has a sample less than another and each part needs at least one.
    assert min(sizes) > 0 and max(sizes) <= max(batch_size, 2 if processes > 1 else 1)


def pictures(seed=0):
    augmentation = AugmentationSettings(
        flip=0.5, resized_crop=(0.3, 1.0), rand_augment="rand-m9-mstd0.5-inc1", color_jitter=0.3, random_erasing=0.5
    )
    transform = picture_transform(16, 3, 1.0, augmentation)
    return Pictures(pil_images([(20 + k % 3, 18) for k in range(10)]), transform, channels=3, seed=seed)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
def test_workers_make_the_same_batches():
    samples = pictures()
    parts = list(UpdatePlan(10, 4, 2, seed=0).parts(0, 4))
    device = torch.device("cpu")
    alone = list(fetch_batches(samples, parts, workers=0, device=device))
    together = list(fetch_batches(samples, parts, workers=2, device=device))
    assert len(alone) == len(together) == 8
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a["image"], b["image"]) and torch.equal(a["label"], b["label"])


def test_repeats_of_a_picture_differ():
    samples = pictures()
    (part,) = UpdatePlan(10, 6, 1, seed=0, repeats=3).parts(0, 1)
    batch = samples.fetch(part)
    assert batch["label"].tolist() == [part[0][0] % 3] * 3 + [part[3][0] % 3] * 3
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(batch["image"], 2))
    assert torch.equal(batch["image"][1], samples.fetch([part[1]])["image"][0])


def test_what_is_in_memory_needs_no_workers():
    class Memory(Samples):
        def __len__(self):
            return 2

        def fetch(self, keys):
            return {"keys": torch.tensor(keys), "worker": torch.utils.data.get_worker_info()}

    (batch,) = fetch_batches(Memory(), [[(1, 2)]], workers=2, device=torch.device("cpu"))
    assert batch["worker"] is None and batch["keys"].tolist() == [[1, 2]]
