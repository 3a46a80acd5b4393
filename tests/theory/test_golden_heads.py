"""Section 12, the heads: T2 to T7, T12, T13, G1, G2, G3. Every J is by automatic differentiation."""

import math

import pytest
import torch

from theory import cases
from theory.papers import sigma_min_upper_bound
from theory.reference import (
    blocks,
    kappa,
    rank,
    row_form,
    sigma,
    stack,
    tensor,
    wide,
)
from wellcond.linalg.spectrum import spectrum
from wellcond.theory import (
    exact_case,
    kappa_bound,
    lower_bound,
    norm_upper_bound,
    papers_bound,
    softmax_spectrum,
    structural_ranks,
    upper_bound,
)


def near(value, rel=1e-9):
    return pytest.approx(value, rel=rel, abs=0.0)


def test_T3_scaling_family():
    expected = {1: 11.41615132, 10: 4.328930497, 100: 12.30791168, 1e3: 120.4968125, 1e4: 1204.711568}
    for t, expected_kappa in expected.items():
        h = cases.scaling_family(t)
        assert papers_bound(h).value == near(29.16680024)
        assert kappa(wide(h)) == near(expected_kappa, 1e-7)
        assert rank(blocks(h)[1]) == structural_ranks(h).ranks.key == 1


def test_T4_spectra_of_G1():
    h = cases.g1()
    p = [[0.140029245, 0.5759753452, 0.2839954097], [1 / 3] * 3, [0.08794873878, 0.7336811065, 0.1783701547]]
    torch.testing.assert_close(h.probabilities()[0], tensor(p), rtol=1e-9, atol=0)
    assert sigma(wide(h)).tolist() == [
        near(s) for s in (3.103644745, 1.816294001, 1.400224125, 1.155349006, 0.6149469127, 0.1192922252)
    ]
    assert kappa(wide(h)) == near(26.01715862)
    stacked = sigma(stack(h))
    expected = (2.893019868, 1.745541643, 1.654719259, 1.186222947, 1.014156466, 0.1707929554)
    assert stacked[:6].tolist() == [near(s) for s in expected] and stacked[6:].max() < 1e-14
    assert spectrum(stack(h)).pseudo_condition_number == near(16.93875407)
    parts = blocks(h)
    assert [float(sigma(j)[0]) for j in parts] == [near(2.4931075, 1e-8), near(1.890186556), near(1.148771619)]
    assert [rank(j) for j in (*parts, wide(h), stack(h))] == [6, 4, 6, 6, 6]
    ranks = structural_ranks(h).ranks
    assert [ranks.query, ranks.key, ranks.value, ranks.wide, ranks.stack] == [6, 4, 6, 6, 6]


def test_T4_bounds_of_G1():
    h = cases.g1()
    bound = papers_bound(h)
    assert (bound.kappa_x, bound.kappa_q, bound.kappa_k) == (near(2), near(1.618033989), near(1.618033989))
    assert (bound.kappa_v, bound.kappa_p) == (near(math.sqrt(2)), near(22.04378249))
    assert (bound.kappa_lambda, bound.value) == (near(3.544466782), near(173.8573339))
    assert 10**bound.log10 == near(bound.value)
    assert lower_bound(h).value == near(0.002849003383) and upper_bound(h).value == near(12.33883401)
    assert norm_upper_bound(h).value == near(216.1788676) and softmax_spectrum(h).norm == near(0.3932557081)
    assert norm_upper_bound(h, lambda_norm="half").value == near(348.6509392)
    assert kappa_bound(h).value == near(65.80980113)
    assert float(sigma(h.probabilities()[0] @ h.x)[-1]) == near(0.05084155384)
    assert sigma_min_upper_bound(h) == near(0.136348443, 4e-9)


def test_T4_causal_mask_on_G1():
    h = cases.g1(causal=True)
    bound = papers_bound(h)
    assert (kappa(wide(h)), float(sigma(wide(h))[-1])) == (near(19.05601996), near(0.1433031803))
    assert (bound.kappa_lambda, bound.kappa_p, bound.value) == (near(4.506567495), near(12.82950956), near(190.6531518))
    assert [rank(j) for j in blocks(h)] == [3, 2, 6]
    assert (lower_bound(h).value, upper_bound(h).value) == (near(0.01334486111), near(19.60728536))


def test_G2_more_tokens_than_a_full_row_rank_allows():
    h = cases.g2()
    s = sigma(wide(h))
    assert rank(wide(h)) == structural_ranks(h).ranks.wide == 8
    assert (float(s[0]), float(s[7]), float(s[0] / s[7])) == (near(3.867627819), near(0.05514428172), near(70.1365164))
    expected = (3.903690119, 3.241889184, 1.022428602, 0.8270396445)
    assert sigma(stack(h)).tolist() == [near(v) for v in expected]
    low, up = lower_bound(h, convention="stack").value, upper_bound(h, convention="stack").value
    assert (low, up) == (near(0.2099543456), near(20.6536575))
    assert kappa(stack(h)) == near(4.720076172)
    assert kappa_bound(h, convention="stack").value == near(9.918272846)
    assert papers_bound(h).value == near(1300.369025)


def test_G3_exact_case():
    h = cases.g3()
    s = sigma(wide(h))
    assert s.tolist() == [near(v) for v in (3.188317488, 1.689689437, 1.065010709, 0.7711878382)]
    assert exact_case(h).value == near(0.7711878382)


def test_T5_closed_form_of_the_papers_bound():
    for (wq, wk), expected in {(1, 1): 3.313035285, (2, 1): 3.037314721, (0.5, 1): 4.163953414}.items():
        value = papers_bound(cases.two_tokens(wq, wk, 1, x=(1, -1))).value
        assert value == near(expected) and value == near(2 + 1 / math.tanh(wq * wk))
    for lam, expected in {1: 12.96494351, 2: 216.634845, 3: 32410.33738, 10: 5.376234284e43}.items():
        assert papers_bound(cases.two_tokens(lam, lam, lam)).value == near(expected)


def test_T7_stack_counterexamples():
    first, second, third = cases.stack_counterexamples()
    bound = papers_bound(first)
    assert sigma(stack(first)).tolist() == [near(161.836852, 1e-8), near(1.993489157, 1e-6)]
    assert (bound.kappa_x, bound.kappa_q) == (near(1.000805938), near(1))
    assert (bound.kappa_lambda, bound.kappa_p) == (near(3.534827503), near(15.51872647))
    assert kappa_bound(first, convention="stack").value == near(328.5994485, 1e-6)
    expected = ((81.18270994, 22.61799551, 1e-9), (763445.2, 10202.527, 1e-6), (873.30904, 272.19971, 1e-7))
    for h, (kappa_j, bound, rel) in zip((first, second, third), expected, strict=True):
        assert rank(stack(h)) == stack(h).shape[1]
        assert (kappa(stack(h)), papers_bound(h).value) == (near(kappa_j, max(rel, 1e-6)), near(bound, rel))
        assert papers_bound(h).value < kappa(stack(h)) <= kappa_bound(h, convention="stack").value
    assert kappa_bound(second, convention="stack").value == near(788829.6, 1e-6)


def test_all_forms_of_the_jacobian_agree():
    for h in (cases.g1(), cases.g2(), cases.g3(), cases.g1(causal=True), *cases.stack_counterexamples()):
        for fast, automatic in zip(row_form(h), blocks(h), strict=True):
            torch.testing.assert_close(fast, automatic, rtol=1e-12, atol=1e-13 * float(wide(h).abs().max()))
