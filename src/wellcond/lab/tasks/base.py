"""What the engine asks of a task."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellcond.errors import RecipeError
from wellcond.lab.data.base import Data, Dataset
from wellcond.lab.models.changes import Norms
from wellcond.lab.records import Metric
from wellcond.lab.settings import Fraction, Settings
from wellcond.lab.tokenizers import Tokenizer

Batch = dict[str, Tensor]
SampleKey = tuple[int, int]
"""Number of a sample, and the draw of random numbers that fixes its augmentation: EVALUATION, the epoch or, where an
epoch shows a sample `repeats` times, epoch * repeats + repeat."""
Keys = Sequence[SampleKey]
EVALUATION = -1
IGNORED = -100
"""Label that is not scored, as in `cross_entropy`."""


def send(values: Tensor, device: torch.device) -> Tensor:
    """Values that the host has made, on a device, without waiting for what that still does."""
    return values if device.type != "cuda" else values.pin_memory().to(device, non_blocking=True)


class Samples(ABC):
    """Samples by number, as batches ready for the model."""

    in_memory: ClassVar[bool] = True
    """Whether fetching is so cheap that worker processes would only cost time."""

    @abstractmethod
    def __len__(self) -> int: ...

    def fetch(self, keys: Keys) -> Batch:
        """One batch; the same keys give the same batch, in any process."""
        return self.finish(self.read(keys))

    def read(self, keys: Keys) -> Batch:
        """The part of `fetch` that a worker process does, whose result is sent to the device."""
        return self.fetch(keys)

    def finish(self, batch: Batch) -> Batch:
        """The rest, where the batch then is."""
        return batch


class TokenCorrection(Settings):
    """`wellcond.condition_tokens_` of the built model."""

    name: Literal["conditioned", "grayed"]
    of: Literal["samples", "table"] | None = None
    """The tokens of each sample, or the table of words; null: the table in causal models, samples elsewhere."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the method, such as ``eps``."""


class ModelSettings(Settings):
    """Which model, with which arguments."""

    name: str
    """timm:NAME, hf:CONFIG_TYPE_OR_LOCAL_PATH, wellcond:NAME; with --trust-local-code also path/to/file.py:callable"""
    arguments: dict[str, Any] = Field(default_factory=dict)
    weights: str | None = None
    """Checkpoint to start from; the method is applied after it is loaded."""
    encoder: str | None = None
    """Weights of a pre-trained encoder to start from, or the folder of a finished run; what it has no weights for, such
    as a classifier, is as built. {method} and {seed} stand for those of the run; the method's initialisation is then
    that of pre-training, and is not applied again."""
    norms: Norms = "keep"
    """Whether to take all norms out of the blocks (the final norm stays), or only the one in front of the attention."""
    qk_norm: bool | Literal["gain"] = False
    """Whether each query and key head is divided by its root mean square, without a learned gain, as in nanochat; with
    ``gain``, times a learned one that the heads of a layer share, as in Qwen3."""
    layer_scale: float | None = Field(None, gt=0)
    """Start of learned factors on what attention and MLP add to the stream (LayerScale); null for none."""
    token_correction: TokenCorrection | None = None
    """What is done to the tokens that the embedding puts out, in every forward pass."""


class AugmentationSettings(Settings):
    """Augmentation of images, under timm's meaning of the words; all off by default."""

    flip: Fraction = 0.0
    """Probability of a mirror image."""
    crop_padding: Annotated[int, Field(ge=0, le=256)] = 0
    """Random crop out of an image padded by this many pixels; for small images."""
    resized_crop: tuple[Fraction, Fraction] | None = None
    """Random crop of this share of the area, resized; for large images."""
    resize: Literal["torch"] | None = None
    """By what crops are resized: torch takes a third of the time of PIL, which is timm's way (null); values of pixels
    then differ by a few steps of 256."""
    rand_augment: str | None = None
    """timm's description, such as rand-m9-mstd0.5-inc1."""
    color_jitter: Annotated[float, Field(ge=0, le=10)] = 0.0
    random_erasing: Fraction = 0.0
    mixup: NonNegativeFloat = 0.0
    cutmix: NonNegativeFloat = 0.0
    mixed_together: PositiveInt = 1
    """How many samples in a row of an update share one draw of mixup or CutMix: with 1 each has its own, with the batch
    of one GPU it is one for each such batch, as in DeiT, Swin and timm, on any number of processes."""
    label_smoothing: Fraction = 0.0
    repeats: PositiveInt = 1
    """Repeated augmentation (DeiT): an epoch takes this many times fewer samples, and each that many times in a row,
    augmented differently."""


@dataclass(frozen=True)
class TaskContext:
    """What a task is built from."""

    data: Data
    seed: int
    augmentation: AugmentationSettings = AugmentationSettings()
    base: Path | None = None
    """Folder that relative paths in the task start from; the current one if None."""
    with_test: bool = True
    """Whether the test split is wanted; decoding one for nothing may take minutes."""

    @property
    def splits(self) -> dict[str, Dataset]:
        """`training`, `evaluation` and `test`, if it is wanted and has labels where training has."""
        splits = {"training": self.data.train, "evaluation": self.data.evaluation}
        test = self.data.others.get("test") if self.with_test else None
        if test is not None and (test.labels is not None or self.data.train.labels is None):
            splits["test"] = test
        return splits


class AbstractTask(ABC):
    """Samples, loss and score of one kind of problem."""

    metric: Metric
    kinds: ClassVar[tuple[str, ...]]
    """Of data that it takes."""
    can_be_sharded: ClassVar[bool] = True
    """Whether processes call the model equally often, without which shards of its weights cannot be put together."""
    auto_class: ClassVar[str | None] = None
    """Class of transformers with the head this task needs; None if there is none."""
    inputs: str | Sequence[str] = ("input_ids",)
    """Parts of a batch that the model takes by name, or the one part that is its only argument."""
    train: Samples
    evaluation: Samples
    test: Samples | None
    """Samples that no choice is made on; None if the data have no labelled split named test."""
    following: int = 0
    """How many samples `training_batch` needs that follow those of a part in the update, cyclically."""
    tokenizer: Tokenizer | None = None
    """Of tasks that read text as tokens by `task.tokenizer`."""

    def __init__(self, settings: Any, context: TaskContext) -> None:
        data = context.data
        self.settings, self.context, self.data, self.seed = settings, context, data, context.seed
        self.further: dict[str, Samples] = {}
        """Other sets to score at every evaluation, their values under names that begin with these."""
        if data.kind not in self.kinds:
            raise RecipeError(f"{settings.name} needs {' or '.join(self.kinds)} data; {data.name} has {data.kind}")

    def set_splits(self, make: Callable[[Any, str], Samples]) -> None:
        """Make the samples of each split, from it and its name."""
        made = {name: make(split, name) for name, split in self.context.splits.items()}
        self.train, self.evaluation, self.test = made["training"], made["evaluation"], made.get("test")

    def count_classes(self) -> int:
        """Number of classes; RecipeError without at least two to learn, or for a label that is none of them."""
        data, names, task = self.data, self.data.class_names, self.settings.name
        if names is None:
            raise RecipeError(f"{task} needs labels; {data.name} has none. Name the label column in data.label")
        for name, split in self.context.splits.items():
            labels = torch.empty(0) if split.labels is None else split.labels
            for row in ((labels < 0) | (labels >= len(names))).nonzero().flatten().tolist():
                where = f"{data.name}, {name} split, row {row}"
                raise RecipeError(f"{where}: expected a label from 0 to {len(names) - 1}, found {labels[row]:g}")
        if data.train.labels is not None and len(found := data.train.labels.unique().tolist()) < 2:
            raise RecipeError(
                f"{task} needs at least two classes in the training data; {data.name} has only "
                f"{names[found[0]]!r}. Add examples of another class, or name the right label column in data.label"
            )
        return len(names)

    @abstractmethod
    def model_arguments(self, kind: str) -> dict[str, Any]:
        """What the data ask of a model of this ``kind`` (timm, hf or file): classes, channels, vocabulary."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Sum of the loss over the terms of a batch."""

    @abstractmethod
    def num_terms(self, batch: Batch) -> Tensor | int:
        """How many terms `loss` adds up; the engine divides by their number over all processes and accumulations."""

    def terms_to_train(self, batch: Batch) -> Tensor | int:
        """`num_terms` of a training batch; an int if it follows from the number of samples alone."""
        return self.num_terms(batch)

    @abstractmethod
    def score(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Sums over a batch; `records`, if any, are pairs of a sample's number and what `metrics` needs of it."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, Any], samples: Samples) -> dict[str, float]:
        """`loss`, the metric and more, from the sums, and the `records` in order, over the first samples of a set."""

    def probe(self, num_samples: int) -> Any:
        """The first samples of the evaluation set, all if there are fewer, as the model's input, for `measure`."""
        count = min(num_samples, len(self.evaluation))
        return self.inputs_of(self.evaluation.fetch([(index, EVALUATION) for index in range(count)]))

    def inputs_of(self, batch: Batch) -> Any:
        """What the model takes of a batch."""
        return batch[self.inputs] if isinstance(self.inputs, str) else {name: batch[name] for name in self.inputs}

    def training_batch(self, batch: Batch, step: int, part: int) -> Batch:
        """Augmentation across samples, by default none: of a part (of all processes) of a step and `following` ones."""
        return batch

    def write_samples(self, model: nn.Module) -> list[dict[str, Any]]:
        """What a trained model makes of samples, for the record; nothing by default."""
        return []


class ClassificationTask(AbstractTask):
    """One label or several a sample: cross entropy, and how many are found."""

    metric = Metric("accuracy", percent=True)

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits (labels, classes)."""
        inputs = self.inputs_of(batch)
        return logits_of(model(**inputs) if isinstance(inputs, dict) else model(inputs))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy in nats."""
        return self.loss_of(self.logits(model, batch), batch["label"])

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of logits (labels, classes)."""
        return cross_entropy(logits.float(), labels.flatten(), reduction="sum")

    def num_terms(self, batch: Batch) -> Tensor | int:
        """Terms of the loss: one per label."""
        return len(batch["label"])

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Loss, correct answers and count."""
        logits = self.logits(model, batch)
        return {
            "loss": self.loss_of(logits, batch["label"]).double(),
            "correct": (logits.argmax(-1) == batch["label"].flatten()).sum().double(),
            "count": torch.as_tensor(self.num_terms(batch), dtype=torch.float64, device=logits.device),
        }

    def metrics(self, sums: Mapping[str, Any], samples: Samples) -> dict[str, float]:
        """Mean loss and accuracy."""
        return {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}


def logits_of(output: Any) -> Tensor:
    """Logits of a timm model (a tensor) or a Hugging Face one (a record)."""
    return output if isinstance(output, Tensor) else output.logits


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is evaluated, without gradients; afterwards each of its modules has the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # on its own: some classes override train() and return nothing
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


TASKS: dict[str, tuple[type[Settings], Callable[[Any, TaskContext], AbstractTask]]] = {}


def register_task(settings: type[Settings]) -> Callable[[type[AbstractTask]], type[AbstractTask]]:
    """Decorate a task class whose constructor takes (settings, context); `settings.name` is the task's name."""

    def decorate(task: type[AbstractTask]) -> type[AbstractTask]:
        TASKS[settings.model_fields["name"].default] = (settings, task)
        return task

    return decorate
