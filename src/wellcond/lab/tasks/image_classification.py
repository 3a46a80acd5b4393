"""Image classification: cross entropy, top-1 accuracy; images in memory, or decoded and transformed one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, one_hot
from torch.utils.data import default_collate

from wellcond.errors import RecipeError, needs_extra
from wellcond.lab.data.base import Dataset
from wellcond.lab.data.images import as_tensor_images, import_pil, place_of, side_of, to_channels
from wellcond.lab.seeding import derive, generator, seed_device
from wellcond.lab.settings import ImageSide, Settings
from wellcond.lab.tasks.base import (
    EVALUATION,
    AugmentationSettings,
    Batch,
    ClassificationTask,
    Keys,
    Samples,
    TaskContext,
    register_task,
    send,
)

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class ImageClassificationSettings(Settings):
    """Options of the task."""

    name: Literal["image_classification"] = "image_classification"
    image_size: ImageSide | None = None
    """Side in pixels; images of another size are resized, and a square is cut from the centre. By default the size of
    the data: the median of the shorter sides of 64 images."""
    evaluation_crop: Annotated[float, Field(ge=0.01, le=1)] = 1.0
    """Side of the evaluated square as a share of the resized image's shorter side; below 1, as with augmentations other
    than `flip` and `crop_padding`, images are not held in memory but decoded one by one, and normalised by ImageNet."""


@dataclass(eq=False)
class ImagesInMemory(Samples):
    """Images of one size, flipped, padded and cropped, and normalised in whole batches.

    Random numbers are made for all samples at once, by seed and draw (see `SampleKey`), in any batch and process alike.
    """

    images: Tensor
    labels: Tensor
    normalisation: tuple[Tensor, Tensor]
    """By channel: what the images are multiplied by, and what is then added."""
    augmentation: AugmentationSettings
    seed: int
    _drawn: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, keys: Keys) -> Batch:
        """Normalised floats and labels."""
        rows, draws = torch.tensor(keys).unbind(1)
        images = self.images[rows]
        if draws[0] != EVALUATION and (self.augmentation.flip or self.augmentation.crop_padding):
            images = self._augment(images, rows, draws)
        scale, shift = self.normalisation
        return {"image": (images * scale + shift).float(), "label": self.labels[rows]}

    def _augment(self, images: Tensor, rows: Tensor, draws: Tensor) -> Tensor:
        flips, offsets = torch.empty(len(rows), dtype=torch.bool), torch.empty(len(rows), 2, dtype=torch.int64)
        for draw in sorted(set(draws.tolist())):
            chosen = draws == draw
            flips[chosen], offsets[chosen] = (of_all[rows[chosen]] for of_all in self._draw(draw))
        images = torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images)
        padding = self.augmentation.crop_padding
        if not padding:
            return images
        height, width = images.shape[-2:]
        padded = torch.nn.functional.pad(images, (padding,) * 4)
        lines = offsets[:, :1] + torch.arange(height)  # (batch, height)
        columns = offsets[:, 1:] + torch.arange(width)
        batch = torch.arange(len(images)).view(-1, 1, 1)
        return padded[batch, :, lines.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)

    def _draw(self, draw: int) -> tuple[Tensor, Tensor]:
        """Whether to flip each of all images, and where to crop it; the numbers of one epoch are kept."""
        if draw not in self._drawn:
            while len(self._drawn) >= self.augmentation.repeats:
                del self._drawn[min(self._drawn)]
            source = generator(self.seed, "augmentation", draw)
            flips = torch.rand(len(self), generator=source) < self.augmentation.flip
            offsets = torch.randint(0, 2 * self.augmentation.crop_padding + 1, (len(self), 2), generator=source)
            self._drawn[draw] = (flips, offsets)
        return self._drawn[draw]


@dataclass(frozen=True)
class Pictures(Samples):
    """Images decoded and transformed one by one; every sample's transform is seeded by seed, draw and number.

    They are sent to the device as bytes and normalised and erased there. What is erased becomes noise that was drawn
    with the sample, so that any device sees the same.
    """

    split: Dataset
    transform: PictureTransform
    channels: int
    seed: int
    in_memory: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.split)

    def read(self, keys: Keys) -> Batch:
        """Transformed images in bytes (n, H, W, C), labels, and which values are erased, by what noise."""
        images, labels, places, noise = [], [], [], []
        index, image, label = -1, None, 0
        for number, draw in keys:
            if number != index:  # an image that is shown several times is decoded once
                index, (image, label) = number, self._decode(number)
            if draw != EVALUATION:
                # timm's transforms draw from all three sources. The engine seeds its own before every step.
                seed = derive(self.seed, "augmentation", draw, number)
                random.seed(seed)
                np.random.seed(seed % 2**32)
                seed_device(seed, torch.device("cpu"))
            pixels = pixels_of(self.transform.change(image))
            place, values = self.transform.erase((pixels.shape[2], *pixels.shape[:2]))
            images.append(pixels)
            labels.append(label)
            places.append(place + (len(images) - 1) * pixels.numel())
            noise.append(values)
        collated = default_collate(images)  # a worker puts it where the training process reads it
        return {
            "image": collated,
            "label": torch.tensor(labels),
            "places": torch.cat(places),
            "noise": torch.cat(noise),
        }

    def finish(self, batch: Batch) -> Batch:
        """Normalised floats (n, C, H, W) and labels."""
        images = self.transform.normalise(batch["image"].permute(0, 3, 1, 2))
        images.view(-1)[batch["places"]] = batch["noise"]
        return {"image": images, "label": batch["label"]}

    def _decode(self, index: int) -> tuple[Any, int]:
        from torchvision.transforms.functional import to_pil_image

        sample = self.split[index]
        image = to_pil_image(sample["image"]) if isinstance(sample["image"], Tensor) else sample["image"]
        return to_channels(image, self.channels, place_of(self.split, index)), int(sample["label"])


def pixels_of(image: Any) -> Tensor:
    """Bytes (H, W, C) of a PIL image in grey or RGB."""
    width, height = image.size
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, -1)


@dataclass(frozen=True)
class PictureTransform:
    """Timm's transform of a picture in three parts: what changes bytes, what is erased, and the normalisation."""

    change: Callable[[Any], Any]
    """From a PIL image to a PIL image of the size wanted."""
    mean: Sequence[float]
    std: Sequence[float]
    erasing: Any = None
    """Timm's `RandomErasing`; None erases nothing."""

    def erase(self, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Which values of an image (C, H, W), counted in its order, are erased, and by what; drawn by timm."""
        target = _Target(shape)
        if self.erasing is not None:
            self.erasing._erase(target, *shape, torch.float32)
        return target.places, target.values

    def normalise(self, images: Tensor) -> Tensor:
        """Floats of bytes (n, C, H, W), with the mean 0 and the deviation 1 in each channel of ImageNet."""
        mean, std = (send(torch.tensor(values), images.device).view(-1, 1, 1) for values in (self.mean, self.std))
        floats = images.to(torch.float32, memory_format=torch.contiguous_format)
        return floats.div_(255).sub_(mean).div_(std)


@dataclass(frozen=True)
class CropResized:
    """Timm's random crop, by the numbers that timm draws, but resized by torch, in a third of the time of PIL.

    Values of pixels may differ from PIL's by a few steps of 256.
    """

    step: Any
    """Timm's `RandomResizedCropAndInterpolation`, bicubic."""

    def __call__(self, image: Any) -> Any:
        """The crop of a PIL image, grey or RGB, as another one."""
        top, left, height, width = self.step.get_params(image, self.step.scale, self.step.ratio)
        cropped = image.crop((left, top, left + width, top + height))
        raw = "RGBX" if image.mode == "RGB" else "L"  # as PIL stores them
        pixels = torch.frombuffer(bytearray(cropped.tobytes("raw", raw)), dtype=torch.uint8)
        batch = pixels.view(1, height, width, len(raw)).permute(0, 3, 1, 2)
        resized = interpolate(batch, size=self.step.size, mode="bicubic", antialias=True)
        stored = resized[0].permute(1, 2, 0).contiguous().numpy()
        return import_pil().frombytes(image.mode, self.step.size[::-1], stored, "raw", raw)


class _Target:
    """Takes which part of an image timm's `RandomErasing` writes to, and what it writes."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.places, self.values = torch.empty(0, dtype=torch.int32), torch.empty(0)

    def __setitem__(self, where: tuple[slice, slice, slice], values: Tensor) -> None:
        planes, rows, columns = (
            torch.arange(*part.indices(side), dtype=torch.int32) for part, side in zip(where, self.shape, strict=True)
        )
        _, height, width = self.shape
        lines = planes[:, None] * height + rows
        self.places = (lines[:, :, None] * width + columns).flatten()
        self.values = values.flatten()


def picture_transform(
    size: int, channels: int, crop: float, augmentation: AugmentationSettings | None
) -> PictureTransform:
    """Timm's transform for training (with augmentation) or evaluation (None)."""
    with needs_extra("timm and torchvision", "vision", "timm", "torchvision"):
        from timm.data import create_transform
        from timm.data.random_erasing import RandomErasing
        from timm.data.transforms import RandomResizedCropAndInterpolation as RandomCrop
    mean, std = IMAGENET if channels == 3 else [(sum(values) / 3,) for values in IMAGENET]
    shared: dict[str, Any] = {"mean": mean, "std": std, "interpolation": "bicubic"}
    if augmentation is None:
        transform = create_transform(size, is_training=False, crop_pct=crop, **shared)
    else:
        transform = create_transform(
            size,
            is_training=True,
            scale=augmentation.resized_crop or (1.0, 1.0),
            ratio=(3 / 4, 4 / 3) if augmentation.resized_crop else (1.0, 1.0),
            hflip=augmentation.flip,
            color_jitter=augmentation.color_jitter or None,  # type: ignore[arg-type]  # None: no jitter
            auto_augment=augmentation.rand_augment,
            re_prob=augmentation.random_erasing,
            re_mode="pixel",
            **shared,
        )
    fix_posterize_(transform)
    on_pictures = [step for step in transform.transforms if type(step).__name__ not in LATER]
    if augmentation is not None and augmentation.resize == "torch":
        on_pictures = [CropResized(step) if isinstance(step, RandomCrop) else step for step in on_pictures]
    erasing = next((step for step in transform.transforms if isinstance(step, RandomErasing)), None)
    return PictureTransform(type(transform)(on_pictures), mean, std, erasing)


LATER = ("MaybeToTensor", "ToTensor", "Normalize", "RandomErasing")
"""Steps of timm's transforms that are done with whole batches, on the device."""


def fix_posterize_(transform: Any) -> None:
    """Let timm's Posterize keep at least one bit."""
    for step in transform.transforms:
        for operation in getattr(step, "ops", []):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize


def _posterize(image: Any, bits: int, **_: Any) -> Any:
    """Keep at least one bit; timm asks for 0 at full strength: once a black image, an error in recent Pillow."""
    from timm.data.auto_augment import posterize

    return posterize(image, max(1, bits))


@register_task(ImageClassificationSettings)
class ImageClassification(ClassificationTask):
    """Logits against a label."""

    kinds = ("image",)
    auto_class = "AutoModelForImageClassification"
    inputs = "image"

    def __init__(self, settings: ImageClassificationSettings, context: TaskContext) -> None:
        super().__init__(settings, context)
        self.num_classes = self.count_classes()
        self.augmentation, data = context.augmentation, context.data
        first = data.train[0]["image"]
        if isinstance(first, Tensor) and first.shape[-2] != first.shape[-1] and settings.image_size is None:
            height, width = first.shape[-2:]
            raise RecipeError(f"{data.name}: images are {height} x {width}; set task.image_size to the side wanted")
        self.size = settings.image_size or side_of(data.train)
        # A few are looked at, since some of a set in colour may be grey.
        few = range(0, len(data.train), max(1, len(data.train) // 16))
        self.channels = 1 if all(_is_grey(data.train[index]["image"]) for index in few) else 3
        self.mixes = self.augmentation.mixup > 0 or self.augmentation.cutmix > 0
        self.following = self.augmentation.repeats if self.mixes else 0
        images, floats = self._decode(), isinstance(first, Tensor) and first.is_floating_point()
        if not images and (self.augmentation.crop_padding or floats):
            raise RecipeError(
                f"{data.name}: expected images to decode one by one, found normalised floats, or "
                "augmentation.crop_padding, which works on images in memory. Other augmentations than it and flip, "
                "task.image_size and task.evaluation_crop go with augmentation.resized_crop"
            )
        normalisation = normalisation_of(images["training"]) if images else None

        def make(split: Any, name: str) -> Samples:
            if normalisation:
                return ImagesInMemory(images[name], split.labels, normalisation, self.augmentation, self.seed)
            augmentation = self.augmentation if name == "training" else None
            transform = picture_transform(self.size, self.channels, settings.evaluation_crop, augmentation)
            return Pictures(split, transform, self.channels, self.seed)

        self.set_splits(make)

    def _decode(self) -> dict[str, Tensor]:
        """Images of each split; none if they do not fit into memory, or are to be changed one by one."""
        images: dict[str, Tensor] = {}
        by_timm = {"resized_crop", "rand_augment", "color_jitter", "random_erasing"}
        if by_timm & self.augmentation.model_dump(exclude_defaults=True).keys() or self.settings.evaluation_crop != 1.0:
            return images
        for name, split in self.context.splits.items():
            found = as_tensor_images(split, size=self.size, channels=self.channels, what=f"decoding {name} images")
            if found is None or found.shape[-2:] != (self.size, self.size):  # tensors are not resized there
                return {}
            images[name] = found
        return images

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Classes, channels and size."""
        if kind == "timm":
            return {"num_classes": self.num_classes, "in_chans": self.channels, "img_size": self.size}
        return {"num_labels": self.num_classes, "num_channels": self.channels, "image_size": self.size}

    def training_batch(self, batch: Batch, step: int, part: int) -> Batch:
        """Images mixed by mixup (arXiv:1710.09412) or CutMix (arXiv:1905.04899), and labels as smoothed probabilities.

        The sample at position p of an update is mixed with the one at p + `repeats`, cyclically: the next image, not
        another view of the same one. What is drawn for it follows from the seed, the step and p (over `mixed_together`,
        rounded down), so that any number of processes and accumulated parts mix an update alike.
        """
        if not self.mixes:
            return batch
        image, label, repeats = batch["image"], batch["label"], self.augmentation.repeats
        size = len(label) - repeats
        height, width = image.shape[-2:]
        groups = [(part * size + row) // self.augmentation.mixed_together for row in range(size)]
        seeds = {group: derive(self.seed, "mixing", step, group) for group in groups}
        drawn = {group: draw_mixing(self.augmentation, (height, width), seed) for group, seed in seeds.items()}
        weights, boxes = zip(*(drawn[group] for group in groups), strict=True)
        weight = send(torch.tensor(weights, dtype=torch.float32), image.device)[:, None]
        top, bottom, left, right = send(torch.tensor(boxes), image.device).view(-1, 4, 1, 1, 1).unbind(1)
        rows, columns = torch.arange(height, device=image.device)[:, None], torch.arange(width, device=image.device)
        inside = (top <= rows) & (rows < bottom) & (left <= columns) & (columns < right)
        own, other = image[:size], image[repeats:]
        # Exactly 1 where CutMix leaves the image as it is.
        kept = torch.where(top < bottom, 1.0, weight[:, :, None, None]).to(image.dtype)
        smoothing = self.augmentation.label_smoothing
        target = one_hot(label, self.num_classes).float() * (1 - smoothing) + smoothing / self.num_classes
        return {
            "image": torch.where(inside, other, own * kept + other * (1 - kept)),
            "label": target[:size] * weight + target[repeats:] * (1 - weight),
        }

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy, with label smoothing unless mixing has smoothed already."""
        smoothing = 0.0 if self.mixes else self.augmentation.label_smoothing
        return cross_entropy(self.logits(model, batch), batch["label"], reduction="sum", label_smoothing=smoothing)


def normalisation_of(images: Tensor) -> tuple[Tensor, Tensor]:
    """Factors and summands (C, 1, 1) that bring bytes (n, C, H, W) to mean 0 and deviation 1 in each channel."""
    if images.is_floating_point():  # which come normalised
        return torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    channels = images.shape[1]
    sums = torch.zeros(2, channels, dtype=torch.float64)
    for part in images.split(4096):  # the whole set in float64 may not fit
        values = part.double() / 255
        sums += torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))])
    mean, square = sums.view(2, channels, 1, 1) / (images.numel() / channels)
    std = (square - mean.square()).clamp_min(1e-12).sqrt().float()
    return 1 / 255 / std, -mean.float() / std


def _is_grey(image: Any) -> bool:
    return len(image) == 1 if isinstance(image, Tensor) else len(image.getbands()) == 1 and image.mode != "P"


def draw_mixing(
    augmentation: AugmentationSettings, shape: tuple[int, int], seed: int
) -> tuple[float, tuple[int, int, int, int]]:
    """Weight of a sample's own label, and top, bottom, left, right of the box that CutMix replaces (mixup: empty).

    With both mixup and CutMix, each is drawn half of the time.
    """
    source = np.random.default_rng(seed)
    cutmix = augmentation.cutmix > 0 and (augmentation.mixup == 0 or source.random() < 0.5)
    alpha = augmentation.cutmix if cutmix else augmentation.mixup
    weight = source.beta(alpha, alpha)
    if not cutmix:
        return weight, (0, 0, 0, 0)
    # A box of the share 1 - weight around a pixel; what lies outside the image is cut off, and the weight is the rest.
    sides = []
    for length in shape:
        cut, centre = int(length * math.sqrt(1 - weight)), int(source.integers(length))
        sides.append((max(centre - cut // 2, 0), min(centre + (cut + 1) // 2, length)))
    (top, bottom), (left, right) = sides
    return 1 - (bottom - top) * (right - left) / math.prod(shape), (top, bottom, left, right)
