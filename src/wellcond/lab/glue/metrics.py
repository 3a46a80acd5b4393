"""The metrics of GLUE, from confusion matrices (rows: labels, columns: predictions) and from pairs of numbers.

A metric that is not defined is 0, as is customary for Matthews and F1: predictions that are all equal tell nothing
about the labels. So Pearson and Spearman are 0 where scipy gives NaN, which no mean survives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Confusion = Sequence[Sequence[int | float]]


def score_classes(metric: str, confusion: Confusion) -> float:
    """Accuracy, Matthews correlation, or F1 of class 1 of two; 0 without samples.

    Example:
        >>> [score_classes(metric, [[3, 1], [0, 4]]) for metric in ("accuracy", "f1")]
        [0.875, 0.8888888888888888]
        >>> score_classes("matthews", [[2, 0], [0, 2]]), score_classes("matthews", [[0, 2], [0, 2]])
        (1.0, 0.0)
    """
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    of: dict[str, Callable[..., Any]] = {"accuracy": accuracy_score, "f1": f1_score, "matthews": matthews_corrcoef}
    counts = np.rint(confusion)
    labels, predictions = np.indices(counts.shape).reshape(2, -1)
    options = {"zero_division": 0.0} if metric == "f1" else {}
    return float(of[metric](labels, predictions, sample_weight=counts.ravel(), **options)) if counts.any() else 0.0


def score_numbers(metric: str, predictions: ArrayLike, targets: ArrayLike) -> float:
    """Pearson or Spearman correlation; 0 if one side is constant.

    Example:
        >>> round(score_numbers("pearson", [1, 2, 3], [2, 4, 6]), 12), score_numbers("pearson", [1, 1, 1], [2, 4, 6])
        (1.0, 0.0)
        >>> round(score_numbers("spearman", [1, 10, 100], [5, 6, 7]), 12)
        1.0
    """
    from scipy.stats import pearsonr, spearmanr

    sides = [np.asarray(side, dtype=np.float64) for side in (predictions, targets)]
    if any(side.size < 2 or (side == side[0]).all() for side in sides):
        return 0.0
    return float({"pearson": pearsonr, "spearman": spearmanr}[metric](*sides).statistic)
