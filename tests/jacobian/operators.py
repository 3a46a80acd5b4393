"""Heads for the tests of operators, and what every operator must satisfy, against automatic differentiation."""

import math

import torch
from hypothesis import strategies as st

from wellcond.jacobian.head import Head
from wellcond.jacobian.rowwise import RowwiseHead
from wellcond.jacobian.softmax import RowSoftmax, SoftmaxJacobian, TokenMap, stacked_jacobian
from wellcond.jacobian.solve import operator_spectrum

F64 = torch.float64


def tensor(rows):
    return torch.tensor(rows, dtype=F64)


def causal(n):
    return torch.zeros(n, n, dtype=F64).masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)


def normals(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=F64)


@st.composite
def random_heads(draw, min_width=1, even=False):
    """Self or cross attention; N > D, N < D, N = 1; grouped queries; masks; biases."""
    n, m = draw(st.integers(1, 7)), draw(st.sampled_from([None, None, 1, 5]))
    D, E = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    d, dv, g = draw(st.integers(min_width, 4)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    d, E = 2 * ((d + 1) // 2) if even else d, D if m is None else E
    normal, biased = normals(draw(st.integers(0, 10_000))), draw(st.booleans())
    masked = draw(st.booleans())
    mask = None if not masked else causal(n) if m is None else normal(n, m)
    return Head(
        normal(n, D), normal(g, d, D), normal(d, E), normal(dv, E), 0.7, y=None if m is None else normal(m, E),
        b_q=normal(g, d) if biased else None, b_k=normal(d) if biased else None, b_v=normal(dv) if biased else None,
        mask=mask,
    )  # fmt: skip


def numerical_rank(sigma, rtol=1e-11):
    return int((sigma > rtol * sigma[0]).sum())


def head_spectrum(head, *, convention="wide", **options):
    """The spectrum of a plain head in either convention."""
    operator = SoftmaxJacobian(head)
    operator = operator if convention == "wide" else stacked_jacobian(operator)
    return operator_spectrum(operator, convention=convention, **options)


def dense_of(function, parameters):
    """The whole Jacobian of a function of several tensors."""
    parts = torch.func.jacrev(function, argnums=tuple(range(len(parameters))))(*parameters)
    rows = function(*parameters).numel()
    return torch.cat([part.reshape(rows, -1) for part in parts], dim=1)


def check_operator(operator, dense, rtol=1e-11):
    """Everything that an operator says, against a dense Jacobian with columns in any order; its singular values."""
    sigma, explicit = torch.linalg.svdvals(dense), torch.linalg.svdvals(operator.as_matrix())
    k, largest = min(len(sigma), len(explicit)), float(sigma[0])
    torch.testing.assert_close(explicit[:k], sigma[:k], rtol=0, atol=rtol * largest)
    assert (sigma[k:] <= rtol * largest).all()
    assert operator.shape == tuple(dense.shape)
    gram, squares = dense @ dense.T, {"rtol": 0, "atol": rtol * largest**2}
    rows = torch.stack([operator.rmatvec(e) for e in torch.eye(len(dense), dtype=F64)])
    torch.testing.assert_close(rows @ rows.T, gram, **squares)
    v = normals(9)(dense.shape[1])
    torch.testing.assert_close(operator.matvec(v), rows @ v, rtol=0, atol=rtol * largest * len(v))
    torch.testing.assert_close(operator.to_linear_operator() @ v.numpy(), operator.matvec(v).numpy())
    check_gram(operator, gram, largest, squares)
    assert operator.hints.bounds()[0] <= (1 + rtol) * float(sigma[-1]) or dense.shape[0] > dense.shape[1]
    bound = operator.rank_bound()
    assert numerical_rank(sigma) <= bound.rank <= min(dense.shape)
    return sigma


def check_gram(operator, matrix, largest, squares):
    """What solvers use of J J^T: the matrix, its products, and what iterations take."""
    gram, n = operator.gram(), len(matrix)
    assert gram.size == n
    torch.testing.assert_close(gram.matrix(), matrix, **squares)
    products = torch.stack([gram.matvec(e) for e in torch.eye(n, dtype=F64)], dim=1)
    torch.testing.assert_close(products, matrix, **squares)
    steps = None if gram.steps is None else gram.steps()
    if steps is None:
        return
    assert (steps.size, steps.num_null) == (n, 0)
    rows, scale = normals(8)(3, n), max(largest, 1e-300)
    torch.testing.assert_close(steps.matmat(rows), rows @ matrix, rtol=1e-11, atol=1e-11 * n * largest**2)
    less = matrix.tril() - 0.5 * torch.eye(n, dtype=F64)
    torch.testing.assert_close(steps.shifted(scale, 0.5).tril(), less, **squares)
    length = (rows[0] @ matrix @ rows[0]).clamp_min(0).sqrt()
    assert abs(steps.norm_of(rows[0]) * rows[0].norm() - length) <= 1e-6 * largest
    if largest > 0:
        lower = steps.lower_float32(largest).tril().double()
        torch.testing.assert_close(lower, matrix.tril() / largest**2, rtol=0, atol=1e-5)


def check_head(operator, function, parameters, rtol=1e-11):
    """`check_operator` of a head that has an output."""
    torch.testing.assert_close(operator.output(), function(*parameters), rtol=0, atol=1e-12)
    return check_operator(operator, dense_of(function, parameters), rtol)


def evaluated(function, rows):
    """A map of rows (T, d) that takes them one by one, with its Jacobians by automatic differentiation."""
    jacobian = torch.func.jacrev(function)(rows)
    return TokenMap(function(rows), torch.einsum("tctd->tcd", jacobian))


def mapped_head(head, query, key=None, biases=False):
    """The operator of a head whose queries pass `query` and whose keys pass `key` (the same map if None)."""
    maps = [evaluated(query, rows) for rows in head.queries()]
    of_queries = TokenMap(*(torch.stack([getattr(one, name) for one in maps]) for name in ("value", "jacobian")))
    of_keys = evaluated(key or query, head.keys())
    return RowwiseHead(head, of_queries, of_keys, softmax_of(head, of_queries, of_keys), biases)


def softmax_of(head, query, key):
    """The softmax of s Qhat Khat^T + mask, and values as they are."""
    logits = head.scale * query.value @ key.value.T
    logits = (logits if head.mask is None else logits + head.mask).flatten(0, 1)
    return RowSoftmax(logits.softmax(-1), torch.full_like(logits, head.scale), TokenMap(head.values()))
