import pytest
import torch

from lab.helpers import same_state, tiny_gpt2, tiny_vit
from wellcond import condition_
from wellcond.lab.train.evaluate import WeightAverage


@torch.no_grad()
def shake(model, seed=0):
    source = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=source))


def copied(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("make", [tiny_vit, tiny_gpt2])
def test_the_average_follows_its_formula(make):
    model = make()
    average = WeightAverage(model, 0.9)
    expected = {name: value.double() for name, value in copied(model).items()}
    for seed in range(5):
        shake(model, seed)
        average.update()
        expected = {name: 0.9 * value + 0.1 * copied(model)[name].double() for name, value in expected.items()}
    found = average.state
    assert list(found) == list(expected)
    assert all(torch.allclose(found[name].double(), expected[name], rtol=1e-5, atol=1e-6) for name in expected)


def test_it_starts_as_the_weights_and_shares_no_memory():
    model = tiny_vit()
    before = copied(model)
    average = WeightAverage(model, 0.5)
    shake(model)
    assert same_state(average.state, before)


@pytest.mark.parametrize("broken", [False, True])
def test_the_weights_come_back_bit_for_bit(broken):
    model = tiny_vit()
    average = WeightAverage(model, 0.7)
    start, identities = copied(model), [id(p) for p in model.parameters()]
    shake(model)
    before, kept = copied(model), {name: value.clone() for name, value in average.state.items()}
    try:
        with average.in_place():
            assert same_state(copied(model), start)
            if broken:
                raise KeyError
    except KeyError:
        assert broken
    assert same_state(copied(model), before) and same_state(average.state, kept)
    assert [id(p) for p in model.parameters()] == identities and all(p.requires_grad for p in model.parameters())


def test_a_conditioned_model_runs_on_its_average():
    model = condition_(tiny_vit(), "balanced").eval()
    image = torch.linspace(-1, 1, 64).view(1, 1, 8, 8)
    average = WeightAverage(model, 0.7)
    with torch.no_grad():
        start = model(image)
        shake(model)
        moved = model(image)
        with average.in_place():
            assert torch.equal(model(image), start)
        assert torch.equal(model(image), moved) and not torch.equal(moved, start)
