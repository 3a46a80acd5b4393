"""Both ends of a spectrum: a float32 factor is as right as float64, or said not to be used; triangles have the rank."""

import math

import pytest
import torch

from wellcond.jacobian import problem
from wellcond.jacobian.ends import factorise_, least_singular_value, no_eigenvalue_below, solve_float32
from wellcond.jacobian.factors import build_factors, explicit_jacobian
from wellcond.jacobian.gauge import parameter_steps
from wellcond.jacobian.head import Head
from wellcond.jacobian.softmax import SoftmaxJacobian
from wellcond.jacobian.solve import operator_spectrum

F64 = torch.float64


def make_head(tokens, width, d, *, spread=0.0, groups=1, bias=False, seed=0):
    """Layer-normed tokens whose singular values fall by 10^-spread: kappa(J) grows with it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64)

    x = torch.nn.functional.layer_norm(normal(tokens, width), (width,))
    left, sigma, right = torch.linalg.svd(x, full_matrices=False)
    x = (left * sigma * torch.logspace(0, -spread, len(sigma), dtype=F64)) @ right
    w_q, w_k, w_v = normal(groups, d, width), normal(d, width), normal(d, width)
    return Head(
        x * math.sqrt(x.numel()) / x.norm(), w_q / width**0.5, w_k / width**0.5, w_v / width**0.5, d**-0.5,
        b_q=normal(groups, d) if bias else None, b_k=normal(d) if bias else None,
    )  # fmt: skip


@pytest.fixture
def small_heads(monkeypatch):
    """Sizes of a test take the routes of large heads."""
    monkeypatch.setattr(problem, "SMALLEST_FLOAT32", 100)
    monkeypatch.setattr(problem, "LARGEST_FULL_SVD", 100)


@pytest.mark.parametrize("weight, spread, power", [
    (3.0, 0.0, 1), (None, 1.0, 3), (None, 3.0, 5), (None, 6.0, 8),
])  # fmt: skip
def test_right_at_every_condition_number_or_not_said_to_be(weight, spread, power, small_heads):
    head = make_head(48, 64, 16, spread=spread)
    if weight is not None:  # every token attends to itself
        head = Head(head.x, *(weight * torch.eye(16, 64, dtype=F64) for _ in range(3)), head.scale)
    true = torch.linalg.svdvals(torch.linalg.qr(explicit_jacobian(build_factors(head)).T, mode="r").R)
    kappa = float(true[0] / true[-1])
    assert 10 ** (power - 0.6) < kappa < 10 ** (power + 0.6)
    found = operator_spectrum(SoftmaxJacobian(head), method="cholesky")
    assert found.sigma_max == pytest.approx(float(true[0]), rel=1e-8)
    assert found.sigma_rank_bounds[0] <= true[-1] * (1 + 1e-9)
    assert true[-1] <= found.sigma_rank_bounds[1] * (1 + 1e-9)
    if kappa <= 1e5:
        assert found.status == "exact" and found.sigma_min == pytest.approx(float(true[-1]), rel=1e-6)
    else:
        assert found.status != "exact" and found.reason.endswith("float64 factor")
    if kappa <= 2e4:
        assert found.reason.endswith("float32 factor, float64 products")
        assert found.sigma_min == pytest.approx(float(true[-1]), rel=1e-8)


def test_steps_that_run_out_are_not_taken_for_a_result():
    side = SoftmaxJacobian(make_head(48, 64, 16, spread=3.0)).gram().steps()
    least = least_singular_value(side, 38.0, max_steps=3)
    assert least.value is None and least.reason == "the float32 factor did not lead there in 3 steps"


# More tokens than the width: J^T J is smaller, tokens span width - 1, and the gauge is its null space.
@pytest.mark.parametrize("groups, bias", [(1, False), (2, False), (1, True), (2, True)])
def test_ends_of_a_rank_deficient_jacobian_are_those_of_all_its_singular_values(groups, bias, small_heads):
    form = SoftmaxJacobian(make_head(100 * groups, 12, 8, groups=groups, bias=bias))
    every = operator_spectrum(form, method="gram")
    ends = operator_spectrum(form)
    assert every.singular_values is not None and ends.singular_values is None
    assert "proved by a factorisation" in ends.reason and ends.status == every.status == "exact"
    assert (ends.rank, ends.nullity, ends.sigma_min) == (every.rank, every.nullity, 0.0)
    assert ends.sigma_max == pytest.approx(every.sigma_max, rel=1e-9)
    assert ends.sigma_rank == pytest.approx(every.sigma_rank, rel=1e-8)
    low, high = ends.sigma_rank_bounds
    assert low <= every.sigma_rank * (1 + 1e-9) and every.sigma_rank <= high * (1 + 1e-9)
    assert high - low <= 1e-6 * high


def test_ends_of_a_jacobian_of_full_row_rank(small_heads):
    form = SoftmaxJacobian(make_head(48, 64, 16))
    every, ends = operator_spectrum(form, method="gram"), operator_spectrum(form)
    assert "proved by a factorisation" in ends.reason
    assert ends.condition_number == pytest.approx(every.condition_number, rel=1e-8)


def test_a_null_space_beyond_the_gauge_is_left_to_all_eigenvalues(small_heads):
    # Equal keys: attention is uniform and J_Q = 0, which the structure does not know.
    head = make_head(60, 12, 8)
    form = SoftmaxJacobian(Head(head.x, head.w_q, 0 * head.w_k, head.w_v, head.scale))
    found = operator_spectrum(form)
    assert "proved" not in found.reason and found.rank < form.rank_bound().rank


@pytest.mark.parametrize("groups, bias", [(1, False), (3, False), (1, True), (2, True)])
def test_null_directions_are_lifted_and_nothing_else_moves(groups, bias):
    head = make_head(40, 12, 5, groups=groups, bias=bias)
    side = parameter_steps(head, build_factors(head))
    jacobian = explicit_jacobian(side.factors)
    _, values, vectors = torch.linalg.svd(jacobian)
    null = vectors[side.size - side.num_null :]
    assert (jacobian @ null.T).abs().max() < 1e-12 and values[-side.num_null - 1] > 1e-3
    expected = jacobian.T @ jacobian + 4 * null.T @ null
    least = float(torch.linalg.eigvalsh(expected)[0])
    of_values = side.factors.py.shape[1] * side.factors.m.shape[1]
    whole = expected - 0.9 * least * torch.eye(side.size, dtype=F64)
    blocks = whole.tensor_split([side.size - of_values])
    (a, b), (_, c) = (block.tensor_split([side.size - of_values], 1) for block in blocks)
    torch.testing.assert_close(side.shifted(2.0, 0.9 * least).tril(), (a - b @ torch.linalg.solve(c, b.T)).tril())
    assert no_eigenvalue_below(side, 2.0, least * (1 - 1e-6))
    assert not no_eigenvalue_below(side, 2.0, least * (1 + 1e-6))
    assert side.shifted(2.0, 10 * float(torch.linalg.eigvalsh(c)[0]) + 10 * least) is None
    torch.testing.assert_close(side.lower_float32(2.0).tril(), (expected / 4).tril().float(), rtol=1e-4, atol=1e-5)
    w = torch.randn(3, side.size, dtype=F64)
    torch.testing.assert_close(side.scaled_matmat(w, 2.0), w @ expected / 4)
    torch.testing.assert_close(side.matmat(w), w @ jacobian.T @ jacobian)


def test_float32_factor_in_place_and_solves():
    a = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    gram = a @ a.T
    factor = gram.clone()
    assert factorise_(factor)
    rows = torch.randn(3, 40, dtype=F64) * 1e-60  # beyond the range of float32
    expected = torch.linalg.solve(gram.double(), rows.T).T
    torch.testing.assert_close(solve_float32(factor, rows) * 1e60, expected * 1e60, rtol=1e-3, atol=1e-3)
    assert not factorise_(-gram)
