"""Every verb on every family: what is promised for one model holds for each of them."""

import warnings

import pytest
import torch

import wellcond as wc
from contracts import cases_hf, cases_timm
from contracts.harness import randomise_
from wellcond.linalg.spectrum import singular_values, spectra

BUILD = {f"timm-{name}": (case.build, case.input) for name, case in cases_timm.CASES.items()}
BUILD |= {f"hf-{case.name}": (case.build, case.inputs) for case in cases_hf.CASES}
pytestmark = [
    pytest.mark.parametrize("family", list(BUILD)),
    # what transformers says of its own default configs and of tiny models
    pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning"),
]


def build(family):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return BUILD[family][0]()


def sites_of(model):
    return wc.find_attention(model, strict=False)


@torch.no_grad()
def run(family, model):
    inputs = BUILD[family][1]()
    torch.manual_seed(0)  # some families draw in evaluation mode too (patch dropout, time masks)
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    tensors = list(output.values()) if isinstance(output, dict) else [output]
    while tensors and not isinstance(tensors[0], torch.Tensor):
        tensors = list(tensors[0]) if isinstance(tensors[0], (tuple, list)) else tensors[1:]
    return tensors[0]


def test_conditioned_initialisation(family):
    model = build(family)
    sites = sites_of(model)
    wc.init_(model, "conditioned", sites=sites, generator=torch.Generator().manual_seed(0))
    for site in sites:
        for role in "qkv":
            heads = site.slots[role].read()
            ones = torch.ones(len(heads), min(heads.shape[1:]), dtype=torch.float64)
            torch.testing.assert_close(singular_values(heads), ones, rtol=0, atol=1e-5)
        linear_path = site.by_role("value").read()
        assert torch.equal(linear_path, torch.eye(*linear_path.shape[1:]).to(linear_path).expand_as(linear_path))


NOT_THE_CONSTRUCTOR_S = {
    "timm-gcvit": "its constructor runs its _init_weights only for a weight_init that is not the default",
    "timm-pool_2d_rotary": "its constructor does not call its init_weights",
}


def test_default_initialisation_is_the_constructor_s(family):
    if family in NOT_THE_CONSTRUCTOR_S:
        pytest.skip(NOT_THE_CONSTRUCTOR_S[family])
    model = build(family)
    sites = sites_of(model)
    fresh = {(site.name, role): slot.read().detach().clone() for site in sites for role, slot in site.slots.items()}
    wc.init_(model, "gaussian", std=3.0, sites=sites)
    wc.init_(model, "default", sites=sites, generator=torch.Generator().manual_seed(1))
    for site in sites:
        for role, slot in site.slots.items():
            before, after = fresh[site.name, role], slot.read().detach()
            # Two draws from one distribution of n entries: their standard deviations agree to about 1/sqrt(n).
            error = 6 / before.numel() ** 0.5
            assert float(after.std()) == pytest.approx(float(before.std()), rel=error), f"{site.name} {role}"
            if float(before.std()) > 0:
                assert not torch.equal(before, after), f"{site.name} {role}"


@pytest.mark.parametrize(
    "method, options", [("balanced", {}), pytest.param("identity", {"lam": 0.5}, marks=pytest.mark.slow)]
)
def test_condition_and_fold(family, method, options):
    model = randomise_(build(family))
    sites = sites_of(model)
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    parameters = {name: id(p) for name, p in model.named_parameters()}
    plain = run(family, model)
    wc.condition_(model, method, sites=sites, **options)
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    if method == "balanced":
        for site in sites:
            for role in "qkv":
                assert all(s.condition_number <= 2 + 1e-9 for s in spectra(site.slots[role].read()))
    conditioned = run(family, model)
    wc.fold_(model)
    assert list(model.state_dict()) == keys and [type(m) for m in model.modules()] == classes
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    folded = run(family, model)
    assert not torch.allclose(plain, conditioned), "the correction had no effect"
    torch.testing.assert_close(folded, conditioned, rtol=0, atol=1e-9 * float(conditioned.abs().max()))
