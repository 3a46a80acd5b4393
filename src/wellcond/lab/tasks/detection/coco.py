"""Source `coco`: images with boxes and masks of objects, in the format of COCO."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Discriminator, Field, FiniteFloat, PositiveInt, Tag, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from wellcond.lab.data.base import Data, DataError, SourceConfig, draw_subset, listed, register_source
from wellcond.lab.data.disk import find_path, require
from wellcond.lab.data.images import decode_image, read_image, to_channels
from wellcond.lab.settings import Settings, list_problems
from wellcond.run_lengths import read_counts

SMALLEST_SIDE = 1.0
"""Of a box that is trained on, in pixels."""
POLYGON_NUMBERS = 6
"""Of a triangle: fewer enclose nothing, and pycocotools refuses them or takes them for something else."""


class CocoPart(Settings):
    """Where the images of one split are, and what is known of them; both within `path`."""

    images: str
    annotations: str


class CocoConfig(SourceConfig):
    """Settings of `coco`."""

    source: Literal["coco"] = "coco"
    path: str
    """Folder of the data set; from the recipe's folder, or a name in a mirror."""
    train: CocoPart = CocoPart(images="train2017", annotations="annotations/instances_train2017.json")
    evaluation: CocoPart = CocoPart(images="val2017", annotations="annotations/instances_val2017.json")
    empty: Literal["drop", "keep"] = "drop"
    """What becomes of training images that have nothing to learn from; evaluation keeps all images."""
    limit_train: int | None = Field(None, ge=1)
    limit_evaluation: int | None = Field(None, ge=1)
    """Largest number of images, drawn with a fixed seed."""


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError("expected a path within the folder of images")
    return name


def _even(polygon: list[float]) -> list[float]:
    if len(polygon) % 2:
        raise ValueError("expected x and y by turns, so an even number of values")
    return polygon


Number = FiniteFloat | int
Polygon = Annotated[list[Number], AfterValidator(_even)]


class RunLengths(TypedDict):
    """A mask as the lengths of runs of equal pixels, column by column, background first."""

    size: list[int]
    counts: list[Annotated[int, Field(ge=0)]] | str


Segmentation = list[list[float]] | dict[str, Any]
"""Polygons [x0, y0, x1, y1, ...], or `RunLengths`."""


class CocoImage(TypedDict):
    """An image."""

    id: int
    file_name: Annotated[str, AfterValidator(_inside)]
    width: PositiveInt
    height: PositiveInt


class CocoAnnotation(TypedDict):
    """An object, or with `iscrowd` a region that stands for a group of them."""

    id: int
    image_id: int
    category_id: int
    iscrowd: int
    area: Number
    bbox: Annotated[list[Number], Field(min_length=4, max_length=4)]
    """x, y, width, height"""
    segmentation: Annotated[
        Annotated[list[Polygon], Tag("polygons")] | Annotated[RunLengths, Tag("run lengths")],
        Discriminator(lambda mask: "polygons" if isinstance(mask, list) else "run lengths"),
    ]


class CocoCategory(TypedDict):
    """A kind of object."""

    id: int
    name: str


class CocoFile(TypedDict):
    """What is used of a file of instances."""

    images: Annotated[list[CocoImage], Field(min_length=1)]
    annotations: list[CocoAnnotation]
    categories: Annotated[list[CocoCategory], Field(min_length=1)]


_FILE = TypeAdapter(CocoFile)


def read_coco(path: Path, *, training: bool) -> CocoFile:
    """Read and check a file of instance annotations.

    Raises:
        DataError: it is no such file, an entry is not as COCO describes it, an id occurs twice, or an annotation
            belongs to no image or category of the file or has a mask that cannot be used.
    """
    try:
        content = _FILE.validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        raise DataError(
            f"{path}: these are no COCO instances.",
            expected="lists of images, annotations and categories as COCO has them",
            found=f"{error.error_count()} problems; the first, entries counted from 0: {list_problems(error)[0]}",
            todo="Correct or remove the entry, or name a file such as instances_train2017.json.",
        ) from error
    ids: dict[str, dict[int, Any]] = {}
    parts: tuple[tuple[str, Sequence[Mapping[str, Any]]], ...] = tuple(content.items())  # type: ignore[arg-type]
    for part, entries in parts:
        ids[part] = {entry["id"]: entry for entry in entries}
        if len(ids[part]) < len(entries):
            twice = [number for number, count in Counter(entry["id"] for entry in entries).items() if count > 1]
            raise DataError(
                f"{path}, {part}: several entries have one id.",
                expected="ids that differ",
                found=f"more than once: {listed(twice)}",
                todo="Give the entries different ids, or remove all but one.",
            )
    for annotation in content["annotations"]:
        problem = _problem(annotation, ids, training=training)
        if problem:
            raise DataError(
                f"{path}, annotation {annotation['id']}: it cannot be used.",
                expected="an image and a category of the file, and as mask polygons [[x, y, x, y, ...], ...], or run "
                "lengths {size, counts} that fill the image",
                found=problem,
                todo="Correct or remove the annotation.",
            )
    return content


def _problem(annotation: CocoAnnotation, ids: Mapping[str, Mapping[int, Any]], *, training: bool) -> str:
    """Why an annotation cannot be used; empty if it can."""
    image = ids["images"].get(annotation["image_id"])
    if image is None:
        return f"image_id {annotation['image_id']}, which no image has"
    if annotation["category_id"] not in ids["categories"]:
        return f"category_id {annotation['category_id']}, which no category has"
    mask = annotation["segmentation"]
    if isinstance(mask, list):
        # In training they are left out; pycocotools cannot read them.
        points = [len(polygon) // 2 for polygon in mask]
        return "" if training or (mask and _enclosing(mask) == mask) else f"polygons of {points} points"
    if mask["size"] != [image["height"], image["width"]]:
        return f"run lengths of size {mask['size']}, where the image has [{image['height']}, {image['width']}]"
    try:
        counts = mask["counts"] if isinstance(mask["counts"], list) else read_counts(mask["counts"])
    except ValueError as error:
        return f"compressed run lengths that cannot be read: {error}"
    # pycocotools would leave the rest of the mask to chance.
    covered, pixels = sum(counts), image["height"] * image["width"]
    return "" if covered == pixels and min(counts) >= 0 else f"run lengths of {covered} pixels in an image of {pixels}"


def _enclosing(mask: Any) -> Any:
    """A mask without polygons of fewer than three points."""
    return [polygon for polygon in mask if len(polygon) >= POLYGON_NUMBERS] if isinstance(mask, list) else mask


@dataclass(frozen=True, eq=False)
class Instances:
    """Objects of one image, in pixels of that image; a pixel at column c covers c to c + 1."""

    boxes: Tensor
    """float32 (n, 4): x0, y0, x1, y1."""
    labels: Tensor
    """int64 (n,), from 1; 0 is background."""
    crowd: Tensor
    """bool (n,): whether a region stands for a group of objects, which evaluation ignores."""
    segmentations: Sequence[Segmentation]

    def __len__(self) -> int:
        """Number of objects."""
        return len(self.segmentations)

    def select(self, keep: Tensor) -> Instances:
        """Those for which `keep`, bool (n,), is true."""
        chosen = [segmentation for segmentation, kept in zip(self.segmentations, keep.tolist(), strict=True) if kept]
        return Instances(self.boxes[keep], self.labels[keep], self.crowd[keep], chosen)


def clip_boxes(boxes: Tensor, height: int, width: int) -> Tensor:
    """Boxes (n, 4) cut off at the borders of an image."""
    return boxes.clamp(min=0).minimum(boxes.new_tensor([width, height, width, height]))


def thin_boxes(boxes: Tensor) -> Tensor:
    """Which boxes are thinner than a pixel, or turned inside out; bool (n,)."""
    return (boxes[:, 2:] - boxes[:, :2]).amin(1) < SMALLEST_SIDE


@dataclass(frozen=True, eq=False)
class CocoDataset:
    """Images with their objects; files are opened when asked for.

    An example has `image` (PIL, RGB), `image_id`, `size` (height, width) and `instances`. Examples of a training split
    are without crowd regions and without objects that cannot be learnt from; `ground_truth` always has all of them.
    """

    folder: Path
    images: Sequence[Mapping[str, Any]]
    annotations: Sequence[Sequence[Mapping[str, Any]]]
    """Of each image."""
    categories: Sequence[Mapping[str, Any]]
    """In the order of the labels."""
    training: bool
    labels: None = None

    @property
    def category_ids(self) -> tuple[int, ...]:
        """COCO's id of each category: the first is that of label 1."""
        return tuple(category["id"] for category in self.categories)

    @property
    def ground_truth(self) -> dict[str, Any]:
        """The annotations of these images as COCO's own content of a file, for evaluation."""
        annotations = [dict(annotation) for group in self.annotations for annotation in group]
        return {"images": [*self.images], "annotations": annotations, "categories": [*self.categories]}

    def __len__(self) -> int:
        """Number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The decoded image and its objects."""
        image, where = self.images[index], str(self.folder / self.images[index]["file_name"])
        picture: Any = to_channels(decode_image(self._encoded(index), where), 3, where)
        size = (image["height"], image["width"])
        if picture.size != size[::-1]:
            raise DataError(
                f"{where}: the image has another size than its annotations say.",
                expected=f"{size[1]} x {size[0]} pixels, as image {image['id']} has in the annotations",
                found=f"{picture.size[0]} x {picture.size[1]}",
                todo="Restore the image that was annotated, or correct its size and annotations.",
            )
        return {"image": picture, "image_id": image["id"], "size": size, "instances": self.instances(index)[0]}

    def instances(self, index: int) -> tuple[Instances, Counter[str]]:
        """The objects of an image, without opening it, and how many of what were left out in training.

        Left out are crowd regions, objects whose box within the image is thinner than a pixel, and objects without a
        mask; polygons of fewer than three points are no mask.
        """
        annotations, image = self.annotations[index], self.images[index]
        numbers = {category: label for label, category in enumerate(self.category_ids, 1)}
        boxes = torch.tensor([annotation["bbox"] for annotation in annotations], dtype=torch.float64).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes = boxes.float()
        labels = torch.tensor([numbers[annotation["category_id"]] for annotation in annotations], dtype=torch.int64)
        crowd = torch.tensor([bool(annotation["iscrowd"]) for annotation in annotations], dtype=torch.bool)
        masks = [annotation["segmentation"] for annotation in annotations]
        if not self.training:
            return Instances(boxes, labels, crowd, masks), Counter()
        boxes, masks = clip_boxes(boxes, image["height"], image["width"]), [_enclosing(mask) for mask in masks]
        thin, blank = thin_boxes(boxes), torch.tensor([mask == [] for mask in masks], dtype=torch.bool)
        reasons = {
            "crowd regions": crowd,
            "degenerate boxes": thin & ~crowd,
            "objects without a mask": blank & ~thin & ~crowd,
        }
        kept = Instances(boxes, labels, crowd, masks).select(~(crowd | thin | blank))
        return kept, Counter({reason: int(lost.sum()) for reason, lost in reasons.items()})

    def content(self, index: int) -> bytes:
        """The file's bytes, and the annotations."""
        return self._encoded(index) + b"\0" + json.dumps(self.annotations[index], sort_keys=True).encode()

    def select(self, rows: Tensor | None) -> CocoDataset:
        """Some of the images; all for None."""
        if rows is None:
            return self
        images = [self.images[row] for row in rows.tolist()]
        return replace(self, images=images, annotations=[self.annotations[row] for row in rows.tolist()])

    def _encoded(self, index: int) -> bytes:
        file = self.folder / self.images[index]["file_name"]
        return read_image(file, str(file), within=self.folder)


@register_source(CocoConfig)
def load(config: CocoConfig, base: Path) -> Data:
    """Check all annotations and that every image is there; images are decoded when asked for."""
    root = find_path(config.path, base)
    train, evaluation = (
        _open(root, part, field, training=field == "train")
        for field, part in (("train", config.train), ("evaluation", config.evaluation))
    )
    first, second = ({row["id"]: row["name"] for row in split.categories} for split in (train, evaluation))
    if first != second:
        raise DataError(
            f"{root / config.evaluation.annotations}: the categories are not those of the training split.",
            expected=f"the ids and names of {config.train.annotations}",
            found="; ".join(
                f"id {number}: {first.get(number, 'none')!r} in training, {second.get(number, 'none')!r} here"
                for number in sorted(dict(first.items() ^ second.items()))[:4]
            ),
            todo="Give both files the same list of categories, also of those that one split has no objects of.",
        )
    left_out: Counter[str] = Counter()
    kept = []
    for row in range(len(train)):
        instances, lost = train.instances(row)
        left_out.update(lost)
        if len(instances) or config.empty == "keep":
            kept.append(row)
    left_out["images without objects"] = len(train) - len(kept)
    train = train.select(torch.tensor(kept, dtype=torch.long))
    train = train.select(draw_subset(len(train), config.limit_train))
    evaluation = evaluation.select(draw_subset(len(evaluation), config.limit_evaluation))
    for split, part in ((train, config.train), (evaluation, config.evaluation)):
        if all(annotation["iscrowd"] for group in split.annotations for annotation in group):
            raise DataError(
                f"{root / part.annotations}: no image has an object to find.",
                expected="at least one annotation that is no crowd region",
                found=f"{len(split)} images",
                todo="Check the file; with a limit on images, raise it.",
            )
    names = tuple(str(category["name"]) for category in train.categories)
    missing = ", ".join(f"{count} {what}" for what, count in sorted(left_out.items()) if count)
    notes = [f"left out of training: {missing}"] if missing else []
    return Data(root.name, "detection", train, evaluation, names, f"COCO format, {root.name}", notes=notes)


def _open(root: Path, part: CocoPart, field: str, *, training: bool) -> CocoDataset:
    folder = require(root / part.images, "folder", f"{field}.images")
    path = require(root / part.annotations, field=f"{field}.annotations")
    content = read_coco(path, training=training)
    missing = [image for image in content["images"] if not (folder / image["file_name"]).is_file()]
    if missing:
        raise DataError(
            f"{folder / missing[0]['file_name']}: the image is missing.",
            expected=f"a file for each image of {path}",
            found=f"{len(missing)} of {len(content['images'])} missing: "
            + listed((f"{image['file_name']} (image {image['id']})" for image in missing), most=5),
            todo="Copy the images, or remove them and their annotations from the file.",
        )
    grouped: dict[int, list[Any]] = {image["id"]: [] for image in content["images"]}
    for annotation in content["annotations"]:
        grouped[annotation["image_id"]].append(annotation)
    categories = sorted(content["categories"], key=lambda category: category["id"])
    return CocoDataset(folder, content["images"], list(grouped.values()), categories, training)
