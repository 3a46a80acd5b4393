"""Samples: images, boxes and masks move together."""

import numpy as np
import pytest
import torch
from PIL import Image

from lab.tasks.detection.coco_sets import MINI, compressed, disc, load_set, masks_of, rectangle, runs
from wellcond.lab.seeding import generator
from wellcond.lab.tasks.detection import samples
from wellcond.lab.tasks.detection.samples import (
    DetectionAugmentation,
    boxes_of_masks,
    choose_view,
    fit,
    prepare,
)

needs_mini = pytest.mark.skipif(not MINI.is_dir(), reason="coco2017-mini is not at hand")
TRAINING = DetectionAugmentation(flip=0.5, sides=(48, 64, 80), longest=133, crop=True)
SEEDS = range(40)


def crops(monkeypatch, sides=(40, 50, 60), limits=(30, 50), share=0.5):
    monkeypatch.setattr(samples, "CROP_SIDES", sides)
    monkeypatch.setattr(samples, "CROP_RANGE", limits)
    monkeypatch.setattr(samples, "CROP_SHARE", share)


@pytest.fixture(autouse=True)
def small_crops(monkeypatch):
    crops(monkeypatch)


def example_of(segmentations, size=(40, 60)):
    """Objects whose boxes are those of their masks."""
    count = len(segmentations)
    objects = {"labels": torch.arange(1, count + 1), "segmentations": segmentations}
    masks = masks_of(objects, *size)
    pixels = torch.stack([masks.amax(0) if count else torch.zeros(size, dtype=torch.uint8)] * 3, 2) * 255
    image = Image.fromarray(pixels.numpy())
    return {"image": image, "image_id": 1, "size": size, "boxes": boxes_of_masks(masks), **objects}


def shapes():
    wheel = disc(40, 60, (20, 42), 12)
    return [[rectangle(4, 5, 20, 30)], runs(wheel), compressed(wheel), [rectangle(6, 8, 5, 5), rectangle(40, 2, 9, 30)]]


def disagreement(sample):
    """Greatest distance of a side of a box to that of its mask's box, in pixels."""
    return float((sample["boxes"] - boxes_of_masks(sample["masks"])).abs().max()) if len(sample["boxes"]) else 0.0


def check(sample):
    height, width = sample["image"].shape[1:]
    count = len(sample["labels"])
    assert sample["image"].dtype == torch.float32 and 0 <= sample["image"].min() and sample["image"].max() <= 1
    assert sample["boxes"].shape == (count, 4) and sample["boxes"].dtype == torch.float32
    assert sample["masks"].shape == (count, height, width) and sample["masks"].dtype == torch.uint8
    assert sample["labels"].dtype == torch.int64
    assert ((sample["boxes"][:, 2:] - sample["boxes"][:, :2]) >= 1).all()
    assert (sample["boxes"] >= 0).all() and (sample["boxes"] <= torch.tensor([width, height] * 2)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_boxes_masks_and_pixels_agree(seed):
    for segmentation in shapes():
        sample = prepare(example_of([segmentation]), TRAINING, generator(seed, "augmentation"))
        check(sample)
        assert disagreement(sample) <= 1
        seen = (sample["image"][0] > 0.5).to(torch.uint8)
        mask = sample["masks"][0] if len(sample["masks"]) else torch.zeros_like(seen)
        # The picture is white where the object is, so the two may differ along the outline only.
        outline = 2 * (mask.diff(dim=0).abs().sum() + mask.diff(dim=1).abs().sum()) + 8
        assert (seen != mask).sum() <= outline


def test_every_branch_is_taken():
    views = [choose_view((40, 60), TRAINING, generator(seed, "augmentation")) for seed in range(200)]
    cropped = [view.part != (0, 0, 60, 40) for view in views]
    assert 60 < sum(cropped) < 140 and 60 < sum(view.flipped for view in views) < 140
    whole = {view.size for view, cut in zip(views, cropped, strict=True) if not cut}
    assert {(48, 72), (64, 96), (80, 120)} <= whole
    assert all(max(view.size) <= 133 for view in views)


def test_crops_have_the_sizes_asked_for(monkeypatch):
    settings = TRAINING.model_copy(update={"flip": 0.0, "sides": (100,), "longest": 10_000})
    crops(monkeypatch, (40,), (20, 30), share=1.0)
    for seed in SEEDS:
        view = choose_view((40, 60), settings, generator(seed, "augmentation"))
        left, top, right, bottom = view.part
        assert all(20 <= part <= 30 for part in (right - left, bottom - top)) and min(view.size) == 100
        assert left >= 0 and top >= 0 and right <= 60 and bottom <= 40


def test_the_same_numbers_give_the_same_sample_and_others_another():
    example = example_of(shapes())
    first, again, other = (prepare(example, TRAINING, generator(seed, "augmentation")) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert first["image"].shape != other["image"].shape or not torch.equal(first["image"], other["image"])


def test_evaluation_only_scales():
    sample = prepare(example_of(shapes()), TRAINING, None)
    assert sample["image"].shape == (3, 80, 120)
    assert torch.equal(sample["boxes"], 2 * example_of(shapes())["boxes"])
    assert disagreement(sample) == 0


def test_without_a_change_everything_is_as_annotated():
    example = example_of(shapes())
    same = DetectionAugmentation(flip=0.0, sides=(40,), longest=60)
    for draw in (None, generator(0, "augmentation")):
        sample = prepare(example, same, draw)
        assert torch.equal(sample["masks"], masks_of(example, 40, 60))
        assert torch.equal(sample["boxes"], example["boxes"])
        assert torch.equal(sample["image"], torch.tensor(np.array(example["image"])).permute(2, 0, 1) / 255)


def test_a_mirror_image_is_one():
    example = example_of(shapes())
    sides = {"sides": (40,), "longest": 60}
    plain, mirrored = (
        prepare(example, DetectionAugmentation(flip=flip, **sides), generator(0, "augmentation")) for flip in (0.0, 1.0)
    )
    assert torch.equal(mirrored["image"], plain["image"].flip(2))
    assert torch.equal(mirrored["masks"], plain["masks"].flip(2))
    assert torch.equal(
        mirrored["boxes"], torch.tensor([60, 0, 60, 0]) + plain["boxes"][:, [2, 1, 0, 3]] * torch.tensor([-1, 1, -1, 1])
    )


def test_a_polygon_that_a_crop_cuts_is_the_cut_mask(monkeypatch):
    crops(monkeypatch, (40,), (20, 20), share=1.0)
    crop = DetectionAugmentation(sides=(20,), longest=10_000, crop=True)
    for seed in SEEDS:
        for segmentation in shapes():
            example = example_of([segmentation])
            view = choose_view((40, 60), crop, generator(seed, "augmentation"))
            sample = prepare(example, crop, generator(seed, "augmentation"))
            left, top = int(view.part[0]), int(view.part[1])
            expected = masks_of(example, 40, 60)[:, top : top + 20, left : left + 20]
            expected = expected[expected.bool().flatten(1).any(1)]
            assert torch.equal(sample["masks"], expected)
            assert torch.equal(sample["boxes"], boxes_of_masks(expected))


def test_what_is_lost_is_no_target():
    example = example_of([[rectangle(20, 10, 3, 3)], runs(disc(40, 60, (20, 42), 12))])
    tiny = DetectionAugmentation(sides=(10,), longest=15)
    assert prepare(example, tiny, None)["labels"].tolist() == [2], "the first is thinner than a pixel"
    sample = prepare(example_of([]), TRAINING, generator(0, "augmentation"))
    check(sample)
    assert len(sample["labels"]) == 0


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (480, 640), (2000, 3)])
def test_sizes_keep_to_both_limits(size):
    height, width = fit(size, 480, 1333)
    assert 1 <= min(height, width) <= 480 and max(height, width) <= 1333
    assert min(height, width) == 480 or max(height, width) == 1333


def extent(polygons):
    points = torch.tensor([number for polygon in polygons for number in polygon]).reshape(-1, 2)
    return torch.cat([points.amin(0), points.amax(0)])


@needs_mini
def test_real_objects_stay_within_their_boxes(monkeypatch):
    """Drawn masks lose spikes that are thinner than a pixel: of the annotations as they are, 6 % differ by more."""
    split = load_set(MINI).train
    crops(monkeypatch, (160, 200), (128, 200))
    settings = DetectionAugmentation(flip=0.5, sides=(192, 224, 256), longest=420, crop=True)
    far = []
    for index in range(0, len(split), 10):
        example = split[index]
        sample = prepare(example, settings, generator(index, "augmentation"))
        check(sample)
        view = choose_view(example["size"], settings, generator(index, "augmentation"))
        moved = view.move_boxes(torch.stack([extent(polygons) for polygons in example["segmentations"]]))
        drawn = boxes_of_masks(sample["masks"])
        for box, around in zip(sample["boxes"], drawn, strict=True):
            assert torch.equal(box, around) or (moved - box).abs().amax(1).min() < 0.05
        far += ((sample["boxes"] - drawn).abs().amax(1) > 1).tolist()
    assert len(far) > 100 and np.mean(far) < 0.1
