"""COCO's official evaluation, by pycocotools itself."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from wellcond.errors import MissingExtraError
from wellcond.lab.data.errors import DataError, listed
from wellcond.lab.detection.masks import from_mask

Kind = Literal["bbox", "segm"]
KINDS: dict[Kind, tuple[str, str]] = {"bbox": ("box", "bbox"), "segm": ("mask", "segmentation")}
"""How the metrics of a kind begin, and where a result has what is judged."""
METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")
"""In the order of pycocotools: over all overlaps, at 0.5, at 0.75; of small, medium and large objects."""


def to_results(
    detections: Sequence[Mapping[str, Tensor]],
    image_ids: Sequence[int] | Tensor,
    original_sizes: Sequence[Sequence[int]] | Tensor,
    category_ids: Sequence[int],
) -> list[dict[str, Any]]:
    """Detections in COCO's format of results.

    A detection whose score or box is not finite, as a diverged model has them, is none and is left out.

    Args:
        detections: Of each image `boxes` (n, 4) as x0, y0, x1, y1 in pixels of the original image, `labels` (n,) from
            1, `scores` (n,) and, if masks are judged, `masks` of shape (n, h, w) or (n, 1, h, w) in the original size;
            masks that are no whole numbers are cut at 0.5.
        image_ids: Of each image.
        original_sizes: Height and width of each image.
        category_ids: COCO's id of each label: the first is that of label 1.
    """
    results = []
    for found, image_id, size in zip(detections, image_ids, original_sizes, strict=True):
        height, width = (int(side) for side in size)
        boxes, scores = found["boxes"].detach().double().cpu(), found["scores"].detach().double().cpu()
        masks = found.get("masks")
        if masks is not None:
            masks = _binary(masks, height, width)
        usable = boxes.isfinite().all(1) & scores.isfinite()
        for row in usable.nonzero().flatten().tolist():
            left, top, right, bottom = boxes[row].tolist()
            result = {
                "image_id": int(image_id),
                "category_id": int(category_ids[int(found["labels"][row]) - 1]),
                "bbox": [left, top, right - left, bottom - top],
                "score": float(scores[row]),
            }
            if masks is not None:
                result["segmentation"] = from_mask(masks[row])
            results.append(result)
    return results


def _binary(masks: Tensor, height: int, width: int) -> Tensor:
    masks = masks.detach()
    masks = masks[:, 0] if masks.ndim == 4 else masks
    if masks.shape[1:] != (height, width):
        raise DataError(
            "the masks of a detection have another size than their image.",
            expected=f"{height} x {width} pixels (height, width)",
            found=f"shape {tuple(masks.shape)}",
            todo="Paste the masks into the original image first.",
        )
    return (masks >= 0.5).to(torch.uint8) if masks.is_floating_point() else (masks != 0).to(torch.uint8)


def evaluate(
    ground_truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], kinds: Sequence[Kind] = ("bbox", "segm")
) -> dict[str, float]:
    """Average precision of results, as shares of 1.

    Args:
        ground_truth: Content of a COCO file, such as `CocoSplit.ground_truth`; all of its images are judged.
        results: From `to_results`, or a file of results.
        kinds: What to judge: boxes, masks.

    Returns: `box_AP`, `box_AP50`, `box_AP75`, `box_APs`, `box_APm`, `box_APl`, and the same of `mask`. Where there is
        nothing to find, as without small objects, pycocotools says -1; that number is left out.

    Raises:
        DataError: a result belongs to no image of the ground truth, or lacks what is to be judged.
    """
    known = {image["id"] for image in ground_truth["images"]}
    unknown = sorted({result["image_id"] for result in results} - known)
    if unknown:
        raise DataError(
            "results of images that are not evaluated.",
            expected=f"ids of the {len(known)} images of the ground truth",
            found=listed(unknown),
            todo="Evaluate the images that the results are of.",
        )
    metrics: dict[str, float] = {}
    for kind in kinds:
        prefix, key = KINDS[kind]
        lacking = sum(key not in result for result in results)
        if lacking:
            raise DataError(
                f"results that cannot be judged by {kind}.",
                expected=f"{key!r} in each result",
                found=f"{lacking} of {len(results)} without",
                todo=f"Add it, or leave {kind!r} out of the kinds.",
            )
        # The other key would decide by its own area whether a detection is small, medium or large.
        judged = [{name: result[name] for name in ("image_id", "category_id", key, "score")} for result in results]
        values = zip(METRICS, _statistics(ground_truth, judged, kind), strict=False)
        metrics |= {f"{prefix}_{name}": float(value) for name, value in values if value != -1}
    assert all(map(math.isfinite, metrics.values()))
    return metrics


def _statistics(ground_truth: Mapping[str, Any], results: list[dict[str, Any]], kind: Kind) -> list[float]:
    """The numbers that pycocotools prints."""
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise MissingExtraError("pycocotools", "detection") from error
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        # pycocotools writes into annotations. It takes a match with id 0 for none, so they are counted from 1.
        numbered = [{**annotation, "id": row} for row, annotation in enumerate(ground_truth["annotations"], 1)]
        truth.dataset = {**ground_truth, "annotations": numbered}
        truth.createIndex()
        found = truth.loadRes(results) if results else _no_results(truth)
        evaluation = COCOeval(truth, found, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    statistics: list[float] = evaluation.stats.tolist()
    return statistics


def _no_results(truth: Any) -> Any:
    """What `loadRes` would make of an empty list, which it does not take."""
    empty = type(truth)()
    empty.dataset = {**truth.dataset, "annotations": []}
    empty.createIndex()
    return empty
