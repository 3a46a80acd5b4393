"""Detection: boxes and masks of the things in an image, scored as COCO does."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import NonNegativeInt
from torch import Tensor, nn

from wellcond.errors import RecipeError
from wellcond.lab.data.images import import_pil
from wellcond.lab.seeding import derive
from wellcond.lab.settings import Settings
from wellcond.lab.tasks.base import EVALUATION, AbstractTask, Batch, Metric, TaskContext, evaluating, register_task
from wellcond.lab.tasks.detection.samples import (
    DetectionAugmentation,
    DetectionSamples,
    import_pycocotools,
    targets_of,
    to_rle,
)

KINDS = {"bbox": ("box", "bbox"), "segm": ("mask", "segmentation")}
"""Of pycocotools: how the metrics of each begin here, and where a result has what is judged."""
METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")
"""In the order of pycocotools: over all overlaps, at 0.5, at 0.75; of small, medium and large objects."""
SHOWN, LONGEST, QUALITY, MOST, LEAST_SCORE = 4, 256, 80, 20, 0.05
"""Evaluation images that a run records, as JPEG of this longer side and quality; its detections, of this score."""


class DetectionSettings(Settings):
    """Options of the task."""

    name: Literal["detection"] = "detection"
    images: DetectionAugmentation = DetectionAugmentation()
    """Sizes of the images, and their augmentation in training."""
    score_train: NonNegativeInt = 0
    """Score so many training images too at every evaluation, without augmentation: train_box_AP, AP50 and AP75, and the
    same of masks."""


@register_task(DetectionSettings)
class Detection(AbstractTask):
    """Mask R-CNN's losses, and the average precision of boxes and masks."""

    metric = Metric("box_AP", percent=True)
    kinds = ("detection",)
    inputs = "images"
    can_be_sharded = False  # evaluation computes image by image, and one process may have one more
    train: DetectionSamples
    evaluation: DetectionSamples

    def __init__(self, settings: DetectionSettings, context: TaskContext) -> None:
        super().__init__(settings, context)
        self.num_classes = self.count_classes()
        for name in context.augmentation.model_dump(exclude_defaults=True):
            raise RecipeError(f"augmentation.{name}: it moves no boxes; the augmentation of detection is task.images")
        self.set_splits(self._samples)
        self.category_ids = self.train.split.category_ids
        if settings.score_train:
            scored = self.train.split.take(torch.arange(min(settings.score_train, len(self.train))))
            self.further = {"train": self._samples(scored)}

    def _samples(self, split: Any, name: str = "") -> DetectionSamples:
        return DetectionSamples(split, self.settings.images, self.seed)

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Classes."""
        if kind != "wellcond":
            raise RecipeError(f"model.name: detection needs wellcond:mask_rcnn, found a {kind} model")
        return {"num_classes": self.num_classes}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The five losses of Mask R-CNN added up, which are means over the batch, times its images."""
        losses = model(batch["images"], batch["sizes"], targets_of(batch))
        return torch.stack(list(losses.values())).sum() * self.num_terms(batch)

    def num_terms(self, batch: Batch) -> int:
        """Terms of the loss: one per image."""
        return len(batch["images"])

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Losses, and the detections of each image in COCO's format of results."""
        positions = batch["positions"].tolist()
        # The regions that a loss is computed on are drawn; the same in every evaluation of a run.
        seeds = [derive(self.seed, "regions", position) for position in positions]
        found, losses = model(
            batch["images"], batch["sizes"], targets_of(batch), original_sizes=batch["original_sizes"], seeds=seeds
        )
        sums = {name: torch.stack([loss[name] for loss in losses]).sum().double() for name in losses[0]}
        count = torch.tensor(float(len(losses)), dtype=torch.float64, device=batch["images"].device)
        images = zip(positions, found, batch["image_ids"].tolist(), strict=True)
        records = [(position, to_results(boxes, image, self.category_ids)) for position, boxes, image in images]
        return {**sums, "count": count, "records": records}

    def metrics(self, sums: Mapping[str, Any], samples: Any) -> dict[str, float]:
        """Mean losses; AP, AP50, AP75 and AP by size, of boxes and masks."""
        records = sums["records"]
        scored = samples.split.take(torch.arange(len(records)))
        losses = {name: value / sums["count"] for name, value in sums.items() if name not in ("count", "records")}
        precision = evaluate(scored.ground_truth, [result for record in records for result in record])
        values = {"loss": sum(losses.values()), **precision, **losses}
        if self.metric.name not in values:
            raise RecipeError(
                f"evaluation.samples: expected at least one object, found none in the first {len(records)} images; "
                "score more of them"
            )
        if samples is self.further.get("train"):  # what tells whether they are learnt
            return {name: value for name, value in values.items() if name.endswith(("AP", "AP50", "AP75"))}
        return values

    def write_samples(self, model: nn.Module) -> list[dict[str, Any]]:
        """What a model finds in the first evaluation images, beside the truth, as plain data to draw a report from.

        Of each image `image_id`, `file_name`, `size`, `jpeg` in base 64, and as `truth` and `predictions` lists of
        `bbox` [x, y, width, height] in pixels of `size` (height, width), `category` and `segmentation` as compressed
        run lengths; predictions also have a `score`, the best first.
        """
        with evaluating(model):
            return [self._describe(model, index) for index in range(min(SHOWN, len(self.evaluation)))]

    def _describe(self, model: nn.Module, index: int) -> dict[str, Any]:
        split, example = self.evaluation.split, self.evaluation.split[index]
        batch = self.evaluation.fetch([(index, EVALUATION)])
        images = batch["images"].to(next(model.parameters()).device)
        [found] = model(images, batch["sizes"], original_sizes=batch["original_sizes"])
        results = to_results(found, example["image_id"], self.category_ids)
        best = sorted((row for row in results if row["score"] >= LEAST_SCORE), key=lambda row: -row["score"])[:MOST]
        small, file = example["image"].copy(), io.BytesIO()
        small.thumbnail((LONGEST, LONGEST), import_pil().Resampling.BILINEAR)
        small.save(file, "JPEG", quality=QUALITY)
        names = {category["id"]: category["name"] for category in split.categories}

        def shown(row: Mapping[str, Any]) -> dict[str, Any]:
            box = [round(float(number), 2) for number in row["bbox"]]
            segmentation = to_rle(row["segmentation"], *example["size"])
            return {"bbox": box, "category": names[row["category_id"]], "segmentation": segmentation}

        return {
            "image_id": example["image_id"],
            "file_name": split.images[index]["file_name"],
            "size": list(example["size"]),
            "jpeg": base64.b64encode(file.getvalue()).decode("ascii"),
            "truth": [shown(row) for row in split.annotations[index] if not row["iscrowd"]],
            "predictions": [shown(row) | {"score": round(row["score"], 4)} for row in best],
        }


def to_results(found: Mapping[str, Tensor], image_id: int, category_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Detections in an image, in COCO's format of results, but for those of a diverged model that are not finite.

    In pixels of the original image, `boxes` (n, 4) are x0, y0, x1, y1 and `masks` (n, 1, h, w), cut at 0.5. `labels`
    are from 1; the first of `category_ids` is COCO's id of label 1.
    """
    boxes, scores = found["boxes"].detach().double().cpu(), found["scores"].detach().double().cpu()
    results = []
    for row in (boxes.isfinite().all(1) & scores.isfinite()).nonzero().flatten().tolist():
        left, top, right, bottom = boxes[row].tolist()
        mask = found["masks"][row, 0] >= 0.5
        results.append(
            {
                "image_id": image_id,
                "category_id": category_ids[int(found["labels"][row]) - 1],
                "bbox": [left, top, right - left, bottom - top],
                "score": float(scores[row]),
                "segmentation": to_rle(mask, *mask.shape),
            }
        )
    return results


def evaluate(ground_truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`box_AP`, `box_AP50`, ..., `mask_APl` as shares of 1, in all images of the ground truth (a COCO file's content).

    Where there is nothing to find, as without small objects, pycocotools says -1; that number is left out.
    """
    library = import_pycocotools()
    metrics: dict[str, float] = {}
    for kind, (prefix, key) in KINDS.items():
        # The other key would decide by its own area whether a detection is small, medium or large.
        judged = [{name: result[name] for name in ("image_id", "category_id", key, "score")} for result in results]
        with contextlib.redirect_stdout(io.StringIO()):
            truth, found = library.coco.COCO(), library.coco.COCO()
            # pycocotools writes into annotations. It takes a match with id 0 for none, so they are counted from 1.
            numbered = [{**annotation, "id": row} for row, annotation in enumerate(ground_truth["annotations"], 1)]
            truth.dataset = {**ground_truth, "annotations": numbered}
            truth.createIndex()
            if judged:
                found = truth.loadRes(judged)
            else:  # which `loadRes` does not take
                found.dataset = {**truth.dataset, "annotations": []}
                found.createIndex()
            evaluation = library.cocoeval.COCOeval(truth, found, kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        values = zip(METRICS, evaluation.stats.tolist(), strict=False)
        metrics |= {f"{prefix}_{name}": value for name, value in values if value != -1}
    return metrics
