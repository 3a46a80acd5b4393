"""Heads whose queries and keys pass a map, against automatic differentiation; `check_form` serves all forms."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from jacobian.operators import (
    F64,
    causal,
    check_head,
    evaluated,
    mapped_head,
    normals,
    numerical_rank,
    random_heads,
    tensor,
)
from wellcond.errors import WeightError
from wellcond.jacobian.diagnosis import diagnose_head
from wellcond.jacobian.head import Head, softmax_weights
from wellcond.jacobian.rowwise import RowwiseHead
from wellcond.jacobian.softmax import RowSoftmax, TokenMap
from wellcond.jacobian.solve import operator_spectrum


def head_function(head, query=lambda q: q, key=lambda k: k, biases=False):
    """A naive head and its parameters: weights, then the biases that exist if they count."""
    present = [name for name in ("b_q", "b_k", "b_v") if biases and getattr(head, name) is not None]

    def function(w_q, w_k, w_v, *given):
        bias = {name: getattr(head, name) for name in ("b_q", "b_k", "b_v")} | dict(zip(present, given, strict=True))
        bias = {name: torch.zeros(1, dtype=F64) if b is None else b for name, b in bias.items()}
        outputs = []
        for h in range(len(w_q)):
            q = head.x @ w_q[h].T + (bias["b_q"][h] if bias["b_q"].dim() == 2 else bias["b_q"])
            k, v = head.memory @ w_k.T + bias["b_k"], head.memory @ w_v.T + bias["b_v"]
            logits = head.scale * query(q) @ key(k).T
            if head.mask is not None:
                logits = logits + (head.mask if head.mask.dim() == 2 else head.mask[h])
            outputs.append(torch.softmax(logits, -1) @ v)
        return torch.stack(outputs)

    return function, (head.query_weights, head.w_k, head.w_v, *[getattr(head, name) for name in present])


def rope(x, cos, sin, layout):
    """Rotary embedding as models write it."""
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    if layout == "half":
        first, second = part.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    else:
        turned = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
    return torch.cat([part * cos + turned * sin, rest], -1)


def angles(n, width, layout, start=0.0):
    theta = torch.outer(torch.arange(n, dtype=F64) + start, 10.0 ** -torch.arange(width // 2, dtype=F64))
    theta = torch.cat([theta, theta], -1) if layout == "half" else theta.repeat_interleave(2, -1)
    return theta.cos(), theta.sin()


NORMS = {
    "layer": lambda t: F.layer_norm(t, t.shape[-1:]),
    "layer, eps .1": lambda t: F.layer_norm(t, t.shape[-1:], eps=0.1),
    "rms": lambda t: F.rms_norm(t, t.shape[-1:], eps=1e-6),
    "rms, eps .1": lambda t: F.rms_norm(t, t.shape[-1:], eps=0.1),
    "l2": lambda t: F.normalize(t, dim=-1),
    "identity": lambda t: t,
}
cosine = NORMS["l2"]
identity = NORMS["identity"]


@given(random_heads(), st.sampled_from(sorted(NORMS)), st.sampled_from(sorted(NORMS)), st.booleans())
def test_normalised_heads(head, of_query, of_key, biases):
    query, key = NORMS[of_query], NORMS[of_key]
    check_head(mapped_head(head, query, key, biases), *head_function(head, query, key, biases))


@given(random_heads(even=True), st.sampled_from(["half", "interleaved"]), st.booleans(), st.booleans())
def test_rotary_heads_with_and_without_norm(head, layout, normed, biases):
    weight = torch.linspace(0.5, 2, head.head_dim, dtype=F64)
    tables = angles(head.num_tokens, head.head_dim, layout), angles(len(head.memory), head.head_dim, layout, 0.5)

    def theirs(table):
        norm = (lambda t: F.rms_norm(t, t.shape[-1:], weight, eps=1e-6)) if normed else (lambda t: t)
        return lambda t: rope(norm(t), *table, layout)

    query, key = theirs(tables[0]), theirs(tables[1])
    check_head(mapped_head(head, query, key, biases), *head_function(head, query, key, biases))


@pytest.mark.parametrize(("g", "n", "d"), [(1, 40, 3), (2, 30, 4)])
@pytest.mark.parametrize(
    ("mapped", "loss"),
    [
        (cosine, lambda d, r, g: g + 1 + d * (d - 1) // 2),
        (NORMS["rms, eps .1"], lambda d, r, g: d * (d - 1) // 2),
        (lambda t: F.layer_norm(t, t.shape[-1:], eps=0.0), lambda d, r, g: (g + 1) * (r + 1) + (d - 1) * (d - 2) // 2),
        (NORMS["layer, eps .1"], lambda d, r, g: (g + 1) * r + (d - 1) * (d - 2) // 2),
    ],
    ids=["l2", "rms", "layer, no eps", "layer"],
)
def test_rank_of_generic_norm_heads(g, n, d, mapped, loss):
    """Tokens of rank r: d r (g + 1) + dv r numbers are seen, less what the norm hides and the rotations it allows."""
    normal, D = normals(4), 4
    head = Head(normal(n, D), normal(g, d, D), normal(d, D), normal(2, D), 1.0)
    form = mapped_head(head, mapped)
    expected = d * D * (g + 1) + 2 * D - loss(d, D, g)
    rank = numerical_rank(torch.linalg.svdvals(form.as_matrix()))
    assert rank == min(expected, form.shape[0])
    # Rotations are counted by polar factors of the N_r, which are not unique where a norm hides the size of its row.
    hides_size = torch.linalg.matrix_rank(form.query.jacobian, rtol=1e-9).max() < torch.linalg.matrix_rank(
        form.query.jacobian.flatten(0, 1), rtol=1e-9
    )
    assert rank <= form.rank_bound().rank if bool(hides_size) else rank == form.rank_bound().rank


def test_rank_of_a_norm_head_that_is_wider_than_its_tokens():
    """Queries and keys span 2 r = 4 of d = 7 dimensions: 3 of the 21 rotations move neither: no null directions."""
    normal = normals(12)
    head = Head(normal(40, 2), normal(7, 2), normal(7, 2), normal(2, 2), 0.3)
    form = mapped_head(head, NORMS["rms, eps .1"])
    assert form.rank_bound().rank == 2 * 7 * 2 + 2 * 2 - (21 - 3)
    assert numerical_rank(torch.linalg.svdvals(form.as_matrix())) == form.rank_bound().rank


def test_weights_keep_relative_accuracy_when_attention_is_one_hot():
    """T13: V^T Lambda of a row with p = (1, e, e, ...) is of order e, far below rounding of V."""
    v, small = normals(9)(4, 3), 1e-30
    p = tensor([[1.0, small, 2 * small, 0.0]])
    expected = torch.stack([-(v[1] - v[0]) - 2 * (v[2] - v[0]), v[1] - v[0], 2 * (v[2] - v[0]), 0 * v[0]], -1) * small
    torch.testing.assert_close(softmax_weights(p, v)[0], expected, rtol=1e-12, atol=0)


def test_every_method_takes_the_operator():
    normal = normals(10)
    form = mapped_head(Head(normal(5, 8), normal(3, 8), normal(3, 8), normal(3, 8), 4.0), cosine)
    expected = torch.linalg.svdvals(form.as_matrix())
    for method in ("gram", "dense", "cholesky", "implicit"):
        got = operator_spectrum(form, method=method)
        assert got.sigma_max == pytest.approx(float(expected[0]), rel=1e-9)
        assert got.sigma_min == pytest.approx(float(expected[-1]), rel=1e-6)


def test_refusals():
    normal = normals(11)
    head = Head(normal(3, 4), normal(2, 4), normal(2, 4), normal(2, 4), 1.0)
    of_queries, of_keys = evaluated(cosine, head.queries()[0]), evaluated(cosine, head.keys())
    softmax = mapped_head(head, cosine).softmax
    with pytest.raises(ValueError, match="query map: expected 3 rows"):
        RowwiseHead(head, evaluated(cosine, normal(4, 2)), of_keys, softmax)
    with pytest.raises(WeightError, match="key map has NaN"):
        RowwiseHead(head, of_queries, TokenMap(normal(3, 2) / 0.0, normal(3, 2, 2)), softmax)


@pytest.mark.parametrize("g", [1, 2])
@pytest.mark.parametrize("mapped", ["rotary", "values"])
def test_a_mapped_head_is_diagnosed_as_a_plain_one_is(g, mapped):
    draw, n = normals(3), 7
    head = Head(draw(n, 6), draw(g, 4, 6), draw(4, 6), draw(4, 6), scale=0.5, mask=causal(n))
    angles = draw(n, 4)
    form = mapped_head(head, lambda rows: rope(rows, angles.cos(), angles.sin(), "half"))
    if mapped == "values":  # and a sink: a key without a value
        p = torch.cat([0.75 * form.p, torch.full((len(form.p), 1), 0.25, dtype=F64)], dim=1)
        turned = TokenMap(head.values() @ draw(4, 4), draw(4, 4).expand(n, 4, 4))
        slope = torch.full_like(form.p, 0.5)
        form = dataclasses.replace(form, softmax=RowSoftmax(p, slope, turned))
    found, blocks = form.diagnose(), form.parameter_blocks()
    norms = [float(torch.linalg.matrix_norm(blocks[name], 2)) for name in "qkv"]
    assert [found.norm_q, found.norm_k, found.norm_v] == pytest.approx(norms, rel=1e-8)
    entropy = -torch.special.xlogy(form.softmax.p, form.softmax.p).sum(-1)
    assert found.attention.entropy == pytest.approx(float(entropy.mean()))
    own = form.p.view(g, n, n).diagonal(dim1=-2, dim2=-1)
    assert found.attention.diagonal_mass == pytest.approx(float(own.mean()))
    assert 0 < found.attention.normalised_entropy < 1 and not found.dead
    assert found.kappa_x == pytest.approx(float(torch.linalg.cond(head.x)))


def test_identity_maps_are_diagnosed_as_the_plain_head():
    draw = normals(4)
    head = Head(draw(6, 5), draw(3, 5), draw(3, 5), draw(3, 5), scale=0.5, mask=causal(6))
    mine, plain = mapped_head(head, identity).diagnose(), diagnose_head(head)
    numbers = {key: value for key, value in mine.to_dict().items() if isinstance(value, float)}
    assert numbers == pytest.approx({key: plain.to_dict()[key] for key in numbers}, rel=1e-9)
    assert dataclasses.asdict(mine.attention) == pytest.approx(dataclasses.asdict(plain.attention))
    assert mine.verdict == plain.verdict and mine.explanation[:20] == plain.explanation[:20]
