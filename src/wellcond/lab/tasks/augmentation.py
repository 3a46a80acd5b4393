"""Augmentation of images: what every original recipe uses, under timm's meaning of the words."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from wellcond.lab.settings import Settings

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
