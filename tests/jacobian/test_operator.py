"""Several heads, with and without W_O, against automatic differentiation and the numbers of the theory."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jacobian.operators import check_head, check_operator, dense_of, mapped_head, normals, random_heads
from jacobian.test_channel import WK, WQ, WV, X, channel_function
from jacobian.test_rowwise import head_function
from wellcond.jacobian.channel import ChannelHead
from wellcond.jacobian.head import Head
from wellcond.jacobian.operator import MappedOutputs
from wellcond.jacobian.problem import union_condition_number
from wellcond.jacobian.softmax import SoftmaxJacobian
from wellcond.jacobian.solve import operator_spectrum

S = 2**-0.5
G1 = Head(X, WQ, WK, WV, S)
G1_EXCHANGED = Head(X, WK, WQ, WV, S)


def projected(operators, w_o):
    outputs = [one.output() if one.output().dim() == 3 else one.output()[None] for one in operators]
    sizes, tokens = [(len(output), output.shape[2]) for output in outputs], outputs[0].shape[1]
    parts = w_o.split([heads * dv for heads, dv in sizes], dim=1)
    maps = tuple(part.reshape(1, len(w_o), *size) for part, size in zip(parts, sizes, strict=True))
    return MappedOutputs(tuple(operators), maps, tokens, "W_O")


def layer_function(functions, layer):
    """Naive heads, concatenated and projected; parameters of the heads."""
    counts = [len(parameters) for _, parameters in functions]

    def function(*given):
        outputs, at = [], 0
        for (head, _), count in zip(functions, counts, strict=True):
            output = head(*given[at : at + count])
            outputs += [output] if output.dim() == 2 else list(output)
            at += count
        return torch.cat(outputs, -1) @ torch.cat([block.flatten(2)[0] for block in layer.maps], 1).T

    return function, tuple(p for _, parameters in functions for p in parameters)


def test_condition_number_of_a_union():
    wide, deficient = operator_spectrum(SoftmaxJacobian(G1)), operator_spectrum(SoftmaxJacobian(tall_head()))
    assert union_condition_number([wide, deficient]) == math.inf
    expected = max(wide.sigma_max, deficient.sigma_max) / min(wide.sigma_rank, deficient.sigma_rank)
    assert union_condition_number([wide, deficient], "pseudo") == pytest.approx(expected)
    # two heads of full rank, one wide and one tall: their union is square-ish and has a null space on both sides
    tall = dataclasses.replace(wide, shape=(24, 6))
    assert union_condition_number([wide, wide]) == pytest.approx(wide.condition_number)
    assert union_condition_number([wide, tall]) == math.inf
    with pytest.raises(ValueError, match="at least one"):
        union_condition_number([])


def tall_head():
    normal = normals(0)
    return Head(normal(30, 3), normal(2, 3), normal(2, 3), normal(2, 3), 0.7)


@st.composite
def layers(draw):
    """Groups of heads on the same tokens, behind W_O."""
    head = draw(random_heads())
    normal = normals(draw(st.integers(0, 10_000)))
    forms, functions, biases = [], [], draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        other = dataclasses.replace(
            head, w_q=normal(*head.w_q.shape), w_k=normal(*head.w_k.shape), w_v=normal(*head.w_v.shape)
        )
        forms.append(SoftmaxJacobian(other, biases))
        functions.append(head_function(other, biases=biases))
    columns = sum(form.head.num_query_heads * form.head.value_dim for form in forms)
    return projected(forms, normal(draw(st.integers(1, 5)), columns)), functions


@given(layers())
def test_projected_heads(layer_and_functions):
    layer, functions = layer_and_functions
    check_operator(layer, dense_of(*layer_function(functions, layer)))


def test_a_gate_behind_the_heads():
    """One block for each token, here also from head to head."""
    normal = normals(7)
    head = Head(normal(5, 4), normal(2, 3, 4), normal(3, 4), normal(2, 4), 0.7)
    maps = normal(5, 2, 3, 2, 2)
    inner, (function, parameters) = SoftmaxJacobian(head), head_function(head)
    gated = lambda *w: torch.einsum("nhokp,knp->hno", maps, function(*w))  # noqa: E731
    check_head(MappedOutputs((inner,), (maps,), 5, value=gated(*parameters)), gated, parameters)


def test_heads_of_different_kinds_in_one_layer():
    normal = normals(1)
    plain = Head(normal(5, 4), normal(2, 2, 4), normal(2, 4), normal(3, 4), 0.7)
    x = plain.x
    cosine = Head(x, normal(2, 4), normal(2, 4), normal(2, 4), 3.0)
    channel = ChannelHead(x, normal(3, 4), normal(3, 4), normal(3, 4), 2.0)
    norm = lambda t: torch.nn.functional.normalize(t, dim=-1)  # noqa: E731
    operators = [SoftmaxJacobian(plain), mapped_head(cosine, norm), channel]
    layer = projected(operators, normal(6, 2 * 3 + 2 + 3))
    functions = [head_function(plain), head_function(cosine, norm, norm), channel_function(channel)]
    check_operator(layer, dense_of(*layer_function(functions, layer)))


def test_the_product_never_forms_a_matrix_of_outputs():
    """N Do = 12 608 outputs: J J^T would be 1.3 GB. J (J^T u) is taken by automatic differentiation instead."""
    normal = normals(3)
    x = normal(197, 64)
    heads = [Head(x, normal(16, 64) / 8, normal(16, 64) / 8, normal(16, 64) / 8, 0.25) for _ in range(4)]
    layer = projected([SoftmaxJacobian(head) for head in heads], normal(64, 64) / 8)
    function, parameters = layer_function([head_function(head) for head in heads], layer)
    u = normal(layer.shape[0])

    def pull(u):  # J^T u, linear in u, so that its own transpose is J
        return torch.func.vjp(function, *parameters)[1](u)

    pulled, push = torch.func.vjp(pull, u.view(197, 64))
    expected = push(pulled)[0].flatten()
    close = {"rtol": 0, "atol": 1e-12 * float(expected.abs().max())}
    torch.testing.assert_close(layer.gram().matvec(u), expected, **close)
    torch.testing.assert_close(layer.matvec(layer.rmatvec(u)), expected, **close)


def test_refusals():
    with pytest.raises(ValueError, match="does not read 6 outputs"):
        MappedOutputs((SoftmaxJacobian(G1),), (normals(5)(1, 3, 1, 3),), 3)
