"""Augmentation of images: what every original recipe uses, under timm's meaning of the words.

Mixup (arXiv:1710.09412) and CutMix (arXiv:1905.04899) work sample by sample. The sample at position p of an update is
mixed with the one at position p + `repeats`, cyclically: the next image of the order, never another view of the same
one (unless an update has only one image). What is drawn for it (mixup or CutMix, the weight, the box) follows from the
seed, the step and p. So an update of any size, even or odd, is mixed in the same way whatever number of processes and
accumulated parts shares it: the plan of the updates hands each part the `repeats` samples that follow it.
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch.nn.functional import one_hot

from wellcond.lab.seeding import derive
from wellcond.lab.settings import Settings
from wellcond.lab.tasks.base import Batch

Share = Annotated[float, Field(ge=0, le=1)]


class AugmentationSettings(Settings):
    """All off by default."""

    flip: Share = 0.0
    """Probability of a mirror image."""
    crop_padding: Annotated[int, Field(ge=0, le=256)] = 0
    """Random crop out of an image padded by this many pixels; for small images."""
    resized_crop: tuple[Share, Share] | None = None
    """Random crop of this share of the area, resized; for large images."""
    rand_augment: str | None = None
    """timm's description, such as rand-m9-mstd0.5-inc1."""
    color_jitter: Annotated[float, Field(ge=0, le=10)] = 0.0
    random_erasing: Share = 0.0
    mixup: NonNegativeFloat = 0.0
    cutmix: NonNegativeFloat = 0.0
    label_smoothing: Share = 0.0
    repeats: PositiveInt = 1
    """Repeated augmentation (DeiT): an epoch takes this many times fewer samples, and each that many times in a row,
    augmented differently."""

    @property
    def needs_pictures(self) -> bool:
        """Whether samples must be augmented one by one, as PIL images."""
        return bool(self.resized_crop or self.rand_augment or self.color_jitter or self.random_erasing)

    @property
    def mixes(self) -> bool:
        """Whether samples of a batch are mixed."""
        return self.mixup > 0 or self.cutmix > 0


def mix(
    batch: Batch, augmentation: AugmentationSettings, *, num_classes: int, seed: int, step: int, part: int
) -> Batch:
    """Mixed images and their labels as probabilities, smoothed by `augmentation.label_smoothing`.

    Args:
        batch: images and labels of one part of an update, and of the `repeats` samples that follow it.
        augmentation: with `mixup` or `cutmix`; with both, each is drawn half of the time.
        num_classes: length of the mixed labels.
        seed: of the run.
        step: number of the update.
        part: number of the part in the update, over all processes and accumulations.
    """
    image, label = batch["image"], batch["label"]
    size = len(label) - augmentation.repeats
    height, width = image.shape[-2:]
    draws = [
        _draw(augmentation, (height, width), derive(seed, "mixing", step, part * size + row)) for row in range(size)
    ]
    weight = torch.tensor([draw[0] for draw in draws], dtype=torch.float32, device=image.device)[:, None]
    box = torch.tensor([draw[1] for draw in draws], device=image.device)
    rows, columns = torch.arange(height, device=image.device), torch.arange(width, device=image.device)
    inside = ((box[:, :1] <= rows) & (rows < box[:, 1:2]))[:, None, :, None] & (
        (box[:, 2:3] <= columns) & (columns < box[:, 3:])
    )[:, None, None, :]
    own, other = image[:size], image[augmentation.repeats :]
    cut = (box[:, 0] < box[:, 1])[:, None]
    # Exactly 1 where CutMix leaves the image as it is.
    kept = torch.where(cut, 1.0, weight).to(image.dtype)[:, :, None, None]
    smoothing = augmentation.label_smoothing
    target = one_hot(label, num_classes).float() * (1 - smoothing) + smoothing / num_classes
    return {
        "image": torch.where(inside, other, own * kept + other * (1 - kept)),
        "label": target[:size] * weight + target[augmentation.repeats :] * (1 - weight),
    }


def _draw(
    augmentation: AugmentationSettings, shape: tuple[int, int], seed: int
) -> tuple[float, tuple[int, int, int, int]]:
    """Weight of a sample's own label, and top, bottom, left, right of the box that CutMix replaces (mixup: empty)."""
    random = np.random.default_rng(seed)
    cutmix = augmentation.cutmix > 0 and (augmentation.mixup == 0 or random.random() < 0.5)
    alpha = augmentation.cutmix if cutmix else augmentation.mixup
    weight = random.beta(alpha, alpha)
    if not cutmix:
        return weight, (0, 0, 0, 0)
    # A box of the share 1 - weight around a pixel; what lies outside the image is cut off, and the weight is the rest.
    sides = []
    for length in shape:
        cut, centre = int(length * math.sqrt(1 - weight)), int(random.integers(length))
        sides.append((max(centre - cut // 2, 0), min(centre + (cut + 1) // 2, length)))
    (top, bottom), (left, right) = sides
    return 1 - (bottom - top) * (right - left) / math.prod(shape), (top, bottom, left, right)
