"""An initialisation of a user: one function with a decorator, and `init_` does the rest."""

import pytest
import torch
from torch import nn

import wellcond as wc
from init.helpers import first, generator, tiny_vit
from models import stack
from wellcond.init.plan import FACTS, METHODS, Write
from wellcond.integrations.common import check_choices
from wellcond.lab.methods import MethodSettings


@pytest.fixture
def register():
    """`wc.register_init`, forgotten after the test."""
    names = []

    def decorator(name, **facts):
        names.append(name)
        return wc.register_init(name, **facts)

    yield decorator
    for name in names:
        if FACTS.pop(name, None) is not None:
            del METHODS[name]


def scaled(context, *, factor: float = 2.0):
    for site in context.sites:
        yield site.q, factor * torch.randn(site.q.read().shape, generator=context.generator)
        yield site.v.parameter, torch.zeros_like(site.v.parameter)


def test_a_users_method_works_like_one_of_ours(register):
    register("mine")(scaled)
    model = wc.init_(stack(), "mine", factor=3.0, generator=generator())
    site = first(model)
    expected = 3.0 * torch.randn(site.q.read().shape, generator=generator())
    assert not site.v.read().any()  # the whole parameter, after its queries
    separate = nn.MultiheadAttention(12, 2, kdim=6, vdim=6)
    wc.init_(separate, "mine", generator=generator())
    assert first(separate).q.read().std() > 1 and not first(separate).v.read().any()
    with pytest.raises(wc.OptionError, match="factor of 'mine': expected a finite number, got 'big'"):
        wc.init_(model, "mine", factor="big")
    with pytest.raises(wc.UnknownChoiceError, match="expected one of 'factor'"):
        wc.init_(model, "mine", size=1)
    with pytest.raises(wc.UnknownChoiceError, match="'mimetic', 'mine', 'nanochat'"):
        wc.init_(model, "unknown")
    check_choices({"method": "mine", "factor": 2.0}, None)
    MethodSettings(init="mine", init_options={"factor": 2.0}).apply_(stack(), seed=0)
    assert expected.shape == site.q.read().shape


def test_a_batch_reaches_a_method_that_takes_one(register):
    seen = []

    @register("measuring")
    def measuring(context, *, batch=None):
        seen.append(batch)
        return []

    MethodSettings(init="measuring").apply_(stack(), seed=0, forward="a function of the model")
    assert seen == ["a function of the model"]


def test_options_that_exclude_each_other_and_warnings_are_of_the_method(register):
    def check(*, small: bool = False, large: bool = False):
        if small and large:
            raise wc.OptionError("either small or large")

    def warn(sites, options):
        return f"{len(sites)} layers may suffer" if options["large"] else None

    @register("sized", check=check, warn=warn, projections="q")
    def sized(context, *, small: bool = False, large: bool = False):
        return [(site.q, site.q.read()) for site in context.sites]

    model = tiny_vit()
    for block in model.blocks:
        block.attn.proj.weight.requires_grad_(False)  # which it does not write
    wc.init_(model, "sized", small=True)
    with pytest.warns(wc.EvidenceWarning, match=r"init_\(model, 'sized'\): 2 layers may suffer") as said:
        wc.init_(model, "sized", large=True)
    assert said[0].filename == __file__
    with pytest.raises(wc.OptionError, match="either small or large"):
        wc.init_(model, "sized", small=True, large=True)


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (lambda site: (site.k, torch.zeros(2, 2)), wc.WeightError, r"expected values of shape \(\d+, \d+, \d+\), got"),
        (lambda site: (site.k.parameter, torch.zeros(1)), wc.WeightError, r"got \(1,\); nothing was changed"),
        (lambda site: (site.k, site.k.read() * torch.nan), wc.WeightError, "planned weights are not finite"),
        (lambda site: (site.k, "zeros"), TypeError, "expected a tensor, got str 'zeros'"),
        (lambda site: site.k, TypeError, "an initialisation yields pairs"),
        (lambda site: ("q", torch.zeros(1)), TypeError, "an initialisation yields pairs"),
        (lambda site: (nn.Parameter(torch.zeros(1)), torch.zeros(1)), wc.WeightError, "a parameter of this model"),
    ],
)
def test_what_cannot_be_written_is_named_and_everything_is_undone(entry, error, message, register):
    @register("wrong")
    def wrong(context):
        for site in context.sites:
            yield site.q, torch.ones_like(site.q.read())
            yield entry(site)

    model = stack()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(error, match=message):
        wc.init_(model, "wrong")
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_function_that_yields_nothing_is_told_to(register):
    register("silent")(lambda context: None)
    with pytest.raises(TypeError, match=r"expected a function that yields pairs .*, got None"):
        wc.init_(stack(), "silent")


def test_a_frozen_bias_is_not_written():
    model = nn.MultiheadAttention(8, 2)
    model.in_proj_bias.requires_grad_(False)
    with pytest.raises(wc.WeightError, match=r"\(q bias\) is frozen"):
        wc.init_(model, "default", rule="torch")


def test_a_write_of_a_bias():
    model = nn.MultiheadAttention(8, 2)
    slot = first(model).k
    write = Write("k bias", slot, torch.ones(2, 4), to_bias=True)
    write.check()
    write.commit_()
    assert model.in_proj_bias[8:16].eq(1).all() and write.parameter is model.in_proj_bias
