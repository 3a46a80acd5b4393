"""Learning rates of queries and keys: as groups where they are weights of their own, row by row where they are not."""

import copy

import pytest
import torch
from torch import nn

import wellcond as wc
from attention.modern import Grouped, PerHead, Stack
from distributed.models import WRAPPERS, gather, loss_of
from distributed.models import build as build_distributed
from distributed.processes import run_on_two
from lab.helpers import tiny_bert, tiny_gpt2, tiny_vit


def step(model, make=lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1), **rate):
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer = make(model.parameters())
    if rate:
        wc.QKRate(model, optimizer, **rate)
    optimizer.step()
    return model


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_bert, Grouped, Stack, PerHead])
def test_queries_and_keys_move_so_many_times_as_far(make):
    start = make()
    plain, slower = step(copy.deepcopy(start)), step(copy.deepcopy(start), factor=0.25)
    for first, one, other in zip(*(wc.find_attention(model) for model in (start, plain, slower)), strict=True):
        for role, slot in one.slots.items():
            moved, expected = (
                other.slots[role].read() - first.slots[role].read(),
                slot.read() - first.slots[role].read(),
            )
            factor = 0.25 if role in "qk" else 1.0
            torch.testing.assert_close(moved, factor * expected, rtol=1e-3, atol=1e-6)


def test_groups_of_separate_weights():
    model = tiny_bert()
    groups = wc.parameter_groups(model, 0.1, lr=1e-3, qk_lr=1e-4)
    held = {id(parameter): group for group in groups for parameter in group["params"]}
    assert set(held) == {id(parameter) for parameter in model.parameters()}
    for site in wc.find_attention(model):
        rates = {role: held[id(slot.parameter)]["lr"] for role, slot in site.slots.items()}
        assert rates == {"q": 1e-4, "k": 1e-4, "v": 1e-3, "o": 1e-3}
        assert held[id(site.q.stored_bias())] == held[id(site.v.stored_bias())]
    assert sorted((group["lr"], group["weight_decay"]) for group in groups) == [(1e-4, 0.1), (1e-3, 0.0), (1e-3, 0.1)]
    torch.optim.AdamW(groups)


def test_without_settings_there_is_one_group():
    model = tiny_vit()
    [group] = wc.parameter_groups(model)
    assert list(group) == ["params"] and len(group["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("make", [tiny_vit, tiny_gpt2, Stack])
def test_a_fused_weight_is_refused_with_what_does_it(make):
    with pytest.raises(wc.UnsupportedLayoutError, match="QKRate"):
        wc.parameter_groups(make(), qk_lr=1e-4)


def test_errors():
    model = nn.MultiheadAttention(8, 2)
    with pytest.raises(wc.OptionError, match="qk_lr"):
        wc.parameter_groups(model, qk_lr=-1.0)
    with pytest.raises(wc.OptionError, match="factor"):
        wc.QKRate(model, torch.optim.SGD(model.parameters()), float("nan"))
    with pytest.raises(wc.OptionError, match="holds"):
        wc.QKRate(model, torch.optim.SGD(nn.Linear(2, 2).parameters()), 0.5)


CASES = [("llama", "fsdp"), ("llama", "tp"), ("gpt2", "fsdp")]


def slowed_on_processes(name, wrapper):
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](build_distributed(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    wc.QKRate(model, optimizer, 0.5)
    loss_of(model).backward()
    optimizer.step()
    return gather(model)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_on_two(tmp_path_factory.mktemp("two"), slowed_on_processes, CASES)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_two_processes_step_as_one_does(case, two):
    assert not isinstance(two[case], str), two[case]
    for name, value in slowed_on_processes(case[0], "alone").items():
        torch.testing.assert_close(two[case][name], value, rtol=1e-5, atol=1e-6)
