"""Several heads, with and without W_O, against automatic differentiation and the numbers of the theory."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobian.test_channel import WK, WQ, WV, X, channel_function
from jacobian.test_normalised import (
    check_form,
    dense_of,
    head_function,
    normals,
    numerical_rank,
    random_heads,
    tensor,
)
from wellcond.errors import WeightError
from wellcond.jacobian.channel import xcit_head
from wellcond.jacobian.head import Head
from wellcond.jacobian.layer import HeadUnion, ProjectedHeads, union_condition_number, with_output_weights
from wellcond.jacobian.normalised import cosine_head
from wellcond.jacobian.plain import WideForm
from wellcond.jacobian.spectrum import form_spectrum

S = 2**-0.5
G1 = Head(X, WQ, WK, WV, S)
G1_EXCHANGED = Head(X, WK, WQ, WV, S)


def layer_function(functions, layer, weight=False, bias=False):
    """Naive heads, concatenated and projected; parameters of the heads, then W_O and b_O if they count."""
    counts = [len(parameters) for _, parameters in functions]

    def function(*given):
        outputs, at = [], 0
        for (head, _), count in zip(functions, counts, strict=True):
            output = head(*given[at : at + count])
            outputs += [output] if output.dim() == 2 else list(output)
            at += count
        rest = list(given[at:])
        w_o = rest.pop(0) if weight else layer.w_o
        b_o = rest.pop(0) if bias else layer.b_o
        result = torch.cat(outputs, -1) @ w_o.T
        return result if b_o is None else result + b_o

    own = [layer.w_o] * weight + [layer.b_o] * bias
    return function, (*[p for _, parameters in functions for p in parameters], *own)


def test_g1_with_output_projection():
    layer = ProjectedHeads((WideForm(G1),), tensor([[1, 0, 2], [0, 1, -1]]).T)
    sigma = check_form(layer, *layer_function([head_function(G1)], layer))
    expected = tensor([7.304639179, 4.364226907, 3.298677553, 1.194312369, 0.6289412481, 0.1244719749])
    torch.testing.assert_close(sigma[:6], expected, rtol=1e-9, atol=0)
    assert float(sigma[6:].max()) < 1e-14 * float(sigma[0]) * 10
    assert layer.structure().max_rank == 6


def test_g1_with_biases():
    head = dataclasses.replace(G1, b_q=tensor([0.5, -0.5]), b_k=tensor([1.0, 2.0]), b_v=tensor([0.0, 1.0]))
    function, parameters = head_function(head, biases=True)
    sigma = check_form(WideForm(head, biases=True), function, parameters)
    assert float(sigma[0]) == pytest.approx(3.328662303, rel=1e-9)
    assert float(sigma[-1]) == pytest.approx(0.04878559476, rel=1e-9)
    of_key_bias = torch.func.jacrev(function, argnums=4)(*parameters)
    assert float(of_key_bias.abs().max()) < 1e-15


def test_g1_two_heads():
    layer = HeadUnion((WideForm(G1), WideForm(G1_EXCHANGED)))
    first, second = head_function(G1), head_function(G1_EXCHANGED)
    sigma = check_form(
        layer, lambda *w: torch.cat([first[0](*w[:3]), second[0](*w[3:])]), (*first[1], *second[1])
    )  # fmt: skip
    one, other = (form_spectrum(form) for form in layer.forms)
    assert (other.sigma_max, other.sigma_min) == pytest.approx((2.341408432, 0.1666479525), rel=1e-9)
    assert float(sigma[0] / sigma[-1]) == pytest.approx(26.01715862, rel=1e-9)
    assert union_condition_number([one, other]) == pytest.approx(26.01715862, rel=1e-9)
    assert form_spectrum(layer).condition_number == pytest.approx(26.01715862, rel=1e-9)
    alone = torch.cat([torch.linalg.svdvals(form.explicit_jacobian()) for form in layer.forms])
    torch.testing.assert_close(sigma, alone.sort(descending=True).values)


def test_condition_number_of_a_union():
    wide, deficient = form_spectrum(WideForm(G1)), form_spectrum(WideForm(tall_head()))
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
    """Groups of heads on the same tokens, with W_O as parameter or not."""
    head = draw(random_heads())
    normal = normals(draw(st.integers(0, 10_000)))
    forms, functions, biases = [], [], draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        other = dataclasses.replace(
            head, w_q=normal(*head.w_q.shape), w_k=normal(*head.w_k.shape), w_v=normal(*head.w_v.shape)
        )
        forms.append(WideForm(other, biases))
        functions.append(head_function(other, biases=biases))
    columns = sum(form.head.num_query_heads * form.head.value_dim for form in forms)
    out = draw(st.integers(1, 5))
    with_weight, with_bias = draw(st.booleans()), draw(st.booleans())
    b_o = normal(out) if with_bias or draw(st.booleans()) else None
    return ProjectedHeads(tuple(forms), normal(out, columns), b_o), functions, (with_weight, with_bias)


@settings(max_examples=50, deadline=None)
@given(layers())
def test_projected_heads(layer_and_functions):
    layer, functions, (weight, bias) = layer_and_functions
    form = with_output_weights(layer, weight=weight, bias=bias)
    check_form(form, *layer_function(functions, layer, weight, bias))


def test_heads_of_different_kinds_in_one_layer():
    normal = normals(1)
    plain = Head(normal(5, 4), normal(2, 2, 4), normal(2, 4), normal(3, 4), 0.7)
    x = plain.x
    cosine = Head(x, normal(2, 4), normal(2, 4), normal(2, 4), 3.0)
    channel = xcit_head(x, normal(3, 4), normal(3, 4), normal(3, 4), 2.0)
    layer = ProjectedHeads((WideForm(plain), cosine_head(cosine), channel), normal(6, 2 * 3 + 2 + 3))
    norm = torch.nn.functional.normalize
    functions = [head_function(plain), head_function(cosine, norm, norm), channel_function(channel)]
    check_form(with_output_weights(layer), *layer_function(functions, layer, weight=True))


def test_rank_bounds():
    normal = normals(2)
    heads = tuple(WideForm(Head(tall_head().x, normal(2, 3), normal(2, 3), normal(2, 3), 0.7)) for _ in range(2))
    narrow = ProjectedHeads(heads, normal(1, 4))
    sigma = torch.linalg.svdvals(narrow.explicit_jacobian())
    assert numerical_rank(sigma) <= narrow.structure().max_rank <= narrow.num_outputs
    # both parts counted: W_v E, -E W_h overlaps, the bound says that it is one
    both = with_output_weights(ProjectedHeads(heads, normal(4, 4)))
    rank = numerical_rank(torch.linalg.svdvals(both.explicit_jacobian()))
    assert rank == both.structure().max_rank - 2 * 2**2
    assert "upper bound" in both.structure().null_space


def test_the_product_never_forms_a_matrix_of_outputs():
    """N Do = 12 608 outputs: J J^T would be 1.3 GB. J (J^T u) is taken by automatic differentiation instead."""
    normal = normals(3)
    x = normal(197, 64)
    heads = [Head(x, normal(16, 64) / 8, normal(16, 64) / 8, normal(16, 64) / 8, 0.25) for _ in range(4)]
    layer = ProjectedHeads(tuple(WideForm(head) for head in heads), normal(64, 64) / 8)
    function, parameters = layer_function([head_function(head) for head in heads], layer, weight=True)
    u = normal(layer.num_outputs)

    def pull(u):  # J^T u, linear in u, so that its own transpose is J
        return torch.func.vjp(function, *parameters)[1](u)

    pulled, push = torch.func.vjp(pull, u.view(197, 64))
    expected = push(pulled)[0].flatten()
    torch.testing.assert_close(
        with_output_weights(layer).product(u), expected, rtol=0, atol=1e-12 * float(expected.abs().max())
    )


def test_rank_of_a_group_with_fixed_query_biases():
    normal = normals(6)
    head = Head(normal(30, 4), normal(2, 2, 4), normal(2, 4), normal(2, 4), 0.7, b_q=normal(2, 2))
    sigma = torch.linalg.svdvals(WideForm(head).explicit_jacobian())
    assert numerical_rank(sigma) == 32
    assert WideForm(head).structure().max_rank >= 32


def test_output_order_is_that_of_the_rows():
    layer = ProjectedHeads((WideForm(G1), WideForm(G1_EXCHANGED)), normals(4)(3, 4), tensor([1.0, 2.0, 3.0]))
    concatenated = torch.cat([G1.output()[0], G1_EXCHANGED.output()[0]], -1)
    torch.testing.assert_close(layer.output(), concatenated @ layer.w_o.T + layer.b_o)
    function, parameters = layer_function([head_function(G1), head_function(G1_EXCHANGED)], layer)
    dense = dense_of(function, parameters)
    torch.testing.assert_close(layer.output_gram(), dense @ dense.T)


def test_refusals():
    with pytest.raises(ValueError, match="w_o: expected 2 columns"):
        ProjectedHeads((WideForm(G1),), normals(5)(3, 4))
    with pytest.raises(ValueError, match="b_o"):
        with_output_weights(ProjectedHeads((WideForm(G1),), normals(5)(3, 2)), bias=True)
    with pytest.raises(WeightError, match="w_o"):
        ProjectedHeads((WideForm(G1),), normals(5)(3, 2) / 0.0)
    with pytest.raises(ValueError, match="at least one head"):
        HeadUnion(())
