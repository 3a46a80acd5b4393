"""A task of GLUE: sentences or pairs of them, a class or a number; scored by the metrics of the benchmark."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from wellcond.attention.distributed import unwrap
from wellcond.lab.data.base import Dataset
from wellcond.lab.data.errors import listed
from wellcond.lab.data.tables import TableDataset
from wellcond.lab.glue.metrics import score_classes, score_numbers
from wellcond.lab.glue.sentences import SentenceFormat, SentenceRows, check_numbers
from wellcond.lab.glue.tasks import GlueName, GlueTask, find_task
from wellcond.lab.settings import RecipeError, SequenceLength, Settings
from wellcond.lab.tasks.base import (
    EVALUATION,
    AbstractTask,
    Batch,
    Metric,
    TaskContext,
    check_labels,
    logits_of,
    need_classes,
    need_kind,
    register_task,
)
from wellcond.lab.tokenizers.choose import make_tokenizer
from wellcond.lab.tokenizers.settings import TokenizerChoice


class GlueSettings(Settings):
    """Options of the task."""

    name: Literal["glue"] = "glue"
    task: GlueName
    tokenizer: TokenizerChoice
    length: Annotated[SequenceLength, Field(ge=8)] = 128
    """Longer sequences are cut, of a pair always the longer sentence."""
    limit_further: PositiveInt | None = None
    """Largest number of rows of the second split that is scored, the mismatched one of mnli."""


@register_task(GlueSettings)
class Glue(AbstractTask):
    """The label of a sentence or a pair."""

    tells_classes_apart: ClassVar[bool] = True

    def __init__(self, settings: GlueSettings, context: TaskContext) -> None:
        """Encode all splits once."""
        data, self.settings, self.context = context.data, settings, context
        self.glue = find_task(settings.task)
        self.metric = Metric(self.glue.metric, higher_is_better=True, percent=True)
        need_kind(data, settings.name, "text")
        self._check_answers()
        what = f"{data.name}, training split"
        self.tokenizer = make_tokenizer(settings.tokenizer, data.train, what, context.base)
        self.form = SentenceFormat(self.tokenizer, length=settings.length)
        self.train = self._rows("training", data.train)
        further = data.others.get(self.glue.further or "")
        if further is not None and further.labels is not None:
            self.evaluation = self._rows("evaluation", data.evaluation, _limited(further, settings.limit_further))
        else:
            self.evaluation = self._rows("evaluation", data.evaluation)
        test = data.others.get("test")
        self.test = self._rows("test", test) if test is not None and test.labels is not None else None
        self._most = max(len(rows) for rows in (self.evaluation, self.test) if rows is not None)

    def _check_answers(self) -> None:
        """Raise RecipeError unless labels are what the task asks for."""
        data, classes = self.context.data, self.glue.classes
        if classes is None:
            if data.train.labels is None or data.class_names is not None:
                raise RecipeError(f"{self.glue.name}: expected labels that are numbers; set data.label_kind: number")
        elif (found := need_classes(data, f"glue, {self.glue.name},")) != len(classes):
            raise RecipeError(
                f"{self.glue.name}: expected {len(classes)} classes, {listed(classes)}; {data.name} has {found}"
            )

    def _rows(self, name: str, *splits: Dataset) -> SentenceRows:
        what = f"{self.context.data.name}, {name} split"
        columns = 1 + ("text_pair" in splits[0][0])
        if columns != len(self.glue.columns):
            raise RecipeError(
                f"{what}: expected {len(self.glue.columns)} sentences a row, found {columns}; set data.input to "
                f"{listed(self.glue.columns)}"
            )
        for split in splits:
            assert split.labels is not None
            if self.glue.classes is None:
                check_numbers(split.labels, self.glue.limits, what)
            else:
                check_labels(split.labels, self.glue.num_labels, what)
        return SentenceRows(splits, self.form, self._telling(f"encoding {self.glue.name}, {name} split,"))

    def _telling(self, what: str) -> Callable[[int, int], None] | None:
        told = self.context.progress
        return None if told is None else lambda done, total: told(what, done, total)

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, outputs, longest sequence and the padding token."""
        length = "length" if kind == "wellcond" else "max_position_embeddings"
        return {
            "vocab_size": self.form.tokenizer.vocabulary_size,
            "num_labels": self.glue.num_labels,
            length: self.settings.length,
            "pad_token_id": self.form.tokenizer.special.pad,
        }

    def auto_class(self) -> str:
        """With a classifier on the first token."""
        return "AutoModelForSequenceClassification"

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy, or squared error."""
        return self._losses(self._outputs(model, batch), batch).sum()

    def num_terms(self, batch: Batch) -> int:
        """One a row."""
        return len(batch["label"])

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Loss and count of the first part; a confusion matrix of each part, or all predictions, each at its row."""
        outputs = self._outputs(model, batch)
        of_first = (batch["part"] == 0).double()
        sums = {"loss": (self._losses(outputs, batch).double() * of_first).sum(), "count": of_first.sum()}
        if self.glue.classes is not None:
            size = self.glue.num_labels
            cells = (batch["part"] * size + batch["label"]) * size + outputs.argmax(1)
            counts = torch.bincount(cells, minlength=2 * size * size)
            return sums | {"confusion": counts.double().view(2, size, size)}
        values = {"prediction": outputs[:, 0].double(), "target": batch["label"].double(), "seen": of_first}
        return sums | {
            name: value.new_zeros(self._most).index_add(0, batch["row"], value) for name, value in values.items()
        }

    def metrics(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """The task's metric first, then the others; `constant` is 1 if all predictions are equal, else 0."""
        values = _class_metrics(self.glue, sums) if self.glue.classes else _number_metrics(self.glue, sums)
        return {"loss": sums["loss"] / sums["count"], **values}

    def probe(self, num_samples: int) -> dict[str, Tensor]:
        """Evaluation sentences."""
        batch = self.evaluation.fetch([(index, EVALUATION) for index in range(min(num_samples, len(self.evaluation)))])
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def _outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        names = ["input_ids", "attention_mask"]
        if _knows_sentences(unwrap(model)):
            names.append("token_type_ids")
        return logits_of(model(**{name: batch[name] for name in names})).float()

    def _losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Of each row."""
        if self.glue.classes is None:
            return mse_loss(outputs[:, 0], batch["label"].to(outputs.dtype), reduction="none")
        return cross_entropy(outputs, batch["label"], reduction="none")


def _limited(split: Dataset, limit: int | None) -> Dataset:
    return split.limit(limit) if isinstance(split, TableDataset) else split


def _knows_sentences(model: nn.Module) -> bool:
    """Whether a model has embeddings for the first and the second sentence of a pair."""
    takes = "token_type_ids" in inspect.signature(type(model).forward).parameters
    return takes and getattr(getattr(model, "config", None), "type_vocab_size", 0) > 1


def _class_metrics(glue: GlueTask, sums: Mapping[str, Any]) -> dict[str, float]:
    first, second = sums["confusion"]
    values = {name: score_classes(name, first) for name in (glue.metric, *glue.others)}
    if any(map(any, second)):
        values[f"{glue.metric}_mismatched"] = score_classes(glue.metric, second)
    answers = sum(any(column) for column in zip(*first, strict=True))
    return values | {"constant": float(answers == 1)}


def _number_metrics(glue: GlueTask, sums: Mapping[str, Any]) -> dict[str, float]:
    rows = [row for row, seen in enumerate(sums["seen"]) if seen]
    predictions, targets = ([sums[name][row] for row in rows] for name in ("prediction", "target"))
    values = {name: score_numbers(name, predictions, targets) for name in (glue.metric, *glue.others)}
    return values | {"constant": float(len(set(predictions)) == 1)}
