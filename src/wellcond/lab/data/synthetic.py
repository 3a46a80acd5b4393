"""Two generators that need no files: oriented gratings (images) and associative recall (tokens)."""

from __future__ import annotations

import math

import torch
from pydantic import Field, model_validator

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


class AssociativeRecallOptions(GeneratorOptions):
    """Options of `associative_recall`."""

    num_pairs: int = Field(8, ge=2)
    num_keys: int = Field(16, ge=2)
    num_values: int = Field(16, ge=2)

    @model_validator(mode="after")
    def _check_pairs(self) -> AssociativeRecallOptions:
        if self.num_pairs > self.num_keys:
            raise ValueError(
                f"the keys of a sequence differ from each other: expected num_pairs of at most num_keys = "
                f"{self.num_keys}, got {self.num_pairs}. Raise num_keys."
            )
        return self


@register_generator("associative_recall", AssociativeRecallOptions)
def associative_recall(count: int, options: AssociativeRecallOptions, generator: torch.Generator) -> Generated:
    """Sequences k1 v1 k2 v2 ... kP vP q of token ids; the label is the value that follows q among the pairs.

    Keys are ids 0 .. num_keys - 1, drawn without repetition; values follow them as ids num_keys .. num_keys +
    num_values - 1, drawn independently, so nothing but a look-up within the sequence finds the answer: a model that
    only knows which values occur is right in about one of num_pairs cases.
    """
    keys = torch.rand(count, options.num_keys, generator=generator, dtype=torch.float64).argsort(dim=1)
    keys = keys[:, : options.num_pairs]
    values = torch.randint(options.num_values, (count, options.num_pairs), generator=generator)
    asked = torch.randint(options.num_pairs, (count, 1), generator=generator)
    pairs = torch.stack([keys, values + options.num_keys], dim=2).flatten(1)
    tokens = torch.cat([pairs, keys.gather(1, asked)], dim=1)
    labels = values.gather(1, asked).squeeze(1)
    names = tuple(str(value) for value in range(options.num_values))
    return Generated("tokens", tokens, labels, names, options.num_keys + options.num_values)
