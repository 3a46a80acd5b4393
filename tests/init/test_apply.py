"""The verb `init_`: seeds, storage, dtypes, what it refuses, and what a failure leaves."""

import pytest
import timm
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

import wellcond as wc
from init.helpers import assert_semi_orthogonal, first, generator, tiny_vit
from models import NanoGPTAttention, XTransformersAttention, stack, unchanged
from wellcond.init.apply import FACTS, METHODS
from wellcond.integrations.common import check_choices
from wellcond.lab.methods import MethodSettings

EVERY_METHOD = sorted(set(METHODS) - {"weight_selection", "calibrated"})  # these need more than a model


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_the_seed_decides_whatever_the_global_state(method):
    one, two = tiny_vit(), tiny_vit()
    two.load_state_dict(one.state_dict())
    wc.init_(one, method, generator=generator(3))
    torch.manual_seed(77)
    state = torch.get_rng_state()
    wc.init_(two, method, generator=generator(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    wc.init_(two, method, generator=generator(4))
    assert not torch.equal(one.blocks[0].attn.qkv.weight, two.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize(
    "method, options, roles",
    [
        ("conditioned", {"output": True}, "qkvo"),
        ("gaussian", {}, "qkv"),
        ("mimetic", {}, "qkvo"),
        ("mimetic_vo", {"rest": "zero"}, "vo"),
    ],
)
def test_the_same_seed_gives_the_same_weights_whatever_the_storage(method, options, roles):
    storages = [
        timm.models.VisionTransformer(img_size=8, patch_size=4, embed_dim=24, depth=1, num_heads=3, num_classes=0),
        NanoGPTAttention(24, 3),
        XTransformersAttention(24, heads=3, dim_head=8),
        nn.MultiheadAttention(24, 3),
        GPT2Model(GPT2Config(n_embd=24, n_head=3, n_layer=1, vocab_size=11, n_positions=16)),
    ]
    sites = [first(wc.init_(model, method, generator=generator(5), **options)) for model in storages]
    for site in sites[1:]:
        for role in roles:
            assert torch.equal(site.slots[role].read(), sites[0].slots[role].read())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_the_float32_result_cast(dtype):
    plain = first(wc.init_(tiny_vit(), "conditioned", generator=generator()))
    other = first(wc.init_(tiny_vit().to(dtype), "conditioned", generator=generator()))
    assert other.q.read().dtype == dtype
    assert torch.equal(other.q.read(), plain.q.read().to(dtype))


def test_sites_restrict():
    model = stack(depth=2)
    before = model[0].attn.c_attn.weight.clone()
    wc.init_(model, "conditioned", sites=wc.find_attention(model)[1:])
    assert torch.equal(model[0].attn.c_attn.weight, before)
    with pytest.raises(ValueError, match="not a part of this model"):
        wc.init_(model, "conditioned", sites=wc.find_attention(stack()))
    with pytest.raises(ValueError, match="empty list"):
        wc.init_(model, "conditioned", sites=[])


def test_unknown_methods_and_options_list_the_choices():
    model = stack()
    for method, options, said in (
        ("balanced", {}, r"wellcond.condition_\(model, \"balanced\"\)"),
        ("conditoned", {}, "Did you mean 'conditioned'"),
        ("condtioned", {}, "'default', 'gaussian'"),
        ("conditioned", {"values": "joint"}, "'orthogonal', 'heads', 'value'"),
        ("conditioned", {"value": "shared"}, "'per_head', 'joint', 'orthogonal'"),
        ("conditioned", {"projections": "qo"}, "projection"),
    ):
        with pytest.raises(wc.UnknownChoiceError, match=said):
            wc.init_(model, method, **options)
    with pytest.raises(ValueError, match="subset of 'qkv'"):
        wc.init_(model, "conditioned", projections="")


def test_meta_and_frozen_parameters_are_refused():
    with torch.device("meta"):
        on_meta = stack()
    with pytest.raises(wc.WeightError, match="to_empty"):
        wc.init_(on_meta, "conditioned")
    frozen = stack()
    frozen[1].attn.c_attn.weight.requires_grad_(False)
    before = frozen[0].attn.c_attn.weight.clone()
    with pytest.raises(wc.WeightError, match=r"1.attn \(q\) is frozen"):
        wc.init_(frozen, "conditioned")
    assert torch.equal(frozen[0].attn.c_attn.weight, before)


def test_tied_weights_are_refused_unless_every_holder_is_rewritten_alike():
    model = stack(XTransformersAttention, depth=2)
    model[1].attn.to_q.weight = model[0].attn.to_q.weight
    wc.init_(model, "conditioned")  # both holders are queries of the same shape
    assert_semi_orthogonal(first(model).q.read())
    with pytest.raises(wc.WeightError, match="tied.*0.attn.to_q.weight, 1.attn"):
        wc.init_(model, "conditioned", sites=wc.find_attention(model)[:1])
    model[0].attn.to_k.weight = model[0].attn.to_q.weight
    with pytest.raises(wc.WeightError, match="tied"):
        wc.init_(model, "conditioned")


def test_values_that_overflow_the_stored_dtype_are_refused():
    with pytest.raises(wc.WeightError, match="not finite"):
        wc.init_(tiny_vit().half(), "conditioned", value_scale=1e6)


@pytest.mark.parametrize(
    ("method", "options", "free"),
    [
        ("conditioned", {}, "o"),
        ("conditioned", {"projections": "qk"}, "vo"),
        ("orthogonal", {"projections": "v"}, "qko"),
        ("gaussian", {"projections": "q"}, "kvo"),
        ("default", {"output": False}, "o"),
        ("default", {"output": False, "rule": "torch"}, "o"),
    ],
)
def test_only_what_is_written_must_be_writable(method, options, free):
    model = XTransformersAttention(12, heads=3, dim_head=4)
    [site] = wc.find_attention(model)
    for role in free:
        site.slots[role].parameter.requires_grad_(False)
    before = {role: slot.read().clone() for role, slot in site.slots.items()}
    wc.init_(model, method, **options)
    for role, slot in site.slots.items():
        assert torch.equal(slot.read(), before[role]) is (role in free)


@pytest.mark.parametrize(
    ("method", "options"), [("conditioned", {"output": True}), ("default", {}), ("mimetic", {})], ids=str
)
def test_an_output_projection_that_is_written_must_be_writable(method, options):
    model = XTransformersAttention(12, heads=3, dim_head=4)
    wc.find_attention(model)[0].o.parameter.requires_grad_(False)
    with pytest.raises(wc.WeightError, match=r"\(o\) is frozen"):
        wc.init_(model, method, **options)


def test_one_line_says_what_was_done(caplog):
    with caplog.at_level("INFO", logger="wellcond"):
        wc.init_(tiny_vit(), "conditioned")
        wc.init_(nn.MultiheadAttention(256, 4), "default")
    assert [record.getMessage() for record in caplog.records] == [
        "init_ 'conditioned': 6 heads of 2 attention layers, 2 weights with 3,456 numbers",
        "init_ 'default': 4 heads of 1 attention layer, 4 weights with 263,168 numbers",
    ]


# An initialisation of a user: one function with a decorator.


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
    assert not site.v.read().any()  # the whole parameter, after its queries
    separate = first(wc.init_(nn.MultiheadAttention(12, 2, kdim=6, vdim=6), "mine", generator=generator()))
    assert torch.equal(separate.q.read(), 2.0 * torch.randn(2, 6, 12, generator=generator()))
    for method, options, said in (("mine", {"factor": "big"}, "factor"), ("mine", {"size": 1}, "'factor'")):
        with pytest.raises(wc.OptionError, match=said):
            wc.init_(model, method, **options)
    with pytest.raises(wc.UnknownChoiceError, match="'mine'"):
        wc.init_(model, "unknown")
    check_choices({"method": "mine", "factor": 2.0}, None)
    MethodSettings(init="mine", init_options={"factor": 2.0}).apply_(stack(), seed=0)


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
    with unchanged(model), pytest.raises(error, match=message):
        wc.init_(model, "wrong")
