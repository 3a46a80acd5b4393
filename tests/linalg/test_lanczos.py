"""Extreme eigenvalues of operators: as right as they say."""

import pytest
import torch

from wellcond.linalg.lanczos import smallest_eigenvalue

F64 = torch.float64


@pytest.mark.parametrize("lowest", [[1.0], [1.0, 1.0 + 1e-9, 1.0 + 1e-6], [1.0] * 40, [1e-3, 1.0]])
def test_davidson_finds_the_least_of_clusters(lowest):
    rest = torch.logspace(0.3, 3, 300 - len(lowest), dtype=F64)
    values = torch.cat([torch.tensor(lowest, dtype=F64), rest])
    noise = 1 + 0.1 * torch.rand(300, generator=torch.Generator().manual_seed(0), dtype=F64)
    found = smallest_eigenvalue(lambda rows: rows * values, lambda rows: rows / (values * noise), 300)
    assert found.converged and found.value == pytest.approx(min(lowest), rel=1e-7)
    assert found.value >= min(lowest) * (1 - 1e-12)


def test_davidson_says_when_it_has_not_converged():
    values = torch.logspace(0, 6, 2000, dtype=F64)
    found = smallest_eigenvalue(lambda rows: rows * values, lambda rows: rows, 2000, max_steps=4)
    assert not found.converged
