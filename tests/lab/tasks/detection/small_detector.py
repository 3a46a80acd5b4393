"""Detectors and a recipe that train in a second."""

from pathlib import Path

import torch

import wellcond.lab  # noqa: F401  (adds the models wellcond:NAME)
from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.build import build_model
from wellcond.lab.recipe import Recipe
from wellcond.lab.train.run import Job

XCIT = {"backbone": "xcit_nano_12_p16_224", "backbone_arguments": {"embed_dim": 16, "depth": 4, "num_heads": 2}}
SWIN = {
    "backbone": "swin_tiny_patch4_window7_224",
    "backbone_arguments": {"embed_dim": 8, "depths": [1, 2, 1, 1], "num_heads": [1, 2, 2, 2], "window_size": 4},
}
HEADS = {
    "pyramid_width": 16, "anchor_sizes": [8, 16, 32, 64, 128], "canonical_size": 32, "box_resolution": 3,
    "mask_resolution": 4, "box_head": 16, "mask_head": [8], "anchors_sampled": 32, "regions_sampled": 16,
    "proposals": [40, 20], "detections": 10,
}  # fmt: skip


def detector(backbone=XCIT, seed=0, **options):
    torch.manual_seed(seed)
    model = build_model("wellcond:mask_rcnn", {"num_classes": 3} | HEADS | backbone | options)
    model.roi_heads.score_thresh = 0.0
    return model


def batch_of(sizes, seed=0):
    """Images of these sizes in one padded batch, with a target or two in each; none in the last."""
    source = torch.Generator().manual_seed(seed)
    height, width = (-(-max(sides) // 32) * 32 for sides in zip(*sizes, strict=True))
    images = torch.zeros(len(sizes), 3, height, width)
    targets = []
    for place, (h, w) in enumerate(sizes):
        images[place, :, :h, :w] = torch.rand(3, h, w, generator=source)
        count = (place + 1) % len(sizes)
        boxes = torch.tensor([[2.0 + 3 * k, 3.0, 20.0 + 3 * k, 28.0] for k in range(count)]).reshape(-1, 4)
        masks = torch.zeros(count, height, width, dtype=torch.uint8)
        for k in range(count):
            masks[k, 3:28, 2 + 3 * k : 20 + 3 * k] = 1
        targets.append({"boxes": boxes, "labels": torch.arange(count) % 3 + 1, "masks": masks})
    return images, torch.tensor(sizes), targets


def recipe(root, **changes):
    content = {
        "name": "small",
        "scale": "tiny",
        "task": {
            "name": "detection",
            "images": {"flip": 0.5, "sides": [32, 48], "longest": 64},
            "score_train": 2,
        },
        "data": {"source": "coco", "path": str(root)},
        "model": {"name": "wellcond:mask_rcnn", "arguments": HEADS | XCIT},
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05},
        "training": {"length": {"steps": 6}, "batch_size": 2, "threads": 1, "log_every": 1},
        "evaluation": {"every": {"steps": 3}, "batch_size": 2},
        "checkpoint": {"every": {"steps": 2}},
        "tracking": {"weights_every": {"steps": 6}, "jacobian_points": 2, "heads": "all", "budget": None},
    }
    return Recipe.model_validate(content | changes)


def job(root, folder, method="conditioned+balanced", **changes):
    return Job(recipe(root, **changes), MethodSettings.model_validate(method), 0, Path(folder), cpu=True)
