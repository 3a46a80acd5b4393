"""Source `digits`: the 1797 grey images of 8 x 8 that come with scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from wellcond.errors import needs_extra
from wellcond.lab.data.base import Data, Dataset, SourceConfig, TensorDataset, register_source

NUM_TRAIN = 1297


class DigitsConfig(SourceConfig):
    """Settings of `digits`."""

    source: Literal["digits"] = "digits"
    held_out: float | None = Field(None, gt=0, lt=1)
    """Share of the training images to evaluate on; the test images are then the test split."""


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Images (1, 8, 8), normalised, in one fixed random order: the first 1297 to train on, the other 500 to test on."""
    with needs_extra("scikit-learn", "train"):
        from sklearn.datasets import load_digits as load
    data = load()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None]
    images = (images - images[:NUM_TRAIN].mean()) / images[:NUM_TRAIN].std()
    whole = TensorDataset("image", images, torch.tensor(data.target)[order])
    return whole.take(slice(NUM_TRAIN)), whole.take(slice(NUM_TRAIN, None))


@register_source(DigitsConfig)
def load(config: DigitsConfig, base: Path) -> Data:
    """The split of `load_digits`; with `held_out`, a part of the training images is evaluated on."""
    train, evaluation = load_digits()
    others: dict[str, Dataset] = {}
    if config.held_out is not None:
        others["test"] = evaluation
        kept = len(train) - max(1, round(config.held_out * len(train)))  # in random order as they are
        train, evaluation = train.take(slice(kept)), train.take(slice(kept, None))
    names = tuple(str(digit) for digit in range(10))
    return Data("digits", "image", train, evaluation, names, "scikit-learn's digits, grey, 8 x 8, normalised", others)
