"""T1, and theorems 3.5 and 3.8 on random matrices; the printed 3.8 is contradicted, the corrected one never."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from theory.papers import theorem35, theorem38, theorem38_printed
from theory.reference import F64, kappa, sigma, tensor
from wellcond.errors import HypothesisError
from wellcond.theory import saturation


def near(value, rel=1e-9):
    return pytest.approx(value, rel=rel, abs=0.0)


def diag(*entries):
    return torch.diag(tensor(entries))


def eye(rows, columns=None):
    return torch.eye(rows, columns or rows, dtype=F64)


def test_T1_identity_correction():
    a = diag(-9.5, -1)
    assert sigma(a + 10 * eye(2)).tolist() == [near(9), near(0.5)]
    printed, corrected = theorem38_printed(a, 10.0), theorem38(a, 10.0)
    assert printed.applies and (printed.observed, printed.ratio) == (near(18), near(13 / 6))
    assert not corrected.applies and corrected.ratio == near(39)
    assert sigma(diag(-10, -1) + 10 * eye(2)).tolist() == [near(9), 0.0]
    attained = theorem38(diag(1, -1, 0.1), 2.0)
    assert sigma(diag(1, -1, 0.1) + 2 * eye(3)).tolist() == [near(3), near(2.1), near(1)]
    assert attained.value == near(3) == attained.observed and not attained.contradicted


def test_T1_polar_correction():
    for w, c, after in (
        (diag(3, 1), 3 * eye(2), (6, 4)),
        (tensor([[0, -3], [1, 0]]), tensor([[0, -3], [3, 0]]), (6, 4)),
        (diag(1, 0), None, (2, 1)),
    ):
        found = theorem35(w)
        if c is not None:
            torch.testing.assert_close(found.correction, c)
        assert sigma(w + found.correction).tolist() == [near(s) for s in after]
        assert found.value == near(after[0] / after[1])


def test_T1_the_same_identity_in_every_head_is_rank_deficient():
    assert sigma(torch.cat([eye(4, 2), eye(4, 2)], 1)).tolist() == [near(math.sqrt(2))] * 2 + [0.0] * 2


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.AdamW])
def test_T1_weight_decay_separates_a_fixed_correction_from_an_initialisation(optimiser):
    c, start, slope = 10 * eye(3), torch.randn(3, 3, dtype=F64), torch.randn(3, 3, dtype=F64)
    ends = []
    for begin, fixed in ((start, c), (start + c, 0)):
        w = begin.clone().requires_grad_()
        step = optimiser([w], lr=0.1, weight_decay=0.1)
        ((w + fixed) * slope).sum().backward()
        step.step()
        ends.append((w + fixed).detach())
    torch.testing.assert_close(ends[0] - ends[1], 0.1 * eye(3), rtol=1e-9, atol=1e-12)


matrices = st.tuples(st.integers(1, 6), st.integers(1, 6), st.floats(-2, 2), st.integers(0, 10**6))


def draw(case):
    rows, columns, log_scale, seed = case
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator, dtype=F64) * 10**log_scale
    deficient = seed % 3 == 0 and min(rows, columns) > 1
    return torch.outer(w[:, 0], w[0]) if deficient else w


@given(matrices)
def test_theorem_35_has_no_counterexample(case):
    w = draw(case)
    found = theorem35(w)
    assert kappa(w + found.correction) == near(found.value, 1e-9)
    assert found.value <= 2 and found.strictly_less == (found.value < 2)


@given(matrices, st.floats(0.01, 100))
def test_corrected_theorem_38_has_no_counterexample(case, ratio):
    w = draw(case)
    before, lam = kappa(w), ratio * float(sigma(w)[0])
    found = theorem38(w, lam)
    assert not found.contradicted
    if found.applies and not math.isinf(before):
        assert max(found.value, found.observed) < before * (1 + 1e-9)
        assert lam > float(sigma(w)[0]) * (before + 1) / (before - 1) * (1 - 1e-9)


def test_random_search_contradicts_the_printed_theorem_38_only():
    wrong = applicable = 0
    for _ in range(1000):
        a = torch.randn(3, 3, dtype=F64) * 10 ** float(torch.empty(()).uniform_(-1, 1))
        lam = 2 + 10 * float(torch.rand(()))
        printed, corrected = theorem38_printed(a, lam), theorem38(a, lam)
        wrong, applicable = wrong + printed.contradicted, applicable + corrected.applies
        assert not corrected.contradicted and not (corrected.applies and printed.contradicted)
    assert wrong > 5 and applicable > 50


def test_weight_theorems_leave_the_zero_matrix_out():
    zero = torch.zeros(2, 3, dtype=F64)
    found = theorem35(zero)
    assert math.isnan(found.value) and not found.correction.any() and not theorem38(zero, 5.0).applies


def test_saturation_rule():
    # Section 8.1: at d = 64, s = 1/8, N = 197 the gap is 32 at lam = 2 and 800 at lam = 10; lam = 1 still attends.
    gaps = {lam: saturation(lam, head_dim=64, num_tokens=197) for lam in (1.0, 2.0, 10.0)}
    assert [g.value for g in gaps.values()] == [8.0, 32.0, 800.0]
    assert [g.saturates for g in gaps.values()] == [False, True, True]
    assert gaps[1.0].threshold == near(math.log(197) + 5)
    assert saturation(10.0, head_dim=16, num_tokens=16, scale=0.25).value == 400.0
    with pytest.raises(HypothesisError, match="s > 0"):
        saturation(1.0, head_dim=4, num_tokens=8, scale=0.0)
    assert saturation(1.0, head_dim=4, num_tokens=1, strict=False).saturates is None
