"""Image classification: cross entropy, top-1 accuracy."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellcond.lab.data.base import Dataset
from wellcond.lab.data.images import as_tensor_images
from wellcond.lab.settings import ImageSide, RecipeError, Settings
from wellcond.lab.tasks.augmentation import AugmentationSettings
from wellcond.lab.tasks.base import (
    EVALUATION,
    AbstractTask,
    Batch,
    Metric,
    Samples,
    TaskContext,
    check_labels,
    logits_of,
    need_classes,
    need_kind,
    register_task,
)
from wellcond.lab.tasks.image_sets import IMAGENET, Pictures, TensorImages, picture_transform
from wellcond.lab.tasks.mixing import mix


class ImageClassificationSettings(Settings):
    """Options of the task."""

    name: Literal["image_classification"] = "image_classification"
    image_size: ImageSide | None = None
    """Side in pixels; images of another size are resized. The size of the data by default."""
    channels: Literal[1, 3] | None = None
    """Images are converted to so many; by default 1 if the training images are grey (16 of them are looked at)."""
    normalise: Literal["data", "imagenet", "none"] = "data"
    """By the mean and deviation of the training images (of ImageNet, where they are decoded one by one), of ImageNet,
    or not at all."""
    evaluation_crop: Annotated[float, Field(ge=0.01, le=1)] = 1.0
    """Side of the evaluated square as a share of the resized image's shorter side; less than 1 needs decoding one by
    one."""
    in_memory: Literal["auto", "always", "never"] = "auto"
    """Whether to decode all images once."""


@register_task(ImageClassificationSettings)
class ImageClassification(AbstractTask):
    """Logits against a label."""

    metric = Metric("accuracy", higher_is_better=True, percent=True)
    tells_classes_apart: ClassVar[bool] = True

    def __init__(self, settings: ImageClassificationSettings, context: TaskContext) -> None:
        """Decode the images if they fit, or prepare to do so one by one."""
        need_kind(context.data, settings.name, "image")
        self.num_classes = need_classes(context.data, settings.name)
        self.settings, self.context = settings, context
        self.augmentation: AugmentationSettings = context.augmentation or AugmentationSettings()
        first = context.data.train[0]["image"]
        shape = tuple(first.shape) if isinstance(first, Tensor) else (len(first.getbands()), *reversed(first.size))
        self.channels = settings.channels or _channels_of(context.data.train)
        self.size = settings.image_size or shape[-1]
        if settings.image_size is None and shape[-1] != shape[-2]:
            raise RecipeError(
                f"{context.data.name}: images are {shape[-2]} x {shape[-1]}; set task.image_size to the side wanted"
            )
        self.splits = {"training": context.data.train, "evaluation": context.data.evaluation}
        if context.test is not None:
            self.splits["test"] = context.test
        for name, split in self.splits.items():
            if split.labels is not None:
                check_labels(split.labels, self.num_classes, f"{context.data.name}, {name} split")
        made = self._in_memory() or self._pictures()
        self.train, self.evaluation, self.test = made["training"], made["evaluation"], made.get("test")
        self.following = self.augmentation.repeats if self.augmentation.mixes else 0

    def _in_memory(self) -> dict[str, Samples] | None:
        one_by_one = self.augmentation.needs_pictures or self.settings.evaluation_crop != 1.0
        if self.settings.in_memory == "always" and one_by_one:
            raise RecipeError("task.in_memory: always, but the augmentation or task.evaluation_crop needs decoding")
        if self.settings.in_memory == "never" or one_by_one:
            return None
        data, report = self.context.data, self.context.progress
        loaded = {}
        for name, split in self.splits.items():
            told = None if report is None else functools.partial(report, f"decoding {name} images")
            images = as_tensor_images(split, size=self.size, channels=self.channels, progress=told)
            if images is None or images.images.shape[-2:] != (self.size, self.size):  # tensors are not resized there
                if self.settings.in_memory == "always":
                    raise RecipeError(
                        f"{data.name}: the {name} images do not fit in memory, or are tensors of another size than "
                        f"{self.size} x {self.size}; use task.in_memory: auto"
                    )
                return None
            assert images.labels is not None  # there are classes
            loaded[name] = (images.images, images.labels)
        mean, std = self._statistics(loaded["training"][0])
        common: dict[str, Any] = {"mean": mean, "std": std, "seed": self.context.seed}
        return {
            name: TensorImages(*images, augmentation=self.augmentation if name == "training" else None, **common)
            for name, images in loaded.items()
        }

    def _statistics(self, images: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self.settings.normalise == "none" or images.is_floating_point():  # floats come normalised
            return None, None
        if self.settings.normalise == "imagenet":
            mean, std = (torch.tensor(values) for values in IMAGENET)
            return (mean, std) if self.channels == 3 else (mean.mean().view(1), std.mean().view(1))
        sums = torch.zeros(2, self.channels, dtype=torch.float64)
        for part in images.split(4096):  # the whole set in float64 may not fit
            values = part.double() / 255
            sums += torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))])
        mean, square = sums / (images.numel() / self.channels)
        return mean.float(), (square - mean.square()).clamp_min(1e-12).sqrt().float()

    def _pictures(self) -> dict[str, Samples]:
        data = self.context.data
        if self.augmentation.crop_padding:
            raise RecipeError(
                "augmentation.crop_padding works on images in memory; use augmentation.resized_crop with the others"
            )
        first = data.train[0]["image"]
        if isinstance(first, Tensor) and first.is_floating_point():
            raise RecipeError(
                f"{data.name}: its images come as normalised floats, which are neither resized (to {self.size} x "
                f"{self.size}) nor augmented but by flip and crop_padding"
            )
        mean: tuple[float, ...]
        std: tuple[float, ...]
        mean, std = IMAGENET if self.settings.normalise != "none" else ((0.0,) * 3, (1.0,) * 3)
        if self.channels == 1:
            mean, std = (sum(mean) / 3,), (sum(std) / 3,)
        made: dict[str, Samples] = {}
        for name, split in self.splits.items():
            augmentation = self.augmentation if name == "training" else None
            transform = picture_transform(
                self.size, augmentation, crop=self.settings.evaluation_crop, mean=mean, std=std
            )
            made[name] = Pictures(split, transform, channels=self.channels, seed=self.context.seed)
        return made

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Classes, channels and size."""
        if kind == "timm":
            return {"num_classes": self.num_classes, "in_chans": self.channels, "img_size": self.size}
        return {"num_labels": self.num_classes, "num_channels": self.channels, "image_size": self.size}

    def auto_class(self) -> str:
        """With a classifier."""
        return "AutoModelForImageClassification"

    def training_batch(self, batch: Batch, step: int, part: int) -> Batch:
        """Mixup and cutmix."""
        if not self.augmentation.mixes:
            return batch
        return mix(batch, self.augmentation, num_classes=self.num_classes, seed=self.context.seed, step=step, part=part)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy, with label smoothing unless mixing has smoothed already."""
        smoothing = 0.0 if self.augmentation.mixes else self.augmentation.label_smoothing
        return cross_entropy(
            logits_of(model(batch["image"])), batch["label"], reduction="sum", label_smoothing=smoothing
        )

    def num_terms(self, batch: Batch) -> int:
        """One per image."""
        return len(batch["image"])

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Loss, correct answers and count."""
        return classification_sums(logits_of(model(batch["image"])), batch["label"])

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Mean loss and accuracy."""
        return {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}

    def probe(self, num_samples: int) -> Tensor:
        """Evaluation images."""
        keys = [(index, EVALUATION) for index in range(min(num_samples, len(self.evaluation)))]
        return self.evaluation.fetch(keys)["image"]


def _channels_of(split: Dataset) -> Literal[1, 3]:
    """1 if the images are grey; a few are looked at, since some of a set in colour may be."""
    for index in range(0, len(split), max(1, len(split) // 16)):
        image = split[index]["image"]
        one = image.shape[0] == 1 if isinstance(image, Tensor) else len(image.getbands()) == 1 and image.mode != "P"
        if not one:
            return 3
    return 1


def classification_sums(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Sums from which loss and accuracy follow."""
    return {
        "loss": cross_entropy(logits.float(), labels, reduction="sum").double(),
        "correct": (logits.argmax(-1) == labels).sum().double(),
        "count": torch.tensor(float(len(labels)), dtype=torch.float64, device=logits.device),
    }
