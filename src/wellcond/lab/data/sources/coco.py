"""Source `coco`: images with boxes and masks of objects, in the format of COCO."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from wellcond.files import read_regular
from wellcond.lab.data.base import Data, check_index, describe_sizes, draw_subset
from wellcond.lab.data.coco_files import CocoFile, read_coco
from wellcond.lab.data.coco_objects import all_instances, check_evaluated, training_instances
from wellcond.lab.data.errors import DataError, files_or_folders, listed
from wellcond.lab.data.images import decode_image, to_channels
from wellcond.lab.data.mirror import find_folder, require_file
from wellcond.lab.data.registry import SourceConfig, register_source
from wellcond.lab.detection.instances import Instances
from wellcond.lab.settings import Settings


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


@dataclass(frozen=True, eq=False)
class CocoSplit:
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
        return {
            "images": [dict(image) for image in self.images],
            "annotations": [dict(annotation) for group in self.annotations for annotation in group],
            "categories": [dict(category) for category in self.categories],
        }

    def __len__(self) -> int:
        """Number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The decoded image and its objects."""
        index = check_index(index, len(self))
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
        return {"image": picture, "image_id": image["id"], "size": size, "instances": self.instances(index)}

    def instances(self, index: int) -> Instances:
        """The objects of an image, without opening it."""
        numbers = {category: label for label, category in enumerate(self.category_ids, 1)}
        if self.training:
            return training_instances(self.images[index], self.annotations[index], numbers)[0]
        return all_instances(self.annotations[index], numbers)

    def content(self, index: int) -> bytes:
        """The file's bytes, and the annotations."""
        index = check_index(index, len(self))
        objects = [dict(annotation) for annotation in self.annotations[index]]
        return self._encoded(index) + b"\0" + json.dumps(objects, sort_keys=True).encode()

    def select(self, rows: Tensor | None) -> CocoSplit:
        """Some of the images; all for None."""
        if rows is None:
            return self
        images = [self.images[row] for row in rows.tolist()]
        return replace(self, images=images, annotations=[self.annotations[row] for row in rows.tolist()])

    def _encoded(self, index: int) -> bytes:
        file = self.folder / self.images[index]["file_name"]
        try:
            # Followed to its end: a link may lead anywhere.
            if not file.resolve().is_relative_to(self.folder.resolve()):
                raise OSError(None, "it is a link out of the data set")
            return read_regular(file)
        except OSError as error:
            raise DataError(
                f"{file}: the image cannot be opened.",
                expected="the file that was there when the data were loaded",
                found=f"{type(error).__name__}: {error.strerror}",
                todo="Restore the file.",
            ) from error


@register_source(CocoConfig)
def load(config: CocoConfig, base: Path) -> Data:
    """Check all annotations and that every image is there; images are decoded when asked for."""
    root = find_folder(config.path, base)
    train = _open(root, config.train, "train", training=True)
    evaluation = _open(root, config.evaluation, "evaluation", training=False)
    _require_same_categories(root, config, train, evaluation)
    left_out: Counter[str] = Counter()
    kept = []
    numbers = {category: label for label, category in enumerate(train.category_ids, 1)}
    for row, (image, group) in enumerate(zip(train.images, train.annotations, strict=True)):
        instances, lost = training_instances(image, group, numbers)
        left_out.update(lost)
        if len(instances) or config.empty == "keep":
            kept.append(row)
    left_out["images without objects"] = len(train) - len(kept)
    train = train.select(torch.tensor(kept, dtype=torch.long))
    train = train.select(draw_subset(len(train), config.limit_train))
    evaluation = evaluation.select(draw_subset(len(evaluation), config.limit_evaluation))
    _require_objects(root, config, train, evaluation)
    names = tuple(str(category["name"]) for category in train.categories)
    notes = [f"{count} {what}" for what, count in sorted(left_out.items()) if count]
    sizes = describe_sizes(train, evaluation, names)
    left = f"; left out of training: {', '.join(notes)}" if notes else ""
    return Data(root.name, "detection", train, evaluation, names, f"COCO format, {root.name}: {sizes}{left}")


def _open(root: Path, part: CocoPart, field: str, *, training: bool) -> CocoSplit:
    for path, name in ((root / part.annotations, "annotations"), (root / part.images, "images")):
        if not path.parent.is_dir():
            raise DataError(
                f"{path}: its folder is missing.",
                expected=f"what '{field}.{name}' names, within {root}",
                found=f"in {root}: {files_or_folders(root.iterdir())}",
                todo=f"Correct '{field}.{name}' or 'path'.",
            )
    folder = root / part.images
    if not folder.is_dir():
        raise DataError(
            f"{folder}: no such folder.",
            expected=f"the folder of images that '{field}.images' names",
            found=f"in {folder.parent}: {files_or_folders(folder.parent.iterdir())}",
            todo=f"Correct '{field}.images' or 'path'.",
        )
    file = read_coco(require_file(root / part.annotations, f"{field}.annotations"))
    _require_images(file, folder)
    if not training:
        check_evaluated(file)
    return CocoSplit(folder, file.images, file.annotations, file.categories, training)


def _require_images(file: CocoFile, folder: Path) -> None:
    missing = [image for image in file.images if not (folder / image["file_name"]).is_file()]
    if missing:
        raise DataError(
            f"{folder / missing[0]['file_name']}: the image is missing.",
            expected=f"a file for each image of {file.path}",
            found=f"{len(missing)} of {len(file.images)} missing: "
            + listed((f"{image['file_name']} (image {image['id']})" for image in missing), most=5),
            todo="Copy the images, or remove them and their annotations from the file.",
        )


def _require_same_categories(root: Path, config: CocoConfig, train: CocoSplit, evaluation: CocoSplit) -> None:
    first, second = ({c["id"]: c["name"] for c in split.categories} for split in (train, evaluation))
    differing = sorted(dict(first.items() ^ second.items()))
    if differing:
        raise DataError(
            f"{root / config.evaluation.annotations}: the categories are not those of the training split.",
            expected=f"the ids and names of {config.train.annotations}",
            found="; ".join(
                f"id {number}: {first.get(number, 'none')!r} in training, {second.get(number, 'none')!r} here"
                for number in differing[:4]
            ),
            todo="Give both files the same list of categories, also of those that one split has no objects of.",
        )


def _require_objects(root: Path, config: CocoConfig, train: CocoSplit, evaluation: CocoSplit) -> None:
    for split, part in ((train, config.train), (evaluation, config.evaluation)):
        if not any(not annotation["iscrowd"] for group in split.annotations for annotation in group):
            raise DataError(
                f"{root / part.annotations}: no image has an object to find.",
                expected="at least one annotation that is no crowd region",
                found=f"{len(split)} images",
                todo="Check the file; with a limit on images, raise it.",
            )
