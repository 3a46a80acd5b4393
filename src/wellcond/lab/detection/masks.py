"""COCO's segmentations: polygons, run lengths, and the masks that they mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellcond.errors import MissingExtraError
from wellcond.run_lengths import read_counts

Segmentation = list[list[float]] | dict[str, Any]
"""Polygons [x0, y0, x1, y1, ...], or run lengths {"size": [height, width], "counts": list or compressed text}."""
POLYGON_NUMBERS = 6
"""Of a triangle: fewer enclose nothing, and pycocotools refuses them or takes them for something else."""


def import_mask_api() -> Any:
    """The module pycocotools.mask.

    Raises:
        MissingExtraError: pycocotools is not installed.
    """
    try:
        from pycocotools import mask
    except ImportError as error:
        raise MissingExtraError("pycocotools", "detection") from error
    return mask


def to_rle(segmentation: Segmentation, height: int, width: int) -> dict[str, Any]:
    """Compressed run lengths of a segmentation in an image of this size, as pycocotools' `annToRLE` makes them."""
    api = import_mask_api()
    if isinstance(segmentation, list):
        merged: dict[str, Any] = api.merge(api.frPyObjects(segmentation, height, width))
        return merged
    if isinstance(segmentation["counts"], list):
        compressed: dict[str, Any] = api.frPyObjects(segmentation, height, width)
        return compressed
    return segmentation


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
    encoded = import_mask_api().encode(pixels)
    return {"size": [int(side) for side in encoded["size"]], "counts": encoded["counts"].decode("ascii")}


def polygons_problem(polygons: list[Any]) -> str:
    """Why polygons cannot be used; empty if they can. How many points they have is not judged here."""
    for polygon in polygons:
        if not isinstance(polygon, list) or not all(type(number) in (int, float) for number in polygon):
            return "a polygon that is no list of numbers"
        if len(polygon) % 2:
            return f"a polygon of {len(polygon)} numbers, where x and y take turns"
        if not all(map(math.isfinite, polygon)):
            return "a polygon with a number that is not finite"
    return ""


def rle_problem(rle: Mapping[str, Any], height: int, width: int) -> str:
    """Why run lengths cannot be used for an image of this size; empty if they can.

    Runs that do not fill the image are refused: pycocotools would leave the rest of the mask to chance.
    """
    size, counts = rle.get("size"), rle.get("counts")
    if size != [height, width]:
        return f"run lengths of size {size}, where the image has [{height}, {width}]"
    if isinstance(counts, str | bytes):
        try:
            counts = read_counts(counts)
        except ValueError as error:
            return f"compressed run lengths that cannot be read: {error}"
    if not isinstance(counts, list) or not all(type(run) is int and run >= 0 for run in counts):
        return "run lengths that are neither text nor a list of non-negative integers"
    covered = sum(counts)
    return "" if covered == height * width else f"run lengths of {covered} pixels in an image of {height * width}"
