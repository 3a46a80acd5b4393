"""Source `digits`: the 1797 grey images of 8 x 8 that come with scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from wellcond.lab.data.base import Data, Dataset, TensorDataset, describe_sizes
from wellcond.lab.data.digits import load_digits
from wellcond.lab.data.registry import SourceConfig, register_source


class DigitsConfig(SourceConfig):
    """Settings of `digits`."""

    source: Literal["digits"] = "digits"
    held_out: float | None = Field(None, gt=0, lt=1)
    """Share of the training images to evaluate on; the test images are then the test split."""


@register_source(DigitsConfig)
def load(config: DigitsConfig, base: Path) -> Data:
    """Images (1, 8, 8) normalised with training statistics; order and split are those of `load_digits`."""
    data = load_digits()
    train = TensorDataset("image", data.train_images, data.train_labels.long())
    evaluation = TensorDataset("image", data.test_images, data.test_labels.long())
    others: dict[str, Dataset] = {}
    if config.held_out is not None:
        others["test"] = evaluation
        kept = len(train) - max(1, round(config.held_out * len(train)))  # in random order as they are
        train, evaluation = (
            TensorDataset("image", train.inputs[part], data.train_labels.long()[part])
            for part in (slice(kept), slice(kept, None))
        )
    names = tuple(str(digit) for digit in range(10))
    description = f"scikit-learn's digits, grey, 8 x 8, normalised: {describe_sizes(train, evaluation, names)}"
    return Data("digits", "image", train, evaluation, names, description, others)
