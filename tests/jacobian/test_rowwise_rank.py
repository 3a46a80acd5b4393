"""Ranks of rotary heads, whose gauge is what commutes with the rotations, against automatic differentiation."""

import pytest
import torch
import torch.nn.functional as F

import wellcond.jacobian.problem as limits
from jacobian.operators import causal, check_head, evaluated, mapped_head, normals, numerical_rank
from jacobian.test_rowwise import angles, head_function, rope
from wellcond.jacobian.head import Head
from wellcond.jacobian.problem import Problem
from wellcond.jacobian.rowwise import RowwiseHead
from wellcond.jacobian.softmax import RowSoftmax, TokenMap
from wellcond.jacobian.solve import choose, operator_spectrum

F64 = torch.float64
N, D, DV = 45, 5, 2


def head_of(d, *, g=1, seed=0, n=N, **biases):
    normal = normals(seed)
    x, w_q, w_k, w_v = normal(n, D), normal(g, d, D), normal(d, D), normal(DV, D)
    b = {"b_q": normal(g, d), "b_k": normal(d), "b_v": normal(DV)}
    return Head(x, w_q, w_k, w_v, 0.4, **{name: b[name] for name, wanted in biases.items() if wanted})


def turned(table, layout):
    return lambda rows: rope(rows, *table, layout)


def check_rank(form, function, parameters, lost):
    """The rank is that of autograd, and `lost` less than the numbers that the tokens see."""
    sigma = check_head(form, function, parameters)
    head, biased = form.head, form.biases
    seen = (head.num_query_heads + 1) * head.head_dim * (D + biased) + DV * (D + biased)
    assert form.rank_bound().rank == seen - lost < form.shape[0]
    assert numerical_rank(sigma) == seen - lost


@pytest.mark.parametrize(
    ("layout", "d", "width", "gauge", "g"),
    [("half", 4, 4, 4, 2), ("interleaved", 6, 4, 4 + 4, 1), ("half", 6, 2, 2 + 16, 1), ("interleaved", 5, 2, 2 + 9, 2)],
)
def test_gauge_of_full_and_partial_rotations(layout, d, width, gauge, g):
    """Two directions for each plane that turns, all matrices on the m channels that do not: w + m^2."""
    head, table = head_of(d, g=g), angles(N, width, layout)
    form = mapped_head(head, turned(table, layout))
    check_rank(form, *head_function(head, lambda t: rope(t, *table, layout), lambda t: rope(t, *table, layout)), gauge)


def test_planes_that_turn_alike_mix():
    """Two planes of one frequency: complex 2 x 2 matrices, 8 directions instead of 4."""
    cos, sin = angles(N, 4, "interleaved")
    cos, sin = cos[:, :2].repeat(1, 2), sin[:, :2].repeat(1, 2)
    head = head_of(4)
    form = mapped_head(head, turned((cos, sin), "interleaved"))
    naive = lambda t: rope(t, cos, sin, "interleaved")  # noqa: E731
    check_rank(form, *head_function(head, naive, naive), 8)


@pytest.mark.parametrize(
    ("width", "fixed", "lost"),
    [
        (4, {"b_q": True}, 0),  # a bias that is no parameter has to stay: no plane is left
        (4, {"b_k": True}, 0),
        (2, {"b_k": True}, 4),  # where nothing turns, the softmax does not see the bias of the keys
        (2, {"b_q": True}, 2 * (2 - 1)),
    ],
)
def test_biases_that_are_no_parameters_break_the_gauge(width, fixed, lost):
    head, table = head_of(4, **fixed), angles(N, width, "half")
    naive = lambda t: rope(t, *table, "half")  # noqa: E731
    check_rank(mapped_head(head, turned(table, "half")), *head_function(head, naive, naive), lost)


@pytest.mark.parametrize(("width", "lost"), [(4, 4), (2, 2 + 4 + 2)])
def test_biases_that_are_parameters_keep_it(width, lost):
    """The bias of the keys is seen where channels turn, and is two more null directions where they do not."""
    head, table = head_of(4, b_q=True, b_k=True, b_v=True), angles(N, width, "half")
    naive = lambda t: rope(t, *table, "half")  # noqa: E731
    form = mapped_head(head, turned(table, "half"), biases=True)
    check_rank(form, *head_function(head, naive, naive, biases=True), lost)


@pytest.mark.parametrize(
    ("weight", "lost"),
    [([1.0] * 4, 2), ([1.0, 2.0, 3.0, 4.0], 0)],
    ids=["plain", "affine"],
)
def test_norm_and_rotation_leave_the_rotations_of_each_plane(weight, lost):
    """Qwen3: one direction for each plane while the weight of the norm is constant, as it is at first; none later."""
    head, table, weight = head_of(4), angles(N, 4, "half"), torch.tensor(weight, dtype=F64)
    naive = lambda t: rope(F.rms_norm(t, (4,), weight, eps=0.1), *table, "half")  # noqa: E731
    check_rank(mapped_head(head, naive), *head_function(head, naive, naive), lost)


def capped_softmax(head, query, key, cap, sink):
    """Probabilities and slopes of logits c tanh(s q.k / c), with a sink."""
    logits = head.scale * query.value @ key.value.T
    capped = cap * (logits / cap).tanh() + causal(len(key.value))
    everything = torch.cat([capped, capped.new_full((len(capped), 1), sink)], 1)
    slope = head.scale * (1 - (logits / cap).tanh().square())
    return RowSoftmax(everything.softmax(-1), slope, TokenMap(head.values()))


def test_soft_cap_is_a_factor_on_the_logits_and_a_sink_a_key_without_value():
    head, table, cap, sink = head_of(4, n=9), angles(9, 4, "half"), 0.8, 0.3
    query, key = (evaluated(turned(table, "half"), rows) for rows in (head.queries()[0], head.keys()))
    form = RowwiseHead(head, query, key, capped_softmax(head, query, key, cap, sink))

    def function(w_q, w_k, w_v):
        q, k = (rope(head.x @ w.T, *table, "half") for w in (w_q[0], w_k))
        logits = cap * (head.scale * q @ k.T / cap).tanh() + causal(9)
        p = torch.cat([logits, logits.new_full((9, 1), sink)], 1).softmax(-1)
        return (p[:, :-1] @ (head.x @ w_v.T))[None]

    check_head(form, function, (head.query_weights, head.w_k, head.w_v))


def test_identity_is_the_rotation_by_nothing():
    """The numbers of a map that turns nothing give the gauge of the plain head, d^2."""
    head = head_of(4)
    none = angles(N, 4, "half")
    still = torch.ones_like(none[0]), torch.zeros_like(none[1])
    plain, form = mapped_head(head, lambda rows: rows), mapped_head(head, turned(still, "half"))
    assert form.rank_bound().rank == plain.rank_bound().rank
    torch.testing.assert_close(form.gram().matrix(), plain.gram().matrix())


def test_both_ends_of_a_causal_rotary_head_by_a_float32_factor(monkeypatch):
    """As a Llama head is measured, beyond the size at which all eigenvalues are computed; against all eigenvalues."""
    n, width, d = 64, 96, 16
    normal, table = normals(3), angles(n, d, "half")
    x, weights = normal(n, width), (0.05 * normal(d, width) for _ in range(3))
    form = mapped_head(Head(x, *weights, d**-0.5, mask=causal(n)), turned(table, "half"))
    everything = operator_spectrum(form, method="gram")
    monkeypatch.setattr(limits, "LARGEST_FULL_SVD", 1000)
    assert choose(Problem(form))[0].name == "proved ends"
    factorised, proved = operator_spectrum(form, method="cholesky"), operator_spectrum(form)
    for found, word in ((factorised, "float32 factor"), (proved, "proved by a factorisation")):
        assert found.status == everything.status == "exact" and word in found.reason
        assert found.rank == everything.rank == n * d
        assert found.sigma_max == pytest.approx(everything.sigma_max, rel=1e-8)
        assert found.sigma_min == pytest.approx(everything.sigma_min, rel=1e-8)
        low, high = found.sigma_rank_bounds
        assert 0 < low <= found.sigma_rank <= high
