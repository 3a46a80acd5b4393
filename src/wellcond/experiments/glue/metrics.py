"""The metrics of GLUE, from confusion matrices (rows: labels, columns: predictions) and from pairs of numbers.

Where a metric is not defined it is 0, as it is customary for Matthews and F1: predictions that are all equal tell
nothing about the labels. So Pearson and Spearman are 0 where other libraries give NaN, which no mean survives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Confusion = Sequence[Sequence[int | float]]


def accuracy(confusion: Confusion) -> float:
    """Share of right predictions.

    Example:
        >>> accuracy([[3, 1], [0, 4]])
        0.875
    """
    counts = _counts(confusion)
    total = sum(map(sum, counts))
    return sum(row[at] for at, row in enumerate(counts)) / total if total else 0.0


def f1(confusion: Confusion) -> float:
    """Harmonic mean of precision and recall of class 1 of two; 0 if class 1 is neither found nor there.

    Example:
        >>> f1([[3, 1], [0, 4]])
        0.8888888888888888
    """
    (_, false_positive), (false_negative, true_positive) = _counts(confusion)
    total = 2 * true_positive + false_positive + false_negative
    return 2 * true_positive / total if total else 0.0


def matthews(confusion: Confusion) -> float:
    """Correlation of predicted and true classes, any number of them; 0 if all predictions or all labels are equal.

    Example:
        >>> matthews([[2, 0], [0, 2]]), matthews([[0, 2], [0, 2]])
        (1.0, 0.0)
    """
    counts = _counts(confusion)
    labels, predictions = [sum(row) for row in counts], [sum(column) for column in zip(*counts, strict=True)]
    total, right = sum(labels), sum(row[at] for at, row in enumerate(counts))
    # Covariances of one-hot labels and predictions, times total^2, in whole numbers.
    both = right * total - sum(a * b for a, b in zip(labels, predictions, strict=True))
    spread = (total**2 - sum(a * a for a in labels)) * (total**2 - sum(b * b for b in predictions))
    return both / math.sqrt(spread) if spread else 0.0


def pearson(predictions: ArrayLike, targets: ArrayLike) -> float:
    """Linear correlation; 0 if one side is constant.

    Example:
        >>> round(pearson([1, 2, 3], [2, 4, 6]), 12), pearson([1, 1, 1], [2, 4, 6])
        (1.0, 0.0)
    """
    sides = [np.asarray(side, dtype=np.float64) for side in (predictions, targets)]
    if any(side.size < 2 or (side == side[0]).all() for side in sides):
        return 0.0
    a, b = (_direction(side) for side in sides)
    return float(np.clip(a @ b, -1.0, 1.0))


def spearman(predictions: ArrayLike, targets: ArrayLike) -> float:
    """Linear correlation of the ranks; 0 if one side is constant.

    Example:
        >>> round(spearman([1, 10, 100], [5, 6, 7]), 12)
        1.0
    """
    return pearson(ranks(predictions), ranks(targets))


def ranks(values: ArrayLike) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs.

    Example:
        >>> ranks([30, 10, 30, 20]).tolist()
        [3.5, 1.0, 3.5, 2.0]
    """
    _, group, sizes = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last = sizes.cumsum()
    return (last - (sizes - 1) / 2)[group]


OF_CLASSES: dict[str, Callable[[Confusion], float]] = {"accuracy": accuracy, "f1": f1, "matthews": matthews}
OF_NUMBERS: dict[str, Callable[[ArrayLike, ArrayLike], float]] = {"pearson": pearson, "spearman": spearman}


def _counts(confusion: Confusion) -> list[list[int]]:
    """In whole numbers, which neither round nor overflow."""
    return [[round(count) for count in row] for row in confusion]


def _direction(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Deviations from the mean at length 1; the largest is scaled to 1 first, so that no square overflows."""
    deviations = values - values.mean()
    deviations = deviations / np.abs(deviations).max()
    return np.asarray(deviations / np.linalg.norm(deviations))
