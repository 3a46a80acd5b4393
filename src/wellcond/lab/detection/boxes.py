"""Boxes as x0, y0, x1, y1 in pixels; a pixel at column c covers c to c + 1."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_SIDE = 1.0
"""Of a box that is trained on, in pixels."""


def clip_boxes(boxes: Tensor, height: int, width: int) -> Tensor:
    """Boxes (n, 4) cut off at the borders of an image.

    Example:
        >>> clip_boxes(torch.tensor([[-2.0, 1.0, 9.0, 3.0]]), height=2, width=8).tolist()
        [[0.0, 1.0, 8.0, 2.0]]
    """
    return boxes.clamp(min=0).minimum(boxes.new_tensor([width, height, width, height]))


def thin_boxes(boxes: Tensor) -> Tensor:
    """Which boxes are thinner than a pixel, or turned inside out; bool (n,)."""
    return (boxes[:, 2:] - boxes[:, :2]).amin(1) < SMALLEST_SIDE


def boxes_of_masks(masks: Tensor) -> Tensor:
    """The smallest boxes around masks (n, height, width), float32 (n, 4); zeros for an empty mask.

    Example:
        >>> boxes_of_masks(torch.tensor([[[0, 0, 0], [0, 1, 1]]], dtype=torch.uint8)).tolist()
        [[1.0, 1.0, 3.0, 2.0]]
    """
    left, right = _ends(masks.amax(1) > 0)
    top, bottom = _ends(masks.amax(2) > 0)
    return torch.stack([left, top, right, bottom], 1).float()


def _ends(occupied: Tensor) -> tuple[Tensor, Tensor]:
    """First true position and the one behind the last in each row of (n, length); both 0 where there is none."""
    positions = torch.arange(occupied.shape[1], device=occupied.device)
    behind_last = torch.where(occupied, positions + 1, 0).amax(1)
    first = torch.where(occupied, positions, occupied.shape[1]).amin(1)
    return torch.where(occupied.any(1), first, 0), behind_last
