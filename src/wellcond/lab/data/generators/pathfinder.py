"""Pathfinder: do two markers lie on the ends of one dashed curve? Made like the images of the Long Range Arena."""

from __future__ import annotations

import numpy as np
import torch

from wellcond.lab.data.generated import Generated, register_generator
from wellcond.lab.data.pathfinder_options import PathfinderOptions
from wellcond.lab.data.pathfinder_raster import draw_scenes
from wellcond.lab.data.pathfinder_scenes import Scenes, make_scenes


def _has_few_images(options: PathfinderOptions) -> bool:
    """Small images repeat: of 1,000 at 12 pixels with two dashes, 278 were among 40,000 others."""
    return options.image_size < 32 or options.contour_length < 6


@register_generator("pathfinder", PathfinderOptions, chunk=500, distinct=_has_few_images)
def pathfinder(count: int, options: PathfinderOptions, generator: torch.Generator) -> Generated:
    """Images (n, 1, size, size) of 8 bits; label 1, joined, has one of every two images.

    Raises:
        DataError: the curves do not fit into the image.
    """
    scenes = pathfinder_scenes(count, options, generator)
    images = torch.from_numpy(draw_scenes(scenes, options))
    return Generated("image", images[:, None], torch.from_numpy(scenes.labels), ("apart", "joined"))


def pathfinder_scenes(count: int, options: PathfinderOptions, generator: torch.Generator) -> Scenes:
    """The curves and markers behind the images that `pathfinder` makes of the same generator."""
    seed = int(torch.randint(2**62, (), generator=generator))
    random = np.random.default_rng(seed)
    # One of each label in every pair of images, so that the beginning of a chunk is balanced too.
    first = random.integers(2, size=(count + 1) // 2)
    labels = np.stack([first, 1 - first], 1).ravel()[:count]
    return make_scenes(labels, options, random)
