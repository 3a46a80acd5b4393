"""Attention over channels against automatic differentiation, timm's modules, and T12 of the theory."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from jacobian.operators import F64, check_head, normals, numerical_rank, tensor
from wellcond.errors import WeightError
from wellcond.jacobian.channel import ChannelHead
from wellcond.jacobian.solve import operator_spectrum

X = tensor([[1, 0, 0, 1], [0, 1, 0, -1], [0, 0, 1, 1]])
WQ = tensor([[1, 0], [0, 1], [1, -1], [0, 1]]).T
WK = tensor([[0, 1], [1, 0], [1, 1], [-1, 0]]).T
WV = tensor([[1, -1], [0, 2], [1, 0], [1, 1]]).T


def channel_function(head):
    """A naive head and its parameters: weights, and biases that count."""
    present = [name for name in ("b_q", "b_k", "b_v") if head.biases and getattr(head, name) is not None]

    def function(w_q, w_k, w_v, *given):
        bias = {name: getattr(head, name) for name in ("b_q", "b_k", "b_v")}
        bias |= dict(zip(present, given, strict=False))

        def project(weight, b):
            return head.x @ weight.T if b is None else head.x @ weight.T + b

        q, k, v = project(w_q, bias["b_q"]), project(w_k, bias["b_k"]), project(w_v, bias["b_v"])
        if head.normalise:
            q, k = F.normalize(q, dim=0), F.normalize(k, dim=0)
        return v @ torch.softmax(head.scale * q.T @ k, -1).T

    return function, (head.w_q, head.w_k, head.w_v, *[getattr(head, name) for name in present])


@st.composite
def channel_heads(draw):
    n, D = draw(st.integers(1, 7)), draw(st.integers(1, 8))
    c, e = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    normal = normals(draw(st.integers(0, 10_000)))
    has = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    bias = [normal(size) if one else None for one, size in zip(has, (c, e, e), strict=True)]
    return ChannelHead(
        normal(n, D), normal(c, D), normal(e, D), normal(e, D), draw(st.sampled_from([0.5, 1.0, 3.0])), *bias,
        normalise=draw(st.booleans()), biases=draw(st.booleans()),
    )  # fmt: skip


@given(channel_heads())
def test_channel_heads(head):
    check_head(head, *channel_function(head))


def test_columns_within_eps_are_only_divided():
    normal = normals(4)
    w_q, w_k = normal(3, 4), normal(3, 4)
    w_q[0], w_k[1] = 0.0, 1e-4 * w_k[1]
    head = ChannelHead(normal(5, 4), w_q, w_k, normal(3, 4), 2.0, eps=1e-2)
    assert head.q.radial.tolist() == [0, 1, 1] and head.k.radial.tolist() == [1, 0, 1]

    def function(w_q, w_k, w_v):
        q, k = (F.normalize(head.x @ w.T, dim=0, eps=1e-2) for w in (w_q, w_k))
        return head.x @ w_v.T @ torch.softmax(2.0 * q.T @ k, -1).T

    check_head(head, function, (head.w_q, head.w_k, head.w_v))


def test_t12():
    head = ChannelHead(X, WQ, WK, WV, 1.0)
    expected = tensor([[0.2114465795, 0.7885534205], [0.2397008336, 0.7602991664]])
    torch.testing.assert_close(head.p, expected, rtol=1e-9, atol=0)
    sigma = check_head(head, *channel_function(head))
    assert float(sigma[0]) == pytest.approx(2.456715868, rel=1e-9)
    assert float(sigma[-1]) == pytest.approx(0.02476705854, rel=1e-9)
    product = torch.linalg.svdvals(head.p)[-1] * torch.linalg.svdvals(X)[-1]
    assert float(sigma[-1]) == pytest.approx(float(product), rel=1e-9)
    scaled = ChannelHead(X, 7 * WQ, WK / 7, WV, 1.0)
    torch.testing.assert_close(scaled.output(), head.output())
    assert float(torch.linalg.svdvals(scaled.as_matrix())[0]) == pytest.approx(3.635242585, rel=1e-9)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "D", "c", "e"), [(4, 8, 3, 3), (20, 4, 3, 3), (20, 3, 4, 6), (12, 12, 2, 3)])
def test_rank_is_that_of_the_tokens_times_the_channels(n, D, c, e, biased):
    """With N > D + 1 the Jacobian never has full row rank: outputs stay in the span of the tokens."""
    normal = normals(0)
    biases = (normal(c), normal(e), normal(e)) if biased else ()
    head = ChannelHead(normal(n, D), normal(c, D), normal(e, D), normal(e, D), 2.0, *biases, biases=biased)
    expected = c * min(n, D + biased)
    assert head.rank_bound().rank == expected
    assert numerical_rank(torch.linalg.svdvals(head.as_matrix())) == expected


def test_its_spectrum():
    got = operator_spectrum(ChannelHead(X, WQ, WK, WV, 1.0))
    assert (got.sigma_max, got.sigma_min) == pytest.approx((2.456715868, 0.02476705854), rel=1e-9)
    tall = operator_spectrum(ChannelHead(normals(3)(20, 4), WQ, WK, WV, 1.0))
    assert tall.rank == 8 and tall.condition_number == math.inf


def test_refusals():
    with pytest.raises(ValueError, match="keys and values"):
        ChannelHead(X, WQ, WK, WV[:1], 1.0)
    with pytest.raises(ValueError, match="w_q"):
        ChannelHead(X, WQ[:, :3], WK, WV, 1.0)
    with pytest.raises(WeightError, match="w_v"):
        ChannelHead(X, WQ, WK, WV / 0.0, 1.0)
    assert ChannelHead(X.float(), WQ, WK, WV, 1.0).x.dtype == F64
