"""Any attention, differentiated through its own module: values, products, finite differences."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import timm
import torch
from torch import Tensor, nn

import wellcond as wc
from contracts import cases_hf, cases_timm
from contracts.harness import randomise_
from wellcond.errors import ReplayError, WeightError
from wellcond.jacobian.capture import CapturedAttention, capture_attention
from wellcond.jacobian.module import ModuleJacobian
from wellcond.jacobian.softmax import dense_jacobian
from wellcond.linalg.lanczos import largest_eigenvalue

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

BUILD = {f"timm-{name}": (case.build, case.input) for name, case in cases_timm.CASES.items()}
BUILD |= {f"hf-{case.name}": (case.build, case.inputs) for case in cases_hf.CASES}
# The model itself rounds to float32 somewhere; its copy in float64 does not.
FLOAT32 = {f"hf-{case.name}" for case in cases_hf.CASES if case.in_float32} | {"timm-pool_2d_rotary", "hf-qwen3-next"}
DIFFERENCED = [
    "hf-llama", "hf-qwen3", "hf-qwen3-next", "hf-nystromformer", "hf-gemma2", "hf-gpt-oss", "hf-esm", "hf-modernbert",
    "timm-cait", "timm-swin_v2", "timm-xcit", "timm-davit", "timm-vit_qk_norm", "timm-eva_separate",
    "timm-multi_query", "timm-sam", "timm-halo", "timm-bottleneck",
]  # fmt: skip


@cache
def captured_from(family: str) -> tuple[nn.Module, tuple[CapturedAttention, ...]]:
    torch.manual_seed(0)
    build, make_input = BUILD[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = randomise_(build())
    return model, tuple(capture_attention(model, make_input()))


def head_of(family: str) -> ModuleJacobian:
    """The last key/value head of the first attention that is not plain."""
    captured = next(c for c in captured_from(family)[1] if not c.is_plain)
    return ModuleJacobian(captured, captured.site.num_kv_heads - 1)


def read_by_output(model: nn.Module, captured: CapturedAttention, family: str) -> Tensor:
    """What the model itself hands to W_O (or its attention returns), by head: (H, tokens, dv)."""
    site, seen = captured.site, []
    if site.o is not None:
        handle = site.o.owner.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    else:
        handle = site.module.register_forward_hook(lambda module, args, output: seen.append(output))
    batch = BUILD[family][1]()
    with torch.no_grad():
        model(**batch) if isinstance(batch, dict) else model(batch)
    handle.remove()
    owner = site.q.owner if site.o is None else site.o.owner
    heads = seen[0].movedim(1, -1) if isinstance(owner, nn.Conv2d) else seen[0]
    heads = heads.reshape(-1, heads.shape[-1])
    rows = torch.arange(heads.shape[1]).view(site.num_heads, -1) if site.o is None else site.o.rows
    return heads[:, rows].transpose(0, 1)


@pytest.mark.parametrize("family", BUILD)
def test_every_family_runs_again_in_float64(family):
    """Values are the model's own, whether the attention is plain or not."""
    model, everything = captured_from(family)
    for captured in everything:
        head = ModuleJacobian(captured, 0)
        if captured.site.o is None and captured.is_plain or captured.site.name.endswith("head.attention"):
            continue  # mixed before they are returned, or not read by a module: see the tests below
        tolerance = 1e-6 if family in FLOAT32 else 1e-8
        expected = read_by_output(model, captured, family)[captured.query_heads(0)]
        torch.testing.assert_close(head.output(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", DIFFERENCED)
def test_jacobian_is_the_limit_of_differences(family):
    head = head_of(family)
    jacobian = head.as_matrix()
    assert jacobian.shape == head.shape
    weights = head.flatten(head.w_q, head.w_k, head.w_v)
    generator = torch.Generator().manual_seed(0)
    directions = torch.eye(head.shape[1], dtype=torch.float64)[torch.randperm(head.shape[1], generator=generator)[:12]]
    directions = torch.cat([directions, torch.randn(2, head.shape[1], generator=generator, dtype=torch.float64)])
    step = 1e-5
    for v in directions:
        with torch.no_grad():
            ahead, behind = (head.output(*head.unflatten(weights + sign * step * v)).flatten() for sign in (1, -1))
        expected = (ahead - behind) / (2 * step)
        torch.testing.assert_close(jacobian @ v, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max() + 1e-3))
        torch.testing.assert_close(head.matvec(v), jacobian @ v, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["hf-llama", "timm-cait", "timm-swin_v2", "hf-nystromformer"])
def test_products_are_those_of_the_explicit_jacobian(family):
    head = head_of(family)
    jacobian = head.as_matrix()
    u = torch.randn(head.shape[0], dtype=torch.float64)
    v = torch.randn(head.shape[1], dtype=torch.float64)
    torch.testing.assert_close(head.rmatvec(u), jacobian.T @ u)
    torch.testing.assert_close(head.gram().matvec(u), jacobian @ (jacobian.T @ u))
    torch.testing.assert_close(head.matvec(v), jacobian @ v)
    top = largest_eigenvalue(head.gram().matvec, head.shape[0])
    assert top.value**0.5 == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)), rel=1e-6)


@pytest.mark.parametrize("family", ["timm-vit", "timm-swin", "hf-gpt2", "hf-t5", "hf-cohere2", "timm-attention_2d"])
def test_plain_heads_have_the_same_jacobian_in_both_ways(family):
    for captured in captured_from(family)[1]:
        if not captured.is_plain:
            continue
        plain = torch.cat(list(dense_jacobian(captured.head(0, None)).values()), dim=1)
        torch.testing.assert_close(ModuleJacobian(captured, 0).as_matrix(), plain, rtol=1e-10, atol=1e-10)


def test_null_space_that_is_known_holds():
    for family in ("hf-llama", "timm-multi_query", "timm-xcit"):
        head = head_of(family)
        rank = int(torch.linalg.matrix_rank(head.as_matrix(), rtol=1e-11))
        assert rank <= head.rank_bound().rank


def test_tokens_that_span_little_bound_the_rank():
    attention = randomise_(timm.layers.Attention(12, num_heads=3, qk_norm=True, norm_layer=nn.LayerNorm))
    x = torch.randn(1, 40, 3, dtype=torch.float64) @ torch.randn(3, 12, dtype=torch.float64)
    [captured] = capture_attention(attention, x)
    bound = ModuleJacobian(captured).rank_bound()
    assert bound.memory_rank == 3 and bound.rank == 3 * 4 * 3
    assert "outside the span of the tokens: 108" in bound.null_space


def test_gated_output_is_part_of_the_function():
    attention = randomise_(timm.layers.Attention(12, num_heads=4, gated=True))
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    [captured] = capture_attention(attention, x)
    assert captured.why_not_plain == "gated output"
    head = ModuleJacobian(captured, 1)
    plain = timm.layers.Attention(12, num_heads=4).double()
    plain.load_state_dict(attention.state_dict(), strict=False)
    ungated = capture_attention(plain, x)[0].head(1, None).output()
    gate = attention.gate(x).sigmoid().flatten(0, 1)[:, 3:6]
    torch.testing.assert_close(head.output(), ungated * gate.detach())


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 6}, {"add_bias_kv": True}, {"bias": False}])
def test_torch_attention_whose_output_projection_is_no_call(options):
    module = randomise_(nn.MultiheadAttention(8, 2, **options))
    x, y = torch.randn(4, 3, 8, dtype=torch.float64), torch.randn(5, 3, options.get("kdim", 8), dtype=torch.float64)
    [captured] = capture_attention(module, (x, y, 2 * y))
    heads = [ModuleJacobian(captured, kv) for kv in range(2)]
    concatenated = torch.cat([head.output()[0] for head in heads], dim=-1).view(4, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(module.out_proj(concatenated), module(x, y, 2 * y)[0])


def test_module_without_output_projection_that_mixes_heads_is_taken_whole():
    _, [captured] = captured_from("timm-cpubone")
    assert captured.site.o is None
    head = ModuleJacobian(captured, 0)
    assert head.output().shape == (1, 9, 64)


@pytest.mark.parametrize("method, options", [("balanced", {}), ("identity", {"lam": 0.5})])
def test_conditioned_models_give_their_effective_weights(method, options):
    [case] = [case for case in cases_hf.CASES if case.name == "llama"]
    model = randomise_(case.build())
    wc.condition_(model, method, **options)
    captured = capture_attention(model, case.inputs())[0]
    head = ModuleJacobian(captured, 1)
    torch.testing.assert_close(head.w_k, captured.site.k.read()[1].detach())
    found = head.as_matrix()
    wc.fold_(model)
    with pytest.raises(WeightError, match="not those that the forward pass used"):
        ModuleJacobian(captured, 1)
    folded = ModuleJacobian(capture_attention(model, case.inputs())[0], 1)
    torch.testing.assert_close(found, folded.as_matrix(), rtol=1e-8, atol=1e-9)


def test_float32_models_are_run_again_in_float64():
    [case] = [case for case in cases_hf.CASES if case.name == "gemma2"]
    torch.manual_seed(0)
    model = case.build()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    captured = capture_attention(model, case.inputs())[0]
    head = ModuleJacobian(captured, 0)
    assert head.output().dtype == torch.float64
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert next(model.parameters()).dtype == torch.float32


class Through(nn.Module):
    """Applies an autograd function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


def _as_vit(module: nn.Module) -> list[wc.AttentionSite]:
    from wellcond.attention.site import ModuleContext

    return [wc.fused_site(ModuleContext("", module, module), module.qkv, num_heads=4, output=module.proj, scale=0.5)]


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
    x = torch.randn(1, 4, 12, dtype=torch.float64)
    right = ModuleJacobian(capture_attention(module, x, sites=_as_vit(module))[0], 0).as_matrix()
    module.q_norm = Through(Doubled)
    head = ModuleJacobian(capture_attention(module, x, sites=_as_vit(module))[0], 0)
    jacobian, queries = head.as_matrix(), head.w_q.numel()
    torch.testing.assert_close(jacobian[:, :queries], 2 * right[:, :queries])
    torch.testing.assert_close(jacobian[:, queries:], right[:, queries:])
    v = torch.randn(head.shape[1], dtype=torch.float64)
    torch.testing.assert_close(head.matvec(v), jacobian @ v)


def test_modules_that_remember_are_refused():
    class Counting(timm.layers.Attention):
        count = 0

        def forward(self, x):
            self.count += 1
            return super().forward(x * self.count)

    module = randomise_(Counting(12, num_heads=4))
    [captured] = capture_attention(module, torch.randn(1, 4, 12, dtype=torch.float64), sites=_as_vit(module))
    with pytest.raises(ReplayError, match="more than its arguments"):
        ModuleJacobian(captured, 0)


def test_what_was_not_called_has_no_generic_head():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = (timm.layers.Attention(12, num_heads=3) for _ in range(2))

        def forward(self, x):
            return self.one(x)

    captured = capture_attention(Half(), torch.randn(1, 4, 12))[1]
    with pytest.raises(ValueError, match="does not call it"):
        ModuleJacobian(captured)
    with pytest.raises(IndexError, match="below"):
        ModuleJacobian(capture_attention(Half(), torch.randn(1, 4, 12))[0], 99)
