"""Detection: boxes and masks of the things in an image, scored as COCO does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeInt
from torch import Tensor, nn

from wellcond.lab.detection import DetectionAugmentation, evaluate, to_results
from wellcond.lab.seeding import derive
from wellcond.lab.settings import RecipeError, Settings
from wellcond.lab.tasks.augmentation import AugmentationSettings
from wellcond.lab.tasks.base import (
    EVALUATION,
    AbstractTask,
    Batch,
    Metric,
    Record,
    TaskContext,
    need_classes,
    need_kind,
    register_task,
)
from wellcond.lab.tasks.detection_samples import describe_predictions
from wellcond.lab.tasks.detection_sets import DetectionSamples, FirstSamples, targets_of

MODEL = "wellcond:mask_rcnn"


class DetectionSettings(Settings):
    """Options of the task."""

    name: Literal["detection"] = "detection"
    images: DetectionAugmentation = DetectionAugmentation()
    """Sizes of the images, and their augmentation in training."""
    score_train: NonNegativeInt = 0
    """Score so many training images too at every evaluation, without augmentation: train_box_AP, AP50 and AP75, and the
    same of masks."""
    samples: NonNegativeInt = 4
    """Evaluation images whose detections a run records."""


@register_task(DetectionSettings)
class Detection(AbstractTask):
    """Mask R-CNN's losses, and the average precision of boxes and masks."""

    metric = Metric("box_AP", higher_is_better=True, percent=True)
    can_be_sharded: ClassVar[bool] = False  # evaluation computes image by image, and one process may have one more
    train: DetectionSamples
    evaluation: DetectionSamples

    def __init__(self, settings: DetectionSettings, context: TaskContext) -> None:
        """Prepare to decode images one by one."""
        need_kind(context.data, settings.name, "detection")
        self.num_classes = need_classes(context.data, settings.name, least=1)
        self.settings, self.seed = settings, context.seed
        _check_augmentation(context.augmentation or AugmentationSettings())
        self.data = context.data

        def samples(split: Any) -> DetectionSamples:
            return DetectionSamples(split, settings.images, seed=context.seed)

        self.train, self.evaluation = samples(context.data.train), samples(context.data.evaluation)
        if settings.score_train:
            self.further = {"train": FirstSamples(self.train, settings.score_train)}

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Classes."""
        if kind != "wellcond":
            raise RecipeError(f"model.name: detection needs {MODEL}, with a backbone of timm; found a {kind} model")
        return {"num_classes": self.num_classes}

    def auto_class(self) -> None:
        """Transformers has none for it."""
        return None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The five losses of Mask R-CNN added up, which are means over the batch, times its images."""
        losses = model(batch["images"], batch["sizes"], targets_of(batch))
        return torch.stack(list(losses.values())).sum() * self.num_terms(batch)

    def num_terms(self, batch: Batch) -> int:
        """One per image."""
        return len(batch["images"])

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Losses and number of images."""
        return self.collect(model, batch)[0]

    def collect(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], list[Record]]:
        """Losses, and the detections of each image in COCO's format of results."""
        positions = batch["positions"].tolist()
        # The regions that a loss is computed on are drawn; the same in every evaluation of a run.
        seeds = [derive(self.seed, "regions", position) for position in positions]
        found, losses = model(
            batch["images"], batch["sizes"], targets_of(batch), original_sizes=batch["original_sizes"], seeds=seeds
        )
        sums = {name: torch.stack([loss[name] for loss in losses]).sum().double() for name in losses[0]}
        sums["count"] = torch.tensor(float(len(losses)), dtype=torch.float64, device=batch["images"].device)
        ids, sizes = batch["image_ids"].tolist(), [tuple(size) for size in batch["original_sizes"].tolist()]
        records = [
            (position, to_results([detections], [image], [size], self.category_ids))
            for position, detections, image, size in zip(positions, found, ids, sizes, strict=True)
        ]
        return sums, records

    @property
    def category_ids(self) -> Sequence[int]:
        """COCO's id of each label."""
        return self.train.split.category_ids

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Mean losses."""
        means = {name: value / sums["count"] for name, value in sums.items() if name != "count"}
        return {"loss": sum(means.values()), **means}

    def summarise(self, samples: Any, sums: Mapping[str, float], records: Sequence[Any]) -> dict[str, float]:
        """Mean losses; AP, AP50, AP75 and AP by size, of boxes and masks."""
        scored = samples.split.select(torch.arange(len(records)))
        results = [result for record in records for result in record]
        losses = self.metrics(sums)
        values = {"loss": losses["loss"], **evaluate(scored.ground_truth, results), **losses}
        if self.metric.name not in values:
            raise RecipeError(
                f"evaluation.samples: expected at least one object, found none in the first {len(records)} images; "
                "score more of them"
            )
        if isinstance(samples, FirstSamples):  # of the training images, what tells whether they are learnt
            return {name: value for name, value in values.items() if name.endswith(("AP", "AP50", "AP75"))}
        return values

    def probe(self, num_samples: int) -> Tensor:
        """Evaluation images, all of the size of the largest."""
        keys = [(index, EVALUATION) for index in range(min(num_samples, len(self.evaluation)))]
        return self.evaluation.fetch(keys)["images"]

    def write_samples(self, model: nn.Module) -> list[dict[str, Any]]:
        """What a model finds in the first evaluation images, beside the truth."""
        return describe_predictions(model, self.evaluation, self.settings.samples, self.data.class_names or ())


def _check_augmentation(augmentation: AugmentationSettings) -> None:
    given = augmentation.model_dump(exclude_defaults=True, exclude={"repeats"})
    if given:
        raise RecipeError(
            f"augmentation.{next(iter(given))}: it moves no boxes; the augmentation of detection is task.images"
        )
