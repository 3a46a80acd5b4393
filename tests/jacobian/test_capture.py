"""What is captured from a model's own forward pass rebuilds its heads, and their Jacobian, in float64."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from functools import cache
from typing import Any

import pytest
import timm
import torch
import transformers as tf
from torch import Tensor, nn

import wellcond as wc
from contracts import cases_hf, cases_timm
from contracts.harness import Seen, columns, randomise_
from models import NanoGPTAttention, XTransformersAttention, stack
from wellcond.attention.site import AttentionSite
from wellcond.errors import NotPlainError, WeightError
from wellcond.jacobian.capture import CapturedAttention, capture_attention
from wellcond.jacobian.softmax import dense_jacobian

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

HF = {case.name: case for case in cases_hf.CASES}
# What the recorded products cannot show to be softmax(s Q K^T + bias) V of the captured tokens, and why.
NOT_PLAIN_TIMM = {
    "vit_qk_norm": "normalised", "vit_rms_norm": "normalised", "vit_scale_norm": "output norm", "eva_fused": "rotary",
    "eva_separate": "rotary", "rope_grouped": "rotary", "rope_fused": "rotary", "sam": "query position term",
    "swin_v2": "normalised", "swin_v2_cr": "normalised", "edgenext": "cross_covariance",
    "multi_query": "different tokens", "bottleneck": "query position term", "halo": "query position term",
    "pool_2d_rotary": "rotary",
}  # fmt: skip
NOT_PLAIN_HF = {
    "modernbert": "rotary", "nystromformer": "nystrom", "gpt-neox": "rotary", "falcon-new": "rotary",
    "falcon-multi-query": "rotary", "llama": "rotary", "mistral": "rotary", "qwen2": "rotary", "qwen3": "rotary",
    "qwen3-next": "gated output", "phi3": "rotary", "codegen": "rotary", "gptj": "rotary", "persimmon": "rotary",
    "gemma2": "logit softcap", "gpt-oss": "attention sinks", "esm": "rotary", "olmo2": "rotary",
}  # fmt: skip
PARTLY = {"xcit", "davit", "davit_v2", "cait", "cohere2"}


@cache
def timm_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return randomise_(cases_timm.CASES[name].build())


@cache
def hf_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return randomise_(HF[name].build())


def all_heads(captured: CapturedAttention) -> Tensor:
    """Recomputed output of every head on every sample, (L, N, H, dv)."""
    groups = range(captured.site.num_kv_heads)
    by_sample = [
        torch.cat([captured.head(kv, sample).output() for kv in groups]) for sample in range(captured.num_samples)
    ]
    return torch.stack(by_sample).transpose(1, 2)


def read_by_output(model: nn.Module, site: AttentionSite, run: Any, *, grad: bool = False) -> Tensor:
    """What the model itself hands to W_O, by head: (tokens, H, dv)."""
    seen: list[Tensor] = []
    assert site.o is not None
    handle = site.o.owner.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        with torch.set_grad_enabled(grad):
            run()
    finally:
        handle.remove()
    heads = seen[0].movedim(1, -1) if isinstance(site.o.owner, nn.Conv2d) else seen[0]
    return heads.reshape(-1, heads.shape[-1])[:, site.o.rows]


@pytest.mark.parametrize("name", cases_timm.CASES)
def test_heads_of_timm_families_are_rebuilt(name):
    case, model = cases_timm.CASES[name], timm_model(name)
    for captured in capture_attention(model, case.input()):
        site = captured.site
        assert captured.is_plain == (not captured.why_not_plain)
        if name in NOT_PLAIN_TIMM:
            assert NOT_PLAIN_TIMM[name] in captured.why_not_plain
        if not captured.is_plain:
            assert name in NOT_PLAIN_TIMM or name in PARTLY
            continue
        found = all_heads(captured)
        expected = Seen(case, model, site).concatenated_heads()[..., columns(site)]
        torch.testing.assert_close(found.reshape(expected.shape), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", HF)
def test_heads_of_hugging_face_families_are_rebuilt(name):
    case, model = HF[name], hf_model(name)
    inputs = case.inputs()
    for captured in capture_attention(model, inputs):
        if name in NOT_PLAIN_HF:
            assert NOT_PLAIN_HF[name] in captured.why_not_plain
        if not captured.is_plain:
            assert name in NOT_PLAIN_HF or name in PARTLY
            continue
        found = all_heads(captured).flatten(0, 1)
        if captured.site.name.endswith("head.attention"):  # SigLIP's nn.MultiheadAttention does not call its out_proj
            continue
        expected = read_by_output(model, captured.site, lambda: model(**inputs))
        tolerance = 1e-6 if case.in_float32 else 1e-8
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def autograd_jacobian(model: nn.Module, captured: CapturedAttention, run: Any, kv_head: int) -> dict[str, Tensor]:
    """Derivatives of the model's own heads by the rows of its stored weights, in the order of `dense_jacobian`."""
    site, group = captured.site, captured.query_heads(kv_head)
    outputs = read_by_output(model, site, run, grad=True)[:, group].transpose(0, 1).flatten()
    blocks: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
    slots = {role: site.by_role(name) for role, name in (("q", "query"), ("k", "key"), ("v", "value"))}
    for output in outputs:
        for role, slot in slots.items():
            [gradient] = torch.autograd.grad(output, slot.parameter, retain_graph=True)
            heads = slot.take_heads(gradient)
            heads = heads[group] if role == "q" else heads[kv_head : kv_head + 1]
            blocks[role].append(heads.mT.flatten())
    return {role: torch.stack(rows) for role, rows in blocks.items()}


@pytest.mark.parametrize(
    ("family", "name", "index"),
    [
        ("timm", "vit", 0),
        ("timm", "beit", 0),
        ("timm", "swin", 1),  # shifted windows
        ("timm", "vit_map_pool", 1),
        ("timm", "attention_2d", 0),
        ("timm", "maxvit_2d", 0),
        ("hf", "gpt2", 0),
        ("hf", "t5", 2),
        ("hf", "t5", 3),
        ("hf", "cohere2", 1),
        ("hf", "gpt-bigcode", 0),
        ("hf", "falcon-old-alibi", 0),
    ],
)
def test_jacobian_is_that_of_the_stored_weights(family, name, index):
    model = timm_model(name) if family == "timm" else hf_model(name)
    batch = cases_timm.CASES[name].input() if family == "timm" else HF[name].inputs()
    captured = capture_attention(model, batch)[index]
    kv_head = captured.site.num_kv_heads - 1
    found = dense_jacobian(captured.head(kv_head, None))
    run = (lambda: model(batch)) if isinstance(batch, Tensor) else (lambda: model(**batch))
    expected = autograd_jacobian(model, captured, run, kv_head)
    for role in "qkv":
        torch.testing.assert_close(found[role], expected[role], rtol=1e-8, atol=1e-8, msg=role)


def vit(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, **cases_timm.VIT | {"depth": 2}, **options)


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_capture_leaves_the_model_as_it_was():
    model = vit(proj_drop_rate=0.5)
    model.train()
    model.blocks[1].eval()
    calls: list[int] = []
    model.blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))

    def state() -> Any:
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        flags = [m.training for m in model.modules()]
        grads = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
        return hooks, flags, grads, torch.get_rng_state().tolist(), torch.is_grad_enabled()

    def loss_and_gradient() -> tuple[float, list[Tensor]]:
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(images()).square().sum()
        loss.backward()
        return loss.item(), [p.grad.clone() for p in model.parameters()]

    loss, gradients = loss_and_gradient()
    before = state()
    capture_attention(model, images())
    after = state()
    assert before[:2] == after[:2] and before[3:] == after[3:]
    assert all(torch.equal(a, b) for a, b in zip(before[2], after[2], strict=True))
    again, gradients_again = loss_and_gradient()
    assert loss == again and all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
    assert len(calls) == 3  # the user's own hook saw the capture too


def test_capture_leaves_no_hook_after_an_error():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = stack(depth=1)
            self.train()

        def forward(self, x):
            self.body(x)
            raise KeyError("afterwards")

    model = Fails()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(KeyError, match="afterwards"):
        capture_attention(model, torch.randn(1, 4, 12))
    assert all(not m._forward_hooks and not m._forward_pre_hooks and m.training for m in model.modules())
    assert torch.backends.mha.get_fastpath_enabled() == fastpath
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_position_biases_kept_for_evaluation_are_forgotten_again():
    """EfficientFormer keeps its biases in evaluation mode until train() is called; they must not become stale."""
    model = cases_timm.CASES["efficientformer"].build()
    model[0].train()
    x = torch.randn(1, 9, 12)
    capture_attention(model, x)
    with torch.no_grad():
        model[0].attention_biases.add_(torch.randn_like(model[0].attention_biases))
    fresh = cases_timm.CASES["efficientformer"].build()
    fresh.load_state_dict(model.state_dict())
    for each in (model[0], fresh[0]):
        each.eval()
    assert torch.equal(model[0](x), fresh[0](x))


def test_samples_of_a_batch_are_apart_and_can_be_stacked():
    model = randomise_(vit())
    x = images(3).double()
    captured = capture_attention(model, x)[0]
    assert captured.x.shape == (3, 5, 12) and captured.memory is None and captured.logit_bias is None
    expected = read_by_output(model, captured.site, lambda: model(x))
    torch.testing.assert_close(all_heads(captured).flatten(0, 1), expected, rtol=1e-10, atol=1e-10)
    stacked = captured.head(1, None)
    torch.testing.assert_close(stacked.output()[0], expected[:, 1], rtol=1e-10, atol=1e-10)
    two = captured.head(1, [2, 0])
    torch.testing.assert_close(two.output()[0, :5], captured.head(1, 2).output()[0])
    assert [c.num_samples for c in capture_attention(model, x, max_samples=2)] == [2, 2]


def test_stacked_jacobian_is_the_rows_of_its_samples():
    captured = capture_attention(randomise_(vit()), images(2).double())[0]
    stacked = dense_jacobian(captured.head(0, None))
    for role, block in stacked.items():
        rows = [dense_jacobian(captured.head(0, sample))[role] for sample in range(2)]
        torch.testing.assert_close(block, torch.cat(rows))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_is_masked(implementation):
    model = randomise_(tf.BertModel(tf.BertConfig(**cases_hf.BERT, attn_implementation=implementation)))
    batch = {"input_ids": torch.randint(5, 32, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    batch["attention_mask"][1, 4:] = 0
    for captured in capture_attention(model, batch):
        assert captured.is_plain
        hidden = captured.logit_bias == -torch.inf
        assert not hidden[0].any() and hidden[1, :, :, 4:].all() and not hidden[1, :, :, :4].any()
        assert torch.equal(captured.logit_bias.nan_to_num(neginf=0.0), torch.zeros_like(captured.logit_bias))
        expected = read_by_output(model, captured.site, lambda: model(**batch))
        torch.testing.assert_close(all_heads(captured).flatten(0, 1), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_queries_that_see_nothing_are_left_out(implementation, dtype):
    model = randomise_(tf.GPT2Model(tf.GPT2Config(**cases_hf.GPT2, attn_implementation=implementation))).to(dtype)
    batch = {"input_ids": torch.randint(5, 32, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    batch["attention_mask"][0, :2] = 0  # padding on the left of a causal model
    captured = capture_attention(model, batch)[0]
    padded, whole = captured.head(0, 0), captured.head(0, 1)
    assert padded.num_tokens == 4 and padded.memory.shape[0] == 6 and whole.num_tokens == 6 and whole.y is None
    stacked = captured.head(0, None)
    assert stacked.num_tokens == 10
    expected = read_by_output(model, captured.site, lambda: model(**batch))[2:, 0].double()
    close = {"rtol": 1e-8, "atol": 1e-8} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(stacked.output()[0], expected, **close)


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_weights_of_zero_do_not_lose_the_order_of_the_tokens(role):
    """Hiera's windows are every sixteenth token; a projection of zero (muP's queries) agrees with any order."""
    case = cases_timm.CASES["hiera"]
    model = randomise_(case.build())
    site = wc.find_attention(model, strict=False)[0]
    expected = capture_attention(model, case.input(), sites=[site])[0].x
    slot = site.slots[role]
    slot.write_(torch.zeros_like(slot.read()))
    slot.write_bias_(torch.zeros_like(slot.read_bias()))
    [captured] = capture_attention(model, case.input(), sites=[site])
    assert captured.is_plain and torch.equal(captured.x, expected) and captured.memory is None


def test_equal_values_of_different_tokens_are_not_plain():
    """With W_V = 0 the values are the same, but the Jacobian by W_V is that of the tokens that made them."""
    module = nn.MultiheadAttention(8, 2)
    x = torch.randn(5, 8)
    with torch.no_grad():
        module.in_proj_weight[16:] = 0
    assert "different tokens" in capture_attention(module, (x, x, x + 1))[0].why_not_plain
    assert capture_attention(module, (x, x, x))[0].is_plain


def test_causal_mask_is_exact():
    captured = capture_attention(hf_model("gpt2"), HF["gpt2"].inputs())[0]
    above = torch.ones(6, 6, dtype=torch.bool).triu(1)
    assert captured.logit_bias.shape == (1, 3, 6, 6)
    assert (captured.logit_bias[..., above] == -torch.inf).all() and (captured.logit_bias[..., ~above] == 0).all()


def test_shifted_windows_carry_bias_and_mask():
    model = timm_model("swin")
    plain, shifted, _ = capture_attention(model, torch.cat([cases_timm.image(), -cases_timm.image()]))
    assert plain.x.shape == shifted.x.shape == (8, 16, 8)
    with torch.no_grad():
        table = plain.site.module._get_rel_pos_bias()
        mask = shifted.site.module._get_rel_pos_bias() + model.layers[0].blocks[1].attn_mask[:, None].repeat(2, 1, 1, 1)
    torch.testing.assert_close(plain.logit_bias, table.expand(8, -1, -1, -1))
    torch.testing.assert_close(shifted.logit_bias, mask.expand(8, -1, -1, -1))
    stacked = shifted.head(1, None)
    torch.testing.assert_close(stacked.output()[0].view(8, 16, 4), all_heads(shifted)[:, :, 1])


def test_cross_attention_and_grouped_queries():
    captured = capture_attention(hf_model("bert-decoder"), HF["bert-decoder"].inputs())
    crossing = [c for c in captured if c.site.cross]
    assert [c.memory.shape for c in crossing] == [(1, 4, 24)] * 2 and all(c.is_plain for c in crossing)
    grouped = capture_attention(hf_model("cohere2"), HF["cohere2"].inputs())[1]
    assert grouped.head(1).num_query_heads == 3 and grouped.query_heads(1) == slice(3, 6)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = XTransformersAttention()
        self.unused = XTransformersAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(self.attn(x))


def test_first_call_is_kept_and_a_site_that_is_not_called_says_so():
    model = randomise_(Twice())
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    used, unused = capture_attention(model, x)
    assert used.is_plain and "called 2 times" in used.note and torch.equal(used.x, x)
    assert not unused.is_plain and unused.x is None and "does not call it" in unused.why_not_plain
    with pytest.raises(NotPlainError, match="does not call it"):
        unused.head(0)
    with pytest.raises(ValueError, match="never calls unused"):
        capture_attention(model, x, sites=[unused.site])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["vit", "swin", "eva_no_rope", "pvt_v2"])
def test_other_dtypes_agree_to_their_rounding(name, dtype):
    torch.manual_seed(0)
    model = cases_timm.CASES[name].build().to(dtype)
    batch = cases_timm.CASES[name].input().to(dtype)
    for captured in capture_attention(model, batch):
        assert captured.is_plain, captured.why_not_plain
        assert captured.dtype == captured.x.dtype == dtype
        assert captured.site.relative_position_bias == (captured.logit_bias is not None)
        found = torch.stack([captured.head(h).probabilities()[0] for h in range(captured.site.num_heads)])
        torch.testing.assert_close(found, captured.probabilities[0].double(), rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("method, options", [("balanced", {}), ("identity", {"lam": 0.5})])
def test_conditioned_models_give_their_effective_weights(method, options):
    model = randomise_(vit())
    x = images().double()
    wc.condition_(model, method, **options)
    conditioned = capture_attention(model, x)[1]
    assert conditioned.is_plain
    torch.testing.assert_close(conditioned.head(2).w_k, conditioned.site.k.read()[2])
    assert not torch.allclose(conditioned.head(2).w_k, conditioned.site.k.read_raw()[2])
    expected = read_by_output(model, conditioned.site, lambda: model(x))
    torch.testing.assert_close(all_heads(conditioned).flatten(0, 1), expected, rtol=1e-9, atol=1e-9)
    wc.fold_(model)
    with pytest.raises(WeightError, match="not those that the forward pass used"):
        conditioned.head(2)


def test_conditioned_weights_that_are_used_without_their_module():
    model = randomise_(cases_timm.CASES["beit"].build())
    wc.condition_(model, "polar")
    [captured] = capture_attention(model, cases_timm.image())
    assert captured.is_plain
    expected = read_by_output(model, captured.site, lambda: model(cases_timm.image()))
    torch.testing.assert_close(all_heads(captured).flatten(0, 1), expected, rtol=1e-9, atol=1e-9)


def test_weights_written_after_the_capture_are_noticed():
    model = randomise_(vit())
    captured = capture_attention(model, images().double())[0]
    with torch.no_grad():
        captured.site.q.parameter.mul_(2)
    with pytest.raises(WeightError, match="not those that the forward pass used"):
        captured.head(0)


def test_not_finite_activations_name_their_layer():
    model = randomise_(vit())
    with torch.no_grad():
        model.blocks[1].norm1.weight[3] = torch.nan
    with pytest.raises(WeightError, match=r"blocks\.1\.attn: the query projection reads NaN"):
        capture_attention(model, images().double())


def test_a_row_masked_to_nan_names_its_layer():
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 3, 8)
    mask = torch.zeros(3, 3).masked_fill(torch.eye(3) == 1, -torch.inf)
    mask[0] = -torch.inf
    with pytest.raises(WeightError, match="masked from everything"):
        capture_attention(module, {"query": x, "key": x, "value": x, "attn_mask": mask})


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_torch_attention_in_every_calling_style(batch_first, need_weights):
    module = randomise_(nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=batch_first))
    x, y = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(3, 5, 6, dtype=torch.float64)
    mask = torch.randn(4, 5, dtype=torch.float64)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    shaped = (x, y) if batch_first else (x.transpose(0, 1), y.transpose(0, 1))
    batch = {"query": shaped[0], "key": shaped[1], "value": shaped[1], "attn_mask": mask, "need_weights": need_weights}
    # torch wants both masks in one dtype
    batch["key_padding_mask"] = torch.zeros(3, 5, dtype=torch.float64).masked_fill(padding, -torch.inf)
    [captured] = capture_attention(module, batch)
    assert captured.is_plain and torch.equal(captured.x, x) and torch.equal(captured.memory, y)
    expected = mask.expand(3, 2, 4, 5).masked_fill(padding[:, None, None], -torch.inf)
    torch.testing.assert_close(captured.logit_bias, expected)
    with torch.no_grad():
        output = module(**batch)[0]
        rebuilt = all_heads(captured).flatten(-2) @ module.out_proj.weight.T + module.out_proj.bias
    torch.testing.assert_close(rebuilt, output if batch_first else output.transpose(0, 1))


def test_transformer_layers_of_torch_do_not_take_the_fast_path():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    captured = capture_attention(encoder, {"src": x, "src_key_padding_mask": padding})
    assert all(c.is_plain for c in captured) and torch.equal(captured[0].x, x)
    assert (captured[1].logit_bias[1, :, :, 3:] == -torch.inf).all()


def test_keys_and_values_of_different_tokens_are_not_plain():
    module = nn.MultiheadAttention(8, 2)
    x = torch.randn(5, 8)
    [captured] = capture_attention(module, (x, x, x + 1))
    assert "different tokens" in captured.why_not_plain


def test_one_token():
    module = randomise_(nn.MultiheadAttention(8, 2))
    x = torch.randn(1, 8, dtype=torch.float64)
    [captured] = capture_attention(module, (x, x, x))
    jacobian = dense_jacobian(captured.head(0))
    assert captured.x.shape == (1, 1, 8) and not jacobian["q"].any() and not jacobian["k"].any()


def test_logits_that_nothing_declared_explains_are_not_plain():
    class Tilted(NanoGPTAttention):
        def forward(self, x: Tensor) -> Tensor:
            B, T, C = x.shape
            q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(self.n_embd, dim=2))
            att = q @ k.mT * self.scale + self.tilt * torch.arange(T)
            return self.c_proj((att.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))

    module = randomise_(Tilted())
    module.scale, module.tilt = 0.5, 0.0
    [site] = wc.find_attention(module)
    assert site.evidence == "forward" and site.scale == pytest.approx(0.5)
    x = torch.randn(1, 4, 12, dtype=torch.float64)
    assert capture_attention(module, x, sites=[site])[0].is_plain
    module.tilt = 0.1
    assert "nothing declared" in capture_attention(module, x, sites=[site])[0].why_not_plain
    module.scale, module.tilt = 0.7, 0.0
    assert "nothing declared" in capture_attention(module, x, sites=[site])[0].why_not_plain


def test_unknown_classes_seen_by_structure_only_are_not_plain():
    site = wc.find_attention(XTransformersAttention())[0]
    assert site.evidence == "forward"
    module = copy.deepcopy(site.module)
    guessed = dataclasses.replace(wc.find_attention(module)[0], evidence="structure")
    [captured] = capture_attention(module, torch.randn(1, 4, 12), sites=[guessed])
    assert "only the place" in captured.why_not_plain and captured.x.shape == (1, 4, 12)


@pytest.mark.parametrize("kv_head, sample, what", [(4, 0, "head below 4"), (0, 2, "sample below 2"), (-1, 0, "head")])
def test_heads_and_samples_that_do_not_exist(kv_head, sample, what):
    captured = capture_attention(vit(), images(2))[0]
    with pytest.raises(IndexError, match=what):
        captured.head(kv_head, sample)


def test_compiled_models_are_run_as_they_were_written():
    model = torch.compile(vit(), backend="eager")
    captured = capture_attention(model, images())
    assert [c.is_plain for c in captured] == [True, True]
