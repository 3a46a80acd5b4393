"""scikit-learn's digits: 1797 grey images of 8 x 8 pixels, the embedded data set."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellcond.errors import MissingExtraError

NUM_TRAIN = 1297


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) with zero mean and unit variance, and labels."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    """The digits in one fixed random order: the first 1297 train, the other 500 test."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "train") from error
    data = load()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None]
    images = (images - images[:NUM_TRAIN].mean()) / images[:NUM_TRAIN].std()
    labels = torch.tensor(data.target)[order]
    return Digits(images[:NUM_TRAIN], labels[:NUM_TRAIN], images[NUM_TRAIN:], labels[NUM_TRAIN:])
