"""The spectral cap against singular value decompositions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import wellcond as wc
from contracts.test_every_family import build
from distributed.models import WRAPPERS, gather, loss_of
from distributed.models import build as build_distributed
from distributed.processes import run_on_two
from training.test_clip import LAYOUTS, QUIET, families, optimizer_of, same_state, state_of
from wellcond.training.cap import capped

ROUNDING = 2e-6


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(1, 12)),
    exponents=st.lists(st.floats(-6, 3), min_size=1, max_size=12),
    ratio=st.floats(0.001, 1.5),
    seed=st.integers(0, 1000),
)
def test_singular_values_above_the_cap_become_the_cap(shape, exponents, ratio, seed):
    torch.manual_seed(seed)
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    sigma = torch.tensor([10.0 ** exponents[i % len(exponents)] for i in range(u.shape[-1])], dtype=torch.float64)
    weights = ((u * sigma) @ v).float()
    w_max = ratio * float(sigma.max())
    result = capped(weights, w_max)
    assert float(torch.linalg.matrix_norm(result.double(), 2).max()) <= w_max * (1 + ROUNDING)
    expected = (u * sigma.clamp(max=w_max)) @ v
    assert float((result - expected).abs().max()) <= 2e-5 * w_max + 1e-6 * float(sigma.max())
    if ratio > 1.003:
        assert torch.equal(result, weights)


def norms_of(sites):
    slots = [slot for site in sites for slot in site.slots.values()]
    return [float(torch.linalg.matrix_norm(slot.read().detach(), 2).max()) for slot in slots]


def test_zero_and_bad_matrices_stay_by_themselves():
    weights = torch.stack([torch.zeros(4, 6), torch.full((4, 6), torch.nan), 5 * torch.eye(4, 6)])
    result = capped(weights, 2.0)
    assert torch.equal(result[0], weights[0]) and torch.isnan(result[1]).all()
    torch.testing.assert_close(result[2], 2 * torch.eye(4, 6), rtol=1e-4, atol=1e-6)


@QUIET
@pytest.mark.parametrize("family", families(LAYOUTS))
def test_every_family(family):
    model = build(family)
    sites = wc.find_attention(model, strict=False)
    largest = max(norms_of(sites))
    state = state_of(model)
    for w_max, touched in ((1.01 * largest, False), (0.5 * largest, True)):
        cap = wc.SpectralCap(model, optimizer := optimizer_of(model), w_max, sites=sites)
        optimizer.step()
        cap.remove()
        assert same_state(model, state) != touched
    assert max(norms_of(sites)) <= w_max * (1 + ROUNDING)


def test_only_the_projections_that_were_asked_for():
    model = nn.MultiheadAttention(8, 2)
    [site] = wc.find_attention(model)
    value, key = site.v.read(), site.k.read()
    wc.SpectralCap(model, optimizer := optimizer_of(model), 0.1, projections="k")
    optimizer.step()
    assert torch.equal(site.v.read(), value) and not torch.equal(site.k.read(), key)


def test_errors():
    model = nn.MultiheadAttention(8, 2)
    for w_max in (0, -1.0, float("nan"), "1"):
        with pytest.raises(wc.OptionError, match="w_max"):
            wc.SpectralCap(model, optimizer_of(model), w_max)
    with pytest.raises(wc.OptionError, match="'qkvo'"):
        wc.SpectralCap(model, optimizer_of(model), 1.0, projections="qx")
    with pytest.raises(wc.ConditioningError, match="fold_"):
        wc.SpectralCap(wc.condition_(model), optimizer_of(model), 1.0)


CASES = [("llama", "fsdp"), ("llama", "tp"), ("gpt2", "fsdp")]


def capped_on_processes(name, wrapper):
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](build_distributed(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_of(model).backward()
    wc.SpectralCap(model, optimizer, 0.05)
    optimizer.step()
    return gather(model)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_on_two(tmp_path_factory.mktemp("two"), capped_on_processes, CASES)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_two_processes_cap_as_one_does(case, two):
    assert not isinstance(two[case], str), two[case]
    for name, value in capped_on_processes(case[0], "alone").items():
        torch.testing.assert_close(two[case][name], value, rtol=1e-5, atol=1e-6)
