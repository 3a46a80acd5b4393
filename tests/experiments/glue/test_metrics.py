import math

import numpy as np
import pytest

from wellcond.experiments.glue.metrics import accuracy, f1, matthews, pearson, ranks, spearman


def confusion_of(labels, predictions, classes):
    counts = np.zeros((classes, classes))
    np.add.at(counts, (labels, predictions), 1)
    return counts.tolist()


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
def test_metrics_of_classes_are_those_of_scikit_learn(labels, predictions, classes):
    reference = pytest.importorskip("sklearn.metrics")
    confusion = confusion_of(labels, predictions, classes)
    assert accuracy(confusion) == reference.accuracy_score(labels, predictions)
    assert matthews(confusion) == pytest.approx(_matthews(reference, labels, predictions, classes), abs=1e-15)
    if classes == 2:
        assert f1(confusion) == reference.f1_score(labels, predictions, zero_division=0.0)


def _matthews(reference, labels, predictions, classes):
    if len(set(labels) | set(predictions)) < 2:
        return 0.0  # scikit-learn warns of a single label, and gives 0 too
    return reference.matthews_corrcoef(labels, predictions)


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


@pytest.mark.parametrize(("x", "y"), list(pairs()))
def test_correlations_are_those_of_scipy(x, y):
    stats = pytest.importorskip("scipy.stats")
    assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-11)
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-14)
    np.testing.assert_array_equal(ranks(x), stats.rankdata(x))


@pytest.mark.parametrize("correlation", [pearson, spearman])
@pytest.mark.parametrize(("x", "y"), [([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [0.1] * 3), ([2], [3]), ([], [])])
def test_a_correlation_that_is_not_defined_is_zero(correlation, x, y):
    assert correlation(x, y) == 0.0


def test_nothing_to_score_is_zero():
    assert accuracy([[0, 0], [0, 0]]) == f1([[0, 0], [0, 0]]) == matthews([[0, 0], [0, 0]]) == 0.0


def test_predictions_that_are_not_finite_are_not_hidden():
    assert math.isnan(pearson([1.0, math.nan, 2.0], [1.0, 2.0, 3.0]))
