"""Section 4: T8, the generic ranks on every small shape, the named null directions, the table of nullities."""

import itertools

import pytest
import torch

from theory import cases
from theory.papers import deficient_rank, gauge_direction, key_shift_direction
from theory.reference import F64, blocks, head, rank, stack, wide
from wellcond.errors import HypothesisError
from wellcond.jacobian.head import contains_ones, wide_rank_bound, wide_shape
from wellcond.jacobian.softmax import dense_jacobian
from wellcond.theory import Head, Ranks, generic_ranks, structural_ranks


def gaussian_head(n, width, d, *, value_dim=None, tokens=None) -> Head:
    x = torch.randn(n, width, dtype=F64) if tokens is None else tokens
    weights = [0.5 * torch.randn(x.shape[1], k, dtype=F64) for k in (d, d, value_dim or d)]
    return head(x, *weights, d**-0.5)


def found_ranks(h: Head) -> Ranks:
    query, key, value = (rank(j) for j in blocks(h))
    return Ranks(query, key, value, rank(wide(h)), rank(stack(h)) if h.value_dim == h.head_dim else None)


T8 = {
    (4, 8, 2): (8, 6, 8, 8, 8),
    (8, 8, 3): (24, 21, 24, 24, 24),
    (12, 4, 2): (8, 8, 8, 20, 8),
    (9, 3, 3): (9, 9, 9, 18, 9),
    (16, 4, 2): (8, 8, 8, 20, 8),
}


@pytest.mark.parametrize("shape", T8)
def test_T8_ranks(shape):
    h = gaussian_head(*shape)
    assert found_ranks(h) == structural_ranks(h).ranks == Ranks(*T8[shape])


SHAPES = list(itertools.product((2, 3, 5, 7), (1, 2, 3, 4), (1, 2, 4), (1, 3), (False, True)))


EVERY = pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])


@EVERY
def test_generic_ranks_on_small_shapes(step):
    # Ranks are generic: one unlucky draw may be numerically short, three in a row are not luck.
    for n, width, d, value_dim, bias in SHAPES[::step]:
        for _ in range(3):
            x = torch.randn(n, width, dtype=F64)
            x = torch.cat([x, torch.ones(n, 1, dtype=F64)], 1) if bias else x
            h = gaussian_head(n, width, d, value_dim=value_dim, tokens=x)
            expected = generic_ranks(n, min(x.shape), d, value_dim=value_dim, ones_in_range=bias)
            assert structural_ranks(h).ranks == expected
            if found_ranks(h) == expected:
                break
        else:
            raise AssertionError((n, width, d, value_dim, bias, found_ranks(h), expected))


GROUPED = list(
    itertools.product((4, 9), (None, 3), (2, 3), (2, 5), (1, 3), (1, 2), ("none", "fixed", "parameters"), (False, True))
)


def grouped_head(n, memory, width, d, dv, groups, biases, ones) -> Head:
    """Query heads that share keys and values, perhaps of other tokens; `ones`: the tokens span the constant."""

    def tokens(count):
        return torch.cat([torch.randn(count, width, dtype=F64), torch.ones(count, int(ones), dtype=F64)], 1)

    def normal(*shape):
        return 0.5 * torch.randn(*shape, dtype=F64)

    b_q, b_k, b_v = (None, None, None) if biases == "none" else (normal(groups, d), normal(d), normal(dv))
    weights = [normal(*shape, width + ones) for shape in ((groups, d), (d,), (dv,))]
    y = None if memory is None else tokens(memory)
    return Head(tokens(n), *weights, d**-0.5, y=y, b_q=b_q, b_k=b_k, b_v=b_v)


@EVERY
def test_one_definition_counts_groups_biases_and_memory(step):
    """`wide_rank_bound`, which the spectrum of every plain head rests on, has the rank of automatic differentiation."""
    for case in GROUPED[::step]:
        for _ in range(3):
            h, biases = grouped_head(*case), case[6] == "parameters"
            found, structure = (
                torch.cat(list(dense_jacobian(h, biases=biases).values()), 1),
                wide_rank_bound(h, biases=biases),
            )
            assert found.shape == wide_shape(h, biases=biases)
            if rank(found) == structure.rank:
                break
        else:
            raise AssertionError((case, rank(found), structure))
        if h.is_single and not biases:
            assert structural_ranks(h).ranks.wide == structure.rank


def test_full_row_rank_ends_at_3r_minus_d_tokens():
    for r, d in ((3, 1), (3, 2), (4, 2), (3, 3)):
        last = 3 * r - d
        assert [generic_ranks(n, r, d).wide == n * d for n in (last, last + 1)] == [True, False]
        assert rank(wide(gaussian_head(last, r, d))) == last * d


def test_heads_wider_than_the_tokens_have_rank():
    # N = 16, D = d = 4, zero-mean rows, r = 3: 3dr - d^2 + (d - r)^2 = 21.
    x = torch.randn(16, 4, dtype=F64)
    h = gaussian_head(16, 4, 4, tokens=x - x.mean(-1, keepdim=True))
    assert rank(wide(h)) == structural_ranks(h).ranks.wide == 21
    # Few tokens: values have rank r < d, so only (N - r) r of the (N - r) d outputs beyond J_V can move: 18, not 20.
    h = gaussian_head(5, 3, 4)
    assert rank(wide(h)) == structural_ranks(h).ranks.wide == 18 < min(4 * 5, 3 * 4 * 3 - 16 + 1)
    # J_Q of d > r: the keys have rank r, so r^2 and not dr.
    assert rank(blocks(gaussian_head(12, 3, 4))[0]) == generic_ranks(12, 3, 4).query == 9


@pytest.mark.parametrize("shape", [(3, 4, 2), (7, 3, 2), (6, 2, 4)])
def test_gauge_directions_are_null(shape):
    h = gaussian_head(*shape)
    e = torch.randn(shape[2], shape[2], dtype=F64)
    of_q, of_k = gauge_direction(h, e)
    j_q, j_k, _ = blocks(h)
    moved = j_q @ of_q.T.reshape(-1)
    assert moved.norm() > 1e-3 > 1e-12 > (moved + j_k @ of_k.T.reshape(-1)).norm()


def test_key_shifts_are_null():
    h, z = gaussian_head(3, 5, 2), torch.randn(2, dtype=F64)
    shift = key_shift_direction(h, z)
    torch.testing.assert_close(h.x @ shift.T, z.expand(3, 2))
    assert (blocks(h)[1] @ shift.T.reshape(-1)).norm() < 1e-13


def test_structural_ranks_refuse_masks():
    with pytest.raises(HypothesisError, match="masked"):
        structural_ranks(cases.g1(causal=True))
    assert structural_ranks(cases.g1(causal=True), strict=False).ranks is None
    with pytest.raises(ValueError, match="between 1 and 3"):
        generic_ranks(3, 4, 2)


def test_deficient_rank():
    # N > r with values that contain the constant vector: biased tokens and an invertible Wv.
    x = torch.cat([torch.randn(5, 1, dtype=F64), torch.ones(5, 1, dtype=F64)], 1)
    h = gaussian_head(5, 2, 2, tokens=x)
    assert contains_ones(h.x @ h.w_v.T) and rank(wide(h)) <= deficient_rank(h) == 7
