"""What pycocotools does: masks from polygons and run lengths, and COCO's official evaluation."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from wellcond.errors import MissingExtraError
from wellcond.lab.data.errors import DataError
from wellcond.lab.tasks.detection.coco import Segmentation
from wellcond.run_lengths import read_counts

Kind = Literal["bbox", "segm"]
KINDS: dict[Kind, tuple[str, str]] = {"bbox": ("box", "bbox"), "segm": ("mask", "segmentation")}
"""How the metrics of a kind begin, and where a result has what is judged."""
METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")
"""In the order of pycocotools: over all overlaps, at 0.5, at 0.75; of small, medium and large objects."""


def import_pycocotools() -> Any:
    """The package, with its modules coco, cocoeval and mask, or a MissingExtraError."""
    try:
        import pycocotools.coco
        import pycocotools.cocoeval
        import pycocotools.mask
    except ImportError as error:
        raise MissingExtraError("pycocotools", "detection") from error
    return pycocotools


def to_rle(segmentation: Segmentation, height: int, width: int) -> dict[str, Any]:
    """Compressed run lengths of a segmentation in an image of this size, as pycocotools' `annToRLE` makes them."""
    if isinstance(segmentation, dict) and not isinstance(segmentation["counts"], list):
        return segmentation
    api = import_pycocotools().mask
    encoded = api.frPyObjects(segmentation, height, width)
    lengths: dict[str, Any] = api.merge(encoded) if isinstance(segmentation, list) else encoded
    return lengths


def to_mask(segmentation: Segmentation, height: int, width: int) -> Tensor:
    """The mask, uint8 of shape (height, width), equal to pycocotools' `annToMask`."""
    # Not by pycocotools' `decode`, in which NumPy 2 warns of a deprecated call for every mask.
    runs = read_counts(to_rle(segmentation, height, width)["counts"])
    values = (np.arange(len(runs)) % 2).astype(np.uint8)
    # Columns one after the other, background first.
    columns = np.repeat(values, runs).reshape(width, height)
    return torch.from_numpy(np.ascontiguousarray(columns.T))


def from_mask(mask: Tensor) -> dict[str, Any]:
    """A mask (height, width) as compressed run lengths that JSON can hold.

    Example:
        >>> from_mask(torch.eye(2))
        {'size': [2, 2], 'counts': '0120'}
    """
    pixels = np.asfortranarray(mask.detach().cpu().to(torch.uint8).numpy())
    return as_text(import_pycocotools().mask.encode(pixels))


def as_text(lengths: Mapping[str, Any]) -> dict[str, Any]:
    """Run lengths of pycocotools as JSON can hold them."""
    counts = lengths["counts"]
    size = [int(side) for side in lengths["size"]]
    return {"size": size, "counts": counts.decode("ascii") if isinstance(counts, bytes) else counts}


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
        boxes, scores = found["boxes"].detach().double().cpu(), found["scores"].detach().double().cpu()
        masks = _binary(found["masks"], *(int(side) for side in size)) if "masks" in found else None
        usable = boxes.isfinite().all(1) & scores.isfinite()
        for row in usable.nonzero().flatten().tolist():
            left, top, right, bottom = boxes[row].tolist()
            result = {
                "image_id": int(image_id),
                "category_id": int(category_ids[int(found["labels"][row]) - 1]),
                "bbox": [left, top, right - left, bottom - top],
                "score": float(scores[row]),
            }
            results.append(result if masks is None else result | {"segmentation": from_mask(masks[row])})
    return results


def _binary(masks: Tensor, height: int, width: int) -> Tensor:
    masks = masks[:, 0] if masks.ndim == 4 else masks
    if masks.shape[1:] != (height, width):
        raise DataError(
            "the masks of a detection have another size than their image.",
            expected=f"{height} x {width} pixels (height, width)",
            found=f"shape {tuple(masks.shape)}",
            todo="Paste the masks into the original image first.",
        )
    return masks >= 0.5 if masks.is_floating_point() else masks != 0


def evaluate(
    ground_truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], kinds: Sequence[Kind] = ("bbox", "segm")
) -> dict[str, float]:
    """Average precision of results, as shares of 1.

    Args:
        ground_truth: Content of a COCO file, such as `CocoDataset.ground_truth`; all of its images are judged.
        results: From `to_results`, or a file of results.
        kinds: What to judge: boxes, masks.

    Returns: `box_AP`, `box_AP50`, `box_AP75`, `box_APs`, `box_APm`, `box_APl`, and the same of `mask`. Where there is
        nothing to find, as without small objects, pycocotools says -1; that number is left out.
    """
    metrics: dict[str, float] = {}
    for kind in kinds:
        prefix, key = KINDS[kind]
        # The other key would decide by its own area whether a detection is small, medium or large.
        judged = [{name: result[name] for name in ("image_id", "category_id", key, "score")} for result in results]
        values = zip(METRICS, _statistics(ground_truth, judged, kind), strict=False)
        metrics |= {f"{prefix}_{name}": float(value) for name, value in values if value != -1}
    return metrics


def _statistics(ground_truth: Mapping[str, Any], results: list[dict[str, Any]], kind: Kind) -> list[float]:
    """The numbers that pycocotools prints."""
    library = import_pycocotools()
    with contextlib.redirect_stdout(io.StringIO()):
        truth, found = library.coco.COCO(), library.coco.COCO()
        # pycocotools writes into annotations. It takes a match with id 0 for none, so they are counted from 1.
        numbered = [{**annotation, "id": row} for row, annotation in enumerate(ground_truth["annotations"], 1)]
        truth.dataset = {**ground_truth, "annotations": numbered}
        truth.createIndex()
        if results:
            found = truth.loadRes(results)
        else:  # which `loadRes` does not take
            found.dataset = {**truth.dataset, "annotations": []}
            found.createIndex()
        evaluation = library.cocoeval.COCOeval(truth, found, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    statistics: list[float] = evaluation.stats.tolist()
    return statistics
