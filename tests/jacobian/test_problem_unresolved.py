"""A condition number is infinite only where the rank is deficient; what a squared matrix loses is found or enclosed."""

import math

import pytest
import torch
from timm.models.xcit import XCA

import wellcond as wc
from wellcond.jacobian.problem import union_condition_number

F64 = torch.float64


def graded(rows, columns, decades, seed=0):
    """Tokens with singular values from 1 to 10 ** -decades."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(side, rows, generator=generator, dtype=F64)).Q for side in (rows, columns)
    )
    return (left * torch.logspace(0, -decades, rows, dtype=F64)) @ right.T


def weights(count=3, head_dim=4, width=12):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(head_dim, width, generator=generator, dtype=F64) for _ in range(count)]


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("tokens", "decades"), [(16, 0), (16, 3), (16, 5), (8, 4)])
def test_cross_covariance_beyond_what_squaring_resolves(tokens, decades, biases):
    """At 3 decades with biases, and at 5, the Cholesky factorisation of J J^T breaks down."""
    torch.manual_seed(0)
    model, x = XCA(24, num_heads=2, qkv_bias=True).double(), graded(tokens, 24, decades)[None]
    head, exact = (
        wc.measure(model, x, heads=[1], method=method, biases=biases).layers[0].heads[0].jacobian
        for method in ("cholesky", "gram")
    )
    assert head.status == exact.status == "exact" and head.rank == exact.rank == head.shape[0]
    assert head.condition_number == pytest.approx(exact.condition_number, rel=1e-6)
    assert head.smallest_kappa <= head.condition_number <= head.largest_kappa < 2 * head.condition_number
    assert ("triangular" in head.reason) == (head.condition_number > 1e5) and not head.why_not_finite


def unresolved():
    return wc.jacobian_spectrum(graded(6, 12, 7), *weights(), method="cholesky")


def test_a_plain_head_that_is_not_resolved_has_an_interval_and_no_number():
    exact = wc.jacobian_spectrum(graded(6, 12, 7), *weights(), method="gram")
    found = unresolved()
    assert exact.status == "exact" and math.isfinite(exact.condition_number)
    assert math.isnan(found.condition_number) and math.isnan(found.pseudo_condition_number) and not found.nullity
    assert found.smallest_kappa <= exact.condition_number <= found.largest_kappa
    assert found.why_not_finite.startswith("not resolved: at least ") and "broke down" in found.reason
    assert "kappa nan" in repr(found)


def test_what_does_not_fit_is_enclosed_as_well():
    x, (w_q, w_k, w_v) = graded(40, 64, 7), weights(head_dim=8, width=64)
    exact = wc.jacobian_spectrum(x, w_q, w_k, w_v)
    found = wc.jacobian_spectrum(x, w_q, w_k, w_v, method="gram", memory_limit=11_000_000)
    assert "too large" in found.reason and math.isnan(found.condition_number)
    assert found.smallest_kappa <= exact.condition_number <= found.largest_kappa


def test_a_deficient_rank_is_infinite():
    x = graded(6, 12, 1)
    twice = torch.cat([x, x[:1]])
    found = wc.jacobian_spectrum(twice, *weights())
    assert found.nullity and found.condition_number == math.inf and found.why_not_finite.startswith("rank ")


def test_a_layer_with_an_unresolved_head_is_not_known():
    fine = wc.jacobian_spectrum(graded(6, 12, 0), *weights())
    assert math.isnan(union_condition_number([fine, unresolved()]))
    assert math.isnan(union_condition_number([unresolved(), fine], "pseudo"))
