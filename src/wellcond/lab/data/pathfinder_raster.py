"""Drawing the scenes of Pathfinder images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wellcond.lab.data.pathfinder_options import PathfinderOptions
from wellcond.lab.data.pathfinder_scenes import Scenes
from wellcond.lab.data.pathfinder_strokes import Floats, Ints, disc_pixels, make_strokes, reduce_image

FINE_PIXELS = 2**20
"""Of markers drawn at once."""


def draw_scenes(scenes: Scenes, options: PathfinderOptions) -> NDArray[np.uint8]:
    """Images (n, size, size): the brightest of what lies on a pixel, each image scaled to 0 to 255."""
    strokes = make_strokes(options)
    count, size, reach = len(scenes.labels), options.image_size, strokes.reach
    side = size + 2 * reach
    # Single precision decides halves between two grey values as published.
    canvas = np.zeros((count, side * side), np.float32)
    grid = np.arange(-reach, reach + 1)
    window = (grid[:, None] * side + grid).ravel()

    def draw(rows: Ints, start: Ints, stroke: Ints, contrast: float) -> None:
        pixels = ((start[:, 0] + reach) * side + start[:, 1] + reach)[:, None] + window
        brightness = contrast * strokes.line[stroke]
        canvas[rows[:, None], pixels] = np.maximum(canvas[rows[:, None], pixels], brightness)

    every = np.arange(count)
    for curve, number in np.ndindex(*scenes.curves.stroke.shape[1:]):
        paddles = scenes.curves
        draw(every, paddles.start[:, curve, number], paddles.stroke[:, curve, number], options.curve_contrast)
    for curve, number in np.ndindex(*scenes.distractors.stroke.shape[1:]):
        rows, paddles = np.flatnonzero(scenes.shown[:, curve]), scenes.distractors
        start, stroke = paddles.start[rows, curve, number], paddles.stroke[rows, curve, number]
        draw(rows, start, stroke, options.distractor_contrast)
    inner = slice(reach, reach + size)
    images = np.maximum(canvas.reshape(count, side, side)[:, inner, inner], _draw_markers(scenes.markers, options))
    peak = images.max((1, 2), keepdims=True)
    return np.floor(images * (255 / peak) + 0.5).astype(np.uint8)


def _draw_markers(markers: Ints, options: PathfinderOptions) -> Floats:
    """Two discs per image, brightness 0 to 1."""
    scale, size = options.antialias_scale, options.image_size
    fine_size = size * scale
    places, which = np.unique(markers.reshape(-1, 2), axis=0, return_inverse=True)
    discs = np.empty((len(places), size, size), np.uint8)
    block = max(1, FINE_PIXELS // fine_size**2)
    for first in range(0, len(places), block):
        pixels = scale * places[first : first + block, None] + disc_pixels(options)
        inside = ((pixels >= 0) & (pixels < fine_size)).all(-1)
        index = np.broadcast_to(np.arange(len(pixels))[:, None], inside.shape)
        fine = np.zeros((len(pixels), fine_size, fine_size), bool)
        fine[index[inside], pixels[inside][:, 0], pixels[inside][:, 1]] = True
        discs[first : first + block] = reduce_image(fine, size)
    return discs[which.reshape(-1, 2)].max(1) / 255
