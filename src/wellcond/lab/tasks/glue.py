"""A task of GLUE: sentences or pairs of them, a class or a number; scored by the metrics of the benchmark."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from wellcond.attention.distributed import unwrap
from wellcond.lab.data.base import Dataset, listed, report_progress
from wellcond.lab.data.tables import TableDataset
from wellcond.lab.data.text import text_columns
from wellcond.lab.settings import RecipeError, SequenceLength, Settings
from wellcond.lab.tasks.base import AbstractTask, Batch, Keys, Metric, Record, TaskContext, logits_of, register_task
from wellcond.lab.tokenizers import LibraryTokenizer, Tokenizer, TokenizerChoice, import_tokenizers, make_tokenizer

MULTIPLE = 8
"""Batches are padded to a multiple of it, which suits the hardware."""
HUB_ID = "nyu-mll/glue"
GlueName = Literal["mnli", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola"]
"""The eight tasks that the papers report, in the order of their tables."""
NAMES: tuple[str, ...] = get_args(GlueName)
LARGEST_SIMILARITY = 5.0
"""Labels of stsb are numbers from 0 to it."""


@dataclass(frozen=True)
class GlueTask:
    """One task, named as its configuration on the hub."""

    columns: tuple[str, ...]
    """One sentence, or two."""
    classes: tuple[str, ...] | None
    """In the order of the labels; None where the label is a number."""
    metrics: tuple[str, ...] = ("accuracy",)
    """The first is what its column of the table shows."""
    evaluation: str = "validation"
    """Split that is scored: the labels of the test split are not public."""
    further: str | None = None
    """A second split to score, if the data have it."""


_PAIR = ("sentence1", "sentence2")
TASKS = {
    "mnli": GlueTask(
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        evaluation="validation_matched",
        further="validation_mismatched",
    ),
    "sst2": GlueTask(("sentence",), ("negative", "positive")),
    "stsb": GlueTask(_PAIR, None, ("pearson", "spearman")),
    "rte": GlueTask(_PAIR, ("entailment", "not_entailment")),
    "qnli": GlueTask(("question", "sentence"), ("entailment", "not_entailment")),
    "qqp": GlueTask(("question1", "question2"), ("not_duplicate", "duplicate"), ("f1", "accuracy")),
    "mrpc": GlueTask(_PAIR, ("not_equivalent", "equivalent"), ("f1", "accuracy")),
    "cola": GlueTask(("sentence",), ("unacceptable", "acceptable"), ("matthews", "accuracy")),
}


class GlueSettings(Settings):
    """Options of the task."""

    name: Literal["glue"] = "glue"
    task: GlueName
    tokenizer: TokenizerChoice
    length: Annotated[SequenceLength, Field(ge=8)] = 128
    """Longer sequences are cut, of a pair always the longer sentence."""
    limit_further: PositiveInt | None = None
    """Largest number of rows of the second split that is scored, the mismatched one of mnli."""


class Sentences:
    """Sequences as BERT reads them, in memory: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]; batches are padded."""

    in_memory = True

    def __init__(self, splits: Sequence[Dataset], tokenizer: Tokenizer, length: int, what: str = "sentences") -> None:
        """Encode labelled splits, which follow each other; `parts` says where a row comes from."""
        special = tokenizer.special
        names = {"[PAD]": special.pad, "[CLS]": special.classify, "[SEP]": special.separator}
        missing = [name for name, token in names.items() if token is None]
        if special.pad is None or missing or not isinstance(tokenizer, LibraryTokenizer):
            raise RecipeError(
                f"task.tokenizer: GLUE needs the tokens {', '.join(names)}, and this tokeniser has no "
                f"{' and no '.join(missing)}. Pre-train with word pieces: {{train: wordpiece, vocabulary: 4096}}, or "
                "give the file of a tokeniser with these tokens"
            )
        self.pad, self.length = special.pad, length
        library = import_tokenizers()
        inner = library.Tokenizer.from_str(tokenizer.inner.to_str())
        marks = [(inner.id_to_token(id), id) for id in (special.separator, special.classify)]
        inner.post_processor = library.processors.BertProcessing(*marks)
        inner.enable_truncation(length, strategy="longest_first")
        self._tokens: list[NDArray[np.int32]] = []
        self._seconds: list[int] = []
        """Of each row, where the second sentence begins."""
        total = sum(map(len, splits))
        for columns in (columns for split in splits for columns in text_columns(split)):
            for encoding in inner.encode_batch(columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))):
                self._tokens.append(np.array(encoding.ids, np.int32))
                self._seconds.append(len(encoding) - sum(encoding.type_ids))
            report_progress(f"encoding {what}", len(self._tokens), total)
        self.labels = torch.cat([split.labels for split in splits if split.labels is not None])
        self.parts = torch.repeat_interleave(torch.arange(len(splits)), torch.tensor([len(split) for split in splits]))

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._tokens)

    def fetch(self, keys: Keys) -> Batch:
        """Tokens, mask, which sentence each token is of, label, number of the row, and part it comes from."""
        rows = torch.tensor([index for index, _ in keys])
        longest = max(len(self._tokens[index]) for index in rows.tolist())
        width = min(-(-longest // MULTIPLE) * MULTIPLE, self.length)
        tokens = torch.full((len(rows), width), self.pad)
        mask, types = torch.zeros_like(tokens), torch.zeros_like(tokens)
        for row, index in enumerate(rows.tolist()):
            size = len(self._tokens[index])
            tokens[row, :size] = torch.from_numpy(self._tokens[index])
            mask[row, :size] = 1
            types[row, self._seconds[index] : size] = 1
        inputs = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": types}
        return inputs | {"label": self.labels[rows], "row": rows, "part": self.parts[rows]}


@register_task(GlueSettings)
class Glue(AbstractTask):
    """The label of a sentence or a pair."""

    tells_classes_apart: ClassVar[bool] = True
    auto_class = "AutoModelForSequenceClassification"
    inputs = ("input_ids", "attention_mask")
    tokenizer: Tokenizer

    def __init__(self, settings: GlueSettings, context: TaskContext) -> None:
        """Encode all splits once."""
        data, self.settings, self.context = context.data, settings, context
        self.name, self.glue = settings.task, TASKS[settings.task]
        self.num_labels = len(self.glue.classes or ("a number",))
        self.metric = Metric(self.glue.metrics[0], higher_is_better=True, percent=True)
        context.need_kind(settings.name, "text")
        classes = self.glue.classes
        if classes is None:
            if data.train.labels is None or data.class_names is not None:
                raise RecipeError(f"{self.name}: expected labels that are numbers; set data.label_kind: number")
        elif (found := context.need_classes(f"glue, {self.name},")) != len(classes):
            raise RecipeError(
                f"{self.name}: expected {len(classes)} classes, {listed(classes)}; {data.name} has {found}"
            )
        what = f"{data.name}, training split"
        self.tokenizer = make_tokenizer(settings.tokenizer, data.train, what, context.base)
        evaluation, further = [data.evaluation], data.others.get(self.glue.further or "")
        if further is not None and further.labels is not None:
            limit = settings.limit_further
            evaluation.append(further.limit(limit) if isinstance(further, TableDataset) else further)
        test = data.others.get("test")
        self.train = self._sentences("training", data.train)
        self.evaluation = self._sentences("evaluation", *evaluation)
        self.test = self._sentences("test", test) if test is not None and test.labels is not None else None

    def _sentences(self, name: str, *splits: Dataset) -> Sentences:
        what = f"{self.context.data.name}, {name} split"
        columns = 1 + ("text_pair" in splits[0][0])
        if columns != len(self.glue.columns):
            raise RecipeError(
                f"{what}: expected {len(self.glue.columns)} sentences a row, found {columns}; set data.input to "
                f"{listed(self.glue.columns)}"
            )
        for labels in (split.labels for split in splits):
            assert labels is not None
            wrong = ((labels < 0) | (labels > LARGEST_SIMILARITY)).nonzero()
            if self.glue.classes is None and len(wrong):
                row = int(wrong[0])
                raise RecipeError(
                    f"{what}, row {row} (the first is 0): expected a label from 0 to {LARGEST_SIMILARITY:g}, found "
                    f"{labels[row]:g}"
                )
        return Sentences(splits, self.tokenizer, self.settings.length, f"{self.name}, {name} split,")

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, outputs, longest sequence and the padding token."""
        length = "length" if kind == "wellcond" else "max_position_embeddings"
        return {
            "vocab_size": self.tokenizer.vocabulary_size,
            "num_labels": self.num_labels,
            length: self.settings.length,
            "pad_token_id": self.tokenizer.special.pad,
        }

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy, or squared error."""
        return self._losses(self._outputs(model, batch), batch).sum()

    def num_terms(self, batch: Batch) -> int:
        """One a row."""
        return len(batch["label"])

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Mean loss."""
        return {"loss": sums["loss"] / sums["count"]}

    def collect(self, model: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], list[Record]]:
        """Loss and count of the first part; part, label and prediction of each row."""
        outputs = self._outputs(model, batch)
        of_first = (batch["part"] == 0).double()
        sums = {"loss": (self._losses(outputs, batch).double() * of_first).sum(), "count": of_first.sum()}
        predictions = outputs[:, 0].double() if self.glue.classes is None else outputs.argmax(1)
        columns = (batch["row"], batch["part"], batch["label"], predictions)
        return sums, [(row, found) for row, *found in zip(*(column.tolist() for column in columns), strict=True)]

    def summarise(self, samples: Any, sums: Mapping[str, float], records: Sequence[Any]) -> dict[str, float]:
        """The task's metric first, then the others; `constant` is 1 if all predictions are equal, else 0."""
        values = self.metrics(sums)
        sides: list[tuple[ArrayLike, ArrayLike]] = []
        for wanted in (0, 1):
            found = [(label, prediction) for part, label, prediction in records if part == wanted]
            sides.append(tuple(zip(*found, strict=True)) if found else ((), ()))  # type: ignore[arg-type]
        (labels, predictions), further = sides
        values |= {name: score(name, labels, predictions) for name in self.glue.metrics}
        if np.size(further[0]):
            values[f"{self.metric.name}_mismatched"] = score(self.metric.name, *further)
        return values | {"constant": float(len(np.unique(predictions)) == 1)}

    def _outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        names = [*self.inputs]
        plain = unwrap(model)
        takes = "token_type_ids" in inspect.signature(type(plain).forward).parameters
        if takes and getattr(getattr(plain, "config", None), "type_vocab_size", 0) > 1:
            names.append("token_type_ids")
        return logits_of(model(**{name: batch[name] for name in names})).float()

    def _losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Of each row."""
        if self.glue.classes is None:
            return mse_loss(outputs[:, 0], batch["label"].to(outputs.dtype), reduction="none")
        return cross_entropy(outputs, batch["label"], reduction="none")


def score(metric: str, labels: ArrayLike, predictions: ArrayLike) -> float:
    """Accuracy, Matthews correlation, F1 of class 1 of two, or Pearson or Spearman correlation.

    A metric that is not defined is 0, as is customary for Matthews and F1: predictions that are all equal tell nothing
    about the labels. So correlations are 0 where scipy gives NaN, which no mean survives.

    Example:
        >>> score("f1", [0, 1, 1], [0, 1, 1]), score("matthews", [0, 1], [1, 1]), score("pearson", [2, 4], [1, 1])
        (1.0, 0.0, 0.0)
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    measures = {"pearson": pearsonr, "spearman": spearmanr, "matthews": matthews_corrcoef, "accuracy": accuracy_score}
    sides = np.asarray(labels), np.asarray(predictions)
    correlation = metric in ("pearson", "spearman", "matthews")
    if not sides[0].size or (correlation and any((side == side[0]).all() for side in sides)):
        return 0.0
    if metric == "f1":
        return float(f1_score(*sides, zero_division=0.0))
    found = measures[metric](*sides)
    return float(getattr(found, "statistic", found))
