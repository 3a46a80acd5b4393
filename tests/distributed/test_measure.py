"""`measure` of a model whose weights are sharded over two processes: the numbers of the plain model, on each."""

import functools

import pytest
import torch

import wellcond as wc
from distributed.models import WRAPPERS, blocks_of, build, probe_of
from distributed.processes import on_two

pytestmark = pytest.mark.processes


def numbers(report):
    return [[head.mean_kappa() for head in layer.heads] for layer in report.layers]


def on_both(report):
    both = [None, None]
    torch.distributed.all_gather_object(both, numbers(report))
    return {"both": both, "problems": [layer.problem for layer in report.layers]}


def spoil(model, layers):
    with torch.no_grad():
        for layer in layers:
            for parameter in blocks_of(model)[layer].attn.parameters():
                parameter.mul_(1e200)
    return model


def measure(case):
    if case in WRAPPERS:
        model = WRAPPERS[case](build("llama" if case == "tp" else "vit"))
        return on_both(wc.measure(model, probe_of(model), kappa="pseudo"))
    model = WRAPPERS["fsdp"](build("vit"))
    if case == "conditioned":
        wc.condition_(model, "balanced")
        return on_both(wc.measure(model, probe_of(model)))
    if case == "one head of one layer":
        return on_both(wc.measure(model, probe_of(model), layers=[1], heads=[2]))
    if case == "resume":
        wc.measure(model, probe_of(model), resume="heads.jsonl")
    model = WRAPPERS["fsdp"](spoil(build("vit").double(), [1] if case == "a broken layer" else [0, 1]))
    return on_both(wc.measure(model, probe_of(model).double()))


@pytest.fixture
def two(tmp_path):
    return functools.partial(on_two, tmp_path, measure)


@pytest.mark.parametrize("case", ["fsdp", "fsdp at once", "tp"])
def test_every_process_has_the_numbers_of_the_plain_model(two, case):
    model = build("llama" if case == "tp" else "vit")
    found = two(case)
    ours, theirs = found["both"]
    assert ours == theirs and found["problems"] == ["", ""]
    for layer, expected in zip(ours, numbers(wc.measure(model, probe_of(model), kappa="pseudo")), strict=True):
        assert layer == pytest.approx(expected, rel=1e-4)


def test_corrections_are_measured_with_the_weights(two):
    model = wc.condition_(build("vit"), "balanced")
    expected = numbers(wc.measure(model, probe_of(model)))
    assert two("conditioned")["both"][0] == [pytest.approx(layer, rel=1e-4) for layer in expected]


def test_layers_and_heads_can_be_chosen(two):
    model = build("vit")
    expected = wc.measure(model, probe_of(model)).layers[1].heads[2].mean_kappa()
    assert two("one head of one layer")["both"][0] == [[pytest.approx(expected, rel=1e-4)]]


def test_a_layer_that_fails_leaves_the_others_and_nothing_at_all_is_an_error(two):
    found = two("a broken layer")
    ours, theirs = found["both"]
    assert ours == theirs and len(ours[0]) == 3 and not ours[1]
    first, second = found["problems"]
    assert not first and second
    nothing = two("nothing")
    assert nothing.startswith("WellcondError") and "no head could be measured" in nothing


def test_what_sharded_models_do_not_offer_is_refused(two):
    assert two("resume").startswith("ValueError: resume: a model that is sharded")
