"""Oriented gratings: the orientation is the class, phase and frequency vary freely, noise covers them."""

from __future__ import annotations

import math

import torch
from pydantic import Field

from wellcond.lab.data.generated import Generated, GeneratorOptions, register_generator


class GratingsOptions(GeneratorOptions):
    """Options of `gratings`."""

    size: int = Field(16, ge=4, le=1024)
    num_classes: int = Field(8, ge=2, le=360)
    noise: float = Field(0.5, ge=0)
    """Standard deviation of the noise; that of the grating is 1."""
    min_cycles: float = Field(2.0, gt=0)
    max_cycles: float = Field(4.0, gt=0)
    """Periods across the image; above size / 2 they cannot be told apart."""
    spread: float = Field(0.8, ge=0, le=1)
    """Part of its bin of orientations that a class fills; below 1 leaves a gap between classes."""


@register_generator("gratings", GratingsOptions)
def gratings(count: int, options: GratingsOptions, generator: torch.Generator) -> Generated:
    r"""Images (n, 1, size, size) with zero mean and unit variance in expectation, as many of each class as can be.

    .. math:: x = (\sqrt 2 \sin(2\pi f (u \cos\theta + v \sin\theta) + \phi) + s\,\epsilon) / \sqrt{1 + s^2}

    with class c of k and theta = pi (c + 1/2 + spread (r - 1/2)) / k, r uniform in [0, 1). The phase is uniform, so no
    single pixel says anything about the class. Values are rounded to 1/64, so that every machine makes the same ones.
    """

    def uniform() -> torch.Tensor:
        return torch.rand(count, 1, 1, generator=generator, dtype=torch.float64)

    labels = (torch.arange(count) % options.num_classes)[torch.randperm(count, generator=generator)]
    bins = labels[:, None, None] + 0.5 + options.spread * (uniform() - 0.5)
    theta = math.pi * bins / options.num_classes
    frequency = options.min_cycles + (options.max_cycles - options.min_cycles) * uniform()
    phase = 2 * math.pi * uniform()
    axis = torch.arange(options.size, dtype=torch.float64) / options.size
    images = torch.empty(count, 1, options.size, options.size)
    for rows in torch.arange(count).split(1024):
        along = axis * theta[rows].cos() + axis[:, None] * theta[rows].sin()
        wave = math.sqrt(2) * (2 * math.pi * frequency[rows] * along + phase[rows]).sin()
        noise = torch.randn(wave.shape, generator=generator, dtype=torch.float64)
        values = (wave + options.noise * noise) / math.sqrt(1 + options.noise**2)
        images[rows, 0] = ((values * 64).round() / 64).float()
    names = tuple(f"{180 * (c + 0.5) / options.num_classes:g} degrees" for c in range(options.num_classes))
    return Generated("image", images, labels, names)
