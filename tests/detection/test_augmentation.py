"""Samples: images, boxes and masks move together."""

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from detection.coco_sets import MINI, compressed, disc, load_set, masks_of, rectangle, runs, write_set
from wellcond.lab.seeding import generator
from wellcond.lab.tasks.detection.coco import Instances, thin_boxes
from wellcond.lab.tasks.detection.samples import (
    CropSettings,
    DetectionAugmentation,
    boxes_of_masks,
    choose_view,
    fit,
    prepare,
)

needs_mini = pytest.mark.skipif(not MINI.is_dir(), reason="coco2017-mini is not at hand")
TRAINING = DetectionAugmentation(
    flip=0.5, sides=(48, 64, 80), longest=133, crop=CropSettings(sides=(40, 50, 60), smallest=30, largest=50)
)
SEEDS = range(40)


def example_of(segmentations, size=(40, 60), crowd=None):
    """Objects whose boxes are those of their masks."""
    count = len(segmentations)
    blank = Instances(torch.zeros(count, 4), torch.arange(1, count + 1), torch.zeros(count).bool(), segmentations)
    masks = masks_of(blank, *size)
    crowd = torch.zeros(count).bool() if crowd is None else torch.tensor(crowd)
    pixels = torch.stack([masks.amax(0) if count else torch.zeros(size, dtype=torch.uint8)] * 3, 2) * 255
    instances = Instances(boxes_of_masks(masks), blank.labels, crowd, segmentations)
    return {"image": Image.fromarray(pixels.numpy()), "image_id": 1, "size": size, "instances": instances}


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
    assert sample["labels"].dtype == torch.int64 and not thin_boxes(sample["boxes"]).any()
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
    cropped = [(view.left, view.top, view.right, view.bottom) != (0, 0, 60, 40) for view in views]
    assert 60 < sum(cropped) < 140 and 60 < sum(view.flipped for view in views) < 140
    whole = {(view.height, view.width) for view, cut in zip(views, cropped, strict=True) if not cut}
    assert {(48, 72), (64, 96), (80, 120)} <= whole
    assert all(max(view.height, view.width) <= 133 for view in views)


def test_crops_have_the_sizes_asked_for():
    settings = TRAINING.model_copy(update={"flip": 0.0, "sides": (100,), "longest": 10_000})
    crop = CropSettings(share=1.0, sides=(40,), smallest=20, largest=30)
    settings = settings.model_copy(update={"crop": crop})
    for seed in SEEDS:
        view = choose_view((40, 60), settings, generator(seed, "augmentation"))
        parts = view.right - view.left, view.bottom - view.top
        assert all(20 <= part <= 30 for part in parts) and min(view.height, view.width) == 100
        assert view.left >= 0 and view.top >= 0 and view.right <= 60 and view.bottom <= 40


def test_the_same_numbers_give_the_same_sample_and_others_another():
    example = example_of(shapes())
    first, again, other = (prepare(example, TRAINING, generator(seed, "augmentation")) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert first["image"].shape != other["image"].shape or not torch.equal(first["image"], other["image"])


def test_evaluation_only_scales():
    settings = TRAINING.model_copy(update={"evaluation_side": 80, "evaluation_longest": 1000})
    sample = prepare(example_of(shapes()), settings, None)
    assert sample["image"].shape == (3, 80, 120)
    assert torch.equal(sample["boxes"], 2 * example_of(shapes())["instances"].boxes)
    assert disagreement(sample) == 0


def test_without_a_change_everything_is_as_annotated():
    example = example_of(shapes())
    same = DetectionAugmentation(flip=0.0, sides=(40,), longest=60, evaluation_side=40, evaluation_longest=60)
    for draw in (None, generator(0, "augmentation")):
        sample = prepare(example, same, draw)
        assert torch.equal(sample["masks"], masks_of(example["instances"], 40, 60))
        assert torch.equal(sample["boxes"], example["instances"].boxes)
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


def test_a_polygon_that_a_crop_cuts_is_the_cut_mask():
    crop = DetectionAugmentation(
        sides=(20,), longest=10_000, crop=CropSettings(share=1.0, sides=(40,), smallest=20, largest=20)
    )
    for seed in SEEDS:
        for segmentation in shapes():
            example = example_of([segmentation])
            view = choose_view((40, 60), crop, generator(seed, "augmentation"))
            sample = prepare(example, crop, generator(seed, "augmentation"))
            top, left = int(view.top), int(view.left)
            expected = masks_of(example["instances"], 40, 60)[:, top : top + 20, left : left + 20]
            expected = expected[expected.bool().flatten(1).any(1)]
            assert torch.equal(sample["masks"], expected)
            assert torch.equal(sample["boxes"], boxes_of_masks(expected))


def test_crowds_and_what_is_lost_are_no_targets():
    segmentations = [[rectangle(2, 2, 8, 8)], [rectangle(20, 10, 3, 3)], runs(disc(40, 60, (20, 42), 12))]
    example = example_of(segmentations, crowd=[True, False, False])
    tiny = DetectionAugmentation(evaluation_side=10, evaluation_longest=15)
    assert prepare(example, tiny, None)["labels"].tolist() == [3], "the second is thinner than a pixel"
    sample = prepare(example_of([]), TRAINING, generator(0, "augmentation"))
    check(sample)
    assert len(sample["labels"]) == 0


def test_examples_of_a_source(tmp_path):
    bundle = load_set(write_set(tmp_path))
    for split in (bundle.train, bundle.evaluation):
        for index in range(len(split)):
            for draw in (None, generator(index, "augmentation")):
                sample = prepare(split[index], TRAINING, draw)
                check(sample)
                assert disagreement(sample) <= 1


@pytest.mark.parametrize(
    "settings, found",
    [
        ({"sides": ()}, "sides"),
        ({"flip": 1.5}, "flip"),
        ({"crop": {"smallest": 9, "largest": 8}}, "smallest to be at most largest"),
        ({"crop": {"sides": [0]}}, "greater than 0"),
        ({"side": [800]}, "did you mean 'sides'"),
    ],
)
def test_settings_that_cannot_be(settings, found):
    with pytest.raises(ValidationError, match=found):
        DetectionAugmentation.model_validate(settings)


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (480, 640), (2000, 3)])
def test_sizes_keep_to_both_limits(size):
    height, width = fit(size, 480, 1333)
    assert 1 <= min(height, width) <= 480 and max(height, width) <= 1333
    assert min(height, width) == 480 or max(height, width) == 1333


def extent(polygons):
    points = torch.tensor([number for polygon in polygons for number in polygon]).reshape(-1, 2)
    return torch.cat([points.amin(0), points.amax(0)])


@needs_mini
def test_real_objects_stay_within_their_boxes():
    """Drawn masks lose spikes that are thinner than a pixel: of the annotations as they are, 6 % differ by more."""
    split = load_set(MINI).train
    settings = DetectionAugmentation(
        flip=0.5, sides=(192, 224, 256), longest=420, crop=CropSettings(sides=(160, 200), smallest=128, largest=200)
    )
    far = []
    for index in range(0, len(split), 10):
        example = split[index]
        sample = prepare(example, settings, generator(index, "augmentation"))
        check(sample)
        view = choose_view(example["size"], settings, generator(index, "augmentation"))
        moved = view.move_boxes(torch.stack([extent(polygons) for polygons in example["instances"].segmentations]))
        drawn = boxes_of_masks(sample["masks"])
        for box, around in zip(sample["boxes"], drawn, strict=True):
            assert torch.equal(box, around) or (moved - box).abs().amax(1).min() < 0.05
        far += ((sample["boxes"] - drawn).abs().amax(1) > 1).tolist()
    assert len(far) > 100 and np.mean(far) < 0.1
