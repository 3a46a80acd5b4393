import math

import numpy as np
import pytest

from wellcond.lab.tasks.glue import score


def cases():
    random = np.random.default_rng(0)
    for size in (1, 2, 7, 100, 40_430):
        for classes in (2, 3):
            labels, predictions = random.integers(0, classes, (2, size))
            yield pytest.param(labels, predictions, classes, id=f"random-{size}-{classes}")
            yield pytest.param(labels, labels, classes, id=f"right-{size}-{classes}")
            yield pytest.param(labels, (labels + 1) % classes, classes, id=f"wrong-{size}-{classes}")
            for constant in range(classes):
                yield pytest.param(labels, np.full(size, constant), classes, id=f"constant-{constant}-{size}-{classes}")
                yield pytest.param(np.full(size, constant), predictions, classes, id=f"one-{constant}-{size}-{classes}")


@pytest.mark.parametrize(("labels", "predictions", "classes"), list(cases()))
def test_metrics_of_classes_are_their_definitions(labels, predictions, classes):
    assert score("accuracy", labels, predictions) == (labels == predictions).mean()
    assert score("matthews", labels, predictions) == pytest.approx(_matthews(labels, predictions, classes), abs=1e-12)
    if classes == 2:
        right, ones = ((labels == 1) & (predictions == 1)).sum(), (labels == 1).sum() + (predictions == 1).sum()
        assert score("f1", labels, predictions) == pytest.approx(2 * right / ones if ones else 0.0, abs=1e-12)


def _matthews(labels, predictions, classes):
    """Covariance of the one-hot labels and predictions over the root of their variances, in whole numbers."""
    counts = [[int(np.sum(side == c)) for c in range(classes)] for side in (labels, predictions)]
    total, right = len(labels), int(np.sum(labels == predictions))
    both = right * total - sum(a * b for a, b in zip(*counts, strict=True))
    spread = math.prod(total**2 - sum(count * count for count in side) for side in counts)
    return both / math.sqrt(spread) if spread else 0.0


def pairs():
    random = np.random.default_rng(1)
    for size in (2, 3, 50, 1500):
        x, y = random.normal(size=(2, size))
        yield pytest.param(x, y, id=f"normal-{size}")
        yield pytest.param(x, 3 * x + 1, id=f"line-{size}")
        yield pytest.param(x, -x, id=f"falling-{size}")
        yield pytest.param(1e200 * x, 1e-200 * y, id=f"scales-{size}")
    yield pytest.param(random.integers(0, 4, 200), random.integers(0, 6, 200) / 5, id="ties")
    yield pytest.param(1e4 + 1e-3 * random.normal(size=300), random.normal(size=300), id="far from zero")


def _correlation(x, y):
    """The definition, on deviations whose largest is 1, so that no square overflows."""
    sides = [np.asarray(side, dtype=float) - np.mean(side) for side in (x, y)]
    a, b = (side / np.abs(side).max() for side in sides)
    return (a @ b) / np.sqrt((a @ a) * (b @ b))


def _ranks(values):
    """From 1; equal values share the mean of theirs."""
    values = np.asarray(values)
    return np.array([(values < value).sum() + ((values == value).sum() + 1) / 2 for value in values])


@pytest.mark.parametrize(("x", "y"), list(pairs()))
def test_correlations_are_their_definitions(x, y):
    assert score("pearson", x, y) == pytest.approx(_correlation(x, y), abs=1e-12)
    assert score("spearman", x, y) == pytest.approx(_correlation(_ranks(x), _ranks(y)), abs=1e-12)


@pytest.mark.parametrize("correlation", ["pearson", "spearman"])
@pytest.mark.parametrize(("x", "y"), [([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [0.1] * 3), ([2], [3])])
def test_a_correlation_that_is_not_defined_is_zero(correlation, x, y):
    assert score(correlation, x, y) == 0.0


@pytest.mark.parametrize("correlation", ["pearson", "spearman"])
def test_predictions_that_are_not_finite_are_not_hidden(correlation):
    assert math.isnan(score(correlation, [1.0, math.nan, 2.0], [1.0, 2.0, 3.0]))
