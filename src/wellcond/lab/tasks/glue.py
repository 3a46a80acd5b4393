"""A task of GLUE: sentences or pairs of them, a class or a number; scored by the metrics of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import mse_loss, pad
from torch.nn.utils.rnn import pad_sequence

from wellcond.attention.sharding import unwrap
from wellcond.errors import RecipeError
from wellcond.lab.data.base import Dataset, report_progress
from wellcond.lab.data.text import text_columns
from wellcond.lab.records import Metric
from wellcond.lab.settings import SequenceLength, Settings
from wellcond.lab.tasks.base import Batch, ClassificationTask, Keys, Samples, TaskContext, logits_of, register_task
from wellcond.lab.tokenizers import LibraryTokenizer, Tokenizer, TokenizerChoice, import_tokenizers, make_tokenizer

MULTIPLE = 8  # of tokens, that batches are padded to, which suits the hardware
HUB_ID = "nyu-mll/glue"


COLUMNS = {
    "mnli": ("premise", "hypothesis"),
    "sst2": ("sentence",),
    "stsb": ("sentence1", "sentence2"),
    "rte": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "mrpc": ("sentence1", "sentence2"),
    "cola": ("sentence",),
}
"""Of the tasks that the papers report, by their names on the hub, in the order of the tables."""
NAMES = tuple(COLUMNS)
REGRESSION = "stsb"  # its label is a number
METRICS = {REGRESSION: ["pearson", "spearman"], "qqp": ["f1"], "mrpc": ["f1"], "cola": ["matthews"]}
"""Of a task, followed by accuracy but for the regression; a table shows the first."""


class GlueSettings(Settings):
    """Options of the task."""

    name: Literal["glue"] = "glue"
    task: Literal["mnli", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola"]
    tokenizer: TokenizerChoice
    length: Annotated[SequenceLength, Field(ge=8)] = 128
    """Longer sequences are cut, of a pair always the longer sentence."""


def with_marks(tokenizer: Tokenizer) -> LibraryTokenizer:
    """The tokeniser, if it has the tokens that mark sentences; RecipeError otherwise."""
    if isinstance(tokenizer, LibraryTokenizer) and {"pad", "classify", "separator"} <= tokenizer.special.keys():
        return tokenizer
    raise RecipeError(
        "task.tokenizer: GLUE needs the tokens [PAD], [CLS] and [SEP], and this tokeniser lacks some. Pre-train with "
        "word pieces: {train: wordpiece, vocabulary: 4096}, or give the file of a tokeniser with these tokens"
    )


class Sentences(Samples):
    """Sequences as BERT reads them, in memory: [CLS] a [SEP], or [CLS] a [SEP] b [SEP]; batches are padded."""

    def __init__(self, split: Dataset, tokenizer: LibraryTokenizer, length: int, what: str = "sentences") -> None:
        assert split.labels is not None
        self.pad, self.length, self.labels = tokenizer.special["pad"], length, split.labels
        library = import_tokenizers()
        inner = library.Tokenizer.from_str(tokenizer.inner.to_str())
        marks = [(inner.id_to_token(id), id) for id in (tokenizer.special["separator"], tokenizer.special["classify"])]
        inner.post_processor = library.processors.BertProcessing(*marks)
        inner.enable_truncation(length, strategy="longest_first")
        self._tokens: list[Tensor] = []
        seconds = []
        for columns in text_columns(split):
            for encoding in inner.encode_batch(columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))):
                self._tokens.append(torch.tensor(encoding.ids, dtype=torch.int32))
                seconds.append(len(encoding) - sum(encoding.type_ids))
            report_progress(f"encoding {what}", len(self._tokens), len(split))
        self._seconds = torch.tensor(seconds)
        """Of each row, where the second sentence begins."""

    def __len__(self) -> int:
        return len(self._tokens)

    def fetch(self, keys: Keys) -> Batch:
        """Tokens, mask, which sentence each token is of, label, and number of the row."""
        rows = torch.tensor([index for index, _ in keys])
        tokens = pad_sequence([self._tokens[row] for row in rows], batch_first=True, padding_value=-1).long()
        tokens = pad(tokens, (0, -tokens.shape[1] % MULTIPLE), value=-1)[:, : self.length]
        mask = tokens >= 0
        types = mask & (torch.arange(tokens.shape[1]) >= self._seconds[rows, None])
        inputs = {"attention_mask": mask.long(), "token_type_ids": types.long()}
        return {"input_ids": tokens.where(mask, self.pad), **inputs, "label": self.labels[rows], "row": rows}


@register_task(GlueSettings)
class Glue(ClassificationTask):
    """The label of a sentence or a pair."""

    kinds = ("text",)
    auto_class = "AutoModelForSequenceClassification"
    inputs = ("input_ids", "attention_mask")
    tokenizer: LibraryTokenizer

    def __init__(self, settings: GlueSettings, context: TaskContext) -> None:
        super().__init__(settings, context)
        data, self.regression = context.data, settings.task == REGRESSION
        self.names = METRICS.get(settings.task, []) + ([] if self.regression else ["accuracy"])
        self.metric = Metric(self.names[0], percent=True)
        self.num_labels = 1 if self.regression else self.count_classes()
        if self.regression and (data.train.labels is None or data.class_names is not None):
            raise RecipeError(f"{settings.task}: expected labels that are numbers; set data.label_kind: number")
        what = f"{data.name}, training split"
        self.tokenizer = with_marks(make_tokenizer(settings.tokenizer, data.train, what, context.base))
        self.set_splits(lambda split, name: Sentences(split, self.tokenizer, settings.length, f"{name} sentences"))

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, outputs, longest sequence and the padding token."""
        length = "length" if kind == "wellcond" else "max_position_embeddings"
        tokens = {"vocab_size": self.tokenizer.vocabulary_size, "pad_token_id": self.tokenizer.special["pad"]}
        return {"num_labels": self.num_labels, length: self.settings.length, **tokens}

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits (rows, classes), or numbers (rows, 1)."""
        inputs = self.inputs_of(batch)
        if getattr(getattr(unwrap(model), "config", None), "type_vocab_size", 0) > 1:
            inputs["token_type_ids"] = batch["token_type_ids"]
        return logits_of(model(**inputs)).float()

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy, or squared error."""
        if self.regression:
            return mse_loss(logits[:, 0], labels.to(logits.dtype), reduction="sum")
        return super().loss_of(logits, labels)

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Loss and count; label and prediction of each row."""
        outputs = self.logits(model, batch)
        predictions = outputs[:, 0].double() if self.regression else outputs.argmax(1)
        columns = [column.tolist() for column in (batch["row"], batch["label"], predictions)]
        records = [(row, found) for row, *found in zip(*columns, strict=True)]
        count = torch.tensor(float(len(outputs)), dtype=torch.float64, device=outputs.device)
        return {"loss": self.loss_of(outputs, batch["label"]).double(), "count": count, "records": records}

    def metrics(self, sums: Mapping[str, Any], samples: Samples) -> dict[str, float]:
        """Mean loss; the task's metric, then the others; `constant` is 1 if all predictions are equal, else 0."""
        labels, predictions = zip(*sums["records"], strict=True)
        scores = {name: score(name, labels, predictions) for name in self.names}
        return {"loss": sums["loss"] / sums["count"], **scores, "constant": float(len(set(predictions)) == 1)}


def score(metric: str, labels: ArrayLike, predictions: ArrayLike) -> float:
    """Accuracy, Matthews correlation, F1 of class 1 of two, or Pearson or Spearman correlation.

    What is not defined is 0, as is customary for Matthews and F1: scipy would give NaN, which no mean survives.

    Example:
        >>> score("f1", [0, 1, 1], [0, 1, 1]), score("matthews", [0, 1], [1, 1]), score("pearson", [2, 4], [1, 1])
        (1.0, 0.0, 0.0)
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    measures = {"pearson": pearsonr, "spearman": spearmanr, "matthews": matthews_corrcoef, "accuracy": accuracy_score}
    sides = np.asarray(labels), np.asarray(predictions)
    if metric == "f1":
        return float(f1_score(*sides, zero_division=0.0))
    if metric != "accuracy" and any((side == side[0]).all() for side in sides):
        return 0.0
    found = measures[metric](*sides)
    return float(getattr(found, "statistic", found))
