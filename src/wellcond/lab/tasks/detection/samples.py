"""Images with their objects as padded batches: scaled, in training also mirrored and cropped.

Torchvision's transforms would interpolate masks, and the image twice; here a crop and two scalings are one, and the
polygons are moved and then drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from wellcond.errors import needs_extra
from wellcond.lab.data.images import import_pil
from wellcond.lab.seeding import generator
from wellcond.lab.settings import Fraction, ImageSide, Settings
from wellcond.lab.tasks.base import EVALUATION, Batch, Keys, Samples
from wellcond.lab.tasks.detection.coco import SMALLEST_SIDE, CocoDataset, Segmentation, read_counts

MULTIPLE = 32  # that sides of a batch are padded to
CROP_SHARE, CROP_SIDES, CROP_RANGE = 0.5, (400, 500, 600), (384, 600)
"""Of the XCiT release: how often a part of the image is cut out, shorter sides before that of which one is drawn, and
the range of the height and the width of the part; an image that is smaller stays whole."""


class DetectionAugmentation(Settings):
    """How images are scaled, and in training changed; evaluation takes the largest of `sides`."""

    flip: Fraction = 0.0
    """Probability of a mirror image."""
    sides: tuple[ImageSide, ...] = Field(default=(800,), min_length=1)
    """Shorter sides in training; one is drawn."""
    longest: ImageSide = 1333
    """Of the longer side, which wins over the shorter."""
    crop: bool = False
    """Whether a part of every other image is cut out before the scaling: scaled, cropped, scaled again."""


def import_pycocotools() -> Any:
    """The package with its modules coco, cocoeval and mask."""
    with needs_extra("pycocotools", "detection"):
        import pycocotools.coco
        import pycocotools.cocoeval
        import pycocotools.mask
    return pycocotools


def to_rle(segmentation: Segmentation | Tensor, height: int, width: int) -> dict[str, Any]:
    """Compressed run lengths of a mask or a segmentation of this size, as pycocotools makes them, but with text."""
    if isinstance(segmentation, dict) and not isinstance(segmentation["counts"], list):
        return segmentation
    api = import_pycocotools().mask
    if isinstance(segmentation, Tensor):
        encoded = api.encode(np.asfortranarray(segmentation.cpu().to(torch.uint8).numpy()))
    else:
        encoded = api.frPyObjects(segmentation, height, width)
        encoded = api.merge(encoded) if isinstance(segmentation, list) else encoded
    return {"size": [height, width], "counts": encoded["counts"].decode("ascii")}


def to_mask(segmentation: Segmentation, height: int, width: int) -> Tensor:
    """The mask, uint8 of shape (height, width), equal to pycocotools' `annToMask`."""
    # Not by pycocotools' `decode`, in which NumPy 2 warns of a deprecated call for every mask.
    runs = read_counts(to_rle(segmentation, height, width)["counts"])
    columns = np.repeat(np.arange(len(runs), dtype=np.int64) % 2, runs).reshape(width, height)
    return torch.from_numpy(np.ascontiguousarray(columns.T, np.uint8))


def boxes_of_masks(masks: Tensor) -> Tensor:
    """The smallest boxes around masks (n, height, width), float32 (n, 4)."""
    from torchvision.ops import masks_to_boxes  # an extra, which other tasks do without

    return masks_to_boxes(masks) + torch.tensor([0.0, 0.0, 1.0, 1.0])  # which counts the last pixel, not its end


@dataclass(frozen=True)
class View:
    """A part (left, top, right, bottom) of an image, scaled to a size (height, width), then perhaps mirrored."""

    part: tuple[float, float, float, float]
    size: tuple[int, int]
    flipped: bool = False

    def look(self, picture: Any, resampling: str = "BILINEAR") -> Tensor:
        """The pixels of a PIL image, interpolated once."""
        pil = import_pil()
        picture = picture.resize(self.size[::-1], pil.Resampling[resampling], box=self.part)
        if self.flipped:
            picture = picture.transpose(pil.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(picture))

    def move(self, points: Tensor) -> Tensor:
        """Where points (..., 2) of the image lie in the view, float64; they may lie outside."""
        (left, top, right, bottom), (height, width) = self.part, self.size
        scale = torch.tensor([width / (right - left), height / (bottom - top)])
        moved = (points.double() - torch.tensor([left, top])) * scale
        if self.flipped:
            moved[..., 0] = width - moved[..., 0]
        return moved

    def move_boxes(self, boxes: Tensor) -> Tensor:
        """Where boxes (n, 4) lie; not cut off."""
        corners = self.move(boxes.reshape(-1, 2, 2))
        return torch.cat([corners.amin(1), corners.amax(1)], 1).float()

    def mask(self, segmentation: Segmentation, size: tuple[int, int]) -> Tensor:
        """The mask in the view, uint8 (height, width), of a segmentation in an image of this size."""
        if isinstance(segmentation, list):  # moved and then drawn, so that no mask is interpolated
            moved = [self.move(torch.tensor(polygon).reshape(-1, 2)).flatten().tolist() for polygon in segmentation]
            return to_mask(moved, *self.size)
        return self.look(import_pil().fromarray(to_mask(segmentation, *size).numpy()), "NEAREST")


def prepare(
    example: dict[str, Any], settings: DetectionAugmentation, draw: torch.Generator | None
) -> dict[str, Tensor]:
    """`image` float32 (3, h, w) in 0..1, `boxes` float32 (n, 4), `labels` int64 (n,) and `masks` uint8 (n, h, w).

    Objects of which the view leaves less than a pixel, or no pixel of the mask, are left out; the boxes of those that
    a crop cuts are drawn anew around what is left of the mask. Evaluation draws no random numbers.
    """
    from torchvision.ops import clip_boxes_to_image, remove_small_boxes  # an extra, which other tasks do without

    view = choose_view(example["size"], settings, draw)
    moved = view.move_boxes(example["boxes"])
    boxes = clip_boxes_to_image(moved, view.size)
    kept = remove_small_boxes(boxes, SMALLEST_SIDE)
    drawn = [view.mask(example["segmentations"][row], example["size"]) for row in kept.tolist()]
    masks = torch.stack(drawn) if drawn else torch.zeros(0, *view.size, dtype=torch.uint8)
    seen = masks.bool().flatten(1).any(1)
    kept, masks = kept[seen], masks[seen]
    cut = (boxes[kept] != moved[kept]).any(1)
    return {
        "image": view.look(example["image"]).permute(2, 0, 1).float() / 255,
        "boxes": torch.where(cut[:, None], boxes_of_masks(masks), boxes[kept]),
        "labels": example["labels"][kept],
        "masks": masks,
    }


def choose_view(size: tuple[int, int], settings: DetectionAugmentation, draw: torch.Generator | None) -> View:
    """The view of an image of this size (height, width) in evaluation or, with random numbers, in training."""
    height, width = size
    part: tuple[float, float, float, float] = (0, 0, width, height)
    side, flipped = max(settings.sides), False

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    def happens(share: float) -> bool:
        return bool(torch.rand((), generator=draw, dtype=torch.float64) < share)

    if draw is not None:
        flipped = happens(settings.flip)
        side = settings.sides[integer(0, len(settings.sides) - 1)]
        if settings.crop and happens(CROP_SHARE):
            first = fit(size, CROP_SIDES[integer(0, len(CROP_SIDES) - 1)], settings.longest)
            # As in the releases: height and width drawn one by one, then the place.
            down, across = (integer(*(min(limit, most) for limit in CROP_RANGE)) for most in first)
            top, left = integer(0, first[0] - down), integer(0, first[1] - across)
            # Both scalings and the crop between them are one: a part of the image, scaled once.
            rows, columns = height / first[0], width / first[1]
            right, bottom = min(width, (left + across) * columns), min(height, (top + down) * rows)
            part, size = (left * columns, top * rows, right, bottom), (down, across)
    return View(part, fit(size, side, settings.longest), flipped)


def fit(size: tuple[int, int], side: int, longest: int) -> tuple[int, int]:
    """Size (height, width) scaled to a shorter side, or to the longest longer one if that is reached first."""
    scale = min(side / min(size), longest / max(size))
    height, width = (max(1, int(length * scale + 0.5)) for length in size)
    return height, width


@dataclass
class DetectionSamples(Samples):
    """Images decoded, augmented by seed, number and draw (see `SampleKey`) alone, and padded one batch at a time."""

    split: CocoDataset
    augmentation: DetectionAugmentation
    seed: int
    in_memory: ClassVar[bool] = False

    def __len__(self) -> int:
        return len(self.split)

    def fetch(self, keys: Keys) -> Batch:
        """`images` (batch, 3, height, width), zero at the bottom and on the right where one is smaller.

        Their `sizes` (batch, 2) before padding, `original_sizes`, `image_ids` and `positions` in the split; and of the
        objects of all images one after the other `boxes` (n, 4), `labels` (n,), `masks` (n, height, width) and
        `owners` (n,), the place in the batch of the image that each is in.
        """
        examples = [self.split[index] for index, _ in keys]
        draws = [None if draw == EVALUATION else generator(self.seed, "augmentation", draw, row) for row, draw in keys]
        samples = [prepare(example, self.augmentation, draw) for example, draw in zip(examples, draws, strict=True)]
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
            "original_sizes": torch.tensor([example["size"] for example in examples]),
            "image_ids": torch.tensor([example["image_id"] for example in examples]),
            "positions": torch.tensor([index for index, _ in keys]),
        }


def targets_of(batch: Batch) -> list[dict[str, Tensor]]:
    """The objects of each image, as torchvision takes them."""
    chosen = [batch["owners"] == place for place in range(len(batch["images"]))]
    return [{name: batch[name][mine] for name in ("boxes", "labels", "masks")} for mine in chosen]
