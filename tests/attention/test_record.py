"""One observation of a forward pass: every kernel that runs on a CPU, what is not seen, and a model left as it was."""

import contextlib
import dataclasses
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import wellcond as wc
from contracts.harness import appears
from wellcond.attention.kernels import ADDED, is_masked, read_call
from wellcond.attention.record import NESTED, NOT_CALLED, observe, record
from wellcond.errors import WeightError

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
H, D, N = 4, 8, 6
KERNEL = ("products", "logits", "probabilities")


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; no operator of torch shows what happens inside a custom operator."""
    logits = scale * q @ k.mT
    if causal:
        logits = logits.masked_fill(torch.ones(q.shape[-2], k.shape[-2]).triu(1).bool(), -math.inf)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@torch.library.custom_op("record_tests::named", mutates_args=())
def named(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax_attention(q, k, v, D**-0.5)[0]


@torch.library.custom_op("record_tests::nameless", mutates_args=())
def nameless(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    return softmax_attention(first, second, third, D**-0.5)[0]


@torch.library.custom_op("record_tests_flash_attn::_flash_attn_forward", mutates_args=())
def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    out, lse = softmax_attention(*(part.transpose(1, 2) for part in (q, k, v)), softmax_scale, causal)
    return out.transpose(1, 2).contiguous(), lse


@torch.library.custom_op("record_tests_flash_attn::_flash_attn_varlen_forward", mutates_args=())
def varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool) -> Tensor:
    out = torch.empty_like(q)
    for i in range(len(cu_seqlens_q) - 1):
        some = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        parts = (part[some].transpose(0, 1) for part in (q, k, v))
        out[some] = softmax_attention(*parts, D**-0.5, causal)[0].transpose(0, 1)
    return out


@torch.library.custom_op("record_tests::alibi", mutates_args=())
def alibi(query: Tensor, key: Tensor, value: Tensor, slope: float) -> Tensor:
    distance = torch.arange(key.shape[-2]).float()
    return (query @ key.mT * D**-0.5 - slope * distance).softmax(-1) @ value


@torch.library.custom_op("record_tests::packed", mutates_args=())
def packed(qkv: Tensor) -> Tensor:
    return softmax_attention(*qkv.unbind(0), D**-0.5)[0]


def eager(q, k, v):
    return (q @ k.mT * D**-0.5).softmax(-1) @ v


def eager_baddbmm(q, k, v):
    q, k, v = (part.flatten(0, 1) for part in (q, k, v))
    empty = q.new_empty(q.shape[0], q.shape[1], k.shape[1])
    p = torch.baddbmm(empty, q, k.mT, beta=0, alpha=D**-0.5).softmax(-1)
    return torch.bmm(p, v).unflatten(0, (-1, H))


def flex_with_bias(q, k, v):
    slopes = torch.arange(1.0, H + 1)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, N, N, device="cpu")
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j), block_mask=mask)


def flash_causal(q, k, v):
    return flash(*(part.transpose(1, 2) for part in (q, k, v)), 0.0, 0.3, True)[0].transpose(1, 2)


def varlen_causal(q, k, v):
    flat = [part.transpose(1, 2).flatten(0, 1) for part in (q, k, v)]
    begins = torch.arange(0, len(flat[0]) + 1, N, dtype=torch.int32)
    return varlen(*flat, begins, begins, True).unflatten(0, (-1, N)).transpose(1, 2)


def rotate(x):
    angles = torch.arange(x.shape[-2])[:, None] * 10.0 ** -torch.arange(D // 2)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


class Attention(nn.Module):
    """Rotary positions and QK-norm with a gain, before any kernel."""

    def __init__(self, attend=F.scaled_dot_product_attention, rotary=True):
        super().__init__()
        self.num_heads, self.head_dim, self.attend, self.rotary = H, D, attend, rotary
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(H * D, H * D) for _ in range(4))
        self.gain = nn.Parameter(torch.linspace(0.5, 2.0, D))

    def heads(self, x):
        q, k, v = (part(x).unflatten(-1, (H, D)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        if self.rotary:
            q, k = (rotate(F.rms_norm(part, (D,), self.gain)) for part in (q, k))
        return q, k, v

    def forward(self, x):
        return self.o_proj(self.attend(*self.heads(x)).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attend=F.scaled_dot_product_attention, rotary=False):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(H * D), Attention(attend, rotary), nn.Linear(H * D, H * D)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(self.norm(x))


def built(attend, rotary=True, cls=Attention):
    torch.manual_seed(0)
    return cls(attend, rotary), torch.randn(2, N, H * D)


def sites_of(model):
    return wc.find_attention(model, strict=False)


def seen_of(attend, fields=KERNEL, rotary=True):
    model, x = built(attend, rotary)
    [one] = record(model, x, sites_of(model), fields).sites
    with torch.no_grad():
        return one, model.heads(x), model


SEEN = {"eager": eager, "baddbmm": eager_baddbmm, "sdpa": F.scaled_dot_product_attention, "flex": flex_attention,
        "named operator": named, "nameless operator": nameless}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_products_are_those_of_the_kernel_after_rotation_norm_and_gain(name):
    one, (q, k, v), _ = seen_of(SEEN[name])
    logits = q @ k.mT * D**-0.5
    p = logits.softmax(-1)
    torch.testing.assert_close(one.logits.reshape_as(logits), logits)
    torch.testing.assert_close(one.probabilities.reshape_as(logits), p)
    operands = [side for product in one.products for side in product]
    assert all(appears(operands, expected.flatten(0, 1)) for expected in (q, k, p, v))
    assert one.not_seen == {}


def test_flex_attention_with_a_score_mod_and_a_block_mask():
    one, (q, k, _), _ = seen_of(flex_with_bias)
    i, j = torch.arange(N)[:, None], torch.arange(N)
    expected = (q @ k.mT * D**-0.5 - torch.arange(1.0, H + 1)[:, None, None] * (i - j)).masked_fill(i < j, -math.inf)
    torch.testing.assert_close(one.logits, expected)
    assert torch.equal(one.mask.expand_as(expected), (i >= j).expand_as(expected))


def test_flex_attention_whose_score_mod_is_no_function_of_all_positions_at_once():
    def by_item(score, b, h, i, j):
        return score + torch.stack([i, j]).sum()

    one, _, _ = seen_of(lambda q, k, v: flex_attention(q, k, v, score_mod=by_item))
    assert one.logits is None and "score_mod" in one.not_seen["logits"] and "flex_attention" in one.not_seen["logits"]


@pytest.mark.parametrize("attend, scale", [(flash_causal, 0.3), (varlen_causal, D**-0.5)])
def test_an_operator_as_that_of_flash_attn(attend, scale):
    one, (q, k, _), _ = seen_of(attend)
    causal = torch.ones(N, N).tril().bool()
    expected = (q @ k.mT * scale).masked_fill(~causal, -math.inf)
    if attend is flash_causal:
        torch.testing.assert_close(one.logits, expected)
        assert torch.equal(one.mask, causal)
    else:  # two sequences that follow each other
        torch.testing.assert_close(one.logits[:, :N, :N], expected[0])
        torch.testing.assert_close(one.logits[:, N:, N:], expected[1])
        assert bool((one.probabilities[:, :N, N:] == 0).all())


def test_an_operator_that_computes_something_else_is_said_to():
    one, _, _ = seen_of(lambda q, k, v: alibi(q, k, v, 0.5))
    assert one.logits is None and one.mask is None
    assert "softmax(s q k^T) v of its arguments is not what it puts out" in one.not_seen["logits"]
    assert "record_tests.alibi" in one.why_logits_hidden


def test_an_operator_that_shows_nothing_is_said_to():
    one, _, _ = seen_of(lambda q, k, v: packed(torch.stack([q, k, v])))
    assert one.seen and one.logits is None and one.spread is None
    assert set(one.not_seen) == {"logits", "probabilities"}
    assert "record_tests.packed" in one.not_seen["logits"]


def test_the_efficient_backend_by_its_schema():
    q, k, v = (torch.randn(2, H, N, D) for _ in range(3))
    bias = torch.zeros(N, N).masked_fill(torch.ones(N, N).triu(1).bool(), -math.inf)
    operator = torch.ops.aten._scaled_dot_product_efficient_attention.default
    lse = torch.zeros(2, H, 32)  # it pads the rows
    call = read_call(operator, (q, k, v, bias, True), {"scale": 0.2}, (v, lse, None, None))
    assert call.scale == 0.2 and call.mask() is None
    torch.testing.assert_close(call.logits(), 0.2 * q @ k.mT + bias)


def test_what_is_masked():
    logits = torch.tensor([[0.0, -100.0, -800.0, -1e4, -1e9, -math.inf], [-1e9] * 6, [math.nan] * 6])
    assert is_masked(logits)[0].tolist() == [False, False, True, True, True, True]
    assert is_masked(logits, depth=ADDED)[0].tolist() == [False, True, True, True, True, True]
    assert is_masked(logits, depth=math.inf, floor=-9e3)[0].tolist() == [False, False, False, True, True, True]
    assert bool(is_masked(logits)[1:].all())
    visible = torch.tensor([True, True, True, True, False, True])
    assert is_masked(logits, visible)[0].tolist() == [False, False, False, False, True, True]
    assert is_masked(torch.tensor([[-65504.0, -65504.0]], dtype=torch.float16)).all()


def test_tokens_heads_output_and_stream():
    model = nn.Sequential(*(built(eager, False, Block)[0] for _ in range(2)))
    x = torch.randn(2, N, H * D)
    found = record(model, x, sites_of(model), ("arguments", "tokens", "heads", "output", "stream"), outputs=["0.mlp"])
    first, second = found.sites
    with torch.no_grad():
        tokens = model[0].norm(x)
        added = model[0].attn(tokens)
        after = x + added
        mlp = model[0].mlp(model[0].norm(after))
    assert all(torch.equal(first.inputs[role], tokens) for role in ("query", "key", "value"))
    assert torch.equal(first.args[0], tokens) and torch.equal(first.output, added) and first.count == 1
    torch.testing.assert_close(model[0].attn.o_proj(first.heads), added)
    assert first.products == [] and first.logits is None and first.not_seen == {}
    block = first.block
    assert block is found.blocks[0] and block.mlp is model[0].mlp
    for number, tensor in ((block.stream, x), (block.attention["0.attn"], added), (block.mlp_added, mlp)):
        torch.testing.assert_close(number, tensor.square().mean().sqrt())
    torch.testing.assert_close(second.block.stream, (after + mlp).square().mean().sqrt())
    assert torch.equal(found.outputs["0.mlp"], mlp)


def test_kernels_are_dropped_after_each_site():
    model = nn.Sequential(*(built(eager, False, Block)[0] for _ in range(2)))
    shapes = []
    found = record(
        model, torch.randn(2, N, H * D), sites_of(model), KERNEL, each=lambda one: shapes.append(one.logits.shape)
    )
    assert shapes == [(2, H, N, N)] * 2 and all(one.logits is None for one in found.sites)
    assert all("logits" not in one.not_seen for one in found.sites)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = Attention(rotary=False), Attention(rotary=False)

    def forward(self, x):
        return self.used(self.used(x))


def test_what_is_not_called_and_what_is_called_twice():
    model = Outer()
    used, idle = record(model, torch.randn(1, N, H * D), sites_of(model), ("logits", "output")).sites
    assert used.count == 2 and used.seen and used.not_seen == {}
    assert not idle.called and idle.not_seen == {"logits": NOT_CALLED, "output": NOT_CALLED}


def test_an_attention_layer_inside_another():
    inner, outer = Attention(eager, rotary=False), Attention(eager, rotary=False)
    sites = [dataclasses.replace(sites_of(inner)[0], name="inner"), *sites_of(outer)]
    outer.attend = lambda q, k, v: inner(v.transpose(1, 2).flatten(2)).unflatten(-1, (H, D)).transpose(1, 2)
    outer.inner = inner
    found = record(outer, torch.randn(1, N, H * D), sites, ("logits", "arguments"))
    assert found.sites[1].seen and found.sites[0].not_seen == {"logits": NESTED, "arguments": NESTED}
    alone = record(outer, torch.randn(1, N, H * D), sites, ("arguments",))
    assert all(one.seen and one.args[0].shape == (1, N, H * D) for one in alone.sites)


def state(model):
    hooks = [len(h) for m in model.modules() for h in (m._forward_hooks, m._forward_pre_hooks)]
    modes = (torch.utils._python_dispatch._get_current_dispatch_mode(), torch.overrides._get_current_function_mode())
    flags = [m.training for m in model.modules()]
    backends = (torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled())
    return hooks, modes, flags, torch.get_rng_state().tolist(), torch.is_grad_enabled(), backends


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before_also_after_an_error_inside_an_attention(fails):
    def attend(q, k, v):
        torch.rand(3)
        if fails:
            raise KeyError("inside")
        return F.scaled_dot_product_attention(q, k, v)

    model, x = built(eager, False, Block)
    sites = sites_of(model)
    model.attn.attend = attend
    model.norm.eval()
    before = state(model)
    with pytest.raises(KeyError, match="inside") if fails else contextlib.nullcontext():
        record(model, x, sites)
    assert state(model) == before and all(p.grad is None for p in model.parameters())


def test_observing_a_training_step_changes_nothing_of_it():
    block, x = built(F.scaled_dot_product_attention, False, Block)
    model = nn.Sequential(block)
    sites = sites_of(model)

    def gradients():
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    with observe(model, sites, ("logits", "output", "stream")) as found:
        again = gradients()
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    [one] = found.sites
    assert model.training and not one.logits.requires_grad and not one.output.requires_grad
    assert float(one.block.stream) > 0


def test_heads_that_are_spread_over_processes_are_refused(monkeypatch):
    model, x = built(eager, False)
    monkeypatch.setattr("wellcond.attention.record.is_distributed", lambda _: True)
    [one] = record(model, x, sites_of(model), ("spread",)).sites
    assert one.spread.shape == (H,) and one.logits is None
    model.attend = lambda q, k, v: eager(q[:, :2], k[:, :2], v[:, :2]).repeat(1, 2, 1, 1)
    with pytest.raises(WeightError, match="tensor parallelism"):
        record(model, x, [one.site], ("spread",))


def test_measuring_and_calibrating_read_fused_kernels():
    """A kernel that was hidden before: its numbers are those of the same model with plain products."""
    kappas, spreads = [], []
    for attend in (eager, named, flex_attention):
        model, x = built(attend, False, Block)
        report = wc.measure(model, x, kappa="pseudo")
        kappas.append([head.mean_kappa() for head in report.layers[0].heads])
        assert all(head.how == "structured: plain softmax" for head in report.layers[0].heads)
        wc.init_(model, "calibrated", batch=x)
        spreads.append(wc.diagnose(model, x).layers[0].logit_spread)
    assert kappas[1] == pytest.approx(kappas[0], rel=1e-3) and kappas[2] == pytest.approx(kappas[0], rel=1e-3)
    assert spreads == [pytest.approx(1.0, rel=0.05)] * 3


def test_what_compiles_nothing_loads_no_compiler():
    """It takes three seconds, in every process that finds, calibrates or measures."""
    code = (
        "import sys, torch, wellcond; from torch import nn; from models import stack;"
        "layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True);"
        "model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 4, 12);"
        "wellcond.init_(model, 'calibrated', batch=x); wellcond.find_attention(stack());"
        "assert wellcond.measure(model, x, layers=[0], heads=[0]).layers;"
        "print('torch._dynamo' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["False"]
