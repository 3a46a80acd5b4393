"""A file of COCO annotations, read and checked; what is wrong is named by file and id."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from wellcond.lab.data.errors import DataError, listed
from wellcond.lab.data.progress import tell
from wellcond.lab.detection.masks import polygons_problem, rle_problem

PARTS = ("images", "annotations", "categories")
KEYS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "images": {"id": int, "file_name": str, "width": int, "height": int},
    "annotations": {
        "id": int, "image_id": int, "category_id": int, "iscrowd": int, "area": float, "bbox": list,
        "segmentation": (list, dict),
    },
    "categories": {"id": int, "name": str},
}  # fmt: skip
KINDS = {int: "an integer", float: "a number", str: "text", list: "a list", (list, dict): "polygons or run lengths"}
TELL_EVERY = 10_000


@dataclass(frozen=True)
class CocoFile:
    """What a file holds, checked."""

    path: Path
    images: Sequence[dict[str, Any]]
    annotations: Sequence[Sequence[dict[str, Any]]]
    """Of each image, crowd regions and degenerate boxes among them."""
    categories: Sequence[dict[str, Any]]
    """By id."""


def read_coco(path: Path) -> CocoFile:
    """Read a file of instance annotations.

    Raises:
        DataError: it is no such file, an entry lacks a key or has a value of another kind, an id occurs twice, or an
            annotation belongs to no image or category of the file.
    """
    content = _read(path)
    images, categories = _by_id(path, content, "images"), _by_id(path, content, "categories")
    grouped: dict[int, list[dict[str, Any]]] = {number: [] for number in images}
    annotations = _by_id(path, content, "annotations")
    for number, image in images.items():
        _check_image(path, number, image)
    for done, (number, annotation) in enumerate(annotations.items()):
        where = f"{path}, annotation {number}"
        for key, known in (("image_id", images), ("category_id", categories)):
            if annotation[key] not in known:
                kind = key.removesuffix("_id")
                raise DataError(
                    f"{where}: it belongs to no {kind} of the file.",
                    expected=f"the id of one of the {len(known)} entries under {PARTS[0 if kind == 'image' else 2]!r}",
                    found=f"{key} {annotation[key]}",
                    todo=f"Remove the annotation, or add its {kind}.",
                )
        _check_annotation(where, annotation, images[annotation["image_id"]])
        grouped[annotation["image_id"]].append(annotation)
        if done % TELL_EVERY == 0:
            tell(f"checking {path.name}", done, len(annotations))
    if not images or not categories:
        raise DataError(
            f"{path}: there is nothing to find.",
            expected="at least one image and one category",
            found=f"{len(images)} images, {len(categories)} categories",
            todo="Check that the file is complete.",
        )
    ordered = [categories[number] for number in sorted(categories)]
    return CocoFile(path, list(images.values()), [grouped[number] for number in images], ordered)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # of JSON or UTF-8
        raise DataError(
            f"{path}: the annotations cannot be read.",
            expected="JSON in UTF-8",
            found=f"{type(error).__name__}: {error}",
            todo="Check that the file is complete.",
        ) from error
    missing = (
        PARTS if not isinstance(content, dict) else [part for part in PARTS if type(content.get(part)) is not list]
    )
    if missing:
        raise DataError(
            f"{path}: these are no COCO annotations.",
            expected=f"an object with the lists {listed(PARTS)}",
            found=f"{type(content).__name__} without {listed(missing)}",
            todo="Name a file of instances, such as instances_train2017.json; captions and keypoints are others.",
        )
    return content


def _by_id(path: Path, content: dict[str, Any], part: str) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for row, entry in enumerate(content[part]):
        number = entry.get("id") if isinstance(entry, dict) else None
        where = f"{path}, {part} entry {row} (the first is 0), id {number!r}"
        for key, kind in KEYS[part].items():
            value = entry.get(key) if isinstance(entry, dict) else None
            allowed = (int, float) if kind is float else kind
            if isinstance(value, bool) or not isinstance(value, allowed):  # type: ignore[arg-type]
                lacks = not isinstance(entry, dict) or key not in entry
                raise DataError(
                    f"{where}: {key!r} is missing." if lacks else f"{where}: {key!r} is of another kind.",
                    expected=f"{KINDS[kind]} under each of {listed(KEYS[part])}",  # type: ignore[index]
                    found="no such key" if lacks else repr(value)[:80],
                    todo="Correct or remove the entry.",
                )
        if number in found:
            raise DataError(
                f"{where}: another entry has this id.", expected="ids that differ", found=f"{number} twice",
                todo="Give one of the two another id, or remove it.",
            )  # fmt: skip
        found[entry["id"]] = entry
    return found


def _check_image(path: Path, number: int, image: dict[str, Any]) -> None:
    name = PurePosixPath(image["file_name"])
    if name.is_absolute() or ".." in name.parts or not name.parts:
        raise DataError(
            f"{path}, image {number}: its file lies outside of the folder of images.",
            expected="a path within that folder", found=repr(image["file_name"]), todo="Correct 'file_name'.",
        )  # fmt: skip
    if min(image["width"], image["height"]) < 1:
        raise DataError(
            f"{path}, image {number}: it has no pixels.", expected="a width and a height of at least 1",
            found=f"{image['width']} x {image['height']}", todo="Correct the size.",
        )  # fmt: skip


def _check_annotation(where: str, annotation: dict[str, Any], image: dict[str, Any]) -> None:
    box, segmentation = annotation["bbox"], annotation["segmentation"]
    numbers = [*box, annotation["area"]]
    if len(box) != 4 or not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise DataError(
            f"{where}: the box or the area cannot be used.",
            expected="four finite numbers (x, y, width, height) under 'bbox' and one under 'area'",
            found=f"bbox {box}, area {annotation['area']}",
            todo="Correct or remove the annotation.",
        )
    problem = (
        polygons_problem(segmentation)
        if isinstance(segmentation, list)
        else rle_problem(segmentation, image["height"], image["width"])
    )
    if problem:
        raise DataError(
            f"{where}: the mask cannot be used.",
            expected="polygons [[x, y, x, y, ...], ...], or run lengths {size, counts} that fill the image",
            found=problem,
            todo="Correct or remove the annotation.",
        )
