"""Images as sequences of tokens: grey pixels row by row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wellcond.lab.data.base import Dataset
from wellcond.lab.data.images import BYTE_LIMIT, as_tensor_images
from wellcond.lab.settings import RecipeError

LEVELS = 256


def grey_pixels(
    split: Dataset, size: int | None, what: str, progress: Callable[[int, int], None] | None = None
) -> Tensor:
    """Pixels 0 to 255 of every image, (n, height * width), uint8.

    Args:
        split: Images; colour becomes grey as by PIL's convert("L"). Floats in 0..1 are steps of 1/255.
        size: Side of the square that images are resized to (PIL's bilinear filter, which averages when it shrinks).
        what: The split, as an error names it.
        progress: Told how many of how many are decoded.

    Raises:
        RecipeError: images of several sizes, tensors of another size than asked for, or floats that are no pixels.
    """
    images = as_tensor_images(split, channels=1, size=size, resampling="bilinear", progress=progress)
    if images is None:
        raise RecipeError(
            f"{what}: expected images of one size, less than {BYTE_LIMIT} bytes in all; set task.image_size, for "
            "instance 32"
        )
    if size is not None and images.shape[-2:] != (size, size):
        raise RecipeError(
            f"{what}: expected {size} x {size} pixels (task.image_size), found tensors of {images.shape[-2]} x "
            f"{images.shape[-1]}, which are not resized; make them in that size"
        )
    if images.is_floating_point():
        low, high = float(images.min()), float(images.max())
        if not (low >= 0 and high <= 1):
            raise RecipeError(
                f"{what}: expected bytes or floats from 0 to 1, which are pixels, found normalised images from "
                f"{low:.3g} to {high:.3g}"
            )
        images = (images * (LEVELS - 1)).round().to(torch.uint8)
    return images.flatten(1)
