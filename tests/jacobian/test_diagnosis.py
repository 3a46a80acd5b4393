import math

import pytest
import torch

from jacobian.test_solve import causal
from wellcond.jacobian.diagnosis import attention_statistics, block_norms, diagnose_head
from wellcond.jacobian.factors import build_factors
from wellcond.jacobian.head import Head
from wellcond.jacobian.softmax import dense_jacobian

F64 = torch.float64


def hadamard(order):
    h = torch.ones(1, 1, dtype=F64)
    for _ in range(order):
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=F64), h)
    return h


@pytest.mark.parametrize("g", [1, 3])
def test_block_norms_are_those_of_the_dense_blocks(g):
    torch.manual_seed(0)
    head = Head(torch.randn(5, 7), torch.randn(g, 3, 7), torch.randn(3, 6), torch.randn(4, 6), 0.6, y=torch.randn(8, 6))
    dense = [float(torch.linalg.matrix_norm(j, 2)) for j in dense_jacobian(head).values()]
    assert block_norms(build_factors(head)) == pytest.approx(dense, rel=1e-8)


@pytest.mark.parametrize(
    "lam, norm, dead",
    [(0.5, 0.5541549861, False), (1, 2.885509451, False), (2, 1.152356e-4, True), (10, 4.9028e-170, True)],
)
def test_T13_a_saturated_head_is_dead_not_well_conditioned(lam, norm, dead):
    w = lam * torch.eye(16, dtype=F64)
    found = diagnose_head(Head(hadamard(4), w, w, w, 0.25))
    assert (found.norm_q, found.norm_k) == pytest.approx((norm, norm), rel=1e-4)
    assert found.dead is dead and (found.verdict == "dead head") is dead
    assert found.attention.diagonal_mass == pytest.approx(1 / (1 + 15 * math.exp(-4 * lam**2)), rel=1e-9)
    if dead:
        assert "attends to itself" in found.explanation


def test_uniform_attention_statistics():
    x, zero = torch.randn(8, 4), torch.zeros(2, 4)
    s = attention_statistics(Head(x, zero, zero, zero, 1.0))
    assert s.entropy == pytest.approx(math.log(8)) and s.normalised_entropy == pytest.approx(1.0)
    assert s.diagonal_mass == pytest.approx(1 / 8) == s.max_probability
    s = attention_statistics(Head(x, zero, zero, zero, 1.0, mask=causal(8)))
    assert s.normalised_entropy == pytest.approx(1.0)  # uniform over what each token may see
    s = attention_statistics(Head(x, zero, zero, zero, 1.0, y=torch.randn(3, 4)))
    assert math.isnan(s.diagonal_mass)


def test_the_verdict_names_the_culprit():
    torch.manual_seed(0)
    w = 0.3 * torch.randn(3, 4, 12, dtype=F64)
    x = torch.randn(6, 12, dtype=F64)
    dependent = x.clone()
    dependent[5] = dependent[4] + 1e-7 * dependent[5]
    assert diagnose_head(Head(dependent, *w, 0.5)).verdict in ("X", "P")
    assert diagnose_head(Head(dependent, *w, 0.5)).kappa_x > 1e6
    flat = diagnose_head(Head(x, 1e-3 * w[0], 1e-3 * w[1], w[2], 0.5))
    assert flat.verdict == "P" and "attend alike" in flat.explanation
    tilted = diagnose_head(Head(x, 1e4 * w[0], 1e-4 * w[1], w[2], 0.5))
    assert tilted.verdict == "norms"
