"""Small COCO sets made on the spot: every kind of annotation, in images that are drawn from it."""

import json
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as mask_api

from wellcond.lab.data import load_data, resolve_config
from wellcond.lab.tasks.detection.samples import to_mask

ROOT = Path(os.environ.get("WELLCOND_DATA") or Path(__file__).parents[4] / "../shared/data")
MINI = ROOT / "coco2017-mini"
CATEGORIES = [{"id": 7, "name": "cat"}, {"id": 2, "name": "bicycle"}, {"id": 90, "name": "hair drier"}]
"""Ids with gaps, and not in order."""
SIZES = {11: (40, 60), 5: (50, 30), 300: (32, 32), 42: (36, 48)}
"""Height and width by image id."""


def disc(height, width, centre, radius):
    rows, columns = np.mgrid[:height, :width] + 0.5
    return ((rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 < radius**2).astype(np.uint8)


def runs(mask):
    """Uncompressed run lengths, column by column, background first."""
    flat = mask.flatten(order="F").tolist()
    counts, value = [0], 0
    for pixel in flat:
        if pixel != value:
            counts.append(0)
            value = pixel
        counts[-1] += 1
    return {"size": list(mask.shape), "counts": counts}


def compressed(mask):
    rle = mask_api.encode(np.asfortranarray(mask))
    return {"size": list(rle["size"]), "counts": rle["counts"].decode()}


def annotation(number, image, category, box, segmentation, *, crowd=0):
    x, y, width, height = box
    return {
        "id": number, "image_id": image, "category_id": category, "bbox": list(box), "area": width * height,
        "iscrowd": crowd, "segmentation": segmentation,
    }  # fmt: skip


def rectangle(x, y, width, height):
    return [x, y, x + width, y, x + width, y + height, x, y + height]


def usual_annotations():
    """Two polygons in one, uncompressed and compressed run lengths, a crowd, a box that leaves the image."""
    return [
        annotation(21, 11, 7, (5, 6, 20, 15), [rectangle(5, 6, 8, 15), rectangle(17, 6, 8, 15)]),
        annotation(22, 11, 90, (32, 10, 16, 16), runs(disc(40, 60, (18, 40), 8))),
        annotation(23, 5, 2, (6, 16, 18, 18), compressed(disc(50, 30, (25, 15), 9))),
        annotation(24, 5, 2, (0, 30, 30, 20), runs(np.pad(np.ones((20, 30), np.uint8), ((30, 0), (0, 0)))), crowd=1),
        annotation(25, 42, 7, (30, 20, 30, 30), [rectangle(30, 20, 30, 30)]),
    ]


def coco(annotations=None, *, sizes=None, categories=CATEGORIES):
    sizes = SIZES if sizes is None else sizes
    images = [
        {"id": number, "file_name": f"{number:06}.png", "height": height, "width": width}
        for number, (height, width) in sizes.items()
    ]
    annotations = usual_annotations() if annotations is None else annotations
    return {"images": images, "annotations": annotations, "categories": list(categories)}


def write_part(root, split, year_folder, content):
    folder = root / year_folder
    folder.mkdir(parents=True, exist_ok=True)
    for image in content["images"]:
        pixels = np.full((image["height"], image["width"], 3), image["id"] % 200, np.uint8)
        pixels[:, :, 1] = np.linspace(0, 255, image["width"]).astype(np.uint8)
        Image.fromarray(pixels).save(folder / image["file_name"])
    file = root / "annotations" / f"instances_{split}2017.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))
    return file


def write_set(root, train=None, evaluation=None):
    """A set in the layout of COCO 2017; image 300 has no annotation."""
    write_part(root, "train", "train2017", coco() if train is None else train)
    write_part(root, "val", "val2017", coco() if evaluation is None else evaluation)
    return root


def load_set(root, **options):
    return load_data(resolve_config({"source": "coco", "path": str(root), **options}))


def masks_of(objects, height, width):
    """Masks (n, height, width) of all objects."""
    masks = [to_mask(segmentation, height, width) for segmentation in objects["segmentations"]]
    return torch.stack(masks) if masks else torch.zeros(0, height, width, dtype=torch.uint8)
