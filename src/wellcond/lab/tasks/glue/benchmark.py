"""The eight tasks of GLUE that the papers report: where they lie, what they ask, and how they are scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from wellcond.errors import check_choice

GlueName = Literal["mnli", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola"]
"""In the order of the papers' tables."""
NAMES: tuple[str, ...] = get_args(GlueName)
HUB_ID = "nyu-mll/glue"


@dataclass(frozen=True)
class GlueTask:
    """One task."""

    name: str
    """Of its configuration on the hub."""
    columns: tuple[str, ...]
    """One sentence, or two."""
    classes: tuple[str, ...] | None
    """In the order of the labels; None where the label is a number."""
    metric: str
    """What its column of the table shows."""
    others: tuple[str, ...] = ()
    """Also reported."""
    evaluation: str = "validation"
    """Split that is scored: the labels of the test split are not public."""
    further: str | None = None
    """A second split to score, if the data have it."""
    limits: tuple[float, float] = (0.0, 0.0)
    """Smallest and largest number a label may be."""

    @property
    def num_labels(self) -> int:
        """Outputs of a model."""
        return 1 if self.classes is None else len(self.classes)


_PAIR = ("sentence1", "sentence2")
TASKS = {
    task.name: task
    for task in (
        GlueTask(
            "mnli",
            ("premise", "hypothesis"),
            ("entailment", "neutral", "contradiction"),
            "accuracy",
            evaluation="validation_matched",
            further="validation_mismatched",
        ),
        GlueTask("sst2", ("sentence",), ("negative", "positive"), "accuracy"),
        GlueTask("stsb", _PAIR, None, "pearson", ("spearman",), limits=(0.0, 5.0)),
        GlueTask("rte", _PAIR, ("entailment", "not_entailment"), "accuracy"),
        GlueTask("qnli", ("question", "sentence"), ("entailment", "not_entailment"), "accuracy"),
        GlueTask("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), "f1", ("accuracy",)),
        GlueTask("mrpc", _PAIR, ("not_equivalent", "equivalent"), "f1", ("accuracy",)),
        GlueTask("cola", ("sentence",), ("unacceptable", "acceptable"), "matthews", ("accuracy",)),
    )
}


def find_task(name: str) -> GlueTask:
    """A task by its name.

    Raises: UnknownChoiceError with those there are.

    Example:
        >>> find_task("cola").metric
        'matthews'
    """
    check_choice("GLUE task", name, NAMES)
    return TASKS[name]
