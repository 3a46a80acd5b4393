"""Row equilibration against its formula."""

import math

import pytest
import torch
from torch import nn

import wellcond as wc
from conditioning.test_corrections import effective, every_storage, vit
from wellcond.linalg.spectrum import spectra

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
OPTIONS = [{}, {"scale": "unit"}, {"layout": "joint"}, {"gradient": "straight_through"}]


def by_hand(heads, keep_norm=True):
    """diag(1 / |w_i|) W row by row, times |W|_F / sqrt(rows)."""
    rows = [[row / row.norm() for row in head] for head in heads]
    scales = [head.norm() / math.sqrt(len(head)) if keep_norm else 1.0 for head in heads]
    return torch.stack([scale * torch.stack(head) for head, scale in zip(rows, scales, strict=True)])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_of_equal_norm_in_every_storage(options):
    for name, model in every_storage().items():
        heads = effective(model)
        whole = heads.reshape(1, 24, 24) if options.get("layout") == "joint" else heads
        expected = by_hand(whole, options.get("scale") != "unit").reshape(heads.shape)
        wc.condition_(model, "equilibrated", **options)
        torch.testing.assert_close(effective(model), expected, msg=name)


def test_the_condition_number_falls_to_near_the_best_diagonal_one():
    # van der Sluis (1969): within sqrt(rows) of the smallest condition number of D W over diagonal D.
    torch.manual_seed(0)
    model = vit()
    site = wc.find_attention(model)[0]
    well = torch.linalg.qr(torch.randn(3, 24, 8))[0].mT
    site.q.write_(well * torch.logspace(-3, 0, 8)[:, None])
    assert min(s.condition_number for s in spectra(effective(model))) > 900
    wc.condition_(model, "equilibrated")
    assert max(s.condition_number for s in spectra(effective(model))) < 1.001


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients(options):
    torch.manual_seed(0)
    model = wc.condition_(vit(), "equilibrated", **options)
    weight = model.blocks[0].attn.qkv.weight
    model(X).square().sum().backward()
    found, output = weight.grad.clone(), model(X)
    raw = weight.detach().clone().requires_grad_()
    wc.fold_(model).zero_grad()
    torch.testing.assert_close(model(X), output)
    model(X).square().sum().backward()
    if options.get("gradient") == "straight_through":
        torch.testing.assert_close(found, weight.grad)
    else:
        count = 3 if options.get("layout") == "joint" else 9
        matrices = by_hand(raw.reshape(count, -1, 24), options.get("scale") != "unit")
        (matrices.reshape(72, 24) * weight.grad).sum().backward()
        torch.testing.assert_close(found, raw.grad)


def test_zero_rows_stay_zero_with_finite_gradients():
    model = nn.MultiheadAttention(8, 2)
    with torch.no_grad():
        model.in_proj_weight[1] = 0.0  # one row of the first query head
        model.in_proj_weight[4:8] = 0.0  # the whole second one
    wc.condition_(model, "equilibrated")
    site = wc.find_attention(model)[0]
    raw, used = site.q.read_raw(), site.q.read()
    assert not used[0, 1].any() and not used[1].any()
    torch.testing.assert_close(used[0].norm(), raw[0].norm())
    used.square().sum().backward()
    assert model.in_proj_weight.grad.isfinite().all()
