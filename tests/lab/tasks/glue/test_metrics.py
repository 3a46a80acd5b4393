import math

import pytest

from wellcond.lab.tasks.glue import score


@pytest.mark.parametrize("correlation", ["pearson", "spearman"])
@pytest.mark.parametrize(("x", "y"), [([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [0.1] * 3), ([2], [3])])
def test_a_correlation_that_is_not_defined_is_zero(correlation, x, y):
    assert score(correlation, x, y) == 0.0


@pytest.mark.parametrize("correlation", ["pearson", "spearman"])
def test_predictions_that_are_not_finite_are_not_hidden(correlation):
    assert math.isnan(score(correlation, [1.0, math.nan, 2.0], [1.0, 2.0, 3.0]))
