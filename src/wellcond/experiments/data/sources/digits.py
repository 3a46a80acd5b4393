"""Source `digits`: the 1797 grey images of 8 x 8 that come with scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from wellcond.experiments.data.bundle import DataBundle, TensorSplit, describe_sizes
from wellcond.experiments.data.registry import SourceConfig, register_source
from wellcond.experiments.digits import load_digits


class DigitsConfig(SourceConfig):
    """Settings of `digits`: none."""

    source: Literal["digits"] = "digits"


@register_source(DigitsConfig)
def load(config: DigitsConfig, base: Path) -> DataBundle:
    """Images (1, 8, 8) normalised with training statistics; order and split are those of `load_digits`."""
    data = load_digits()
    train = TensorSplit("image", data.train_images, data.train_labels.long())
    evaluation = TensorSplit("image", data.test_images, data.test_labels.long())
    names = tuple(str(digit) for digit in range(10))
    description = f"scikit-learn's digits, grey, 8 x 8, normalised: {describe_sizes(train, evaluation, names)}"
    return DataBundle("digits", "image", train, evaluation, names, description)
