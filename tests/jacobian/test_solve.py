"""The numerical core on tensors: every method against automatic differentiation, and the numbers of the theory."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jacobian.operators import F64, causal, check_operator, random_heads, tensor
from wellcond.errors import MemoryLimitError, UnknownChoiceError, WeightError
from wellcond.jacobian.factors import build_factors, explicit_jacobian, parameter_gram
from wellcond.jacobian.head import Head
from wellcond.jacobian.problem import Problem
from wellcond.jacobian.softmax import SoftmaxJacobian, dense_jacobian, stacked_jacobian
from wellcond.jacobian.solve import SOLVERS, choose, operator_spectrum
from wellcond.jacobian.spectrum import jacobian_spectrum

G1 = {
    "x": tensor([[1, 0, 0, 1], [0, 1, 0, -1], [0, 0, 1, 1]]),
    "w_q": tensor([[1, 0], [0, 1], [1, -1], [0, 1]]).T,
    "w_k": tensor([[0, 1], [1, 0], [1, 1], [-1, 0]]).T,
    "w_v": tensor([[1, -1], [0, 2], [1, 0], [1, 1]]).T,
}
G2 = {
    "x": tensor([[1, 0], [0, 1], [1, 1], [1, -1], [2, 1]]),
    "w_q": tensor([[1, 0], [1, 1]]).T,
    "w_k": tensor([[0, 1], [1, -1]]).T,
    "w_v": tensor([[1, 1], [0, 1]]).T,
}
METHODS = ["dense", "gram", "cholesky", "implicit"]


@given(random_heads(), st.booleans())
def test_a_plain_head_is_an_operator(head, biases):
    """Products, matrices on both sides, bounds, and the closed form of sigma_min where there is one."""
    dense = torch.cat(list(dense_jacobian(head, biases=biases).values()), 1)
    operator = SoftmaxJacobian(head, biases)
    sigma = check_operator(operator, dense)
    v, rounding = torch.linspace(-1, 1, dense.shape[1], dtype=F64), 1e-12 * float(sigma[0])
    torch.testing.assert_close(operator.matvec(v), dense @ v, rtol=0, atol=1e-11 * float(dense.norm() * v.norm()))
    columns = torch.linalg.eigvalsh(parameter_gram(operator.factors))
    k = min(len(columns), len(sigma))
    torch.testing.assert_close(columns[-k:], (sigma**2).flip(0)[-k:], rtol=0, atol=rounding * float(sigma[0]) + 1e-300)
    smallest = float(sigma[-1]) if len(sigma) == head.num_outputs else 0.0
    lower, upper = operator.bounds()
    assert lower <= smallest * (1 + 1e-9) + rounding and upper >= float(sigma[0]) * (1 - 1e-12)
    interval = operator.closed_minimum()
    if interval is not None and len(sigma) == head.num_outputs:
        assert interval[0] - rounding <= smallest <= interval[1] + rounding


def test_the_stack_is_an_operator():
    operator = stacked_jacobian(SoftmaxJacobian(Head(**G1, scale=2**-0.5)))
    dense = torch.cat(list(dense_jacobian(operator.head).values()))
    v, u = (torch.linspace(-1, 1, size, dtype=F64) for size in (dense.shape[1], dense.shape[0]))
    torch.testing.assert_close(operator.matvec(v), dense @ v)
    torch.testing.assert_close(operator.rmatvec(u), dense.T @ u)
    assert operator.shape == tuple(dense.shape)
    squares = torch.linalg.svdvals(dense).square().flip(0)[-6:]  # of compressed tokens: 3 dimensions of 4
    torch.testing.assert_close(torch.linalg.eigvalsh(operator.gram().matrix()), squares)
    found = operator_spectrum(operator, convention="stack")
    assert (found.rank, found.nullity) == (6, 2) and "outside the span" in found.null_space
    assert found.pseudo_condition_number == pytest.approx(16.93875407, rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_T04_golden_head(method):
    """Plain, causal with both kinds of masks, and with biases."""
    s = jacobian_spectrum(**G1, method=method)
    assert s.shape == (6, 24) and s.rank == 6 and s.nullity == 0 and s.status == "exact"
    assert (s.sigma_max, s.sigma_min) == pytest.approx((3.103644745, 0.1192922252), rel=1e-9)
    if s.singular_values is not None:
        expected = [3.103644745, 1.816294001, 1.400224125, 1.155349006, 0.6149469127, 0.1192922252]
        assert s.singular_values == pytest.approx(expected, rel=1e-9)
    for mask in (causal(3), causal(3) == 0):
        s = jacobian_spectrum(**G1, mask=mask, method=method)
        assert (s.condition_number, s.sigma_min) == pytest.approx((19.05601996, 0.1433031803), rel=1e-9)
    s = jacobian_spectrum(**G1, biases=(tensor([0.5, -0.5]), tensor([1, 2]), tensor([0, 1])), method=method)
    assert (s.sigma_max, s.sigma_min) == pytest.approx((3.328662303, 0.04878559476), rel=1e-9)


def test_G2_names_its_null_space():
    s = jacobian_spectrum(**G2)
    assert (s.rank, s.nullity, s.shape) == (8, 2, (10, 12)) and s.condition_number == math.inf
    assert s.null_space == "gauge (W_Q E, -W_K E^T): 4"
    assert (s.sigma_max, s.sigma_rank) == pytest.approx((3.867627819, 0.05514428172), rel=1e-9)
    assert s.kappa("pseudo") == pytest.approx(70.1365164, rel=1e-8)
    by_products = jacobian_spectrum(**G2, method="implicit")  # which do not pretend to know its lower end
    assert by_products.status == "estimate" and math.isnan(by_products.pseudo_condition_number)
    low, high = by_products.sigma_rank_bounds
    assert low <= s.sigma_rank <= high and by_products.sigma_max == pytest.approx(s.sigma_max, rel=1e-9)
    with pytest.raises(ValueError, match="full row rank"):
        jacobian_spectrum(**G2, method="cholesky")


@pytest.mark.parametrize("t, kappa", [(1, 753.488981), (10, 259.623987), (1e3, 18614.75582), (1e5, 1861402.108)])
@pytest.mark.parametrize("method", ["dense", "gram"])
def test_T02_two_tokens(t, kappa, method):
    x, one = tensor([[1], [2]]), tensor([[1]])
    s = jacobian_spectrum(x, one, one, t * one, scale=1.0, method=method)
    assert s.condition_number == pytest.approx(kappa, rel=1e-6)
    if method == "gram" and kappa > 1e5:
        assert "squaring loses the small ones" in s.reason


@pytest.mark.parametrize("lam, kappa", [(0.5, 10.35572493), (1, 1.680948668), (2, 1.000001801)])
def test_T13_saturation(lam, kappa):
    h = tensor([[1, 1], [1, -1]])
    x = torch.kron(torch.kron(h, h), torch.kron(h, h))
    w = lam * torch.eye(16, dtype=F64)
    assert jacobian_spectrum(x, w, w, w, scale=0.25).condition_number == pytest.approx(kappa, rel=1e-9)


@pytest.mark.parametrize("N, D, d", [pytest.param(32, 96, 32, marks=pytest.mark.slow), (24, 16, 8), (40, 8, 4)])
def test_methods_agree_with_dense(N, D, d):
    torch.manual_seed(N)
    x = torch.nn.functional.layer_norm(torch.randn(N, D, dtype=F64), (D,))
    w = torch.randn(3, d, D, dtype=F64) / D**0.5
    dense = jacobian_spectrum(x, *w, method="dense") if N * d <= 512 else None
    gram = jacobian_spectrum(x, *w, method="gram")
    explicit = torch.linalg.svdvals(explicit_jacobian(build_factors(Head(x, *w, d**-0.5))))
    assert gram.sigma_max == pytest.approx(float(explicit[0]), rel=1e-9)
    assert gram.sigma_rank == pytest.approx(float(explicit[gram.rank - 1]), rel=1e-6)
    if dense is not None:
        assert dense.rank == gram.rank and dense.sigma_rank == pytest.approx(gram.sigma_rank, rel=1e-6)
    if gram.nullity == 0:
        for method in ("cholesky", "implicit"):
            other = jacobian_spectrum(x, *w, method=method)
            assert other.condition_number == pytest.approx(gram.condition_number, rel=1e-6)
            for bounds, value in ((other.sigma_rank_bounds, gram.sigma_rank), (other.sigma_max_bounds, gram.sigma_max)):
                assert bounds[0] * (1 - 1e-9) <= value <= bounds[1] * (1 + 1e-9)


def test_numerically_singular_is_said_not_guessed():
    # Two tokens that both attend to one other token: two equal rows of P, so J is singular to rounding.
    x = torch.randn(6, 12, dtype=F64)
    mask = torch.zeros(6, 6, dtype=F64)
    mask[:2, 0] = 1e4
    w = torch.randn(3, 4, 12, dtype=F64)
    exact = jacobian_spectrum(x, *w, mask=mask, method="dense")
    assert exact.rank < 24
    by_gram = jacobian_spectrum(x, *w, mask=mask, method="gram")
    assert (by_gram.rank, by_gram.condition_number) == (exact.rank, math.inf)
    assert by_gram.sigma_rank == pytest.approx(exact.sigma_rank, rel=1e-6)
    by_cholesky = jacobian_spectrum(x, *w, mask=mask, method="cholesky")
    assert by_cholesky.status != "exact"
    assert by_cholesky.sigma_rank_bounds[0] < 1e-12


def test_auto_is_a_table_that_can_be_asked():
    def ask(n, D, d, limit=10**11):
        head = Head(torch.randn(n, D), *torch.randn(3, d, D) * D**-0.5, d**-0.5)
        return choose(Problem(SoftmaxJacobian(head), memory_limit=limit))

    assert ask(24, 96, 32)[0].name == "gram"
    assert ask(197, 256, 64)[0].name == "cholesky"
    assert "full row rank" in ask(197, 256, 64)[1].reason
    assert ask(197, 256, 64, limit=200_000_000)[0].name == "products"
    assert ask(32, 96, 32)[0].name == "closed form"  # 1024 outputs, whose values span a constant
    with pytest.raises(MemoryLimitError, match="use fewer tokens"):
        ask(197, 256, 64, limit=1000)


@pytest.mark.parametrize("size, method, route", [
    ((24, 32, 8), "auto", "gram"), ((24, 32, 32), "auto", "gram"), ((32, 96, 32), "auto", "closed form"),
    ((24, 32, 8), "dense", "dense"), ((24, 32, 8), "cholesky", "cholesky"),
    ((24, 32, 8), "implicit", "exhaustive products"), ((60, 8, 4), "implicit", "products"),
])  # fmt: skip
def test_what_is_chosen_is_what_runs(size, method, route, monkeypatch):
    (n, D, d), ran = size, []
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=generator, dtype=F64) for shape in ((n, D), (3, d, D)))
    form = SoftmaxJacobian(Head(x, *w * D**-0.5, d**-0.5))
    solver, cost = choose(Problem(form, asked=method))
    watched = [
        dataclasses.replace(one, run=lambda tasks, one=one: ran.append(one.name) or one.run(tasks)) for one in SOLVERS
    ]
    monkeypatch.setattr("wellcond.jacobian.solve.SOLVERS", tuple(watched))
    found = operator_spectrum(form, method=method)
    assert ran == [solver.name] == [route]
    assert found.method == solver.method and found.reason.startswith(cost.reason)


def test_a_method_that_does_not_fit_names_the_bytes_and_what_would():
    x, w = torch.randn(64, 32), torch.randn(3, 16, 32)
    with pytest.raises(MemoryLimitError, match=r"'dense' needs about [\d,]+ bytes .* would fit: .*implicit"):
        jacobian_spectrum(x, *w, method="dense", memory_limit=10_000_000)
    with pytest.raises(UnknownChoiceError, match="'auto', 'dense', 'gram', 'cholesky', 'implicit'"):
        jacobian_spectrum(x, *w, method="svd")
    with pytest.raises(UnknownChoiceError, match="'wide', 'stack'"):
        jacobian_spectrum(x, *w, convention="tall")


def test_bad_input():
    x, w = torch.randn(4, 6), torch.randn(3, 2, 6)
    with pytest.raises(WeightError, match="x has NaN"):
        jacobian_spectrum(x * torch.nan, *w)
    with pytest.raises(ValueError, match=r"tokens \[2\] may attend to nothing"):
        jacobian_spectrum(x, *w, mask=torch.tensor([[True] * 4] * 2 + [[False] * 4] + [[True] * 4]))
    with pytest.raises(ValueError, match="w_k: expected 6 columns"):
        jacobian_spectrum(x, w[0], w[1][:, :5], w[2])
    with pytest.raises(ValueError, match="expected mask of shape"):
        jacobian_spectrum(x, *w, mask=torch.zeros(3, 4))
    with pytest.raises(ValueError, match="stacked convention is defined"):
        jacobian_spectrum(x, *w, kv_tokens=x, convention="stack")


def test_one_token_and_zero_weights():
    # One token attends to itself: P = 1, J_Q = J_K = 0, J_V = x (x) I.
    x = tensor([[3, 4]])
    s = jacobian_spectrum(x, *torch.randn(3, 2, 2, dtype=F64))
    assert s.rank == 2 and s.condition_number == pytest.approx(1.0) and s.sigma_max == pytest.approx(5.0)
    zero = jacobian_spectrum(tensor([[0, 0]]), *torch.randn(3, 2, 2, dtype=F64))
    assert zero.rank == 0 and math.isnan(zero.condition_number)


def test_half_precision_and_non_contiguous_tensors():
    x, w = torch.randn(6, 5).T.contiguous().T, torch.randn(3, 5, 2).transpose(1, 2)
    reference = jacobian_spectrum(x.bfloat16().double(), *w.bfloat16().double())
    assert jacobian_spectrum(x.bfloat16(), *w.bfloat16()).to_dict() == reference.to_dict()


def test_auto_uses_the_closed_form_for_large_heads_with_few_tokens(monkeypatch):
    calls, closed = [], SoftmaxJacobian.closed_minimum
    monkeypatch.setattr(SoftmaxJacobian, "closed_minimum", lambda self: calls.append(1) or closed(self))
    x = torch.nn.functional.layer_norm(torch.randn(40, 64, dtype=F64), (64,))
    w = 0.02 * torch.randn(3, 32, 64, dtype=F64)
    quick = jacobian_spectrum(x[:28], *w)
    assert quick.method == "implicit" and quick.status == "exact" and len(calls) == 1
    gram = jacobian_spectrum(x[:28], *w, method="gram")
    assert quick.condition_number == pytest.approx(gram.condition_number, rel=1e-7)
    assert quick.sigma_max == pytest.approx(gram.sigma_max, rel=1e-9)
    assert jacobian_spectrum(x, *w).method == "gram"  # more tokens than the head is wide


def test_dependent_tokens_get_no_positive_lower_bound():
    torch.manual_seed(0)
    x = torch.randn(6, 9, dtype=F64)
    x[-1] = x[0]
    assert SoftmaxJacobian(Head(x, *torch.randn(3, 2, 9, dtype=F64), 0.7)).hints.bounds()[0] == 0.0


def test_the_tables_of_a_parameter_gram_count_as_memory():
    x, w = torch.randn(2500, 256), torch.randn(3, 2, 256)
    with pytest.raises(MemoryLimitError, match="'gram' needs about"):
        jacobian_spectrum(x, *w, method="gram", memory_limit=200 * 2**20)
