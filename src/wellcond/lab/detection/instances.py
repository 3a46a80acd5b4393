"""The objects of one image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.lab.detection.masks import Segmentation, to_mask


@dataclass(frozen=True, eq=False)
class Instances:
    """Objects of one image, in pixels of that image."""

    boxes: Tensor
    """float32 (n, 4): x0, y0, x1, y1."""
    labels: Tensor
    """int64 (n,), from 1; 0 is background."""
    crowd: Tensor
    """bool (n,): whether a region stands for a group of objects, which evaluation ignores."""
    segmentations: Sequence[Segmentation]

    def __len__(self) -> int:
        """Number of objects."""
        return len(self.segmentations)

    def masks(self, height: int, width: int) -> Tensor:
        """Masks in an image of this size, uint8 (n, height, width), equal to pycocotools' `annToMask`."""
        masks = [to_mask(segmentation, height, width) for segmentation in self.segmentations]
        return torch.stack(masks) if masks else torch.zeros(0, height, width, dtype=torch.uint8)

    def select(self, keep: Tensor) -> Instances:
        """Those for which `keep`, bool (n,), is true."""
        chosen = [segmentation for segmentation, kept in zip(self.segmentations, keep.tolist(), strict=True) if kept]
        return Instances(self.boxes[keep], self.labels[keep], self.crowd[keep], chosen)
