"""Source `coco`: images with boxes and masks of objects, in the format of COCO."""

from __future__ import annotations

import json
import math
import operator
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from wellcond.errors import DataError
from wellcond.lab.data.base import Data, SourceConfig, draw_subset, listed, register_source
from wellcond.lab.data.disk import find_path, require
from wellcond.lab.data.images import decode_image, read_image, to_channels

SMALLEST_SIDE = 1.0  # of a box that is trained on, in pixels
Segmentation = list[list[float]] | dict[str, Any]
"""Polygons [x0, y0, x1, y1, ...], or run lengths: `size`, and `counts` of equal pixels, column by column, background
first, as a list or as COCO's text."""


class CocoConfig(SourceConfig):
    """Settings of `coco`."""

    source: Literal["coco"] = "coco"
    path: str
    """Folder with train2017, val2017 and annotations; from the recipe's folder, or a name in a mirror."""
    limit_train: int | None = Field(None, ge=1)
    limit_evaluation: int | None = Field(None, ge=1)
    """Largest number of images, drawn with a fixed seed."""


EXPECTED = {
    "categories": "id, name",
    "images": "id, file_name (within the folder of images), height and width (above 0)",
    "annotations": "id, image_id and category_id of the file, iscrowd, area, bbox [x, y, width, height], and as "
    "segmentation polygons [[x, y, x, y, ...], ...] of three points or more, or run lengths that fill the image",
}


def _wrong_field(part: str, entry: Any, known: Mapping[str, Mapping[int, Any]], *, training: bool) -> str:
    """The first field that cannot be used; empty if all can."""
    if part == "categories":
        return "" if isinstance(entry["name"], str) else "name"
    if part == "images":
        name = PurePosixPath(entry["file_name"])
        if name.is_absolute() or ".." in name.parts or not name.parts:
            return "file_name"
        return next((side for side in ("height", "width") if operator.index(entry[side]) < 1), "")
    image, mask = known["images"].get(entry["image_id"]), entry["segmentation"]
    if image is None or entry["category_id"] not in known["categories"]:
        return "image_id" if image is None else "category_id"
    if len(entry["bbox"]) != 4 or not all(map(math.isfinite, [*entry["bbox"], entry["area"], entry["iscrowd"]])):
        return "bbox"
    if isinstance(mask, list):
        usable = all(len(polygon) % 2 == 0 and all(map(math.isfinite, polygon)) for polygon in mask)
        # In training they are left out; pycocotools cannot read them.
        usable = usable and (training or (mask != [] and enclosing(mask) == mask))
    else:
        counts = read_counts(mask["counts"]) if isinstance(mask["counts"], str) else mask["counts"]
        size = [image["height"], image["width"]]
        # pycocotools would leave the rest of the mask to chance.
        filled = min(map(operator.index, counts)) >= 0 and sum(counts) == math.prod(size)
        usable = filled and mask["size"] == size
    return "" if usable else "segmentation"


def enclosing(mask: Any) -> Any:
    """A mask without polygons of fewer than three points, which pycocotools refuses or takes for something else."""
    return [polygon for polygon in mask if len(polygon) >= 6] if isinstance(mask, list) else mask


def why_left_out(annotation: Mapping[str, Any], image: Mapping[str, Any]) -> str:
    """Why an annotation is nothing to learn from; empty if it is."""
    x, y, width, height = annotation["bbox"]
    sides = min(x + width, image["width"]) - max(x, 0), min(y + height, image["height"]) - max(y, 0)
    if annotation["iscrowd"]:
        return "crowd regions"
    if min(sides) < SMALLEST_SIDE:
        return "degenerate boxes"
    return "" if enclosing(annotation["segmentation"]) else "objects without a mask"


@dataclass(frozen=True, eq=False)
class CocoDataset:
    """Images with their objects; files are opened when asked for.

    An example has `image` (PIL, RGB), `image_id`, `size` (height, width) and of what there is to learn from in it
    `boxes` float32 (n, 4) x0, y0, x1, y1 within the image (a pixel at column c covers c to c + 1), `labels` int64 (n,)
    from 1 and `segmentations`; `ground_truth` has all annotations.
    """

    folder: Path
    images: Sequence[Mapping[str, Any]]
    annotations: Sequence[Sequence[Mapping[str, Any]]]  # of each image
    categories: Sequence[Mapping[str, Any]]  # in the order of the labels
    labels: None = None

    @property
    def category_ids(self) -> tuple[int, ...]:
        """COCO's id of each category: the first is that of label 1."""
        return tuple(category["id"] for category in self.categories)

    @property
    def ground_truth(self) -> dict[str, Any]:
        """The annotations of these images as content of a COCO file, for evaluation."""
        annotations = [dict(annotation) for group in self.annotations for annotation in group]
        return {"images": [*self.images], "annotations": annotations, "categories": [*self.categories]}

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        from torchvision.ops import clip_boxes_to_image  # an extra, which other tasks do without

        image = self.images[index]
        where = str(self.folder / image["file_name"])
        picture: Any = to_channels(decode_image(self._encoded(index), where), 3, where)
        size = (image["height"], image["width"])
        if picture.size != size[::-1]:
            raise DataError(
                f"{where}: the image has another size than its annotations say.",
                expected=f"{size[1]} x {size[0]} pixels, as image {image['id']} has in the annotations",
                found=f"{picture.size[0]} x {picture.size[1]}",
                todo="Restore the image that was annotated, or correct its size and annotations.",
            )
        kept = [row for row in self.annotations[index] if not why_left_out(row, image)]
        boxes = torch.tensor([row["bbox"] for row in kept], dtype=torch.float64).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        numbers = {category: label for label, category in enumerate(self.category_ids, 1)}
        return {
            "image": picture,
            "image_id": image["id"],
            "size": size,
            "boxes": clip_boxes_to_image(boxes.float(), size),
            "labels": torch.tensor([numbers[row["category_id"]] for row in kept], dtype=torch.int64),
            "segmentations": [enclosing(row["segmentation"]) for row in kept],
        }

    def content(self, index: int) -> bytes:
        """The file's bytes, and the annotations."""
        return self._encoded(index) + b"\0" + json.dumps(self.annotations[index], sort_keys=True).encode()

    def take(self, rows: Tensor) -> CocoDataset:
        """Some of the images."""
        images = [self.images[row] for row in rows.tolist()]
        return replace(self, images=images, annotations=[self.annotations[row] for row in rows.tolist()])

    def _encoded(self, index: int) -> bytes:
        return read_image(self.folder / self.images[index]["file_name"], within=self.folder)


@register_source(CocoConfig)
def load(config: CocoConfig, base: Path) -> Data:
    """Check all annotations and that every image is there; images are decoded when asked for."""
    root = find_path(config.path, base)
    train, evaluation = _open(root, "train"), _open(root, "val")
    first, second = ({row["id"]: row["name"] for row in split.categories} for split in (train, evaluation))
    if first != second:
        raise DataError(
            f"{root}: the categories of val2017 are not those of train2017.",
            expected="the same ids and names, also of those that one split has no objects of",
            found=listed(sorted(first.items() ^ second.items()), most=4),
            todo="Give both files the same list of categories.",
        )
    groups = zip(train.images, train.annotations, strict=True)
    reasons = [[why_left_out(annotation, image) for annotation in group] for image, group in groups]
    kept = torch.tensor([row for row, found in enumerate(reasons) if "" in found], dtype=torch.long)
    left_out = Counter(reason for found in reasons for reason in found if reason)
    left_out["images without objects"] = len(train) - len(kept)
    train = draw_subset(train.take(kept), config.limit_train)
    evaluation = draw_subset(evaluation, config.limit_evaluation)
    names = tuple(category["name"] for category in train.categories)
    missing = ", ".join(f"{count} {what}" for what, count in sorted(left_out.items()) if count)
    notes = [f"left out of training: {missing}"] if missing else []
    return Data(root.name, "detection", train, evaluation, names, f"COCO format, {root.name}", notes=notes)


def _open(root: Path, name: str) -> CocoDataset:
    """A split; DataError for the first entry that is not as COCO describes it."""
    folder = require(root / f"{name}2017", "folder")
    path = require(root / "annotations" / f"instances_{name}2017.json")
    known: dict[str, dict[int, Any]] = {}
    part, where = "categories", "the file"
    try:
        content = json.loads(path.read_bytes())
        for part in EXPECTED:
            known[part], where = {}, part
            for row, entry in enumerate(content[part]):
                where = f"{part}, entry {row} (the first is 0)"
                field = _wrong_field(part, entry, known, training=name == "train")
                if not isinstance(entry["id"], int) or entry["id"] in known[part]:
                    field = "id"
                if field:
                    raise ValueError(f"{field} {reprlib.repr(entry[field])}")
                known[part][entry["id"]] = entry
            if not known[part] and part != "annotations":
                raise ValueError("no entries")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path}: these are no COCO instances.",
            expected=EXPECTED[part],
            found=f"{where}: {error}" if isinstance(error, ValueError) else f"{where}: {error!r}",
            todo="Correct or remove the entry, or give a file such as instances_train2017.json.",
        ) from error
    images, annotations, categories = known["images"], known["annotations"], known["categories"]
    grouped: dict[int, list[Any]] = {image: [] for image in images}
    for annotation in annotations.values():
        grouped[annotation["image_id"]].append(annotation)
    for image in images.values():
        require(folder / image["file_name"])
    return CocoDataset(folder, [*images.values()], [*grouped.values()], [categories[id] for id in sorted(categories)])


def read_counts(text: str | bytes) -> list[int]:
    """Run lengths from COCO's compressed text.

    A number is written five bits a character (plus 48), lowest first, bit 6 saying that more follow, the highest bit
    of the last being the sign. From the fourth run on, the difference to the run two before is written.

    Raises:
        ValueError: the text is cut short or holds other characters.

    Example:
        >>> read_counts("0120")
        [0, 1, 2, 1]
    """
    codes = list(text.encode("utf-8") if isinstance(text, str) else text)
    counts: list[int] = []
    value = shift = 0
    for code in codes:
        if not 48 <= code < 48 + 64:
            raise ValueError(f"character number {code}")
        bits = code - 48
        value |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:
            continue
        if bits & 0x10:
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value = shift = 0
    if shift:
        raise ValueError("the last number is cut short")
    return counts
