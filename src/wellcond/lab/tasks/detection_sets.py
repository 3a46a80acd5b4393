"""Images with their objects as padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from wellcond.lab.detection import DetectionAugmentation, prepare
from wellcond.lab.seeding import generator
from wellcond.lab.tasks.base import EVALUATION, Batch, SampleKey

MULTIPLE = 32
"""Sides of a batch are multiples of it."""


class DetectionSamples:
    """Images of a split of source `coco`, decoded, augmented and padded one batch at a time."""

    in_memory = False

    def __init__(self, split: Any, augmentation: DetectionAugmentation, *, seed: int) -> None:
        """What happens to a sample depends on `seed`, its number and its draw (see `SampleKey`) alone."""
        self.split, self.augmentation, self.seed = split, augmentation, seed

    def __len__(self) -> int:
        """Number of images."""
        return len(self.split)

    def fetch(self, keys: Sequence[SampleKey]) -> Batch:
        """A batch; see `collate`."""
        examples = [self.split[index] for index, _ in keys]
        samples = [
            prepare(example, self.augmentation, self._numbers(*key))
            for example, key in zip(examples, keys, strict=True)
        ]
        batch = collate(samples)
        batch["original_sizes"] = torch.tensor([example["size"] for example in examples])
        batch["image_ids"] = torch.tensor([example["image_id"] for example in examples])
        batch["positions"] = torch.tensor([index for index, _ in keys])
        return batch

    def _numbers(self, index: int, draw: int) -> torch.Generator | None:
        return None if draw == EVALUATION else generator(self.seed, "augmentation", draw, index)


class FirstSamples:
    """The first samples of a training set as they would be evaluated."""

    in_memory = False

    def __init__(self, samples: DetectionSamples, count: int) -> None:
        """At most as many as there are."""
        self.samples, self.count = samples, min(count, len(samples))
        self.split = samples.split

    def __len__(self) -> int:
        """Number of images."""
        return self.count

    def fetch(self, keys: Sequence[SampleKey]) -> Batch:
        """As of the set itself."""
        return self.samples.fetch(keys)


def collate(samples: Sequence[dict[str, Tensor]]) -> Batch:
    """Samples of different sizes as one batch.

    Returns: `images` (batch, 3, height, width), zero at the bottom and on the right where an image is smaller; `sizes`
        (batch, 2) before padding; and of the objects of all images one after the other `boxes` (n, 4), `labels` (n,),
        `masks` (n, height, width) and `owners` (n,), the place in the batch of the image that each is in.
    """
    sizes = torch.tensor([tuple(sample["image"].shape[-2:]) for sample in samples])
    height, width = (-(-int(side) // MULTIPLE) * MULTIPLE for side in sizes.amax(0))

    def padded(values: Tensor) -> Tensor:
        return pad(values, (0, width - values.shape[-1], 0, height - values.shape[-2]))

    counts = torch.tensor([len(sample["labels"]) for sample in samples])
    return {
        "images": torch.stack([padded(sample["image"]) for sample in samples]),
        "sizes": sizes,
        "boxes": torch.cat([sample["boxes"] for sample in samples]),
        "labels": torch.cat([sample["labels"] for sample in samples]),
        "masks": torch.cat([padded(sample["masks"]) for sample in samples]),
        "owners": torch.repeat_interleave(torch.arange(len(samples)), counts),
    }


def targets_of(batch: Batch) -> list[dict[str, Tensor]]:
    """The objects of each image, as torchvision takes them."""
    chosen = [batch["owners"] == place for place in range(len(batch["images"]))]
    return [{name: batch[name][mine] for name in ("boxes", "labels", "masks")} for mine in chosen]
