"""The frame: what a head refuses, records and their errors, the spectrum of Lambda against an eigenvalue routine."""

import math

import pytest
import torch

import wellcond.jacobian.diagnosis as bounds
import wellcond.jacobian.factors as factors_module
from theory import cases
from theory.reference import F64, head, lambda_hat, softmax_jacobian, tensor
from wellcond.errors import HypothesisError, UnknownChoiceError, WeightError, WellcondError
from wellcond.jacobian.factors import build_factors
from wellcond.theory import (
    Head,
    exact_case,
    kappa_bound,
    lower_bound,
    norm_upper_bound,
    papers_bound,
    softmax_spectrum,
    upper_bound,
)


def test_outside_its_hypotheses_a_bound_raises_with_its_numbers():
    with pytest.raises(HypothesisError) as caught:
        lower_bound(cases.g2())
    assert isinstance(caught.value, WellcondError) and isinstance(caught.value, ValueError)
    assert "N = rank X (N = 5, rank X = 2)" in str(caught.value) and "strict=False" in str(caught.value)
    record = lower_bound(cases.g2(), strict=False)
    assert record.value is None and not record.applies and caught.value.statement == record
    for statement in (kappa_bound, exact_case):
        assert statement(cases.g2(), strict=False).value is None


def test_the_stack_needs_equal_head_dimensions():
    h = head(cases.G1_X, cases.G1_WQ, cases.G1_WK, [[1], [0], [1], [2]], 1.0)
    for statement in (lower_bound, upper_bound, norm_upper_bound, kappa_bound):
        with pytest.raises(HypothesisError, match="dv = d"):
            statement(h, convention="stack")
        assert statement(h).value > 0
    with pytest.raises(UnknownChoiceError, match="'wide', 'stack'"):
        upper_bound(h, convention="tall")


def test_records_are_frozen_and_say_what_they_bound():
    bound = upper_bound(cases.g1())
    with pytest.raises(AttributeError):
        bound.value = 1.0
    assert (bound.quantity, bound.relation) == ("sigma_max(J)^2", "<=") and bound.parts


def test_heads_refuse_what_has_no_probabilities():
    x, w = torch.randn(3, 2), torch.randn(1, 2)
    with pytest.raises(ValueError, match="expected x"):
        Head(x, w, w, torch.randn(1, 3), 1.0)
    with pytest.raises(ValueError, match="expected matrices"):
        Head(x, w[0], w, w, 1.0)
    with pytest.raises(ValueError, match="expected mask of shape"):
        Head(x, w, w, w, 1.0, torch.zeros(2, 2))
    with pytest.raises(WeightError, match="masked|-inf throughout"):
        Head(x, w, w, w, 1.0, torch.full((3, 3), -torch.inf))
    with pytest.raises(WeightError, match="finite"):
        Head(x * torch.nan, w, w, w, 1.0)


def test_heads_are_float64_without_gradient():
    h = cases.g1()
    same = Head(*(t.float().requires_grad_() for t in (h.x, h.w_q, h.w_k, h.w_v)), h.scale)
    assert same.x.dtype is F64 and not same.x.requires_grad
    for statement in (lower_bound, upper_bound, papers_bound):
        assert statement(same).value == pytest.approx(statement(h).value, rel=1e-12)


def test_blocks_do_not_depend_on_the_chunks(monkeypatch):
    h = cases.g2()
    p, v = h.probabilities()[0], h.values()
    for chunk_bytes in (factors_module.CHUNK_BYTES, 1):  # all rows at once, and one by one
        monkeypatch.setattr(factors_module, "CHUNK_BYTES", chunk_bytes)
        blocks = build_factors(h)
        for z, found in ((h.keys(), blocks.m), (h.x, blocks.b)):
            expected = torch.stack([h.scale * v.T @ softmax_jacobian(row) @ z for row in p])
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_lambda_spectrum_agrees_with_an_eigenvalue_routine(seed, causal):
    torch.manual_seed(seed)
    n = 7
    mask = torch.full((n, n), -torch.inf, dtype=F64).triu(1) if causal else None
    h = head(torch.randn(n, 4, dtype=F64), *torch.randn(3, 4, 3, dtype=F64), 0.5, mask)
    found = softmax_spectrum(h)
    for i, row in enumerate(h.probabilities()[0]):
        row = row[row > 0]
        eigenvalues = torch.linalg.eigvalsh(softmax_jacobian(row))
        assert int(found.rank[i]) == len(row) - 1
        if len(row) > 1:
            assert float(found.log_max[i].exp()) == pytest.approx(float(eigenvalues[-1]), rel=1e-11)
            assert float(found.log_min[i].exp()) == pytest.approx(float(eigenvalues[1]), abs=1e-14)
    assert found.norm == pytest.approx(float(torch.linalg.svdvals(lambda_hat(h.probabilities()[0]))[0]), rel=1e-11)


def test_lambda_spectra_of_several_heads_are_those_of_each(monkeypatch):
    torch.manual_seed(0)
    mask = torch.full((5, 5), -torch.inf, dtype=F64).triu(1)
    x, weights = torch.randn(5, 4, dtype=F64), torch.randn(3, 3, 4, 3, dtype=F64)
    heads = [head(x, *w, 0.5, m) for w, m in zip(weights, (mask, mask.T, torch.zeros_like(mask)), strict=True)]
    for entries in (bounds.SECTION_ENTRIES, 1):  # all at once, and one by one
        monkeypatch.setattr(bounds, "SECTION_ENTRIES", entries)
        for found, one in zip(bounds.softmax_spectra(heads), map(softmax_spectrum, heads), strict=True):
            assert found.rank.tolist() == one.rank.tolist()
            torch.testing.assert_close(found.log_max, one.log_max, rtol=1e-14, atol=0)
            torch.testing.assert_close(found.log_min, one.log_min, rtol=1e-14, atol=0)


def test_lambda_spectrum_survives_ties_and_underflow():
    uniform = Head(*[torch.eye(3)] * 4, 0.0)
    assert softmax_spectrum(uniform).log10_kappa == pytest.approx(0.0, abs=1e-14)
    assert softmax_spectrum(uniform).norm == pytest.approx(1 / 3, rel=1e-14)
    # Two tokens: the eigenvalue is 2 p (1 - p), in closed form at any gap.
    for gap in (1.0, 40.0, 700.0, 5000.0):
        h = Head(tensor([[1], [0]]), tensor([[gap]]), tensor([[1]]), tensor([[1]]), 1.0)
        closed = math.log(2) - gap - 2 * math.log1p(math.exp(-gap))
        assert float(softmax_spectrum(h).log_min[0]) == pytest.approx(closed, rel=1e-14)
    assert softmax_spectrum(h).norm == 0.5


def test_papers_bound_overflows_to_infinity_and_keeps_its_logarithm():
    bound = papers_bound(cases.two_tokens(40, 40, 1))
    assert bound.value == math.inf == bound.kappa_lambda
    assert bound.log10 == pytest.approx(math.log10(2) + 1600 / math.log(10), rel=1e-9)


def test_papers_bound_needs_its_factors():
    zero = head([[1], [2]], [[0]], [[1]], [[1]], 1.0)
    with pytest.raises(HypothesisError, match="not zero"):
        papers_bound(zero)
    with pytest.raises(HypothesisError, match="two or more"):
        papers_bound(Head(*[torch.ones(1, 1)] * 4, 1.0))
    record = papers_bound(zero, strict=False)
    assert record.value is None and record.log10 is None and math.isnan(record.kappa_q)
