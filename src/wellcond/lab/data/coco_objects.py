"""Annotations of an image as `Instances`: all of them for evaluation, the usable ones for training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wellcond.lab.data.coco_files import CocoFile
from wellcond.lab.data.errors import DataError
from wellcond.lab.detection.boxes import clip_boxes, thin_boxes
from wellcond.lab.detection.instances import Instances
from wellcond.lab.detection.masks import POLYGON_NUMBERS, Segmentation


def all_instances(annotations: Sequence[Mapping[str, Any]], labels: Mapping[int, int]) -> Instances:
    """Every annotation as it is; `labels` by category id."""
    boxes = torch.tensor([annotation["bbox"] for annotation in annotations], dtype=torch.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    return Instances(
        boxes.float(),
        torch.tensor([labels[annotation["category_id"]] for annotation in annotations], dtype=torch.int64),
        torch.tensor([bool(annotation["iscrowd"]) for annotation in annotations], dtype=torch.bool),
        [annotation["segmentation"] for annotation in annotations],
    )


def training_instances(
    image: Mapping[str, Any], annotations: Sequence[Mapping[str, Any]], labels: Mapping[int, int]
) -> tuple[Instances, Counter[str]]:
    """What can be learnt from, and how many of what were left out.

    Left out are crowd regions, objects whose box within the image is thinner than a pixel, and objects without a mask;
    polygons of fewer than three points are no mask.
    """
    instances = all_instances(annotations, labels)
    boxes = clip_boxes(instances.boxes, image["height"], image["width"])
    masks = [_enclosing(segmentation) for segmentation in instances.segmentations]
    thin = thin_boxes(boxes)
    blank = torch.tensor([mask == [] for mask in masks], dtype=torch.bool)
    keep = ~(instances.crowd | thin | blank)
    lost = Counter(
        {
            "crowd regions": int(instances.crowd.sum()),
            "degenerate boxes": int((thin & ~instances.crowd).sum()),
            "objects without a mask": int((blank & ~thin & ~instances.crowd).sum()),
        }
    )
    return Instances(boxes, instances.labels, instances.crowd, masks).select(keep), lost


def _enclosing(segmentation: Segmentation) -> Segmentation:
    if isinstance(segmentation, dict):
        return segmentation
    return [polygon for polygon in segmentation if len(polygon) >= POLYGON_NUMBERS]


def check_evaluated(file: CocoFile) -> None:
    """Refuse masks that pycocotools cannot read.

    Raises:
        DataError: an annotation has no polygon, or one of fewer than three points.
    """
    for annotation in (annotation for group in file.annotations for annotation in group):
        segmentation = annotation["segmentation"]
        if isinstance(segmentation, list) and (not segmentation or _enclosing(segmentation) != segmentation):
            lengths = [len(polygon) // 2 for polygon in segmentation]
            raise DataError(
                f"{file.path}, annotation {annotation['id']}: the mask cannot be evaluated.",
                expected="polygons of at least three points, or run lengths",
                found=f"polygons of {lengths} points" if lengths else "no polygon",
                todo="Correct or remove the annotation.",
            )
