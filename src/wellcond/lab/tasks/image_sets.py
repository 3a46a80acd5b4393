"""Images as batches: from one tensor in memory, or decoded and transformed one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellcond.errors import MissingExtraError
from wellcond.lab.data.images import place_of, to_channels
from wellcond.lab.seeding import derive, generator
from wellcond.lab.tasks.augmentation import AugmentationSettings
from wellcond.lab.tasks.base import EVALUATION, Batch, SampleKey

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class TensorImages:
    """Images of one size in memory; flips and padded crops act on whole batches.

    The random numbers of a draw (see `SampleKey`) are made for all samples at once, by seed and draw, so what happens
    to a sample does not depend on the batch or the process it is in.
    """

    in_memory = True

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        mean: Tensor | None = None,
        std: Tensor | None = None,
        augmentation: AugmentationSettings | None = None,
        seed: int = 0,
    ) -> None:
        """Bytes are scaled to 0..1 first; `mean` and `std` are per channel."""
        self.images, self.labels, self.seed = images, labels, seed
        # One multiplication and one addition per batch: (x / 255 - mean) / std
        unit = 1 / 255 if images.dtype == torch.uint8 else 1.0
        self.scale = unit / std.view(-1, 1, 1) if std is not None else torch.tensor(unit)
        self.shift = -mean.view(-1, 1, 1) / std.view(-1, 1, 1) if mean is not None and std is not None else None
        self.augmentation = augmentation or AugmentationSettings()
        self._drawn: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        """Number of images."""
        return len(self.images)

    def fetch(self, keys: Sequence[SampleKey]) -> Batch:
        """Normalised floats and labels."""
        indices = torch.tensor([index for index, _ in keys])
        images = self.images[indices]
        if keys[0][1] != EVALUATION and (self.augmentation.flip or self.augmentation.crop_padding):
            images = self._augment(images, *self._numbers(indices, [draw for _, draw in keys]))
        images = images.float() if self.scale.ndim == 0 and float(self.scale) == 1.0 else images * self.scale
        if self.shift is not None:
            images = images + self.shift
        return {"image": images, "label": self.labels[indices]}

    def _augment(self, images: Tensor, flips: Tensor, offsets: Tensor) -> Tensor:
        if self.augmentation.flip:
            images = torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images)
        padding = self.augmentation.crop_padding
        if not padding:
            return images
        height, width = images.shape[-2:]
        padded = torch.nn.functional.pad(images, (padding,) * 4)
        rows = offsets[:, :1] + torch.arange(height)  # (batch, height)
        columns = offsets[:, 1:] + torch.arange(width)
        batch = torch.arange(len(images)).view(-1, 1, 1)
        return padded[batch, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)

    def _numbers(self, indices: Tensor, draws: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Whether to flip each image of a batch, and where to crop it."""
        flips, offsets = torch.empty(len(draws), dtype=torch.bool), torch.empty(len(draws), 2, dtype=torch.int64)
        of_draw = torch.tensor(draws)
        for draw in sorted(set(draws)):
            chosen = of_draw == draw
            of_all = self._draw(draw)
            flips[chosen], offsets[chosen] = (numbers[indices[chosen]] for numbers in of_all)
        return flips, offsets

    def _draw(self, draw: int) -> tuple[Tensor, Tensor]:
        """Numbers for all images; those of one epoch are kept."""
        if draw not in self._drawn:
            while len(self._drawn) >= self.augmentation.repeats:
                del self._drawn[min(self._drawn)]
            source = generator(self.seed, "augmentation", draw)
            flips = torch.rand(len(self), generator=source) < self.augmentation.flip
            offsets = torch.randint(0, 2 * self.augmentation.crop_padding + 1, (len(self), 2), generator=source)
            self._drawn[draw] = (flips, offsets)
        return self._drawn[draw]


class Pictures:
    """PIL images, transformed one by one; every sample's transform is seeded by seed, draw and number."""

    in_memory = False

    def __init__(self, split: Any, transform: Callable[[Any], Tensor], *, channels: int, seed: int = 0) -> None:
        """`split` gives {"image": PIL image or tensor, "label": int} by number."""
        self.split, self.transform, self.channels, self.seed = split, transform, channels, seed

    def __len__(self) -> int:
        """Number of images."""
        return len(self.split)

    def fetch(self, keys: Sequence[SampleKey]) -> Batch:
        """Transformed images and labels."""
        images, labels = zip(*(self._sample(index, draw) for index, draw in keys), strict=True)
        return {"image": torch.stack(images), "label": torch.tensor(labels)}

    def _sample(self, index: int, draw: int) -> tuple[Tensor, int]:
        sample = self.split[index]
        if draw != EVALUATION:
            # timm's transforms draw from all three sources. The engine seeds its own before every step.
            number = derive(self.seed, "augmentation", draw, index)
            random.seed(number)
            np.random.seed(number % 2**32)
            torch.manual_seed(number)
        picture = as_picture(sample["image"], self.channels, place_of(self.split, index))
        return self.transform(picture), int(sample["label"])


def as_picture(image: Any, channels: int, where: str = "an image") -> Any:
    """A PIL image with one or three channels, from a PIL image or a tensor."""
    if isinstance(image, Tensor):
        from torchvision.transforms.functional import to_pil_image

        image = to_pil_image(image)
    return to_channels(image, channels, where)


def picture_transform(
    size: int,
    augmentation: AugmentationSettings | None,
    *,
    crop: float,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Callable[[Any], Tensor]:
    """Timm's transform for training (with augmentation) or evaluation (None)."""
    try:
        from timm.data import create_transform
    except ImportError as error:
        raise MissingExtraError("timm and torchvision", "vision") from error
    if augmentation is None:
        return create_transform(size, is_training=False, crop_pct=crop, mean=mean, std=std, interpolation="bicubic")
    transform = create_transform(
        size,
        is_training=True,
        scale=augmentation.resized_crop or (1.0, 1.0),
        ratio=(3 / 4, 4 / 3) if augmentation.resized_crop else (1.0, 1.0),
        hflip=augmentation.flip,
        color_jitter=augmentation.color_jitter or None,  # type: ignore[arg-type]  # None: no jitter
        auto_augment=augmentation.rand_augment,
        interpolation="bicubic",
        mean=mean,
        std=std,
        re_prob=augmentation.random_erasing,
        re_mode="pixel",
    )
    for step in transform.transforms:
        for operation in getattr(step, "ops", []):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize
    return transform


def _posterize(image: Any, bits: int, **options: Any) -> Any:
    """Keep at least one bit; timm asks for 0 at full strength: once a black image, an error in recent Pillow."""
    from timm.data.auto_augment import posterize

    return posterize(image, max(1, bits), **options)
