"""The relative position table as a parameter, against automatic differentiation and Swin of timm."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobian.test_normalised import causal, check_form, dense_of, head_function, normals, numerical_rank, random_heads
from wellcond.head import Head
from wellcond.jacobian.form import SumForm
from wellcond.jacobian.layer import ProjectedHeads
from wellcond.jacobian.normalised import cosine_head
from wellcond.jacobian.plain import WideForm
from wellcond.jacobian.position_table import PositionTable, swin_head, with_position_table
from wellcond.jacobian.spectrum import form_spectrum


def table_function(head, table, index, biases=False, **maps):
    """A naive head with t[index] in its logits; its parameters, then the table."""
    _, parameters = head_function(head, biases=biases)

    def function(*given):
        bias = given[-1][..., index]
        bias = bias if head.mask is None else bias + head.mask
        # not `dataclasses.replace`: a head detaches what it is given
        traced = dataclasses.replace(head)
        object.__setattr__(traced, "mask", bias)
        return head_function(traced, biases=biases, **maps)[0](*given[:-1])

    return function, (*parameters, table)


@settings(max_examples=50, deadline=None)
@given(random_heads(), st.booleans(), st.integers(1, 9), st.integers(0, 10_000))
def test_position_tables(head, biases, entries, seed):
    normal = normals(seed)
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(entries, (head.num_tokens, len(head.memory)), generator=generator)
    table = normal(head.num_query_heads, entries)
    form = swin_head(head, table, index, biases=biases)
    check_form(form, *table_function(head, table, index, biases))


def test_one_table_under_cosine_attention():
    normal = normals(0)
    head = Head(normal(4, 6), normal(2, 6), normal(2, 6), normal(2, 6), 5.0, mask=causal(4))
    table, index = normal(1, 7), torch.arange(4)[:, None] - torch.arange(4) + 3
    base = cosine_head(with_position_table(head, table, index))
    form = SumForm((base, PositionTable(base, index, 7)))
    norm = {"query": lambda t: F.normalize(t, dim=-1), "key": lambda t: F.normalize(t, dim=-1)}
    check_form(form, *table_function(head, table, index, **norm))


def window_index(size):
    """relative_position_index of Swin for a window of size x size."""
    at = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
    offset = at[:, :, None] - at[:, None, :] + size - 1
    return offset[0] * (2 * size - 1) + offset[1]


def test_swin_of_timm():
    timm = pytest.importorskip("timm.models.swin_transformer")
    torch.manual_seed(0)
    module = timm.WindowAttention(6, num_heads=2, window_size=3).double().eval()
    torch.nn.init.normal_(module.relative_position_bias_table)
    index, x = module.relative_position_index, normals(1)(9, 6)
    assert torch.equal(index, window_index(3))
    w, b = module.qkv.weight.view(3, 2, 3, 6), module.qkv.bias.view(3, 2, 3)
    forms = [
        swin_head(
            Head(x, *w[:, h], module.scale, b_q=b[0, h], b_k=b[1, h], b_v=b[2, h]),
            module.relative_position_bias_table[:, h], index, biases=True,
        )
        for h in range(2)
    ]  # fmt: skip
    layer = ProjectedHeads(tuple(forms), module.proj.weight, module.proj.bias)
    torch.testing.assert_close(layer.output(), module(x[None])[0].detach())
    names = ["qkv.weight", "qkv.bias", "relative_position_bias_table"]
    rest = {name: p.detach() for name, p in module.named_parameters()}

    def function(*given):
        return torch.func.functional_call(module, rest | dict(zip(names, given, strict=True)), x[None])[0]

    dense = dense_of(function, [rest[name] for name in names])
    torch.testing.assert_close(layer.output_gram(), dense @ dense.T)
    assert layer.structure().num_parameters == dense.shape[1]


def test_a_constant_added_to_the_table_changes_nothing():
    normal = normals(2)
    head = Head(normal(9, 5), normal(3, 5), normal(3, 5), normal(3, 5), 0.5)
    form = swin_head(head, normal(25), window_index(3))
    columns = form.parts[1].explicit_jacobian()
    assert float(columns.sum(1).abs().max()) < 1e-14
    assert numerical_rank(torch.linalg.svdvals(columns)) == 24
    moved = swin_head(head, normals(3)(25) * 0 + 2.5, window_index(3))
    torch.testing.assert_close(moved.output(), WideForm(head).output())


def test_the_table_lifts_the_rank_by_at_most_the_entries_read_less_one():
    normal = normals(4)
    head = Head(normal(16, 2), normal(2, 2), normal(2, 2), normal(2, 2), 0.7)
    form = swin_head(head, normal(49), window_index(4))
    base, structure = WideForm(with_position_table(head, normal(49), window_index(4))).structure(), form.structure()
    assert structure.max_rank == min(32, base.max_rank + 48)
    few = swin_head(head, normal(10), window_index(4) % 3)
    assert few.structure().max_rank == base.max_rank + 2
    assert numerical_rank(torch.linalg.svdvals(few.explicit_jacobian())) == few.structure().max_rank
    assert "upper bound" in few.structure().null_space
    assert form_spectrum(few).rank == few.structure().max_rank


def test_entries_that_only_a_lonely_key_reads_do_nothing():
    normal, index = normals(6), torch.tensor([[3, 0, 0, 0], [1, 1, 0, 0], [2, 1, 1, 0], [2, 2, 1, 1]])
    head = Head(normal(4, 1), normal(1, 1), normal(1, 1), normal(3, 1), 1.0, mask=causal(4))
    form = swin_head(head, normal(4), index)
    columns = form.parts[1].explicit_jacobian()
    assert columns[:, [0, 3]].abs().max() == 0  # entry 0 is masked, entry 3 is read by the only key of its row
    assert form.structure().max_rank == form.parts[0].structure().max_rank + 1


def test_refusals():
    normal = normals(5)
    base = WideForm(Head(normal(3, 4), normal(2, 4), normal(2, 4), normal(2, 4), 1.0))
    with pytest.raises(ValueError, match="integers of shape"):
        PositionTable(base, torch.zeros(2, 3, dtype=torch.long), 4)
    with pytest.raises(ValueError, match=r"entries in \[0, 4\)"):
        PositionTable(base, torch.full((3, 3), 4), 4)
