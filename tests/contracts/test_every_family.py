"""Every verb on every family: what is promised for one model holds for each of them."""

import warnings

import pytest
import torch

import wellcond as wc
from contracts import cases_hf, cases_timm
from contracts.harness import Seen, columns, randomise_
from wellcond.linalg.spectrum import singular_values, spectra

FAMILIES = {f"timm-{name}": case for name, case in cases_timm.CASES.items()}
FAMILIES |= {f"hf-{case.name}": case for case in cases_hf.CASES}
BUILD = list(FAMILIES)
pytestmark = [
    pytest.mark.parametrize("family", BUILD),
    # what transformers says of its own default configs and of tiny models
    pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning"),
]


def build(family):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FAMILIES[family].build()


def sites_of(model):
    return wc.find_attention(model, strict=False)


@torch.no_grad()
def run(family, model):
    torch.manual_seed(0)  # some families draw in evaluation mode too (patch dropout, time masks)
    output = FAMILIES[family].run(model)
    tensors = list(output.values()) if isinstance(output, dict) else [output]
    while tensors and not isinstance(tensors[0], torch.Tensor):
        tensors = list(tensors[0]) if isinstance(tensors[0], (tuple, list)) else tensors[1:]
    return tensors[0]


@torch.no_grad()
def test_heads_of_values_and_outputs_are_those_of_the_forward_pass(family):
    case, model = FAMILIES[family], randomise_(build(family))
    for site in case.chosen(sites_of(model)):
        seen = Seen(case, model, site)
        if site.o is None:
            assert family in ("timm-pool_latent", "timm-bottleneck", "timm-halo", "timm-cpubone")
        else:
            check_sum_over_heads(seen, site, family)
        before, value = seen.concatenated_heads(), site.by_role("value")
        victim = 0  # not the last: its rows end every fused weight, whatever the arrangement
        weight, bias = value.read_raw().clone(), value.read_bias()
        kept, kept_bias = weight.clone(), None if bias is None else bias.clone()
        weight[victim] = 0
        value.write_(weight)
        if bias is not None:
            bias[victim] = 0
            value.write_bias_(bias)
        after = Seen(case, model, site).concatenated_heads()
        users = torch.arange(site.num_heads) // (site.num_heads // value.num_heads) == victim
        gone, left = columns(site)[users].flatten(), columns(site)[~users].flatten()
        assert before[..., gone].abs().max() > 1e-6
        assert after[..., gone].abs().max() == 0, site.name
        torch.testing.assert_close(after[..., left], before[..., left], rtol=1e-10, atol=1e-12)
        value.write_(kept)
        if kept_bias is not None:
            value.write_bias_(kept_bias)


def check_sum_over_heads(seen, site, family):
    x, is_map = seen.inputs[site.o.owner], isinstance(site.o.owner, torch.nn.Conv2d)
    heads = seen.as_tokens(x, is_map=is_map)[..., site.o.rows].transpose(1, 2)
    expected = torch.einsum("lhnd,hod->lno", heads, site.o.read())
    if site.o.read_bias() is not None:
        expected = expected + site.o.read_bias()
    if family == "timm-vit_parallel_fused":  # the MLP's columns of the same projection
        expected = expected + x[..., site.o.rows.numel() :] @ site.o.parameter[:, site.o.rows.numel() :].T
    found = seen.as_tokens(seen.outputs[site.o.owner], is_map=is_map)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_writing_back_what_was_read_changes_nothing(family):
    model = randomise_(build(family))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for site in sites_of(model):
        for slot in site.slots.values():
            stored, heads, bias = slot.parameter.clone(), slot.read().clone(), slot.read_bias()
            slot.parameter.fill_(torch.nan)
            slot.write_(heads)
            # Only the rows of this slot are written; the rest of a fused weight stays as it was made.
            assert slot.parameter.isnan().sum() == stored.numel() - heads.numel()
            slot.parameter.copy_(stored)
            slot.write_(heads)
            if bias is not None:
                slot.write_bias_(bias.clone())
    after = model.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)


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
