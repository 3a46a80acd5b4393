import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from lab.helpers import ListSplit, bundle, byte_images, make_recipe, pil_images, tiny_vit
from wellcond.errors import RecipeError
from wellcond.lab.data import TensorDataset
from wellcond.lab.methods import MethodSettings
from wellcond.lab.seeding import derive
from wellcond.lab.tasks.base import EVALUATION, AugmentationSettings, TaskContext
from wellcond.lab.tasks.image_classification import (
    IMAGENET,
    CropResized,
    ImageClassification,
    ImageClassificationSettings,
    ImagesInMemory,
    Pictures,
    picture_transform,
)
from wellcond.lab.train.batches import UpdatePlan
from wellcond.lab.train.prepare import prepare_model


def make_task(train, evaluation=None, *, augmentation=None, seed=0, classes=3, **fields):
    data = bundle("image", train, evaluation, classes)
    settings = AugmentationSettings(**augmentation or {})
    return ImageClassification(ImageClassificationSettings(**fields), TaskContext(data, seed, settings))


def keys(count, epoch=EVALUATION):
    return [(index, epoch) for index in range(count)]


def images(task, epoch=EVALUATION):
    samples = task.evaluation if epoch == EVALUATION else task.train
    return samples.fetch(keys(len(samples), epoch))["image"]


# Normalisation


@pytest.mark.parametrize("channels", [1, 3])
def test_training_images_have_mean_zero_and_deviation_one(channels):
    found = images(make_task(byte_images(40, channels)), epoch=0).double()
    assert found.mean((0, 2, 3)).abs().max() < 1e-6
    assert (found.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-6


def test_evaluation_images_use_the_statistics_of_training():
    train, evaluation = byte_images(40), byte_images(6, seed=1)
    pixels, others = train.inputs.double() / 255, evaluation.inputs.double() / 255
    mean, std = pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), correction=0, keepdim=True)
    found = images(make_task(train, evaluation))
    assert found.dtype == torch.float32 and torch.allclose(found.double(), (others - mean) / std, atol=1e-5)


# Augmentation in memory


def unit_images(count):
    """Floats, which are not normalised."""
    split = byte_images(count)
    return TensorDataset("image", split.inputs / 255, split.labels)


def test_flips_mirror_some_images_and_no_others():
    task = make_task(byte_images(60), augmentation={"flip": 0.5})
    found, plain = images(task, epoch=0), images(task)
    flipped = (found == plain.flip(-1)).flatten(1).all(1)
    same = (found == plain).flatten(1).all(1)
    assert (flipped ^ same).all() and 15 < int(flipped.sum()) < 45


def test_crops_are_windows_of_the_padded_image():
    task = make_task(unit_images(10), augmentation={"crop_padding": 2})
    found, plain = images(task, epoch=0), images(task)
    windows = nn.functional.pad(plain, (2, 2, 2, 2)).unfold(2, 8, 1).unfold(3, 8, 1)  # (n, c, 5, 5, 8, 8)
    places = set()
    for image, of_image in zip(found, windows, strict=True):
        hits = [(r, c) for r in range(5) for c in range(5) if torch.equal(of_image[:, r, c], image)]
        assert len(hits) == 1
        places |= set(hits)
    assert len(places) > 4


def test_augmentation_changes_with_epoch_and_seed():
    made = [
        make_task(byte_images(), augmentation={"flip": 0.5, "crop_padding": 2}, seed=seed).train.fetch(keys(12, epoch))
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))
    ]
    first, epoch, seed, again = (batch["image"] for batch in made)
    assert not torch.equal(first, epoch) and not torch.equal(first, seed) and torch.equal(first, again)


def test_a_batch_of_several_draws_is_its_parts():
    """Repeated augmentation: an image several times in a batch, differently each time."""
    task = make_task(byte_images(), augmentation={"flip": 0.5, "crop_padding": 3, "repeats": 3})
    chosen = [(index, draw) for index in (4, 0, 11) for draw in (6, 7, 8)]
    found = task.train.fetch(chosen)
    for row, (index, draw) in enumerate(chosen):
        alone = make_task(byte_images(), augmentation={"flip": 0.5, "crop_padding": 3}).train.fetch([(index, draw)])
        assert torch.equal(found["image"][row], alone["image"][0]) and found["label"][row] == alone["label"][0]
    assert len({tuple(image.flatten().tolist()) for image in found["image"]}) == 9
    assert torch.equal(task.train.fetch([(4, 9), *chosen])["image"][1:], found["image"])  # the next epoch's beside them


def test_evaluation_is_not_augmented():
    split = byte_images()
    augmented = make_task(split, augmentation={"flip": 1.0, "crop_padding": 2})
    assert torch.equal(images(augmented), images(make_task(split)))
    assert torch.equal(augmented.train.fetch(keys(12))["image"], images(augmented))
    pictures = make_task(split, augmentation={"flip": 1.0, "random_erasing": 1.0})
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in IMAGENET)
    assert torch.allclose(images(pictures), (split.inputs / 255 - mean) / std, atol=1e-5)


# Mixing


BOTH = {"mixup": 0.8, "cutmix": 1.0}


def mixed(task, step, *, batch_size=8, processes=1, accumulate=1):
    """The mixed samples of a whole update, however it is divided."""
    repeats = task.augmentation.repeats
    plan = UpdatePlan(len(task.train), batch_size, accumulate, 0, repeats, task.following, processes=processes)
    shares = [replace(plan, rank=rank).parts(step, step + 1) for rank in range(processes)]
    parts = [keys for of_ranks in zip(*shares, strict=True) for keys in of_ranks]
    made = [task.training_batch(task.train.fetch(keys), step, part) for part, keys in enumerate(parts)]
    return {name: torch.cat([batch[name] for batch in made]) for name in ("image", "label")}


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize(
    ("batch_size", "processes", "accumulate"),
    [(8, 2, 1), (8, 1, 2), (8, 2, 2), (8, 8, 1), (9, 3, 1), (9, 1, 3), (1, 1, 1)],
)
def test_mixing_does_not_depend_on_how_an_update_is_divided(repeats, batch_size, processes, accumulate):
    augmentation = BOTH | {"label_smoothing": 0.1, "repeats": repeats, "flip": 0.5, "crop_padding": 2}
    task = make_task(byte_images(40), augmentation=augmentation)
    whole = mixed(task, 3, batch_size=batch_size)
    divided = mixed(task, 3, batch_size=batch_size, processes=processes, accumulate=accumulate)
    assert whole["image"].shape == (batch_size, 3, 8, 8) and whole["label"].shape == (batch_size, 3)
    assert torch.equal(divided["image"], whole["image"]) and torch.equal(divided["label"], whole["label"])


@pytest.mark.parametrize("augmentation", [{"mixup": 0.8}, {"cutmix": 1.0}, BOTH])
def test_mixing_is_seeded_by_step_and_position(augmentation):
    task = make_task(byte_images(), augmentation=augmentation | {"label_smoothing": 0.1})
    batch = task.train.fetch(keys(9, 0))
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first, again = task.training_batch(batch, 5, 0), task.training_batch(batch, 5, 0)
    others = [task.training_batch(batch, 6, 0), task.training_batch(batch, 5, 1)]
    assert torch.equal(first["image"], again["image"]) and torch.equal(first["label"], again["label"])
    assert not any(torch.equal(first["label"], other["label"]) for other in others)
    assert torch.allclose(first["label"].sum(1), torch.ones(8))
    assert states[:2] == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(states[2], torch.get_rng_state())


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_samples_that_are_mixed_together_share_a_draw(kind):
    task = make_task(byte_images(), augmentation={kind: 1.0, "mixed_together": 4})
    label = torch.arange(9) % 3
    batch = {"image": torch.rand(9, 3, 8, 8), "label": label}
    found = task.training_batch(batch, 3, 0)["label"].gather(1, label[:8, None]).flatten()
    assert (found[:4] == found[0]).all() and (found[4:] == found[4]).all() and found[0] != found[4]
    whole, divided = mixed(task, 3), mixed(task, 3, processes=2, accumulate=4)
    assert all(torch.equal(whole[name], divided[name]) for name in whole)


def test_mixup_weighs_images_and_labels_alike():
    task = make_task(byte_images(), augmentation={"mixup": 0.8})
    batch = {"image": torch.zeros(9, 3, 4, 4), "label": torch.arange(9) % 2}
    batch["image"][1::2] = 1.0
    found = task.training_batch(batch, 0, 0)
    assert torch.allclose(found["image"].mean((1, 2, 3)), found["label"][:, 1], atol=1e-6)
    assert len(set(found["label"][:, 1].tolist())) == 8


def test_cutmix_replaces_a_box_and_weighs_labels_by_its_area():
    task = make_task(byte_images(), augmentation={"cutmix": 1.0})
    batch = {"image": torch.zeros(41, 3, 6, 8), "label": torch.arange(41) % 2}
    batch["image"][1::2] = 1.0
    found = task.training_batch(batch, 0, 0)
    replaced = (found["image"] != batch["image"][:40])[:, 0]
    assert torch.allclose(found["image"].mean((1, 2, 3)), found["label"][:, 1], atol=1e-6)
    for box in replaced:
        assert torch.equal(box, box.any(1)[:, None] & box.any(0)[None])
    areas = replaced.sum((1, 2))
    assert len(areas.unique()) > 10 and areas.min() < 10 and areas.max() > 24


def test_repeated_samples_are_mixed_with_other_images():
    split = TensorDataset("image", torch.arange(12.0).view(12, 1, 1, 1).expand(12, 1, 8, 8), torch.arange(12) % 3)
    task = make_task(split, augmentation={"mixup": 0.8, "repeats": 3})
    plan = UpdatePlan(12, 9, 1, 0, 3, following=task.following)
    samples = [index for index, _ in next(plan.parts(0, 1))]
    assert len(samples) == 12 and all(a != b for a, b in zip(samples, samples[3:], strict=False))


# Labels, channels, sizes


@pytest.mark.parametrize("augmentation", [{}, {"random_erasing": 0.5}])
@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_out_of_range_is_named(label, augmentation):
    split = byte_images()
    split.labels[7] = label
    with pytest.raises(RecipeError, match=rf"evaluation split, row 7: .*{label}"):
        make_task(byte_images(), split, augmentation=augmentation)


@pytest.mark.parametrize(("mode", "own"), [("L", 1), ("RGB", 3)])
@pytest.mark.parametrize("augmentation", [{}, {"random_erasing": 0.5}])
def test_grey_and_colour_stay_what_they_are(mode, own, augmentation):
    task = make_task(pil_images([(8, 8)] * 4, mode), augmentation=augmentation)
    assert images(task).shape == images(task, epoch=0).shape == (4, own, 8, 8)
    assert task.model_arguments("timm") == {"num_classes": 3, "in_chans": own, "img_size": 8}


def test_memory_and_one_by_one_agree_without_augmentation():
    split = pil_images([(8, 8)] * 4)
    always, never = (make_task(split, augmentation={"color_jitter": jitter}) for jitter in (0, 1e-9))
    assert isinstance(always.train, ImagesInMemory) and isinstance(never.train, Pictures)
    # Normalised by the data and by ImageNet: the same but for two numbers a channel.
    for epoch in (EVALUATION, 0):
        a, b = (images(task, epoch) for task in (always, never))
        a, b = ((x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True) for x in (a, b))
        assert torch.allclose(a, b, atol=0.02)


def test_tensors_of_different_sizes_come_one_by_one():
    split = ListSplit(
        [{"image": torch.full((3, size, size), 100, dtype=torch.uint8), "label": size % 3} for size in (8, 10, 12)]
    )
    task = make_task(split)
    assert isinstance(task.train, Pictures) and images(task).shape == (3, 3, 10, 10)


def test_the_crop_of_evaluation_is_taken():
    split = pil_images([(32, 32)] * 2)
    whole, centre = (make_task(split, image_size=16, evaluation_crop=crop) for crop in (1.0, 0.5))
    assert isinstance(centre.evaluation, Pictures)
    pixels = torch.stack([torch.from_numpy(np.array(row["image"])).permute(2, 0, 1) for row in split.examples])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in IMAGENET)
    assert torch.allclose(images(centre), (pixels[:, :, 8:24, 8:24] / 255 - mean) / std, atol=1e-5)
    assert images(whole).shape == (2, 3, 16, 16)


def test_the_check_of_a_model_leaves_no_trace():
    recipe, task = make_recipe(), make_task(byte_images(4, 1))
    state, before = torch.get_rng_state(), (random.getstate(), np.random.get_state()[1].tolist())
    model = prepare_model(recipe, MethodSettings(), task, seed=0, base=None)
    assert all(module.training for module in model.modules()) and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
    assert type(model) is type(tiny_vit())


class Counted(ListSplit):
    """Counts how often an image is asked for."""

    asked = 0

    def __getitem__(self, index):
        Counted.asked += 1
        return super().__getitem__(index)


def test_pictures_are_those_of_timms_whole_transform_and_each_is_decoded_once():
    """Normalised and erased in a batch, as on a device: bit for bit what timm does with one picture after the other."""
    from timm.data import create_transform

    augmentation = AugmentationSettings(flip=0.5, resized_crop=(0.3, 1.0), random_erasing=0.7, repeats=3)
    source = np.random.default_rng(0)
    rows = [
        {"image": Image.fromarray(source.integers(0, 256, (14, 11, 3), dtype=np.uint8)), "label": number % 2}
        for number in range(4)
    ]
    transform = picture_transform(10, 3, 1.0, augmentation)
    keys = [(number, draw) for number in (2, 0, 3) for draw in (6, 7, 8)]
    samples = Pictures(Counted(rows), transform, 3, seed=5)
    found = samples.fetch(keys)["image"]
    assert Counted.asked == 3
    whole = create_transform(
        10, is_training=True, scale=(0.3, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5, color_jitter=None,
        interpolation="bicubic", re_prob=0.7, re_mode="pixel",
    )  # fmt: skip
    for image, (number, draw) in zip(found, keys, strict=True):
        seed = derive(5, "augmentation", draw, number)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        assert torch.equal(image, whole(rows[number]["image"]))
    sent = samples.read(keys)
    assert sent["image"].dtype == torch.uint8 and 0 < len(sent["noise"]) < sent["image"].numel()


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("scale", [(0.08, 0.2), (0.6, 1.0)], ids=["small", "large"])
def test_crops_are_those_of_timm_but_for_rounding(mode, scale):
    """The same parts of the image, by the same random numbers; values differ by a few steps of 256."""
    from timm.data.transforms import RandomResizedCropAndInterpolation

    source = np.random.default_rng(0)
    shape = (90, 120, 3) if mode == "RGB" else (90, 120)
    image = Image.fromarray(source.integers(0, 256, shape, dtype=np.uint8))
    theirs = RandomResizedCropAndInterpolation(48, scale=scale, interpolation="bicubic")
    for seed in range(8):
        found = []
        for crop in (theirs, CropResized(theirs)):
            random.seed(seed)
            found.append(np.asarray(crop(image)).astype(int))
        difference = np.abs(found[0] - found[1])
        assert found[0].shape == found[1].shape and difference.max() <= 4 and difference.mean() < 0.4
