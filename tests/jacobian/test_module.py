"""Any attention, differentiated through its own module: values, products, finite differences, and its samples."""

from __future__ import annotations

import threading

import pytest
import timm
import torch
from torch import Tensor, nn

import wellcond as wc
from contracts import cases_hf
from contracts.harness import randomise_
from jacobian.families import BUILD, family
from wellcond.errors import CopyError, ReplayError
from wellcond.jacobian.capture import capture_attention
from wellcond.jacobian.module import ModuleJacobian, batch_axis
from wellcond.jacobian.select import select_operator
from wellcond.jacobian.solve import operator_spectrum

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")
F64 = torch.float64
DIFFERENCED = [
    "hf-llama", "hf-qwen3-next", "hf-nystromformer", "hf-gemma2", "hf-gpt-oss", "hf-esm", "hf-modernbert", "timm-cait",
    "timm-swin_v2", "timm-xcit", "timm-davit", "timm-vit_qk_norm", "timm-multi_query", "timm-sam", "timm-bottleneck",
]  # fmt: skip


def head_of(name: str) -> ModuleJacobian:
    """The last key/value head of the first attention that is not plain."""
    captured = next(c for c in family(name).captured if not c.is_plain)
    return ModuleJacobian(captured, captured.site.num_kv_heads - 1)


@pytest.mark.parametrize("name", BUILD)
def test_every_family_runs_again_in_float64_and_sample_by_sample(name):
    """Values are the model's own, plain or not; its last sample or window has the last rows of the whole."""
    for captured, heads in list(zip(family(name).captured, family(name).heads, strict=True))[:2]:
        whole, count = ModuleJacobian(captured, 0), batch_axis(captured).count
        if heads is not None and (captured.site.o is not None or not captured.is_plain):
            expected, tolerance = heads[:, captured.query_heads(0)].transpose(0, 1), family(name).tolerance
            torch.testing.assert_close(whole.output(), expected, rtol=tolerance, atol=tolerance)
        one = ModuleJacobian(captured, 0, samples=[count - 1])
        assert one.num_rows * count == whole.num_rows
        u = torch.randn(one.shape[0], dtype=F64, generator=torch.Generator().manual_seed(0))
        padded = torch.zeros(whole.output().shape, dtype=F64)
        padded[:, -one.num_rows :] = u.view(one.output().shape)
        torch.testing.assert_close(one.rmatvec(u), whole.rmatvec(padded.flatten()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", DIFFERENCED)
def test_jacobian_is_the_limit_of_differences(name):
    head = head_of(name)
    jacobian = head.as_matrix()
    assert jacobian.shape == head.shape
    assert int(torch.linalg.matrix_rank(jacobian, rtol=1e-11)) <= head.rank_bound().rank
    weights = head.flatten(head.w_q, head.w_k, head.w_v)
    generator = torch.Generator().manual_seed(0)
    directions = torch.eye(head.shape[1], dtype=F64)[torch.randperm(head.shape[1], generator=generator)[:8]]
    directions = torch.cat([directions, torch.randn(2, head.shape[1], generator=generator, dtype=F64)])
    step = 1e-5
    for v in directions:
        with torch.no_grad():
            ahead, behind = (head.output(*head.unflatten(weights + sign * step * v)).flatten() for sign in (1, -1))
        expected = (ahead - behind) / (2 * step)
        torch.testing.assert_close(jacobian @ v, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max() + 1e-3))
    torch.testing.assert_close(head.matvec(v), jacobian @ v, rtol=1e-9, atol=1e-9)
    u = torch.randn(head.shape[0], dtype=F64)
    torch.testing.assert_close(head.rmatvec(u), jacobian.T @ u)
    torch.testing.assert_close(head.gram().matvec(u), jacobian @ (jacobian.T @ u))


def test_tokens_that_span_little_bound_the_rank():
    attention = randomise_(timm.layers.Attention(12, num_heads=3, qk_norm=True, norm_layer=nn.LayerNorm))
    x = torch.randn(1, 40, 3, dtype=F64) @ torch.randn(3, 12, dtype=F64)
    [captured] = capture_attention(attention, x)
    bound = ModuleJacobian(captured).rank_bound()
    assert bound.memory_rank == 3 and bound.rank == 3 * 4 * 3
    assert "outside the span of the tokens: 108" in bound.null_space


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 6}, {"add_bias_kv": True}, {"bias": False}])
def test_torch_attention_whose_output_projection_is_no_call(options):
    module = randomise_(nn.MultiheadAttention(8, 2, **options))
    x, y = torch.randn(4, 3, 8, dtype=F64), torch.randn(5, 3, options.get("kdim", 8), dtype=F64)
    [captured] = capture_attention(module, (x, y, 2 * y))
    heads = [ModuleJacobian(captured, kv) for kv in range(2)]
    concatenated = torch.cat([head.output()[0] for head in heads], dim=-1).view(4, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(module.out_proj(concatenated), module(x, y, 2 * y)[0])


def test_module_without_output_projection_that_mixes_heads_is_taken_whole():
    [captured] = family("timm-cpubone").captured
    assert captured.site.o is None and ModuleJacobian(captured, 0).output().shape == (1, 9, 64)


def test_float32_models_are_run_again_in_float64():
    [case] = [case for case in cases_hf.CASES if case.name == "gemma2"]
    model = case.build()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    head = ModuleJacobian(capture_attention(model, case.inputs())[0], 0)
    assert head.output().dtype == F64 and next(model.parameters()).dtype == torch.float32
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


class Through(nn.Module):
    """Applies an autograd function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


def _as_vit(module: nn.Module) -> list[wc.AttentionSite]:
    from wellcond.attention.site import ModuleContext

    return [
        wc.build_site(
            ModuleContext("", module, module), {"qkv": module.qkv}, num_heads=4, output=module.proj, scale=0.5
        )
    ]


def test_derivatives_are_what_training_sees():
    """A backward that is not the derivative (here: twice it) is what J says, in products of either kind."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    module = randomise_(timm.layers.Attention(12, num_heads=4))
    x = torch.randn(1, 4, 12, dtype=F64)
    right = ModuleJacobian(capture_attention(module, x, sites=_as_vit(module))[0], 0).as_matrix()
    module.q_norm = Through(Doubled)
    head = ModuleJacobian(capture_attention(module, x, sites=_as_vit(module))[0], 0)
    jacobian, queries = head.as_matrix(), head.w_q.numel()
    torch.testing.assert_close(jacobian[:, :queries], 2 * right[:, :queries])
    torch.testing.assert_close(jacobian[:, queries:], right[:, queries:])
    v = torch.randn(head.shape[1], dtype=F64)
    torch.testing.assert_close(head.matvec(v), jacobian @ v)


def test_modules_that_remember_are_refused():
    class Counting(timm.layers.Attention):
        count = 0

        def forward(self, x):
            self.count += 1
            return super().forward(x * self.count)

    module = randomise_(Counting(12, num_heads=4))
    [captured] = capture_attention(module, torch.randn(1, 4, 12, dtype=F64), sites=_as_vit(module))
    with pytest.raises(ReplayError, match="more than its arguments"):
        ModuleJacobian(captured, 0)


# -- samples


def tokens(*shape):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(3))


def gated():
    return randomise_(timm.layers.Attention(12, num_heads=3, gated=True)), tokens(4, 5, 12)


def normed():
    return randomise_(timm.layers.Attention(12, num_heads=3, qk_norm=True, norm_layer=nn.LayerNorm)), tokens(4, 5, 12)


def channels():
    return randomise_(timm.models.xcit.XCA(12, num_heads=3)), tokens(4, 5, 12)


def square_sequence_first():
    x = tokens(4, 4, 12)
    return randomise_(nn.MultiheadAttention(12, 3, add_bias_kv=True)), (x, x, x)


class AcrossTheBatch(timm.layers.Attention):
    """Scores of a sample depend on the others of its batch."""

    def forward(self, x, *args, **kwargs):
        return super().forward(x + x.mean(0, keepdim=True), *args, **kwargs)


def across():
    return randomise_(AcrossTheBatch(12, num_heads=3, gated=True)), tokens(4, 5, 12)


LAYER_NORM = "structured: layer norm on queries and keys"
CASES = {
    gated: ("structured: gated output",) * 2,
    normed: (LAYER_NORM, LAYER_NORM),
    channels: ("structured: cross-covariance attention", "generic derivatives: its kind is cross_covariance"),
    square_sequence_first: ("", ""),
    across: ("", ""),
}
"""How samples are measured one by one, and stacked."""


def rows_of_sample(head, sample, batch_first):
    """Rows of one sample in the Jacobian of the whole call, whose rows are (token, channel)."""
    by_token = head.as_matrix().unflatten(0, (head.num_rows, -1))
    by_sample = by_token.unflatten(0, (4, -1)) if batch_first else by_token.unflatten(0, (-1, 4)).transpose(0, 1)
    return by_sample[sample].flatten(0, 1)


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_samples_and_combine_are_honoured_whatever_the_attention(build):
    module, batch = build()
    [captured] = capture_attention(module, batch)
    assert not captured.is_plain and batch_axis(captured).count == 4
    whole = ModuleJacobian(captured, 1)
    parts = [rows_of_sample(whole, sample, build is not square_sequence_first) for sample in range(4)]
    [one_by_one] = wc.measure(module, batch, samples=3, kappa="pseudo", heads=[1]).layers[0].heads
    for part, kappa in zip(parts[:3], one_by_one.samples, strict=True):
        sigma = torch.linalg.svdvals(part)
        rank = int((sigma > 1e-10 * sigma[0]).sum())
        assert kappa == pytest.approx(float(sigma[0] / sigma[rank - 1]), rel=1e-5)
    [stacked] = wc.measure(module, batch, samples=3, combine="stack", heads=[1]).layers[0].heads
    assert one_by_one.jacobian.shape[0] == len(parts[0])
    assert stacked.jacobian.shape[0] == 3 * len(parts[0]) and len(stacked.samples) == 1
    assert stacked.jacobian.sigma_max == pytest.approx(float(torch.linalg.matrix_norm(torch.cat(parts[:3]), 2)))
    for head, how in zip((one_by_one, stacked), CASES[build], strict=True):
        assert head.how == how or not how


def test_an_image_in_windows_with_masks_is_measured_window_by_window():
    model = randomise_(timm.create_model(
        "swinv2_tiny_window8_256", img_size=16, patch_size=2, window_size=4, embed_dim=12, depths=(2,), num_heads=(3,),
        num_classes=2,
    ))  # fmt: skip
    shifted = capture_attention(model, tokens(2, 3, 16, 16))[1]
    assert batch_axis(shifted).count == 8  # two images of four windows: one window by itself does not fit the masks
    whole = ModuleJacobian(shifted, 0).as_matrix()
    for window in (0, 2):
        found = ModuleJacobian(shifted, 0, samples=[window]).as_matrix()
        assert torch.equal(found, whole[16 * 4 * window : 16 * 4 * (window + 1)])
    with pytest.raises(IndexError, match="expected a sample below 8, got 8"):
        ModuleJacobian(shifted, 0, samples=[8])


class DetachedNorm(nn.LayerNorm):
    """The values of LayerNorm, with statistics that are no part of the derivative."""

    def forward(self, x):
        mean, variance = x.mean(-1, keepdim=True).detach(), x.var(-1, keepdim=True, unbiased=False).detach()
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


@pytest.mark.parametrize("method", ["auto", "implicit"])
def test_statistics_that_are_detached_are_not_differentiated(method):
    module = randomise_(timm.layers.Attention(12, num_heads=3, qk_norm=True, norm_layer=DetachedNorm))
    x = tokens(1, 5, 12)
    plain = normed()[0]
    plain.load_state_dict(module.state_dict())
    [head], [usual] = (wc.measure(m, x, method=method, heads=[1]).layers[0].heads for m in (module, plain))
    assert head.how.startswith("structured") and usual.how.startswith("structured")
    largest = float(torch.linalg.matrix_norm(autograd_of_head(module, x, 1), 2))
    assert head.jacobian.sigma_max == pytest.approx(largest, rel=1e-8)
    assert abs(usual.jacobian.sigma_max / head.jacobian.sigma_max - 1) > 1e-3


def test_a_structured_form_is_believed_with_biases_as_well():
    module = randomise_(timm.layers.Attention(12, num_heads=3, qkv_bias=True, qk_norm=True, norm_layer=nn.LayerNorm))
    [captured] = capture_attention(module, tokens(1, 5, 12))
    for biases in (False, True):
        chosen = select_operator(captured, 0, biases=biases)
        assert chosen.how.startswith("structured")
        assert operator_spectrum(chosen.operator).shape[1] == 3 * 4 * (12 + biases)
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
    with pytest.raises(CopyError):
        ModuleJacobian(capture_attention(model, torch.randn(1, 3, 16, 16))[0])
