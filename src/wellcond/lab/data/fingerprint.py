"""What a run record says about its data, the same on every machine."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from wellcond.lab.data.base import Data, Dataset

NUM_SAMPLES = 16


def fingerprint(bundle: Data) -> dict[str, Any]:
    """Sizes, classes and digests of a bundle, as plain JSON values.

    The digest of a split covers its size, every label, and 16 inputs spread evenly from the first to the last, each
    as stored (encoded bytes of an image, not its pixels, which differ between decoders). It does not cover the inputs
    between those, so that sets of any size take milliseconds.
    """
    splits = {"train": bundle.train, "evaluation": bundle.evaluation, **bundle.others}
    described = {name: {"size": len(split), "sha256": _digest(split)} for name, split in splits.items()}
    return {
        "name": bundle.name,
        "kind": bundle.kind,
        "class_names": None if bundle.class_names is None else list(bundle.class_names),
        "splits": described,
    }


def _digest(split: Dataset) -> str:
    digest = hashlib.sha256(str(len(split)).encode())
    if split.labels is not None:
        labels = split.labels.numpy()
        digest.update(labels.astype("<f8" if labels.dtype.kind == "f" else "<i8").tobytes())
    last = len(split) - 1
    for index in sorted(set(torch.linspace(0, last, NUM_SAMPLES, dtype=torch.float64).long().tolist()) | {0, last}):
        content = split.content(index)
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()
