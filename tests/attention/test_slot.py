"""Heads of one stored weight, in every storage that a slot knows."""

import pytest
import torch
from torch import nn

from wellcond.attention.layout import head_rows
from wellcond.attention.slot import Slot

HEADS, WIDTH, TOKENS = 3, 4, 10
ROWS = HEADS * WIDTH
STORED = {
    "Linear": ((ROWS, TOKENS), {}),
    "Conv1D": ((TOKENS, ROWS), {"transposed": True}),
    "1x1 convolution": ((ROWS, TOKENS, 1, 1), {}),
    "interleaved rows": ((2 * ROWS, TOKENS), {"rows": head_rows(HEADS, WIDTH, stride=2 * WIDTH)}),
    "output projection": ((TOKENS, ROWS), {"heads_on_input": True}),
    "stack": ((4, ROWS, TOKENS), {"index": 2, "view": (4, ROWS, TOKENS)}),
    "stack as one matrix": ((4 * ROWS, TOKENS), {"index": 2, "view": (4, ROWS, TOKENS)}),
    "transposed stack": ((4, TOKENS, ROWS), {"index": 1, "view": (4, TOKENS, ROWS), "transposed": True}),
    "matrix per head": ((HEADS, TOKENS, WIDTH), {"by_head": True, "transposed": True}),
    "output matrix per head": (
        (HEADS, WIDTH, TOKENS),
        {"by_head": True, "transposed": True, "heads_on_input": True},
    ),
}


def slot_of(case):
    shape, options = STORED[case]
    owner = nn.Module()
    owner.weight = nn.Parameter(torch.randn(shape))
    return Slot(owner, "weight", **({"rows": head_rows(HEADS, WIDTH)} | options))


@pytest.mark.parametrize("case", STORED)
def test_what_is_written_is_read_and_nothing_else_changes(case):
    slot = slot_of(case)
    before = slot.parameter.detach().clone()
    written = torch.randn(slot.heads_shape)
    assert slot.read_raw().shape == slot.heads_shape
    slot.write_(written)
    assert torch.equal(slot.read_raw(), written) and torch.equal(slot.view_heads(slot.parameter), written)
    assert int((slot.parameter != before).sum()) == written.numel()
    slot.write_(slot.take_heads(before))
    assert torch.equal(slot.parameter, before)


@pytest.mark.parametrize("case", STORED)
def test_a_matrix_in_place_of_another(case):
    slot = slot_of(case)
    stored = slot.parameter.detach()
    matrix = slot.as_matrix(stored)
    assert matrix.shape == (slot.out_features, slot.in_features)
    assert torch.equal(slot.with_matrix(stored, matrix), stored)
    other = slot.with_matrix(stored, torch.zeros_like(matrix))
    assert bool((slot.take_heads(other) == 0).all()) and bool((slot.take_heads(stored) != 0).any())


def test_heads_of_another_shape_are_refused():
    slot = slot_of("Linear")
    with pytest.raises(ValueError, match=r"expected heads of shape \(3, 4, 10\), got \(3, 10, 4\)"):
        slot.write_(torch.randn(3, 10, 4))
