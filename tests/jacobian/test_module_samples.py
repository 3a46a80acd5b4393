"""Attention that is not plain softmax: which samples its Jacobian is about, and whose derivative it is."""

import threading

import pytest
import timm
import torch
from torch import nn

import wellcond as wc
from contracts.harness import randomise_
from jacobian.test_module import BUILD, captured_from
from wellcond.errors import CopyError
from wellcond.jacobian.capture import capture_attention
from wellcond.jacobian.module import ModuleJacobian, batch_axis
from wellcond.jacobian.select import select_operator
from wellcond.jacobian.solve import operator_spectrum


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def gated():
    return randomise_(timm.layers.Attention(12, num_heads=3, gated=True)), tokens(4, 5, 12)


def normed():
    return randomise_(timm.layers.Attention(12, num_heads=3, qk_norm=True, norm_layer=nn.LayerNorm)), tokens(4, 5, 12)


def channels():
    return randomise_(timm.models.xcit.XCA(12, num_heads=3)), tokens(4, 5, 12)


def sequence_first():
    x = tokens(5, 4, 12)
    return randomise_(nn.MultiheadAttention(12, 3, add_bias_kv=True)), (x, x, x)


def square_sequence_first():
    x = tokens(4, 4, 12)
    return randomise_(nn.MultiheadAttention(12, 3, add_bias_kv=True)), (x, x, x)


class AcrossTheBatch(timm.layers.Attention):
    """Scores of a sample depend on the others of its batch."""

    def forward(self, x, *args, **kwargs):
        return super().forward(x + x.mean(0, keepdim=True), *args, **kwargs)


def across():
    return randomise_(AcrossTheBatch(12, num_heads=3, gated=True)), tokens(4, 5, 12)


CASES = {f.__name__: f for f in (gated, normed, channels, sequence_first, square_sequence_first, across)}


def rows_of_sample(head, sample, batch_first):
    """Rows of one sample in the Jacobian of the whole call, whose rows are (token, channel)."""
    by_token = head.as_matrix().unflatten(0, (head.num_rows, -1))
    by_sample = by_token.unflatten(0, (4, -1)) if batch_first else by_token.unflatten(0, (-1, 4)).transpose(0, 1)
    return by_sample[sample].flatten(0, 1)


@pytest.mark.parametrize("name", CASES)
def test_samples_and_combine_are_honoured_whatever_the_attention(name):
    module, batch = CASES[name]()
    [captured] = capture_attention(module, batch)
    assert not captured.is_plain and batch_axis(captured).count == 4
    whole = ModuleJacobian(captured, 1)
    parts = [rows_of_sample(whole, sample, "sequence_first" not in name) for sample in range(4)]
    [layer] = wc.measure(module, batch, samples=3, kappa="pseudo").layers
    for sample, kappa in enumerate(layer.heads[1].samples):
        sigma = torch.linalg.svdvals(parts[sample])
        rank = int((sigma > 1e-10 * sigma[0]).sum())
        assert kappa == pytest.approx(float(sigma[0] / sigma[rank - 1]), rel=1e-5)
    assert len(layer.heads[1].samples) == 3 and layer.heads[1].jacobian.shape[0] == len(parts[0])
    [layer] = wc.measure(module, batch, samples=3, combine="stack").layers
    sigma = torch.linalg.svdvals(torch.cat(parts[:3]))
    assert layer.heads[1].jacobian.shape[0] == 3 * len(parts[0]) and len(layer.heads[1].samples) == 1
    assert layer.heads[1].jacobian.sigma_max == pytest.approx(float(sigma[0]), rel=1e-9)


@pytest.mark.parametrize("family", BUILD)
def test_every_family_is_told_apart_by_samples(family):
    """Its own inputs have a batch of one, or windows of one image: the last of them, as rows of the whole."""
    for captured in captured_from(family)[1][:2]:
        whole, count = ModuleJacobian(captured, 0), batch_axis(captured).count
        one = ModuleJacobian(captured, 0, samples=[count - 1])
        assert one.num_rows * count == whole.num_rows
        u = torch.randn(one.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        padded = torch.zeros(whole.output().shape, dtype=torch.float64)
        padded[:, -one.num_rows :] = u.view(one.output().shape)
        torch.testing.assert_close(one.rmatvec(u), whole.rmatvec(padded.flatten()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("build", "combine", "how"),
    [
        (normed, "mean", "structured: layer norm on queries and keys"),
        (normed, "stack", "structured: layer norm on queries and keys"),
        (channels, "mean", "structured: cross-covariance attention"),
        (channels, "stack", "generic derivatives: its kind is cross_covariance"),
    ],
)
def test_a_batch_keeps_the_structured_form(build, combine, how):
    module, batch = build()
    heads = wc.measure(module, batch, samples=2, combine=combine).layers[0].heads
    assert {head.how for head in heads} == {how}


def test_an_image_in_windows_with_masks_is_measured_window_by_window():
    model = randomise_(timm.create_model(
        "swinv2_tiny_window8_256", img_size=16, patch_size=2, window_size=4, embed_dim=12, depths=(2,), num_heads=(3,),
        num_classes=2,
    ))  # fmt: skip
    images = tokens(2, 3, 16, 16)
    shifted = capture_attention(model, images)[1]
    assert batch_axis(shifted).count == 8  # two images of four windows: one window by itself does not fit the masks
    whole = ModuleJacobian(shifted, 0).as_matrix()
    for window in range(3):
        found = ModuleJacobian(shifted, 0, samples=[window]).as_matrix()
        assert torch.equal(found, whole[16 * 4 * window : 16 * 4 * (window + 1)])
    with pytest.raises(IndexError, match="expected a sample below 8, got 8"):
        ModuleJacobian(shifted, 0, samples=[8])


class DetachedNorm(nn.LayerNorm):
    """The values of LayerNorm, with statistics that are no part of the derivative."""

    def forward(self, x):
        mean, variance = x.mean(-1, keepdim=True).detach(), x.var(-1, keepdim=True, unbiased=False).detach()
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


class NoGradNorm(nn.LayerNorm):
    """The same, by other means."""

    def forward(self, x):
        with torch.no_grad():
            mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


def autograd_of_head(module, x, head):
    """J of one head's output by reverse mode through the module itself, with respect to its rows of qkv."""
    rows = torch.cat([torch.arange(12 * role + 4 * head, 12 * role + 4 * head + 4) for role in range(3)])
    seen = []
    handle = module.proj.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))

    def output(some):
        weight = module.qkv.weight.detach().index_copy(0, rows, some)
        torch.func.functional_call(module, {"qkv.weight": weight}, (x,))
        return seen.pop()[0, :, 4 * head : 4 * head + 4]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = torch.autograd.functional.jacobian(output, module.qkv.weight.detach()[rows])
    handle.remove()
    return found.flatten(0, 1).flatten(1)


@pytest.mark.parametrize("norm", [DetachedNorm, NoGradNorm])
@pytest.mark.parametrize("method", ["auto", "implicit"])
def test_statistics_that_are_detached_are_not_differentiated(norm, method):
    module, x = randomise_(timm.layers.Attention(12, num_heads=3, qk_norm=True, norm_layer=norm)), tokens(1, 5, 12)
    sigma = torch.linalg.svdvals(autograd_of_head(module, x, 1))
    head = wc.measure(module, x, method=method).layers[0].heads[1]
    assert head.how.startswith("structured")
    assert head.jacobian.sigma_max == pytest.approx(float(sigma[0]), rel=1e-8)
    plain = randomise_(timm.layers.Attention(12, num_heads=3, qk_norm=True, norm_layer=nn.LayerNorm))
    plain.load_state_dict(module.state_dict())
    usual = wc.measure(plain, x, method=method).layers[0].heads[1]
    assert usual.how.startswith("structured")
    assert abs(usual.jacobian.sigma_max / head.jacobian.sigma_max - 1) > 1e-3


@pytest.mark.parametrize("biases", [False, True])
def test_a_structured_form_is_believed_with_biases_as_well(biases):
    module = randomise_(timm.layers.Attention(12, num_heads=3, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm))
    [captured] = capture_attention(module, tokens(1, 5, 12))
    chosen = select_operator(captured, 0, biases=biases)
    assert chosen.how.startswith("structured")
    assert operator_spectrum(chosen.operator).shape[1] == 3 * 4 * (12 + biases)
    assert wc.measure(*gated(), biases=True).layers[0].heads[0].how == "structured: gated output"
    talking = randomise_(timm.models.cait.TalkingHeadAttn(12, num_heads=3)), tokens(1, 5, 12)
    mixed = wc.measure(*talking, biases=True).layers[0].heads[0]
    assert mixed.how == "generic derivatives: heads are mixed (talking heads); biases are not counted"


class Uncopyable:
    """A hook with a lock, as a logger may have."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, *_args):
        return None


def test_a_hook_that_cannot_be_copied_is_left_out_of_the_copy():
    module, x = gated()
    expected = wc.measure(module, x)
    for part in module.modules():
        part.register_forward_hook(Uncopyable())
        part.register_forward_pre_hook(Uncopyable())
        part.register_full_backward_hook(Uncopyable())
    module._register_state_dict_hook(Uncopyable())
    assert wc.measure(module, x) == expected
    assert len(module.qkv._forward_hooks) == 1


def test_a_module_that_cannot_be_copied_costs_its_own_layer_only():
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=2, qk_norm=True
    )
    model.blocks[0].attn.lock = threading.Lock()
    lost, found = wc.measure(model, torch.randn(1, 3, 16, 16)).layers
    assert not lost.heads and "cannot be copied (TypeError: cannot pickle '_thread.lock' object)" in lost.problem
    assert found.heads and not found.problem
    captured = capture_attention(model, torch.randn(1, 3, 16, 16))[0]
    with pytest.raises(CopyError, match=r"blocks.0.attn: its module cannot be copied"):
        ModuleJacobian(captured)
