"""Each family of vision models, with its real classes at a reduced size, through all that is done to it."""

import copy
import functools
import math

import pytest
import timm
import torch
from timm.models.davit import ChannelAttention
from timm.models.davit import WindowAttention as DavitWindowAttention
from timm.models.swin_transformer import WindowAttention as SwinWindowAttention
from timm.models.vision_transformer import Attention
from timm.models.xcit import XCA, ClassAttn
from torch.nn.functional import cross_entropy

from wellcond import conditioning_of, find_attention, fold_, measure
from wellcond.lab.methods import MethodSettings
from wellcond.lab.optimizers import AdamW

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
FAMILIES = {
    # name: (timm's model, arguments, {class of attention: (kind, attends from the class token only)})
    "vit": ("vit_base_patch16_224", VIT, {Attention: ("softmax", False)}),
    "deit": ("deit_base_patch16_224", VIT, {Attention: ("softmax", False)}),
    "deit3": ("deit3_large_patch16_224", VIT, {Attention: ("softmax", False)}),
    "swin": (
        "swin_base_patch4_window7_224",
        {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 4)},
        {SwinWindowAttention: ("softmax", False)},
    ),
    "xcit": (
        "xcit_medium_24_p16_224",
        {"img_size": 32, "patch_size": 8, "embed_dim": 8, "depth": 2, "num_heads": 2, "cls_attn_layers": 1},
        {XCA: ("cross_covariance", False), ClassAttn: ("softmax", True)},
    ),
    "davit": (
        "davit_base",
        {"depths": (1, 1), "embed_dims": (8, 16), "num_heads": (2, 4), "window_size": 2},
        {DavitWindowAttention: ("softmax", False), ChannelAttention: ("channel", False)},
    ),
}
METHODS = ["default", "gaussian", "mimetic", "conditioned", "orthogonal", "identity(lam=1)", "polar", "balanced"]
CONDITIONS = ("identity(lam=1)", "polar", "balanced")
SAMPLES, CLASSES = 4, 3


def images(family):
    size = FAMILIES[family][1].get("img_size", 16)
    return torch.randn(SAMPLES, 3, size, size, generator=torch.Generator().manual_seed(1))


@functools.cache
def built(family):
    name, arguments, _ = FAMILIES[family]
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=CLASSES, drop_path_rate=0.0, **arguments)


def prepared(family, method):
    return MethodSettings.model_validate(method).apply_(copy.deepcopy(built(family)), seed=0)


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return request.param


def test_attentions_are_of_the_familys_own_classes(family):
    expected = FAMILIES[family][2]
    found = find_attention(built(family))
    assert {type(site.module): (site.kind, site.cross) for site in found} == expected
    assert all(site.evidence == "adapter" and site.num_heads > 1 and site.head_dim > 1 for site in found)
    assert {site.relative_position_bias for site in found} == {family == "swin"}


@pytest.mark.parametrize("method", METHODS)
def test_a_step_trains_q_k_and_v_of_every_head(family, method):
    model = prepared(family, method).train()
    optimizer = AdamW(lr=1e-2, weight_decay=0.05).build(model)
    before = {site.name: [slot.read_raw().detach().clone() for slot in qkv(site)] for site in find_attention(model)}
    loss = cross_entropy(model(images(family)), torch.arange(SAMPLES) % CLASSES)
    loss.backward()
    assert math.isfinite(loss.item())
    for site in find_attention(model):
        for name, slot in zip("qkv", qkv(site), strict=True):
            gradient = slot.parameter.grad
            assert gradient is not None and gradient.isfinite().all(), (site.name, name)
            assert (slot.take_heads(gradient).abs().amax((1, 2)) > 0).all(), (site.name, name)
    optimizer.step()
    for site in find_attention(model):
        for name, slot, old in zip("qkv", qkv(site), before[site.name], strict=True):
            assert not torch.equal(slot.read_raw(), old) and slot.read_raw().isfinite().all(), (site.name, name)
    with torch.no_grad():
        assert model.eval()(images(family)).isfinite().all()


def qkv(site):
    return site.q, site.k, site.v


def with_loud_attention(model):
    """LayerScale (DeiT III, XCiT) starts so small that the output would not tell whether the attention changed."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gamma" in name.rpartition(".")[2]:
                parameter.fill_(1.0)
    return model


@pytest.mark.parametrize("method", CONDITIONS)
def test_folding_keeps_the_outputs_and_gives_plain_classes(family, method):
    plain = with_loud_attention(copy.deepcopy(built(family)).eval())
    model = with_loud_attention(prepared(family, method).eval())
    assert conditioning_of(model)["method"] == method.partition("(")[0]
    with torch.no_grad():
        conditioned, unconditioned = model(images(family)), plain(images(family))
        assert not torch.allclose(conditioned, unconditioned, rtol=1e-4, atol=1e-6)
        fold_(model)
        torch.testing.assert_close(model(images(family)), conditioned, rtol=1e-5, atol=1e-6)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert list(model.state_dict()) == list(plain.state_dict()) and conditioning_of(model) is None


@pytest.mark.parametrize("method", METHODS)
def test_one_head_of_each_kind_of_attention_is_measured(family, method):
    model = prepared(family, method).eval()
    first = {type(site.module): number for number, site in reversed(list(enumerate(find_attention(model))))}
    report = measure(model, images(family), layers=sorted(first.values()), heads=[0])
    assert {layer.kind for layer in report.layers} == {kind for kind, _ in FAMILIES[family][2].values()}
    for layer in report.layers:
        assert layer.problem == ""
        [head] = layer.heads
        spectra = [*head.weights.values(), *head.raw_weights.values()]
        assert {*head.weights} == {*"qkv"} and all(math.isfinite(spectrum.sigma_max) for spectrum in spectra)
        assert head.jacobian is not None
        assert math.isfinite(head.jacobian.sigma_max) and head.jacobian.sigma_max > 0
        assert math.isfinite(head.mean_kappa("pseudo")) and head.mean_kappa("pseudo") >= 1
