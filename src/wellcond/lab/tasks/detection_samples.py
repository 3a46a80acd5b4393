"""What a detector finds in a few images, beside the truth, as plain data that a report is drawn from."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from wellcond.lab.data.images import import_pil
from wellcond.lab.detection import to_results
from wellcond.lab.detection.masks import to_rle
from wellcond.lab.tasks.base import EVALUATION
from wellcond.lab.tasks.detection_sets import DetectionSamples

LONGEST, QUALITY = 256, 80
"""Longer side in pixels and quality of the JPEG in a record."""
MOST, LEAST_SCORE = 20, 0.05
"""Predictions of an image that are recorded: so many at most, of this score at least."""


@torch.no_grad()
def describe_predictions(
    model: nn.Module, samples: DetectionSamples, count: int, class_names: Sequence[str]
) -> list[dict[str, Any]]:
    """Of each of the first images: `image_id`, `file_name`, `size`, `jpeg` in base 64, `truth` and `predictions`.

    Both are lists of `bbox` [x, y, width, height] in pixels of `size` (height, width), `category` and `segmentation` as
    compressed run lengths; predictions also have a `score`, the best first.
    """
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        return [_describe(model, samples, index, class_names, device) for index in range(min(count, len(samples)))]
    finally:
        model.train(was_training)


def _describe(
    model: nn.Module, samples: DetectionSamples, index: int, class_names: Sequence[str], device: torch.device
) -> dict[str, Any]:
    split, example = samples.split, samples.split[index]
    batch = samples.fetch([(index, EVALUATION)])
    [found] = model(batch["images"].to(device), batch["sizes"], original_sizes=batch["original_sizes"])
    names = dict(zip(split.category_ids, class_names, strict=True))
    results = to_results([found], [example["image_id"]], [example["size"]], split.category_ids)
    best = sorted((row for row in results if row["score"] >= LEAST_SCORE), key=lambda row: -row["score"])[:MOST]
    return {
        "image_id": example["image_id"],
        "file_name": split.images[index]["file_name"],
        "size": list(example["size"]),
        "jpeg": _jpeg(example["image"]),
        "truth": _truth(example, class_names),
        "predictions": [
            {
                "bbox": [round(number, 2) for number in row["bbox"]],
                "category": names[row["category_id"]],
                "score": round(row["score"], 4),
                "segmentation": row["segmentation"],
            }
            for row in best
        ],
    }


def _truth(example: dict[str, Any], class_names: Sequence[str]) -> list[dict[str, Any]]:
    instances, (height, width) = example["instances"], example["size"]
    instances = instances.select(~instances.crowd)
    rows = []
    for box, label, segmentation in zip(
        instances.boxes.tolist(), instances.labels.tolist(), instances.segmentations, strict=True
    ):
        lengths = to_rle(segmentation, height, width)
        counts = lengths["counts"]
        rows.append(
            {
                "bbox": [round(number, 2) for number in (box[0], box[1], box[2] - box[0], box[3] - box[1])],
                "category": class_names[label - 1],
                "segmentation": {
                    "size": [height, width],
                    "counts": counts.decode("ascii") if isinstance(counts, bytes) else counts,
                },
            }
        )
    return rows


def _jpeg(picture: Any) -> str:
    small = picture.copy()
    small.thumbnail((LONGEST, LONGEST), import_pil().Resampling.BILINEAR)
    file = io.BytesIO()
    small.save(file, "JPEG", quality=QUALITY)
    return base64.b64encode(file.getvalue()).decode("ascii")
